"""Elements of two tensors side by side: equal bits at the speed of memory, and numbers about those that are not equal.

The numbers, over all elements of a tensor, in fp64:

    differing   elements whose bits differ; with tolerances, those with |a - b| > atol + rtol * max(|a|, |b|), or with a NaN
                or an infinity on one side only; where the types differ and no tolerance is given, those that are not equal
    max abs     largest |a - b|
    max rel     largest |a - b| / max(|a|, |b|), 0 where both are 0: the rtol that would do with an atol of 0
    cosine      a . b / (|a| |b|) over the elements that are finite on both sides; 1 if both are 0, 0 if one is

NaN equals NaN, and an infinity the infinity of its sign. Values of different types are widened first, which is exact.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from converters.dtypes import dtype
from converters.optimizer.proof import rounded
from converters.planning.plan import Op

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from converters.dtypes import DType

__all__ = ["BLOCK", "Difference", "Tolerance", "compare", "prepared", "widened"]

BLOCK = 1 << 15
"""Elements that are looked at together: what is computed of them stays in the processor's cache."""
_CASTABLE = ("float64", "float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far apart values may be: |a - b| <= atol + rtol * max(|a|, |b|)."""

    rtol: float = 0.0
    atol: float = 0.0


@dataclass(slots=True)
class Difference:
    """What is known of a number of elements that were compared.

    Attributes:
        elements: How many.
        differing: How many of them differ.
        unequal: How many are not the same value, tolerated or not.
        max_abs: Largest distance; NaN counts for nothing here.
        max_rel: Largest distance relative to the larger of the two values.
        nan_a: NaN in the first tensor only.
        nan_b: NaN in the second only.
        dot: Sum of products.
        square_a: Sum of squares of the first.
        square_b: Sum of squares of the second.
        first: Index of the first one that differs, with both values.
        worst: Index of the one that lies furthest apart, with both values.
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
    first: tuple[tuple[int, ...], Any, Any] | None = None
    worst: tuple[tuple[int, ...], Any, Any] | None = None
    rounds_a: bool = True
    rounds_b: bool = True

    @property
    def cosine(self) -> float:
        """Cosine of the angle between the two, seen as vectors."""
        if self.square_a == 0 or self.square_b == 0:
            return float(self.square_a == self.square_b)
        return max(-1.0, min(1.0, self.dot / math.sqrt(self.square_a) / math.sqrt(self.square_b)))

    def add(self, other: Difference) -> None:
        """Takes in further elements of the same tensor; sums are those of the order in which this is called."""
        if other.first is not None and (self.first is None or other.first[0] < self.first[0]):
            self.first = other.first
        if other.worst is not None and (self.worst is None or _further(other, self)):
            self.worst = other.worst
        self.max_abs, self.max_rel = max(self.max_abs, other.max_abs), max(self.max_rel, other.max_rel)
        for name in ("elements", "differing", "unequal", "nan_a", "nan_b", "dot", "square_a", "square_b"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.rounds_a &= other.rounds_a
        self.rounds_b &= other.rounds_b


def _further(one: Difference, other: Difference) -> bool:
    assert one.worst is not None
    assert other.worst is not None
    return one.max_abs > other.max_abs or (one.max_abs == other.max_abs and one.worst[0] < other.worst[0])


def widened(bits: NDArray[Any], kind: DType) -> NDArray[Any]:
    """Elements as fp64, complex ones as complex128; exact for all types but 64-bit integers beyond 2^53.

    Args:
        bits: The elements as unsigned integers of their size.
        kind: Their type.
    """
    values: NDArray[Any]
    if kind.name == "bfloat16":
        values = (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    elif kind.name.startswith("float8"):
        values = _float8(kind.name)[bits]
    elif kind.name.startswith("complex"):
        values = bits.view(f"<c{kind.itemsize}").astype(np.complex128)
    else:
        code = "f" if kind.floating else "u" if kind.name.startswith(("uint", "bool")) else "i"
        values = bits.view(f"<{code}{kind.itemsize}").astype(np.float64)
    return values


@lru_cache
def _float8(name: str) -> NDArray[np.float64]:
    """All 256 values of a type; torch knows them."""
    import torch

    values: NDArray[np.float64] = torch.arange(256, dtype=torch.uint8).view(getattr(torch, name)).double().numpy()
    return values


def prepared(bits: NDArray[Any], kind: DType, op: Op, target: DType) -> tuple[NDArray[Any], DType]:
    """The elements of a source as they should stand in the target, and their type: an op is done as a conversion does it.

    A norm's weight that is stored as gamma - 1 is shifted in fp32 and rounded to the target's type; a transpose is a view.
    """
    if op is Op.TRANSPOSE:
        return bits.T, kind
    if op is Op.COPY:
        return bits, kind
    if kind.name not in _CASTABLE or target.name not in _CASTABLE:
        return bits, kind
    single = dtype("float32")
    shifted = widened(bits, kind).astype(np.float32) + np.float32(1 if op is Op.ADD_ONE else -1)
    return rounded(shifted.view("<u4"), single, target), target


def compare(
    a: NDArray[Any], b: NDArray[Any], kind_a: DType, kind_b: DType, tolerance: Tolerance | None = None
) -> Difference:
    """Compares two arrays of one shape, element by element.

    Args:
        a: Elements of the first as unsigned integers of their size.
        b: Those of the second.
        kind_a: Their type.
        kind_b: Its type.
        tolerance: How far apart values may be; None asks for equal bits.

    Returns:
        What there is to say; indices are those of the arrays.
    """
    flat_a, flat_b = np.ascontiguousarray(a).reshape(-1), np.ascontiguousarray(b).reshape(-1)
    scratch: _Scratch | None = getattr(_THREAD, "scratch", None)
    if scratch is None:
        scratch = _THREAD.scratch = _Scratch()
    out = Difference()
    for at in range(0, flat_a.size, BLOCK):
        one, other = flat_a[at : at + BLOCK], flat_b[at : at + BLOCK]
        if kind_a == kind_b and _same_bits(one, other):
            square = _square(scratch, one, kind_a)
            out.add(Difference(one.size, dot=square, square_a=square, square_b=square))
            continue
        found = _block(scratch, one, other, kind_a, kind_b, tolerance)
        found.rounds_a = out.rounds_a and _rounds(one, other, kind_a, kind_b)
        found.rounds_b = out.rounds_b and _rounds(other, one, kind_b, kind_a)
        for name in ("first", "worst"):
            spot = getattr(found, name)
            if spot is not None:
                index = tuple(int(n) for n in np.unravel_index(at + spot[0][0], a.shape))
                setattr(found, name, (index, *spot[1:]))
        out.add(found)
    return out


_THREAD = threading.local()


class _Scratch:
    """Arrays of a block that one thread uses again and again: to ask the system for memory costs more than to fill it."""

    def __init__(self) -> None:
        self.single = np.empty(BLOCK, np.uint32)
        self.wide = np.empty((6, BLOCK), np.float64)

    def row(self, number: int, size: int) -> NDArray[np.float64]:
        """One of the arrays."""
        return self.wide[number, :size]

    def narrow(self, bits: NDArray[Any], kind: DType) -> NDArray[Any] | None:
        """Elements as fp32 if that holds them all; the next call fills the same array."""
        single = self.single[: bits.size]
        if kind.name == "bfloat16":
            np.copyto(single, bits)
            np.left_shift(single, 16, out=single)
            return single.view(np.float32)
        if kind.name == "float16":
            np.copyto(single.view(np.float32), bits.view(np.float16))
            return single.view(np.float32)
        return bits.view(np.float32) if kind.name == "float32" else None

    def load(self, number: int, bits: NDArray[Any], kind: DType) -> NDArray[Any]:
        """Elements as fp64 in one of the arrays; complex ones in an array of their own."""
        narrow = self.narrow(bits, kind)
        values = widened(bits, kind) if narrow is None else narrow
        if values.dtype.kind == "c":
            return values
        out = self.row(number, bits.size)
        np.copyto(out, values)
        return out


def _same_bits(a: NDArray[Any], b: NDArray[Any]) -> bool:
    raw_a, raw_b = a.view(np.uint8), b.view(np.uint8)
    whole = raw_a.size // 8 * 8
    if not np.array_equal(raw_a[:whole].view(np.uint64), raw_b[:whole].view(np.uint64)):
        return False
    return bool(np.array_equal(raw_a[whole:], raw_b[whole:]))


def _square(scratch: _Scratch, bits: NDArray[Any], kind: DType) -> float:
    """Sum of squares of the finite elements of a block, to about seven digits: the same on both sides, it cancels out."""
    narrow = scratch.narrow(bits, kind)
    with np.errstate(over="ignore", invalid="ignore"):
        if narrow is not None:
            total = float(np.einsum("i,i->", narrow, narrow))
            if 1e-24 < total < 1e36:  # else squares may be too large or too small for fp32
                return total
        values = np.abs(scratch.load(0, bits, kind))
        return _sum(values, values, np.isfinite(values))


def _sum(x: NDArray[Any], y: NDArray[Any], use: NDArray[np.bool_] | None = None) -> float:
    if use is not None and not use.all():
        x, y = x[use], y[use]
    # einsum and not dot: BLAS would start threads of its own
    return float(np.einsum("i,i->", x, y if y.dtype.kind == "f" else np.conj(y)).real)


def _block(
    scratch: _Scratch,
    bits_a: NDArray[Any],
    bits_b: NDArray[Any],
    kind_a: DType,
    kind_b: DType,
    tolerance: Tolerance | None,
) -> Difference:
    size, same_kind = bits_a.size, kind_a == kind_b and kind_a.itemsize < 16
    distance, larger, other = (scratch.row(number, size) for number in (2, 3, 4))
    with np.errstate(all="ignore"):
        a, b = scratch.load(0, bits_a, kind_a), scratch.load(1, bits_b, kind_b)
        np.abs(a - b if a.dtype.kind == "c" else np.subtract(a, b, out=distance), out=distance)
        np.maximum(np.abs(a, out=larger), np.abs(b, out=other), out=larger)
        usual = bool(np.isfinite(larger.max()))
        equal = distance == 0 if usual else (a == b) | (np.isnan(a) & np.isnan(b))
        if same_kind and kind_a.itemsize == 8 and not kind_a.floating and a.dtype.kind == "f":
            equal = bits_a == bits_b  # of integers beyond 2^53 fp64 does not know the last digits
            distance[~equal & (distance == 0)] = 1
        finite = None if usual else np.isfinite(a) & np.isfinite(b)
        out = Difference(
            elements=size,
            unequal=size - int(np.count_nonzero(equal)),
            dot=_sum(a, b, finite),
            square_a=_sum(a, a, finite),
            square_b=_sum(b, b, finite),
        )
        if not usual:
            nan_a, nan_b = np.isnan(a), np.isnan(b)
            out.nan_a, out.nan_b = (int(np.count_nonzero(n)) for n in (nan_a & ~nan_b, nan_b & ~nan_a))
            distance[equal] = 0
        if tolerance is None:
            differs = bits_a != bits_b if same_kind else ~equal
        else:
            np.add(np.multiply(larger, tolerance.rtol, out=other), tolerance.atol, out=other)
            within = distance <= other
            # an infinity is within rtol of an infinity, but of nothing else
            differs = ~(within if finite is None else equal | (within & finite))
        if not usual:
            distance[nan_a != nan_b] = 0  # further than any number; they are counted
        np.divide(distance, np.maximum(larger, _TINY, out=larger), out=other)
        if not usual:
            other[np.isinf(distance)] = np.inf
        worst = int(np.argmax(distance))
        out.differing = int(np.count_nonzero(differs))
        out.max_abs, out.max_rel = float(distance[worst]), float(np.fmax.reduce(other))
    if out.differing:
        at = int(np.argmax(differs))
        out.first = (at,), _value(bits_a[at], a[at], kind_a), _value(bits_b[at], b[at], kind_b)
    if out.max_abs > 0:
        out.worst = (worst,), _value(bits_a[worst], a[worst], kind_a), _value(bits_b[worst], b[worst], kind_b)
    return out


_TINY = float(np.finfo(np.float64).tiny)


def _value(bits: Any, value: Any, kind: DType) -> Any:
    """One element for people and JSON."""
    if kind.name.startswith(("int", "uint", "bool")):
        return int(bits.view(f"<i{kind.itemsize}")) if kind.name.startswith("int") else int(bits)
    return str(complex(value)) if kind.name.startswith("complex") else float(value)


def _rounds(wide: NDArray[Any], narrow: NDArray[Any], kind: DType, target: DType) -> bool:
    if kind == target or kind.name not in _CASTABLE or target.name not in _CASTABLE:
        return False
    return bool(np.array_equal(rounded(wide, kind, target), narrow))
