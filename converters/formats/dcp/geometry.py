"""How stored tensors are cut, fast for a million chunks: whether the chunks tile each, and a digest of all cuts."""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from converters.box import Box, tiling_fault

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from converters.formats.dcp.stored import StoredTensor

__all__ = ["geometry_digest", "tiling_problem"]

_BLOCK = 4096  # words


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


def geometry_digest(tensors: Sequence[StoredTensor], objects: Iterable[str]) -> str:
    """Digest of every key, type, shape, chunk and record length, and of which records are missing.

    Not of where records lie: that differs from one iteration to the next.

    Args:
        tensors: The stored tensors.
        objects: Keys of the stored objects.
    """
    digest = hashlib.sha256()
    for t in tensors:
        digest.update(
            f"{t.key}\0{t.dtype}{t.shape}{t.starts.shape}{t.original_shape};".encode("utf-8", "surrogatepass")
        )
        if len(t.file) and int(t.file.min()) < 0:
            digest.update(np.flatnonzero(t.file < 0).tobytes())
    digest.update("\0".join(objects).encode("utf-8", "surrogatepass"))
    for columns in ([t.starts for t in tensors], [t.sizes for t in tensors], [t.length for t in tensors]):
        small = [np.zeros(0, np.int64)]
        for column in columns:
            words = np.ascontiguousarray(column, np.int64).reshape(-1)
            if len(words) < _BLOCK:
                small.append(words)
            else:
                _take(digest, words)
        _take(digest, np.concatenate(small))
    return digest.hexdigest()


def _take(digest: Any, words: NDArray[np.int64]) -> None:
    """Adds numbers to a digest, all but the last block as one word for each block.

    That word is a sum of the block's numbers, each times an odd number of its own, modulo 2^64: several times as fast as
    SHA-256, and a difference that it misses is one that somebody has looked for, with nothing to gain.
    """
    whole = len(words) // _BLOCK * _BLOCK
    digest.update(words[:whole].view(np.uint64).reshape(-1, _BLOCK) @ _WEIGHTS)
    digest.update(words[whole:])


def _weights() -> NDArray[np.uint64]:
    """SplitMix64's first numbers, made odd."""
    z = np.arange(1, _BLOCK + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ (z >> np.uint64(shift))) * np.uint64(factor)
    out: NDArray[np.uint64] = (z ^ (z >> np.uint64(31))) | np.uint64(1)
    return out


_WEIGHTS = _weights()
