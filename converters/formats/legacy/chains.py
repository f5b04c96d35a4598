"""The optimizers of a rank of a job that writes legacy checkpoints: which parameters each has, and how it cuts buffers.

Source: Megatron-Core, optimizer/__init__.py (`get_megatron_optimizer`), core_v0.16.1.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from converters.errors import RequestError
from converters.formats.containers.archive_out import ArchiveFile
from converters.formats.legacy.output import Chain, buffers, flat_places, flat_state
from converters.optimizer.groups import read_param_groups
from converters.parallel.buffers import Rules

if TYPE_CHECKING:
    from converters.dtypes import DType
    from converters.formats.base import Reader
    from converters.optimizer.state import OptimizerState
    from converters.parallel.local import LocalModel, LocalTensor
    from converters.pickles import Node

__all__ = ["Chains"]

_ADAM = ("param", "exp_avg", "exp_avg_sq")
_Chunks = Sequence[Sequence["LocalTensor"]]


class Chains:
    """The optimizers of every rank.

    Args:
        distributed: They write `distrib_optim.pt`.

    Attributes:
        trained: Canonical names of the tensors that there is state for.
        states: States of the optimizer in Megatron's order, with their element types.

    Raises:
        RequestError: There are states that the format has no place for.
    """

    def __init__(
        self, reader: Reader, found: OptimizerState, model: LocalModel, args: Mapping[str, Any], *, distributed: bool
    ) -> None:
        self._model, self._layout, self._args = model, model.layout, args
        self._groups, self._step = read_param_groups(reader), _step(reader)
        self.trained = {name.split(".", 3)[3] for name in found.tensors}
        kinds: dict[str, DType] = {}
        for name, info in found.tensors.items():
            kinds.setdefault(name.split(".", 3)[2], info.dtype)
        if distributed and kinds.keys() != set(_ADAM):
            raise RequestError(
                f"distrib_optim.pt holds {', '.join(_ADAM)}; the checkpoint has {', '.join(kinds)}",
                hint="--optimizer plain, or none",
            )
        places = {name: number for number, name in enumerate((*_ADAM, *sorted(kinds.keys() - set(_ADAM))))}
        self.states = {name: kinds[name] for name in places if name in kinds}

    def of(self, chunks: _Chunks) -> list[Chain]:
        """The optimizers of a rank: the dense one, and the experts' if they are spread over ranks.

        Args:
            chunks: The tensors of its model chunks.
        """
        trained = [[t for t in chunk if t.trained and self.trained.issuperset(t.sources)] for chunk in chunks]
        split = self._layout.ep > 1 and any(".mlp.experts." in name for name in self.trained)
        dense = [[t for t in chunk if not (split and t.expert)] for chunk in trained]
        groups = self._groups.dense if split else self._groups.merged()
        parts = [dense]
        if len(chunks) > 1 and self._args.get("overlap_param_gather_with_optimizer_step") is True:
            parts = [[dense[0], *([] for _ in dense[1:])], [[], *dense[1:]]]  # the first model chunk has its own
        made = [self._chain(groups, part) for part in parts]
        if split:
            biases = any(name.endswith(".bias") for name in self.trained if ".mlp.experts." in name)
            experts = [[t for t in chunk if t.expert] for chunk in trained]
            made.append(self._chain(self._groups.for_experts(biases=biases), experts))
        return made

    def _chain(self, groups: Sequence[dict[str, Node]], chunks: _Chunks) -> Chain:
        return Chain(
            tuple(groups),
            tuple(tuple(chunk) for chunk in chunks),
            self.states,
            self._args,
            self._groups.scaler,
            self._groups.storages,
            self._step,
        )

    def flat_file(self, name: str, pp: int, ep: int, chunks: _Chunks) -> ArchiveFile:
        """`distrib_optim.pt`: the first rank of each data-parallel group fills it, for dense parameters that of ep 0.

        Args:
            chunks: The tensors of the rank's model chunks.
        """
        file, chains = ArchiveFile(name), self.of(chunks)
        made: list[Node] = []
        for number, chain in enumerate(chains):
            experts = len(chains) > 1 and number == len(chains) - 1 and self._layout.ep > 1
            filled = experts or ep == 0
            job = (self._args, self._layout, self._model.numel, pp)
            rules = functools.partial(Rules.of, *job, experts=experts)
            made.append(flat_state(file, chain, rules) if filled else None)
        file.tree = made[0] if len(made) == 1 else made
        return file

    def buckets_matter(self) -> bool:
        """Whether positions in the buffers of the first stage depend on where buckets end."""
        chunks = [self._model.chunk(chunk=chunk) for chunk in range(self._layout.chunks)]
        return any(self._differ(chain) for chain in self.of(chunks))

    def _differ(self, chain: Chain) -> Iterator[bool] | bool:
        ends = (Rules(1), Rules(1, bucket_size=1))
        first = (parameters for chunk, _, parameters in buffers(chain) if chunk == 0)
        return any(len({flat_places(mine, rules)[1] for rules in ends}) > 1 for mine in first)


def _step(reader: Reader) -> int | None:
    """Steps done, if torch's own Adam was at work, which counts them parameter by parameter."""
    common = reader.catalog.common
    value = common.get("optimizer") if isinstance(common, Mapping) else None
    entries = value if isinstance(value, list) else [value, *(value.values() if isinstance(value, Mapping) else ())]
    for entry in entries:
        inner = entry.get("optimizer", entry) if isinstance(entry, Mapping) else {}
        held = inner.get("state") if isinstance(inner, Mapping) else None
        if isinstance(held, Mapping) and held.get("common_step") is not None:
            step = next((group.get("step") for group in read_param_groups(reader).dense), None)
            return step if isinstance(step, int) else None
    return None
