"""Tensors read from a checkpoint's files, and overwritten in them with every checksum in order."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import numpy as np

from converters.formats import open_checkpoint
from harness.support import read_tensor

if TYPE_CHECKING:
    from pathlib import Path


def write(place: Path, name: str, values: np.ndarray) -> None:
    """Overwrites a whole tensor, and every checksum with it: what a program that went wrong would have saved."""
    reader = open_checkpoint(place)
    info = reader.catalog.tensors[name]
    chunks: dict[int, list] = {}
    for chunk in info.chunks():
        chunks.setdefault(chunk.record, []).append(chunk)
    for record, pieces in chunks.items():
        path = reader.files[reader.file_of(record)]
        raw = bytearray(path.read_bytes())
        where = reader.locate(record, lambda at, n, raw=raw: bytes(raw[at : at + n]))
        for chunk in pieces:
            piece = np.ascontiguousarray(values[chunk.box.slices]).tobytes()
            begin = where.offset + chunk.base * info.dtype.itemsize
            raw[begin : begin + len(piece)] = piece
        if where.crc is not None:
            end = where.crc_offset + where.crc_nbytes
            sealed(raw, where.crc_offset, end, zlib.crc32(bytes(raw[where.crc_offset : end])))
        path.write_bytes(raw)


def sealed(raw: bytearray, begin: int, end: int, crc: int) -> None:
    """Puts a checksum where a zip archive keeps it: behind the member, and in the directory."""
    header = raw.rfind(b"PK\x03\x04", 0, begin)
    length = int.from_bytes(raw[header + 26 : header + 28], "little")
    name = bytes(raw[header + 30 : header + 30 + length])
    if raw[end : end + 4] == b"PK\x07\x08":
        raw[end + 4 : end + 8] = crc.to_bytes(4, "little")
    entry = raw.find(b"PK\x01\x02", end)
    while bytes(raw[entry + 46 : entry + 46 + length]) != name or raw[entry + 28] != length:
        entry = raw.find(b"PK\x01\x02", entry + 4)
        assert entry > 0
    raw[entry + 16 : entry + 20] = crc.to_bytes(4, "little")


def read(place: Path, name: str) -> np.ndarray:
    reader = open_checkpoint(place)
    return read_tensor(reader, reader.catalog.tensors[name])


def swap_on_disk(folder, key, a, b, length):
    """Exchanges two ranges of elements of a flat bucket in the data files."""
    reader = open_checkpoint(folder)
    files, places = {}, []
    for chunk in reader.catalog.tensors[key].chunks():
        path = reader.files[reader.file_of(chunk.record)]
        raw = files.setdefault(path, bytearray(path.read_bytes()))
        where = reader.locate(chunk.record, lambda at, n, raw=raw: bytes(raw[at : at + n]))
        places += [(raw, where.offset + (chunk.base + k) * 4) for k in range(chunk.box.shape[0])]
    for k in range(length):
        (one, x), (two, y) = places[a + k], places[b + k]
        one[x : x + 4], two[y : y + 4] = two[y : y + 4], one[x : x + 4]
    for path, raw in files.items():
        path.write_bytes(raw)
