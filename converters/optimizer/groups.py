"""Param groups: learning rates, decay, betas and the step, wherever a checkpoint keeps them, as the target wants them.

    whole tensors, fully_sharded_model_space,   common state: optimizer.optimizer.param_groups; of several optimizers
    fully_reshardable                           optimizer.{0, 1, ..}.optimizer.param_groups
    dp_reshardable, bucket_space, dp_zero       an object for each data-parallel group

A chain of optimizers has one for each algorithm (`facts.optimizer_parts`), and behind it one for the experts of a job with
expert parallelism, whose groups are in the same one if the job is layer-wise:

    ep 1     Adam                Muon, Adam                            ep 2, layer-wise of main:
    ep 2     Adam, its experts   Muon, its experts, Adam               Muon with its experts, Adam

Megatron finds a group by (wd_mult, lr_mult, is_expert_parallel, is_decoupled_lr), not by position; it wants as many as its
own job has. Without expert parallelism experts are trained like any other weight. So between ep 1 and ep > 1 the experts'
groups are merged into the dense ones, or made from them.

Facts: Megatron-Core 0.16.1, optimizer/__init__.py (`_get_param_groups`, `get_megatron_optimizer`), optimizer/optimizer.py
(`ChainedOptimizer`), optimizer/distrib_optimizer.py (`state_dict`, `load_state_dict`).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from converters.errors import FormatError, IntegrityError, RequestError, UnsupportedError
from converters.megatron.optimizer_parts import chained_entries, group_algorithm, optimizer_parts, undecayed
from converters.names import quoted
from converters.optimizer.flat import stored_groups
from converters.param_order import trainable
from converters.pickles import Global, Obj, PersId
from converters.torchzip.records import tensor_ref

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from converters.catalog import Catalog
    from converters.formats.base import Reader
    from converters.megatron.optimizer_parts import OptimizerPart, Recognised
    from converters.pickles import Node
    from converters.torchzip.records import TensorRef

__all__ = ["ChainedOptimizer", "ParamGroups", "PartGroups", "common_optimizer", "read_param_groups"]

_IDENTITY = ("wd_mult", "lr_mult", "is_decoupled_lr")
_SCALARS = {"float32": "<f", "float64": "<d", "int64": "<q", "int32": "<i"}
_EXPERT = ".mlp.experts."


@dataclass(frozen=True)
class ChainedOptimizer:
    """One of the optimizers of a job (`ChainedOptimizer` of Megatron), or the only one.

    Attributes:
        number: Its place in the chain; None if there is no other.
        part: Algorithm, storage, and names of the parameters that it may have.
        experts: It has only the experts of these (True), only the others (False), or all (None).
        groups: Its param groups, without the parameters.
    """

    number: int | None
    part: OptimizerPart
    experts: bool | None
    groups: tuple[dict[str, Node], ...]

    @property
    def prefix(self) -> str:
        """What stands before keys where they are told apart: `chained_1.`."""
        return "" if self.number is None else f"chained_{self.number}."

    def has(self, name: str) -> bool:
        """Whether it trains the parameter of this canonical name."""
        return name in self.part.names and self.experts in (None, _EXPERT in name)

    def state_key(self, state: str, sharding_type: str) -> str:
        """What stands before a parameter's key for one of its states, stored as a whole tensor.

        Args:
            sharding_type: "fully_reshardable", "dp_reshardable" or "plain".
        """
        if self.part.distributed:
            return f"optimizer.state.{state}"
        prefix = self.prefix if sharding_type == "dp_reshardable" else ""
        return f"{prefix}optimizer.state.{'fp32_param' if state == 'param' else state}"


@dataclass(frozen=True)
class PartGroups:
    """Param groups of the parameters that one algorithm trains.

    Attributes:
        part: The algorithm and its parameters.
        dense: Groups of everything but experts that have groups of their own.
        experts: Groups of those experts; empty if they were trained with the rest.
        apart: With expert parallelism the experts have an optimizer of their own; else groups in the same one.
    """

    part: OptimizerPart
    dense: tuple[dict[str, Node], ...]
    experts: tuple[dict[str, Node], ...] = ()
    apart: bool = True

    @property
    def has_experts(self) -> bool:
        """Some of the parameters are experts'."""
        return any(_EXPERT in name for name in self.part.names)

    def for_experts(self) -> tuple[dict[str, Node], ...]:
        """Groups of the experts, made from the dense ones if there are none."""
        if self.experts:
            return self.experts
        groups = [dict(group) for group in self.dense if not group.get("is_decoupled_lr")]
        if not any(_EXPERT in name and name.endswith(".bias") for name in self.part.names):  # biases are not decayed
            groups = [group for group in groups if _value(group, "wd_mult") != 0.0] or groups[:1]
        return tuple({**group, "is_expert_parallel": True} for group in groups)

    def merged(self) -> tuple[dict[str, Node], ...]:
        """Groups for a single optimizer of all of its parameters."""
        identities = {_identity(group) for group in self.dense}
        extra = [group for group in self.experts if _identity(group) not in identities]
        return (*self.dense, *({**group, "is_expert_parallel": False} for group in extra))


@dataclass(frozen=True)
class ParamGroups:
    """Param groups of a checkpoint, without the parameters.

    Attributes:
        parts: Those of each algorithm, in the order of the chain.
        scaler: State of the loss scaler, an inert tree; None if there is none.
        storages: The tensors in it, as members of the archive that it is put into.
        common_step: Steps done, if the optimizer counts them parameter by parameter (torch's own Adam); else None.
    """

    parts: tuple[PartGroups, ...]
    scaler: Node = None
    storages: Mapping[str, bytes] = field(default_factory=dict)
    common_step: int | None = None

    def merged(self) -> tuple[dict[str, Node], ...]:
        """All groups of a job without expert parallelism, one algorithm after the other."""
        return tuple(group for part in self.parts for group in part.merged())

    def stored_as(self, form: str) -> ParamGroups:
        """The same for a job that keeps its state in another form.

        Args:
            form: "plain" (nothing in a DistributedOptimizer), "fully_reshardable" or "dp_reshardable". Where only some
                parameters are in a DistributedOptimizer, only these change.

        Raises:
            RequestError: Megatron has no such form for these optimizers; the reason is named.
        """
        plain = form == "plain"
        some = any(part.part.distributed for part in self.parts)
        if plain == (not some):
            return self
        parts = []
        for groups in self.parts:
            if not plain and groups.part.algorithm != "Adam":
                name = groups.part.algorithm
                why = "takes Adam only" if name.startswith("SGD") else "does not take it in a checkpoint of this job"
                raise RequestError(
                    f"--optimizer {form}: Megatron's distributed optimizer {why}; this is {name}",
                    hint="--optimizer plain keeps its state as whole tensors, none leaves it out",
                )
            part = replace(groups.part, distributed=not plain)
            parts.append(replace(groups, part=part, apart=groups.apart or some))
        return replace(self, parts=tuple(parts))

    def chain(self, ep: int) -> list[ChainedOptimizer]:
        """The optimizers of a job in the order of `get_megatron_optimizer`.

        Args:
            ep: Expert-parallel size.
        """
        members: list[tuple[OptimizerPart, bool | None, tuple[dict[str, Node], ...]]] = []
        for groups in self.parts:
            if ep == 1 or not groups.has_experts:
                members.append((groups.part, None, groups.merged() if ep == 1 else groups.dense))
            elif groups.apart:
                members.append((groups.part, False, groups.dense))
                members.append((groups.part, True, groups.for_experts()))
            else:
                members.append((groups.part, None, (*groups.dense, *groups.for_experts())))
        alone = len(members) == 1
        return [ChainedOptimizer(None if alone else number, *entry) for number, entry in enumerate(members)]


def common_optimizer(groups: ParamGroups, chain: Sequence[ChainedOptimizer], sharding_type: str) -> Node:
    """What a job's common state has under `optimizer`.

    Args:
        chain: The optimizers of the job.
        sharding_type: "plain", "fully_reshardable", or "dp_reshardable", whose groups are in objects instead
            (`optimizer.buckets`).

    Returns:
        An inert tree: `{"optimizer": {"param_groups": [...]}, ...}`, or one of those for each of several optimizers, by
        number. A loss scaler in it refers to the members `found.storages`.
    """
    entries = [_entry(groups, chained, sharding_type) for chained in chain]
    return entries[0] if len(entries) == 1 else dict(enumerate(entries))


def _entry(groups: ParamGroups, chained: ChainedOptimizer, sharding_type: str) -> dict[str, Node]:
    distributed = chained.part.distributed
    if distributed and sharding_type == "dp_reshardable":
        return {"param_state_sharding_type": sharding_type}
    inner: dict[str, Node] = {"param_groups": [dict(group) for group in chained.groups]}
    if not distributed and groups.common_step is not None:
        inner["param_groups"] = [{k: v for k, v in group.items() if k != "step"} for group in chained.groups]
        inner["state"] = {"common_step": groups.common_step}
    entry: dict[str, Node] = {"optimizer": inner}
    if groups.scaler is not None:
        entry["grad_scaler"] = groups.scaler
    return {**entry, "param_state_sharding_type": sharding_type} if distributed else entry


def read_param_groups(reader: Reader) -> ParamGroups:
    """The param groups of a checkpoint, each with the step it has done.

    Raises:
        FormatError: There are none, or they are not what Megatron writes.
        IntegrityError: Those of one of several optimizers are missing.
        RequestError: They are not those of the optimizers whose states are stored.
    """
    entries = chained_entries(reader.catalog.common)
    by_number: dict[int, list[dict[str, Node]]] = {}
    scalers: list[tuple[str | None, Node]] = []
    steps: list[int] = []
    for number, entry in entries.items():
        inner = entry.get("optimizer")
        state = inner if isinstance(inner, Mapping) else entry  # fp32 training stores torch's own dictionary
        if groups := _groups(state.get("param_groups")):
            by_number[number] = groups
        scalers += [(None, entry["grad_scaler"])] if "grad_scaler" in entry else []
        inner_state = state.get("state")
        if (
            isinstance(inner_state, Mapping) and inner_state.get("common_step") is not None
        ):  # None where the groups have the step
            steps.append(_number(reader, inner_state["common_step"]))
    own = bool(steps)
    if not by_number or entries.keys() - by_number.keys():
        for number, groups in _from_objects(reader, scalers).items():
            by_number.setdefault(number, groups)
    if not by_number:
        raise UnsupportedError(
            "the checkpoint has optimizer state but no param groups (learning rates, steps)",
            hint=(
                f"distckpt convert {quoted(reader.catalog.root)} OUT --to safetensors keeps the weights"
                if reader.catalog.common is None
                else "convert without the optimizer state (--optimizer none)"
            ),
        )
    everything = [group for number in sorted(by_number) for group in by_number[number]]
    steps += [group["step"] for group in everything if type(group.get("step")) is int]
    parts = tuple(_by_part(reader.catalog, [by_number[number] for number in sorted(by_number)]))
    for group in [
        group for part in parts if part.part.algorithm in _COUNTING for group in (*part.dense, *part.experts)
    ]:
        if steps:  # a group that had no parameters on the writing rank may lack it
            group.setdefault("step", max(steps))
    storages: dict[str, bytes] = {}
    scaler = _detached(reader, *scalers[0], storages) if scalers else None  # the same in every optimizer
    # torch's own Adam, by the options that only it has, counts steps beside each parameter
    own = own or any("amsgrad" in group for group in everything)
    return ParamGroups(parts, scaler, storages, max(steps) if own and steps else None)


_COUNTING = ("Adam", "SOAP")  # Muon, Lion and SGD count no steps


def _by_part(catalog: Catalog, chain: list[list[dict[str, Node]]]) -> Iterator[PartGroups]:
    """The groups of each algorithm; those of one optimizer of the chain belong together."""
    recognised = optimizer_parts(catalog)
    owners: list[OptimizerPart] = []
    chain = [groups for listed in chain for groups in _by_algorithm(listed)]
    for groups in chain:
        told = {a for group in groups if (a := group_algorithm(group)) is not None}
        fitting = [p for p in recognised.parts if not told or _kin(p.algorithm) in {_kin(a) for a in told}]
        if not fitting or len(told) > 1:
            have = " and ".join(dict.fromkeys(p.algorithm for p in recognised.parts)) or "nothing that is known"
            raise RequestError(
                f"param groups are those of {' and '.join(sorted(told)) or 'no optimizer'}, the states those of {have}",
                hint="--optimizer none leaves the optimizer out",
            )
        owners.append(fitting[0])
    for part in recognised.parts:
        mine = [groups for groups, owner in zip(chain, owners, strict=True) if owner is part]
        if not mine:
            raise IntegrityError(
                f"there is optimizer state of {part.algorithm} but none of its param groups (learning rates, steps)",
                hint="convert without the optimizer state (--optimizer none)",
            )
        experts = tuple(g for groups in mine for g in groups if g.get("is_expert_parallel") is True)
        dense = tuple(g for groups in mine for g in groups if g.get("is_expert_parallel") is not True)
        shared = any(len({g.get("is_expert_parallel") is True for g in groups}) > 1 for groups in mine)
        apart = not shared if experts else not _experts_within(catalog, recognised, part)
        _check_decay(catalog, part, (*dense, *experts))
        yield PartGroups(part, dense, experts, apart)


def _by_algorithm(groups: list[dict[str, Node]]) -> list[list[dict[str, Node]]]:
    """The groups of each optimizer of a chain: a container of whole tensors lists them as one."""
    algorithms = dict.fromkeys(map(group_algorithm, groups))
    if None in algorithms:
        return [groups]
    return [[group for group in groups if group_algorithm(group) == algorithm] for algorithm in algorithms]


def _kin(algorithm: str) -> str:
    return "SGD" if algorithm.startswith("SGD") else algorithm


def _experts_within(catalog: Catalog, recognised: Recognised, part: OptimizerPart) -> bool:
    """Experts would be groups of the same optimizer: that of a layer-wise job, in 0.16.1 only Muon's."""
    if not recognised.layer_wise or part.distributed:
        return False
    return catalog.args.get("optimizer") != "dist_muon" or part.algorithm == "Muon"


def _check_decay(catalog: Catalog, part: OptimizerPart, groups: Sequence[dict[str, Node]]) -> None:
    """Megatron decays matrices, not vectors and biases, and a loader asks for both groups."""
    multipliers = [_value(group, "wd_mult") for group in groups]
    if not catalog.args or not all(isinstance(value, int | float) for value in multipliers):
        return
    weights = catalog.weights
    needed = {undecayed(n, weights[n].shape, catalog.args) for n in part.names if n in weights and trainable(n)}
    lacking = needed - {value == 0.0 for value in multipliers}
    if lacking:
        kind = "vectors and biases" if True in lacking else "matrices"
        raise IntegrityError(
            f"the param group of {part.algorithm} for {kind} is missing, so no job could load its state",
            hint="convert without the optimizer state (--optimizer none)",
        )


def _groups(value: Node) -> list[dict[str, Node]]:
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(group, Mapping) for group in value):
        raise UnsupportedError("param_groups is not the list of dictionaries that Megatron writes")
    return [{name: item for name, item in group.items() if name != "params"} for group in value]


def _from_objects(reader: Reader, scalers: list[tuple[str | None, Node]]) -> dict[int, list[dict[str, Node]]]:
    """The groups of the first data-parallel group of each optimizer, by number; they are the same on every rank."""
    out: dict[int, list[dict[str, Node]]] = {}
    for (chain, _), group in sorted(stored_groups(reader).items(), key=lambda item: (item[0][0] or 0, item[0][1])):
        if (chain or 0) in out:
            continue
        value = reader.object_value(group.key("optimizer"))
        out[chain or 0] = _groups(value.get("param_groups")) if isinstance(value, Mapping) else []
        key = group.key("grad_scaler")
        if key in reader.catalog.objects:
            scalers.append((key, reader.object_value(key)))
    return {number: groups for number, groups in out.items() if groups}


def _value(group: Mapping[str, Node], name: str) -> Node:
    return group.get(name, group.get(f"pre_{name}"))  # NeMo's spelling


def _identity(group: Mapping[str, Node]) -> tuple[Node, ...]:
    return tuple(_value(group, name) for name in _IDENTITY)


def _number(reader: Reader, node: Node) -> int:
    """A step as a number: torch's own Adam keeps it as a tensor in the common state."""
    if type(node) in (int, float):
        return int(node)
    ref = tensor_ref(node, "common_step")
    if ref is None or ref.dtype.name not in _SCALARS or ref.shape not in ((), (1,)):
        raise UnsupportedError("optimizer.state.common_step is not a number")
    return int(struct.unpack(_SCALARS[ref.dtype.name], _elements(reader, None, ref))[0])


def _elements(reader: Reader, key: str | None, ref: TensorRef) -> bytes:
    """The elements of a small tensor inside a stored object, or inside the common state."""
    archive = reader.common_state() if key is None else reader.stored_object(key)
    if archive is None:
        raise FormatError("the checkpoint has no common state")
    return archive.elements(ref)


def _detached(reader: Reader, key: str | None, node: Node, storages: dict[str, bytes]) -> Node:
    """The tree with its tensors taken out of the archive that they lie in; their elements go to `storages`."""
    if isinstance(node, Mapping):
        return {name: _detached(reader, key, value, storages) for name, value in node.items()}
    ref = tensor_ref(node, "the loss scaler")
    if ref is None:
        return node
    name = f"distckpt_{len(storages)}"
    storages[f"data/{name}"] = _elements(reader, key, ref)
    kind, numel = Global("torch", str(ref.dtype.storage)), math.prod(ref.shape)
    hooks = Obj(Global("collections", "OrderedDict"))
    storage = PersId(("storage", kind, name, "cpu", numel))
    return Obj(Global("torch._utils", "_rebuild_tensor_v2"), (storage, 0, ref.shape, ref.strides, False, hooks))
