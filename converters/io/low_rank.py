"""Weights with an adapter merged into them: W + scale * B @ A in fp32, rounded once to the weight's type.

   W (rows, columns)     B (rows, rank)    A (rank, columns)
+-----------------+         +---+        +-----------------+
|   a tile of W   |    +    | b |   @    |     a  a  a     |      a block of rows and columns at a time, so that what is
+-----------------+         +---+        +-----------------+      held beside the tile is a few MiB for any rank
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from converters.box import Box, contiguous_tiles
from converters.dtypes import dtype
from converters.io.arithmetic import BLOCK, UNSIGNED, rounded

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from converters.catalog import LowRank, TensorInfo
    from converters.dtypes import DType
    from converters.io.arithmetic import Arithmetic

_FP32 = dtype("float32")
_BLOCK_ELEMENTS = 1 << 18  # elements of each factor, and of their product, that are held at once: a mebibyte of fp32


def add_product(
    on: Arithmetic,
    update: LowRank,
    box: Box,
    elements: NDArray[Any],
    target: DType,
    fill: Callable[[TensorInfo, Box, NDArray[Any]], None],
) -> None:
    """Adds what an adapter changes to the elements of a box.

    Args:
        on: What computes.
        update: The adapter.
        box: In the weight's coordinates.
        elements: Bits of the weight, of type `target`, in the box's shape; the sums replace them.
        target: The weight's type: fp32, fp16 or bf16.
        fill: Reads a box of a tensor.
    """
    rank = update.columns.shape[0]
    (top, left), (height, width) = box.start, box.shape
    across = max(1, min(width, _BLOCK_ELEMENTS // rank))
    down = max(1, min(height, _BLOCK_ELEMENTS // rank, _BLOCK_ELEMENTS // across))
    for column in range(left, left + width, across):
        count = min(across, left + width - column)
        columns = _read(on, update.columns, Box((0, column), (rank, count)), fill)
        for row in range(top, top + height, down):
            part = Box((row, column), (min(down, top + height - row), count))
            product = _read(on, update.rows, Box((row, 0), (part.shape[0], rank)), fill) @ columns
            product *= np.float32(update.scale)
            for block in contiguous_tiles(part, BLOCK):
                inside = elements[block.relative_to(box.start).slices]
                sums = product[block.relative_to(part.start).slices].reshape(-1)
                sums = sums + on.values(inside.reshape(-1), target)
                inside[...] = rounded(sums.view(np.uint32), _FP32, target).reshape(block.shape)


def _read(
    on: Arithmetic, info: TensorInfo, box: Box, fill: Callable[[TensorInfo, Box, NDArray[Any]], None]
) -> NDArray[Any]:
    bits = np.empty(box.shape, UNSIGNED[info.dtype.itemsize])
    fill(info, box, bits)
    return on.floats(bits, info.dtype)
