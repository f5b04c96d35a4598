"""Exact statistics of a tensor, streamed: memory does not grow with it.

Quantiles are elements of the tensor, found by counting. Its elements are mapped to unsigned integers of the same order;
16 bits are counted in one pass over the tensor, the next 16 of those that matter in another:

    fp32 of 4 bytes     pass 1   how many elements have each of the 65,536 upper halves
                        pass 2   for the halves in which a quantile lies: how many have each lower half
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from converters.box import Box, contiguous_tiles
from converters.errors import RequestError
from converters.overview.checkpoint import as_numpy

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from converters.catalog import TensorInfo
    from converters.dtypes import DType
    from converters.overview.checkpoint import Checkpoint

QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
_TILE_BYTES = 4 << 20
_HALF = 1 << 16


@dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics of a tensor, or of a box of it.

    Attributes:
        numel: Elements; `nan`, `infinite` and `zero` of them are that.
        minimum: Least finite element; None if there is none. So with `maximum`, `mean`, `std` and `norm`.
        std: Standard deviation of the finite elements (divided by their number).
        norm: Square root of the sum of squares of the finite elements.
        quantiles: For each fraction q the least element of which at least q of the finite elements are no larger.
        histogram: Counts of finite elements in equal ranges from `minimum` to `maximum`; the last includes its end.
    """

    numel: int
    nan: int
    infinite: int
    zero: int
    minimum: float | None = None
    maximum: float | None = None
    mean: float | None = None
    std: float | None = None
    norm: float | None = None
    quantiles: dict[float, float] = field(default_factory=dict)
    histogram: tuple[int, ...] = ()


def tensor_statistics(
    checkpoint: Checkpoint,
    name: str,
    box: Box | None = None,
    *,
    quantiles: Sequence[float] = QUANTILES,
    bins: int = 0,
) -> Statistics:
    """Statistics of a tensor or of a box of it, in as many passes as an element has 16-bit halves, two at least.

    Args:
        checkpoint: The checkpoint.
        name: The tensor.
        box: In its coordinates; None for all of it.
        quantiles: Fractions between 0 and 1.
        bins: Ranges of the histogram; 0 for none.

    Raises:
        RequestError: There is no such tensor, or its elements are complex.
        IntegrityError: It is incomplete or damaged.
    """
    info = checkpoint.info(name)
    if info.dtype.name.startswith("complex"):
        raise RequestError(f"{name} is {info.dtype}: complex numbers have no order", hint="--slice shows values")
    return _Passes(checkpoint, info, box or Box.whole(info.shape)).statistics(quantiles, bins)


class _Passes:
    """The passes over a box of a tensor."""

    def __init__(self, checkpoint: Checkpoint, info: TensorInfo, box: Box) -> None:
        self._checkpoint, self._info, self._box = checkpoint, info, box

    def _tiles(self) -> Iterator[tuple[NDArray[Any], NDArray[np.float64], int]]:
        """Order keys and values of the finite elements, and the number of NaN, tile by tile."""
        dtype = self._info.dtype
        for tile in contiguous_tiles(self._box, _TILE_BYTES // dtype.itemsize):
            bits = self._checkpoint.read(self._info.name, tile).reshape(-1)
            values = as_numpy(bits, dtype).astype(np.float64)
            finite = np.isfinite(values)
            all_finite = bool(finite.all())
            nan = 0 if all_finite else int(np.count_nonzero(np.isnan(values)))
            yield _ordered(bits if all_finite else bits[finite], dtype), values if all_finite else values[finite], nan

    def statistics(self, quantiles: Sequence[float], bins: int) -> Statistics:
        dtype = self._info.dtype
        sums: list[float] = []
        squares: list[float] = []
        count = zero = nan = 0
        low, high = math.inf, -math.inf
        halves = np.zeros(_HALF, np.int64)
        shift = max(0, 8 * dtype.itemsize - 16)
        for keys, values, nan_count in self._tiles():
            nan += nan_count
            count += values.size
            zero += int(np.count_nonzero(values == 0))
            if values.size:
                sums.append(float(values.sum()))
                squares.append(float(np.square(values).sum()))
                low, high = min(low, float(values.min())), max(high, float(values.max()))
            halves += np.bincount((keys >> keys.dtype.type(shift)).astype(np.int64), minlength=_HALF)
        numel = self._box.volume
        infinite = numel - count - nan
        if not count:
            return Statistics(numel, nan, infinite, zero)
        mean = math.fsum(sums) / count
        ranks = {q: max(0, math.ceil(q * count) - 1) for q in quantiles}
        elements, spread, histogram = self._second(halves, set(ranks.values()), mean, low, high, bins)
        return Statistics(
            numel,
            nan,
            infinite,
            zero,
            low,
            high,
            mean,
            math.sqrt(spread / count),
            math.sqrt(math.fsum(squares)),
            {q: elements[rank] for q, rank in ranks.items()},
            histogram,
        )

    def _second(
        self, halves: NDArray[np.int64], ranks: set[int], mean: float, low: float, high: float, bins: int
    ) -> tuple[dict[int, float], float, tuple[int, ...]]:
        """The elements at some ranks, the sum of squared distances from the mean, and the histogram."""
        dtype = self._info.dtype
        bits_left = max(0, 8 * dtype.itemsize - 16)
        open_ranks = {rank: _descend(halves, rank) for rank in ranks}  # rank -> (prefix, rank below it)
        distances: list[float] = []
        histogram = np.zeros(bins, np.int64)
        first = True
        while first or bits_left:
            step = min(16, bits_left)
            counts = {prefix: np.zeros(_HALF, np.int64) for prefix, _ in open_ranks.values()} if bits_left else {}
            for keys, values, _ in self._tiles():
                if first:
                    distances.append(float(np.square(values - mean).sum()))
                    if bins:
                        histogram += np.histogram(values, bins=bins, range=(low, high))[0]
                for prefix, table in counts.items():
                    matching = keys[(keys >> keys.dtype.type(bits_left)) == prefix]
                    half = (matching >> keys.dtype.type(bits_left - step)) & keys.dtype.type((1 << step) - 1)
                    table += np.bincount(half.astype(np.int64), minlength=_HALF)
            bits_left -= step
            for rank, (prefix, below) in open_ranks.items() if counts else ():
                lower, below = _descend(counts[prefix], below)
                open_ranks[rank] = (prefix << step) | lower, below
            first = False
        elements = {rank: _value(key, dtype) for rank, (key, _) in open_ranks.items()}
        return elements, math.fsum(distances), tuple(histogram.tolist())


def _descend(counts: NDArray[np.int64], rank: int) -> tuple[int, int]:
    """The half in which the element of a rank lies, and its rank among those with that half."""
    ends = np.cumsum(counts)
    half = int(np.searchsorted(ends, rank, side="right"))
    return half, rank - (int(ends[half - 1]) if half else 0)


def _ordered(bits: NDArray[Any], dtype: DType) -> NDArray[Any]:
    """Unsigned integers in the order of the elements: negative floats turned round, the sign's bit flipped."""
    if dtype.name.startswith("uint") or dtype.name in ("bool", "float8_e8m0fnu"):
        return bits
    kind = bits.dtype.type
    sign = kind(1 << (8 * dtype.itemsize - 1))
    if not dtype.floating:
        integers: NDArray[Any] = bits ^ sign
        return integers
    turned: NDArray[Any] = np.where(bits & sign, ~bits, bits | sign)
    return turned


def _value(key: int, dtype: DType) -> float:
    """The element of an order key."""
    kind = np.dtype(f"u{dtype.itemsize}").type
    bits = np.array([key], kind)
    sign = kind(1 << (8 * dtype.itemsize - 1))
    if not (dtype.name.startswith("uint") or dtype.name in ("bool", "float8_e8m0fnu")):
        bits = np.where(bits & sign, bits ^ sign, ~bits) if dtype.floating else bits ^ sign
    return float(as_numpy(bits, dtype).astype(np.float64)[0])
