"""Runs checks on tensors, tile by tile: gatherers and scratch arrays of one thread.

checker = TileChecker([sources, sources])
checker.ask(question, tiles, "optimizer.state.param.X", "X")    # see `converters.io.questions`
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from converters.io.arithmetic import Arithmetic, examine_blocks
from converters.io.gather import Gatherer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    from converters.box import Box
    from converters.io.questions import Question
    from converters.io.sources import Sources

    Read = Callable[[Gatherer], NDArray[Any]]


class TileChecker:
    """Runs checks on tensors, tile by tile: gatherers and scratch arrays of one thread.

    Args:
        sources: What each tensor of a question is read from.
        moved: Called with the bytes of each tile that was read.
        check: Called before each tile; raises to stop.
    """

    def __init__(
        self,
        sources: Sequence[Sources],
        *,
        moved: Callable[[int], None] = lambda _: None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._moved, self._check = moved, check
        self._gatherers = [Gatherer(each) for each in sources]
        self._arithmetic = Arithmetic()

    def ask(self, question: Question, tiles: Iterable[Box], *names: str) -> None:
        """Asks a question of tensors that have the same coordinates."""
        for tile in tiles:
            self.ask_tile(question, tile, [partial(Gatherer.gather, name=name, box=tile) for name in names])

    def ask_tile(self, question: Question, tile: Box, reads: Sequence[Read]) -> None:
        """Asks a question of one tile.

        Args:
            question: What is asked.
            tile: Which elements these are.
            reads: Reads each array with its gatherer: as many elements as the tile has, as unsigned integers.
        """
        self._check()
        arrays = [np.ascontiguousarray(read(g)) for g, read in zip(self._gatherers, reads, strict=False)]
        self._moved(sum(array.nbytes for array in arrays))
        question.add(tile, examine_blocks(self._arithmetic, question, *arrays), arrays)

    def close(self) -> None:
        """Closes all files."""
        for gatherer in self._gatherers:
            gatherer.close()
