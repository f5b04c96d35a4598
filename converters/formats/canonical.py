"""From the keys of Megatron-Core's distributed checkpoints to canonical tensors: what `torch_dist` and `zarr` share.

A key may hold all layers or experts along leading axes, or one half of a gated projection. The catalog has one tensor for
each layer, each expert, and the whole projection.
"""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from converters.catalog import ObjectInfo, Problem, TensorInfo
from converters.chunks import Part, StoredArray
from converters.errors import FormatError
from converters.names import natural_key, parse_key, printable
from converters.torchzip.tensor_refs import TensorRef

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from converters.dtypes import DType
    from converters.names import ParsedKey

_OBJECT = re.compile(r"(.*)/shard_([\d.]+)_([\d.]+)", re.DOTALL)
_MOST_PIECES, _MOST_LOOKS = 1 << 23, 1 << 27  # of a key: 61 layers of 384 experts in 64 pieces are 1.5 million
_MOST_TENSORS = 1 << 18  # of one key: more layers times experts than that is a damaged shape


@dataclass(frozen=True, slots=True)
class KeyedArray:
    """A tensor key as a checkpoint stores it.

    Attributes:
        array: Its chunks.
        dtype: Element type.
        original_shape: Shape before Megatron-Core 0.8 to 0.15 flattened the blocks; None for an ordinary tensor.
        fault: What is wrong with its chunks, in words.
        spelling: The key as Megatron's distributed checkpoints would spell it, if the file spells it otherwise.
    """

    array: StoredArray
    dtype: DType
    original_shape: tuple[int, ...] | None = None
    fault: str | None = None
    spelling: str | None = None


def canonical_tensors(stored: Iterable[KeyedArray], problems: list[Problem]) -> dict[str, TensorInfo]:
    """Canonical tensors of all keys: layers and experts unstacked, gate and up halves joined, in natural order.

    Args:
        problems: What is wrong with them is added here.

    Raises:
        FormatError: Two keys mean the same tensor, or a shape does not fit its key.
    """
    tensors: dict[str, TensorInfo] = {}
    halves: dict[str, dict[str, TensorInfo]] = {}
    for tensor in stored:
        key = tensor.array.key
        parsed = parse_key(tensor.spelling or key)
        infos = list(_unstack(tensor, parsed))
        if tensor.fault:
            text = f"{printable(key)}: {tensor.fault}"
            problems.append(Problem("error", text, tensors=tuple(t.name for t in infos)))
        for info in infos:
            if parsed.half:
                halves.setdefault(info.name, {})[parsed.half] = info
            elif info.name in tensors:
                raise FormatError(
                    f"two keys mean the same tensor {printable(info.name)}",
                    details=[printable(text) for text in (*tensors[info.name].keys, key)],
                    tensor=info.name,
                )
            else:
                tensors[info.name] = info
    for name, pair in halves.items():
        tensors[name] = _join_halves(name, pair, problems)
    return {name: tensors[name] for name in sorted(tensors, key=natural_key)}


def _unstack(tensor: KeyedArray, parsed: ParsedKey) -> Iterable[TensorInfo]:
    key = tensor.array.key
    shape = tensor.original_shape or tensor.array.shape
    depth, block = len(parsed.axes), None
    opaque = None
    if tensor.original_shape is not None:
        block = _block_shape(key, tensor.array.shape, tensor.original_shape)
    if parsed.kind == "optimizer" and tensor.original_shape is None and ".gbuf_idx_" in key:
        opaque = "flat optimizer bucket of one model-parallel rank"
    if depth > len(shape):
        raise FormatError(f"{printable(key)} should have {depth} leading axes, but has shape {list(shape)}")
    if math.prod(shape[:depth]) > _MOST_TENSORS:
        raise FormatError(f"{printable(key)} has shape {list(shape)}: no model has that many layers or experts")
    sizes = tensor.array.sizes[:, :depth]
    singly = depth and sizes[:, 0].max(initial=0) <= 1  # these are found by bisection
    if sizes.prod(axis=1).sum() > _MOST_PIECES or len(sizes) * math.prod(shape[bool(singly) : depth]) > _MOST_LOOKS:
        text = f"{printable(key)} of shape {list(shape)} is cut into {len(sizes):,} chunks across its layers or experts"
        raise FormatError(text, details=["frameworks cut between layers: another kind of tensor, or a damaged file"])
    for prefix in np.ndindex(*shape[:depth]):
        name = parsed.template.format(*prefix)
        parts = (Part(tensor.array, prefix, block=block),)
        yield TensorInfo(name, tensor.dtype, shape[depth:], parsed.kind, parts, opaque)


def _block_shape(key: str, shape: tuple[int, ...], original: tuple[int, ...]) -> tuple[int, ...]:
    fragments = shape[:-1]
    fits = len(original) == len(fragments) and all(
        f > 0 and g % f == 0 for g, f in zip(original, fragments, strict=True)
    )
    block = tuple(g // f for g, f in zip(original, fragments, strict=True)) if fits else ()
    if not fits or math.prod(block) != shape[-1]:
        raise FormatError(
            f"{printable(key)} is flattened as {list(shape)}, which does not fit its own {list(original)}"
        )
    return block


def _join_halves(name: str, pair: Mapping[str, TensorInfo], problems: list[Problem]) -> TensorInfo:
    """`weight_w` (gate) over `weight_v` (up), the one tensor that other checkpoints store (singleton_local_shards)."""
    present = next(iter(pair.values()))
    rows = present.shape[0]
    if len(pair) < 2 or pair["w"].shape != pair["v"].shape or pair["w"].dtype != pair["v"].dtype:
        halves = ", ".join(f"_{half} {list(info.shape)}" for half, info in sorted(pair.items()))
        problems.append(
            Problem("error", f"{printable(name)}: gate and up do not form a pair: {halves}", tensors=(name,))
        )
    parts: list[Part] = []
    for half, info in sorted(pair.items(), reverse=True):  # w, then v
        shift = (0 if half == "w" else rows, *(0,) * (len(info.shape) - 1))
        parts += [Part(part.array, part.prefix, shift, part.block) for part in info.parts]
    return TensorInfo(name, present.dtype, (2 * rows, *present.shape[1:]), present.kind, tuple(parts))


class TensorsInside:
    """Tensors inside stored objects as arrays of one chunk, with record numbers behind those of everything else.

    Args:
        first: The first of these numbers.
    """

    def __init__(self, first: int) -> None:
        self._first, self._refs = first, dict[tuple[str, TensorRef], int]()

    def array(self, key: str, ref: TensorRef) -> StoredArray:
        """The array of a tensor (`tensor_ref` of a node in the value) inside the object of a key."""
        number = self._refs.setdefault((key, ref), self._first + len(self._refs))
        return StoredArray.one_chunk(key, ref.shape, number)

    def find(self, record: int) -> tuple[str, TensorRef] | None:
        """Key and tensor of a record; None for one that is not of a tensor inside an object."""
        return None if record < self._first else next(itertools.islice(self._refs, record - self._first, None))


def object_info(key: str, file: str, start: int, length: int, *, wrapped: bool = True) -> ObjectInfo:
    """An object by its key, whose grid suffix says which shard it is: `rng_state/shard_0.1_2.2`."""
    match = _OBJECT.fullmatch(key)
    name, offset, grid = (match[1], match[2], match[3]) if match else (key, "0", "1")
    numbers = [tuple(int(n) for n in text.split(".") if n) for text in (offset, grid)]
    return ObjectInfo(name, key, numbers[0], numbers[1], file, start, length, wrapped)


def iteration_of(folder: Path) -> int | None:
    """The iteration that the folder's name states."""
    match = re.fullmatch(r"iter_(\d+)", folder.name)
    return int(match[1]) if match else None
