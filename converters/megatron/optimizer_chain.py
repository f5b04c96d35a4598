"""Which optimizer of a training job has which parameters: a job has one, or a chain of several, counted from 0.

    Adam                                          0 all parameters
    Adam, experts spread over ranks (ep > 1)      0 all but the experts     1 the experts
    Muon and Adam                                 0 matrices                1 the others
    overlap_param_gather_with_optimizer_step      0 first model chunk       1 the other chunks

Source: Megatron-Core, optimizer/__init__.py (`get_megatron_optimizer`), optimizer/optimizer.py (`ChainedOptimizer`), tags
core_v0.6.0 to core_v0.19.0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from converters.megatron.buffers import Misfit
from converters.words import counted

if TYPE_CHECKING:
    from collections.abc import Container, Sequence


@dataclass(frozen=True, slots=True)
class ChainMember:
    """One of the optimizers of a job, and the parameters that it has.

    Attributes:
        number: Its place in the chain, from 0. The only optimizer of a job has 0, too.
        names: Canonical names of the parameters that it may have; None for any.
        experts: Of these it has only the experts (True), only the others (False), or all (None).
        chunks: It has those of these model chunks of a pipeline rank; None for all chunks.
    """

    number: int = 0
    names: Container[str] | None = None
    experts: bool | None = None
    chunks: Container[int] | None = None

    def has(self, name: str, chunk: int | None = None) -> bool:
        """Whether it trains the parameter of a canonical name, in a model chunk."""
        in_chunk = chunk is None or self.chunks is None or chunk in self.chunks
        return in_chunk and (self.names is None or name in self.names) and self.experts in (None, is_expert(name))


def is_expert(name: str) -> bool:
    """Whether a tensor of this name belongs to a routed expert."""
    return ".mlp.experts." in name


def adam_chain(
    numbers: Sequence[int], chunks: int, label: str, *, experts_apart: bool, names: Container[str] | None = None
) -> list[ChainMember]:
    """The optimizers of a job that has one algorithm for all of these parameters.

    Args:
        numbers: Their places in the chain, ascending; those of other algorithms may stand before them.
        chunks: Model chunks of a pipeline rank.
        label: What they were found in, for an error.
        experts_apart: The last of several optimizers has the experts.
        names: Canonical names of the parameters; None for any.

    Raises:
        Misfit: Megatron makes no such chain.
    """
    if len(numbers) == 1:
        return [ChainMember(numbers[0], names)]
    dense, experts = (numbers[:-1], False) if experts_apart else (numbers, None)
    parts = [None] if len(dense) == 1 else [range(1), range(1, chunks)]
    if len(dense) != len(parts):
        raise Misfit(f"{label}: {counted(len(numbers), 'chained optimizer', verb='is/are')} not known to Megatron")
    members = [ChainMember(n, names, experts, part) for n, part in zip(dense, parts, strict=True)]
    return [*members, ChainMember(numbers[-1], names, True)] if experts_apart else members
