"""The tensors a job at the target layout stores: keys, pieces, and the ranks whose files hold them."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from converters.errors import RequestError
from converters.formats.torch_dist.columns import Columns
from converters.formats.torch_dist.parts import ArrayOut, Cut
from converters.names import stored_key
from converters.optimizer.buckets import flatten
from converters.optimizer.groups import read_param_groups
from converters.optimizer.state import OptimizerState, candidates
from converters.parallel.split import Outline, holders, shards
from converters.parallel.vocabulary import VOCABULARY, vocabulary_rows
from converters.planning.plan import Target
from converters.registration import trainable
from converters.targets.reshard_state import target_wrapper

if TYPE_CHECKING:
    from collections.abc import Mapping

    from converters.catalog import Catalog, TensorInfo
    from converters.facts.model_args import ModelArgs
    from converters.formats.base import Reader
    from converters.formats.torch_dist.parts import FlatOut, ObjectOut
    from converters.parallel.layout import Layout
    from converters.parallel.split import Shard
    from converters.targets.reshard_state import ReshardOptions

__all__ = ["Targets"]

_STATE = re.compile(r"optimizer\.state\.(\w+?)\.(.*)", re.DOTALL)
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


@dataclass
class Targets:
    """Makes the list of target tensors. What tensors of a family have in common is worked out once.

    Attributes:
        catalog: The source.
        layout: The target layout.
        outline: The model.
        options: What was asked.
        args: Facts of the model.
        stacked: Whether the target's layers share keys.
    """

    catalog: Catalog
    layout: Layout
    outline: Outline
    options: ReshardOptions
    args: ModelArgs

    def __post_init__(self) -> None:
        wrapper, self.stacked = _key_style(self.catalog, self.options.layers)
        self._wrapper = target_wrapper(wrapper, self.options)
        self._families: dict[tuple[Any, ...], _Family] = {}
        self._stages: dict[str, int] = {}
        self._load: Counter[int] = Counter()
        self._pipeline = self.layout.pipeline(self.outline.num_layers, self.outline.mtp_layers)
        self._names: list[str] = []
        self._arrays: list[ArrayOut] = []
        self._keys: dict[str, int] = {}
        self._array: list[int] = []
        self._prefix: list[tuple[int, ...]] = []
        self._owners: dict[tuple[int, ...], int] = {}
        self._saver: list[int] = []

    def make(self, sources: Mapping[str, TensorInfo]) -> None:
        """Takes one entry for each source tensor, in the order that fills the files one after the other."""
        experts = _expert_counts(sources)
        for source, tensor in sources.items():
            self._one(source, tensor, experts)

    def columns(self) -> Columns:
        """All that was taken, put into files.

        Raises:
            RequestError: The pieces of a tensor do not tile it.
        """
        for cut, key in {id(a.cut): (a.cut, a.key) for a in self._arrays}.values():
            cut.check(key)
        return Columns.place(self._arrays, self._names, self._array, self._prefix, list(self._owners), self._saver)

    def padded_vocab(self) -> int | None:
        """Rows of the target's embedding."""
        weight = self.catalog.weights.get(VOCABULARY[0])
        return None if weight is None else self._target_shape(VOCABULARY[0], weight.shape)[0]

    def _one(self, source: str, tensor: TensorInfo, experts: Counter[str]) -> None:
        state, name = "", source
        if source.startswith("optimizer.state."):
            state, name = source.split(".", 3)[2:]
        pattern, numbers = _NUMBER.sub("*", name), _NUMBER.findall(name)
        kind = (pattern, state, tensor.dtype.name, tensor.shape)
        family = self._families.get(kind)
        if family is None:
            family = self._families[kind] = self._family(name, state, pattern, tensor, experts[pattern])
        layer = numbers[0] if family.layered else ""
        array = family.arrays.get(layer)
        if array is None:
            array = family.arrays[layer] = self._array_of(name, state, family)
        expert = int(numbers[-1]) if family.share else 0
        owners = self._ranks(family, name, layer, expert)
        self._names.append(source)
        self._array.append(array)
        self._prefix.append(tuple([int(layer) if axis == "layer" else expert for axis in family.axes]))
        self._saver.append(self._owners.setdefault(owners, len(self._owners)))

    def _array_of(self, name: str, state: str, family: _Family) -> int:
        key = self._wrapper + stored_key(name, stacked=self.stacked).key
        key = f"optimizer.state.{state}.{key}" if state else key
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
        axes = stored_key(name, stacked=self.stacked).axes
        sizes = {"layer": self.outline.num_layers, "expert": experts}
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
            pattern.startswith(("decoder.layers.", "encoder.layers.", "mtp.layers.")),
            max(1, (self.outline.num_experts or 0) // self.layout.ep) if experts else 0,
        )

    def _ranks(self, family: _Family, name: str, layer: str, expert: int) -> tuple[int, ...]:
        """The rank that saves each piece."""
        where = f"{name[:3]}{layer}" if family.layered else name
        if where not in self._stages:
            self._stages[where] = self._pipeline.homes(name, tied=self.outline.tied)[0].pp
        ep = expert // family.share if family.share else 0
        owners = family.owners.get((self._stages[where], ep))
        if owners is None or self.options.fully_parallel:
            owners = tuple(self._owner(name, piece, ep) for piece in family.pieces)
            family.owners[self._stages[where], ep] = owners
        return owners

    def _owner(self, name: str, piece: Shard, ep: int) -> int:
        piece = piece if piece.ep is None else replace(piece, ep=ep)
        holding = holders(name, piece, self.layout, self.outline, self._pipeline)
        if not self.options.fully_parallel:
            return holding[0]
        rank = min(holding, key=lambda r: (self._load[r], r))
        self._load[rank] += piece.box.volume
        return rank

    def flatten(self, found: OptimizerState, reader: Reader) -> tuple[list[FlatOut], list[ObjectOut]]:
        """The buckets of the target job, and what it stores beside them for each data-parallel group."""
        parameters = {
            name: Target(name, self.catalog.trained_type(weight), self._target_shape(name, weight.shape))
            for name, weight in self.catalog.weights.items()
            if trainable(name)
        }
        order = found.candidate.order if found.candidate else next(candidates(self.catalog, self.layout)).order
        return flatten(
            parameters,
            self.layout,
            self.outline,
            order,
            states=list(dict.fromkeys(name.split(".", 3)[2] for name in found.tensors)),
            groups=read_param_groups(reader),
            args=self.catalog.args,
            available={name: self.catalog.weights[name].shape for name in parameters},
        )

    def _target_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        if name not in VOCABULARY:
            return shape
        asked, known = self.options.vocab_size, self.args.vocab_size
        return vocabulary_rows(name, shape[0], self.layout.tp, self.catalog, known, asked), *shape[1:]


def _key_style(catalog: Catalog, asked: str) -> tuple[str, bool]:
    """The wrapper's prefix of the source's keys, and whether the target's layers share keys."""
    wrapper, stacked, halves = "", False, False
    if catalog.format not in ("torch_dist", "zarr"):  # names of modules: the model says which keys a loader asks for
        return wrapper, {"stacked": True, "per-layer": False}.get(asked, _homogeneous(catalog))
    for name, tensor in catalog.weights.items():
        key = tensor.keys[0]
        for style in (True, False):
            plain = stored_key(name, stacked=style).key
            if key.endswith(plain):
                wrapper = key[: -len(plain)]
                stacked = stacked or (style and plain != stored_key(name, stacked=False).key)
                break
        halves = halves or key.endswith(("_w", "_v"))
    if asked == "keep" and not stacked and halves:
        # singleton keys are a saver's choice, not the model's: go back to what every loader's default asks for
        stacked = _alike(catalog)
    return wrapper, {"stacked": True, "per-layer": False}.get(asked, stacked)


def _alike(catalog: Catalog) -> bool:
    """Whether all layers have the same parameters."""
    suffixes = defaultdict(set)
    for name in catalog.weights:
        if (found := re.match(r"decoder\.layers\.(\d+)\.(.*)", name)) is not None:
            suffixes[int(found[1])].add(found[2])
    return len({frozenset(v) for v in suffixes.values()}) == 1


def _homogeneous(catalog: Catalog) -> bool:
    """Whether Megatron-Core saves a model's layers under shared keys (transformer_block.py, sharded_state_dict)."""
    args = catalog.args
    for name in ("moe_layer_freq", "linear_attention_freq"):
        frequency = args.get(name)
        if isinstance(frequency, list | str) or (isinstance(frequency, int) and frequency > 1):
            return False
    mixed = args.get("heterogeneous_layers_config_path") or args.get("heterogeneous_layers_config_encoded_json")
    return _alike(catalog) and not mixed


def _expert_counts(sources: Mapping[str, TensorInfo]) -> Counter[str]:
    """How many experts share a key: by name with numbers replaced, over one layer."""
    seen: dict[str, set[str]] = defaultdict(set)
    for name in sources:
        bare = found[2] if (found := _STATE.fullmatch(name)) else name
        if (expert := re.search(r"\.experts\.(\d+)\.", bare)) is not None:
            seen[_NUMBER.sub("*", bare)].add(expert[1])
    return Counter({pattern: len(numbers) for pattern, numbers in seen.items()})
