"""The model of a legacy checkpoint: every rank's parameters as boxes of whole tensors. See `converters.formats.legacy`."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from converters.catalog import Catalog
from converters.errors import FormatError, RequestError, UnsupportedError
from converters.formats.containers.archive import FileTensor
from converters.formats.legacy.names import Piece, QkvOrder, layer_number, local_experts, module_order, pieces, segments
from converters.formats.legacy.optimizer import Owned
from converters.formats.legacy.rank_model import EXTRA
from converters.megatron.buffers import Local
from converters.megatron.flat_index import FlatIndex
from converters.megatron.layout import Layout
from converters.megatron.model_args import ModelArgs
from converters.megatron.optimizer_chain import is_expert
from converters.megatron.outline import Outline
from converters.megatron.split import shards, split_rule
from converters.megatron.vocabulary import embedding_name, is_embedding
from converters.model_parts import LANGUAGE, language_name, split_part, untrained
from converters.names import parse_key, printable
from converters.param_order import trainable
from converters.pickles.nodes import Obj
from converters.words import counted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from converters.catalog import TensorInfo
    from converters.formats.containers.archive import Storages
    from converters.formats.legacy.grid import Grid
    from converters.formats.legacy.rank_model import RankModel
    from converters.pickles.nodes import Node

Rank = tuple[int, int, int]
"""(tp, pp, ep)"""

_OUTPUT = "output_layer.weight"
_SECTIONS = ("decoder.layers", "encoder.layers", "mtp.layers", f"{LANGUAGE}decoder.layers")
_MLA_DOWN = {
    "self_attention.linear_q_down_proj.weight": ("q_lora_rank",),
    "self_attention.linear_kv_down_proj.weight": ("kv_lora_rank", "qk_pos_emb_head_dim"),
}


@dataclass(frozen=True, slots=True)
class _Entry:
    """A parameter in a rank's file, before it is known how the whole tensors are divided."""

    key: str
    tensor: FileTensor
    parts: list[Piece]
    chunk: int
    copy: bool


class WholeModel:
    """The model put together from all ranks' parameters, be it a single rank's.

    Attributes:
        layout: Of the job that saved, as far as it matters.
        shapes: Whole shape of every tensor.
        owned: Each rank's trainable parameters, in the order of `named_parameters()`.
        extra_states: Canonical name, rank and value of every module's extra state.
        modules: How the job's modules are made; None if their names do not tell.
    """

    def __init__(
        self, grid: Grid, files: Mapping[Rank, RankModel], args: Mapping[str, Any], storages: Storages
    ) -> None:
        self._grid, self._files, self._args, self._storages = grid, files, args, storages
        self.extra_states: list[tuple[str, Rank, FileTensor | Node]] = []
        self.warnings: list[str] = []
        self.details = {"grid": f"tp {grid.tp}, pp {grid.pp}, ep {grid.ep}"}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.owned: dict[Rank, list[Owned]] = {}
        self._homes: dict[str, tuple[int, int]] = {}
        self._shape_from: dict[str, str] = {}
        self._chunks = {rank: file.chunks for rank, file in files.items()}
        self.layout = self._layout()
        self._offsets = self._layer_offsets()
        self._order = self._qkv_order()
        # names of a later stage may tell what those of the first do not: its layers may all be dense
        self.modules = module_order(key for chunks in self._chunks.values() for chunk in chunks for key in chunk)
        self._mla_split: bool | None = None
        entries = {rank: list(self._entries(rank)) for rank in self._ranks()}
        facts = ModelArgs.from_catalog(Catalog(Path(), "legacy", "", {}, args=args))
        outline = Outline.of(facts, self.shapes)
        self.outline = replace(outline, mla_down_split=self._mla_split is True)
        self._weights, self._copies = FlatIndex(), FlatIndex()
        self._frozen = untrained(self.shapes)
        for rank, rank_entries in entries.items():
            self.owned[rank] = list(self._locate(rank, rank_entries))
        if any(entry.copy for rank_entries in entries.values() for entry in rank_entries):
            self.details["tied"] = "copies of the embedding on later stages are not read again"

    def tensors(self) -> dict[str, TensorInfo]:
        """The model's tensors.

        Raises:
            FormatError: Some elements are in no file.
        """
        out = {}
        for name, shape in self.shapes.items():
            missing = self._weights.missing(name, shape)
            if missing:
                raise FormatError(
                    f"{printable(name)}: {missing:,} of {math.prod(shape):,} elements are in no file", tensor=name
                )
            out[name] = self._weights.tensor(name, shape, parse_key(name).kind)
        return out

    def copies(self) -> dict[str, TensorInfo]:
        """What other ranks have of the same tensors: replicas, and the tied embedding on a later stage."""
        out = {}
        for key in self._copies.pieces:
            label, _, name = key.partition("\0")
            if not self._copies.missing(key, self.shapes[name]):
                copy = self._copies.tensor(key, self.shapes[name], "copy")
                out[f"{name} ({label})"] = replace(copy, name=name)
        return out

    def _ranks(self) -> list[Rank]:
        return sorted(self._files, key=lambda rank: (rank[1], rank[2], rank[0]))

    def _layout(self) -> Layout:
        grid, args = self._grid, self._args
        etp = args.get("expert_tensor_parallel_size")
        experts = any(is_expert(key) for chunks in self._chunks.values() for chunk in chunks for key in chunk)
        if experts and type(etp) is int and etp != grid.tp:
            raise FormatError(
                f"its experts were divided over expert_tensor_parallel_size {etp}, everything else over tp {grid.tp}",
                details=["the folders are numbered by tp, so two ranks wrote to one file: parts of experts are lost"],
            )
        return Layout.from_args(args, tp=grid.tp, pp=grid.pp, ep=grid.ep, etp=None, vpp=self._vpp(), pp_layout=None)

    def _vpp(self) -> int | None:
        counts = {len(chunks): self._files[rank].name for rank, chunks in self._chunks.items()}
        if len(counts) > 1:
            raise FormatError(
                "the ranks have different numbers of model chunks",
                details=[f"{name}: {count}" for count, name in counts.items()],
            )
        (count,) = counts
        return count if count > 1 else None

    def _layer_offsets(self) -> dict[tuple[str, int, int], int]:
        """Number in the whole model of each chunk's first layer, by (`decoder.layers`, pp, chunk): counted."""
        offsets: dict[tuple[str, int, int], int] = {}
        total: dict[str, int] = defaultdict(int)
        for chunk in range(self.layout.vpp or 1):
            for pp in range(self._grid.pp):
                counts = {rank: self._count(rank, chunk) for rank in self._files if rank[1] == pp}
                first = counts[0, pp, 0]
                for rank, count in counts.items():
                    if count != first:
                        raise FormatError(
                            f"{self._files[rank].name} has other layers than {self._files[0, pp, 0].name}",
                            details=[f"{dict(count)} and {dict(first)}"],
                        )
                for section in _SECTIONS:
                    offsets[section, pp, chunk] = total[section]
                    total[section] += first.get(section, 0)
        stated = self._args.get("num_layers")
        possible = [n for section, n in total.items() if n and not section.startswith("mtp.")]
        if type(stated) is int and stated not in possible:
            self.warnings.append(
                f"the files hold {counted(max(possible, default=0), 'layer')}, the arguments say {stated}"
            )
        return offsets

    def _count(self, rank: Rank, chunk: int) -> dict[str, int]:
        layers: dict[str, set[int]] = defaultdict(set)
        for key in self._chunks[rank][chunk]:
            layer = layer_number(key)
            if layer:
                layers[layer[0]].add(layer[1])
        for section, numbers in layers.items():
            if max(numbers) + 1 != len(numbers):
                raise FormatError(
                    f"{self._files[rank].name} lacks layers: {section} has {len(numbers)} of {max(numbers) + 1}"
                )
        return {section: len(numbers) for section, numbers in layers.items()}

    def _qkv_order(self) -> QkvOrder | None:
        """How rows of query, key and value lie; only models before Megatron-Core ever had another order than today's."""
        file = self._files[0, 0, 0]
        version = file.version
        if not isinstance(version, int | float):
            raise FormatError(f"{file.name}: checkpoint_version is {printable(str(version))[:40]}, not a number")
        if version >= 2 or not file.before_core:
            return None
        dim, heads, hidden = (self._args.get(n) for n in ("kv_channels", "num_attention_heads", "hidden_size"))
        if type(dim) is not int and type(heads) is int and type(hidden) is int and heads:
            dim = hidden // heads
        if type(dim) is not int or self._args.get("group_query_attention") is True:
            raise UnsupportedError(
                f"{file.name} has checkpoint_version {version}, whose rows of query, key and value lie in another order, "
                "and the arguments do not tell the size of a head",
                tensor="self_attention.query_key_value",
            )
        return QkvOrder(int(version), dim)

    def _entries(self, rank: Rank) -> Iterator[_Entry]:
        """A rank's parameters with the tensors they are parts of; notes whole shapes and extra states on the way."""
        _, pp, ep = rank
        file = self._files[rank]
        for number, chunk in enumerate(self._chunks[rank]):
            refs = {k: t.ref for k, t in chunk.items() if isinstance(t, FileTensor) and not k.endswith(EXTRA)}
            stated = self._args.get("num_experts")
            each = stated // self._grid.ep if type(stated) is int else None
            local_shapes = {key: ref.shape for key, ref in refs.items()}
            experts = local_experts(local_shapes, each)
            for key, node in chunk.items():
                layer = layer_number(key)
                offset = self._offsets[layer[0], pp, number] if layer else 0
                if key.endswith(EXTRA):
                    self._extra_state(key, offset, ep * experts, rank, node)
                ref = refs.get(key)
                if ref is None and isinstance(node, Obj) and not key.endswith(EXTRA):
                    raise UnsupportedError(
                        f"{file.name}: {printable(key)} is a {printable(node.func.name)}, not a tensor"
                    )
                if ref is None:
                    continue
                parts = pieces(key, ref.shape, local_shapes, offset=offset, first_expert=ep * experts, experts=experts)
                copy = self._tied_copy(key, rank)
                if copy:
                    parts = [Piece(f"{split_part(key)[0]}embedding.word_embeddings.weight", ref.shape)]
                for part in parts:
                    self._note(part, rank, number)
                yield _Entry(key, node, parts, number, copy or (is_embedding(parts[0].name) and (pp, number) != (0, 0)))

    def _tied_copy(self, key: str, rank: Rank) -> bool:
        """Whether an output layer is a copy of the embedding, which the first stage has."""
        if language_name(key) != _OUTPUT or not self._args:
            return False
        if self._args.get("untie_embeddings_and_output_weights") is True:
            return False
        return any(embedding_name(chunk) is not None for chunk in self._chunks[rank[0], 0, rank[2]])

    def _extra_state(self, key: str, offset: int, first_expert: int, rank: Rank, node: Node) -> None:
        expert = is_expert(key)
        if rank[0] or node is None or (rank[2] and not expert):
            return  # the same for all ranks of a stage
        if expert and ".local_experts." not in key:
            # one for all experts of the rank, where distributed checkpoints have one for each; empty without FP8
            if self._args.get("fp8"):
                self.warnings.append(f"{self._files[rank].name}: the FP8 state of {printable(key)} is not carried over")
            return
        name = pieces(key, (), {}, offset=offset, first_expert=first_expert, experts=0)[0].name
        self.extra_states.append((name, rank, node))

    def _note(self, part: Piece, rank: Rank, chunk: int) -> None:
        """Notes the whole shape of a tensor, and the first stage that has it."""
        shape, file = self._whole_shape(part), self._files[rank].name
        before = self.shapes.setdefault(part.name, shape)
        self._shape_from.setdefault(part.name, file)
        if before != shape:
            raise FormatError(
                f"{printable(part.name)} has the full shape {list(shape)} by {file}, {list(before)} by "
                f"{self._shape_from[part.name]}",
                tensor=part.name,
            )
        stage = (chunk, rank[1])
        self._homes[part.name] = min(self._homes.get(part.name, stage), stage)

    def _whole_shape(self, part: Piece) -> tuple[int, ...]:
        """Every rank has an equal part along the axis that is divided."""
        tp = self._grid.tp
        try:
            axis = split_rule(part.name).axis
        except RequestError:
            if tp > 1 or self._grid.ep > 1:
                raise
            axis = None
        for tail, sizes in _MLA_DOWN.items():
            if part.name.endswith(tail) and tp > 1:
                full_sizes = [self._args.get(name) for name in sizes]
                stated = all(type(n) is int for n in full_sizes)
                split = stated and part.shape[0] * tp == sum(n or 0 for n in full_sizes)
                if self._mla_split not in (None, split):
                    raise FormatError(f"{part.name}: some down projections are divided over tp, others are not")
                self._mla_split, axis = split, 0 if split else None
        if axis is None or axis >= len(part.shape):
            return part.shape
        return (*part.shape[:axis], part.shape[axis] * tp, *part.shape[axis + 1 :])

    def _locate(self, rank: Rank, entries: list[_Entry]) -> Iterator[Owned]:
        """Notes where a rank's parameters are stored, and yields those that were trained."""
        tp, pp, ep = rank
        file = self._files[rank]
        for entry in entries:
            boxes, first, expert = [], True, False
            label = f"copy of pp {pp}" + (f", chunk {entry.chunk}" if entry.chunk else "")
            for part in entry.parts:
                every_shard = shards(part.name, self.shapes[part.name], self.layout, self.outline)
                rank_shards = [shard for shard in every_shard if shard.tp in (None, tp) and shard.ep in (None, ep)]
                if not rank_shards:
                    raise FormatError(
                        f"{file.name} has a part of {printable(part.name)}, which belongs to another rank",
                        tensor=part.name,
                    )
                shard = rank_shards[0]
                boxes += [(part.name, box) for box in segments(part, rank_shards, self._order)]
                expert = shard.ep is not None and self._grid.ep > 1
                # replicas: the first rank that has it speaks for all
                tied = entry.copy and language_name(entry.key) == _OUTPUT
                first &= self._homes[part.name] == (entry.chunk, pp) and not tied
                first &= (shard.tp is not None or tp == 0) and (shard.ep is not None or ep == 0)
            name = entry.parts[0].name
            shared = self._grid.pp > 1 and is_embedding(name) and (self.outline.tied or self.outline.mtp_layers > 0)
            ref = entry.tensor.ref
            local = Local(name, ref.dtype, tuple(boxes), math.prod(ref.shape), first, shared)
            array = self._storages.array(entry.tensor.file, ref, f"{file.name}: {entry.key}")
            self._weights.add("", local, array, ref.dtype, ref.offset)
            if not first:
                for axis, rank_of, divided in (("tp", tp, shard.tp), ("ep", ep, shard.ep)):
                    label += f", {axis} {rank_of}" if divided is None and rank_of else ""
                copy = replace(local, first=True)
                self._copies.add(f"{label}\0", copy, array, ref.dtype, ref.offset)
            if ref.dtype.floating and trainable(name) and name not in self._frozen:
                yield Owned(entry.key, local, ref.shape, entry.chunk, expert)
