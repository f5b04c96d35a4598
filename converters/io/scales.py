"""Quantized elements multiplied by the scales of their blocks: in fp32, rounded once to the tensor's type.

stored   | a a a a | b b |     times    | s0 | s1 |      element [i, j] times scale [i // rows, j // columns]
         | a a a a | b b |
         | c c c c | d d |              | s2 | s3 |      blocks at the edges may be smaller
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from converters.box import Box, contiguous_tiles
from converters.dtypes import dtype
from converters.io.arithmetic import BLOCK, rounded

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from converters.chunks import Scales
    from converters.dtypes import DType
    from converters.io.arithmetic import Arithmetic

_FP32 = dtype("float32")
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_E2M1 = np.concatenate([_E2M1, -_E2M1])
_PAIRS = np.stack([np.tile(_E2M1, 16), np.repeat(_E2M1, 16)], axis=1)  # of a byte: its lower half, then its upper one


def packed_boxes(box: Box, block: int) -> tuple[Box, Box, Box]:
    """What is read for codes in a box: whole blocks of them, and where their bytes and their factors lie.

    All three are of the same array, whose last axis counts codes, bytes, or factors.
    """
    low, end = box.start[-1] // block, -(-(box.start[-1] + box.shape[-1]) // block)
    start, shape = box.start[:-1], box.shape[:-1]
    wide, stored, factors = (Box((*start, low * size), (*shape, (end - low) * size)) for size in (block, block // 2, 1))
    return wide, stored, factors


def factors_of(box: Box, scales: Scales) -> Box:
    """The scales that elements of a box are multiplied by, in the coordinates of the array of scales."""
    axes = list(zip(box.start, box.shape, scales.block, strict=True))
    start = tuple(first // size for first, _, size in axes)
    return Box(
        start, tuple((first + count - 1) // size + 1 - at for (first, count, size), at in zip(axes, start, strict=True))
    )


def multiply(
    on: Arithmetic,
    stored: NDArray[Any],
    factors: NDArray[Any],
    box: Box,
    scales: Scales,
    target: DType,
    into: NDArray[Any],
) -> None:
    """Multiplies the elements of a box.

    Args:
        on: What computes.
        stored: Their bits, of type `scales.stored`, in the box's shape.
        factors: Bits of the scales in `factors_of(box)`, of type `scales.dtype`.
        box: In the coordinates of the stored array.
        scales: What they are multiplied by.
        target: The type they get: fp32, fp16 or bf16.
        into: Where their bits go, in the box's shape.
    """
    first = factors_of(box, scales).start
    numbers = on.floats(factors, scales.dtype)
    for tile in contiguous_tiles(box, BLOCK):
        inner = tile.relative_to(box.start).slices
        values = on.values(stored[inner].reshape(-1), scales.stored).reshape(tile.shape)
        axes = zip(tile.start, tile.shape, scales.block, first, strict=True)
        rows = [np.arange(start, start + count) // size - at for start, count, size, at in axes]
        np.multiply(values, numbers[np.ix_(*rows)], out=values)
        into[inner] = rounded(values.view(np.uint32), _FP32, target)


def multiply_codes(
    on: Arithmetic, stored: NDArray[Any], factors: NDArray[Any], kind: DType, target: DType, into: NDArray[Any]
) -> None:
    """Multiplies codes of four bits (E2M1), two in a byte.

    Args:
        on: What computes.
        stored: The bytes, in C order.
        factors: Bits of the factors, each of the same number of codes behind each other.
        kind: Type of the factors.
        target: The type that the elements get.
        into: Where their bits go, in C order, two for each byte.
    """
    numbers = on.floats(factors.reshape(-1, 1), kind)
    codes, out = stored.reshape(len(numbers), -1), into.reshape(len(numbers), -1)
    step = max(1, BLOCK // out.shape[1])
    for at in range(0, len(numbers), step):
        values = np.take(_PAIRS, codes[at : at + step], axis=0).reshape(-1, out.shape[1])
        np.multiply(values, numbers[at : at + step], out=values)
        out[at : at + step] = rounded(values.view(np.uint32), _FP32, target)
