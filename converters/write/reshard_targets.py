"""The tensors that a job at the target layout stores: keys, pieces, flat buckets, and the ranks whose files hold them."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from converters.errors import RequestError
from converters.formats.torch_dist.columns import Columns
from converters.formats.torch_dist.parts import ArrayOut, BucketOut, Cut, ObjectOut
from converters.megatron.heterogeneous import ENCODED
from converters.megatron.optimizer_parts import trained_weights
from converters.megatron.outline import Outline
from converters.megatron.rank_state_dict import LocalModel
from converters.megatron.split import holders, shards
from converters.megatron.vocabulary import embedding_name, is_vocabulary, padding_rows, vocabulary_rows
from converters.model_parts import language_name, split_part
from converters.names import MASTER, StateName, parameter_of, printable, state_names, stored_key
from converters.optimizer.buckets import flatten
from converters.optimizer.state import candidates
from converters.planning.plan import Drop, Target

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from converters.catalog import Catalog, TensorInfo
    from converters.megatron.layout import Layout
    from converters.megatron.model_args import ModelArgs
    from converters.megatron.split import Shard
    from converters.optimizer.groups import ParamGroups
    from converters.optimizer.state import OptimizerState
    from converters.write.reshard_state import ReshardOptions

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass
class _Family:
    """Tensors whose names differ only in layer and expert numbers: cut alike, under alike keys.

    Attributes:
        cut: How they are cut.
        pieces: The pieces, those of one expert for experts.
        axes: What the leading axes of their array count.
        lead: Sizes of those axes.
        layered: The first number of the name counts layers.
        share: Experts of one expert-parallel rank; 0 if these are not experts.
        arrays: Position of the stored array by layer number.
        owners: Ranks of the pieces by pipeline stage and expert-parallel rank.
    """

    cut: Cut
    pieces: list[Shard]
    axes: tuple[str, ...]
    lead: tuple[int, ...]
    layered: bool
    share: int
    arrays: dict[str, int] = field(default_factory=dict)
    owners: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)


class Targets:
    """The target tensors and what fills them. What tensors of a family have in common is worked out once.

    Args:
        catalog: The source.
        layout: The target layout.
        options: What was asked, "keep" and "auto" resolved.
        args: Facts of the model.
        optimizer: The optimizer's tensors.
        groups: Param groups of the optimizers, in the form of the target; None if there is no optimizer.

    Attributes:
        outline: The model.
        stacked: The parts of the model whose layers share keys; "" is one that is not made of parts.
        sources: The source tensors.
        buckets: The stored parts of flat buckets.
        objects: Objects that belong to these.
    """

    def __init__(
        self,
        catalog: Catalog,
        layout: Layout,
        options: ReshardOptions,
        args: ModelArgs,
        optimizer: OptimizerState,
        groups: ParamGroups | None,
    ) -> None:
        self.catalog, self.layout, self.options, self.args, self.groups = catalog, layout, options, args, groups
        self.outline = Outline.of(args, {name: info.shape for name, info in catalog.weights.items()})
        self._chain = groups.chain(layout.ep) if groups else []
        self._kept_whole = {n for chained in self._chain if not chained.part.distributed for n in chained.part.names}
        self.wrapper, self.stacked = _key_style(catalog, options)
        self._families: dict[tuple[Any, ...], _Family] = {}
        self._stages: dict[str, int] = {}
        self._load: Counter[int] = Counter()
        self._pipeline = layout.pipeline(self.outline.num_layers, self.outline.mtp_layers)
        self._names: list[str] = []
        self._arrays: list[ArrayOut] = []
        self._keys: dict[str, int] = {}
        self._array: list[int] = []
        self._prefix: list[tuple[int, ...]] = []
        self._owners: dict[tuple[int, ...], int] = {}
        self._saver: list[int] = []
        states = self._named_states(optimizer)
        self._add_tensors(catalog.weights)
        self._add_tensors(states)
        self.buckets, self.objects = list[BucketOut](), list[ObjectOut]()
        if groups and options.optimizer == "dp_reshardable":
            self.buckets, self.objects = self._flatten(optimizer, groups)
            states = optimizer.tensors
        self.sources = dict(catalog.weights) | states

    def _add_tensors(self, sources: Mapping[str, TensorInfo]) -> None:
        """Adds one target for each source tensor, in the order that fills the files one after the other."""
        experts = _expert_counts(sources)
        for source, tensor in sources.items():
            self._add_tensor(source, tensor, experts)

    def columns(self) -> Columns:
        """All that was taken, put into files.

        Raises:
            RequestError: Tensors that share an array are not as many as it has places.
        """
        counts = Counter(self._array)
        for number, array in enumerate(self._arrays):
            if counts[number] != math.prod(array.lead):  # a hole, or two tensors in one place
                hint = "--layers per-layer gives each layer keys of its own" if self.stacked else None
                raise RequestError(
                    f"{printable(array.key)} is for {math.prod(array.lead)} tensors, the model has {counts[number]} of them",
                    details=["layers that share keys must all have the same parameters, as must experts"],
                    hint=hint,
                    tensor=self._names[self._array.index(number)],
                )
        return Columns.lay_out(self._arrays, self._names, self._array, self._prefix, list(self._owners), self._saver)

    def padded_vocab(self) -> int | None:
        """Rows of the target's embedding."""
        name = embedding_name(self.catalog.weights)
        return None if name is None else self._target_shape(name, self.catalog.weights[name].shape)[0]

    def stage(self, name: str) -> int:
        """The pipeline rank that saves what belongs to a tensor's module."""
        return self._pipeline.homes(name, tied=self.outline.tied)[0].pp

    def drops(self) -> Iterator[Drop]:
        """Rows of the vocabulary that the source has and the target does not."""
        return padding_rows(self.sources, lambda name, tensor: self._target_shape(name, tensor.shape)[0])

    def _add_tensor(self, source: str, tensor: TensorInfo, experts: Counter[str]) -> None:
        state, name = StateName.parse(source) or ("", source)
        pattern, numbers = _NUMBER.sub("*", name), _NUMBER.findall(name)
        kind = (pattern, state, tensor.dtype.name, tensor.shape)
        family = self._families.get(kind)
        if family is None:
            family = self._families[kind] = self._family(name, state, pattern, tensor, experts[pattern])
        layer = numbers[0] if family.layered else ""
        array = family.arrays.get(layer)
        if array is None:
            array = family.arrays[layer] = self._array_number(name, state, family)
        expert = int(numbers[-1]) if family.share else 0
        owners = self._saving_ranks(family, name, layer, expert)
        self._names.append(source)
        self._array.append(array)
        self._prefix.append(tuple([int(layer) if axis == "layer" else expert for axis in family.axes]))
        self._saver.append(self._owners.setdefault(owners, len(self._owners)))

    def _array_number(self, name: str, state: str, family: _Family) -> int:
        key = self.wrapper + stored_key(name, stacked=split_part(name)[0] in self.stacked).key
        if state:
            chained = next(chained for chained in self._chain if chained.member.has(name))
            key = f"{chained.state_key(state, self.options.optimizer)}.{key}"
        number = self._keys.setdefault(key, len(self._keys))
        if number == len(self._arrays):
            self._arrays.append(ArrayOut(key, family.lead, family.cut))
        elif self._arrays[number].cut is not family.cut:
            raise RequestError(f"the tensors of {key} differ in type or shape", tensor=name)
        return number

    def _family(self, name: str, state: str, pattern: str, tensor: TensorInfo, experts: int) -> _Family:
        shape = self._target_shape(name, tensor.shape)
        boxes: dict[Any, Shard] = {}
        for piece in shards(name, shape, self.layout, self.outline):
            boxes.setdefault(piece.box, piece)
        axes = stored_key(name, stacked=split_part(name)[0] in self.stacked).axes
        sizes = {"layer": self.outline.layers(name), "expert": experts}
        return _Family(
            Cut(
                tensor.dtype if state else self.catalog.trained_type(tensor),
                shape,
                tuple(boxes),
                tensor.shape,
                len(axes),
            ),
            list(boxes.values()),
            axes,
            tuple(sizes[axis] for axis in axes),
            split_part(pattern)[1].startswith(("decoder.layers.", "encoder.layers.", "mtp.layers.")),
            max(1, (self.outline.num_experts or 0) // self.layout.ep) if experts else 0,
        )

    def _saving_ranks(self, family: _Family, name: str, layer: str, expert: int) -> tuple[int, ...]:
        """The rank that saves each piece."""
        where = f"{name.partition('.layers.')[0]} {layer}" if family.layered else name
        if where not in self._stages:
            self._stages[where] = self.stage(name)
        ep = expert // family.share if family.share else 0
        owners = family.owners.get((self._stages[where], ep))
        if owners is None or self.options.fully_parallel:
            owners = tuple(self._saving_rank(name, piece, ep) for piece in family.pieces)
            family.owners[self._stages[where], ep] = owners
        return owners

    def _saving_rank(self, name: str, piece: Shard, ep: int) -> int:
        piece = piece if piece.ep is None else replace(piece, ep=ep)
        holding = holders(name, piece, self.layout, self.outline, self._pipeline)
        if not self.options.fully_parallel:
            return holding[0]
        rank = min(holding, key=lambda r: (self._load[r], r))
        self._load[rank] += piece.box.volume
        return rank

    def _named_states(self, optimizer: OptimizerState) -> dict[str, TensorInfo]:
        """The optimizer's tensors that the target has under names of parameters.

        A parameter in fp32 has no master weight but in a DistributedOptimizer.
        """
        flat, out = self.options.optimizer == "dp_reshardable", {}
        for key, (state, name) in state_names(optimizer.tensors):
            weight = self.catalog.weights.get(name)
            own_master = state == MASTER and weight is not None and self.catalog.trained_type(weight).name == "float32"
            whole = name in self._kept_whole
            if (whole and not own_master) or not (flat or whole):
                out[key] = optimizer.tensors[key]
        return out

    def _flatten(self, optimizer: OptimizerState, groups: ParamGroups) -> tuple[list[BucketOut], list[ObjectOut]]:
        """The parts of the buckets of the target job, and what it stores beside them for each data-parallel group."""
        weights = trained_weights(self.catalog.weights)
        shapes = {name: weight.shape for name, weight in weights.items()}
        parameters = {
            name: Target(name, self.catalog.trained_type(weight), self._target_shape(name, weight.shape))
            for name, weight in weights.items()
        }
        order = optimizer.candidate.order if optimizer.candidate else next(candidates(self.catalog, self.layout)).order
        flat_states = ((key, state) for key, (state, n) in state_names(optimizer.tensors) if n not in self._kept_whole)
        return flatten(
            LocalModel(parameters, self.layout, self.outline, order, shapes),
            {state: optimizer.tensors[key].dtype for key, state in flat_states},
            self._chain,
            self.catalog.job_options,
            scaler=(groups.scaler, groups.storages),
        )

    def _target_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        if not is_vocabulary(name):
            return shape
        requested, trained = self.options.vocab_size, self.args.vocab_size
        return vocabulary_rows(name, shape[0], self.layout.tp, self.catalog, trained, requested), *shape[1:]


def target_wrapper(wrapper: str, options: ReshardOptions) -> str:
    """What stands before the names in the target's keys, given what does in the source's: Megatron-LM has no `module.`."""
    return re.sub(r"^(?:module|model)\.", "", wrapper) if options.framework == "megatron-lm" else wrapper


def _key_style(catalog: Catalog, options: ReshardOptions) -> tuple[str, tuple[str, ...]]:
    """What stands before the names in the target's keys, and the parts of the model whose layers share keys in it."""
    layers = options.layers
    wrapper, stacked, halves = "", set[str](), set[str]()
    parts = list(dict.fromkeys(split_part(name)[0] for name in catalog.weights))
    if layers != "keep":
        stacked = set(parts) if layers == "stacked" else set()
        if stacked and (_hybrid(catalog) or not all(_alike(catalog, part) for part in parts)):
            raise RequestError(
                "the layers of this model are not alike, so that no job asks for keys that they share",
                hint="leave --layers stacked out",
            )
    if catalog.format not in ("torch_dist", "zarr"):  # names of modules: the model says which keys a loader asks for
        return wrapper, tuple(p for p in parts if (p in stacked if layers != "keep" else _homogeneous(catalog, p)))
    for name, tensor in catalog.weights.items():
        key, part = tensor.keys[0], split_part(name)[0]
        for style in (True, False):
            plain = stored_key(name, stacked=style).key
            if key.endswith(plain):
                wrapper = key[: -len(plain)]
                if layers == "keep" and style and plain != stored_key(name, stacked=False).key:
                    stacked.add(part)
                break
        if key.endswith(("_w", "_v")):
            halves.add(part)
    if layers == "keep":
        # singleton keys are a saver's choice, not the model's: go back to what every loader's default asks for
        stacked |= {part for part in halves - stacked if _alike(catalog, part) and not _hybrid(catalog)}
    return target_wrapper(wrapper, options), tuple(part for part in parts if part in stacked)


_UNEVEN = ("heterogeneous_layers_config_path", ENCODED, "heterogeneous_block_specs")


def _alike(catalog: Catalog, part: str) -> bool:
    """Whether all layers of a part have the same parameters, of the same sizes."""
    if language_name(part) is not None and any(catalog.args.get(name) for name in _UNEVEN):
        return False
    suffixes: dict[tuple[str, int], set[str]] = defaultdict(set)
    for name in catalog.weights:
        prefix, inner = split_part(name)
        if prefix == part and (match := re.match(r"(decoder|encoder)\.layers\.(\d+)\.(.*)", inner)) is not None:
            suffixes[match[1], int(match[2])].add(match[3])
    return len({(stack, frozenset(v)) for (stack, _), v in suffixes.items()}) == len({stack for stack, _ in suffixes})


def _hybrid(catalog: Catalog) -> bool:
    """Whether the model is a stack of single layers, which has keys of their own for each (ssm/mamba_block.py).

    It has a `final_norm`, where transformers have a `final_layernorm`.
    """
    return "decoder.final_norm.weight" in catalog.weights or any(".mixer." in name for name in catalog.weights)


def _homogeneous(catalog: Catalog, part: str) -> bool:
    """Whether Megatron-Core saves a part's layers under shared keys (transformer_block.py, sharded_state_dict)."""
    if language_name(part) is None:
        return _alike(catalog, part)
    args = catalog.args
    if _hybrid(catalog):
        return False
    for name in ("moe_layer_freq", "linear_attention_freq"):
        frequency = args.get(name)
        if isinstance(frequency, list | str) or (isinstance(frequency, int) and frequency > 1):
            return False
    return _alike(catalog, part)


def _expert_counts(sources: Mapping[str, TensorInfo]) -> Counter[str]:
    """How many experts share a key: by name with numbers replaced, over one layer."""
    experts: dict[str, set[str]] = defaultdict(set)
    for name in map(parameter_of, sources):
        if (expert := re.search(r"\.experts\.(\d+)\.", name)) is not None:
            experts[_NUMBER.sub("*", name)].add(expert[1])
    return Counter({pattern: len(numbers) for pattern, numbers in experts.items()})
