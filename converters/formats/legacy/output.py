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
import struct
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from converters.dtypes import dtype
from converters.errors import RequestError
from converters.formats.containers.archive_out import ArchiveFile
from converters.formats.legacy.groups import group_members
from converters.megatron.buffers import Rules, arrange
from converters.megatron.layout import DataParallelGroup
from converters.megatron.rank_state_dict import LocalTensor
from converters.names import state_names
from converters.optimizer.buckets import buffer_pieces, gradient_type, state_piece
from converters.optimizer.read_groups import read_param_groups
from converters.pickles.nodes import Obj
from converters.torchzip.records_out import global_node, tensor_node

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from converters.dtypes import DType
    from converters.formats.base import Reader
    from converters.megatron.rank_state_dict import LocalModel
    from converters.optimizer.groups import ChainedOptimizer
    from converters.optimizer.state import OptimizerState
    from converters.pickles.nodes import Node

_FP32 = dtype("float32")
_ADAM = ("param", "exp_avg", "exp_avg_sq")


def model_state(file: ArchiveFile, entries: Iterable[tuple[str, LocalTensor | Node]]) -> Obj:
    """The state dict of a model chunk.

    Args:
        file: The file that it goes into.
        entries: Names with tensors, or with what the file holds already.
    """
    state = Obj(global_node("collections", "OrderedDict"))
    state.pairs = [(name, file.tensor(value) if isinstance(value, LocalTensor) else value) for name, value in entries]
    return state


class RankOptimizers:
    """What the files of each rank of a job hold of its optimizers.

    Args:
        optimizer: The state to be written.
        model: The job's model.
        args: Its training arguments.
        distributed: They write `distrib_optim.pt`.

    Attributes:
        groups: Param groups of the job's optimizers.
        trained: Canonical names of the tensors that there is state for.

    Raises:
        RequestError: The format cannot hold a state.
    """

    def __init__(
        self,
        reader: Reader,
        optimizer: OptimizerState,
        model: LocalModel,
        args: Mapping[str, Any],
        *,
        distributed: bool,
    ) -> None:
        self._model, self._args, self._distributed = model, args, distributed
        self.groups = read_param_groups(reader).stored_as("fully_reshardable" if distributed else "plain")
        self.trained = {parts.parameter for _, parts in state_names(optimizer.tensors)}
        chain = self.groups.chain(model.layout.ep)
        if distributed and not all(chained.part.distributed for chained in chain):
            raise RequestError(
                f"distrib_optim.pt holds the state of Adam alone; the checkpoint is of {optimizer.recognised}",
                hint="--optimizer plain, or none",
            )
        self._chain = [
            (part, _state_types(part, optimizer)) for chained in chain for part in self._by_model_chunk(chained)
        ]

    def _by_model_chunk(self, chained: ChainedOptimizer) -> Iterator[ChainedOptimizer]:
        """The optimizer, or one for the first model chunk and one for the others."""
        first_apart = self._args.get("overlap_param_gather_with_optimizer_step") is True and not chained.member.experts
        chunks = self._model.layout.chunks
        for part in (range(1), range(1, chunks)) if chunks > 1 and first_apart else (None,):
            yield replace(chained, member=replace(chained.member, names=chained.part.names & self.trained, chunks=part))

    def model_file_entry(self, file: ArchiveFile, chunks: Sequence[Sequence[LocalTensor]]) -> Node:
        """What `model_optim_rng.pt` has of a rank's optimizers.

        Args:
            chunks: The tensors of the rank's model chunks.

        Raises:
            Misfit: The param groups are not those that Megatron makes of these parameters.
        """
        if self._distributed:
            return _alone_or_list([self._options(file, chained) for chained, _ in self._chain])
        return _alone_or_list([self._plain_state(file, *entry, chunks) for entry in self._chain])

    def _options(self, file: ArchiveFile, chained: ChainedOptimizer) -> dict[str, Node]:
        """Param groups and loss scaler of a distributed optimizer."""
        return {"optimizer": {"param_groups": [dict(group) for group in chained.groups]}, **self._scaler(file)}

    def _plain_state(
        self,
        file: ArchiveFile,
        chained: ChainedOptimizer,
        states: Mapping[str, DType],
        chunks: Sequence[Sequence[LocalTensor]],
    ) -> dict[str, Node]:
        """The state of an optimizer that is not distributed."""
        parameters = [
            tensor
            for number, chunk in enumerate(chunks)
            for tensor in chunk
            if tensor.trained and all(chained.member.has(name, number) for name in tensor.parts)
        ]
        shapes = [(p.name, p.shape) for p in parameters]
        step = self.groups.common_step if chained.part.algorithm == "Adam" else None
        state: dict[int, Node] = {}
        groups, masters = [], []
        for group, positions in zip(
            chained.groups, group_members(chained.groups, shapes, self._args, file.name), strict=True
        ):
            first, in_group = len(state), [parameters[position] for position in positions]
            groups.append({**group, "params": list(range(first, first + len(in_group)))})
            half = [p for p in in_group if p.dtype != _FP32]
            masters.append([file.tensor(state_piece(p, "param", states["param"])) for p in half])
            for number, parameter in enumerate(in_group, first):
                moments = {name: kind for name, kind in states.items() if name != "param"}
                state[number] = {n: file.tensor(state_piece(parameter, n, kind)) for n, kind in moments.items()}
                if step is not None:  # torch's own Adam counts parameter by parameter
                    state[number]["step"] = file.literal(_FP32, (), struct.pack("<f", step))
        inner: dict[str, Node] = {"state": state, "param_groups": groups}
        if all(p.dtype == _FP32 for p in parameters):  # training in fp32: torch's own dictionary
            return inner
        return {"optimizer": inner, **self._scaler(file), "fp32_from_fp16_params": masters}

    def _scaler(self, file: ArchiveFile) -> dict[str, Node]:
        if self.groups.scaler is None:
            return {}
        return {"grad_scaler": file.adopt(copy.deepcopy(self.groups.scaler), self.groups.storages)}

    def flat_file(self, name: str, pp: int, tp: int, ep: int) -> ArchiveFile:
        """`distrib_optim.pt`: the first rank of each data-parallel group fills it, for dense parameters that of ep 0."""
        file = ArchiveFile(name)
        nodes: list[Node] = []
        for chained, states in self._chain:
            experts = chained.member.experts is True
            group = DataParallelGroup(pp, tp, ep if experts else None)
            nodes.append(self._flat_state(file, chained, states, group) if experts or ep == 0 else None)
        file.tree = _alone_or_list(nodes)
        return file

    def _flat_state(
        self, file: ArchiveFile, chained: ChainedOptimizer, states: Iterable[str], group: DataParallelGroup
    ) -> dict[Any, Node]:
        """The flat buffers of a distributed optimizer."""
        out: dict[Any, Node] = {"buckets_coalesced": True}
        for number, buffer in enumerate(self._model.buffers(group, chained.member, self._args)):
            numel = sum(bucket.numel_unpadded for bucket in buffer.buckets())
            tensors: dict[str, Node] = {
                state: tensor_node(file.storage(buffer_pieces(buffer, state, _FP32)), _FP32, (numel,))
                for state in states
            }
            types = tuple(global_node("torch", kind.name) for kind in gradient_type(buffer.dtype, self._args))
            out[number] = {types: {**tensors, "numel_unpadded": numel}}
        return out

    def buckets_matter(self) -> bool:
        """Whether positions in the buffers of the first stage depend on where buckets end."""
        members = (chained.member for chained, _ in self._chain if chained.member.chunks in (None, range(1)))
        first_chunk = (replace(member, chunks=range(1)) for member in members)
        buffers = [b for m in first_chunk for b in self._model.buffers(DataParallelGroup(0, 0), m, self._args)]
        single_bucket, small_buckets = (
            [sum(bucket.numel_unpadded for bucket in arrange(b.parameters, rules)) for b in buffers]
            for rules in (Rules(1), Rules(1, bucket_size=1))
        )
        return single_bucket != small_buckets


def _state_types(chained: ChainedOptimizer, optimizer: OptimizerState) -> dict[str, DType]:
    """The states of an optimizer with their element types, those of Adam first, as Megatron has them."""
    types: dict[str, DType] = {}
    for name, (state, parameter) in state_names(optimizer.tensors):
        if chained.member.has(parameter):
            types.setdefault(state, optimizer.tensors[name].dtype)
    ordered = sorted(types, key=lambda state: (_ADAM.index(state) if state in _ADAM else len(_ADAM), state))
    return {state: types[state] for state in ordered}


def _alone_or_list(optimizers: list[Any]) -> Node:
    return optimizers[0] if len(optimizers) == 1 else optimizers
