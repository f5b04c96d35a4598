"""Ending the output records that carry a checksum of their own, once all of their elements are written."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from converters.crc import crc32, crc_of_zeros
from converters.errors import DistckptError
from converters.execute.disk import opened, trouble_with, write_at

if TYPE_CHECKING:
    from pathlib import Path

    from converters.crc import RecordSums
    from converters.planning.job import Job


def seal(job: Job, folder: Path, written: RecordSums, *, whole_only: bool = False) -> None:
    """Puts behind every record what ends it, and syncs the files.

    Args:
        job: Says which records there are.
        folder: Where the output files are.
        written: Checksums of what was written into records; those that are sealed are taken out.
        whole_only: Leave records of which others write a part, and those that no source fills, to rank 0.

    Raises:
        DistckptError: A part of a record was not written, and no task is left that would.
        DestinationError: Writing failed.
    """
    if job.seals is None or (whole_only and not job.seals.apart):
        return
    fills = list(job.seals.fills())
    left = {record for record, _, _ in fills} if whole_only else set()
    if not whole_only:
        for record, start, nbytes in fills:
            written.add(record, (start, nbytes, crc_of_zeros(nbytes)))
    by_file: dict[int, list[tuple[int, bytes]]] = {}
    for record in sorted(written.pieces.keys() - left):
        crc = written.take(record, job.seals.nbytes(record))
        if crc is not None:
            file, pieces = job.seals.seal(record, crc)
            by_file.setdefault(file, []).extend(pieces)
        elif not whole_only:
            raise DistckptError(f"record {record} was not filled: {written.gaps(record, job.seals.nbytes(record))}")
    for record, number, at in () if whole_only else job.seals.rereads():
        crc = _crc_of_range(folder / job.files[number].name, at, job.seals.nbytes(record))
        by_file.setdefault(number, []).extend(job.seals.seal(record, crc)[1])
    for number, pieces in () if whole_only else job.seals.end():
        by_file.setdefault(number, []).extend(pieces)
    for number, pieces in by_file.items():
        _write_pieces(folder / job.files[number].name, pieces)


def _crc_of_range(path: Path, start: int, nbytes: int) -> int:
    """CRC-32 of a range of an output file."""
    crc, end = 0, start + nbytes
    with trouble_with(path, "reading back"), opened(path, os.O_RDONLY) as fd:
        while start < end:
            data = os.pread(fd, min(1 << 20, end - start), start)
            if not data:
                raise DistckptError(f"{path.name} ends at {start}, it should have {end} bytes")
            crc, start = crc32(data, crc), start + len(data)
    return crc


def _write_pieces(path: Path, pieces: list[tuple[int, bytes]]) -> None:
    with trouble_with(path, "writing"), opened(path, os.O_WRONLY) as fd:
        for offset, data in pieces:
            write_at(fd, data, offset)
        os.fsync(fd)
