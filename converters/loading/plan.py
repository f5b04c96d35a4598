"""What one rank is to read, and which other ranks of the job want the same bytes. No I/O, no torch.

A fetch is a box of a stored tensor that is read in one go, with the places it goes to. Ranks that hold the same part of a
tensor make the same fetches, because what they are follows from the layout alone: data-parallel replicas share nearly all
of theirs, tensor-parallel ranks the norms. How a
group deals its fetches out is in `rounds`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from converters.box import Box, contiguous_tiles, find_overlap
from converters.errors import RequestError
from converters.facts.damage import refuse_contradictions, refuse_damage, refuse_foreign_names
from converters.facts.model_args import ModelArgs
from converters.models import by_name, infer, map_to_hf
from converters.names import parse_key
from converters.optimizer.state import optimizer_state
from converters.parallel.layout_check import check as check_layout
from converters.parallel.local import LocalModel, likely_order
from converters.parallel.vocabulary import VOCABULARY
from converters.planning.job import landing
from converters.planning.plan import Copy, Op

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from converters.catalog import Catalog, TensorInfo
    from converters.dtypes import DType
    from converters.formats.base import Reader
    from converters.parallel.layout import Coordinates, Layout
    from converters.parallel.local import LocalTensor
    from converters.registration import Order

__all__ = ["Fetch", "Landing", "LoadPlan", "Wanted", "plan_load", "plan_whole"]

MIB = 1 << 20
_TILE = 8 * MIB
_SMALLEST = MIB
_MOST_GATHERED = 128 * MIB  # for which fetches are made smaller, down to a mebibyte
_LITTLE = 100  # one row in so many may be read for a checksum alone
_EMBEDDING = VOCABULARY[0]


@dataclass(frozen=True, slots=True)
class Wanted:
    """A tensor that the caller gets.

    Attributes:
        name: Its key in the state dict.
        dtype: Element type.
        shape: Its shape.
        matrix: The shape that landings refer to; the elements lie in C order of both.
        fills: Boxes that nothing stored fills: zeros.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    matrix: tuple[int, ...]
    fills: tuple[Box, ...] = ()

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Landing:
    """Where the elements of a fetch go: a box of a wanted tensor, in coordinates of its `matrix`."""

    target: str
    box: Box
    op: Op


@dataclass(frozen=True, slots=True)
class Fetch:
    """A box of a stored tensor, read in one go.

    Attributes:
        source: Name of the stored tensor.
        box: In its coordinates.
        nbytes: Size.
        landings: Where it goes; nowhere if it is read for the checksum of its record alone.
        again: Another fetch of this rank reads some of the same elements, so its checksum does not count.
    """

    source: str
    box: Box
    nbytes: int
    landings: tuple[Landing, ...]
    again: bool = False

    @property
    def key(self) -> tuple[str, Box]:
        """What ranks know it by."""
        return self.source, self.box


@dataclass(frozen=True)
class LoadPlan:
    """Everything about the load of one rank, with nothing read yet.

    Attributes:
        sources: The stored tensors it reads.
        wanted: What the caller gets, by key, in the order of the state dict.
        fetches: What is read, in that order.
        groups: For each set of two ranks or more that make the same fetches, this one among them, those fetches.
        empty: Keys of modules' extra states, which hold no tensors: None in the state dict.
        doubt: Pairs of keys, master weight and weight, that must agree: nothing but the values tells whose state it is.
        tile_bytes: The largest that a fetch of any rank may be.
        notes: Sentences a person should read.
    """

    sources: Mapping[str, TensorInfo]
    wanted: Mapping[str, Wanted]
    fetches: Sequence[Fetch]
    tile_bytes: int
    groups: Mapping[tuple[int, ...], Sequence[Fetch]] = field(default_factory=dict)
    empty: Sequence[str] = ()
    doubt: Sequence[tuple[str, str]] = ()
    notes: Sequence[str] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of what the caller gets."""
        return sum(wanted.nbytes for wanted in self.wanted.values())

    @cached_property
    def largest(self) -> int:
        """Bytes of the largest fetch."""
        return max((fetch.nbytes for fetch in self.fetches), default=1)

    @property
    def bytes_needed(self) -> int:
        """Bytes of stored elements that this rank needs."""
        return sum(fetch.nbytes for fetch in self.fetches if fetch.landings)


def plan_load(
    reader: Reader,
    layout: Layout,
    rank: int,
    *,
    names: str = "megatron",
    optimizer: bool = False,
    order: Order | None = None,
    dtype: DType | None = None,
    vocab_size: int | None = None,
    arch: str | None = None,
    together: bool = True,
) -> LoadPlan:
    """What a rank of a job reads and where it goes.

    Args:
        reader: The checkpoint.
        layout: The job.
        rank: One of its ranks.
        names: "megatron" or "hf".
        optimizer: Also master weights and moments.
        order: How the modules of the job are made; None infers it from the checkpoint.
        dtype: Type of floating weights; None keeps what is stored.
        vocab_size: True rows of the vocabulary, if the checkpoint does not tell.
        arch: Hugging Face architecture; None infers it.
        together: Work out what the rank shares with others.

    Raises:
        RequestError: The layout does not fit the model, or there is no such rank.
        IntegrityError: Tensors that are needed are damaged or incomplete.
    """
    at, catalog = layout.coordinates(rank), reader.catalog
    most = _MOST_GATHERED // max(layout.dp_cp, layout.edp)
    tile = max(_SMALLEST, min(_TILE, 1 << most.bit_length() >> 1))  # of pinned memory torch takes powers of two
    if names == "hf":
        if optimizer:
            raise RequestError("Hugging Face has no names for optimizer state", hint="names='megatron'")
        return _plan_hf(catalog, layout, dtype, vocab_size, arch, tile)
    if names != "megatron":
        raise RequestError(f"there are no names {names!r}", hint="names='megatron' or names='hf'")
    _refuse_foreign(catalog)
    args = ModelArgs.from_catalog(catalog)
    refuse_contradictions(args, catalog)
    shapes = {name: info.shape for name, info in catalog.weights.items()}
    order = order or likely_order(catalog)
    local = LocalModel.of(catalog, layout, order=order, vocab_size=vocab_size)
    notes = check_layout(args, layout, {name: target.shape for name, target in local.tensors.items()})
    state = _OptimizerState(reader) if optimizer else None

    def held(where: Coordinates) -> tuple[dict[str, Wanted], list[Copy]]:
        return _held(local, where, dtype, state, shapes)

    wanted, copies = held(at)
    sources = dict(catalog.weights) | (state.tensors if state else {})
    plan = _plan(sources, wanted, copies, tile, catalog)
    stages = {at.pp}
    if _EMBEDDING in shapes:  # that of the first stage is on others, too, if it is tied
        shared = {pp for pp, _, _ in local.places(_EMBEDDING)}
        stages |= shared if at.pp in shared else set()
    groups = _groups(plan.fetches, _peers(layout, stages, held, sources, tile)) if together else {}
    empty = _extra_states(catalog, local, at, order, wanted)
    doubt = [pair for pair in state.pairs(wanted) if pair[1] in wanted] if state and state.doubt else []
    return replace(plan, groups=groups, empty=empty, doubt=doubt, notes=[*notes, *(state.notes if state else ())])


def _plan_hf(
    catalog: Catalog, layout: Layout, dtype: DType | None, vocab_size: int | None, arch: str | None, tile: int
) -> LoadPlan:
    """The whole model under the names it has on the Hub, on every replica."""
    if layout.world_size != layout.dp:
        raise RequestError(
            "Hugging Face has no names for parts of tensors",
            hint="names='hf' needs a layout of tp 1, pp 1, ep 1 and cp 1, with any dp",
        )
    notes: Sequence[str] = ()
    if not catalog.megatron and catalog.flavour == "Hugging Face":
        kinds = {n: dtype if dtype and t.dtype.floating else t.dtype for n, t in catalog.weights.items()}
        wanted = {n: Wanted(n, kinds[n], t.shape, t.shape) for n, t in catalog.weights.items()}
        copies = [Copy(n, Box.whole(w.shape), n, Box.whole(w.shape)) for n, w in wanted.items()]
    else:
        _refuse_foreign(catalog)
        args = ModelArgs.from_catalog(catalog)
        refuse_contradictions(args, catalog)
        model = by_name(arch) if arch else infer(args, catalog)
        mapping = map_to_hf(catalog, args, model, dtype=dtype, vocab_size=vocab_size)
        wanted = {n: Wanted(n, t.dtype, t.shape, t.shape) for n, t in mapping.targets.items()}
        copies, notes = mapping.copies, mapping.notes
    plan = _plan(catalog.weights, wanted, copies, tile, catalog)
    everyone = tuple(range(layout.world_size))
    return replace(plan, notes=notes, groups={everyone: plan.fetches} if len(everyone) > 1 else {})


def _refuse_foreign(catalog: Catalog) -> None:
    try:
        refuse_foreign_names(catalog)
    except RequestError as error:
        error.hint = (
            "names='hf'" if catalog.flavour == "Hugging Face" else "load_plain_tensors or iter_tensors take any names"
        )
        raise


def plan_whole(reader: Reader, tensors: Mapping[str, TensorInfo], tile_bytes: int = _TILE) -> LoadPlan:
    """Stored tensors as they are, whole, under their canonical names."""
    wanted = {name: Wanted(name, info.dtype, info.shape, info.shape) for name, info in tensors.items()}
    copies = [Copy(n, Box.whole(w.shape), n, Box.whole(w.shape)) for n, w in wanted.items()]
    return _plan(tensors, wanted, copies, tile_bytes, reader.catalog)


def _plan(
    tensors: Mapping[str, TensorInfo],
    wanted: Mapping[str, Wanted],
    copies: Sequence[Copy],
    tile_bytes: int,
    catalog: Catalog,
) -> LoadPlan:
    fetches = _cut(copies, tensors, tile_bytes)
    sources = {name: tensors[name] for name in dict.fromkeys(fetch.source for fetch in fetches)}
    refuse_damage(catalog, set(sources))
    return LoadPlan(sources, wanted, fetches, tile_bytes)


def _cut(copies: Iterable[Copy], tensors: Mapping[str, TensorInfo], tile_bytes: int) -> list[Fetch]:
    """Copies of the same elements together, cut into pieces that are contiguous in what is read."""
    together: dict[tuple[str, Box], list[Copy]] = {}
    boxes: dict[str, list[Box]] = defaultdict(list)
    for copy in copies:
        if copy.source_box.volume:
            together.setdefault((copy.source, copy.source_box), []).append(copy)
    out = []
    for (source, box), mine in together.items():
        size = tensors[source].dtype.itemsize
        again = find_overlap([*boxes[source], box]) is not None
        boxes[source].append(box)
        parts = [box] if box.volume * size <= tile_bytes else contiguous_tiles(box, tile_bytes // size)
        for part in parts:
            landings = tuple(Landing(copy.target, landing(copy, part), copy.op) for copy in mine if copy.target)
            out.append(Fetch(source, part, part.volume * size, landings, again))
    return out


# ---------------------------------------------------------------------- Megatron's names


class _OptimizerState:
    """The optimizer's tensors, by the parameter they belong to."""

    def __init__(self, reader: Reader) -> None:
        found = optimizer_state(reader)
        self.tensors, self.doubt, self.notes = found.tensors, found.doubt, found.notes
        self.states: dict[str, list[str]] = defaultdict(list)
        for name in found.tensors:
            state, _, parameter = name.removeprefix("optimizer.state.").partition(".")
            self.states[parameter].append(state)
        if not found.tensors:
            raise RequestError("the checkpoint has no optimizer state", hint="load without optimizer=True")

    def of(self, tensor: LocalTensor, name: str, padding: Iterable[Copy]) -> Iterable[tuple[Wanted, list[Copy]]]:
        """The state of a parameter: its tensors and what fills them."""
        if not tensor.trained:
            return
        known = [self.states.get(copy.source, []) for copy in tensor.copies]
        for state in known[0] if known else ():
            if not all(state in states for states in known):
                raise RequestError(f"the optimizer holds {state} for some parts of {tensor.name} only")
            first = self.tensors[f"optimizer.state.{state}.{tensor.copies[0].source}"]
            key = f"optimizer.state.{state}.{name}"
            copies = [replace(copy, target=key) for copy in tensor.copies] + list(padding)
            copies = [replace(copy, source=f"optimizer.state.{state}.{copy.source}") for copy in copies]
            yield Wanted(key, first.dtype, tensor.shape, tensor.matrix, tensor.fills), copies

    @staticmethod
    def pairs(wanted: Mapping[str, Wanted]) -> Iterable[tuple[str, str]]:
        """Keys of master weights and of their weights."""
        prefix = "optimizer.state.param."
        return ((name, name.removeprefix(prefix)) for name in wanted if name.startswith(prefix))


def _held(
    model: LocalModel,
    at: Coordinates,
    dtype: DType | None,
    state: _OptimizerState | None,
    shapes: Mapping[str, Sequence[int]],
) -> tuple[dict[str, Wanted], list[Copy]]:
    """What the ranks at some coordinates have in memory, and what fills it."""
    wanted: dict[str, Wanted] = {}
    copies: list[Copy] = []
    optimizer: list[tuple[Wanted, list[Copy]]] = []
    for chunk in range(model.layout.chunks):
        prefix = f"model{chunk}." if model.layout.chunks > 1 else ""
        for tensor in model.chunk(pp=at.pp, chunk=chunk, tp=at.tp, ep=at.ep, etp=at.etp):
            name = prefix + tensor.name
            kind = dtype if dtype is not None and tensor.trained else tensor.dtype
            wanted[name] = Wanted(name, kind, tensor.shape, tensor.matrix, tensor.fills)
            rows = model.tensors[tensor.sources[0]].shape[0] if tensor.copies and tensor.shape else 0
            padding = _padding(tensor, rows, shapes)
            copies += [replace(copy, target=name) for copy in tensor.copies] + padding
            optimizer += state.of(tensor, name, padding) if state else ()
    for entry, filled in optimizer:
        wanted[entry.name] = entry
        copies += filled
    return wanted, copies


def _padding(tensor: LocalTensor, rows: int, shapes: Mapping[str, Sequence[int]]) -> list[Copy]:
    """Padding rows of the vocabulary behind the last of `rows` that are wanted: few enough to be read, so that the
    checksum of their record can be compared. They go nowhere."""
    out = []
    for copy in tensor.copies:
        left = shapes[copy.source][0] - rows if copy.source in VOCABULARY else 0
        if 0 < left * _LITTLE <= copy.source_box.shape[0] and copy.source_box.stop[0] == rows:
            box = Box((rows, *copy.source_box.start[1:]), (left, *copy.source_box.shape[1:]))
            out.append(Copy(copy.source, box, "", box))
    return out


def _peers(
    layout: Layout,
    stages: set[int],
    held: Callable[[Coordinates], tuple[dict[str, Wanted], list[Copy]]],
    sources: Mapping[str, TensorInfo],
    tile_bytes: int,
) -> dict[tuple[str, Box], list[int]]:
    """The ranks that make each fetch, of those on some pipeline stages.

    Ranks at the same place in the model hold the same. Others share what is not divided between them: the norms of a
    stage, or the embedding that the first stage and the last have.
    """
    homes: dict[tuple[int, int, int, int], list[int]] = defaultdict(list)
    where: dict[tuple[int, int, int, int], Coordinates] = {}
    for rank in range(layout.world_size):
        other = layout.coordinates(rank)
        if other.pp in stages:
            homes[other.pp, other.tp, other.etp, other.ep].append(rank)
            where[other.pp, other.tp, other.etp, other.ep] = other
    out: dict[tuple[str, Box], list[int]] = defaultdict(list)
    for place, ranks in homes.items():
        for fetch in _cut(held(where[place])[1], sources, tile_bytes):
            out[fetch.key] += ranks
    return out


def _groups(
    fetches: Iterable[Fetch], peers: Mapping[tuple[str, Box], Sequence[int]]
) -> dict[tuple[int, ...], list[Fetch]]:
    out: dict[tuple[int, ...], list[Fetch]] = defaultdict(list)
    for fetch in fetches:
        ranks = tuple(sorted(peers[fetch.key]))
        if len(ranks) > 1:
            out[ranks].append(fetch)
    return dict(sorted(out.items()))


_SPLIT = ("linear_", "eh_proj", "output_layer", "in_proj", "out_proj")


def _extra_states(
    catalog: Catalog, model: LocalModel, at: Coordinates, order: Order, wanted: Mapping[str, Wanted]
) -> list[str]:
    """Keys of `_extra_state` that modules expect in a state dict.

    TransformerEngine's: what the checkpoint has, which depends on its version. Megatron's own parallel linear layers ask
    for one, too, and ignore what it is (tensor_parallel/layers.py, set_extra_state).
    """
    found: dict[str, None] = {}

    def name(chunk: int, module: str) -> str:
        return f"model{chunk}.{module}" if model.layout.chunks > 1 else module

    if order.fused_norms:
        for item in catalog.objects.values():
            parsed = parse_key(item.name)
            if not item.name.endswith("._extra_state") or ".experts." in item.name:
                continue
            canonical = parsed.template.format(*item.offset[: len(parsed.axes)])
            for pp, chunk, module in model.places(canonical):
                if pp == at.pp:
                    found[name(chunk, module)] = None
        return list(found)
    for key in wanted:
        module, _, leaf = key.rpartition(".")
        if leaf == "weight" and module.rpartition(".")[2].startswith(_SPLIT) and not key.startswith("optimizer."):
            found[f"{module}._extra_state"] = None
    if at.pp == model.layout.pp - 1:  # also without a weight of its own
        found[name(model.layout.chunks - 1, "output_layer._extra_state")] = None
    return list(found)
