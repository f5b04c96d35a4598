"""What tests share: golden checkpoints, ground truth, and a plain way to read a tensor."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from converters.dtypes import TYPES
from converters.formats.folder import open_source
from converters.megatron.split import shards
from converters.remote.address import RemotePath

if TYPE_CHECKING:
    from collections.abc import Iterator

    from converters.catalog import TensorInfo
    from converters.formats.base import Reader

GOLDEN = Path(__file__).parents[1] / "golden"
_UNSIGNED = {1: "u1", 2: "<u2", 4: "<u4", 8: "<u8"}


@contextlib.contextmanager
def nobody(place: Path) -> Iterator[None]:
    """For a while, permissions bind this process, also where tests run as root; `place` can be reached."""
    for folder in (place, *place.parents):
        if folder.stat().st_uid == os.getuid() and folder.stat().st_mode & 0o077 == 0:
            folder.chmod(0o755)
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@lru_cache(maxsize=4)
def _fetched(path: RemotePath) -> str:
    """A copy in memory of an object, for as long as this process lives."""
    fd = os.memfd_create("object")
    with open_source(path) as source:
        os.write(fd, source.read(0, source.size))
    return f"/proc/self/fd/{fd}"


def read_tensor(reader: Reader, info: TensorInfo) -> np.ndarray:
    """The elements of a tensor as unsigned integers of their size: a slow, obvious reference for the engine."""
    if info.remainders is not None and info.remainders.weight is not None:
        stored = read_tensor(reader, replace(info, dtype=info.remainders.dtype, remainders=None))
        lower = stored.view("<f4" if info.remainders.dtype.floating else "<i2").astype(np.int64)
        upper = read_tensor(reader, info.remainders.weight)[: len(stored)].astype(np.int64)
        return (((upper - (lower < 0)) << 16) | (lower & 0xFFFF)).astype("<u4")
    out = np.full(info.shape, 0xA5, _UNSIGNED[info.dtype.itemsize])
    count = np.zeros(info.shape, np.int64)
    for chunk in info.chunks():
        path = reader.files[reader.file_of(chunk.record)]
        if isinstance(path, RemotePath):
            path = _fetched(path)
        fd = os.open(path, os.O_RDONLY)
        try:
            payload = reader.locate(chunk.record, lambda at, n, fd=fd: os.pread(fd, n, at))
            raw = os.pread(fd, payload.nbytes, payload.offset)
        finally:
            os.close(fd)
        flat = np.frombuffer(raw, out.dtype)[chunk.base : chunk.base + chunk.box.volume]
        out[chunk.box.slices] = flat.reshape(chunk.box.shape)
        count[chunk.box.slices] += 1
    assert (count == 1).all(), f"{info.name}: not every element is stored once"
    return out


def load_safetensors(path: Path) -> dict[str, np.ndarray]:
    """Tensors of a safetensors file as unsigned integers of their element size."""
    raw = path.read_bytes()
    n = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + n])
    sizes = {entry.safetensors: entry.itemsize for entry in TYPES}
    out = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            out[name] = np.frombuffer(raw[8 + n + begin : 8 + n + end], _UNSIGNED[sizes[entry["dtype"]]]).reshape(
                entry["shape"]
            )
    return out


def local_shape(name, shape, layout, outline):
    """Shape of the part of a tensor that one rank has in memory."""
    parts = shards(name, shape, layout, outline)
    own = [shard.local for shard in parts if shard.tp == parts[0].tp]
    return tuple(max(box.stop[axis] for box in own) for axis in range(len(shape)))
