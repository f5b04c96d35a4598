"""What one rank of a job reads, and which other ranks want the same bytes. No I/O, no torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from converters.box import Box
from converters.dtypes import from_option
from converters.errors import RequestError
from converters.loading.plan import TILE, LoadOptions, LoadPlan, plan_pieces
from converters.megatron.damage import refuse_contradictions, refuse_foreign_names
from converters.megatron.layout_check import check_layout
from converters.megatron.model_args import ModelArgs
from converters.megatron.rank_state_dict import LocalModel, likely_order
from converters.megatron.vocabulary import embedding_name, is_vocabulary
from converters.model_parts import LANGUAGE
from converters.models import by_name, infer
from converters.models.export import map_to_hf
from converters.names import StateName, listed, parameter_of, parse_key, state_names
from converters.optimizer.proof import proved_when_read
from converters.optimizer.state import optimizer_state
from converters.param_order import trainable
from converters.planning.plan import Copy, Piece, account

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from converters.catalog import Catalog
    from converters.dtypes import DType
    from converters.formats.base import Reader
    from converters.megatron.layout import Coordinates, Layout
    from converters.megatron.rank_state_dict import LocalTensor
    from converters.param_order import Order

MIB = 1 << 20
_SMALLEST = MIB
_MOST_GATHERED = 128 * MIB  # for which items are made smaller, down to a mebibyte
_LITTLE = 100  # one row in so many may be read for a checksum alone
_FP8 = (
    "FP8 scaling factors and their histories are not loaded: TransformerEngine would execute what stands in the file; "
    "delayed scaling starts fresh, other recipes store none"
)


def plan_load(
    reader: Reader, layout: Layout, rank: int, options: LoadOptions | None = None, *, together: bool = True
) -> LoadPlan:
    """What a rank of a job reads and where it goes.

    Args:
        reader: The checkpoint.
        layout: The job.
        rank: One of its ranks.
        options: What is loaded.
        together: Work out what the rank shares with others.

    Raises:
        RequestError: The layout does not fit the model, or there is no such rank.
        IntegrityError: Tensors that are needed are damaged or incomplete.
    """
    options = options or LoadOptions()
    names, dtype = options.names, None if options.dtype is None else from_option(str(options.dtype))
    at, catalog = layout.coordinates(rank), reader.catalog
    most = _MOST_GATHERED // max(layout.dp_cp, layout.edp)
    tile = max(_SMALLEST, min(TILE, 1 << most.bit_length() >> 1))  # of pinned memory torch takes powers of two
    if names == "hf":
        if options.optimizer:
            raise RequestError("Hugging Face has no names for optimizer state", hint="names='megatron'")
        return _plan_hf(catalog, layout, dtype, options, tile)
    if names != "megatron":
        raise RequestError(f"there are no names {names!r}", hint="names='megatron' or names='hf'")
    _refuse_foreign(catalog)
    args = ModelArgs.from_catalog(catalog)
    refuse_contradictions(args, catalog)
    shapes = {name: info.shape for name, info in catalog.weights.items()}
    order = options.modules or likely_order(catalog)
    local = LocalModel.of(catalog, layout, order=order, vocab_size=options.vocab_size)
    notes = check_layout(args, layout, {name: target.shape for name, target in local.tensors.items()})
    state = _OptimizerState(reader) if options.optimizer else None
    pieces, beside = _rank_pieces(local, at, dtype, state, shapes)
    sources = dict(catalog.weights) | (state.tensors if state else {})
    _prove_complete(catalog, local, state)
    peers = _Peers(local, at, shapes) if together else None
    plan = plan_pieces(sources, pieces, tile, catalog, beside=beside, peers=peers)
    empty = _extra_states(catalog, local, at, order, pieces)
    notes += [_FP8] if empty and order.fused_norms and catalog.args.get("fp8") else []
    notes += [*(state.notes if state else ()), *_left_objects(catalog)]
    return replace(plan, empty=empty, notes=notes)


def _plan_hf(catalog: Catalog, layout: Layout, dtype: DType | None, options: LoadOptions, tile: int) -> LoadPlan:
    """The whole model under the names it has on the Hub, on every replica."""
    if layout.world_size != layout.dp:
        raise RequestError(
            "Hugging Face has no names for parts of tensors",
            hint="names='hf' needs a layout of tp 1, pp 1, ep 1 and cp 1, with any dp",
        )
    notes, drops, tensors = list[str](), None, catalog.weights
    if not catalog.megatron and catalog.framework == "Hugging Face":
        kinds = {n: dtype if dtype and t.dtype.floating else t.dtype for n, t in catalog.weights.items()}
        pieces = {n: Piece.stored(n, kinds[n], t.shape) for n, t in catalog.weights.items()}
    else:
        _refuse_foreign(catalog)
        args = ModelArgs.from_catalog(catalog)
        refuse_contradictions(args, catalog)
        model = by_name(options.arch) if options.arch else infer(args, catalog)
        mapping = map_to_hf(catalog, args, model, dtype=dtype, vocab_size=options.vocab_size)
        tensors = {name: info for name, info in catalog.tensors.items() if info.kind != "optimizer"}
        pieces, drops, notes = mapping.pieces, mapping.drops, [*mapping.notes]
    everyone = range(layout.world_size)
    peers = defaultdict[tuple[str, Box], Sequence[int]](lambda: everyone)
    plan = plan_pieces(tensors, pieces, tile, catalog, drops=drops, peers=peers)
    return replace(plan, notes=[*notes, *_left_objects(catalog)])


_JOBS_OBJECTS = ("rng_state", "rerun_state_machine_state", "common_state")


def _left_objects(catalog: Catalog) -> list[str]:
    """A sentence about stored objects that no load asks for; a job's own and what modules expect are not among them."""
    names = dict.fromkeys(
        item.name
        for item in catalog.objects.values()
        if item.name.rpartition("/")[2] not in _JOBS_OBJECTS
        and not item.name.endswith("._extra_state")
        and not item.of_optimizer
    )
    return [f"stored objects are not loaded: {listed(list(names), 8)}"] if names else []


def _refuse_foreign(catalog: Catalog) -> None:
    try:
        refuse_foreign_names(catalog)
    except RequestError as error:
        error.hint = (
            "names='hf'" if catalog.framework == "Hugging Face" else "load_plain_tensors or iter_tensors take any names"
        )
        raise


def _prove_complete(catalog: Catalog, local: LocalModel, state: _OptimizerState | None) -> None:
    """Every stored tensor is on some rank of the job, and all of its elements are; this rank has its part of that.

    Raises:
        RequestError: Something would be on none.
    """
    others = {name: info for name, info in catalog.tensors.items() if info.kind == "other"}
    account(others, {}, ())
    local.prove()
    if state is None:
        return
    stored = {name: info for name, info in catalog.tensors.items() if info.kind == "optimizer"}
    trained = {name for name in local.tensors if local.trains(name)}
    used = {n: info for n, info in state.tensors.items() if parameter_of(n) in trained}
    account(stored, used, ())


class _OptimizerState:
    """The optimizer's tensors, by the parameter they belong to."""

    def __init__(self, reader: Reader) -> None:
        stored = optimizer_state(reader)
        self.tensors, self.notes = proved_when_read(reader.catalog, stored.tensors), stored.notes
        self.states: dict[str, list[str]] = defaultdict(list)
        for _, (state, parameter) in state_names(stored.tensors):
            self.states[parameter].append(state)
        if not stored.tensors:
            raise RequestError("the checkpoint has no optimizer state", hint="load without optimizer=True")

    def of(self, tensor: LocalTensor, name: str, padding: Iterable[Copy]) -> Iterable[tuple[Piece, list[Copy]]]:
        """The state of a parameter, and what is read beside it."""
        if not tensor.trained:
            return
        states_of_parts = [self.states.get(name, []) for name in tensor.parts]
        for state in states_of_parts[0]:
            if not all(state in states for states in states_of_parts):
                raise RequestError(f"the optimizer holds {state} for some parts of {tensor.name} only")
            first = self.tensors[str(StateName(state, tensor.parts[0]))]
            key = str(StateName(state, name))
            copies = [replace(c, source=str(StateName(state, c.source)), target=key) for c in tensor.copies]
            unused = [replace(copy, source=str(StateName(state, copy.source))) for copy in padding]
            yield replace(tensor, name=key, dtype=first.dtype, copies=copies), unused


def _rank_pieces(
    model: LocalModel,
    at: Coordinates,
    dtype: DType | None,
    state: _OptimizerState | None,
    shapes: Mapping[str, Sequence[int]],
) -> tuple[dict[str, Piece], dict[str, list[Copy]]]:
    """What the ranks at some coordinates have in memory, and what is read beside each piece for a checksum alone."""
    weights: list[tuple[Piece, list[Copy]]] = []
    optimizer: list[tuple[Piece, list[Copy]]] = []
    for chunk in range(model.layout.chunks):
        prefix = f"model{chunk}." if model.layout.chunks > 1 else ""
        for tensor in model.chunk(pp=at.pp, chunk=chunk, tp=at.tp, ep=at.ep, etp=at.etp):
            name = prefix + tensor.name
            kind = tensor.dtype if dtype is None or not _is_parameter(tensor) else dtype
            padding, copies = _padding(model, tensor, shapes), [replace(copy, target=name) for copy in tensor.copies]
            weights.append((replace(tensor, name=name, dtype=kind, copies=copies), padding))
            optimizer += state.of(tensor, name, padding) if state else ()
    pieces = {piece.name: piece for piece, _ in (*weights, *optimizer)}
    return pieces, {piece.name: padding for piece, padding in (*weights, *optimizer) if padding}


def _is_parameter(tensor: LocalTensor) -> bool:
    """Whether a tensor is no buffer; a parameter that is frozen counts."""
    return tensor.dtype.floating and all(trainable(name) for name in tensor.parts)


def _padding(model: LocalModel, tensor: LocalTensor, shapes: Mapping[str, Sequence[int]]) -> list[Copy]:
    """Padding rows of the vocabulary behind the last that are wanted: few enough to be read, so that the checksum of their
    record can be compared. They go nowhere."""
    if not tensor.copies or not is_vocabulary(tensor.copies[0].source):
        return []
    out, rows = [], model.tensors[tensor.parts[0]].shape[0]
    for copy in tensor.copies:
        left = shapes[copy.source][0] - rows
        if 0 < left * _LITTLE <= copy.source_box.shape[0] and copy.source_box.stop[0] == rows:
            box = Box((rows, *copy.source_box.start[1:]), (left, *copy.source_box.shape[1:]))
            out.append(Copy(copy.source, box, "", box))
    return out


class _Peers(dict[tuple[str, Box], list[int]]):
    """The ranks that make each copy of a rank, by its source and box.

    Ranks at the same place in the model hold the same. Others of the pipeline stage share what is not divided between them,
    as norms, and the first stage and the last may share an embedding. Optimizer state is where its parameter is.
    """

    def __init__(self, model: LocalModel, at: Coordinates, shapes: Mapping[str, Sequence[int]]) -> None:
        super().__init__()
        stages = {at.pp}
        if embedding := embedding_name(shapes):  # that of the first stage is on others, too, if it is tied
            shared = {pp for pp, _, _ in model.modules(embedding)}
            stages |= shared if at.pp in shared else set()
        homes: dict[tuple[int, int, int, int], list[int]] = defaultdict(list)
        for rank in range(model.layout.world_size):
            coordinates = model.layout.coordinates(rank)
            if coordinates.pp in stages:
                homes[coordinates.pp, coordinates.tp, coordinates.etp, coordinates.ep].append(rank)
        for (pp, tp, etp, ep), ranks in homes.items():
            chunks = (model.chunk(pp=pp, chunk=n, tp=tp, ep=ep, etp=etp) for n in range(model.layout.chunks))
            for key in {key for tensors in chunks for tensor in tensors for key in _copy_keys(model, tensor, shapes)}:
                self.setdefault(key, []).extend(ranks)

    def __missing__(self, key: tuple[str, Box]) -> list[int]:
        parts = StateName.parse(key[0])
        return [] if parts is None else self[parts.parameter, key[1]]


def _copy_keys(
    model: LocalModel, tensor: LocalTensor, shapes: Mapping[str, Sequence[int]]
) -> Iterator[tuple[str, Box]]:
    yield from ((copy.source, copy.source_box) for copy in (*tensor.copies, *_padding(model, tensor, shapes)))


_SPLIT = ("linear_", "eh_proj", "output_layer", "in_proj", "out_proj")


def _extra_states(
    catalog: Catalog, model: LocalModel, at: Coordinates, order: Order, pieces: Mapping[str, Piece]
) -> list[str]:
    """Keys of `_extra_state` that modules expect in a state dict, where their values are None.

    TransformerEngine's: what the checkpoint has, which depends on its version. It takes None for "nothing known"
    (pytorch/module/base.py, set_extra_state). What the checkpoint holds of FP8 is never handed on: that is a pickle, which
    set_extra_state executes. Megatron's own parallel linear layers ask
    for one, too, and ignore what it is (tensor_parallel/layers.py, set_extra_state).
    """
    keys: dict[str, None] = {}

    def name(chunk: int, module: str) -> str:
        return f"model{chunk}.{module}" if model.layout.chunks > 1 else module

    if order.fused_norms:
        for item in catalog.objects.values():
            parsed = parse_key(item.name)
            if not item.name.endswith("._extra_state") or ".experts." in item.name:
                continue
            canonical = parsed.template.format(*item.offset[: len(parsed.axes)])
            for pp, chunk, module in model.modules(canonical):
                if pp == at.pp:
                    keys[name(chunk, module)] = None
        return list(keys)
    for key in pieces:
        module, _, leaf = key.rpartition(".")
        if leaf == "weight" and module.rpartition(".")[2].startswith(_SPLIT) and not key.startswith("optimizer."):
            keys[f"{module}._extra_state"] = None
    if at.pp == model.layout.pp - 1:  # also without a weight of its own
        part = LANGUAGE if any(n.startswith(LANGUAGE) for n in model.tensors) else ""
        keys[name(model.layout.chunks - 1, f"{part}output_layer._extra_state")] = None
    return list(keys)
