"""What a checkpoint holds, in canonical names, independent of how it is stored.

A million chunks are arrays here, not a million Python objects: `StoredArray` keeps the geometry of one stored key, and
a canonical tensor (one layer, one expert) is a view on it. `Chunk` objects are made for one tensor at a time, when
asked for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from converters.box import Box, flat_range, runs, straight
from converters.dtypes import dtype
from converters.pickles import Global
from converters.registration import trainable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from converters.dtypes import DType

__all__ = [
    "Catalog",
    "Chunk",
    "FileInfo",
    "FlatPart",
    "ObjectInfo",
    "Part",
    "Problem",
    "StoredArray",
    "TensorInfo",
    "model_section",
]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A stored piece of a tensor.

    Attributes:
        box: The elements, in the coordinates of the canonical tensor.
        record: Number of the record that holds them; only the reader that made it knows what that means. -1: missing.
        base: Element of the record's payload where they begin; from there on they lie in C order of `box.shape`.
    """

    box: Box
    record: int
    base: int


@dataclass(frozen=True, slots=True)
class StoredArray:
    """The chunks of one stored key, as arrays sorted by their first element.

    Attributes:
        key: The key as the file spells it.
        shape: Shape of the stored array, leading layer and expert axes included.
        starts: (n, ndim) first element of each chunk.
        sizes: (n, ndim) elements of each chunk along each axis.
        records: (n,) record numbers, -1 where the data is missing.
        extent: Shape of what every record holds, if some hold more than their chunk: at the upper edge of a zarr array
            chunks keep their full size. None: each record holds its chunk and no more.
    """

    key: str
    shape: tuple[int, ...]
    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    records: NDArray[np.int64]
    extent: tuple[int, ...] | None = None

    def rows(self, prefix: tuple[int, ...]) -> NDArray[np.int64]:
        """Positions of the chunks that hold elements whose first indices are `prefix`."""
        hit = np.arange(len(self.starts), dtype=np.int64)
        for axis, index in enumerate(prefix):
            if axis == 0 and len(self.starts) > 64 and self.sizes[:, 0].max() == 1:  # sorted, one layer a chunk: bisect
                low, high = np.searchsorted(self.starts[:, 0], [index, index + 1])
                hit = hit[low:high]
                continue
            start = self.starts[hit, axis]
            hit = hit[(start <= index) & (index < start + self.sizes[hit, axis])]
        return hit


@dataclass(frozen=True, slots=True)
class Part:
    """Where some of a tensor's elements are stored: the sub-array of a stored key at fixed leading indices.

    Attributes:
        array: The stored key.
        prefix: Indices into its leading (layer, expert) axes.
        shift: Where the sub-array's first element lies in the tensor.
        block: For a tensor that was cut into blocks, each flattened and stored as one row of `array` (the optimizer of
            Megatron-Core 0.8 to 0.15): shape of one block, with the leading axes; None otherwise.
    """

    array: StoredArray
    prefix: tuple[int, ...] = ()
    shift: tuple[int, ...] | None = None
    block: tuple[int, ...] | None = None

    def rows(self) -> NDArray[np.int64]:
        """Positions in `array` of the chunks that may hold elements of this part."""
        return self.array.rows(() if self.block else self.prefix)

    @property
    def count(self) -> int:
        """Number of stored chunks."""
        return len(self.array.rows(self.prefix))

    def chunks(self) -> Iterator[Chunk]:
        """The chunks of this part, in the coordinates of the tensor."""
        for row in self.rows().tolist():
            start, size = self.array.starts[row].tolist(), self.array.sizes[row].tolist()
            record = int(self.array.records[row])
            for box, base in self._flattened(start, size) if self.block else self._plain(start, size):
                yield Chunk(box if self.shift is None else box.shifted(self.shift), record, base)

    def _plain(self, start: list[int], size: list[int]) -> Iterator[tuple[Box, int]]:
        depth, base = len(self.prefix), 0
        held = self.array.extent or tuple(size)
        for axis in range(depth):
            base = base * held[axis] + self.prefix[axis] - start[axis]
        base *= math.prod(held[depth:])
        if self.array.extent is None:
            yield Box(tuple(start[depth:]), tuple(size[depth:])), base
            return
        inside = Box((0,) * (len(size) - depth), tuple(size[depth:]))
        for box in straight(inside, held[depth:]):  # one, but for a chunk that ends before its record's rows do
            yield box.shifted(start[depth:]), base + runs(box, held[depth:])[0]

    def _flattened(self, start: list[int], size: list[int]) -> Iterator[tuple[Box, int]]:
        # One row of the array is one block of the tensor, flattened; a chunk is a range of it (Megatron-Core 0.8 to
        # 0.15, dist_checkpointing/strategies/resharding.py). A range is at most 2 * ndim - 1 boxes.
        assert self.block is not None
        depth, origin = len(self.prefix), [n * b for n, b in zip(start[:-1], self.block, strict=True)]
        for box in flat_range(self.block, start[-1], size[-1]):
            at = box.shifted(origin)
            if all(a <= i < a + n for a, n, i in zip(at.start, at.shape, self.prefix, strict=False)):
                base, stride = 0, 1
                for a, n, i in reversed(list(zip(at.start, at.shape, self.prefix, strict=False))):
                    base, stride = base + (i - a) * stride, stride * n
                first = sum(i * s for i, s in zip(box.start, _strides(self.block), strict=True)) - start[-1]
                inner = Box(at.start[depth:], at.shape[depth:])
                yield inner, first + base * inner.volume


@dataclass(frozen=True, slots=True)
class FlatPart:
    """Where some of a tensor's elements are stored: ranges of a one-dimensional key that holds many tensors.

        key      |  fc2  |   fc1 gate   |    fc1 up    | ... |      a bucket of the distributed optimizer
        records  +---------------+---------------+-------------+   cut anywhere, also inside a piece
                         ^ first of the gate's box

    Attributes:
        array: The stored key.
        pieces: Boxes of the tensor, and the element of the key where each begins; from there on it lies in C order.
    """

    prefix: ClassVar[tuple[int, ...]] = ()
    block: ClassVar[None] = None

    array: StoredArray
    pieces: tuple[tuple[Box, int], ...]

    def rows(self) -> NDArray[np.int64]:
        """Positions in `array` of the chunks that hold elements of this part."""
        found = [np.arange(*self._span(first, box.volume)) for box, first in self.pieces]
        return np.unique(np.concatenate(found)) if found else np.zeros(0, np.int64)

    @property
    def count(self) -> int:
        """Number of stored chunks."""
        return len(self.rows())

    def chunks(self) -> Iterator[Chunk]:
        """The chunks of this part, in the coordinates of the tensor."""
        for box, first in self.pieces:
            for row in range(*self._span(first, box.volume)):
                start, size = int(self.array.starts[row, 0]), int(self.array.sizes[row, 0])
                low, high = max(first, start), min(first + box.volume, start + size)
                base, record = low - start, int(self.array.records[row])
                for inner in flat_range(box.shape, low - first, high - low):
                    yield Chunk(inner.shifted(box.start), record, base)
                    base += inner.volume

    def _span(self, first: int, length: int) -> tuple[int, int]:
        """First and one past the last chunk that reach into a range; empty chunks at its edges may be among them."""
        starts = self.array.starts[:, 0]
        low = int(np.searchsorted(starts, first, side="right")) - 1
        return max(low, 0), int(np.searchsorted(starts, first + length, side="left"))


def _strides(shape: tuple[int, ...]) -> list[int]:
    out = [1]
    for n in reversed(shape[1:]):
        out.append(out[-1] * n)
    return out[::-1]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor under its canonical name.

    Attributes:
        name: `decoder.layers.7.mlp.experts.3.linear_fc1.weight`, `optimizer.state.exp_avg.` before it for a moment.
        shape: Of the whole tensor, whatever the layout it was saved with.
        kind: "weight", "optimizer" or "other".
        parts: Where it is stored.
        opaque: For a tensor whose elements are not those of one parameter (a flat optimizer bucket), what it is.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    kind: str
    parts: tuple[Part | FlatPart, ...]
    opaque: str | None = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.numel * self.dtype.itemsize

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys the file uses."""
        return tuple(dict.fromkeys(part.array.key for part in self.parts))

    @property
    def chunk_count(self) -> int:
        """Number of stored pieces."""
        return sum(part.count for part in self.parts)

    def chunks(self) -> list[Chunk]:
        """The stored pieces, in the tensor's coordinates."""
        return [chunk for part in self.parts for chunk in part.chunks()]


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """Something stored that is not a tensor: an `_extra_state`, a random state, the common state.

    Attributes:
        name: The key without its grid suffix: `rng_state`.
        key: The key as the file spells it: `rng_state/shard_0.1_2.2`.
        offset: Position in the grid of shards.
        grid: Shape of that grid.
        start: First byte of the record in the file.
        length: Bytes of the record.
        wrapped: The record is a list of one, the object, as Megatron's torch_dist has it; False: the object itself.
    """

    name: str
    key: str
    offset: tuple[int, ...]
    grid: tuple[int, ...]
    file: str
    start: int
    length: int
    wrapped: bool = True


@dataclass(frozen=True, slots=True)
class FileInfo:
    """A file of the checkpoint folder.

    Attributes:
        name: Path relative to the folder.
        size: Bytes on disk; None if the file is missing.
        records: Number of records that the metadata places in it.
        needed: Bytes up to the end of the last of them.
        used: Bytes those records take.
        role: "data", "metadata", "common state", "configuration", "other", or "unreferenced" data.
    """

    name: str
    size: int | None
    records: int = 0
    needed: int = 0
    used: int = 0
    role: str = "data"


@dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong that was noticed while opening.

    Attributes:
        severity: "error" (tensors named in `tensors` cannot be read as they are) or "warning".
        message: One sentence with the numbers.
        file: The file concerned, if it is one.
        tensors: Canonical names concerned.
        objects: Keys of stored objects concerned.
    """

    severity: str
    message: str
    file: str | None = None
    tensors: tuple[str, ...] = ()
    objects: tuple[str, ...] = ()


@dataclass(frozen=True)
class Catalog:
    """Everything a checkpoint holds.

    Attributes:
        path: The folder with the data (`.../iter_0000010`, `.../weights`).
        flavour: Who wrote it: "Megatron-LM", "NeMo 2", "NeMo 1", "Megatron-Bridge", or "torch DCP".
        tensors: Canonical name -> tensor, in natural order.
        objects: Stored key -> object.
        args: The training arguments (Megatron's Namespace) by name, inert; empty if the checkpoint has none.
        config: Model configuration of frameworks that store one instead of args (NeMo, Bridge); plain data.
        common: The whole common state as an inert tree; None if there is none.
        content: Megatron's `content_metadata`, plain data.
        iteration: Training iteration, None if not recorded.
        producer: What is known of the writing version: ("Megatron-Core 0.15", reason), or None.
        details: Facts of the format worth showing: `{"metadata class": "..."}`.
        copies: Stored pieces that must equal a tensor and are not read otherwise (a tied embedding on the last stage, what
            every tensor-parallel rank has), by a label; each has the name of the tensor that it copies.
        opened: The folder that was named to open it, `path` or one around it; nothing is written inside it.
        masters: What is stored of the weights are the optimizer's own, in fp32 also where the job computes with less.
    """

    path: Path
    format: str
    flavour: str
    tensors: dict[str, TensorInfo]
    objects: dict[str, ObjectInfo] = field(default_factory=dict)
    args: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    common: Any = None
    content: Mapping[str, Any] = field(default_factory=dict)
    iteration: int | None = None
    producer: tuple[str, str] | None = None
    files: tuple[FileInfo, ...] = ()
    problems: tuple[Problem, ...] = ()
    details: Mapping[str, str] = field(default_factory=dict)
    copies: Mapping[str, TensorInfo] = field(default_factory=dict)
    opened: Path | None = None
    masters: bool = False

    @property
    def root(self) -> Path:
        """The outermost folder that belongs to the checkpoint, as far as it was named."""
        return self.opened or self.path

    @property
    def options(self) -> Mapping[str, Any]:
        """The training arguments or, where another framework keeps none, the model's own section of its configuration."""
        return self.args or model_section(self.config)

    @cached_property
    def weights(self) -> dict[str, TensorInfo]:
        """The model's own tensors: parameters and persistent buffers, no optimizer state."""
        return {name: t for name, t in self.tensors.items() if t.kind == "weight"}

    @cached_property
    def megatron(self) -> bool:
        """Whether the weights have Megatron's names, so that a layout and an architecture can be asked for."""
        return any(name.startswith(("decoder.layers.", "encoder.layers.")) for name in self.weights)

    def trained_type(self, weight: TensorInfo) -> DType:
        """The element type that a job keeps a weight in, which is not always the stored one: see `masters`."""
        other = self.computing_type if weight.dtype.name == "float32" and trainable(weight.name) else None
        return other or weight.dtype

    @cached_property
    def computing_type(self) -> DType | None:
        """The element type that the job computes with, if its weights are stored in another: see `masters`."""
        params = self.args.get("params_dtype")
        if not self.masters or not isinstance(params, Global) or params.module != "torch" or params.name == "float32":
            return None
        return dtype(params.name)

    def nbytes(self, kind: str | None = None) -> int:
        """Bytes of all tensors, or of those of one kind."""
        return sum(t.nbytes for t in self.tensors.values() if kind is None or t.kind == kind)


def model_section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The model's own: `model:` of Megatron-Bridge's run_config.yaml, `config:` of NeMo 2's model.yaml, all of NeMo 1's."""
    while inner := next((v for key in ("model", "config") if isinstance(v := config.get(key), Mapping)), None):
        config = inner
    return config
