"""Which optimizers trained a checkpoint, and which parameters each of them has.

A job has one optimizer for everything, or one for the matrices (Muon, Lion, SOAP) and one for the rest. What algorithm it is
shows in the states that a parameter has beside its master weight, and must agree with the arguments:

    exp_avg, exp_avg_sq                 Adam
    exp_avg                             Lion
    momentum_buffer                     Muon, or SGD with momentum
    momentum_buffer, moment2_buffer     AdaptiveMuon
    exp_avg, exp_avg_sq, L, R, Q_L, Q_R SOAP
    none                                SGD

Which class of Megatron keeps it is told apart as well, because a loader asks for its spelling: Float16Optimizer has whole
tensors, master weights under `fp32_param`; DistributedOptimizer has flat buckets, or gathered tensors, master weights under
`param` (fully_sharded_model_space: `fp32_param`).

Facts: Megatron-Core 0.16.1 and main of 2026-08, optimizer/muon.py, emerging_optimizers.py, optimizer.py (Float16Optimizer,
`ChainedOptimizer.sharded_state_dict`), distrib_optimizer.py; Emerging-Optimizers 0.1 and 0.3.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from converters.model_parts import untrained
from converters.names import StateName, folded, listed, printable
from converters.param_order import trainable

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from converters.catalog import Catalog, TensorInfo

MASTERS = {"fp32_param": "param", "master_param": "param"}
"""Other names of the master weights."""

_ADAM = frozenset({"exp_avg", "exp_avg_sq"})
_MOMENTUM = frozenset({"momentum_buffer"})
_STATES = {
    "Adam": _ADAM,
    "Lion": frozenset({"exp_avg"}),
    "Muon": _MOMENTUM,
    "SGD with momentum": _MOMENTUM,
    "AdaptiveMuon": _MOMENTUM | {"moment2_buffer"},
    "SOAP": _ADAM | {"L", "R", "Q_L", "Q_R"},
    "SGD": frozenset[str](),
}
# what each name of --optimizer makes: of the matrices, and of the rest
_ARGUMENT = {
    "adam": ("Adam",),
    "sgd": ("SGD with momentum", "SGD"),
    "muon": ("Muon", "Adam", "Lion"),
    "dist_muon": ("Muon", "Adam", "Lion"),
    "adaptive_muon": ("AdaptiveMuon", "Muon", "Adam", "Lion"),
    "lion": ("Lion", "Adam"),
    "soap": ("SOAP", "Adam"),
}
_STEPS = ("step", "common_step")
_MANY_GROUPS = 64
_DIGITS = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class OptimizerPart:
    """The parameters that one algorithm trains.

    Attributes:
        algorithm: "Adam", "SGD with momentum", "SGD", "Muon", "AdaptiveMuon", "Lion", "SOAP".
        distributed: A DistributedOptimizer keeps it; else whole tensors are kept, master weights as `fp32_param`.
        states: What each parameter has beside its master weight.
        names: Canonical names of the parameters.
    """

    algorithm: str
    distributed: bool
    states: frozenset[str]
    names: frozenset[str]


@dataclass(frozen=True, slots=True)
class LostStates:
    """States that parameters of one algorithm should have and have not.

    Attributes:
        algorithm: What trains them, by their other states or by parameters of their kind.
        states: What is missing: "exp_avg_sq", or "param", the master weight.
        names: Canonical names of the parameters.
        why: A sentence, where it is known how they were lost; then no parameter is named.
    """

    algorithm: str
    states: tuple[str, ...]
    names: tuple[str, ...] = ()
    why: str = ""

    @property
    def keys(self) -> tuple[str, ...]:
        """What is missing, under canonical names."""
        return tuple(str(StateName(state, name)) for name in self.names for state in self.states)

    def __str__(self) -> str:
        if self.why:
            return self.why
        example = printable(folded(self.names)[0])
        if self.states == ("param",):
            return f"the master weight of {example} is missing"
        return f"{', '.join(self.states)} of {example} is missing; {self.algorithm} has it for every parameter"


@dataclass(frozen=True, slots=True)
class Recognised:
    """What is known of the optimizers of a checkpoint.

    Attributes:
        parts: One for each algorithm, that of the matrices first.
        layer_wise: Whole parameters are dealt out to data-parallel ranks (LayerWiseDistributedOptimizer).
        unknown: Sentences: what is not understood.
        lost: States that parameters should have and that are missing.
        stateless: Weights that have no state at all, not even a master weight, where others have: frozen in training, or
            lost; nothing in the checkpoint tells which.
    """

    parts: tuple[OptimizerPart, ...]
    layer_wise: bool = False
    unknown: tuple[str, ...] = ()
    lost: tuple[LostStates, ...] = ()
    stateless: tuple[str, ...] = ()

    @property
    def doubt(self) -> str | None:
        """A sentence on weights without any state; None if every weight has some."""
        if not self.stateless:
            return None
        verb = "has" if len(self.stateless) == 1 else "have"
        return f"{listed(folded(self.stateless), 3)} {verb} no optimizer state: frozen in training, or lost"

    @property
    def mixed(self) -> bool:
        """Some parameters are in a DistributedOptimizer, others are kept whole."""
        return len({part.distributed for part in self.parts}) > 1

    def __str__(self) -> str:
        """`Muon + Adam, layer-wise`."""
        words = " + ".join(dict.fromkeys(part.algorithm for part in self.parts)) or "unknown optimizer"
        return f"{words}, layer-wise" if self.layer_wise else words


def group_algorithm(group: Mapping[Any, Any]) -> str | None:
    """The algorithm whose options a param group has: one of `_STATES`, or None if they do not tell."""
    if "shampoo_beta" in group:
        return "SOAP"
    if "betas" in group:
        return "Adam" if "eps" in group else "Lion"
    if "dampening" in group:
        return "SGD with momentum" if group.get("momentum") else "SGD"
    if "momentum_beta" in group or "momentum" in group:
        return "AdaptiveMuon" if "beta2" in group else "Muon"
    return None


def optimizer_parts(catalog: Catalog) -> Recognised:
    """Which algorithm has which parameters, from the catalog alone."""
    by_name, fp32_param_names, flat = _stored_states(catalog)
    entries = chained_entries(catalog.common)
    if not by_name and not flat:
        unnamed = any(t.kind == "optimizer" for t in catalog.tensors.values())
        return Recognised((), unknown=("it is not known which parameters its tensors are of",) if unnamed else ())
    accepted = _accepted(catalog, entries)
    if accepted and any("momentum_buffer" in states for states in by_name.values()):  # then every parameter has it
        accepted = tuple(name for name in accepted if name != "SGD")
    undistributed = frozenset(_undistributed_names(catalog, entries, by_name, fp32_param_names, flat=bool(flat)))
    by_states: dict[tuple[str, frozenset[str], bool], list[str]] = defaultdict(list)
    for name, states in by_name.items():
        kind = _kind(catalog, name)
        by_states[kind, frozenset(states - {"param", *_STEPS}), name not in undistributed].append(name)
    if flat:
        nameless = [name for name in trained_weights(catalog.weights) if name not in by_name]
        by_states["flat", frozenset(flat - {"param", *_STEPS}), True] += nameless
    members: dict[tuple[str, bool], list[str]] = defaultdict(list)
    unknown, lost = list[str](), list[LostStates]()
    if accepted is None:
        unknown.append(f"the optimizer {printable(str(catalog.args.get('optimizer')))!r} is not known")
    stored = {(kind, present) for kind, present, _ in by_states}
    for (kind, present, distributed), names in by_states.items():
        algorithm = next((a for a in accepted or () if _STATES[a] == present), None)
        # one algorithm has all parameters of a kind: what has less than another of its kind has lost something
        richer = [a for a in accepted or () if present < _STATES[a] and (kind, _STATES[a]) in stored and a != "SOAP"]
        if algorithm is not None and not richer:
            members[algorithm, distributed] += names
            continue
        full = next(iter(richer), None) or next((a for a in accepted or () if present < _STATES[a]), None)
        if full is not None:
            lost.append(LostStates(full, tuple(sorted(_STATES[full] - present)), tuple(sorted(names))))
        elif accepted is not None:
            states_text = printable(", ".join(sorted(present))) or "no state but the master weight"
            example = printable(folded(sorted(names))[0])
            unknown.append(f"{example} has {states_text}: no known optimizer has these states")
    lost += _lost_masters(catalog, by_name)
    lost += _lost_second_moments(entries, [flat, *by_name.values()])
    parts = [OptimizerPart(a, d, _STATES[a], frozenset(names)) for (a, d), names in members.items()]
    order = {name: number for number, name in enumerate(("Lion", "Adam"))}  # the optimizer of the rest comes last
    parts.sort(key=lambda part: (order.get(part.algorithm, -1), part.distributed))
    expected = trained_weights(catalog.weights) if catalog.megatron and not flat else {}
    stateless = tuple(name for name in expected if name not in by_name)
    return Recognised(tuple(parts), _layer_wise(catalog), tuple(unknown), tuple(lost), stateless)


def trained_weights(weights: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """The weights that an optimizer has state for: no buffers, no second names, nothing that is frozen beside adapters."""
    frozen = untrained(weights)
    return {n: t for n, t in weights.items() if t.dtype.floating and trainable(n) and n not in frozen}


def _stored_states(catalog: Catalog) -> tuple[dict[str, set[str]], set[str], set[str]]:
    """States of each parameter, parameters whose master weight is spelled `fp32_param`, and the states of flat buckets."""
    by_name: dict[str, set[str]] = defaultdict(set)
    fp32_param_names: set[str] = set()
    flat: set[str] = set()
    for tensor in catalog.tensors.values():
        if tensor.kind != "optimizer":
            continue
        if tensor.opaque:
            if ".bucket_idx_" in tensor.name:
                flat.add(tensor.name.rpartition(".")[2])
        elif (parts := StateName.parse(tensor.name)) is not None:
            state, name = parts
            if state == "fp32_param" and all(part.block is None for part in tensor.parts):
                fp32_param_names.add(name)
            by_name[name].add(MASTERS.get(state, state))
    if any(o.name.endswith(".param_state") for o in catalog.objects.values()):
        flat |= {"param", *_ADAM}  # dp_zero_gather_scatter, whose DistributedOptimizer takes nothing but Adam
    return by_name, fp32_param_names, flat


def chained_entries(common: Any) -> dict[int, Mapping[Any, Any]]:
    """What the common state has of each chained optimizer, by number; the only one is number 0."""
    # NeMo 1 has it under Lightning's name
    optimizer = common.get("optimizer", common.get("optimizer_states")) if isinstance(common, Mapping) else None
    if isinstance(optimizer, list):
        return {number: entry for number, entry in enumerate(optimizer) if isinstance(entry, Mapping)}
    if not isinstance(optimizer, Mapping):
        return {}
    numbered = sorted(key for key in optimizer if type(key) is int)
    if numbered and "optimizer" not in optimizer:
        return {key: optimizer[key] for key in numbered if isinstance(optimizer[key], Mapping)}
    return {0: optimizer}


def torch_state(entry: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """The state of torch's optimizer in that of Megatron's, under its old name too; fp32 training stores it bare."""
    inner = entry.get("optimizer", entry.get("optimizer_state_dict"))
    return inner if isinstance(inner, Mapping) else entry


def entry_groups(entry: Mapping[Any, Any]) -> list[Mapping[Any, Any]]:
    """The param groups of one optimizer, as far as they are dictionaries."""
    groups = torch_state(entry).get("param_groups")
    return [group for group in groups if isinstance(group, Mapping)] if isinstance(groups, list) else []


def stated_sharding(catalog: Catalog) -> tuple[str, str] | None:
    """Megatron's name of how a DistributedOptimizer is stored, and what states it."""
    stated = catalog.content.get("distrib_optim_sharding_type")
    if isinstance(stated, str):
        return stated, "content_metadata"
    for entry in chained_entries(catalog.common).values():
        stated = entry.get("param_state_sharding_type")
        if isinstance(stated, str):
            return stated, "optimizer.param_state_sharding_type in the common state"
    return None


def has_flat_files(catalog: Catalog) -> bool:
    """Whether a legacy checkpoint has files of flat buffers, which a DistributedOptimizer writes."""
    return any(file.name.endswith("/distrib_optim.pt") for file in catalog.files)


def _accepted(catalog: Catalog, entries: Mapping[int, Mapping[Any, Any]]) -> tuple[str, ...] | None:
    """Algorithms that the arguments, or else the param groups, allow; None for an optimizer that is not known."""
    named = catalog.args.get("optimizer")
    if isinstance(named, str):
        return _ARGUMENT.get(named)
    groups = [group for entry in entries.values() for group in entry_groups(entry)[:_MANY_GROUPS]]
    stated = [a for a in dict.fromkeys(map(group_algorithm, groups)) if a is not None]
    return tuple(stated) or ("Adam", "Lion", "SOAP")  # `momentum_buffer` alone may be Muon's or SGD's


def _undistributed_names(
    catalog: Catalog,
    entries: Mapping[int, Mapping[Any, Any]],
    by_name: Mapping[str, set[str]],
    fp32_param_names: set[str],
    *,
    flat: bool,
) -> set[str]:
    """Parameters that no DistributedOptimizer has."""
    if catalog.format == "legacy":
        return set() if has_flat_files(catalog) else set(by_name)
    if flat:
        return set(by_name)
    if catalog.format not in ("torch_dist", "zarr", "torch"):  # torch's own kinds of sharding
        return set()
    distributed = sum("param_state_sharding_type" in entry for entry in entries.values())
    if distributed and distributed < len(entries):
        return fp32_param_names | {name for name, states in by_name.items() if "param" not in states}
    return set() if distributed or stated_sharding(catalog) else set(by_name)


def _kind(catalog: Catalog, name: str) -> str:
    """Parameters of a kind have one optimizer: emerging_optimizers.py, `_is_nonlinear_or_embedding`.

    Outside of Megatron only parameters that differ in numbers alone are of a kind.
    """
    if not catalog.megatron:
        return _DIGITS.sub("*", name)
    if name.endswith(("word_embeddings.weight", "output_layer.weight")):
        return "rest"
    if "embedding" in name:  # whether it is marked as one depends on the model
        return "other embedding"
    weight = catalog.weights.get(name)
    return "matrix" if weight is not None and len(weight.shape) == 2 else "rest"


def _lost_masters(catalog: Catalog, by_name: Mapping[str, set[str]]) -> Iterator[LostStates]:
    """Parameters in half precision without a master weight, where others have one."""
    if not any("param" in states for states in by_name.values()):
        return
    weights = catalog.weights
    lost = [n for n, states in by_name.items() if "param" not in states and n in weights]
    if half := tuple(sorted(n for n in lost if weights[n].dtype.name != "float32")):
        yield LostStates("", ("param",), half)


def _lost_second_moments(
    entries: Mapping[int, Mapping[Any, Any]], stored: Iterable[Collection[str]]
) -> Iterator[LostStates]:
    """Param groups of Adam without any second moment: a Lion job saved in `fully_reshardable`.

    Megatron-LM main, core/optimizer/distrib_optimizer.py: `optimizer_state_keys` is `exp_avg` alone when `--optimizer lion`
    is given, also of the DistributedOptimizer that has Adam for vectors and embeddings.
    """
    algorithms = {group_algorithm(group) for entry in entries.values() for group in entry_groups(entry)[:_MANY_GROUPS]}
    states = set[str]().union(*stored)
    if algorithms >= {"Adam", "Lion"} and "exp_avg" in states and "exp_avg_sq" not in states:
        why = (
            "exp_avg_sq of Adam is missing for every parameter: Megatron-LM does not save it with --optimizer lion "
            "--dist-ckpt-optim-fully-reshardable"
        )
        yield LostStates("Adam", ("exp_avg_sq",), why=why)


def _layer_wise(catalog: Catalog) -> bool:
    args = catalog.args
    return args.get("use_layer_wise_distributed_optimizer") is True or args.get("optimizer") == "dist_muon"


def is_undecayed(name: str, shape: Sequence[int], args: Mapping[str, Any]) -> bool:
    """Whether Megatron puts a parameter into a group without weight decay (`_get_param_groups`)."""
    if args.get("apply_wd_to_qk_layernorm") is True and ("q_layernorm." in name or "k_layernorm." in name):
        return False
    return name.endswith(".bias") or len(shape) == 1
