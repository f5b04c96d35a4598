"""Checksums of records that several processes read parts of, in any order, in constant memory for each record.

CRC-32 is linear: the sum of a record is the exclusive or of the sums of its pieces, each multiplied by x to the power of
8 times the bytes behind the piece. So a process keeps for each record the number of bytes it has read and one 32-bit
value, whatever the pieces were; what several processes have kept is added up. As the length of a record is not known when
a piece of it is added, pieces are shifted back by what lies before their end instead, and forth once in the end:

    record   |  rank 0  |  rank 1  |  rank 0  |        columns of a matrix: thousands of pieces
    value        a     +     b     +     c              rank 0 keeps (bytes, a + c), rank 1 (bytes, b)

x has the order 2**32 - 1, since the polynomial of CRC-32 is primitive; that is what shifting back rests on.
"""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING

from converters.crc import RecordSums, crc32_combine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from converters.crc import Segment

_ORDER = (1 << 32) - 1


def shifted(value: int, nbytes: int) -> int:
    """A value multiplied by x to the power of 8 * `nbytes`, which may be negative."""
    return crc32_combine(value, 0, nbytes % _ORDER)


class JointSums(RecordSums):
    """The sums of one process: all of what it reads, and apart from that the part that counts for the whole job.

    Each byte of the job counts in one process only. Whoever reads says before each tile, in the thread that reads it,
    whether the tile counts (`count`).

    Attributes:
        joint: For each record that was not read whole by this process: bytes that count for the job, and their value.
        whole_records: Records that this process has read whole and compared.
    """

    def __init__(self) -> None:
        super().__init__()
        self.joint: dict[int, tuple[int, int]] = {}
        self.whole_records: list[int] = []
        self._alone: dict[int, tuple[int, int]] = {}
        self._thread = threading.local()

    def count(self, *, alone: bool, joint: bool) -> None:
        """Says for what this thread reads from now on whether it is new to this process, and to the job."""
        self._thread.alone, self._thread.joint = alone, joint

    def add(self, record: int, segment: Segment) -> None:
        """See `RecordSums`."""
        start, nbytes, crc = segment
        self._add(record, nbytes, start + nbytes, crc)

    def add_runs(self, record: int, start: int, stride: int, nbytes: int, sums: Sequence[int]) -> None:
        """See `RecordSums`."""
        value = functools.reduce(lambda before, crc: crc32_combine(before, crc, stride), sums, 0)
        self._add(record, nbytes * len(sums), start + (len(sums) - 1) * stride + nbytes, value)

    def _add(self, record: int, nbytes: int, end: int, value: int) -> None:
        value = shifted(value, -end)
        where = [self._alone] if getattr(self._thread, "alone", True) else []
        where += [self.joint] if getattr(self._thread, "joint", False) else []
        with self._lock:
            for counted in where:
                n, before = counted.get(record, (0, 0))
                counted[record] = n + nbytes, before ^ value

    def take(self, record: int, nbytes: int) -> int | None:
        """See `RecordSums`."""
        with self._lock:
            if self._alone.get(record, (0, 0))[0] != nbytes:
                return None
            value = self._alone.pop(record)[1]
            self.joint.pop(record, None)
            self.whole_records.append(record)
        return shifted(value, nbytes)

    @property
    def partial(self) -> list[int]:
        """Records that this process has read a part of."""
        return sorted(self._alone)

    def forget(self, record: int) -> None:
        """Drops what was read of a record, so that it may be read again from the beginning."""
        with self._lock:
            self._alone.pop(record, None)
            self.joint.pop(record, None)
