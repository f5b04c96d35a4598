"""The proof that optimizer state belongs to the parameters whose names it was given.

Megatron copies the fp32 master weights into the model's weights after every step, so each master weight, rounded to the
weight's type, is the weight (a number in the middle of two may have become the upper one: `arithmetic.unequal`). That holds
bit for bit, and for the wrong order of parameters it fails in nearly every
element. It is also how the `fully_reshardable` files of Megatron-Core 0.15.0 to 0.19.0 that were saved shifted are found.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from converters.box import contiguous_tiles
from converters.errors import IntegrityError
from converters.io.block_runner import TileChecker
from converters.io.questions import RoundsTo
from converters.io.sources import Sources
from converters.names import MASTER, fold, folded, listed_lines, master_name, state_names
from converters.optimizer.storage import common_elements, first_elements, sample_evenly

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from converters.catalog import Catalog, TensorInfo
    from converters.formats.base import Reader

_TIED = re.compile(r"embedding\.word_embeddings\.weight \(copy of pp \d+(?:, chunk \d+)?\)")
_TILE = 1 << 18  # elements


@dataclass(frozen=True, slots=True)
class RoundingTask:
    """Two tensors of which the first, rounded to the type of the second, must be the second.

    Attributes:
        number: Its place in the list.
        tested: What is rounded: a master weight, or a copy of a tensor.
        expected: What it must round to: the parameter.
        nbytes: What is read of both.
    """

    number: int
    tested: str
    expected: str
    nbytes: int


class RoundingProof:
    """The proof, as a list of tasks for a `WorkSharing` to do, that tensors rounded to the types of others are these others.

    Args:
        reader: The checkpoint.
        tensors: All that are named by `pairs`.
        pairs: `(tested, expected)`: a tensor, and what it must round to; of one type they must be equal.
        claim: What is proved.

    Attributes:
        tasks: One for each pair.
    """

    def __init__(
        self, reader: Reader, tensors: Mapping[str, TensorInfo], pairs: Sequence[tuple[str, str]], claim: str
    ) -> None:
        self._reader = reader
        self.tensors = tensors
        self.tasks = [
            RoundingTask(number, tested, expected, tensors[tested].nbytes + tensors[expected].nbytes)
            for number, (tested, expected) in enumerate(pairs)
        ]
        self.claim = claim

    @property
    def nbytes(self) -> int:
        """Bytes that the proof reads."""
        return sum(task.nbytes for task in self.tasks)

    @cached_property
    def sources(self) -> Sources:
        """What all workers read from."""
        return Sources(self._reader, self.tensors)

    def worker(self) -> MasterWorker:
        """What one thread compares with."""
        return MasterWorker(self.sources)


class Masters(RoundingProof):
    """The proof that every master weight rounds to the weight stored beside it.

    Master weights that are the weights, or are computed from them, prove nothing and are not looked at. Copies of a tied
    embedding that later pipeline stages keep must equal the first stage's, too: only that is read.

    Args:
        reader: The checkpoint.
        tensors: Canonical optimizer tensors; only `optimizer.state.param.*` are looked at.

    Attributes:
        tasks: One for each parameter that has a master weight, and for each copy of the embedding.
    """

    def __init__(self, reader: Reader, tensors: Mapping[str, TensorInfo]) -> None:
        weights = reader.catalog.weights
        names = [weight.name for weight in _provable(reader.catalog, tensors).values()]
        self._copies = {k: c for k, c in reader.catalog.copies.items() if _TIED.fullmatch(k) and c.name in weights}
        pairs = [(master_name(name), name) for name in names]
        compared = {master: tensors[master] for master, _ in pairs} | {n: weights[n] for n in names}
        for label, copy in self._copies.items():
            compared |= {label: replace(copy, name=label), copy.name: weights[copy.name]}
        pairs += [(label, copy.name) for label, copy in self._copies.items()]
        claim = "that master weights round to the weights" if names else "that copies of the embedding are equal"
        super().__init__(reader, compared, pairs, claim)

    @classmethod
    def needed(cls, reader: Reader, tensors: Mapping[str, TensorInfo]) -> Masters | None:
        """The proof, or None if there is nothing to prove."""
        proof = cls(reader, tensors)
        return proof if proof.tasks else None

    def judge(self, results: Mapping[int, bool]) -> None:
        """Draws the conclusion.

        Args:
            results: Whether they agree, by the numbers of the tasks.

        Raises:
            IntegrityError: Some do not; they are named.
        """
        failed = [task for task in self.tasks if not results[task.number]]
        apart = [task.tested for task in failed if task.tested in self._copies]
        if apart:
            raise IntegrityError(
                f"{apart[0]} differs from the one on the first stage, though the model ties them",
                details=apart[1:8],
                hint="Megatron keeps both equal: one of the files is damaged, or belongs to another save",
                tensor=self._copies[apart[0]].name,
            )
        wrong = [task.expected for task in failed]
        if wrong:
            raise refusal(wrong, self._reader.catalog, "master weights of the optimizer do not round to the weights")


class MasterWorker:
    """Compares master weights with weights: all of both, in tiles; what it reads is checked.

    Args:
        sources: Weights and master weights.
    """

    def __init__(self, sources: Sources) -> None:
        self._tensors = sources.tensors
        self._checker = TileChecker([sources, sources])

    def do(self, task: RoundingTask, *, sample: bool = False) -> bool:
        """Whether what is tested rounds to what is expected; `sample` looks only at the first elements."""
        tested, expected = self._tensors[task.tested], self._tensors[task.expected]
        if len(tested.shape) != len(expected.shape) or tested.shape[1:] != expected.shape[1:]:
            return False
        question = RoundsTo(tested, expected)
        every_tile = contiguous_tiles(common_elements(tested, expected), _TILE)
        for tile in [first_elements(tested, expected)] if sample else every_tile:
            self._checker.ask(question, [tile], task.tested, task.expected)
            if question.wrong:
                return False
        return True

    def close(self) -> None:
        """Closes what is open."""
        self._checker.close()


def _provable(catalog: Catalog, tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Master weights that values can show to be those of their weights: they are not the weights, nor made from them."""
    weights = catalog.weights
    return {
        name: weight
        for name, parts in state_names(tensors)
        if parts.state == MASTER
        and (weight := weights.get(parts.parameter)) is not None
        and (info := tensors[name]).remainders is None
        and info.dtype.floating
        and info.parts != weight.parts
    }


def proved_when_read(catalog: Catalog, tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """The optimizer's tensors with master weights that are compared with their weights whenever they are read.

    For callers that hand tensors on without having looked at all of them before. It reads a seventh more, and skips no
    element.

    Args:
        catalog: The checkpoint's.
        tensors: Canonical optimizer tensors.
    """
    provable = _provable(catalog, tensors)
    return {n: replace(info, rounds_to=provable[n]) if n in provable else info for n, info in tensors.items()}


def prove_masters(reader: Reader, tensors: Mapping[str, TensorInfo]) -> None:
    """Checks for every master weight that it rounds to the weight stored beside it, in this thread.

    Args:
        reader: The checkpoint.
        tensors: Canonical optimizer tensors.

    Raises:
        IntegrityError: Some do not; they are named.
        FormatError: A record cannot be read.
    """
    proof = Masters(reader, tensors)
    with contextlib.closing(proof.worker()) as worker:
        proof.judge({task.number: worker.do(task) for task in proof.tasks})


def refusal(wrong: list[str], catalog: Catalog, message: str) -> IntegrityError:
    """The error that names parameters whose master weights are not theirs."""
    details = listed_lines(folded(wrong), 12)
    hint = "convert without the optimizer state (--optimizer none), or start from another iteration"
    if catalog.content.get("distrib_optim_sharding_type") == "fully_reshardable":
        details.append("Megatron-Core 0.15.0 to 0.19.0 saved such files shifted when there were several buckets")
    return IntegrityError(f"{message}: {len(wrong)} do not match", details=details, hint=hint, tensor=wrong[0])


def mismatches(reader: Reader, tensors: Mapping[str, TensorInfo]) -> list[str]:
    """Names of parameters whose master weights do not round to the weights, in a sample: some tensors of each kind.

    Args:
        reader: The checkpoint.
        tensors: Canonical optimizer tensors.
    """
    proof = Masters(reader, tensors)
    tasks = {task.expected: task for task in proof.tasks}
    with contextlib.closing(proof.worker()) as worker:
        chosen = [name for _, members in fold(list(tasks)) for name in sample_evenly(members)]
        return [name for name in chosen if not worker.do(tasks[name], sample=True)]
