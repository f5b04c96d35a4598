"""Elements of two tensors side by side: equal bits at the speed of memory, and numbers about those that are not equal.

The numbers, over all elements of a tensor, in fp64:

    differing   elements whose bits differ; with tolerances, those with |a - b| > atol + rtol * max(|a|, |b|), or with a NaN
                or an infinity on one side only; where the types differ and no tolerance is given, those that are not equal
    max abs     largest |a - b|
    max rel     largest |a - b| / max(|a|, |b|), 0 where both are 0: the rtol that would do with an atol of 0
    cosine      a . b / (|a| |b|) over the elements that are finite on both sides; 1 if both are 0, 0 if one is

NaN equals NaN, and an infinity the infinity of its sign. Values of different types are widened first, which is exact.
The sums behind the cosine are fp64, and fp32 for blocks of equal bits, where they cancel out: trees within blocks, blocks
in order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from converters.dtypes import dtype
from converters.io.arithmetic import BLOCK, CASTABLE, rounded, squares, widened
from converters.planning.plan import Op

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from converters.box import Box
    from converters.dtypes import DType
    from converters.io.arithmetic import Arithmetic


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The largest allowed distance of two values: |a - b| <= atol + rtol * max(|a|, |b|)."""

    rtol: float = 0.0
    atol: float = 0.0


class Spot(NamedTuple):
    """One element: its index in the tensor, and its value in A and in B."""

    position: tuple[int, ...]
    a: Any
    b: Any


@dataclass(slots=True)
class Difference:
    """The difference of two tensors, over the elements compared so far.

    Attributes:
        elements: How many.
        differing: How many of them differ, by the definition above.
        unequal: How many are not the same value, tolerated or not.
        max_abs: Largest distance; NaN counts for nothing here.
        max_rel: Largest distance relative to the larger of the two values.
        nan_a: NaN in the first tensor only.
        nan_b: NaN in the second only.
        dot: Sum of products.
        square_a: Sum of squares of the first.
        square_b: Sum of squares of the second.
        first: The first element that differs.
        worst: The element that lies furthest apart.
        rounds_a: Rounding a, to nearest, gives b; of two types that differ.
        rounds_b: Rounding b gives a.
    """

    elements: int = 0
    differing: int = 0
    unequal: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0
    nan_a: int = 0
    nan_b: int = 0
    dot: float = 0.0
    square_a: float = 0.0
    square_b: float = 0.0
    first: Spot | None = None
    worst: Spot | None = None
    rounds_a: bool = True
    rounds_b: bool = True

    @property
    def cosine(self) -> float:
        """Cosine of the angle between the two, seen as vectors."""
        if self.square_a == 0 or self.square_b == 0:
            return float(self.square_a == self.square_b)
        return max(-1.0, min(1.0, self.dot / math.sqrt(self.square_a) / math.sqrt(self.square_b)))

    def add(self, part: Difference) -> None:
        """Adds further elements of the same tensor; sums depend on the order of the calls."""
        if part.first is not None and (self.first is None or part.first.position < self.first.position):
            self.first = part.first
        if part.worst is not None and (
            self.worst is None
            or part.max_abs > self.max_abs
            or (part.max_abs == self.max_abs and part.worst.position < self.worst.position)
        ):
            self.worst = part.worst
        self.max_abs, self.max_rel = max(self.max_abs, part.max_abs), max(self.max_rel, part.max_rel)
        for name in ("elements", "differing", "unequal", "nan_a", "nan_b", "dot", "square_a", "square_b"):
            setattr(self, name, getattr(self, name) + getattr(part, name))
        self.rounds_a &= part.rounds_a
        self.rounds_b &= part.rounds_b


def prepared_type(kind: DType, op: Op, target: DType) -> DType:
    """The type of what `prepared` gives."""
    shifts = op in (Op.ADD_ONE, Op.SUBTRACT_ONE) and kind.name in CASTABLE and target.name in CASTABLE
    return target if shifts else kind


def prepared(bits: NDArray[Any], kind: DType, op: Op, target: DType) -> NDArray[Any]:
    """The elements of a source as they should stand in the target: an op is done as a conversion does it.

    A norm's weight that is stored as gamma - 1 is shifted in fp32 and rounded to the target's type; a transpose is a view.
    """
    if op is Op.TRANSPOSE:
        return bits.T
    if op is Op.COPY or not {kind.name, target.name} <= {*CASTABLE}:
        return bits
    shifted = widened(bits, kind).astype(np.float32) + np.float32(1 if op is Op.ADD_ONE else -1)
    return rounded(shifted.view("<u4"), dtype("float32"), target)


_PROBE = 64  # elements that mostly tell
_TINY = float(np.finfo(np.float64).tiny)


@dataclass(frozen=True, slots=True)
class DifferenceOf:
    """The check of `diff` (a `converters.io.questions.Question`): two tensors of one shape, element by element.

    Attributes:
        kind_a: Type of the first.
        kind_b: Type of the second.
        tolerance: How far apart values may be; None asks for equal bits.
        total: The difference of all tiles so far.
    """

    kind_a: DType
    kind_b: DType
    tolerance: Tolerance | None = None
    total: Difference = field(default_factory=Difference)

    @property
    def columns(self) -> int:
        """Numbers of a block."""
        return 13

    def __call__(self, on: Arithmetic, bits_a: Any, bits_b: Any) -> Sequence[Any]:
        """See `Question`."""
        kind_a, kind_b = self.kind_a, self.kind_b
        narrow_a, narrow_b = on.values(bits_a, kind_a, 0), on.values(bits_b, kind_b, 1)
        changed = bits_a != bits_b if kind_a == kind_b and kind_a.itemsize < 16 else None
        if changed is not None and not changed.any():
            square, _ = squares(on, narrow_a)
            return 0, 0, 0, 0, square, square, square, 0, 0, 0, 0, 1, 1
        a, b = on.wide(0, narrow_a), on.wide(1, narrow_b)
        pairs, finite = ((a, b), (a, a), (b, b)), None
        sums = on.sums(*pairs)
        special = not np.isfinite(sums[1] + sums[2])
        if special:
            finite = np.isfinite(a) & np.isfinite(b)
            sums = on.sums(*pairs, use=finite)
        distance, scratch = on.distance(a, b), on.row(4, a)
        larger = np.abs(a, out=on.row(3, a))
        np.maximum(larger, np.abs(b, out=scratch), out=larger)
        equal, nans = distance == 0, (np.intp(0), np.intp(0))
        if special:
            nan_a, nan_b = np.isnan(a), np.isnan(b)
            equal, nans = (
                (a == b) | (nan_a & nan_b),
                (np.count_nonzero(nan_a & ~nan_b), np.count_nonzero(nan_b & ~nan_a)),
            )
            distance[equal | nan_a | nan_b] = 0.0  # a NaN on one side is further than any number: it is counted
        if changed is not None and kind_a.itemsize == 8 and not kind_a.floating and a.dtype.kind == "f":
            equal = ~changed  # of integers beyond 2^53 fp64 does not know the last digits
            distance[changed & (distance == 0)] = 1.0
        differs = ~equal if changed is None else changed
        if self.tolerance is not None:
            np.add(np.multiply(larger, self.tolerance.rtol, out=scratch), self.tolerance.atol, out=scratch)
            within = distance <= scratch
            # an infinity is within rtol of an infinity, but of nothing else
            differs = ~(within if finite is None else equal | (within & finite))
        relative = np.divide(distance, np.maximum(larger, _TINY, out=larger), out=scratch)
        if special:
            relative[nan_a | nan_b] = 0.0
            relative[np.isinf(distance)] = math.inf
        return (
            np.count_nonzero(differs),
            np.count_nonzero(~equal),
            *nans,
            *sums,
            distance.max(),
            relative.max(),
            differs.argmax(),
            distance.argmax(),
            *self._rounds(bits_a, bits_b),
        )

    def _rounds(self, bits_a: Any, bits_b: Any) -> tuple[bool, bool]:
        kind_a, kind_b = self.kind_a, self.kind_b
        if kind_a == kind_b or kind_a.name not in CASTABLE or kind_b.name not in CASTABLE:
            return False, False
        return _is_rounded(bits_a, bits_b, kind_a, kind_b), _is_rounded(bits_b, bits_a, kind_b, kind_a)

    def add(self, tile: Box, rows: NDArray[np.float64], arrays: Sequence[NDArray[Any]]) -> None:
        """See `Question`; indices are those of the tensor."""
        a, b = (array.reshape(-1) for array in arrays)
        if not a.size:
            return
        out = Difference(a.size)
        out.differing, out.unequal, out.nan_a, out.nan_b = map(int, rows[:, :4].sum(0))
        out.dot, out.square_a, out.square_b = rows[:, 4:7].cumsum(0)[-1].tolist()  # one after the other
        out.max_abs, out.max_rel = rows[:, 7:9].max(0).tolist()
        out.rounds_a, out.rounds_b = (bool(rows[:, column].all()) for column in (11, 12))

        def spot(block: int, column: int) -> Spot:
            at = block * BLOCK + int(rows[block, column])
            inside = np.unravel_index(at, tile.shape)
            index = tuple(start + int(i) for start, i in zip(tile.start, inside, strict=True))
            return Spot(index, _value(a[at : at + 1], self.kind_a), _value(b[at : at + 1], self.kind_b))

        if out.differing:
            out.first = spot(int((rows[:, 0] > 0).argmax()), 9)
        if out.max_abs > 0:
            out.worst = spot(int(rows[:, 7].argmax()), 10)
        self.total.add(out)


def _is_rounded(wide: Any, narrow: Any, kind: DType, target: DType) -> bool:
    return bool(
        np.array_equal(rounded(wide[:_PROBE], kind, target), narrow[:_PROBE])
        and np.array_equal(rounded(wide, kind, target), narrow)
    )


def _value(bits: NDArray[Any], kind: DType) -> Any:
    """One element for people and JSON."""
    if kind.name.startswith(("int", "uint", "bool")):
        return int(bits.view(f"<i{kind.itemsize}")[0] if kind.name.startswith("int") else bits[0])
    value = widened(bits, kind)[0]
    return str(complex(value)) if kind.name.startswith("complex") else float(value)
