"""The files of a checkpoint as arrays of bytes, so that the engine copies them as it copies tensors.

A copy of files then is a job like any other: in tiles, by several threads and ranks, with a journal, continued after a kill.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from converters.box import Box, ranges_between
from converters.catalog import TensorInfo
from converters.chunks import Part, StoredArray
from converters.dtypes import dtype
from converters.formats.base import ReaderPair, ReaderView, digest_of
from converters.formats.folder import status
from converters.planning.plan import Copy, Drop, Piece
from converters.planning.routes import CopyRoutes, Location
from converters.torchzip.records import Payload

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from converters.formats.base import Reader
    from converters.planning.job import OutputFile
    from converters.torchzip.records import Read

_BYTE = dtype("uint8")
_BEHIND = 1 << 40  # no checkpoint has so many records


class _FileBytes(ReaderView):
    """Files of a checkpoint, each of them one record."""

    def __init__(self, reader: Reader, files: Sequence[Path], sizes: Sequence[int]) -> None:
        super().__init__(reader, reader.catalog)
        self.files, self._sizes = files, sizes

    def file_of(self, record: int) -> int:
        """See `Reader`."""
        return record

    def locate(self, record: int, read: Read) -> Payload:
        """See `Reader`; a file has no checksum of its own."""
        return Payload(0, self._sizes[record], None, 0, self._sizes[record])

    def fingerprint(self) -> str:
        """See `Reader`."""
        states = ((path, status(path)) for path in self.files)
        return digest_of(f"{path}:{(state.size, state.mtime_ns) if state else None};" for path, state in states)


@dataclass(frozen=True)
class ByteCopies:
    """Files to be written, and what copies parts of others into them.

    Attributes:
        reader: What the job reads: the records of the checkpoint, and behind them its files.
        sources: The files that are copied from, as arrays of bytes.
        routes: Where their bytes go.
        files: The files to be written, without the slices that are copied.
        drops: Bytes of the sources that go nowhere.
    """

    reader: Reader
    sources: Mapping[str, TensorInfo]
    routes: CopyRoutes
    files: Sequence[OutputFile]
    drops: Sequence[Drop]


def byte_copies(reader: Reader, files: Sequence[OutputFile], reason: str) -> ByteCopies:
    """Makes copies of what the slices of files name of plain files; archives that are compared while they are copied stay.

    Args:
        reader: The checkpoint that the files are of.
        files: What is to be written.
        reason: Why bytes that no slice names are left out.

    Raises:
        OSError: A file cannot be looked at.
    """
    located: list[tuple[Piece, Location]] = []
    taken: dict[Path, list[tuple[int, int]]] = {}
    remaining: list[OutputFile] = []
    for number, file in enumerate(files):
        other_slices = []
        for part in file.slices:
            if isinstance(part.content, bytes) or part.plain < 0:
                other_slices.append(part)
                continue
            path, offset, length = part.content
            name = f"{file.name}@{part.at}"
            copy = Copy(str(path), Box((offset,), (length,)), name, Box((0,), (length,)))
            located.append((Piece(name, _BYTE, (length,), copies=(copy,)), Location(number, part.at)))
            taken.setdefault(path, []).append((offset, offset + length))
        remaining.append(replace(file, slices=tuple(other_slices)))
    states = {path: status(path) for path in taken}
    sizes = [state.size if state else 0 for state in states.values()]
    sources = {str(path): _array(str(path), size, n) for n, (path, size) in enumerate(zip(taken, sizes, strict=True))}
    drops = [
        Drop(str(path), Box((start,), (end - start,)), reason)
        for (path, ranges), size in zip(taken.items(), sizes, strict=True)
        for start, end in ranges_between(ranges, size)
    ]
    both = ReaderPair(reader, _FileBytes(reader, list(taken), sizes), _BEHIND, reader.catalog)
    return ByteCopies(both, sources, CopyRoutes.of(located), remaining, drops)


def _array(name: str, size: int, record: int) -> TensorInfo:
    stored = StoredArray.one_chunk(name, (size,), _BEHIND + record)
    return TensorInfo(name, _BYTE, (size,), "other", (Part(stored),))
