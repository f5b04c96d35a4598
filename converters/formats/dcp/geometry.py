"""Checks that the chunks of each stored tensor tile it; fast for a million chunks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from converters.box import Box, tiling_fault

if TYPE_CHECKING:
    from converters.formats.dcp.stored import StoredTensor


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
    fault = tiling_fault(tensor.shape, starts, sizes)
    if fault is None:
        return None
    where, rows = fault
    if rows:
        return f"chunks {_box(tensor, rows[0])} and {_box(tensor, rows[1])} overlap"
    return f"no chunk covers {where} of shape {list(tensor.shape)}"


def _box(tensor: StoredTensor, row: int) -> Box:
    return Box(tuple(tensor.starts[row].tolist()), tuple(tensor.sizes[row].tolist()))
