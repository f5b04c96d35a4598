"""The optimizers of a rank of a job that writes legacy checkpoints: which parameters each has, and how it cuts buffers.

Source: Megatron-Core, optimizer/__init__.py (`get_megatron_optimizer`), core_v0.16.1.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from converters.errors import RequestError
from converters.formats.containers.archive_out import ArchiveFile
from converters.formats.legacy.output import Chain, buffers, flat_starts, flat_state
from converters.megatron.buffers import Rules
from converters.names import state_names
from converters.optimizer.read_groups import read_param_groups

if TYPE_CHECKING:
    from collections.abc import Mapping

    from converters.dtypes import DType
    from converters.formats.base import Reader
    from converters.megatron.rank_state_dict import LocalModel, LocalTensor
    from converters.optimizer.groups import ChainedOptimizer
    from converters.optimizer.state import OptimizerState
    from converters.pickles.nodes import Node

_ADAM = ("param", "exp_avg", "exp_avg_sq")
_Chunks = Sequence[Sequence["LocalTensor"]]


class Chains:
    """The optimizers of every rank.

    Args:
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
        self._model, self._layout, self._args = model, model.layout, args
        self.groups = read_param_groups(reader).stored_as("fully_reshardable" if distributed else "plain")
        self._chain = self.groups.chain(self._layout.ep)
        kinds: dict[tuple[int, str], DType] = {}
        for name, (state, parameter) in state_names(optimizer.tensors):
            number = next((n for n, chained in enumerate(self._chain) if chained.has(parameter)), -1)
            kinds.setdefault((number, state), optimizer.tensors[name].dtype)
        self.trained = {at.parameter for _, at in state_names(optimizer.tensors)}
        self._states = [
            {s: k for (m, s), k in sorted(kinds.items(), key=_by_state) if m == n} for n in range(len(self._chain))
        ]
        if distributed and not all(chained.part.distributed for chained in self._chain):
            raise RequestError(
                f"distrib_optim.pt holds the state of Adam alone; the checkpoint is of {optimizer.recognised}",
                hint="--optimizer plain, or none",
            )

    def of(self, chunks: _Chunks) -> list[Chain]:
        """The optimizers of a rank, in the order of the chain.

        Args:
            chunks: The tensors of its model chunks.
        """
        out = []
        for chained, states in zip(self._chain, self._states, strict=True):
            mine = [[t for t in chunk if t.trained and self._has(chained, t)] for chunk in chunks]
            parts = [mine]
            apart = self._args.get("overlap_param_gather_with_optimizer_step") is True
            if len(chunks) > 1 and apart and not chained.experts:
                parts = [[mine[0], *([] for _ in mine[1:])], [[], *mine[1:]]]  # the first model chunk has its own
            out += [self._one(chained, states, part) for part in parts]
        return out

    def _has(self, chained: ChainedOptimizer, tensor: LocalTensor) -> bool:
        return all(source in self.trained and chained.has(source) for source in tensor.sources)

    def _one(self, chained: ChainedOptimizer, states: Mapping[str, DType], chunks: _Chunks) -> Chain:
        counts = chained.part.algorithm == "Adam"
        return Chain(
            chained.groups,
            tuple(tuple(chunk) for chunk in chunks),
            states,
            self._args,
            self.groups.scaler,
            self.groups.storages,
            self.groups.common_step if counts else None,
            chained.experts is True,
        )

    def flat_file(self, name: str, pp: int, ep: int, chunks: _Chunks) -> ArchiveFile:
        """`distrib_optim.pt`: the first rank of each data-parallel group fills it, for dense parameters that of ep 0.

        Args:
            chunks: The tensors of the rank's model chunks.
        """
        file, chains = ArchiveFile(name), self.of(chunks)
        nodes: list[Node] = []
        for chain in chains:
            filled = chain.experts or ep == 0
            job = (self._args, self._layout, self._model.numel, pp)
            rules = functools.partial(Rules.of, *job, experts=chain.experts)
            nodes.append(flat_state(file, chain, rules) if filled else None)
        file.tree = nodes[0] if len(nodes) == 1 else nodes
        return file

    def buckets_matter(self) -> bool:
        """Whether positions in the buffers of the first stage depend on where buckets end."""
        chunks = [self._model.chunk(chunk=chunk) for chunk in range(self._layout.chunks)]
        return any(self._differ(chain) for chain in self.of(chunks))

    def _differ(self, chain: Chain) -> Iterator[bool] | bool:
        ends = (Rules(1), Rules(1, bucket_size=1))
        first = (parameters for chunk, _, parameters in buffers(chain) if chunk == 0)
        return any(len({flat_starts(mine, rules)[1] for rules in ends}) > 1 for mine in first)


def _by_state(item: tuple[tuple[int, str], DType]) -> tuple[int, str]:
    """Megatron's order of states: those of Adam first."""
    state = item[0][1]
    return (_ADAM.index(state) if state in _ADAM else len(_ADAM), state)
