"""Reads two checkpoints tile by tile, and measures the difference of every pair of tensors.

    A  pieces in its files --gather--> tile --.
                                               compare -> a few numbers, added up in the order of the tiles
    B  pieces in its files --gather--> tile --'

A worker holds a tile of each side; nothing grows with the model. Every byte is read once, and each
record's checksum is compared on the way.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any

from converters.box import Box, contiguous_tiles
from converters.comparison.values import Difference, DifferenceOf, Spot, prepared, prepared_type
from converters.errors import FormatError, IntegrityError, RequestError
from converters.events import Moved
from converters.io.arithmetic import BLOCK
from converters.io.block_runner import TileChecker
from converters.io.gather import Gatherer
from converters.io.sources import Sources
from converters.names import quoted
from converters.planning.plan import Op, reversed_copy
from converters.planning.routes import target_box_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from converters.catalog import TensorInfo
    from converters.comparison.compare import DiffPlan
    from converters.comparison.pairs import Matching, Side
    from converters.execute.work_sharing import WorkSharing
    from converters.planning.plan import Copy

MIB = 1 << 20
_TILE = 2 * MIB
_SMALLEST_TILE = 64 << 10
_FEWEST_ITEMS = 256  # so that workers and ranks get about the same
_ITEM_BYTES = (64 << 10, 64 * MIB)  # bytes that a worker takes at a time, at least and at most
_BLOCKS = 12 * 8 * BLOCK  # bytes of scratch that `DifferenceOf` needs for a block


@dataclass(frozen=True, slots=True)
class WorkItem:
    """The work of one worker at a time: small pairs of tensors, or a part of a large one.

    Attributes:
        number: Among all.
        parts: Number of the pair, of one of its copies (those of its padding follow), and the box of the copy's target.
        nbytes: Bytes of both sides.
    """

    number: int
    parts: tuple[tuple[int, int, Box], ...]
    nbytes: int


def tile_size(threads: int, max_memory: int) -> tuple[int, int]:
    """Bytes of a tile, and how many workers fit into `max_memory` bytes of buffers.

    Raises:
        RequestError: Not even one does.
    """
    # a tile and a scratch for each side, and both sides prepared; the same for any number of workers
    tile = min(_TILE, (max_memory - _BLOCKS) // 6 // 4096 * 4096)
    if tile < _SMALLEST_TILE:
        raise RequestError(
            f"--max-memory of {max_memory:,} bytes is too small: one worker needs {_BLOCKS + 6 * _SMALLEST_TILE:,} bytes",
            hint="give at least 8MiB; 64MiB is the default",
        )
    return tile, max(1, min(threads, max_memory // (6 * tile + _BLOCKS)))


def split_work(matching: Matching, sides: tuple[Side, Side]) -> list[WorkItem]:
    """Cuts the work into parts of about equal size, in the order of the pairs; the same on every rank."""
    side = matching.target_side
    source, target = sides[1 - side].tensors, matching.tensors_of(sides[side])

    def size_of(copy: Copy) -> int:
        return source[copy.source].dtype.itemsize + target[copy.target].dtype.itemsize

    total = sum(c.target_box.volume * size_of(c) for pair in matching.pairs for c in (*pair.copies, *pair.padding))
    most = min(max(total // _FEWEST_ITEMS, _ITEM_BYTES[0]), _ITEM_BYTES[1])
    work: list[WorkItem] = []
    parts: list[tuple[int, int, Box]] = []
    item_bytes = 0
    for number, pair in enumerate(matching.pairs):
        for index, copy in enumerate((*pair.copies, *pair.padding)):
            size = size_of(copy)
            for box in _cut(copy, copy.target_box, max(1, most // size), target[copy.target]):
                nbytes = box.volume * size
                if parts and item_bytes + nbytes > most:
                    work.append(WorkItem(len(work), tuple(parts), item_bytes))
                    parts, item_bytes = [], 0
                parts.append((number, index, box))
                item_bytes += nbytes
    if parts:
        work.append(WorkItem(len(work), tuple(parts), item_bytes))
    return work


def _cut(copy: Copy, box: Box, most: int, target: TensorInfo) -> Iterator[Box]:
    """Cuts a box of a copy's target where both sides are read in long runs: along rows, of the matrix that is stored."""
    if copy.op is not Op.TRANSPOSE or not all(chunk.transposed for chunk in target.chunks()):
        yield from contiguous_tiles(box, most)
        return
    first, second = _axes(copy)
    for columns in box.split(second, max(1, most // box.shape[first])):
        yield from columns.split(first, most)


def _axes(copy: Copy) -> tuple[int, int]:
    """The axes of a transposed copy's target that change places."""
    shape = copy.target_box.shape
    first, second = [axis for axis, n in enumerate(shape) if n > 1 or len(shape) == 2][:2]
    return first, second


def read_values(
    sharing: WorkSharing, plan: DiffPlan
) -> tuple[list[tuple[Difference, Difference]], tuple[int, int], int]:
    """Compares the elements of all pairs.

    Returns:
        For each pair the difference of its elements and that of its padding; the bytes read of A and of B; how many records
        of both were compared with their checksums.

    Raises:
        IntegrityError: A record does not match its checksum; the error says of which side.
        FormatError: A file cannot be read.
        Interrupted: Asked to stop.
    """
    reading = _Reading(sharing, plan)
    results = sharing.map(plan.work, lambda: _Worker(reading))
    numbers = reading.complete()
    numbers_by_rank = sharing.gather(numbers) or [numbers]
    differences = [(Difference(), Difference()) for _ in plan.matching.pairs]
    for number in sorted(results):
        for pair, is_padding, values in results[number]:
            differences[pair][is_padding].add(_unpacked(values))
    bytes_a, bytes_b, records = (sum(column) for column in zip(*numbers_by_rank, strict=True))
    return differences, (bytes_a, bytes_b), records


class _Reading:
    """Both checkpoints as all workers of a process read them."""

    def __init__(self, sharing: WorkSharing, plan: DiffPlan) -> None:
        self.sharing, self.plan = sharing, plan
        self.tensors = [plan.matching.tensors_of(side) for side in plan.sides]
        self.sources = [Sources(s.reader, tensors) for s, tensors in zip(plan.sides, self.tensors, strict=True)]

    def complete(self) -> list[int]:
        """Reads the rest of records that were read in part: bytes read of A and of B, and records compared."""
        for side, sources in zip(self.plan.sides, self.sources, strict=True):
            gatherer = Gatherer(sources)
            try:
                with blaming(side):
                    sources.complete(gatherer, self.sharing.check)
            finally:
                gatherer.close()
        return [*(sources.bytes_read for sources in self.sources), sum(s.records_checked for s in self.sources)]

    def read(self, side: int, gatherer: Gatherer, name: str, box: Box) -> NDArray[Any]:
        """The elements of a box of a tensor of A (0) or B (1), as unsigned integers."""
        with blaming(self.plan.sides[side]):
            bits = gatherer.gather(name, box)
        self.sharing.report(Moved(bits.nbytes))
        return bits


@contextmanager
def blaming(side: Side) -> Iterator[None]:
    """Names the checkpoint in errors of reading it."""
    try:
        yield
    except (FormatError, IntegrityError) as error:
        damaged = isinstance(error, IntegrityError)
        raise type(error)(
            f"{side.label} {'is damaged' if damaged else 'cannot be read'}: {error.message}",
            details=error.details,
            hint=f"distckpt verify {quoted(side.catalog.root)} says what else is" if damaged else error.hint,
            tensor=error.tensor,
        ) from error


class _Worker:
    """Buffers and open files of one thread."""

    def __init__(self, reading: _Reading) -> None:
        self._reading, self._plan = reading, reading.plan
        self._checker = TileChecker(reading.sources, check=reading.sharing.check)
        self.close = self._checker.close

    def do(self, task: WorkItem) -> list[Any]:
        """See `read_values`; plain data, as it may travel to another rank."""
        differences: dict[tuple[int, int], Difference] = {}
        for number, index, box in task.parts:
            pair = self._plan.matching.pairs[number]
            is_padding = int(index >= len(pair.copies))
            total = differences.setdefault((number, is_padding), Difference())
            copy = (*pair.copies, *pair.padding)[index]
            for tile in self._tiles(copy, box):
                self._compare(copy, tile, total)
        return [(*key, astuple(difference)) for key, difference in differences.items()]

    def _tiles(self, copy: Copy, box: Box) -> Iterator[Box]:
        source, target = self._infos(copy)
        size = max(source.dtype.itemsize, target.dtype.itemsize)
        most = max(1, self._plan.tile_bytes // size)
        if copy.op is not Op.TRANSPOSE or all(chunk.transposed for chunk in target.chunks()):
            yield from _cut(copy, box, most, target)
            return
        side = max(1, math.isqrt(most))  # rows of one are columns of the other: squares keep the runs of both long
        first, second = _axes(copy)
        for rows in box.split(first, side):
            yield from rows.split(second, side)

    def _infos(self, copy: Copy) -> tuple[TensorInfo, TensorInfo]:
        target_side, tensors = self._plan.matching.target_side, self._reading.tensors
        return tensors[1 - target_side][copy.source], tensors[target_side][copy.target]

    def _compare(self, copy: Copy, tile: Box, total: Difference) -> None:
        """Adds a tile to the difference of its tensor."""
        target_side = self._plan.matching.target_side
        source, target = self._infos(copy)
        source_box = target_box_of(reversed_copy(copy), tile)

        def read_source(gatherer: Gatherer) -> NDArray[Any]:
            bits = self._reading.read(1 - target_side, gatherer, copy.source, source_box)
            return prepared(bits, source.dtype, copy.op, target.dtype).reshape(tile.shape)

        def read_target(gatherer: Gatherer) -> NDArray[Any]:
            return self._reading.read(target_side, gatherer, copy.target, tile)

        both = [(prepared_type(source.dtype, copy.op, target.dtype), read_source), (target.dtype, read_target)]
        (kind_a, read_a), (kind_b, read_b) = both if target_side else reversed(both)
        check = DifferenceOf(kind_a, kind_b, self._plan.options.tolerance, total)
        self._checker.ask_tile(check, tile, (read_a, read_b))


def _unpacked(values: Sequence[Any]) -> Difference:
    difference = Difference(*values)
    for name in ("first", "worst"):
        spot = getattr(difference, name)
        if spot is not None:
            setattr(difference, name, Spot(tuple(spot[0]), *spot[1:]))
    return difference
