"""The work of a job in units. A list of a hundred thousand tasks is kept as arrays; a task is made when it is taken."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from converters.box import Box, contiguous_tiles
from converters.lazy import LazySequence

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

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


class Tasks(LazySequence[Task]):
    """The tasks of a job, kept as columns: small tiles put together, in order; the same for any number of workers.

    Args:
        sources: The tensors that are cut into tiles.
        routes: Where their elements go.
        tile_bytes: Size of a tile.
    """

    def __init__(self, sources: Mapping[str, TensorInfo], routes: Routes, tile_bytes: int) -> None:
        self._sources, self._names, self._tile_bytes = sources, list(sources), tile_bytes
        tiles: list[int] = []  # position of each tile's source, and which of its tiles it is
        tasks = [
            0,
            0,
            0,
        ]  # one past the last tile and the last file of each, and the bytes that it writes; before the first
        task_files: list[int] = []
        files: set[int] = set()
        task_bytes, written = 0, 0

        def close() -> None:
            task_files.extend(sorted(files))
            tasks.extend((len(tiles) // 2, len(task_files), written))

        for position, (name, tensor) in enumerate(sources.items()):
            for number, (box, size) in enumerate(_tiles(tensor.shape, tensor.dtype.itemsize, tile_bytes, tensor.unit)):
                reached, output_bytes = routes.touched(name, box)
                if not output_bytes:
                    continue  # wholly dropped, padding rows for example
                if task_bytes and task_bytes + size > tile_bytes:
                    close()
                    files, task_bytes, written = set(), 0, 0
                tiles.extend((position, number))
                task_bytes += size
                files.update(reached)
                written += output_bytes
        if task_bytes:
            close()
        self._tiles = np.asarray(tiles, np.int32).reshape(-1, 2)
        self._task_files = np.asarray(task_files, np.int32)
        self._tasks = np.asarray(tasks, np.int64).reshape(-1, 3)

    def __len__(self) -> int:
        return len(self._tasks) - 1

    def _item(self, number: int) -> Task:
        (first_tile, first_file, _), (end_tile, end_file, nbytes) = self._tasks[number : number + 2].tolist()
        tiles = []
        for position, tile in self._tiles[first_tile:end_tile].tolist():
            name = self._names[position]
            tensor = self._sources[name]
            boxes = _tiles(tensor.shape, tensor.dtype.itemsize, self._tile_bytes, tensor.unit)
            tiles.append(Tile(name, boxes[tile][0]))
        return Task(number, tuple(tiles), frozenset(self._task_files[first_file:end_file].tolist()), nbytes)


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
