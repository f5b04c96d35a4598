"""The work of a job in units. A list of a hundred thousand tasks is kept as arrays; a task is made when it is taken."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from converters.box import Box, contiguous_tiles
from converters.lazy import LazySequence

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from numpy.typing import NDArray

    from converters.catalog import TensorInfo
    from converters.planning.routes import Routes


@dataclass(frozen=True, slots=True)
class Tile:
    """A box of a source tensor, in its coordinates; contiguous, unless whole blocks of a wide matrix are needed."""

    source: str
    box: Box


@dataclass(frozen=True, slots=True)
class Task:
    """Tiles that one worker does in one go: one large tile, or several small tensors.

    Attributes:
        number: Position in the job; what the journal records.
        tiles: In order.
        files: Positions of the output files it writes to.
        nbytes: Bytes it writes.
    """

    number: int
    tiles: tuple[Tile, ...]
    files: frozenset[int]
    nbytes: int


@dataclass(frozen=True)
class TaskTable:
    """Tasks as columns.

    Attributes:
        source: (tiles,) position of the tile's source among the job's.
        tile: (tiles,) which of that source's tiles it is.
        ends: (tasks,) one past the last tile of each task.
        nbytes: (tasks,) bytes it writes.
        files: Positions of the output files it writes to, those of one task after those of another.
        file_ends: (tasks,) one past the last of these.
    """

    source: NDArray[Any]
    tile: NDArray[Any]
    ends: NDArray[Any]
    nbytes: NDArray[Any]
    files: NDArray[Any]
    file_ends: NDArray[Any]

    @classmethod
    def make(cls, sources: Mapping[str, TensorInfo], routes: Routes, tile_bytes: int) -> TaskTable:
        """Cuts the sources into tiles and puts small ones together, in order; the same for any number of workers."""
        source: list[int] = []
        tile: list[int] = []
        ends: list[int] = []
        nbytes: list[int] = []
        listed: list[int] = []
        file_ends: list[int] = []
        files: set[int] = set()
        task_bytes, written = 0, 0

        def close() -> None:
            ends.append(len(source))
            nbytes.append(written)
            listed.extend(sorted(files))
            file_ends.append(len(listed))

        for position, (name, tensor) in enumerate(sources.items()):
            for number, (box, size) in enumerate(_tiles(tensor.shape, tensor.dtype.itemsize, tile_bytes, tensor.unit)):
                reached, output_bytes = routes.touched(name, box)
                if not output_bytes:
                    continue  # wholly dropped, padding rows for example
                if task_bytes and task_bytes + size > tile_bytes:
                    close()
                    files, task_bytes, written = set(), 0, 0
                source.append(position)
                tile.append(number)
                task_bytes += size
                files.update(reached)
                written += output_bytes
        if task_bytes:
            close()
        columns = (source, tile, ends, nbytes, listed, file_ends)
        return cls(*(np.asarray(c, np.int64 if c is nbytes else np.int32) for c in columns))


class Tasks(LazySequence[Task]):
    """The tasks of a job, made when they are taken."""

    def __init__(self, table: TaskTable, sources: Mapping[str, TensorInfo], tile_bytes: int) -> None:
        self._table, self._sources, self._tile_bytes = table, sources, tile_bytes

    def __len__(self) -> int:
        return len(self._table.ends)

    @cached_property
    def _names(self) -> list[str]:
        return list(self._sources)

    def _item(self, number: int) -> Task:
        table = self._table
        tiles, files = (
            slice(int(ends[number - 1]) if number else 0, int(ends[number])) for ends in (table.ends, table.file_ends)
        )
        task_tiles = []
        for position, tile in zip(table.source[tiles].tolist(), table.tile[tiles].tolist(), strict=True):
            name = self._names[position]
            tensor = self._sources[name]
            boxes = _tiles(tensor.shape, tensor.dtype.itemsize, self._tile_bytes, tensor.unit)
            task_tiles.append(Tile(name, boxes[tile][0]))
        return Task(number, tuple(task_tiles), frozenset(table.files[files].tolist()), int(table.nbytes[number]))


@lru_cache(maxsize=256)
def _tiles(shape: tuple[int, ...], itemsize: int, tile_bytes: int, unit: int) -> list[tuple[Box, int]]:
    """The tiles of a tensor, with the bytes of each."""
    whole, most = Box.whole(shape), max(1, tile_bytes // itemsize)
    if whole.volume <= most:
        boxes: Iterable[Box] = (whole,)
    else:
        boxes = contiguous_tiles(whole, most) if unit == 1 else _whole_blocks(shape, most, unit)
    return [(box, box.volume * itemsize) for box in boxes]


def _whole_blocks(shape: tuple[int, ...], most: int, unit: int) -> Iterator[Box]:
    """Tiles of a matrix that cut none of its square blocks: many rows of blocks, or where one is too large, parts of it."""
    rows, columns = shape
    width = min(columns, max(1, most // unit // unit) * unit)
    height = max(1, most // width // unit) * unit
    for row in range(0, rows, height):
        for column in range(0, columns, width):
            yield Box((row, column), (min(height, rows - row), min(width, columns - column)))
