"""Optimizer state of a Megatron-LM legacy checkpoint, under the names of its parameters.

    plain Adam, SGD, Muon    state by number: the parameters of group after group, each in the order of the model; the fp32
                             master weights in a list of their own, which lacks parameters that are fp32 themselves
    distrib_optim.pt         flat buffers, see `megatron.buffers`; the order is that of the rank's own model, whose names
                             lie beside it. One array for each state (from 2024-04), or one for each bucket (from 2024-02)

    layer_wise_optimizer_N   the same, of those parameters that were dealt out to data-parallel rank N

A mixture of experts with expert parallelism has a list of two of either: the dense parameters, and the experts; Muon has a
list of its own optimizers and Adam's.

Sources: Megatron-Core, optimizer/optimizer.py (`Float16OptimizerWithFloat16Params.state_dict`, `ChainedOptimizer`),
optimizer/__init__.py (`_get_param_groups`), optimizer/distrib_optimizer.py (`get_parameter_state_dp_zero`), tags
core_v0.4.0 to core_v0.16.1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from converters.formats.legacy.groups import group_members
from converters.megatron.buffers import Misfit, arrange
from converters.megatron.optimizer_chain import adam_chain
from converters.megatron.optimizer_parts import entry_groups, group_algorithm, torch_state
from converters.names import StateName
from converters.optimizer.buckets import index_states
from converters.optimizer.stored_buckets import StoredFlat, bucket_sizes, read_buffers
from converters.torchzip.tensor_refs import tensor_ref
from converters.words import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from converters.dtypes import DType
    from converters.formats.containers.archive import PtFile, Storages
    from converters.megatron.buffers import Local, Rules
    from converters.megatron.flat_index import FlatIndex
    from converters.torchzip.tensor_refs import TensorRef

_MOST_PADDING = 1 << 17  # elements behind a bucket


@dataclass(frozen=True, slots=True)
class Owned:
    """A parameter of one rank.

    Attributes:
        key: Its name in the rank's file.
        local: What it is: boxes of whole tensors.
        expert: It belongs to a routed expert.
    """

    key: str
    local: Local
    shape: tuple[int, ...]
    chunk: int
    expert: bool


def optimizer_entries(value: Any) -> list[Any]:
    """The states of a rank's optimizers: one, or one for dense parameters and one for experts; None for no state."""
    return list(value) if isinstance(value, list) else [value]


Members = list[list[list["Owned"]]]
"""The parameters of each param group of each optimizer of a rank."""


def plain_members(entries: Sequence[Any], owned: Sequence[Owned], args: Mapping[str, Any], label: str) -> Members:
    """Which parameters are in which group, if a rank's optimizers have all of its parameters.

    Raises:
        Misfit: The groups are not those that Megatron makes of these parameters.
    """
    out: Members = []
    for entry, parameters in _chained(entries, owned, label):
        groups = _state_of(entry, label).get("param_groups") if isinstance(entry, Mapping) else []
        if not all(isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in groups or ()):
            raise Misfit(f"{label}: a param group has no list of parameters")
        positions_by_group = (
            group_members(groups or (), [(p.key, p.shape) for p in parameters], args, label) if groups else []
        )
        out.append([[parameters[position] for position in positions] for positions in positions_by_group])
    return out


def dealt_members(members: Members, ranks: int) -> list[Members]:
    """Which of a rank's parameters each of its data-parallel peers has in a layer-wise optimizer.

    Parameters of all groups, the smallest first, are dealt out as 0, 1, .., n-1, n-1, .., 1, 0
    (optimizer/layer_wise_optimizer.py, `shard_params`, core_v0.16.1).

    Args:
        members: Parameters of each group of each optimizer, in order.
        ranks: Data-parallel ranks.
    """
    if ranks == 1:
        return [members]
    out: list[Members] = [[[[] for _ in groups] for groups in members] for _ in range(ranks)]
    flat = [(p, chain, group) for chain, groups in enumerate(members) for group, ps in enumerate(groups) for p in ps]
    turns = [*range(ranks), *reversed(range(ranks))]
    for number, (parameter, chain, group) in enumerate(sorted(flat, key=lambda item: math.prod(item[0].shape))):
        out[turns[number % len(turns)]][chain][group].append(parameter)
    return out


def locate_plain(entries: Sequence[Any], members: Members, file: PtFile, storages: Storages, out: FlatIndex) -> None:
    """The state of optimizers that are not distributed.

    Args:
        members: The parameters of each group of each.

    Raises:
        Misfit: The state is not that of these parameters.
    """
    for entry, parts in zip(entries, members, strict=True):
        if not isinstance(entry, Mapping):
            continue
        state = _state_of(entry, file.name)
        groups, states = state["param_groups"], state["state"]
        masters = entry.get("fp32_from_fp16_params", entry.get("fp32_from_fp16", []))
        for number, (group, parameters) in enumerate(zip(groups, parts, strict=True)):
            if len(group["params"]) != len(parameters):
                have = f"{file.name}: group {number} has {len(group['params'])} parameters"
                raise Misfit(f"{have}, {len(parameters)} belong into it")
            low = iter(masters[number] if isinstance(masters, list) and number < len(masters) else ())
            for index, parameter in zip(group["params"], parameters, strict=True):
                nodes = dict(states.get(index, {}))
                if masters and parameter.local.dtype.name != "float32":
                    nodes["param"] = next(low, None)
                _locate_states(nodes, parameter, file, storages, out)
            if next(low, None) is not None:
                raise Misfit(f"{file.name}: group {number} has more master weights than parameters")


def _state_of(entry: Mapping[Any, Any], label: str) -> Mapping[Any, Any]:
    """Torch's own dictionary of an optimizer."""
    state = torch_state(entry)
    if not isinstance(state.get("param_groups"), list) or not isinstance(state.get("state"), Mapping):
        raise Misfit(f"{label}: the optimizer is not the dictionary that Megatron-LM writes")
    return state


def _locate_states(
    nodes: Mapping[Any, Any], parameter: Owned, file: PtFile, storages: Storages, out: FlatIndex
) -> None:
    for state, node in nodes.items():
        label = f"{file.name}: {state} of {parameter.key}"
        ref = tensor_ref(node, label)
        if ref is None and state != "param":
            continue  # a step as a number
        if ref is not None and ref.shape in ((), (1,)) and state == "step":
            continue
        if ref is None or ref.shape != parameter.shape:
            raise Misfit(f"{label} is {list(ref.shape) if ref else 'missing'}, the parameter {list(parameter.shape)}")
        out.add(str(StateName(state, "")), parameter.local, storages.array(file, ref, label), ref.dtype, ref.offset)


def _chained(entries: Sequence[Any], owned: Sequence[Owned], label: str) -> list[tuple[Any, list[Owned]]]:
    """Each optimizer of a rank with its parameters, in the order of the chain (`get_megatron_optimizer`)."""
    algorithms = [_algorithm(entry) for entry in entries]
    if len({name for name in algorithms if name}) > 1:
        return [(entry, _of_algorithm(number, entries, algorithms, owned)) for number, entry in enumerate(entries)]
    experts_apart = len(entries) > 1 and any(p.expert for p in owned)
    chunks = 1 + max((p.chunk for p in owned), default=0)
    chain = adam_chain(range(len(entries)), chunks, label, experts_apart=experts_apart)
    return [(entries[member.number], [p for p in owned if member.has(p.local.name, p.chunk)]) for member in chain]


def _algorithm(entry: Any) -> str | None:
    groups = entry_groups(entry) if isinstance(entry, Mapping) else []
    return next((name for group in groups if (name := group_algorithm(group))), None)


def _of_algorithm(
    number: int, entries: Sequence[Any], algorithms: Sequence[Any], owned: Sequence[Owned]
) -> list[Owned]:
    """The parameters of one of several optimizers: the first algorithm has the matrices (optimizer/muon.py)."""
    current = algorithms[number]
    parameters = [p for p in owned if _is_matrix(p) == (current == algorithms[0])]
    if _for_experts(entries[number]):
        return [p for p in parameters if p.expert]
    apart = any(_for_experts(e) for e, algorithm in zip(entries, algorithms, strict=True) if algorithm == current)
    return [p for p in parameters if not (apart and p.expert)]


def _for_experts(entry: Any) -> bool:
    groups = entry_groups(entry) if isinstance(entry, Mapping) else []
    return bool(groups) and all(group.get("is_expert_parallel") is True for group in groups)


def _is_matrix(parameter: Owned) -> bool:
    """Whether Muon trains it: a matrix that Megatron does not mark as `is_embedding_or_output_parameter`."""
    outer = ("word_embeddings.weight", "embedding.position_embeddings.weight", "output_layer.weight")
    return len(parameter.shape) == 2 and not parameter.key.endswith(outer)


def locate_flat(
    file: PtFile,
    owned: Sequence[Owned],
    storages: Storages,
    rules: Callable[[int, bool], Sequence[Rules]],
    index: FlatIndex,
) -> None:
    """The state of distributed optimizers, in a `distrib_optim.pt`.

    Args:
        owned: The rank's parameters, in the order of `named_parameters()`.
        rules: By which the job may have cut the buffers of a model chunk, those of experts or all others.
        index: Where to note it.

    Raises:
        Misfit: The parameters do not fill the buffers.
    """

    def flat(ref: TensorRef, label: str) -> StoredFlat:
        return StoredFlat(storages.array(file, ref, label), ref.dtype, ref.offset, ref.shape[0])

    for entry, parameters in _chained(optimizer_entries(file.tree), owned, file.name):
        if entry is None:
            continue  # another rank wrote it
        if not isinstance(entry, Mapping):
            raise Misfit(f"{file.name} is not the dictionary that Megatron-LM writes")
        by_buffer: dict[tuple[int, DType], list[Owned]] = {}
        for parameter in parameters:
            by_buffer.setdefault((parameter.chunk, parameter.local.dtype), []).append(parameter)
        stored = read_buffers(entry, file.name, flat)
        if len(stored) != len(by_buffer):
            raise Misfit(f"{file.name} has {counted(len(stored), 'buffer')}, the parameters make {len(by_buffer)}")
        for (number, buffer), ((chunk, dtype), members) in zip(sorted(stored.items()), by_buffer.items(), strict=True):
            label = f"{file.name}: buffer {number}"
            if buffer.dtype not in (None, dtype):
                raise Misfit(f"{label} is for {buffer.dtype} parameters, the model's are {dtype}")
            local, candidates = [p.local for p in members], rules(chunk, members[0].expert)
            padded = bucket_sizes(entry.get("per_bucket_numel"), number, label)
            if buffer.sizes is None and padded is not None:
                buffer.sizes = _unpadded(local, padded, candidates, label)
            index_states(buffer, local, candidates, label, index)


def _unpadded(parameters: list[Local], padded: list[int], candidates: Sequence[Rules], label: str) -> list[int]:
    """Sizes of buckets without the padding behind them, which Megatron-Core 0.4 did not store."""
    for rules in candidates:
        sizes = [bucket.numel_unpadded for bucket in arrange(parameters, rules)]
        if len(sizes) == len(padded) and all(
            have - _MOST_PADDING < n <= have for n, have in zip(sizes, padded, strict=True)
        ):
            return sizes
    raise Misfit(f"{label} has buckets of {', '.join(map(str, padded[:8]))} elements, which its parameters do not fill")
