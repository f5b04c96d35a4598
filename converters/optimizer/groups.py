"""Param groups: learning rates, decay, betas and the step, wherever a checkpoint keeps them, as the target wants them.

    whole tensors, fully_sharded_model_space,   common state: optimizer.optimizer.param_groups; of several optimizers
    fully_reshardable                           optimizer.{0, 1, ..}.optimizer.param_groups
    dp_reshardable, bucket_space, dp_zero       an object for each data-parallel group

A chain of optimizers has one for each algorithm (`megatron.optimizer_parts`), and behind it one for the experts of a job
with expert parallelism, whose groups are in the same one if the job is layer-wise:

    ep 1     Adam                Muon, Adam                            ep 2, layer-wise of main:
    ep 2     Adam, its experts   Muon, its experts, Adam               Muon with its experts, Adam

Megatron finds a group by (wd_mult, lr_mult, is_expert_parallel, is_decoupled_lr), not by position; it wants as many as its
own job has. Without expert parallelism experts are trained like any other weight. So between ep 1 and ep > 1 the experts'
groups are merged into the dense ones, or made from them.

Facts: Megatron-Core 0.16.1, optimizer/__init__.py (`_get_param_groups`, `get_megatron_optimizer`), optimizer/optimizer.py
(`ChainedOptimizer`), optimizer/distrib_optimizer.py (`state_dict`, `load_state_dict`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from converters.errors import RequestError
from converters.megatron.optimizer_chain import ChainMember, is_expert

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from converters.megatron.optimizer_parts import OptimizerPart
    from converters.pickles.nodes import Node

_IDENTITY = ("wd_mult", "lr_mult", "is_decoupled_lr")


@dataclass(frozen=True)
class ChainedOptimizer:
    """One of the optimizers of a job (`ChainedOptimizer` of Megatron), or the only one.

    Attributes:
        member: Its place in the chain, and the parameters that it has.
        part: Algorithm and storage.
        groups: Its param groups, without the parameters.
        prefix: What stands before keys where optimizers are told apart: `chained_1.`; nothing if there is no other.
    """

    member: ChainMember
    part: OptimizerPart
    groups: tuple[dict[str, Node], ...]
    prefix: str = ""

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
        return any(map(is_expert, self.part.names))

    def for_experts(self) -> tuple[dict[str, Node], ...]:
        """Groups of the experts, made from the dense ones if there are none."""
        if self.experts:
            return self.experts
        groups = [dict(group) for group in self.dense if not group.get("is_decoupled_lr")]
        if not any(is_expert(name) and name.endswith(".bias") for name in self.part.names):  # biases are not decayed
            groups = [group for group in groups if group_value(group, "wd_mult") != 0.0] or groups[:1]
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
        optimizers: list[tuple[OptimizerPart, bool | None, tuple[dict[str, Node], ...]]] = []
        for groups in self.parts:
            if ep == 1 or not groups.has_experts:
                optimizers.append((groups.part, None, groups.merged() if ep == 1 else groups.dense))
            elif groups.apart:
                optimizers.append((groups.part, False, groups.dense))
                optimizers.append((groups.part, True, groups.for_experts()))
            else:
                optimizers.append((groups.part, None, (*groups.dense, *groups.for_experts())))
        alone = len(optimizers) == 1
        return [
            ChainedOptimizer(
                ChainMember(number, part.names, experts), part, groups, "" if alone else f"chained_{number}."
            )
            for number, (part, experts, groups) in enumerate(optimizers)
        ]


def common_optimizer(groups: ParamGroups, chain: Sequence[ChainedOptimizer], sharding_type: str) -> Node:
    """What a job's common state has under `optimizer`.

    Args:
        chain: The optimizers of the job.
        sharding_type: "plain", "fully_reshardable", or "dp_reshardable", whose groups are in objects instead
            (`optimizer.buckets`).

    Returns:
        An inert tree: `{"optimizer": {"param_groups": [...]}, ...}`, or one of those for each of several optimizers, by
        number. A loss scaler in it refers to the members `groups.storages`.
    """
    entries = [_common_entry(groups, chained, sharding_type) for chained in chain]
    return entries[0] if len(entries) == 1 else dict(enumerate(entries))


def _common_entry(groups: ParamGroups, chained: ChainedOptimizer, sharding_type: str) -> dict[str, Node]:
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


def group_value(group: Mapping[str, Node], name: str) -> Node:
    """A setting of a param group."""
    return group.get(name, group.get(f"pre_{name}"))  # NeMo's spelling


def _identity(group: Mapping[str, Node]) -> tuple[Node, ...]:
    return tuple(group_value(group, name) for name in _IDENTITY)
