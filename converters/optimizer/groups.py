"""Param groups: learning rates, decay, betas and the step, wherever a checkpoint keeps them, as the target wants them.

    plain Adam, fully_sharded_model_space,      common state: optimizer.optimizer.param_groups; for a mixture of experts
    fully_reshardable                           {0: dense, 1: experts}
    dp_reshardable, bucket_space, dp_zero       an object for each data-parallel group

Megatron finds a group by (wd_mult, lr_mult, is_expert_parallel, is_decoupled_lr), not by position. Experts have groups of
their own, in an optimizer of their own, only with expert parallelism; otherwise they are trained like any other weight. So
between ep 1 and ep > 1 the experts' groups are merged into the dense ones, or made from them.

Facts: Megatron-Core 0.16.1, optimizer/__init__.py (`_get_param_groups`, `get_megatron_optimizer`), optimizer/optimizer.py
(`ChainedOptimizer`), optimizer/distrib_optimizer.py (`state_dict`, `load_state_dict`).
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from converters.archive.records import tensor_ref
from converters.errors import FormatError
from converters.formats.common_state import Archive, stored_common
from converters.names import printable
from converters.optimizer.flat import FlatReader, stored_groups
from converters.pickles import Global, Obj, PersId

if TYPE_CHECKING:
    from collections.abc import Iterable

    from converters.archive.records import TensorRef
    from converters.formats.base import Reader
    from converters.parallel.layout import Layout
    from converters.pickles import Node

__all__ = ["ParamGroups", "param_groups", "read_param_groups"]

_IDENTITY = ("wd_mult", "lr_mult", "is_decoupled_lr")
_EXPERT_BIAS = re.compile(r"\.mlp\.experts\.\d+\..*\.bias$")
_SCALARS = {"float32": "<f", "float64": "<d", "int64": "<q", "int32": "<i"}


@dataclass(frozen=True)
class ParamGroups:
    """Param groups of a checkpoint, without the parameters.

    Attributes:
        dense: Groups of everything but experts that have an optimizer of their own.
        experts: Groups of those experts; empty if they were trained with the rest.
        scaler: State of the loss scaler, an inert tree; None if there is none.
        storages: The tensors in it, as members of the archive that it is put into.
    """

    dense: tuple[dict[str, Node], ...]
    experts: tuple[dict[str, Node], ...] = ()
    scaler: Node = None
    storages: Mapping[str, bytes] = field(default_factory=dict)

    def for_experts(self, *, biases: bool) -> tuple[dict[str, Node], ...]:
        """Groups for an experts' optimizer, made from the dense ones if there are none.

        Args:
            biases: Experts have biases, which are not decayed.
        """
        if self.experts:
            return self.experts
        made = [dict(group) for group in self.dense if not group.get("is_decoupled_lr")]
        if not biases:
            made = [group for group in made if _value(group, "wd_mult") != 0.0] or made[:1]
        return tuple({**group, "is_expert_parallel": True} for group in made)

    def merged(self) -> tuple[dict[str, Node], ...]:
        """Groups for a single optimizer of all parameters."""
        known = {_identity(group) for group in self.dense}
        extra = [group for group in self.experts if _identity(group) not in known]
        return (*self.dense, *({**group, "is_expert_parallel": False} for group in extra))


def param_groups(reader: Reader, layout: Layout, sharding_type: str) -> Node:
    """What a job's common state has under `optimizer`.

    Args:
        sharding_type: "fully_reshardable", or "dp_reshardable", whose groups are in objects instead (`group_objects` of
            `optimizer.buckets`).

    Returns:
        An inert tree: `{"optimizer": {"param_groups": [...]}, "param_state_sharding_type": ...}`, or one of those for
        each of two optimizers, under 0 (dense) and 1 (experts). A loss scaler in it refers to the members
        `read_param_groups(reader).storages`.

    Raises:
        FormatError: The checkpoint has none.
    """
    found = read_param_groups(reader)
    names = reader.catalog.weights
    biases = any(_EXPERT_BIAS.search(name) for name in names)
    if not (layout.ep > 1 and any(".mlp.experts." in name for name in names)):
        return _entry(found.merged(), found.scaler, sharding_type)
    experts = found.for_experts(biases=biases)
    return {0: _entry(found.dense, found.scaler, sharding_type), 1: _entry(experts, found.scaler, sharding_type)}


def _entry(groups: Iterable[dict[str, Node]], scaler: Node, sharding_type: str) -> dict[str, Node]:
    if sharding_type != "fully_reshardable":
        return {"param_state_sharding_type": sharding_type}
    entry: dict[str, Node] = {"optimizer": {"param_groups": [dict(group) for group in groups]}}
    if scaler is not None:
        entry["grad_scaler"] = scaler
    return {**entry, "param_state_sharding_type": sharding_type}


def read_param_groups(reader: Reader) -> ParamGroups:
    """The param groups of a checkpoint, each with the step it has done.

    Raises:
        FormatError: There are none, or they are not what Megatron writes.
    """
    common = reader.catalog.common
    entries = _entries(common.get("optimizer")) if isinstance(common, Mapping) else []
    groups: list[dict[str, Node]] = []
    scalers: list[tuple[str | None, Node]] = []
    steps: list[int] = []
    for entry in entries:
        inner = entry.get("optimizer")
        state = inner if isinstance(inner, Mapping) else entry  # fp32 training stores torch's own dictionary
        groups += _groups(state.get("param_groups"))
        scalers += [(None, entry["grad_scaler"])] if "grad_scaler" in entry else []
        held = state.get("state")
        if isinstance(held, Mapping) and held.get("common_step") is not None:  # None where the groups have the step
            steps.append(_number(reader, held["common_step"]))
    if not groups and isinstance(reader, FlatReader):
        groups = _from_objects(reader, scalers)
    if not groups:
        raise FormatError(
            "the checkpoint has optimizer state but no param groups (learning rates, steps)",
            hint="convert without the optimizer state (--optimizer none)",
        )
    steps += [group["step"] for group in groups if type(group.get("step")) is int]
    if steps:  # a group that had no parameters on the writing rank may lack it
        for group in groups:
            group.setdefault("step", max(steps))
    experts = tuple(group for group in groups if group.get("is_expert_parallel") is True)
    dense = tuple(group for group in groups if group.get("is_expert_parallel") is not True)
    storages: dict[str, bytes] = {}
    scaler = _detached(reader, *scalers[0], storages) if scalers else None  # the same in every optimizer
    return ParamGroups(dense, experts, scaler, storages)


def _entries(optimizer: Node) -> list[Mapping[Any, Node]]:
    """The states of the chained optimizers, or of the only one."""
    if isinstance(optimizer, list):
        return [entry for entry in optimizer if isinstance(entry, Mapping)]
    if not isinstance(optimizer, Mapping):
        return []
    numbered = sorted(key for key in optimizer if type(key) is int)
    if numbered and "optimizer" not in optimizer:
        return [optimizer[key] for key in numbered if isinstance(optimizer[key], Mapping)]
    return [optimizer]


def _groups(value: Node) -> list[dict[str, Node]]:
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(group, Mapping) for group in value):
        raise FormatError("param_groups is not the list of dictionaries that Megatron writes")
    return [{name: item for name, item in group.items() if name != "params"} for group in value]


def _from_objects(reader: FlatReader, scalers: list[tuple[str | None, Node]]) -> list[dict[str, Node]]:
    """The groups of the first data-parallel group of each optimizer; they are the same on every rank."""
    out: list[dict[str, Node]] = []
    seen: set[int | None] = set()
    for (chain, _), group in sorted(stored_groups(reader).items(), key=lambda item: (item[0][0] or 0, item[0][1])):
        if chain in seen:
            continue
        seen.add(chain)
        value = reader.object_value(group.key("optimizer"))
        out += _groups(value.get("param_groups")) if isinstance(value, Mapping) else []
        key = group.key("grad_scaler")
        if key in reader.catalog.objects:
            scalers.append((key, reader.object_value(key)))
    return out


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
        raise FormatError("optimizer.state.common_step is not a number")
    return int(struct.unpack(_SCALARS[ref.dtype.name], _elements(reader, None, ref))[0])


def _elements(reader: Reader, key: str | None, ref: TensorRef) -> bytes:
    """The elements of a small tensor inside a stored object, or inside the common state."""
    if key is None:
        archive = stored_common(reader)
    else:
        stored = reader.catalog.objects[key]
        archive = Archive(reader.catalog.path / stored.file, stored.start, stored.length, printable(stored.file))
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
