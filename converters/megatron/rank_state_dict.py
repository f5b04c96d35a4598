"""What one rank of a job has in memory: the tensors of its model chunks under the names of their modules. No I/O.

    model = LocalModel.of(catalog, Layout(tp=2, pp=2))
    for tensor in model.chunk(pp=1, tp=0):
        tensor.name            # decoder.layers.0.mlp.linear_fc1.weight: layers and experts count within the chunk
        tensor.shape           # this rank's part
        tensor.copies          # which boxes of which whole tensors fill it
        tensor.fills           # what nothing fills: rows of the padded vocabulary, zeros

The whole of an MLP's first projection has all gates, then all ups; a rank has its own gates, then its own ups. GroupedMLP
keeps the experts of a rank in two matrices, each expert transposed:

    experts.1.linear_fc1.weight (2f, h)          mlp.experts.weight1, h rows, E * 2f columns, in memory (E, h, 2f)
      gate  [0:f]  --transposed-->                 rows h..2h of (E * h, 2f), columns 0..f
      up    [f:2f] --transposed-->                                            columns f..2f

Facts: Megatron-Core 0.16.1, models/gpt/gpt_layer_specs.py (`sharded_state_dict_keys_map` of the local spec),
transformer/moe/experts.py, transformer/transformer_block.py, models/common/language_module/language_module.py; compared
with what the real models hold by tests/layout/test_local.py.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from converters.box import Box, uncovered
from converters.errors import RequestError
from converters.megatron.buffers import Buffer, Local, Rules
from converters.megatron.model_args import ModelArgs
from converters.megatron.optimizer_parts import trained_weights
from converters.megatron.outline import Outline
from converters.megatron.split import shards
from converters.megatron.vocabulary import is_embedding, is_vocabulary, vocabulary_rows
from converters.model_parts import split_part, untrained
from converters.names import numberless, printable
from converters.param_order import Order, trainable
from converters.planning.plan import Copy, Op, Piece, Target

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from converters.catalog import Catalog
    from converters.dtypes import DType
    from converters.megatron.layout import DataParallelGroup, Layout
    from converters.megatron.optimizer_chain import ChainMember
    from converters.megatron.pipeline import Stage
    from converters.megatron.split import Shard

_LAYER = re.compile(r"((?:language_model\.)?(?:decoder|encoder|mtp)\.layers)\.(\d+)\.")
_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(linear_fc([12]))\.(\w+)")
_FUSED = re.compile(
    r"(.*\.layers\.\d+\.(?:transformer_layer\.)?)(self_attention\.linear_qkv|mlp\.linear_fc1)\.layer_norm_(\w+)"
)
_APART = {"self_attention.linear_qkv": "input_layernorm", "mlp.linear_fc1": "pre_mlp_layernorm"}
_DIRECT_CONV = re.compile(r"(.*\.(?:mamba_)?mixer)\.conv1d\.(weight|bias)")
_UNKNOWN = (9,)  # the position of a parameter that no order has, behind all others
_MLA_NORM = re.compile(r"(.*\.self_attention)\.linear_(q|kv)_up_proj\.layer_norm_(\w+)")


@dataclass(frozen=True, slots=True)
class LocalTensor(Piece):
    """A tensor of one model chunk of one rank, by its name in the state dict of the chunk.

    What fills it are boxes of whole tensors, by canonical name. Boxes of it refer to another shape than its own only for
    GroupedMLP's `weight1`.

    Attributes:
        parts: Canonical names of the whole tensors that it has parts of, be they rows of padding alone.
        trained: It is a parameter, so that the optimizer has state for it; otherwise a buffer.
        expert: It belongs to routed experts.
        first: No rank before this one holds the same elements; others hold replicas.
        shared: Another pipeline stage trains a copy of it: the embedding, where it is tied or used by MTP.
    """

    parts: tuple[str, ...] = ()
    trained: bool = True
    expert: bool = False
    first: bool = True
    shared: bool = False

    @property
    def numel(self) -> int:
        """Its elements."""
        return math.prod(self.shape)

    def flattened(self, order: Order) -> Local:
        """Its elements one behind the other, as boxes of whole tensors that have them all."""
        segments: list[tuple[str, Box]] = []
        for source, copies in itertools.groupby(self.copies, key=lambda copy: copy.source):
            of_source = list(copies)
            boxes = [copy.source_box for copy in of_source]
            if of_source[0].op is Op.TRANSPOSE:  # column by column of gate, then of up
                boxes = [column(box, n) for n in range(boxes[0].shape[1]) for box in boxes]
            segments += [(source, box) for box in boxes]
        return Local(order.parameter(self.parts[0]), self.dtype, tuple(segments), self.numel, self.first, self.shared)


def likely_order(catalog: Catalog) -> Order:
    """How the modules of the job that saved a checkpoint are most likely made, by its arguments."""
    args = catalog.args
    experts = "grouped"
    if args.get("moe_grouped_gemm") is False:
        experts = "sequential"
    elif args.get("moe_use_legacy_grouped_gemm") is True or args.get("transformer_impl") == "local":
        experts = "stacked"
    producer = catalog.producer[0] if catalog.producer else ""
    fused = args.get("mla_down_proj_fusion") is True
    return Order(args.get("transformer_impl") != "local", experts, "0.19" in producer, fused)


def module_name(name: str, order: Order, *, dense: bool = True, expert: int | None = None) -> str:
    """What a model calls a tensor of a canonical name.

    Args:
        name: Canonical name, with the layer's number in its model chunk.
        order: How the model's modules are made.
        dense: The layer's MLP is not a mixture of experts, so that its norm may be fused into it.
        expert: Number of an expert on its rank.
    """
    if match := _EXPERT.fullmatch(name):
        stem, number, linear, projection, leaf = match.groups()
        number = number if expert is None else str(expert)
        if order.experts == "stacked" and leaf == "weight":
            return f"{stem}.weight{projection}"
        if order.experts == "sequential" or leaf not in ("weight", "bias"):
            return f"{stem}.local_experts.{number}.{linear}.{leaf}"
        return f"{stem}.{linear}.{leaf}{number}"
    if match := _FUSED.fullmatch(name):
        if order.fused_norms and (dense or match[2] != "mlp.linear_fc1"):
            return name
        return f"{match[1]}{_APART[match[2]]}.{match[3]}"
    if not order.fused_norms and (match := _MLA_NORM.fullmatch(name)):
        return f"{match[1]}.{match[2]}_layernorm.{match[3]}"
    parameter = order.parameter(name)
    if order.conv_direct and (match := _DIRECT_CONV.fullmatch(parameter)):
        return f"{match[1]}.conv1d_{match[2]}"
    return parameter


class LocalModel:
    """What the ranks of a job have in memory.

    Args:
        tensors: Type and shape of every whole tensor at the target, by canonical name.
        available: Shapes of the source's tensors where they are not the target's: another padding of the vocabulary.
    """

    def __init__(
        self,
        tensors: Mapping[str, Target],
        layout: Layout,
        outline: Outline,
        order: Order,
        available: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        self.tensors, self.layout, self.outline, self.order = tensors, layout, outline, order
        self._available = available or {}
        self._pipeline = layout.pipeline(outline.num_layers, outline.mtp_layers)
        self._shards: dict[str, list[Shard]] = {}
        self._frozen = untrained(tensors)

    @classmethod
    def trained(cls, catalog: Catalog, layout: Layout, order: Order) -> LocalModel:
        """What the job that saved a checkpoint had of the tensors that its optimizer trained, as they are stored."""
        weights = trained_weights(catalog.weights)
        outline = Outline.of(ModelArgs.from_catalog(catalog), {name: info.shape for name, info in weights.items()})
        targets = {name: Target(name, info.dtype, info.shape) for name, info in weights.items()}
        return cls(targets, layout, outline, order)

    @classmethod
    def of(
        cls, catalog: Catalog, layout: Layout, *, order: Order | None = None, vocab_size: int | None = None
    ) -> LocalModel:
        """The job at a layout that loads a checkpoint.

        Args:
            order: How its modules are made; None takes `likely_order`.
            vocab_size: True rows of the vocabulary; None takes the checkpoint's word.

        Raises:
            RequestError: The model cannot be laid out so.
        """
        order, args = order or likely_order(catalog), ModelArgs.from_catalog(catalog)
        shapes = {name: info.shape for name, info in catalog.weights.items()}
        outline = Outline.of(args, shapes)
        # Megatron's own layers divide the down projections, TransformerEngine's have not since core 0.14
        outline = replace(outline, mla_down_split=outline.mla_down_split or not order.fused_norms)
        tensors = {}
        for name, info in catalog.weights.items():
            shape = info.shape
            if is_vocabulary(name):
                rows = vocabulary_rows(name, shape[0], layout.tp, catalog, args.vocab_size, vocab_size)
                shape = (rows, *shape[1:])
            tensors[name] = Target(name, catalog.trained_type(info), shape)
        return cls(tensors, layout, outline, order, shapes)

    def prove(self) -> None:
        """Checks that the ranks of the job together hold every element of every tensor.

        Raises:
            RequestError: An element is on none; the tensor is named.
        """
        proved_kinds = set[tuple[str, tuple[int, ...]]]()
        for name, target in self.tensors.items():
            self._pipeline.homes(name, tied=self.outline.tied)
            kind = (numberless(name), target.shape)
            if kind in proved_kinds:  # divided as the same tensor of another layer
                continue
            proved_kinds.add(kind)
            gap = uncovered(target.shape, [shard.box for shard in self._shards_of(name)])
            if gap is not None:
                raise RequestError(f"{printable(name)}: elements {gap} would be on no rank", tensor=name)

    def rank(self, rank: int) -> list[list[LocalTensor]]:
        """All tensors of a rank, one list for each of its model chunks."""
        at = self.layout.coordinates(rank)
        return [
            self.chunk(pp=at.pp, chunk=chunk, tp=at.tp, ep=at.ep, etp=at.etp) for chunk in range(self.layout.chunks)
        ]

    def chunk(
        self, *, pp: int = 0, chunk: int = 0, tp: int = 0, ep: int = 0, etp: int | None = None
    ) -> list[LocalTensor]:
        """The tensors of one model chunk of one rank, in the order of its state dict.

        Args:
            etp: Tensor-parallel rank of the experts; None is `tp`.

        Raises:
            RequestError: A tensor cannot be divided so.
        """
        etp = tp if etp is None else etp
        grouped: dict[str, list[str]] = {}
        for parameter, name in self._stages.get((pp, chunk), ()):
            shards = self._shards_of(name)
            at = tp if shards[0].ep is None else etp
            if shards[0].ep in (None, ep) and any(shard.tp in (None, at) for shard in shards):
                grouped.setdefault(parameter, []).append(name)
        return [self._tensor(parameter, names, tp, etp, (pp, chunk)) for parameter, names in grouped.items()]

    def numel(self, pp: int) -> int:
        """Elements of all parameters of a rank of one pipeline stage, experts included."""
        tensors = (tensor for chunk in range(self.layout.chunks) for tensor in self.chunk(pp=pp, chunk=chunk))
        return sum(math.prod(tensor.shape) for tensor in tensors if tensor.trained)

    def buffers(
        self,
        group: DataParallelGroup,
        member: ChainMember,
        args: Mapping[str, Any],
        *,
        align: int = 64,
        early: bool = False,
    ) -> list[Buffer]:
        """The flat buffers of one optimizer of a rank, in Megatron's numbering (`gbuf_idx`).

        Args:
            group: The rank's data-parallel group; of the experts' grid if the optimizer has only experts.
            member: The optimizer.
            args: The job's training arguments, as far as they decide how buffers are cut; see `Rules.of`.
            align: See `Rules`.
            early: See `Rules`.

        Raises:
            RequestError: It is not known where a parameter stands in the order.
        """
        out = []
        for chunk in range(self.layout.chunks):
            by_type: dict[DType, list[LocalTensor]] = {}
            for tensor in self.chunk(pp=group.pp, chunk=chunk, tp=group.tp, ep=group.ep or 0):
                if tensor.trained and member.has(tensor.parts[0], chunk):
                    self.order.position(tensor.parts[0])
                    by_type.setdefault(tensor.dtype, []).append(tensor)
            job = (args, self.layout, self.numel, group.pp, chunk)
            rules = Rules.of(*job, experts=member.experts, align=align, early=early)
            out += [Buffer(dtype, tuple(tensors), rules) for dtype, tensors in by_type.items()]
        return out

    def data_parallel_buffers(
        self, member: ChainMember, args: Mapping[str, Any], **rules: Any
    ) -> Iterator[tuple[int, DataParallelGroup, list[Buffer]]]:
        """The flat buffers of one optimizer of the job: `dp_group_idx`, the ranks that share buffers, and these buffers."""
        for index, group in enumerate(self.layout.data_parallel_groups(experts=member.experts is True)):
            yield index, group, self.buffers(group, member, args, **rules)

    def modules(self, name: str) -> Iterator[tuple[int, int, str]]:
        """`(pp, chunk, name there)` of what a canonical tensor or extra state is on, the stage that saves it first.

        An expert keeps its number in the whole model.
        """
        for stage in self._pipeline.homes(name, tied=self.outline.tied):
            yield stage.pp, stage.vp, self._module(_on_stage(stage, name), name)

    def trains(self, name: str) -> bool:
        """Whether a tensor is a parameter, so that the optimizer has state for it; otherwise it is a buffer."""
        return trainable(name) and name not in self._frozen and self.tensors[name].dtype.floating

    def has_output(self, pp: int, chunk: int) -> bool:
        """Whether a model chunk has an output layer, its own or one that uses the embedding's weight."""
        return any(stage.has_output for stage in self._pipeline.stages if (stage.pp, stage.vp) == (pp, chunk))

    @cached_property
    def _stages(self) -> dict[tuple[int, int], list[tuple[str, str]]]:
        """`(name there, canonical name)` of the tensors of each model chunk, in the order of registration."""
        stages: dict[tuple[int, int], list[tuple[tuple[int, ...], str, str]]] = defaultdict(list)
        for name in self.tensors:
            for stage in self._pipeline.homes(name, tied=self.outline.tied):
                local = _on_stage(stage, name)
                entry = (self._position(local), self._module(local, name), name)
                stages[stage.pp, stage.vp].append(entry)
        return {where: [entry[1:] for entry in sorted(entries)] for where, entries in stages.items()}

    def _module(self, local: str, name: str) -> str:
        """The name in the state dict; experts count on their rank."""
        expert = _EXPERT.fullmatch(local)
        each = max(1, (self.outline.num_experts or 1) // self.layout.ep)
        dense = f"{name.partition('.mlp.')[0]}.mlp.linear_fc1.weight" in self.tensors
        return module_name(local, self.order, dense=dense, expert=int(expert[2]) % each if expert else None)

    def _position(self, local: str) -> tuple[int, ...]:
        """A sort key; a buffer comes behind the parameters of its module."""
        if not self.order.fused_norms and _MLA_NORM.fullmatch(local):
            local = module_name(local, self.order)
        for name, behind in ((local, ()), (f"{local.rpartition('.')[0]}.weight", (1,))):
            try:
                return *self.order.position(name), *behind
            except RequestError:
                continue
        return _UNKNOWN

    def _shards_of(self, name: str) -> list[Shard]:
        if name not in self._shards:
            self._shards[name] = shards(name, self.tensors[name].shape, self.layout, self.outline)
        return self._shards[name]

    def _tensor(self, parameter: str, names: Sequence[str], tp: int, etp: int, stage: tuple[int, int]) -> LocalTensor:
        """One tensor in memory from the whole tensors that it has parts of, one behind the other."""
        copies: list[Copy] = []
        fills: list[Box] = []
        matrix: tuple[int, ...] = ()
        rows, stacked, expert, first = 0, False, False, True
        if len(names) > 1 and (unknown := next((name for name in names if self._position(name) == _UNKNOWN), None)):
            raise RequestError(
                f"distckpt does not know the order of the parts of {parameter}",
                hint="distckpt convert CKPT DST --to safetensors keeps them apart",
                tensor=unknown,
            )
        for name in names:
            shards = self._shards_of(name)
            expert = shards[0].ep is not None
            stacked = expert and self.order.experts == "stacked" and len(self.tensors[name].shape) == 2
            at = etp if expert else tp
            rank_shards = [shard for shard in shards if shard.tp in (None, at)]
            first &= at == 0 or rank_shards[0].tp is not None
            for shard in rank_shards:
                for source, target in self._parts(name, shard):
                    local = target.flipped if stacked else target
                    if local.shape and rows:
                        local = local.shifted((rows, *(0,) * (len(local.shape) - 1)))
                    if source is None:
                        fills.append(local)
                    else:
                        copies.append(Copy(name, source, parameter, local, Op.TRANSPOSE if stacked else Op.COPY))
            extent = tuple(max(ends) for ends in zip(*(shard.local.stop for shard in rank_shards), strict=True))
            extent = extent[::-1] if stacked else extent
            rows += extent[0] if extent else 0
            matrix = (rows, *extent[1:]) if extent else ()
        shape = matrix
        if stacked and parameter.endswith("1"):  # (experts * hidden, ffn) in memory is called (hidden, experts * ffn)
            shape = (matrix[0] // len(names), matrix[1] * len(names))
        homes = self._pipeline.homes(names[0], tied=self.outline.tied)
        first &= stage == (homes[0].pp, homes[0].vp)
        shared = self.layout.pp > 1 and is_embedding(names[0]) and (self.outline.tied or self.outline.mtp_layers > 0)
        kind, trained = self.tensors[names[0]].dtype, self.trains(names[0])
        filled = (tuple(copies), tuple(fills), tuple(names))
        return LocalTensor(parameter, kind, shape, matrix, *filled, trained, expert, first, shared)

    def _parts(self, name: str, shard: Shard) -> Iterator[tuple[Box | None, Box]]:
        """`(box of the source, box of the rank's part)`; None for rows that the source lacks."""
        box, local = shard.box, shard.local
        rows = self._available.get(name, self.tensors[name].shape)[0] if box.shape else 0
        if not box.shape or box.stop[0] <= rows:
            yield box, local
            return
        present = max(0, rows - box.start[0])
        if present:
            yield Box(box.start, (present, *box.shape[1:])), Box(local.start, (present, *local.shape[1:]))
        yield None, Box((local.start[0] + present, *local.start[1:]), (local.shape[0] - present, *local.shape[1:]))


def column(box: Box, number: int) -> Box:
    """One column of a matrix."""
    return Box((box.start[0], box.start[1] + number), (box.shape[0], 1))


def _on_stage(stage: Stage, name: str) -> str:
    """A canonical name as a model chunk counts layers; a copy of the embedding is the output layer's weight there."""
    if is_embedding(name) and not stage.has_embedding and not stage.mtp:
        return f"{split_part(name)[0]}output_layer.weight"
    match = _LAYER.match(name)
    if match is None:
        return name
    first = stage.mtp.start if match[1].endswith("mtp.layers") else stage.layers.start
    return f"{match[1]}.{int(match[2]) - first}.{name[match.end() :]}"
