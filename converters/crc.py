"""CRC-32 of records that are read in pieces, in any order, by several threads or several runs.

torch.save stores a CRC-32 of every record in the zip directory, and no loader checks it. We read each record about once
anyway; the sums of the pieces are combined at the end, which costs microseconds a piece. Intel's library (ISA-L) computes
the same sum several times as fast as zlib does.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from isal.isal_zlib import crc32 as crc32
from isal.isal_zlib import crc32_combine as crc32_combine

from converters.box import ranges_between

if TYPE_CHECKING:
    from collections.abc import Sequence


def crc_of_zeros(nbytes: int) -> int:
    """CRC-32 of `nbytes` zero bytes, without having them."""
    return crc32_combine(0xFFFFFFFF, 0, nbytes) ^ 0xFFFFFFFF


Segment = tuple[int, int, int]
"""(first byte within the record's member, bytes, CRC-32)."""


@dataclass
class RecordSums:
    """The pieces of each record that have been read, merged as they meet.

    Attributes:
        pieces: For each record, its disjoint pieces by first byte.
    """

    pieces: dict[int, dict[int, Segment]] = field(default_factory=dict)
    _ends: dict[int, dict[int, int]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, record: int, segment: Segment) -> None:
        """Notes that a piece of a record has been read; neighbours are merged, so memory stays small."""
        start, nbytes, crc = segment
        with self._lock:
            pieces, ends = self.pieces.setdefault(record, {}), self._ends.setdefault(record, {})
            if start in pieces:  # read again, after a resume or by a second copy of the same elements
                return
            before = ends.pop(start, None)
            if before is not None:
                _, n, earlier = pieces.pop(before)
                start, nbytes, crc = before, n + nbytes, crc32_combine(earlier, crc, nbytes)
            after = pieces.pop(start + nbytes, None)
            if after is not None:
                nbytes, crc = nbytes + after[1], crc32_combine(crc, after[2], after[1])
            pieces[start] = (start, nbytes, crc)
            ends[start + nbytes] = start

    def add_runs(self, record: int, start: int, stride: int, nbytes: int, sums: Sequence[int]) -> None:
        """Notes pieces of `nbytes` bytes each that begin at `start` and then every `stride` bytes; `sums` are theirs."""
        for number, crc in enumerate(sums):
            self.add(record, (start + number * stride, nbytes, crc))

    def take(self, record: int, nbytes: int) -> int | None:
        """CRC-32 of a record of `nbytes` bytes if all of it has been read, else None.

        The record is then forgotten: of two threads, one gets to compare the sum.
        """
        with self._lock:
            piece = self.pieces.get(record, {}).get(0)
            if piece is None or piece[1] != nbytes:
                return None
            del self.pieces[record], self._ends[record]
            return piece[2]

    def forget(self, record: int) -> None:
        """Drops what was read of a record, so that it may be read again from the beginning."""
        with self._lock:
            self.pieces.pop(record, None)
            self._ends.pop(record, None)

    def listed(self) -> list[tuple[int, int, int, int]]:
        """`(record, first byte, bytes, CRC-32)` of every piece."""
        with self._lock:
            return [(record, *segment) for record, pieces in self.pieces.items() for segment in pieces.values()]

    def gaps(self, record: int, nbytes: int) -> list[tuple[int, int]]:
        """`(first byte, bytes)` of what has not been read of a record of `nbytes` bytes."""
        with self._lock:
            ranges = [(start, start + n) for start, n, _ in self.pieces.get(record, {}).values()]
        return [(start, end - start) for start, end in ranges_between(ranges, nbytes)]
