"""The contents of torch DCP's `.metadata` as arrays, with the chunks of all tensors matched to records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from converters.pickles.nodes import Node

Ints = np.ndarray[Any, np.dtype[np.signedinteger[Any]]]

OBJECT: Final = -1
"""In place of a number of dimensions: the record of an object, which has no offset in a tensor."""


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    """One tensor key of `state_dict_metadata` with its chunks, n of them, sorted by offset.

    Args:
        key: As stored.
        dtype: The name after `torch.`: "bfloat16".
        shape: Global shape as stored (of the flattened form, see `original_shape`).
        starts: (n, ndim) offsets of the chunks in the tensor.
        sizes: (n, ndim) shapes of the chunks.
        file: (n,) index into `DcpMetadata.files`; -1 if `storage_data` has no record for the chunk.
        offset: (n,) first byte of the record in its file.
        length: (n,) bytes of the record, its zip container included.
        original_shape: Shape before Megatron-Core 0.8-0.15 flattened the blocks
            (`nd_reformulated_orig_global_shape`); None for an ordinary tensor.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    file: NDArray[np.int32]
    offset: NDArray[np.int64]
    length: NDArray[np.int64]
    original_shape: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One non-tensor key.

    Args:
        key: As stored: `rng_state/shard_0.0_2.2`.
        file: Index into `DcpMetadata.files`; -1 if `storage_data` has no record for it.
        offset: First byte of the record in its file.
        length: Bytes of the record.
    """

    key: str
    file: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True, eq=False)
class DcpMetadata:
    """What `.metadata` says, with nothing checked against the files it names.

    Args:
        files: Every `relative_path`, sorted; each is a bare file name.
        tensors: By key, in the order of `state_dict_metadata`.
        objects: By key, likewise.
        stray: `storage_data` entries that belong to no known key or chunk, in words.
        top_class: Full name of the outermost class.
        attributes: The other attributes (`version`, `storage_meta`), inert.
        planner_data: As stored, inert; None if absent or None.
        plans: Number of `all_local_plans`; None if there are none, -1 if they are there but were not read.
        has_mcore_data: Whether Megatron-Core 0.8-0.15 wrote it.
    """

    files: list[str]
    tensors: dict[str, StoredTensor]
    objects: dict[str, StoredObject]
    stray: list[str]
    top_class: str
    attributes: dict[str, Node]
    planner_data: Node
    plans: int | None
    has_mcore_data: bool


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
        ndim = np.array([OBJECT if point is None else len(point) for point in points], np.int8)
        at = np.zeros((len(points), max(0, int(ndim.max(initial=0)))), np.int64)
        for dims in sorted(set(ndim[ndim > 0].tolist())):  # np.unique would import numpy.ma
            rows = np.flatnonzero(ndim == dims)
            at[rows, :dims] = np.array([points[row] for row in rows.tolist()], np.int64)
        return Points(at, ndim)

    @staticmethod
    def joined(parts: Sequence[Points]) -> Points:
        """One after the other, all as wide as the widest."""
        width = max((part.at.shape[1] for part in parts), default=0)
        at, first = np.zeros((sum(len(part.at) for part in parts), width), np.int64), 0
        for part in parts:
            at[first : first + len(part.at), : part.at.shape[1]] = part.at
            first += len(part.at)
        return Points(at, np.concatenate([np.zeros(0, np.int8), *(part.ndim for part in parts)]))

    def take(self, rows: Ints) -> Points:
        """The points of some rows."""
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
    location: Ints
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
