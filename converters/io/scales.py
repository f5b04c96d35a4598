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

__all__ = ["factors_of", "multiply", "packed_boxes", "unpacked"]

_FP32 = dtype("float32")
# the codes of E2M1 (0, 0.5, 1, 1.5, 2, 3, 4, 6, and negative) as E4M3, which holds all of them
_E2M1 = np.array([0x00, 0x30, 0x38, 0x3C, 0x40, 0x44, 0x48, 0x4C], np.uint8)
_E2M1 = np.concatenate([_E2M1, _E2M1 | 0x80])


def packed_boxes(box: Box, block: int) -> tuple[Box, Box, Box]:
    """What is read for codes in a box: whole blocks of them, and where their bytes and their factors lie.

    All three are of the same array, whose last axis counts codes, bytes, or factors.
    """
    low, end = box.start[-1] // block, -(-(box.start[-1] + box.shape[-1]) // block)
    start, shape = box.start[:-1], box.shape[:-1]
    wide, stored, factors = (Box((*start, low * size), (*shape, (end - low) * size)) for size in (block, block // 2, 1))
    return wide, stored, factors


def unpacked(stored: NDArray[Any]) -> NDArray[Any]:
    """Bytes of two codes each as bits of E4M3, twice as many along the last axis."""
    out = np.empty((*stored.shape[:-1], 2 * stored.shape[-1]), np.uint8)
    np.take(_E2M1, stored & 0x0F, out=out[..., 0::2])
    np.take(_E2M1, stored >> 4, out=out[..., 1::2])
    return out


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
    numbers = np.array(on.values(factors.reshape(-1), scales.dtype), np.float32).reshape(factors.shape)
    for tile in contiguous_tiles(box, BLOCK):
        inner = tile.relative_to(box.start).slices
        values = on.values(stored[inner].reshape(-1), scales.stored).reshape(tile.shape)
        axes = zip(tile.start, tile.shape, scales.block, first, strict=True)
        rows = [np.arange(start, start + count) // size - at for start, count, size, at in axes]
        np.multiply(values, numbers[np.ix_(*rows)], out=values)
        into[inner] = rounded(values.view(np.uint32), _FP32, target)
