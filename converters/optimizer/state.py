"""Optimizer state under canonical names, whatever layout it was saved in.

    state = optimizer_state(reader)              # every layout of Megatron: optimizer.state.{param,exp_avg,...}.NAME
    prove_masters(reader, state.tensors)         # master weights round to the weights; or `Masters`, for a sharing

Layouts whose tensors have a parameter's name are only renamed (`fp32_param`, the older name of the master weights, is
`param` here). Master weights are fp32 here, also where the file holds remainders (`storage`). Flat buckets store no names:
the order of parameters follows from the model (`param_order`), and what the checkpoint does not tell is tried out on the
values: each candidate must turn master weights into the weights stored beside them.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from converters.catalog import TensorInfo
from converters.errors import FormatError, IntegrityError, RequestError
from converters.megatron.buffers import Misfit
from converters.megatron.layout import Layout
from converters.megatron.model_args import ModelArgs
from converters.megatron.optimizer_chain import is_expert
from converters.megatron.optimizer_parts import MASTERS, Recognised, optimizer_parts
from converters.megatron.rank_state_dict import likely_order
from converters.names import StateName, master_name, printable, quoted
from converters.optimizer.buckets import unflatten
from converters.optimizer.proof import mismatches, refusal
from converters.optimizer.shift import refuse_shifted
from converters.optimizer.storage import complete_masters, keeps_remainders
from converters.optimizer.stored_buckets import stored_groups
from converters.param_order import EXPERTS, Order
from converters.words import counted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from converters.catalog import Catalog
    from converters.formats.base import Reader
    from converters.optimizer.stored_buckets import StoredGroup


@dataclass(frozen=True, slots=True)
class Candidate:
    """How the writing job may have ordered things.

    Attributes:
        order: Order of parameters.
        align: Parameters begin at multiples of so many elements.
        expert_groups: How the experts' data-parallel groups are counted: "pp-ep-tp" (0.12 and later) or "ep-pp-tp".
    """

    order: Order
    align: int
    expert_groups: str


@dataclass(frozen=True)
class OptimizerState:
    """What a checkpoint holds of the optimizer.

    Attributes:
        tensors: `optimizer.state.STATE.NAME` -> tensor, in the order of the parameters.
        replaced: Stored tensors and objects whose elements are in `tensors` now, each with what it was.
        candidate: For flat buckets, the order that a sample of the values confirms; None where names are stored.
        notes: Sentences a person should read.
        recognised: Which algorithm has which parameters.
    """

    tensors: dict[str, TensorInfo]
    replaced: dict[str, str] = field(default_factory=dict)
    candidate: Candidate | None = None
    notes: tuple[str, ...] = ()
    recognised: Recognised = field(default_factory=lambda: Recognised(()))


def has_optimizer(catalog: Catalog) -> bool:
    """Whether a checkpoint holds optimizer state: tensors, or objects of data-parallel groups (dp_zero_gather_scatter)."""
    stored = any(t.kind == "optimizer" for t in catalog.tensors.values())
    return stored or any(item.of_optimizer for item in catalog.objects.values())


def optimizer_state(reader: Reader, layout: Layout | None = None, *, refuse_doubtful: bool = True) -> OptimizerState:
    """The optimizer's tensors under canonical names.

    This does not prove that every master weight rounds to its weight: it looks at a sample, and only where the order of flat
    buckets is to be found. What proves it is `optimizer.proof`: `Masters`, `prove_masters`, `proved_when_read`.

    Args:
        layout: The job that saved it, if its arguments do not tell.
        refuse_doubtful: Of orders that fill flat buckets, accept none that a sample of the values speaks against, and no
            remainders that may have been saved shifted; False takes the order that the least speaks against, and
            notes what does.

    Raises:
        IntegrityError: No known order of parameters turns the stored master weights into the stored weights, or a state
            is missing.
        FormatError: The buckets are incomplete or no order of parameters fills them.
        RequestError: Nothing says which job saved them, or what was stored of the master weights, or the optimizer is none
            that is known.
    """
    catalog = reader.catalog
    recognised = optimizer_parts(catalog)
    _refuse_unknown(catalog, recognised)
    groups = stored_groups(reader)
    if groups:
        if layout is None and ModelArgs.from_catalog(catalog).tp is None:  # neither arguments nor a run_config.yaml
            raise RequestError(
                "the job's arguments are missing; they say which parameters the optimizer's flat buckets hold",
                hint=f"distckpt convert {quoted(catalog.root)} OUT --to safetensors keeps the weights",
            )
        state = _unflattened(
            reader, groups, layout or Layout.saved(catalog), recognised, refuse_doubtful=refuse_doubtful
        )
        return replace(state, tensors=state.tensors | _parameter_states(catalog), recognised=recognised)
    tensors = _parameter_states(catalog)
    notes = _add_fp32_masters(catalog, tensors) if catalog.megatron else ()
    notes += (recognised.doubt,) if recognised.doubt else ()
    tensors = complete_masters(reader, tensors)
    if refuse_doubtful and keeps_remainders(tensors) and may_be_shifted(catalog):
        refuse_shifted(reader, tensors)
    return OptimizerState(tensors, notes=notes, recognised=recognised)


def _parameter_states(catalog: Catalog) -> dict[str, TensorInfo]:
    """The tensors that are stored under a parameter's name.

    Raises:
        RequestError: One of them has another shape than its parameter.
    """
    tensors: dict[str, TensorInfo] = {}
    weights = catalog.weights if catalog.megatron else {}
    for info in catalog.tensors.values():
        parts = StateName.parse(info.name)
        if info.kind != "optimizer" or parts is None:
            continue
        state, name = parts
        renamed = str(StateName(MASTERS.get(state, state), name))
        weight = weights.get(name)
        if weight is not None and info.shape[1:] != weight.shape[1:]:  # rows may be padded otherwise
            raise RequestError(
                f"{printable(renamed)} is {list(info.shape)}, its parameter {list(weight.shape)}: a state of another "
                "shape belongs to the part of one tensor-parallel rank, and cannot be divided anew",
                hint=_WITHOUT,
                tensor=renamed,
            )
        tensors[renamed] = TensorInfo(renamed, info.dtype, info.shape, "optimizer", info.parts, info.opaque)
    return tensors


_WITHOUT = "--optimizer none leaves the optimizer out"


def _refuse_unknown(catalog: Catalog, recognised: Recognised) -> None:
    """Optimizer state is moved only when it is known what it is."""
    if not catalog.megatron:
        return
    if recognised.lost:
        unnamed = len(recognised.lost) - 1
        text = str(recognised.lost[0]) + (f"; and {unnamed} more" if unnamed else "")
        raise IntegrityError(text, details=list(map(str, recognised.lost[1:8])), hint=_WITHOUT)
    if recognised.unknown:
        text = f"the optimizer is not understood: {recognised.unknown[0]}"
        raise RequestError(text, details=recognised.unknown[1:8], hint=_WITHOUT)


def may_be_shifted(catalog: Catalog) -> bool:
    """Whether Megatron-Core 0.15.0 to 0.19.0 may have stored the state shifted by the padding of its buckets.

    It did when a buffer had several: with overlap_grad_reduce, or around an embedding that two pipeline stages share.
    """
    if catalog.content.get("distrib_optim_sharding_type") != "fully_reshardable":
        return False
    args = catalog.args
    shared = args.get("untie_embeddings_and_output_weights") is not True or args.get("mtp_num_layers")
    return args.get("overlap_grad_reduce") is not False or bool(
        args.get("pipeline_model_parallel_size") != 1 and shared
    )


def _add_fp32_masters(catalog: Catalog, tensors: dict[str, TensorInfo]) -> tuple[str, ...]:
    """A parameter that is itself fp32 has no master copy in the plain optimizer: it is its own master."""
    added = 0
    for name, weight in catalog.weights.items():
        master = master_name(name)
        if str(StateName("exp_avg", name)) in tensors and master not in tensors and weight.dtype.name == "float32":
            tensors[master] = TensorInfo(master, weight.dtype, weight.shape, "optimizer", weight.parts)
            added += 1
    return (
        (f"{counted(added, 'parameter')} in fp32: own master {'weight' if added == 1 else 'weights'}",) if added else ()
    )


def candidates(catalog: Catalog, layout: Layout) -> Iterator[Candidate]:
    """Orders in which the writing job may have kept its parameters, the likeliest first."""
    producer = catalog.producer[0] if catalog.producer else ""
    likely = likely_order(catalog)
    fused = [likely.fused_norms, not likely.fused_norms]
    experts = ["grouped"]
    if any(map(is_expert, catalog.weights)):
        experts = list(dict.fromkeys([likely.experts, *EXPERTS]))
    aligns = [1, 64] if producer.startswith("Megatron-Core 0.6") else [64, 1]
    old = any(producer.startswith(f"Megatron-Core 0.{n}") for n in ("6", "8", "11"))
    counts = ["ep-pp-tp", "pp-ep-tp"] if old else ["pp-ep-tp", "ep-pp-tp"]
    counts = counts if layout.ep > 1 else counts[:1]
    direct = [False]
    if any(".mixer.conv1d." in name for name in catalog.weights):
        direct = [likely.conv_direct, not likely.conv_direct]
    for align, conv, kind, norm, count in itertools.product(aligns, direct, experts, fused, counts):
        yield Candidate(Order(norm, kind, conv, likely.fused_down), align, count)


def _unflattened(
    reader: Reader,
    groups: Mapping[tuple[int, int], StoredGroup],
    layout: Layout,
    recognised: Recognised,
    *,
    refuse_doubtful: bool = True,
) -> OptimizerState:
    """Names and boxes for the elements of flat buckets: the first order of parameters that the values confirm."""
    catalog = reader.catalog
    names = frozenset[str]().union(*(part.names for part in recognised.parts if part.distributed))
    reason: FormatError | RequestError | None = None
    refused: list[str] = []
    best: OptimizerState | None = None
    for candidate in candidates(catalog, layout):
        try:
            tensors, within_chunks = unflatten(catalog, groups, layout, candidate, names)
            tensors = complete_masters(reader, tensors)
        except Misfit as error:
            reason = reason or error
            continue
        # dp_reshardable has a chunk for each parameter; what else there is has none that end with one
        edges = catalog.content.get("distrib_optim_sharding_type") == "dp_reshardable"
        if keeps_remainders(tensors) and within_chunks and (edges or not _order_stated(catalog)):
            reason = reason or _order_unknown(catalog, min(within_chunks))
            continue
        wrong = mismatches(reader, tensors)
        if not wrong:
            return OptimizerState(tensors, _replaced(catalog), candidate)
        if best is None or len(wrong) < len(refused):
            note = f"{counted(len(wrong), 'master weight', verb='does/do')} not round to the weights; "
            note += "flat buckets are named by the likeliest order"
            best, refused = OptimizerState(tensors, _replaced(catalog), candidate, (note,)), wrong
    if best is not None and not refuse_doubtful:
        return best
    if refused:
        raise refusal(refused, catalog, "no known order of parameters fits the flat optimizer buckets")
    raise reason or FormatError("the optimizer's flat buckets hold nothing")


def _order_stated(catalog: Catalog) -> bool:
    """Whether the arguments say how the modules of the job were made, so that `likely_order` is not a guess."""
    args = catalog.args
    experts = any(map(is_expert, catalog.weights))
    grouped = not experts or isinstance(args.get("moe_grouped_gemm"), bool)
    return isinstance(args.get("transformer_impl"), str) and grouped


def _order_unknown(catalog: Catalog, name: str) -> RequestError:
    """Remainders fit any order: without chunks that end where parameters do, nothing proves one."""
    return RequestError(
        "the order of parameters in the optimizer's flat buckets is not known: master weights that are stored as "
        "remainders do not show it, and chunks do not end where parameters do",
        details=[f"for example {printable(name)}"],
        hint=f"distckpt convert {quoted(catalog.root)} OUT --to safetensors keeps the weights",
        tensor=name,
    )


def _replaced(catalog: Catalog) -> dict[str, str]:
    out = {t.name: t.opaque for t in catalog.tensors.values() if t.opaque and t.kind == "optimizer"}
    for key, item in catalog.objects.items():
        if item.of_optimizer:
            out[key] = "optimizer state of one data-parallel group"
    return out
