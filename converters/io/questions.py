"""Checks that compare elements of tensors, tile by tile.

    checker = TileChecker([sources, sources])               # one for each thread
    question = RoundsTo(master, weight)
    checker.ask(question, tiles, "optimizer.state.param.X", "X")
    question.wrong, question.first

`verify`, `diff` and both proofs of master weights (before writing, and while reading) are questions of this form: `__call__`
computes numbers of a block, `add` takes the numbers of a tile's blocks into the answer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from converters.errors import IntegrityError
from converters.io.arithmetic import BLOCK, unequal, widened
from converters.names import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from converters.box import Box
    from converters.catalog import TensorInfo
    from converters.io.arithmetic import Arithmetic


class Question(Protocol):
    """What is asked of the elements of one or several tensors."""

    @property
    def columns(self) -> int:
        """How many numbers there are of a block."""

    def __call__(self, on: Arithmetic, *bits: Any) -> Sequence[Any]:
        """Numbers of a block; see `converters.io.arithmetic`."""

    def add(self, tile: Box, rows: NDArray[np.float64], arrays: Sequence[NDArray[Any]]) -> None:
        """Takes in a tile.

        Args:
            tile: Which elements these are.
            rows: The numbers of its blocks.
            arrays: The elements as unsigned integers, of each tensor.
        """


class Together:
    """Several questions of the same elements, which are read once.

    Args:
        questions: The questions, in the order of their columns.
    """

    def __init__(self, questions: Sequence[Question]) -> None:
        self._questions = questions
        self.columns = sum(question.columns for question in questions)

    def __call__(self, on: Arithmetic, *bits: Any) -> Sequence[Any]:
        """See `Question`."""
        return [number for question in self._questions for number in question(on, *bits)] or [0]

    def add(self, tile: Box, rows: NDArray[np.float64], arrays: Sequence[NDArray[Any]]) -> None:
        """See `Question`."""
        at = 0
        for question in self._questions if len(rows) else ():
            question.add(tile, rows[:, at : at + question.columns], arrays)
            at += question.columns


@dataclass
class RoundsTo:
    """How many elements of a tensor, rounded to the type of another one, are not the other's; of one type: are not equal.

    Attributes:
        tensor: Whose elements are rounded.
        other: What they must be.
        wrong: How many are not.
        first: Index of the first that is not, with both values.
    """

    tensor: TensorInfo
    other: TensorInfo
    wrong: int = 0
    first: tuple[list[int], float, float] | None = field(default=None, compare=False)

    @property
    def columns(self) -> int:
        """See `Question`."""
        return 2

    def __call__(self, on: Arithmetic, *bits: Any) -> Sequence[Any]:
        """See `Question`."""
        have, want = bits
        return unequal(on, have, want, self.tensor.dtype, self.other.dtype, coarse=self.tensor.coarse)

    def add(self, tile: Box, rows: NDArray[np.float64], arrays: Sequence[NDArray[Any]]) -> None:
        """See `Question`."""
        wrong = int(rows[:, 0].sum())
        if not wrong:
            return
        self.wrong += wrong
        block = int((rows[:, 0] > 0).argmax())
        at = block * BLOCK + int(rows[block, 1])
        inside = np.unravel_index(at, tile.shape) if tile.shape else ()
        index = [int(start + i) for start, i in zip(tile.start, inside, strict=True)]
        if self.first is None or index < self.first[0]:
            both = zip(arrays, (self.tensor, self.other), strict=True)
            one, other = (_number(bits.reshape(-1)[at : at + 1], info) for bits, info in both)
            self.first = index, one, other

    def refuse(self, numel: int) -> None:
        """Raises an error with the numbers if an element is wrong, of a master weight and its weight.

        Args:
            numel: How many were looked at.

        Raises:
            IntegrityError: One is.
        """
        if self.first is None:
            return
        index, master, weight = self.first
        raise IntegrityError(
            "master weights of the optimizer do not round to the weights: "
            f"{printable(self.tensor.name)} is not that of {printable(self.other.name)}",
            details=[
                f"{self.wrong:,} of {numel:,} elements, first at {index}: the master weight is {master:.9g}, "
                f"the weight {weight:.9g}"
            ],
            hint="distckpt verify names all that are wrong; leave the optimizer out, or start from another iteration",
            tensor=self.other.name,
        )


def _number(bits: NDArray[Any], info: TensorInfo) -> float:
    return float(widened(bits, info.dtype)[0].real)
