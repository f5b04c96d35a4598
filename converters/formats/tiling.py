"""Whether the chunks of a stored array tile it: each element stored once, none missing. Fast for a million chunks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from converters.box import Box, find_overlap, uncovered

if TYPE_CHECKING:
    from converters.formats.dcp_metadata import StoredTensor

__all__ = ["tiling_problem"]

_SWEEP_LIMIT = 20_000


def tiling_problem(tensor: StoredTensor) -> str | None:
    """What is wrong with the chunks of a stored tensor, in words; None if they tile it and all have a record."""
    starts, sizes, shape = tensor.starts, tensor.sizes, np.asarray(tensor.shape, np.int64)
    if len(starts) == 0:
        return "it has no chunks" if math.prod(tensor.shape) else None
    outside = ((starts < 0) | (sizes < 0) | (starts + sizes > shape)).any(axis=1) if len(shape) else np.zeros(1, bool)
    if outside.any():
        row = int(np.flatnonzero(outside)[0])
        return f"chunk {_box(tensor, row)} lies outside shape {list(tensor.shape)}"
    missing = np.flatnonzero(tensor.file < 0)
    if len(missing):
        return f"{len(missing)} of {len(starts)} chunks have no record, the first at {_box(tensor, int(missing[0]))}"
    if not len(shape):
        return None if len(starts) == 1 else f"a scalar is stored {len(starts)} times"
    if len(starts) == 1 and tuple(sizes[0].tolist()) == tensor.shape:  # most of a checkpoint with a key for each layer
        return None
    volumes = np.prod(sizes.astype(object) if (shape > 1 << 31).any() else sizes, axis=1)
    live = volumes > 0
    total = int(volumes.sum())
    if total == math.prod(tensor.shape) and _disjoint_grid(starts[live], sizes[live]):
        return None
    if live.sum() > _SWEEP_LIMIT:
        if total == math.prod(tensor.shape):
            return None  # irregular and huge: the volumes agree; the engine proves the rest, tensor by tensor
        return f"its chunks hold {total} elements, its shape has {math.prod(tensor.shape)}"
    boxes = [Box(tuple(a), tuple(n)) for a, n in zip(starts[live].tolist(), sizes[live].tolist(), strict=True)]
    twice = find_overlap(boxes)
    if twice is not None:
        return f"chunks {boxes[twice[0]]} and {boxes[twice[1]]} overlap"
    gap = uncovered(tensor.shape, boxes)
    return None if gap is None else f"no chunk covers {gap} of shape {list(tensor.shape)}"


def _disjoint_grid(starts: np.ndarray, sizes: np.ndarray) -> bool:
    """Whether every chunk is exactly one cell of the grid that all chunk borders span, and no two are the same cell."""
    cell = np.zeros(len(starts), np.int64)
    for axis in range(starts.shape[1]):
        cuts, index = np.unique(starts[:, axis], return_inverse=True)
        stops = starts[:, axis] + sizes[:, axis]
        following = np.append(cuts[1:], np.iinfo(np.int64).max)
        if (stops > following[index]).any():
            return False
        if len(cuts) > 1 and (cell.max() + 1) * len(cuts) > 1 << 62:
            return False
        cell = cell * len(cuts) + index
    return len(np.unique(cell)) == len(cell)


def _box(tensor: StoredTensor, row: int) -> Box:
    return Box(tuple(tensor.starts[row].tolist()), tuple(tensor.sizes[row].tolist()))
