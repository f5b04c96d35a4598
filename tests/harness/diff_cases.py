"""Copies of checkpoints in which one element of one tensor is another, whatever the format and layout."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import numpy as np

from converters.comparison.pairs import Side
from converters.formats import open_checkpoint

if TYPE_CHECKING:
    from pathlib import Path


def set_element(folder: Path, name: str, index: tuple[int, ...], change) -> None:
    """Changes the bits of one element of a canonical tensor in place, and the checksum of its record with them.

    Args:
        folder: The checkpoint.
        name: Canonical name, of a weight or of optimizer state.
        index: Of the element in the tensor.
        change: Gets its bits as an integer and returns the new ones.
    """
    reader = open_checkpoint(folder)
    side = Side.both(reader, reader)[0]
    info = side.tensors[name]
    (chunk,) = (
        c for c in info.chunks() if all(a <= i < b for a, i, b in zip(c.box.start, index, c.box.stop, strict=True))
    )
    path = reader.files[reader.file_of(chunk.record)]
    raw = bytearray(path.read_bytes())
    where = reader.locate(chunk.record, lambda at, n: bytes(raw[at : at + n]))
    inside = np.ravel_multi_index([i - a for i, a in zip(index, chunk.box.start, strict=True)], chunk.box.shape)
    size = info.dtype.itemsize
    at = where.offset + (chunk.base + int(inside)) * size
    raw[at : at + size] = change(int.from_bytes(raw[at : at + size], "little")).to_bytes(size, "little")
    if where.crc is not None:  # it stands behind the bytes and again in the directory
        end = where.crc_offset + where.crc_nbytes
        old, new = (n.to_bytes(4, "little") for n in (where.crc, zlib.crc32(raw[where.crc_offset : end])))
        assert raw.count(old, end) >= 2
        raw[end:] = raw[end:].replace(old, new, 2)
    path.write_bytes(raw)


def values(side: Side, name: str) -> np.ndarray:
    """A whole tensor as fp64."""
    from converters.box import Box
    from converters.comparison.values import widened
    from converters.io.gather import Gatherer
    from converters.io.sources import Sources

    gatherer = Gatherer(Sources(side.reader, side.tensors))
    info = side.tensors[name]
    found = widened(gatherer.gather(name, Box.whole(info.shape)).copy(), info.dtype)
    gatherer.close()
    return found
