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

import threading
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from converters.crc import RecordSums, multiply

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from converters.crc import Segment

_ORDER = (1 << 32) - 1


@lru_cache(maxsize=1)
def _powers() -> list[list[int]]:
    """x ** (i << 8 * k) for k = 0..3 and i = 0..255, in the reflected order of crc.py."""
    out, base = [], 1 << 30  # x
    for _ in range(4):
        row = [1 << 31]
        for _ in range(255):
            row.append(multiply(row[-1], base))
        out.append(row)
        base = multiply(row[-1], base)
    return out


@lru_cache(maxsize=1 << 14)
def _power(exponent: int) -> int:
    exponent %= _ORDER
    product = 1 << 31
    for k, row in enumerate(_powers()):
        product = multiply(row[exponent >> 8 * k & 255], product)
    return product


@lru_cache(maxsize=256)
def _times(factor: int) -> tuple[NDArray[np.uint32], ...]:
    """Tables with which arrays are multiplied by a factor: one for each byte of a value."""
    single = [multiply(1 << bit, factor) if bit < 32 else 0 for bit in range(32)]
    tables = []
    for k in range(4):
        table = np.zeros(256, np.uint32)
        for bit in range(8):
            table[np.arange(256) >> bit & 1 == 1] ^= np.uint32(single[8 * k + bit])
        tables.append(table)
    return tuple(tables)


def _run(sums: Sequence[int], stride: int) -> int:
    """The value of equally spaced pieces, as if shifted to the end of the last: halves are joined until one is left."""
    values = np.zeros(1 << max(0, len(sums) - 1).bit_length(), np.uint32)
    values[len(values) - len(sums) :] = sums
    while len(values) > 1:
        a, b, c, d = _times(_power(8 * stride))
        left = values[0::2]
        values = a[left & 255] ^ b[left >> 8 & 255] ^ c[left >> 16 & 255] ^ d[left >> 24] ^ values[1::2]
        stride *= 2
    return int(values[0])


def joined(value: int, nbytes: int) -> int:
    """CRC-32 of a record of `nbytes` bytes from the value of all its pieces."""
    return multiply(_power(8 * nbytes), value) if value else 0


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
        self._add(record, nbytes * len(sums), start + (len(sums) - 1) * stride + nbytes, _run(sums, stride))

    def _add(self, record: int, nbytes: int, end: int, value: int) -> None:
        value = multiply(_power(-8 * end), value) if value else 0
        where = [self._alone] if getattr(self._thread, "alone", True) else []
        where += [self.joint] if getattr(self._thread, "joint", False) else []
        with self._lock:
            for kept in where:
                n, before = kept.get(record, (0, 0))
                kept[record] = n + nbytes, before ^ value

    def take(self, record: int, nbytes: int) -> int | None:
        """See `RecordSums`."""
        with self._lock:
            if self._alone.get(record, (0, 0))[0] != nbytes:
                return None
            value = self._alone.pop(record)[1]
            self.joint.pop(record, None)
            self.whole_records.append(record)
        return joined(value, nbytes)

    @property
    def partial(self) -> list[int]:
        """Records that this process has read a part of."""
        return sorted(self._alone)

    def forget(self, record: int) -> None:
        """Drops what was read of a record, so that it may be read again from the beginning."""
        with self._lock:
            self._alone.pop(record, None)
            self.joint.pop(record, None)
