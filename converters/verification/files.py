"""The reading tasks of `verify`: the files of a checkpoint, large ones in pieces, with their records and tensors.

    a file of 100 GB   | piece 0 | piece 1 | piece 2 | ...        each read from front to back, by the next free thread
    its records          | 0  |  1    |  2  |    3    | ...       a CRC-32 of each part; parts are combined at the end

A SHA-256 cannot be combined: a file that a manifest lists, or shall list, is read by one worker from end to end.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from converters.errors import FormatError
from converters.formats.folder import open_source

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from numpy.typing import NDArray

    from converters.catalog import TensorInfo
    from converters.formats.base import Reader

PIECE_BYTES = 256 << 20  # as the number of workers does not matter, every rank cuts alike
_BATCH_BYTES, _BATCH_FILES = 8 << 20, 256


@dataclass(frozen=True, slots=True)
class FileRead:
    """A file, or a piece of one, to be read.

    Attributes:
        name: Path relative to the checkpoint.
        positions: Its places in the reader's list of files; none for a file that holds no records.
        size: Bytes of the file.
        hashed: Whether its SHA-256 is wanted.
        piece: Number of the piece.
        pieces: How many there are.
    """

    name: str
    positions: tuple[int, ...]
    size: int
    hashed: bool
    piece: int = 0
    pieces: int = 1

    @property
    def begin(self) -> int:
        """The first byte to be read."""
        return self.piece * PIECE_BYTES

    @property
    def end(self) -> int:
        """One past the last byte to be read."""
        return self.size if self.last else (self.piece + 1) * PIECE_BYTES

    @property
    def last(self) -> bool:
        """Whether no piece follows."""
        return self.piece + 1 == self.pieces

    @property
    def nbytes(self) -> int:
        """Bytes to be read."""
        return self.end - self.begin

    def owns(self, at: int) -> bool:
        """Whether this piece checks what begins at a byte of the file; the last piece checks what begins beyond the end."""
        return self.begin <= at and (self.last or at < self.end)


@dataclass(frozen=True, slots=True)
class FileTask:
    """Files to be read: one, a piece of one, or many small ones.

    Attributes:
        number: Among all tasks.
        files: The files.
        nbytes: Bytes to be read.
    """

    number: int
    files: tuple[FileRead, ...]
    nbytes: int

    @classmethod
    def batches(cls, files: Iterable[FileRead]) -> Iterator[FileTask]:
        """Tasks for all files, numbered from 0: a checkpoint may have a million of a few KiB."""
        number, batch, nbytes = 0, list[FileRead](), 0
        for file in (piece for listed_file in files for piece in _pieces(listed_file)):
            if batch and (nbytes + file.nbytes > _BATCH_BYTES or len(batch) == _BATCH_FILES):
                yield cls(number, tuple(batch), nbytes)
                number, batch, nbytes = number + 1, [], 0
            batch.append(file)
            nbytes += file.nbytes
        if batch:
            yield cls(number, tuple(batch), nbytes)


def _pieces(file: FileRead) -> Iterator[FileRead]:
    count = 1 if file.hashed else max(1, -(-file.size // PIECE_BYTES))
    for number in range(count):
        yield FileRead(file.name, file.positions, file.size, file.hashed, number, count)


class RecordIndex:
    """The records of each file, and the tensors of each record."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        arrays = {id(p.array): p.array for info in reader.catalog.tensors.values() for p in info.parts}
        records = [np.zeros(0, np.int64), *(array.records for array in arrays.values())]
        numbers = np.unique(np.concatenate(records))
        self._numbers = numbers[numbers >= 0]

    @cached_property
    def _by_file(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Files in ascending order, and the record of each."""
        files = np.fromiter(map(self._reader.file_of, self._numbers.tolist()), np.int64, len(self._numbers))
        order = np.argsort(files, kind="stable")
        return files[order], self._numbers[order]

    def records(self, position: int) -> list[int]:
        """The records in a file."""
        files, numbers = self._by_file
        low, high = np.searchsorted(files, [position, position + 1])
        records: list[int] = numbers[low:high].tolist()
        return records

    def by_offset(self, positions: Iterable[int]) -> dict[int, list[int]]:
        """The records of a file by the first byte of what their checksum is of; those that can be located."""
        out: dict[int, list[int]] = {}
        for position in positions:
            try:
                source = open_source(self._reader.files[position])
            except FormatError:
                continue
            try:
                for record in self.records(position):
                    try:
                        payload = self._reader.locate(record, source.read)
                    except FormatError:
                        continue
                    out.setdefault(payload.crc_offset, []).append(record)
            finally:
                source.close()
        return out

    def __len__(self) -> int:
        return len(self._numbers)

    def tensors(self, records: set[int], tensors: Mapping[str, TensorInfo]) -> dict[int, tuple[str, ...]]:
        """Names of those of some tensors that have elements in each of some records."""
        wanted, out = np.zeros(max(records, default=0) + 2, bool), {record: list[str]() for record in records}
        wanted[list(records)] = True
        for name, info in tensors.items() if records else ():
            for part in info.parts:
                part_records = part.array.records[part.rows()]
                for record in part_records[wanted[np.minimum(part_records, len(wanted) - 1)]].tolist():
                    out[record].append(name)
        return {record: tuple(dict.fromkeys(names)) for record, names in out.items()}
