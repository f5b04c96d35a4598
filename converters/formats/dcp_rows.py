"""The arrays behind `DcpMetadata`: chunks and records of all tensors at once, and how they are brought together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["OBJECT", "Chunks", "Ints", "Matched", "Points", "Records", "match"]

Ints = np.ndarray[Any, np.dtype[np.int64]]

OBJECT: Final = -1
"""In place of a number of dimensions: the record of an object, which has no offset in a tensor."""


@dataclass(eq=False)
class Points:
    """n points of up to d dimensions, padded with zeros.

    Args:
        at: (n, d).
        ndim: (n,) how many of the d belong to the point; `OBJECT` for none at all.
    """

    at: Ints
    ndim: Ints

    @staticmethod
    def of(points: Sequence[tuple[int, ...] | None]) -> Points:
        """From Python values; None for no point."""
        ndim = np.array([OBJECT if point is None else len(point) for point in points], np.int64)
        at = np.zeros((len(points), max(0, int(ndim.max(initial=0)))), np.int64)
        for dims in np.unique(ndim[ndim > 0]).tolist():
            rows = np.flatnonzero(ndim == dims)
            at[rows, :dims] = np.array([points[row] for row in rows.tolist()], np.int64)
        return Points(at, ndim)

    @staticmethod
    def joined(parts: Sequence[Points]) -> Points:
        """One after the other, all as wide as the widest."""
        width = max((part.at.shape[1] for part in parts), default=0)
        at = [np.pad(part.at, ((0, 0), (0, width - part.at.shape[1]))) for part in parts]
        return Points(
            np.concatenate([np.zeros((0, width), np.int64), *at]),
            np.concatenate([np.zeros(0, np.int64), *(part.ndim for part in parts)]),
        )

    def take(self, rows: Ints) -> Points:
        """Some of them."""
        return Points(self.at[rows], self.ndim[rows])


@dataclass(eq=False)
class Chunks:
    """Chunks of all tensors, by tensor (`owner`: its position in `state_dict_metadata`)."""

    owner: Ints
    starts: Points
    sizes: Points


@dataclass(eq=False)
class Records:
    """Entries of `storage_data`: `owner` as in `Chunks`, or beyond for a key that is not there."""

    owner: Ints
    starts: Points
    place: Ints
    """(n, 3): file, offset, length."""


@dataclass(eq=False)
class Matched:
    """Which record each chunk has.

    Args:
        chunks: The chunks' rows, sorted by tensor and offset.
        records: For each of these the record's row, -1 if there is none.
        unused: Rows of the records that no chunk has.
        twice: Rows of records for a chunk that another record is for as well.
    """

    chunks: Ints
    records: Ints
    unused: Ints
    twice: Ints


def match(chunks: Chunks, records: Records) -> Matched:
    """Bring chunks and records together by tensor and offset.

    Args:
        chunks: Every chunk.
        records: Records of tensors only, no `OBJECT`.
    """
    count = len(chunks.owner)
    owner = np.concatenate([chunks.owner, records.owner])
    at = Points.joined([chunks.starts, records.starts]).at
    columns = [owner, *(at[:, dim] for dim in range(at.shape[1]))]
    order = _order(columns)
    new = np.zeros(len(order), bool)
    for column in columns:
        values = column[order]
        new[1:] |= values[1:] != values[:-1]
    group = np.empty(len(order), np.int64)
    group[order] = np.cumsum(new)
    of_record = group[count:]
    record_of = np.full(len(order) + 1, -1, np.int64)
    record_of[of_record] = np.arange(len(of_record))
    has_chunk = np.zeros(len(order) + 1, bool)
    has_chunk[group[:count]] = True
    in_order = order[order < count]
    return Matched(
        in_order,
        record_of[group[in_order]],
        np.flatnonzero(~has_chunk[of_record]),
        np.flatnonzero(record_of[of_record] != np.arange(len(of_record))),
    )


def _order(columns: list[Ints]) -> Ints:
    """The order that sorts by the first column, then the second, and so on."""
    spans = [int(column.max(initial=0)) + 1 for column in columns]
    product = 1
    for span in spans:
        product *= span
    if product >= 1 << 62:
        return np.lexsort(columns[::-1])
    # One number that sorts alike: a third of the time.
    key = np.zeros(len(columns[0]), np.int64)
    for column, span in zip(columns, spans, strict=True):
        key *= span
        key += column
    return np.argsort(key, kind="stable")
