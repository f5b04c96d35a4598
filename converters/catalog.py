"""What a checkpoint holds, in canonical names, independent of how it is stored."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from converters.box import Box
from converters.chunks import Chunk, FlatPart, Part, ViewPart
from converters.dtypes import dtype
from converters.errors import UnsupportedError
from converters.model_parts import language_name
from converters.param_order import trainable
from converters.pickles.nodes import Global

if TYPE_CHECKING:
    from pathlib import Path

    from converters.dtypes import DType


@dataclass(frozen=True, slots=True)
class Remainders:
    """What master weights are computed from that are stored as the lower halves of their bits.

    Attributes:
        dtype: Element type of the stored remainders: int16, or float32 that holds the same integers.
        weight: The bf16 weight, stored beside them, that has the upper halves. None: the tensor is the remainders
            themselves, as int16.
    """

    dtype: DType
    weight: TensorInfo | None


@dataclass(frozen=True, slots=True)
class LowRank:
    """What an adapter adds to a weight: `scale * rows @ columns`.

    Attributes:
        rows: (rows of the weight, rank).
        columns: (rank, columns of the weight).
        scale: What the product is multiplied by.
    """

    rows: TensorInfo
    columns: TensorInfo
    scale: float


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor under its canonical name.

    Attributes:
        name: `decoder.layers.7.mlp.experts.3.linear_fc1.weight`, `optimizer.state.exp_avg.` before it for a moment.
        shape: Of the whole tensor, whatever the layout it was saved with.
        kind: "weight", "optimizer" or "other".
        parts: Where it is stored.
        opaque: For a tensor whose elements are not those of one parameter (a flat optimizer bucket), what it is.
        remainders: For master weights whose parts hold remainders, what completes them: reading gives `dtype`. None for all
            tensors whose parts hold their elements.
        rounds_to: For master weights that are proved while they are read, the weight that each element must round to.
        coarse: Master weights that the job held in fp16, with a scale, and stored as fp32: they may lie beside the numbers
            that round to the weight.
        shift: What is added to every element on the way to the target: -1 for a norm's weight that is stored as gamma and
            shall be gamma - 1. Reading alone does not add it.
        update: For a weight that an adapter is merged into while it is read, what that adds.
        unit: Rows and columns of a matrix that are written together: tiles of it are whole squares of that size, of which
            both sides are multiples.
        mean_rows: The last so many rows are not stored: each is the mean of those that are.
        replicas: Keys of arrays that hold the same elements once more and are not read: the copies of an embedding that two
            pipeline stages share fill flat buckets of their own.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    kind: str
    parts: tuple[Part | FlatPart | ViewPart, ...]
    opaque: str | None = None
    remainders: Remainders | None = None
    rounds_to: TensorInfo | None = None
    coarse: bool = False
    shift: int = 0
    update: LowRank | None = None
    unit: int = 1
    mean_rows: int = 0
    replicas: tuple[str, ...] = ()

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

    def reshaped(self, shape: tuple[int, ...]) -> TensorInfo:
        """The same elements in the same order under another shape.

        Raises:
            UnsupportedError: It is stored in pieces.
        """
        chunks = self.chunks()
        if shape == (*self.shape[:-1], self.shape[-1] // 2, 2) and all(chunk.transposed for chunk in chunks):
            (part,) = self.parts
            halves = tuple(half for chunk in chunks for half in chunk.alternate())
            return replace(self, shape=shape, parts=(ViewPart(part.array, halves),))
        if len(chunks) != 1 or chunks[0].box != Box.whole(self.shape) or math.prod(shape) != self.numel:
            raise UnsupportedError(
                f"{self.name} is stored in pieces, so its neighbouring elements cannot be told apart"
            )
        (part,) = self.parts
        piece = Chunk(Box.whole(shape), chunks[0].record, chunks[0].base)
        return replace(self, shape=shape, parts=(ViewPart(part.array, (piece,)),))

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

    @property
    def of_optimizer(self) -> bool:
        """Whether it is part of a distributed optimizer's state."""
        return ".distributed.dp_group_idx_" in self.name


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
        severity: "error" (tensors named in `tensors` cannot be read as they are), "unknown" (it is not understood what
            they are) or "warning".
        message: One sentence with the numbers.
        file: The file concerned, if it is one.
        tensors: Canonical names concerned; of a warning also those of tensors that are not read.
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
        framework: Who wrote it: "Megatron-LM", "NeMo 2", "NeMo 1", "Megatron-Bridge", or "torch DCP".
        tensors: Canonical name -> tensor, in natural order.
        objects: Stored key -> object.
        args: The training arguments (Megatron's Namespace) by name, inert; empty if the checkpoint has none.
        config: Model configuration of frameworks that store one instead of args (NeMo, Bridge); plain data.
        training: Options of the job's optimizer and of its gradients' buckets, under the names of training arguments, where
            a framework keeps them apart from those: `optimizer:` and `ddp:` of Megatron-Bridge.
        adapters: What was asked of adapters: `peft:` of Megatron-Bridge; empty if nothing says.
        common: The whole common state as an inert tree; None if there is none.
        content: Megatron's `content_metadata`, plain data.
        iteration: Training iteration, None if not recorded.
        producer: What is known of the writing version: ("Megatron-Core 0.15", reason), or None.
        details: Facts of the format worth showing: `{"metadata class": "..."}`.
        copies: Stored pieces that must equal a tensor and are not read otherwise (a tied embedding on the last stage, what
            every tensor-parallel rank has), by a label; each has the name of the tensor that it copies.
        opened: The folder that was named to open it, `path` or one around it; nothing is written inside it.
        masters: What is stored of the weights are the optimizer's own, in fp32 also where the job computes with less.
        imported: The element types that a job shall keep weights in, where these are not those stored; None unless the
            tensors are those of another framework under Megatron's names.
    """

    path: Path
    format: str
    framework: str
    tensors: dict[str, TensorInfo]
    objects: dict[str, ObjectInfo] = field(default_factory=dict)
    args: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    adapters: Mapping[str, Any] = field(default_factory=dict)
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
    imported: Mapping[str, DType] | None = None

    @property
    def root(self) -> Path:
        """The outermost folder that belongs to the checkpoint, as far as it was named."""
        return self.opened or self.path

    @property
    def options(self) -> Mapping[str, Any]:
        """The training arguments or, where another framework keeps none, the model's own section of its configuration."""
        return self.args or model_section(self.config)

    @property
    def job_options(self) -> Mapping[str, Any]:
        """The training arguments, or those of its optimizer and buckets where another framework keeps none."""
        return self.args or self.training

    @cached_property
    def weights(self) -> dict[str, TensorInfo]:
        """The model's own tensors: parameters and persistent buffers, no optimizer state."""
        return {name: t for name, t in self.tensors.items() if t.kind == "weight"}

    @cached_property
    def unread(self) -> dict[str, str]:
        """Names of tensors that lie in the checkpoint's files and are not read, with the file and the reason."""
        return {
            name: f"in {problem.file}, but not in the index of the files"
            for problem in self.problems
            if problem.severity == "warning"
            for name in problem.tensors
            if name not in self.tensors
        }

    @cached_property
    def language(self) -> dict[str, TensorInfo]:
        """The weights of the language model by their names in it, all weights of a model that has no other parts."""
        return {inner: t for name, t in self.weights.items() if (inner := language_name(name)) is not None}

    @cached_property
    def megatron(self) -> bool:
        """Whether the weights have Megatron's names, so that a layout and an architecture can be asked for."""
        return any(name.startswith(("decoder.layers.", "encoder.layers.")) for name in self.language)

    def trained_type(self, weight: TensorInfo) -> DType:
        """The element type that a job keeps a weight in, which is not always the stored one: see `masters`, `imported`."""
        if self.imported is not None:
            return self.imported.get(weight.name, weight.dtype)
        computing = self.computing_type if weight.dtype.name == "float32" and trainable(weight.name) else None
        return computing or weight.dtype

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
