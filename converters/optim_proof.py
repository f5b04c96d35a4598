"""The proof that optimizer state belongs to the parameters whose names it was given.

Megatron copies the fp32 master weights into the model's weights after every step, so each master weight, rounded to the
weight's type, is the weight. That holds bit for bit, and for the wrong order of parameters it fails in nearly every
element. It is also how the `fully_reshardable` files of Megatron-Core 0.15.0 to 0.19.0 that were saved shifted are found.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from converters.box import Box, contiguous_tiles
from converters.errors import FormatError, IntegrityError
from converters.gather import UNSIGNED, Gatherer, Sources
from converters.names import fold, printable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from converters.catalog import Catalog, TensorInfo
    from converters.dtypes import DType
    from converters.formats.base import Reader

__all__ = ["mismatches", "prove_masters", "refusal", "rounded"]

_PREFIX = "optimizer.state.param."
_TILE = 1 << 20  # elements
_SAMPLE = 1 << 12


def prove_masters(reader: Reader, tensors: Mapping[str, TensorInfo]) -> None:
    """Checks for every master weight that it rounds to the weight stored beside it; reads all of both, in tiles.

    Args:
        reader: The checkpoint.
        tensors: Canonical optimizer tensors; only `optimizer.state.param.*` are looked at.

    Raises:
        IntegrityError: Some do not; they are named.
        FormatError: A record cannot be read.
    """
    wrong = mismatches(reader, tensors)
    if wrong:
        raise refusal(wrong, reader.catalog, "master weights of the optimizer do not round to the weights")


def refusal(wrong: list[str], catalog: Catalog, message: str) -> IntegrityError:
    """The error that names parameters whose master weights are not theirs."""
    folded = [printable(text) for text, _ in fold(wrong)]
    listed = folded[:12] + ([f"and {len(folded) - 12} more"] if len(folded) > 12 else [])
    hint = "convert without the optimizer state (--optimizer none), or start from another iteration"
    if catalog.content.get("distrib_optim_sharding_type") == "fully_reshardable":
        listed.append("Megatron-Core 0.15.0 to 0.19.0 saved such files shifted when there were several buckets")
    return IntegrityError(f"{message}: {len(wrong)} do not match", details=listed, hint=hint, tensor=wrong[0])


def mismatches(reader: Reader, tensors: Mapping[str, TensorInfo], *, sample: bool = False) -> list[str]:
    """Names of the parameters whose master weights do not round to the weights.

    Args:
        reader: The checkpoint.
        tensors: Canonical optimizer tensors.
        sample: Look only at the first elements of some tensors of each kind.
    """
    names = [name.removeprefix(_PREFIX) for name in tensors if name.startswith(_PREFIX)]
    weights = reader.catalog.weights
    names = [name for name in names if name in weights]
    if sample:
        names = [name for _, members in fold(names) for name in _spread(members)]
    both = {_PREFIX + n: tensors[_PREFIX + n] for n in names} | {n: weights[n] for n in names}
    gatherers = [Gatherer(sources := Sources(reader, both)), Gatherer(sources)]
    try:
        return [n for n in names if not _agree(gatherers, tensors[_PREFIX + n], weights[n], sample=sample)]
    finally:
        for gatherer in gatherers:
            gatherer.close()


def _spread(members: list[str], most: int = 16) -> list[str]:
    """Some of them, evenly spread: a wrong order of ranks or experts may leave the first and the last where they are."""
    steps = min(most, len(members)) - 1
    return [members[i * (len(members) - 1) // steps] for i in range(steps + 1)] if steps else members[:1]


def _agree(gatherers: Sequence[Gatherer], master: TensorInfo, weight: TensorInfo, *, sample: bool) -> bool:
    if len(master.shape) != len(weight.shape) or master.shape[1:] != weight.shape[1:]:
        return False
    rows = tuple(min(a, b) for a, b in zip(master.shape, weight.shape, strict=True))  # padding of the vocabulary
    for number, box in enumerate(contiguous_tiles(Box.whole(rows), _SAMPLE if sample else _TILE)):
        if sample and number:
            break
        have, want = (g.gather(tensor.name, box) for g, tensor in zip(gatherers, (master, weight), strict=True))
        if not _same(rounded(have, master.dtype, weight.dtype), want, weight.dtype):
            return False
    return True


def _same(a: NDArray[Any], b: NDArray[Any], kind: DType) -> bool:
    if np.array_equal(a, b):
        return True
    differ = a != b
    return bool(np.isnan(_floats(a[differ], kind)).all() and np.isnan(_floats(b[differ], kind)).all())


def _floats(bits: NDArray[Any], kind: DType) -> NDArray[Any]:
    if kind.name == "bfloat16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    values: NDArray[Any] = bits.view(np.dtype(f"<f{kind.itemsize}"))
    return values


def rounded(bits: NDArray[Any], source: DType, target: DType) -> NDArray[Any]:
    """Elements cast to another floating type, to nearest and ties to even as torch does; both as unsigned integers.

    Raises:
        FormatError: A type that is not fp64, fp32, fp16 or bf16.
    """
    if source == target:
        return bits
    known = ("float64", "float32", "float16", "bfloat16")
    if source.name not in known or target.name not in known:
        raise FormatError(f"master weights in {source} cannot be compared with weights in {target}")
    with np.errstate(over="ignore", invalid="ignore"):
        values = _floats(np.ascontiguousarray(bits), source)
        out: NDArray[Any]
        if target.name != "bfloat16":
            out = values.astype(f"<f{target.itemsize}").view(UNSIGNED[target.itemsize])
            return out
        wide: NDArray[Any] = values.astype("<f4").view("<u4")
        out = ((wide + (((wide >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype("<u2")
        out[np.isnan(values)] = 0x7FC0
        return out
