"""What Megatron-LM's `--ckpt-format torch` has in the files of one rank: model, optimizer, in the form of version 0.16.

    model_optim_rng.pt   model (or model0, model1, ..): module name -> tensor
                         optimizer: param groups; the plain optimizer's state by number, its master weights in lists
    distrib_optim.pt     the distributed optimizer's flat buffers, buckets end to end without the padding behind them

A mixture of experts with expert parallelism has a list of two of either: the dense parameters, and the experts.

Sources: megatron/training/checkpointing.py (`generate_state_dict`), Megatron-Core, optimizer/optimizer.py
(`Float16OptimizerWithFloat16Params.state_dict`, `FP32Optimizer.state_dict`, `ChainedOptimizer`),
optimizer/distrib_optimizer.py (`state_dict`, `get_parameter_state_dp_zero`), core_v0.16.1.
"""

from __future__ import annotations

import copy
import math
import struct
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from converters.dtypes import dtype
from converters.formats.legacy.groups import group_members
from converters.megatron.buffers import Local, arrange
from converters.megatron.rank_state_dict import LocalTensor
from converters.names import StateName
from converters.pickles.nodes import Obj
from converters.planning.plan import end_to_end
from converters.torchzip.records_out import global_node, tensor_node

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from converters.dtypes import DType
    from converters.formats.containers.archive_out import ArchiveFile
    from converters.megatron.buffers import Rules
    from converters.pickles.nodes import Node
    from converters.planning.plan import Piece


@dataclass(frozen=True)
class Chain:
    """One of the optimizers of a rank.

    Attributes:
        groups: Options of its param groups, without parameters.
        chunks: Its parameters, for each model chunk of the rank in the order of `named_parameters()`.
        states: States that the optimizer has for a parameter ("param", "exp_avg", ..), with their element types.
        scaler: State of the loss scaler, to be adopted by a file; None if there is none.
        storages: The tensors in it.
        step: Steps done, if the optimizer counts them parameter by parameter (torch's own Adam); else None.
        experts: It has the experts that are spread over ranks.
    """

    groups: tuple[dict[str, Node], ...]
    chunks: tuple[tuple[LocalTensor, ...], ...]
    states: Mapping[str, DType]
    args: Mapping[str, Any]
    scaler: Node = None
    storages: Mapping[str, bytes] | None = None
    step: int | None = None
    experts: bool = False


def model_state(file: ArchiveFile, entries: Iterable[tuple[str, LocalTensor | Node]]) -> Obj:
    """The state dict of a model chunk.

    Args:
        file: The file that it goes into.
        entries: Names with tensors, or with what the file holds already.
    """
    state = Obj(global_node("collections", "OrderedDict"))
    state.pairs = []
    for name, value in entries:
        if isinstance(value, LocalTensor):
            value = file.tensor(value)
        state.pairs.append((name, value))
    return state


def plain_optimizer(file: ArchiveFile, chain: Chain, what: str) -> Node:
    """The state of an optimizer that is not distributed.

    Raises:
        Misfit: The param groups are not those that Megatron makes of these parameters.
    """
    parameters = [tensor for chunk in chain.chunks for tensor in chunk]
    members = group_members(chain.groups, [(p.name, p.shape) for p in parameters], chain.args, what)
    half = any(p.dtype.name != "float32" for p in parameters)
    state: dict[int, Node] = {}
    groups, masters = [], []
    for group, positions in zip(chain.groups, members, strict=True):
        in_group = [parameters[position] for position in positions]
        numbers = list(range(len(state), len(state) + len(in_group)))
        groups.append({**group, "params": numbers})
        masters.append(
            [file.tensor(_state_of(p, "param", chain.states["param"])) for p in in_group if p.dtype.name != "float32"]
        )
        for number, parameter in zip(numbers, in_group, strict=True):
            state[number] = {
                name: file.tensor(_state_of(parameter, name, kind))
                for name, kind in chain.states.items()
                if name != "param"
            }
            if chain.step is not None:
                state[number]["step"] = file.literal(dtype("float32"), (), struct.pack("<f", chain.step))
    inner: dict[str, Node] = {"state": state, "param_groups": groups}
    if not half:  # training in fp32: torch's own dictionary
        return inner
    return {"optimizer": inner, **_scaler(file, chain), "fp32_from_fp16_params": masters}


def flat_optimizer(file: ArchiveFile, chain: Chain) -> Node:
    """What `model_optim_rng.pt` has of a distributed optimizer."""
    return {"optimizer": {"param_groups": [dict(group) for group in chain.groups]}, **_scaler(file, chain)}


def flat_state(file: ArchiveFile, chain: Chain, rules: Callable[[int], Rules]) -> dict[Any, Node]:
    """What `distrib_optim.pt` has of a distributed optimizer: the flat buffers.

    Args:
        file: The file that they go into.
        chain: The optimizer.
        rules: How the job cuts the buffers of a model chunk.
    """
    out: dict[Any, Node] = {"buckets_coalesced": True}
    for number, (chunk, kind, parameters) in enumerate(buffers(chain)):
        grad = "float32" if chain.args.get("accumulate_allreduce_grads_in_fp32") is not False else kind.name
        starts, numel = flat_starts(parameters, rules(chunk))
        states: dict[str, Node] = {}
        for state in chain.states:
            pieces = [(first, _state_of(parameter, state, dtype("float32"))) for parameter, first in starts]
            storage = file.storage(end_to_end(pieces, dtype("float32"), numel))
            states[state] = tensor_node(storage, dtype("float32"), (numel,))
        states["numel_unpadded"] = numel
        out[number] = {(global_node("torch", kind.name), global_node("torch", grad)): states}
    return out


def buffers(chain: Chain) -> Iterator[tuple[int, DType, list[LocalTensor]]]:
    """Model chunk, element type and parameters of each buffer, in Megatron's numbering (`gbuf_idx`)."""
    for chunk, parameters in enumerate(chain.chunks):
        by_type: dict[DType, list[LocalTensor]] = {}
        for parameter in parameters:
            by_type.setdefault(parameter.dtype, []).append(parameter)
        yield from ((chunk, kind, same_type) for kind, same_type in by_type.items())


def flat_starts(parameters: Sequence[LocalTensor], rules: Rules) -> tuple[list[tuple[LocalTensor, int]], int]:
    """The first element of each parameter in a buffer whose buckets lie end to end, and the elements of all."""
    by_name = {parameter.name: parameter for parameter in parameters}
    # what fills them is not asked here
    flat = [Local(name, p.dtype, (), math.prod(p.shape), shared=p.shared) for name, p in by_name.items()]
    starts, base = [], 0
    for bucket in arrange(flat, rules):
        starts += [(by_name[local.name], base + start) for local, start in bucket.members]
        base += bucket.numel_unpadded
    return starts, base


def _state_of(parameter: LocalTensor, state: str, kind: DType) -> Piece:
    """What the optimizer keeps for a parameter, filled as the parameter is."""
    copies = [replace(copy, source=str(StateName(state, copy.source))) for copy in parameter.copies]
    return replace(parameter, dtype=kind, copies=copies)


def _scaler(file: ArchiveFile, chain: Chain) -> dict[str, Node]:
    if chain.scaler is None:
        return {}
    return {"grad_scaler": file.adopt(copy.deepcopy(chain.scaler), chain.storages or {})}
