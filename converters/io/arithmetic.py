"""Arithmetic on elements: numpy on one block at a time, an array of one dimension that stays in the processor's cache.

    rows = examine_blocks(Arithmetic(), examine, bits)        # examine(on, bits) -> numbers of a block

The answers are the same on every processor: what happens to an element alone (difference, product, quotient, comparison,
rounding to nearest) is defined by IEEE 754, in fp32 and fp64, denormals included, and each is a step of its own that no
compiler fuses with the next. Counts, extremes and first places do not depend on an order. A sum does: that of a block is a
tree, the second half of the block added to the first until one number is left; those of blocks are added in their order, in
fp64.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from converters.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from converters.dtypes import DType

    Bits = NDArray[Any]
    Examine = Callable[..., Sequence[Any]]

BLOCK = 1 << 15
"""Elements that are looked at together: what is computed of them stays in the processor's cache."""
UNSIGNED: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("<u2"),
    4: np.dtype("<u4"),
    8: np.dtype("<u8"),
    16: np.dtype("<c16"),
}
"""What elements are held as, by their size in bytes: values are moved, not looked at."""
CASTABLE = ("float64", "float32", "float16", "bfloat16")
_QUIET = {"float64": 0x7FF8000000000000, "float32": 0x7FC00000, "float16": 0x7E00, "bfloat16": 0x7FC0}


class Arithmetic:
    """Of one block, in scratch arrays that belong to one thread: to ask for memory costs more than to fill it."""

    def __init__(self) -> None:
        self._single = np.empty((2, BLOCK), np.uint32)
        self._wide = np.empty((5, BLOCK), np.float64)

    def values(self, bits: Bits, kind: DType, number: int = 0) -> Bits:
        """Elements, in fp32 if that holds them all, else in fp64; complex ones in complex128."""
        single = self._single[number, : bits.size]
        floats = single.view(np.float32)
        if kind.name == "bfloat16":
            np.copyto(single, bits)
            np.left_shift(single, 16, out=single)
        elif kind.name == "float16":
            np.copyto(floats, bits.view(np.float16))
        elif kind.name.startswith("float8"):
            np.take(_float8(kind.name), bits, out=floats)
        else:
            return bits.view(np.float32) if kind.name == "float32" else widened(bits, kind)
        return floats

    def floats(self, bits: Bits, kind: DType) -> NDArray[np.float32]:
        """Any number of elements in fp32, in their shape and in memory of their own."""
        flat, numbers = bits.reshape(-1), np.empty(bits.size, np.float32)
        for at in range(0, bits.size, BLOCK):
            numbers[at : at + BLOCK] = self.values(flat[at : at + BLOCK], kind)
        return numbers.reshape(bits.shape)

    def wide(self, number: int, values: Bits) -> Bits:
        """Elements in fp64."""
        if values.dtype.kind == "c":
            return values
        out = self.row(number, values)
        np.copyto(out, values)
        return out

    def row(self, number: int, like: Bits) -> Bits:
        """Memory for a block."""
        return self._wide[number, : like.size]

    def sums(self, *pairs: tuple[Bits, Bits], use: Bits | None = None) -> Bits:
        """Scalar products, in fp32 or fp64 as the elements are, in the end fp64.

        Args:
            pairs: What is multiplied.
            use: The elements that count; None for all.
        """
        kind = pairs[0][0].real.dtype
        # where `row` gives memory, too
        products = self._wide[2:].view(kind)[: len(pairs), : pairs[0][0].size]
        for (x, y), out in zip(pairs, products, strict=True):
            if "c" in x.dtype.kind + y.dtype.kind:
                np.copyto(out, (x * np.conj(y)).real)
            else:
                np.multiply(x, y, out=out)
        if use is not None:
            np.copyto(products, 0, where=~use)
        return _tree(products).astype(np.float64)

    def distance(self, x: Bits, y: Bits) -> Bits:
        """|x - y|."""
        out = self.row(2, x)
        np.abs(x - y if "c" in x.dtype.kind + y.dtype.kind else np.subtract(x, y, out=out), out=out)
        return out


def _tree(values: Bits) -> Bits:
    size = values.shape[-1]
    half = 1 << max(0, size - 1).bit_length() >> 1
    while half:
        head = values[..., : size - half]
        np.add(head, values[..., half:size], out=head)
        size, half = half, half >> 1
    first: Bits = values[..., 0]
    return first


def squares(on: Arithmetic, values: Any) -> tuple[Any, bool]:
    """Sum of the squares of the finite elements of a block: in fp32 if they are, unless it is too large or too small.

    Args:
        on: The scratch arrays of this thread.
        values: The elements, in fp32 or fp64.

    Returns:
        The sum, and whether it is known that all elements are finite.
    """
    if values.dtype.itemsize == 4:
        (total,) = on.sums((values, values))
        if 1e-24 < total < 1e36:
            return total, True
    wide = on.wide(0, values)
    (exact,) = on.sums((wide, wide), use=np.isfinite(wide))
    return exact, False


def unequal(
    on: Arithmetic, have: Any, want: Any, kind_a: DType, kind_b: DType, *, coarse: bool = False
) -> Sequence[Any]:
    """How many elements of a block are not those of another one, rounded to its type; and the first. NaN equals NaN.

    fp32 numbers in the middle between two of bf16 are equal to the upper one, too: TransformerEngine's optimizer with
    remainders rounds so (transformer_engine/common/multi_tensor/adam.cu), all else to the even one. If they are `coarse`,
    as they have been rounded to fp16 since, the numbers of bf16 beside these two are equal to them, too.
    """
    nearest = rounded(have, kind_a, kind_b)
    differs = nearest != want
    if kind_b.floating and differs.any():
        differs = differs & ~(np.isnan(on.values(nearest, kind_b, 0)) & np.isnan(on.values(want, kind_b, 1)))
        if (kind_a.name, kind_b.name) == ("float32", "bfloat16"):
            differs = differs & ~(((have & 0xFFFF) == 0x8000) & ((((have >> 16) + 1 - want) & 0xFFFF) == 0))
            if coarse:
                differs = differs & ((((have >> 16) + 2 - want) & 0xFFFF) > 3)
    return np.count_nonzero(differs), differs.argmax()


def examine_blocks(on: Arithmetic, examine: Examine, *arrays: Bits) -> NDArray[np.float64]:
    """What `examine` finds in each block of elements that lie in memory: a row for each."""
    flat = [array.reshape(-1) for array in arrays]
    with np.errstate(all="ignore"):
        rows = [examine(on, *(x[at : at + BLOCK] for x in flat)) for at in range(0, flat[0].size, BLOCK)]
    return np.array(rows, np.float64) if rows else np.empty((0, 1))


def widened(bits: Bits, kind: DType) -> NDArray[Any]:
    """Elements as fp64, complex ones as complex128; exact for all types but 64-bit integers beyond 2^53.

    Args:
        bits: The elements as unsigned integers of their size.
        kind: Their type.
    """
    if kind.name.startswith("complex"):
        return bits.view(f"<c{kind.itemsize}").astype(np.complex128)
    values: NDArray[Any]
    if kind.name == "bfloat16":
        values = (bits.astype(np.uint32) << 16).view(np.float32)
    elif kind.name.startswith("float8"):
        values = _float8(kind.name)[bits]
    else:
        code = "f" if kind.floating else "u" if kind.name.startswith(("uint", "bool")) else "i"
        values = bits.view(f"<{code}{kind.itemsize}")
    with np.errstate(invalid="ignore"):  # of NaNs that signal
        return values.astype(np.float64)


@lru_cache
def _float8(name: str) -> NDArray[np.float32]:
    """All 256 values of a type; torch knows them."""
    import torch

    values: NDArray[np.float32] = torch.arange(256, dtype=torch.uint8).view(getattr(torch, name)).float().numpy()
    return values


def rounded(bits: Bits, source: DType, target: DType) -> Bits:
    """Elements cast to another floating type as torch does it: to nearest, ties to even, to 16 bits by way of fp32.

    Args:
        bits: The elements as unsigned integers of their size.
        source: Their type.
        target: The type they get; a NaN becomes its quiet NaN.

    Raises:
        FormatError: A type that is not fp64, fp32, fp16 or bf16.
    """
    if source == target:
        return bits
    if source.name not in CASTABLE or target.name not in CASTABLE:
        raise UnsupportedError(f"master weights in {source} cannot be compared with weights in {target}")
    bits = np.ascontiguousarray(bits)
    with np.errstate(over="ignore", invalid="ignore"):
        if source.name == "bfloat16":
            values = (bits.astype(np.uint32) << 16).view(np.float32)
        else:
            values = bits.view(f"<f{source.itemsize}")
        out = values.astype("<f8" if target.itemsize == 8 else "<f4", copy=False)
        result: Bits
        if target.name == "bfloat16":
            wide = out.view("<u4")
            result = ((wide + (((wide >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype("<u2")
        else:
            result = out.astype(f"<f{target.itemsize}", copy=False).view(UNSIGNED[target.itemsize])
    nans = np.isnan(values)
    if nans.any():
        result[nans] = _QUIET[target.name]
    return result
