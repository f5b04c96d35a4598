"""Gives what was mutated straight to what reads it: a hundred times as many mutants a second as whole checkpoints allow.

Besides that only our own errors come out: both ways to read a `.metadata` agree, a pickle that is read is written back as
the same tree, and whatever is accepted stays within the bytes that there are.
"""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any

from converters.errors import DistckptError
from converters.formats.containers.safetensors import SafetensorsReader
from converters.formats.dcp.geometry import tiling_problem
from converters.formats.dcp.metadata import read_metadata
from converters.formats.folder import is_folder, open_source, walk
from converters.formats.plain_json import parse_json
from converters.formats.plain_yaml import read_yaml
from converters.formats.zarr.array import parse_zarray
from converters.names import printable
from converters.pickles.describe import describe
from converters.pickles.emit import dumps
from converters.pickles.machine import parse
from converters.pickles.nodes import Obj
from converters.torchzip.records import locate_tensor, member_offset, read_directory, read_pickle
from converters.torchzip.tensor_refs import tensor_ref
from fuzz.mutants import TARGETS, Mutant, contents

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

__all__ = ["PARTS", "read_parts"]


def read_parts(made: Mutant, folder: Path) -> None:
    """Reads each mutated part of a mutant.

    Args:
        made: Which; of a target whose part is in `PARTS`.
        folder: Where files may be made.

    Raises:
        Exception: What must not be.
    """
    for file, raw in contents(made):
        try:
            PARTS[TARGETS[made.target].part](raw, folder / file.rpartition("/")[2])
        except DistckptError as error:
            if printable(error.message) != error.message:
                raise AssertionError("control characters in an error") from error


def _metadata(raw: bytes, _: Path) -> None:
    found, refused = [], []
    for fast in (True, False):
        try:
            found.append(read_metadata(raw, fast=fast))
        except DistckptError as error:
            refused.append(error)
    if refused:
        assert not found, f"one of two ways to read it refuses it: {refused[0]}"
        return
    quick, slow = found
    assert (quick.files, list(quick.tensors), quick.objects) == (slow.files, list(slow.tensors), slow.objects)
    for one, other in zip(quick.tensors.values(), slow.tensors.values(), strict=True):
        assert (one.dtype, one.shape, one.original_shape) == (other.dtype, other.shape, other.original_shape)
        for name in ("starts", "sizes", "file", "offset", "length"):
            assert getattr(one, name).tolist() == getattr(other, name).tolist(), f"two ways to read {name}"
        if tiling_problem(one) is None and one.shape:
            assert int(one.sizes.prod(axis=1, dtype=object).sum()) == _product(one.shape), "no tiling"


def _product(sizes: tuple[int, ...]) -> int:
    return next(itertools.islice(itertools.accumulate(sizes, int.__mul__), len(sizes) - 1, None))


def _pickle(raw: bytes, _: Path) -> None:
    tree = parse(raw)
    json.dumps(describe(tree, max_nodes=500))
    again = dumps(tree, 4)
    assert describe(parse(again), max_nodes=500) == describe(tree, max_nodes=500), "written back it is another"
    assert dumps(parse(again), 4) == again, "written twice it is another"


def _objects(tree: Any) -> Iterator[Obj]:
    """The calls in a tree, as far as a tensor may lie in it."""
    waiting, seen = [tree], set[int]()
    while waiting and len(seen) < 2000:
        node = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, dict):
            waiting += node.values()
        elif isinstance(node, (list, tuple)):
            waiting += node
        elif isinstance(node, Obj):
            yield node
            waiting += [*node.args, node.state, *(node.items or ()), *(value for _, value in node.pairs or ())]


def _zip(raw: bytes, _: Path) -> None:
    def read(at: int, length: int) -> bytes:
        assert at >= 0 <= length, f"asked for {length} bytes at {at}"
        return raw[at : at + length]

    members = read_directory(read, 0, len(raw), "it")
    for member in members.values():
        try:
            member_offset(read, 0, member, "it")
        except DistckptError:
            continue
    tree = read_pickle(read, 0, len(raw), "it")
    for node in _objects(tree):
        try:
            ref = tensor_ref(node, "it")
            payload = locate_tensor(read, 0, len(raw), ref, "it") if ref is not None else None
        except DistckptError:
            continue
        if payload is not None:
            assert 0 <= payload.crc_offset <= payload.offset, "elements before their storage"
            assert payload.offset + payload.nbytes <= payload.crc_offset + payload.crc_nbytes <= len(raw), (
                "beyond the end"
            )


def _record(raw: bytes, path: Path) -> None:
    """The first archive of a file of many: it ends with the first directory."""
    end = raw.find(b"PK\x05\x06")
    _zip(raw[: end + 22] if end >= 0 else raw, path)


def _safetensors(raw: bytes, path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    path = path.with_name("model.safetensors")
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(1 << 17))
    catalog = SafetensorsReader.open(path.parent).catalog
    assert all(tensor.nbytes <= 1 << 17 for tensor in catalog.tensors.values()), "beyond the end"


def _json(raw: bytes, path: Path) -> None:
    (parse_zarray if path.name == ".zarray" else parse_json)(raw, "it")


def _text(raw: bytes, path: Path) -> None:
    if path.suffix == ".json":
        parse_json(raw, "it")
        return
    path.write_bytes(raw)
    json.dumps(list(read_yaml(path)), default=str)


def _tar(raw: bytes, path: Path) -> None:
    path.write_bytes(raw)
    for name, found in walk(path) if is_folder(path) else ():
        assert not name.startswith("/"), "an absolute name"
        assert ".." not in name.split("/"), "a name that climbs"
        source = open_source(path / name)
        assert 0 <= source.base <= source.base + found.size <= len(raw), "beyond the end"


PARTS: dict[str, Callable[[bytes, Path], None]] = {
    "raw pickle": _metadata,
    "pickle": _pickle,
    "zip": _zip,
    "record": _record,
    "safetensors": _safetensors,
    "json": _json,
    "text": _text,
    "tar": _tar,
}
"""What reads each kind of part; trees of folders have none."""
