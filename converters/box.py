"""Rectangles of array elements: the only place with overlap arithmetic.

A box says which elements of an N-dimensional array are meant: `start[d] <= index[d] < start[d] + shape[d]`. Every
method's docstring says in whose coordinates its answer is. A 0-dimensional box covers the one element of a scalar.
"""

from __future__ import annotations

import itertools
import math
import operator
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from types import EllipsisType

    from numpy.typing import NDArray

    Corners = NDArray[np.int64]

_PRIMES = (2**31 - 1, 2**31 - 19, 2**31 - 61)
_FEW = 32  # boxes; more are weighed together


@dataclass(frozen=True, slots=True)
class Box:
    """A half-open rectangle of elements.

    Args:
        start: First index along each axis.
        shape: Number of elements along each axis.
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """The box that covers an array of `shape`, in that array's coordinates."""
        return cls((0,) * len(shape), tuple(shape))

    @classmethod
    def rows(cls, shape: Sequence[int], first: int) -> Box:
        """The rows of an array from `first` on."""
        return cls((first, *(0,) * (len(shape) - 1)), (shape[0] - first, *shape[1:]))

    @property
    def stop(self) -> tuple[int, ...]:
        """One past the last index along each axis, in the same coordinates as `start`."""
        return tuple(a + n for a, n in zip(self.start, self.shape, strict=True))

    @property
    def volume(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice | EllipsisType, ...]:
        """Index expression for an array whose coordinates `start` is given in; gives a view also of a scalar's array."""
        return (..., *(slice(a, a + n) for a, n in zip(self.start, self.shape, strict=True)))

    def intersect(self, other: Box) -> Box | None:
        """The elements in both boxes, in their common coordinates; None if there are none."""
        start, shape = [], []
        for a, n, b, m in zip(self.start, self.shape, other.start, other.shape, strict=True):
            low, high = (a if a > b else b), (a + n if a + n < b + m else b + m)
            if high <= low:
                return None
            start.append(low)
            shape.append(high - low)
        return Box(tuple(start), tuple(shape))

    def without(self, other: Box) -> Iterator[Box]:
        """Boxes that tile the elements which are not in the other one, in their common coordinates."""
        common = self.intersect(other)
        if common is None:
            yield self
            return
        start, shape = self.start, self.shape
        for axis, (low, n) in enumerate(zip(common.start, common.shape, strict=True)):
            for first, stop in ((start[axis], low), (low + n, start[axis] + shape[axis])):
                if first < stop:
                    before, behind = (*start[:axis], first), start[axis + 1 :]
                    yield Box((*before, *behind), (*shape[:axis], stop - first, *shape[axis + 1 :]))
            start, shape = (*start[:axis], low, *start[axis + 1 :]), (*shape[:axis], n, *shape[axis + 1 :])

    def relative_to(self, origin: Sequence[int]) -> Box:
        """The same elements in coordinates whose zero is `origin`."""
        return Box(tuple(a - o for a, o in zip(self.start, origin, strict=True)), self.shape)

    def shifted(self, by: Sequence[int]) -> Box:
        """The same elements in coordinates whose zero lies `by` before this box's zero."""
        return Box(tuple(a + o for a, o in zip(self.start, by, strict=True)), self.shape)

    @property
    def flipped(self) -> Box:
        """The same elements of a matrix in coordinates of its transpose."""
        return Box(self.start[::-1], self.shape[::-1])

    def inside(self, shape: Sequence[int]) -> bool:
        """Whether every element exists in an array of `shape`."""
        return len(shape) == len(self.shape) and all(
            a >= 0 and n >= 0 and a + n <= m for a, n, m in zip(self.start, self.shape, shape, strict=True)
        )

    def split(self, axis: int, size: int) -> Iterator[Box]:
        """Boxes of at most `size` elements along `axis` that tile this one, in the same coordinates, in order."""
        for low in range(self.start[axis], self.start[axis] + self.shape[axis], size):
            n = min(size, self.start[axis] + self.shape[axis] - low)
            yield Box(
                (*self.start[:axis], low, *self.start[axis + 1 :]), (*self.shape[:axis], n, *self.shape[axis + 1 :])
            )

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{b}" for a, b in zip(self.start, self.stop, strict=True)) + "]"


def contiguous_tiles(box: Box, max_elements: int, axis: int = 0) -> Iterator[Box]:
    """Cuts `box` into boxes of at most `max_elements`, each contiguous in C order within `box`, in C order.

    The answer is in the coordinates of `box`. Whole trailing axes are kept together as long as they fit.

    Args:
        axis: The first along which it may be cut: along those before it, it has one element.
    """
    if not box.volume:
        return
    if axis == len(box.shape):
        yield box
        return
    row = math.prod(box.shape[axis + 1 :])
    if row <= max_elements:
        yield from box.split(axis, max(1, max_elements // row))
        return
    for part in box.split(axis, 1):
        yield from contiguous_tiles(part, max_elements, axis + 1)


def strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Distance between neighbours along each axis of a C-order array, in elements; as torch, an empty axis counts as one."""
    sizes = (max(n, 1) for n in reversed(shape[1:]))
    return tuple(itertools.accumulate(sizes, operator.mul, initial=1))[::-1] if shape else ()


def runs(box: Box, shape: Sequence[int]) -> tuple[int, int, list[tuple[int, int]]]:
    """How the elements of `box` lie in a C-order array of `shape`.

    Returns:
        `(first, length, outer)`: the element offset of the first run, the number of elements in each contiguous run,
        and for each remaining outer axis, outermost first, `(count, stride)` in elements.
    """
    steps = strides(shape)
    first = sum(a * step for a, step in zip(box.start, steps, strict=True))
    length, axis = 1, len(shape)
    while axis > 0:
        axis -= 1
        length *= box.shape[axis]
        if box.shape[axis] != shape[axis]:
            break
    else:
        axis = 0
    outer = [(box.shape[d], steps[d]) for d in range(axis) if box.shape[d] != 1]
    return first, length, outer


def run_starts(first: int, outer: Sequence[tuple[int, int]]) -> Iterator[int]:
    """Element offsets of the runs that `runs` describes, in order."""
    for steps in itertools.product(*([index * stride for index in range(count)] for count, stride in outer)):
        yield first + sum(steps)


def contiguous_boxes(box: Box, shape: Sequence[int]) -> Iterator[Box]:
    """Boxes that tile `box`, each one run of a C-order array of `shape`; coordinates and order are those of the array."""
    if not runs(box, shape)[2]:
        yield box
        return
    axis = next(axis for axis, n in enumerate(box.shape) if n > 1)
    for part in box.split(axis, 1):
        yield from contiguous_boxes(part, shape)


def flat_range(shape: Sequence[int], start: int, length: int) -> Iterator[Box]:
    """Boxes that tile elements `start` to `start + length` of a flattened C-order array of `shape`, in C order.

    The answer is in the array's coordinates: at most `2 * ndim - 1` boxes, each contiguous in the flattened order.
    """
    if length <= 0:
        return
    if not shape:
        yield Box((), ())
        return
    inner = strides(shape)
    position, end = start, start + length
    while position < end:
        axis = 0  # the outermost axis along which we stand at a beginning and have at least one whole step left
        while axis < len(shape) - 1 and (position % inner[axis] or end - position < inner[axis]):
            axis += 1
        index, remainder = [], position
        for stride in inner:
            index.append(remainder // stride)
            remainder %= stride
        steps = min((end - position) // inner[axis], shape[axis] - index[axis])
        yield Box(tuple(index), (*(1,) * axis, steps, *shape[axis + 1 :]))
        position += steps * inner[axis]


def ranges_between(ranges: Iterable[tuple[int, int]], size: int) -> Iterator[tuple[int, int]]:
    """What ranges, in any order, leave out of the first `size` numbers: `(first, one past the last)`."""
    at = 0
    for start, end in (*sorted(ranges), (size, size)):
        if start > at:
            yield at, start
        at = max(at, end)


def tiling_fault(shape: Sequence[int], starts: Corners, sizes: Corners) -> tuple[Box, list[int]] | None:
    """Where boxes that lie inside an array of `shape` do not tile it; N log N whatever they look like.

    Halves the array again and again, always going on with a half that is not tiled.

    Args:
        shape: Elements of the array.
        starts: First index of each box: [boxes, axes].
        sizes: Elements of each box: [boxes, axes].

    Returns:
        None if they tile it, else elements that none of the boxes covers, or all of those whose rows are given.
    """
    rows = np.flatnonzero((sizes > 0).all(axis=1))
    starts, stops = starts[rows], starts[rows] + sizes[rows]
    low, high = np.zeros(len(shape), np.int64), np.asarray(shape, np.int64)
    if not math.prod(shape) or _tile(low, high, starts, stops):
        return None
    while True:
        if not len(rows) or ((starts == low).all() and (stops == high).all()):
            return Box(tuple(low.tolist()), tuple((high - low).tolist())), rows[:2].tolist()
        cuts = [_inner_cuts(low[axis], high[axis], starts[:, axis], stops[:, axis]) for axis in range(len(shape))]
        axis = max(range(len(shape)), key=lambda axis: len(cuts[axis]))
        middle = cuts[axis][len(cuts[axis]) // 2]
        for first, last in ((low[axis], middle), (middle, high[axis])):
            low, high = low.copy(), high.copy()
            low[axis], high[axis] = first, last
            inside = (starts[:, axis] < last) & (stops[:, axis] > first)
            half = np.maximum(starts[inside], low), np.minimum(stops[inside], high)
            if not _tile(low, high, *half):
                break
        rows, (starts, stops) = rows[inside], half


def _inner_cuts(low: int, high: int, starts: Corners, stops: Corners) -> Corners:
    cuts = np.unique(np.concatenate([starts, stops]))
    return cuts[(cuts > low) & (cuts < high)]


def _tile(low: Corners, high: Corners, starts: Corners, stops: Corners) -> bool:
    """Whether boxes inside a box cover each of its elements once.

    A few are compared with each other. For many, elements get secret random weights, products of one weight for each index
    along each axis. The boxes weigh as much as all of it, for every choice of weights, exactly if they tile it
    (Schwartz-Zippel); three choices modulo primes leave less than one chance in 2^80 to miss that they do not.
    """
    if len(starts) <= _FEW:
        volume = sum(math.prod(size) for size in (stops - starts).tolist())  # of Python's integers: none overflows
        meeting = ((starts[:, None] < stops) & (starts < stops[:, None])).all(axis=2)
        return volume == math.prod((high - low).tolist()) and int(meeting.sum()) == len(starts)
    axes = [
        axis for axis in range(len(low)) if (starts[:, axis] > low[axis]).any() or (stops[:, axis] < high[axis]).any()
    ]
    if not axes:
        return False
    positions = []
    for axis in axes:
        cuts, at = np.unique(
            np.concatenate([[low[axis], high[axis]], starts[:, axis], stops[:, axis]]), return_inverse=True
        )
        positions.append((len(cuts), at[:2], at[2 : 2 + len(starts)], at[2 + len(starts) :]))
    for prime in _PRIMES:
        weights, total = np.ones(len(starts), np.int64), 1
        for count, (first, last), begins, ends in positions:
            # secret: who knows the weights can make boxes that pass; not of numpy.random, slow to import
            before = (np.frombuffer(os.urandom(8 * count), np.uint64) % prime).astype(np.int64)
            weights = weights * ((before[ends] - before[begins]) % prime) % prime
            total = total * int(before[last] - before[first]) % prime
        if int(weights.sum()) % prime != total:
            return False
    return True


def _weighed(boxes: Sequence[Box], shape: Sequence[int] | None = None) -> bool:
    """Whether boxes, if they are many, tile an array of `shape`, by default the box that encloses them; False: unknown."""
    if len(boxes) <= _FEW:
        return False
    starts = np.array([box.start for box in boxes], np.int64)
    stops = starts + np.array([box.shape for box in boxes], np.int64)
    low = starts.min(axis=0) if shape is None else np.zeros(len(shape), np.int64)
    return _tile(low, stops.max(axis=0) if shape is None else np.asarray(shape, np.int64), starts, stops)


def find_overlap(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """The positions of two boxes that share an element, or None when all are disjoint.

    A sweep along the first axis with a recursion into the next one; empty boxes share nothing.
    """
    live = [i for i, box in enumerate(boxes) if box.volume > 0]
    if len(live) < 2 or _weighed([boxes[i] for i in live]):
        return None
    return _overlap(boxes, live, 0)


def _overlap(boxes: Sequence[Box], live: list[int], axis: int) -> tuple[int, int] | None:
    if len(live) < 2:
        return None
    if axis == len(boxes[live[0]].start):
        return live[0], live[1]
    starts: dict[int, list[int]] = {}
    for i in live:
        starts.setdefault(boxes[i].start[axis], []).append(i)
    active: list[int] = []
    for low in sorted(starts):
        active = [i for i in active if boxes[i].start[axis] + boxes[i].shape[axis] > low]
        fresh = starts[low]
        if active or len(fresh) > 1:
            # only pairs that include a fresh box are new here
            pair = _overlap(boxes, active + fresh, axis + 1)
            if pair is not None:
                return pair
        active += fresh
    return None


def uncovered(shape: Sequence[int], boxes: Sequence[Box]) -> Box | None:
    """A box of elements of an array of `shape` that no box covers, in the array's coordinates; None if all are.

    The boxes must lie inside the array; they may overlap.
    """
    whole = Box.whole(shape)
    live = [box for box in boxes if box.volume > 0]
    if whole.volume == 0 or _weighed(live, shape):
        return None
    if sum(box.volume for box in live) >= whole.volume and find_overlap(live) is None:
        return None
    left = [whole]
    for box in live:
        left = [remainder for part in left for remainder in part.without(box)]
    return left[0] if left else None
