"""Reads the param groups of a checkpoint, wherever it keeps them; see `optimizer.groups`."""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING

from converters.errors import FormatError, IntegrityError, RequestError, UnsupportedError
from converters.megatron.optimizer_parts import (
    chained_entries,
    group_algorithm,
    is_undecayed,
    optimizer_parts,
    torch_state,
)
from converters.names import quoted
from converters.optimizer.groups import ParamGroups, PartGroups, group_value
from converters.optimizer.stored_buckets import stored_groups
from converters.param_order import trainable
from converters.pickles.nodes import Global, Obj, PersId
from converters.torchzip.tensor_refs import tensor_ref

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from converters.catalog import Catalog
    from converters.formats.base import Reader
    from converters.megatron.optimizer_parts import OptimizerPart, Recognised
    from converters.pickles.nodes import Node
    from converters.torchzip.tensor_refs import TensorRef

_SCALARS = {"float32": "<f", "float64": "<d", "int64": "<q", "int32": "<i"}


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
        state = torch_state(entry)
        if groups := _groups(state.get("param_groups")):
            by_number[number] = groups
        scalers += [(None, entry["grad_scaler"])] if "grad_scaler" in entry else []
        inner_state = state.get("state")
        if (
            isinstance(inner_state, Mapping) and inner_state.get("common_step") is not None
        ):  # None where the groups have the step
            steps.append(read_step(inner_state["common_step"], functools.partial(_elements, reader, None)))
    counts_by_parameter = bool(steps)
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
    counts_by_parameter = counts_by_parameter or any("amsgrad" in group for group in everything)
    return ParamGroups(parts, scaler, storages, max(steps) if counts_by_parameter and steps else None)


_COUNTING = ("Adam", "SOAP")  # Muon, Lion and SGD count no steps


def _by_part(catalog: Catalog, chain: list[list[dict[str, Node]]]) -> Iterator[PartGroups]:
    """The groups of each algorithm; those of one optimizer of the chain belong together."""
    recognised = optimizer_parts(catalog)
    owners: list[OptimizerPart] = []
    chain = [groups for listed in chain for groups in _by_algorithm(listed)]
    for groups in chain:
        stated = {a for group in groups if (a := group_algorithm(group)) is not None}
        families = set(map(_optimizer_family, stated))
        fitting = [p for p in recognised.parts if not stated or _optimizer_family(p.algorithm) in families]
        if not fitting or len(stated) > 1:
            stored = " and ".join(dict.fromkeys(p.algorithm for p in recognised.parts)) or "nothing that is known"
            raise RequestError(
                f"param groups are those of {' and '.join(sorted(stated)) or 'no optimizer'}, the states those of {stored}",
                hint="--optimizer none leaves the optimizer out",
            )
        owners.append(fitting[0])
    for part in recognised.parts:
        part_groups = [groups for groups, owner in zip(chain, owners, strict=True) if owner is part]
        if not part_groups:
            raise IntegrityError(
                f"there is optimizer state of {part.algorithm} but none of its param groups (learning rates, steps)",
                hint="convert without the optimizer state (--optimizer none)",
            )
        experts = tuple(g for groups in part_groups for g in groups if g.get("is_expert_parallel") is True)
        dense = tuple(g for groups in part_groups for g in groups if g.get("is_expert_parallel") is not True)
        shared = any(len({g.get("is_expert_parallel") is True for g in groups}) > 1 for groups in part_groups)
        apart = not shared if experts else not _experts_within(catalog, recognised, part)
        _check_decay(catalog, part, (*dense, *experts))
        yield PartGroups(part, dense, experts, apart)


def _by_algorithm(groups: list[dict[str, Node]]) -> list[list[dict[str, Node]]]:
    """The groups of each optimizer of a chain: a container of whole tensors lists them as one."""
    algorithms = dict.fromkeys(map(group_algorithm, groups))
    if None in algorithms:
        return [groups]
    return [[group for group in groups if group_algorithm(group) == algorithm] for algorithm in algorithms]


def _optimizer_family(algorithm: str) -> str:
    return "SGD" if algorithm.startswith("SGD") else algorithm


def _experts_within(catalog: Catalog, recognised: Recognised, part: OptimizerPart) -> bool:
    """Experts would be groups of the same optimizer: that of a layer-wise job, in 0.16.1 only Muon's."""
    if not recognised.layer_wise or part.distributed:
        return False
    return catalog.args.get("optimizer") != "dist_muon" or part.algorithm == "Muon"


def _check_decay(catalog: Catalog, part: OptimizerPart, groups: Sequence[dict[str, Node]]) -> None:
    """Megatron decays matrices, not vectors and biases, and a loader asks for both groups."""
    multipliers = [group_value(group, "wd_mult") for group in groups]
    if not catalog.args or not all(isinstance(value, int | float) for value in multipliers):
        return
    weights = catalog.weights
    needed = {is_undecayed(n, weights[n].shape, catalog.args) for n in part.names if n in weights and trainable(n)}
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
    for (number, _), group in sorted(stored_groups(reader).items()):
        if number in out:
            continue
        value = reader.object_value(group.key("optimizer"))
        out[number] = _groups(value.get("param_groups")) if isinstance(value, Mapping) else []
        key = group.key("grad_scaler")
        if key in reader.catalog.objects:
            scalers.append((key, reader.object_value(key)))
    return {number: groups for number, groups in out.items() if groups}


def read_step(node: Node, elements: Callable[[TensorRef], bytes]) -> int:
    """A step as a number: torch's own Adam keeps it as a tensor.

    Args:
        elements: Reads the elements of a small tensor.
    """
    if type(node) in (int, float):
        return int(node)
    ref = tensor_ref(node, "a step")
    if ref is None or ref.dtype.name not in _SCALARS or ref.shape not in ((), (1,)):
        raise UnsupportedError("a step of the optimizer is not a number")
    return int(struct.unpack(_SCALARS[ref.dtype.name], elements(ref))[0])


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
