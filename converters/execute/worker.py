"""A thread of the engine: takes tiles of the source and scatters them into the output files."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from converters.box import run_starts, runs
from converters.crc import crc32
from converters.errors import RequestError
from converters.execute.disk import os_trouble, trouble_with, write_at
from converters.io.cast import LARGEST, Caster, lost_in_cast, pinned
from converters.io.gather import Gatherer, OpenFiles
from converters.io.quantize import Loss, quantized
from converters.planning.plan import Op

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from numpy.typing import NDArray

    from converters.execute.run import Run
    from converters.io.sources import Segments
    from converters.planning.routes import Move
    from converters.planning.tasks import Task, Tile

Losses = dict[str, Loss]
"""What quantizing has changed, for each tensor."""


def add_losses(total: Losses, more: Losses) -> None:
    """Adds those of more elements."""
    for name, loss in more.items():
        total[name] = total.get(name, Loss()) + loss


@dataclass
class Outcome:
    """What complete tasks have done, as the journal keeps it.

    Attributes:
        tasks: The tasks.
        sums: Checksums of what they read.
        written: Checksums of what they wrote into sealed records.
        losses: What they lost by quantizing.
        underflowed: Elements that became zero in fp16.
    """

    tasks: list[Task] = field(default_factory=list)
    sums: Segments = field(default_factory=list)
    written: Segments = field(default_factory=list)
    losses: Losses = field(default_factory=dict)
    underflowed: int = 0

    def add(self, more: Outcome) -> None:
        """Adds that of other tasks."""
        self.tasks += more.tasks
        self.sums += more.sums
        self.written += more.written
        add_losses(self.losses, more.losses)
        self.underflowed += more.underflowed


class TileWriter:
    """Buffers and open files of one thread, and what its current task has done. Nothing here grows with the model."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._gatherer = Gatherer(run.sources, pinned(run.device))
        self._caster = Caster(run.device)
        self._outputs = OpenFiles(_open_output, self._close_output)
        self._outcome = Outcome()

    def close(self) -> None:
        """Closes all files.

        Raises:
            DestinationError: An output could not be closed; some file systems say only then that writing failed.
        """
        self._gatherer.close()
        with trouble_with(self._run.folder, "writing to"):
            self._outputs.close()

    def _close_output(self, fd: int) -> None:
        try:
            os.close(fd)
        except OSError:
            self._run.unsure = True
            raise

    def do(self, task: Task) -> None:
        """Does a task, and notes that; leaves it as it is if it is asked to stop before the end."""
        self._outcome = Outcome([task])
        self._gatherer.segments = self._outcome.sums
        job = self._run.job
        for later in job.tasks[task.number + job.threads : task.number + job.threads + 1]:
            self._run.sources.locate_soon(later.tiles)
        for tile in task.tiles:
            if self._run.sharing.should_stop():
                return
            elements = self._gatherer.gather(tile.source, tile.box)
            moves = list(self._run.job.routes.reached(tile.source, tile.box))
            if any(move.op is Op.QUANTIZE for move in moves):
                self._quantize(tile, elements, moves)
                continue
            for move in moves:
                self._write(move, self._changed(tile, elements, move))
        self._run.done(task, self._outcome)

    def _quantize(self, tile: Tile, elements: NDArray[Any], moves: Iterable[Move]) -> None:
        """Writes a tile of whole blocks as codes, and their scales."""
        codes = self._gatherer.scratch(elements.size).reshape(elements.shape)
        scales, loss = quantized(elements, self._run.job.sources[tile.source].dtype, tile.source, codes)
        add_losses(self._outcome.losses, {tile.source: loss})
        for move in moves:
            self._write(move, codes if move.op is Op.QUANTIZE else scales)

    def _changed(self, tile: Tile, elements: NDArray[Any], move: Move) -> NDArray[Any]:
        """The elements of a move as they are written, in C order."""
        values = elements[move.source_box.relative_to(tile.box.start).slices]
        if move.op is Op.TRANSPOSE:
            values = values.T
        info = self._run.job.sources[tile.source]
        op = Op.SUBTRACT_ONE if info.shift else move.op
        if move.dtype != info.dtype or op in (Op.ADD_ONE, Op.SUBTRACT_ONE):
            into = self._gatherer.scratch(values.size * move.dtype.itemsize)
            stored = values
            values = self._caster.cast(values, info.dtype, move.dtype, op, into)
            too_large, too_small = lost_in_cast(stored, info.dtype, values, move.dtype)
            if too_large:
                limit = f"{move.dtype.name}, whose largest number is {LARGEST[move.dtype.name]}"
                raise RequestError(
                    f"{tile.source}: {too_large:,} elements are too large for {limit}",
                    hint=f"--dtype {'bf16 or ' if move.dtype.name == 'float16' else ''}fp32, or leave --dtype out",
                    tensor=tile.source,
                )
            if op not in (Op.ADD_ONE, Op.SUBTRACT_ONE):
                self._outcome.underflowed += too_small
        elif not values.flags.c_contiguous:
            packed = self._gatherer.scratch(values.nbytes).view(values.dtype).reshape(values.shape)
            np.copyto(packed, values)
            values = packed
        return values

    def _write(self, move: Move, values: NDArray[Any]) -> None:
        size = move.dtype.itemsize
        first, length, outer = runs(move.target_box, move.shape)
        data, at = values.reshape(-1).view(np.uint8).data, 0
        path = self._run.folder / self._run.job.files[move.file].name
        try:
            fd = self._outputs.get(path)
            for start in run_starts(first, outer):
                run_bytes, inside = data[at : at + length * size], start * size
                write_at(fd, run_bytes, move.offset + inside)
                if move.record >= 0:
                    segment = (move.base + inside, len(run_bytes), crc32(run_bytes))
                    self._run.written.add(move.record, segment)
                    self._outcome.written.append((move.record, *segment))
                at += length * size
        except OSError as error:
            raise os_trouble(error, path, "writing") from error


def _open_output(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
