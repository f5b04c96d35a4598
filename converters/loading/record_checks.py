"""Checksums of records of which a rank of `load` has read a part: put together with those of other ranks, or read whole."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from converters.errors import IntegrityError
from converters.io.gather import Gatherer
from converters.io.joint_sums import shifted
from converters.names import fold, printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from converters.loading.job_ranks import JobRanks
    from converters.loading.moving import Loading


def check_jointly(loading: Loading, ranks: JobRanks) -> tuple[int, list[int]]:
    """Compares the records that the ranks of a job have read together; every rank calls this.

    Returns:
        On rank 0 how many were compared, and those of which a part is missing; elsewhere 0 and none.

    Raises:
        IntegrityError: A record does not match its checksum; on all ranks.
    """
    with contextlib.closing(Gatherer(loading.sources)) as gatherer:
        located = [(record, gatherer.payload(record)) for record in sorted(loading.sums.joint)]
    rows = [(r, *loading.sums.joint[r], p.crc_nbytes, p.crc) for r, p in located if p.crc is not None]
    parts = ranks.gather((rows, loading.sums.whole_records))
    sums: dict[int, tuple[int, int, int, int | None]] = {}
    for rank_rows, _ in parts:
        for record, nbytes, value, total, crc in rank_rows:
            n, before, _, _ = sums.get(record, (0, 0, total, crc))
            sums[record] = n + nbytes, before ^ value, total, crc
    for _, records in parts:  # one rank has read all of it and compared
        for record in records:
            sums.pop(record, None)
    complete = {r: (shifted(value, total), crc) for r, (n, value, total, crc) in sums.items() if n == total}
    damaged = ranks.broadcast([record for record, (computed, crc) in complete.items() if computed != crc])
    if damaged:
        raise _damaged(loading, damaged)
    return len(complete), [record for record in sums if record not in complete]


def check_whole(loading: Loading, records: Sequence[int]) -> None:
    """Reads records from beginning to end for their checksums alone.

    Raises:
        IntegrityError: A record does not match its checksum.
    """
    with contextlib.closing(Gatherer(loading.sources)) as gatherer:
        for record in records:
            payload = gatherer.payload(record)
            loading.sums.forget(record)
            loading.sums.count(alone=True, joint=False)
            if payload.crc is not None:
                gatherer.read_through(record, payload, 0, payload.crc_nbytes)
                loading.sources.check(record, payload)


def _damaged(loading: Loading, records: list[int]) -> IntegrityError:
    """The error for records that do not match their checksums, by the tensors they belong to."""
    reader = loading.sources.reader
    files = sorted({reader.files[reader.file_of(record)].name for record in records})
    names = [
        name
        for name, info in reader.catalog.tensors.items()
        if any(set(part.array.records[part.rows()].tolist()) & set(records) for part in info.parts)
    ]
    return IntegrityError(
        f"{printable(files[0])} is damaged: {len(records)} of the records that the ranks read together "
        f"{'does' if len(records) == 1 else 'do'} not match the checksum stored with it",
        details=[printable(text) for text, _ in fold(names)][:8],
        hint="restore this file from a copy, or use another iteration",
        tensor=names[0] if names else None,
    )
