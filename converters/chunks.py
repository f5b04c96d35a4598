"""Chunks: boxes of the arrays that a checkpoint's files store, independent of the format.

A million chunks are arrays here, not a million Python objects: `StoredArray` keeps the geometry of one stored key, and
a canonical tensor (one layer, one expert) is a view on it. `Chunk` objects are made for one tensor at a time, when
asked for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from converters.box import Box, contiguous_boxes, flat_range, runs, strides

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from converters.dtypes import DType


@dataclass(frozen=True, slots=True)
class Chunk:
    """A stored piece of a tensor.

    Attributes:
        box: The elements, in the coordinates of the canonical tensor.
        record: Number of the record that holds them; only the reader that made it knows what that means. -1: missing.
        base: Element of the record's payload where they begin; from there on they lie in C order of `box.shape`.
        window: For some columns of a wider matrix: their first element in it, and its shape; `base` is where it begins.
            An axis of which the tensor takes one element may stand behind the tensor's own, and axes of the tensor of
            which the piece has one element may be none of the matrix's.
        transposed: What is stored is the transpose of the matrix.
    """

    box: Box
    record: int
    base: int
    window: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    transposed: bool = False

    def alternate(self) -> tuple[Chunk, Chunk]:
        """A whole transposed matrix as two, of every other row: the last axis of the tensor becomes two, `(n // 2, 2)`."""
        assert self.transposed
        assert self.window is not None
        rows, width = self.window[1]
        start, shape = self.box.start[:-1], self.box.shape[:-1]
        first, second = (
            Chunk(
                Box((*start, 0, which), (*shape, rows // 2, 1)),
                self.record,
                self.base,
                ((0, which * width), (rows // 2, 2 * width)),
                True,
            )
            for which in range(2)
        )
        return first, second

    def stored(self, part: Box) -> tuple[Box, tuple[int, ...]]:
        """Where elements `part` of the tensor lie: a box of an array, and the array's shape; it begins at `base`."""
        inner, shape = part.relative_to(self.box.start), self.box.shape
        if self.transposed:
            inner, shape = inner.flipped, shape[::-1]
        if self.window is None:
            return inner, shape
        start, within = self.window
        tensor_shape = shape
        axes = list(zip(inner.start, inner.shape, strict=True))
        while len(axes) > len(start):
            gone = tensor_shape.index(1)
            axes, tensor_shape = axes[:gone] + axes[gone + 1 :], tensor_shape[:gone] + tensor_shape[gone + 1 :]
        axes += [(0, 1)] * (len(start) - len(axes))
        inner = Box(tuple(a for a, _ in axes), tuple(n for _, n in axes))
        return inner.shifted(start), within


@dataclass(frozen=True, slots=True)
class Scales:
    """What the elements of a quantized array are multiplied by: one factor for each block of them.

    Attributes:
        stored: Element type of the quantized array.
        block: Elements along each axis that share a factor; the blocks at the upper edges may be smaller.
        part: Where the factors are stored, an array of `ceil(size / block)` along each axis.
        dtype: Element type of the factors.
        packed: Elements are codes of four bits (E2M1), two in a byte, the lower half first; `block` is then one number, of
            elements behind each other in the array, and a multiple of it is the length of every row. Bases and windows of
            the array's chunks count codes.
    """

    stored: DType
    block: tuple[int, ...]
    part: FlatPart
    dtype: DType
    packed: bool = False


@dataclass(frozen=True, slots=True)
class StoredArray:
    """The chunks of one stored key, as arrays sorted by their first element.

    Attributes:
        key: The key as the file spells it.
        shape: Shape of the stored array, leading layer and expert axes included.
        starts: (n, ndim) first element of each chunk.
        sizes: (n, ndim) elements of each chunk along each axis.
        records: (n,) record numbers, -1 where the data is missing.
        extent: Shape of what every record holds, if some hold more than their chunk: at the upper edge of a zarr array
            chunks keep their full size. None: each record holds its chunk and no more.
        scales: For quantized elements, what makes them those of the tensor. Its chunks must keep their place in the array:
            their boxes are those of the array, or they have a window.
    """

    key: str
    shape: tuple[int, ...]
    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    records: NDArray[np.int64]
    extent: tuple[int, ...] | None = None
    scales: Scales | None = None

    @classmethod
    def one_chunk(cls, key: str, shape: tuple[int, ...], record: int) -> StoredArray:
        """An array that one record holds."""
        starts, sizes = np.zeros((1, len(shape)), np.int64), np.array([shape], np.int64)
        return cls(key, shape, starts, sizes, np.array([record], np.int64))

    def rows(self, prefix: tuple[int, ...]) -> NDArray[np.int64]:
        """Positions of the chunks that hold elements whose first indices are `prefix`."""
        hit = np.arange(len(self.starts), dtype=np.int64)
        for axis, index in enumerate(prefix):
            if axis == 0 and len(self.starts) > 64 and self.sizes[:, 0].max() == 1:  # sorted, one layer a chunk: bisect
                low, high = np.searchsorted(self.starts[:, 0], [index, index + 1])
                hit = hit[low:high]
                continue
            start = self.starts[hit, axis]
            hit = hit[(start <= index) & (index < start + self.sizes[hit, axis])]
        return hit


@dataclass(frozen=True, slots=True)
class Part:
    """Where some of a tensor's elements are stored: the sub-array of a stored key at fixed leading indices.

    Attributes:
        array: The stored key.
        prefix: Indices into its leading (layer, expert) axes.
        shift: Where the sub-array's first element lies in the tensor.
        block: For a tensor that was cut into blocks, each flattened and stored as one row of `array` (the optimizer of
            Megatron-Core 0.8 to 0.15): shape of one block, with the leading axes; None otherwise.
    """

    array: StoredArray
    prefix: tuple[int, ...] = ()
    shift: tuple[int, ...] | None = None
    block: tuple[int, ...] | None = None

    def rows(self) -> NDArray[np.int64]:
        """Positions in `array` of the chunks that may hold elements of this part."""
        return self.array.rows(() if self.block else self.prefix)

    @property
    def count(self) -> int:
        """Number of stored chunks."""
        return len(self.array.rows(self.prefix))

    def chunks(self) -> Iterator[Chunk]:
        """The chunks of this part, in the coordinates of the tensor."""
        for row in self.rows().tolist():
            start, size = self.array.starts[row].tolist(), self.array.sizes[row].tolist()
            record = int(self.array.records[row])
            for box, base in self._flattened(start, size) if self.block else self._plain(start, size):
                yield Chunk(box if self.shift is None else box.shifted(self.shift), record, base)

    def _plain(self, start: list[int], size: list[int]) -> Iterator[tuple[Box, int]]:
        depth, base = len(self.prefix), 0
        extent = self.array.extent or tuple(size)
        for axis in range(depth):
            base = base * extent[axis] + self.prefix[axis] - start[axis]
        base *= math.prod(extent[depth:])
        if self.array.extent is None:
            yield Box(tuple(start[depth:]), tuple(size[depth:])), base
            return
        inside = Box((0,) * (len(size) - depth), tuple(size[depth:]))
        for box in contiguous_boxes(
            inside, extent[depth:]
        ):  # one, but for a chunk that ends before its record's rows do
            yield box.shifted(start[depth:]), base + runs(box, extent[depth:])[0]

    def _flattened(self, start: list[int], size: list[int]) -> Iterator[tuple[Box, int]]:
        # One row of the array is one block of the tensor, flattened; a chunk is a range of it (Megatron-Core 0.8 to
        # 0.15, dist_checkpointing/strategies/resharding.py). A range is at most 2 * ndim - 1 boxes.
        assert self.block is not None
        depth, origin = len(self.prefix), [n * b for n, b in zip(start[:-1], self.block, strict=True)]
        for box in flat_range(self.block, start[-1], size[-1]):
            at = box.shifted(origin)
            if all(a <= i < a + n for a, n, i in zip(at.start, at.shape, self.prefix, strict=False)):
                base, stride = 0, 1
                for a, n, i in reversed(list(zip(at.start, at.shape, self.prefix, strict=False))):
                    base, stride = base + (i - a) * stride, stride * n
                first = sum(i * s for i, s in zip(box.start, strides(self.block), strict=True)) - start[-1]
                inner = Box(at.start[depth:], at.shape[depth:])
                yield inner, first + base * inner.volume


@dataclass(frozen=True, slots=True)
class FlatPart:
    """Where some of a tensor's elements are stored: ranges of a one-dimensional key that holds many tensors.

        key      |  fc2  |   fc1 gate   |    fc1 up    | ... |      a bucket of the distributed optimizer
        records  +---------------+---------------+-------------+   cut anywhere, also inside a piece
                         ^ first of the gate's box

    Attributes:
        array: The stored key.
        pieces: Boxes of the tensor, and the element of the key where each begins; from there on it lies in C order.
    """

    prefix: ClassVar[tuple[int, ...]] = ()
    block: ClassVar[None] = None

    array: StoredArray
    pieces: tuple[tuple[Box, int], ...]

    def rows(self) -> NDArray[np.int64]:
        """Positions in `array` of the chunks that hold elements of this part."""
        rows = [np.arange(*self._span(first, box.volume)) for box, first in self.pieces]
        return np.unique(np.concatenate(rows)) if rows else np.zeros(0, np.int64)

    @property
    def count(self) -> int:
        """Number of stored chunks."""
        return len(self.rows())

    def chunks(self) -> Iterator[Chunk]:
        """The chunks of this part, in the coordinates of the tensor."""
        for box, first in self.pieces:
            for row in range(*self._span(first, box.volume)):
                start, size = int(self.array.starts[row, 0]), int(self.array.sizes[row, 0])
                low, high = max(first, start), min(first + box.volume, start + size)
                base, record = low - start, int(self.array.records[row])
                for inner in flat_range(box.shape, low - first, high - low):
                    yield Chunk(inner.shifted(box.start), record, base)
                    base += inner.volume

    def _span(self, first: int, length: int) -> tuple[int, int]:
        """First and one past the last chunk that reach into a range; empty chunks at its edges may be among them."""
        starts = self.array.starts[:, 0]
        low = int(np.searchsorted(starts, first, side="right")) - 1
        return max(low, 0), int(np.searchsorted(starts, first + length, side="left"))


@dataclass(frozen=True, slots=True)
class ViewPart:
    """Where some of a tensor's elements are stored: pieces of another tensor, whose key holds it and nothing else.

    Attributes:
        array: The stored key, one-dimensional.
        pieces: Those pieces; their records are the array's.
    """

    prefix: ClassVar[tuple[int, ...]] = ()
    block: ClassVar[None] = None

    array: StoredArray
    pieces: tuple[Chunk, ...]

    def rows(self) -> NDArray[np.int64]:
        """Positions of the chunks that hold elements of this part: all."""
        return np.arange(len(self.array.starts), dtype=np.int64)

    @property
    def count(self) -> int:
        """Number of pieces."""
        return len(self.pieces)

    def chunks(self) -> Iterator[Chunk]:
        """The pieces, in the coordinates of the tensor."""
        return iter(self.pieces)
