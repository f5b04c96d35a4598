"""Padding rows of a vocabulary that are the mean of the others: of each column in fp32, rounded once to the tensor's type.

The sum is taken in fp64, row by row, so that it depends neither on tiles nor on threads.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from converters.box import Box
from converters.dtypes import dtype
from converters.io.arithmetic import UNSIGNED, Arithmetic, rounded

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from converters.catalog import TensorInfo

_FP32 = dtype("float32")
_ROWS = 1 << 18  # elements that are read in one go, in whole rows


def mean_row(info: TensorInfo, read: Callable[[Box, NDArray[Any]], None]) -> NDArray[Any]:
    """The bits of the mean of the rows that a tensor has stored.

    Args:
        info: The tensor; the last `info.mean_rows` of its rows are not stored.
        read: Fills an array with the bits of a box.
    """
    rows, rest = info.shape[0] - info.mean_rows, info.shape[1:]
    width = math.prod(rest)
    rows_at_once = max(1, _ROWS // width)
    arithmetic, kind = Arithmetic(), info.dtype
    buffer = np.empty((min(rows_at_once, rows), width), UNSIGNED[kind.itemsize])
    sums = np.zeros(width, np.float64)
    for first in range(0, rows, rows_at_once):
        count = min(rows_at_once, rows - first)
        read(Box((first, *(0,) * len(rest)), (count, *rest)), buffer[:count].reshape(count, *rest))
        for row in buffer[:count]:
            sums += arithmetic.floats(row, kind)
    return rounded((sums / rows).astype(np.float32).view(np.uint32), _FP32, kind).reshape(rest)
