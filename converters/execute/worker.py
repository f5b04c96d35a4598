"""One worker of the engine: takes tiles of the source and scatters them into the output files."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from converters.box import run_starts, runs
from converters.crc import crc32
from converters.errors import RequestError
from converters.execute.destination import os_trouble
from converters.execute.disk import trouble_with, write_at
from converters.io.cast import Caster, lost_in_fp16, pinned
from converters.io.gather import Gatherer, OpenFiles
from converters.io.quantize import Loss, quantized
from converters.planning.plan import Op

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from numpy.typing import NDArray

    from converters.crc import Segment
    from converters.execute.publish import Staging, TeamStaging
    from converters.execute.work_sharing import Crew
    from converters.io.sources import Segments, Sources
    from converters.planning.job import Job
    from converters.planning.routes import Move
    from converters.planning.tasks import Task, Tile

Losses = dict[str, Loss]
"""What quantizing has changed, for each tensor."""


class Shared(Protocol):
    """What a worker needs of the run it belongs to."""

    job: Job
    staging: Staging | TeamStaging
    sources: Sources
    device: str
    unsure: bool
    crew: Crew

    def wrote(self, record: int, segment: Segment, log: Segments) -> None:
        """A segment of a record has been written: its checksum goes to the record's trailer, or to `log`."""

    def done(self, task: Task, segments: Segments, written: Segments, losses: Losses, underflowed: int) -> None:
        """A task is complete: its checksums and losses go to the journal."""


class Worker:
    """Buffers and open files of one thread. Nothing here grows with the model.

    Attributes:
        written: Checksums of what the current task wrote into sealed records.
        losses: What it lost by quantizing, for each tensor.
        underflowed: Elements of the current task that became zero in fp16.
    """

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._gatherer = Gatherer(shared.sources, pinned(shared.device))
        self._caster = Caster(shared.device)
        self._outputs = OpenFiles(_open_output, self._close_output)
        self.written: Segments = []
        self.losses: Losses = {}
        self.underflowed = 0

    def close(self) -> None:
        """Closes all files.

        Raises:
            DestinationError: An output could not be closed; some file systems say only then that writing failed.
        """
        self._gatherer.close()
        with trouble_with(self._shared.staging.folder, "writing to"):
            self._outputs.close()

    def _close_output(self, fd: int) -> None:
        try:
            os.close(fd)
        except OSError:
            self._shared.unsure = True
            raise

    def do(self, task: Task) -> None:
        """Does a task, and notes that; leaves it as it is if it is asked to stop before the end."""
        segments: Segments = []
        self._gatherer.segments = segments
        self.written, self.losses, self.underflowed = [], {}, 0
        job = self._shared.job
        for later in job.tasks[task.number + job.threads : task.number + job.threads + 1]:
            self._shared.sources.locate_soon(later.tiles)
        for tile in task.tiles:
            if self._shared.crew.should_stop():
                return
            elements = self._gatherer.gather(tile.source, tile.box)
            moves = list(self._shared.job.routes.reached(tile.source, tile.box))
            if any(move.op is Op.QUANTIZE for move in moves):
                self._quantize(tile, elements, moves)
                continue
            for move in moves:
                self._write(move, self._changed(tile, elements, move))
        self._shared.done(task, segments, self.written, self.losses, self.underflowed)

    def _quantize(self, tile: Tile, elements: NDArray[Any], moves: Iterable[Move]) -> None:
        """Writes a tile of whole blocks as codes, and their scales."""
        codes = self._gatherer.scratch(elements.size).reshape(elements.shape)
        scales, loss = quantized(elements, self._shared.job.sources[tile.source].dtype, tile.source, codes)
        self.losses[tile.source] = self.losses.get(tile.source, Loss()) + loss
        for move in moves:
            self._write(move, codes if move.op is Op.QUANTIZE else scales)

    def _changed(self, tile: Tile, elements: NDArray[Any], move: Move) -> NDArray[Any]:
        """The elements of a move as they are written, in C order."""
        values = elements[move.part.relative_to(tile.box.start).slices]
        if move.op is Op.TRANSPOSE:
            values = values.T
        info = self._shared.job.sources[tile.source]
        op = Op.SUBTRACT_ONE if info.shift else move.op
        if move.dtype != info.dtype or op in (Op.ADD_ONE, Op.SUBTRACT_ONE):
            into = self._gatherer.scratch(values.size * move.dtype.itemsize)
            stored = values
            values = self._caster.cast(values, info.dtype, move.dtype, op, into)
            too_large, too_small = (0, 0)
            if move.dtype.name == "float16":
                too_large, too_small = lost_in_fp16(stored, info.dtype, values)
            if too_large:
                raise RequestError(
                    f"{tile.source}: {too_large:,} elements are too large for float16, whose largest number is 65,504",
                    hint="--dtype bf16 or fp32, or leave --dtype out",
                    tensor=tile.source,
                )
            if op not in (Op.ADD_ONE, Op.SUBTRACT_ONE):
                self.underflowed += too_small
        elif not values.flags.c_contiguous:
            packed = self._gatherer.scratch(values.nbytes).view(values.dtype).reshape(values.shape)
            np.copyto(packed, values)
            values = packed
        return values

    def _write(self, move: Move, values: NDArray[Any]) -> None:
        size = move.dtype.itemsize
        first, length, outer = runs(move.landing, move.shape)
        data, at = values.reshape(-1).view(np.uint8).data, 0
        path = self._shared.staging.folder / self._shared.job.files[move.file].name
        try:
            fd = self._outputs.get(path)
            for start in run_starts(first, outer):
                piece, inside = data[at : at + length * size], start * size
                write_at(fd, piece, move.offset + inside)
                if move.record >= 0:
                    segment = (move.base + inside, len(piece), crc32(piece))
                    self._shared.wrote(move.record, segment, self.written)
                at += length * size
        except OSError as error:
            raise os_trouble(error, path, "writing") from error


def _open_output(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
