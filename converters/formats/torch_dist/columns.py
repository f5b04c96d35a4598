"""The tensors of a torch_dist checkpoint to be written, as columns: a million records without an object for each.

    arrays    0: decoder.layers.self_attention.linear_qkv.weight, cut in 4       1: ...mlp.linear_fc1.weight, cut in 8
    tensors   name                                               array  prefix   records
              decoder.layers.0.self_attention.linear_qkv.weight  0      0        0..3
              decoder.layers.0.mlp.linear_fc1.weight             1      0        4..11
    records   file    0 1 2 3 0 0 1 1 ...                        start  0 0 0 0 32896 ...

Where the records of a file begin depends on the objects that stand before them; `start` counts from the first tensor.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from converters.errors import RequestError
from converters.names import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from converters.formats.torch_dist.parts import ArrayOut
    from converters.planning.plan import Drop


@dataclass(eq=False)
class Columns:
    """Canonical tensors and where their records lie.

    Attributes:
        arrays: The stored arrays.
        names: Source of each tensor, in the order in which they are read.
        array: (n,) position of its array.
        prefix: (n, depth) its indices along the array's leading axes, 0 where there are fewer.
        ranks: The ranks that have a file, ascending.
        file: (records,) position of the rank whose file holds a record; pieces of a tensor lie one behind the other.
        start: (records,) first byte of a record, counted from the first tensor in its file.
        sizes: Bytes of all records of each file.
    """

    arrays: Sequence[ArrayOut]
    names: Sequence[str]
    array: NDArray[Any]
    prefix: NDArray[Any]
    ranks: Sequence[int]
    file: NDArray[Any]
    start: NDArray[Any]
    sizes: Sequence[int]

    @classmethod
    def lay_out(
        cls,
        arrays: Sequence[ArrayOut],
        names: Sequence[str],
        array: Sequence[int],
        prefix: Sequence[tuple[int, ...]],
        owners: Sequence[tuple[int, ...]],
        owner: Sequence[int],
    ) -> Columns:
        """Puts the records into files.

        Args:
            arrays: The stored arrays.
            names: Source of each tensor.
            array: Position of its array.
            prefix: Its indices along the array's leading axes.
            owners: Ranks of the pieces of a tensor, for each way there is.
            owner: Which of these a tensor has.

        Raises:
            RequestError: A layer or an expert has a number that no model's has.
        """
        numbers = np.asarray(array, np.int32)
        depth = max((len(a.lead) for a in arrays), default=0)
        indices = np.zeros((len(numbers), depth), np.int32)
        depths = np.asarray([len(a.lead) for a in arrays], np.int64)[numbers] if len(numbers) else numbers
        for count in range(1, depth + 1):
            rows = np.flatnonzero(depths == count)
            far = next((row for row in rows.tolist() if max(prefix[row]) >= 1 << 31), None)
            if far is not None:
                raise RequestError(f"{printable(names[far])}: no model has that many layers or experts")
            indices[rows, :count] = np.asarray([prefix[row] for row in rows.tolist()], np.int32).reshape(-1, count)
        rank = _spread(np.asarray(owner, np.int64), owners)
        lengths = _spread(numbers, [[layout.length for layout in a.cut.layouts] for a in arrays])
        present = np.flatnonzero(np.bincount(rank)) if len(rank) else rank
        position = np.zeros(int(rank.max(initial=0)) + 1, np.uint16 if len(present) < 1 << 16 else np.int32)
        position[present] = np.arange(len(present))
        file = position[rank]
        start, sizes = stack(file, lengths, len(present))
        return cls(arrays, names, numbers, indices, present.tolist(), file, start, sizes.tolist())

    def __len__(self) -> int:
        """Number of tensors."""
        return len(self.array)

    @property
    def records(self) -> int:
        """Number of records."""
        return len(self.file)

    @cached_property
    def number(self) -> dict[str, int]:
        """Position of each source."""
        return {name: position for position, name in enumerate(self.names)}

    @cached_property
    def first(self) -> NDArray[np.int64]:
        """(n + 1,) first record of each tensor."""
        counts = np.asarray([len(a.cut.boxes) for a in self.arrays], np.int64)
        return np.concatenate([[0], np.cumsum(counts[self.array])]) if len(self) else np.zeros(1, np.int64)

    @cached_property
    def length(self) -> NDArray[np.int64]:
        """(records,) bytes of each record."""
        return _spread(self.array, [[layout.length for layout in a.cut.layouts] for a in self.arrays])

    def prove(self, drops: Iterable[Drop]) -> None:
        """Checks each way to cut once: the records tile the tensors, and hold all of their sources but what is dropped.

        Raises:
            RequestError: See `planning.plan.prove`.
        """
        by_source: dict[str, list[Drop]] = {}
        for drop in drops:
            by_source.setdefault(drop.source, []).append(drop)
        numbers, firsts = np.unique(self.array, return_index=True)
        cuts = {
            id(self.arrays[n].cut): (self.arrays[n].cut, self.names[first])
            for n, first in zip(numbers, firsts, strict=True)
        }
        for cut, source in cuts.values():
            cut.prove(source, by_source.get(source, ()))

    @cached_property
    def digest(self) -> str:
        """Changes when any of it changes."""
        cuts = list({id(a.cut): a.cut for a in self.arrays}.values())
        at = {id(cut): position for position, cut in enumerate(cuts)}
        arrays = [(a.key, a.lead, at[id(a.cut)]) for a in self.arrays]
        digest = hashlib.sha256(f"{cuts}{arrays}{list(self.ranks)}{list(self.sizes)}".encode("utf-8", "surrogatepass"))
        digest.update("\0".join(self.names).encode("utf-8", "surrogatepass"))
        for column in (self.array, self.prefix, self.file, self.start):
            digest.update(f"{column.dtype}{column.shape};".encode())
            digest.update(np.ascontiguousarray(column).data)
        return digest.hexdigest()


def stack(file: NDArray[Any], length: NDArray[np.int64], files: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where each record begins when those of a file lie one behind the other, in order; and the bytes of each file."""
    order = np.argsort(file, kind="stable")
    ends = np.cumsum(length[order])
    last = np.cumsum(np.bincount(file, minlength=files))
    totals = np.concatenate([[0], ends])[last]
    before = np.concatenate([[0], totals[:-1]]).astype(np.int64)
    start = np.empty(len(length), np.int64)
    start[order] = ends
    return start - length - before[file], totals - before


def _spread(number: NDArray[Any], table: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    """The rows of a table with these numbers, one behind the other."""
    if not len(number):
        return np.zeros(0, np.int64)
    counts = np.asarray([len(row) for row in table], np.int64)
    flat = np.fromiter((value for row in table for value in row), np.int64, int(counts.sum()))
    begin = np.cumsum(counts) - counts
    row_counts = counts[number]
    ends = np.cumsum(row_counts)
    out: NDArray[np.int64] = flat[np.repeat(begin[number] - (ends - row_counts), row_counts) + np.arange(int(ends[-1]))]
    return out
