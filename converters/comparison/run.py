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
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from converters.box import Box, contiguous_tiles
from converters.comparison.values import Apart, Difference, prepared, prepared_type
from converters.errors import FormatError, IntegrityError, RequestError
from converters.events import Moved
from converters.io.arithmetic import BLOCK
from converters.io.block_runner import TileChecker
from converters.io.gather import Gatherer
from converters.io.sources import Sources
from converters.names import quoted
from converters.planning.plan import Op, reversed_copy
from converters.planning.routes import landing

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from converters.catalog import TensorInfo
    from converters.comparison.pairs import Matching, Side
    from converters.comparison.values import Tolerance
    from converters.execute.work_sharing import Crew
    from converters.planning.plan import Copy

MIB = 1 << 20
_TILE = 2 * MIB
_SMALLEST_TILE = 64 << 10
_STRETCHES = 256  # at least so many, so that workers and ranks get about the same
_STRETCH = (64 << 10, 64 * MIB)  # bytes that a worker takes at a time, at least and at most
_BLOCKS = 12 * 8 * BLOCK  # what `compare` makes of a block


@dataclass(frozen=True, slots=True)
class WorkItem:
    """What one worker does in one go: small pairs of tensors, or a part of a large one.

    Attributes:
        number: Among all.
        parts: Number of the pair, of one of its copies (those of its padding follow), and the box of the copy's target.
        nbytes: Bytes of both sides.
    """

    number: int
    parts: tuple[tuple[int, int, Box], ...]
    nbytes: int


@dataclass
class Values:
    """What reading has shown.

    Attributes:
        differences: For each pair, what there is to say of its elements, and of its padding.
        bytes_read: Bytes read of A, and of B.
        records_checked: Records of both whose checksum was compared.
    """

    differences: list[tuple[Difference, Difference]]
    bytes_read: tuple[int, int] = (0, 0)
    records_checked: int = 0


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


def stretches(matching: Matching, sides: tuple[Side, Side]) -> list[WorkItem]:
    """Cuts the work into parts of about equal size, in the order of the pairs; the same on every rank."""
    source, target = sides[1 - matching.shown].tensors, {**sides[matching.shown].tensors, **matching.reshaped}

    def size_of(copy: Copy) -> int:
        return source[copy.source].dtype.itemsize + target[copy.target].dtype.itemsize

    total = sum(c.target_box.volume * size_of(c) for pair in matching.pairs for c in (*pair.copies, *pair.padding))
    most = min(max(total // _STRETCHES, _STRETCH[0]), _STRETCH[1])
    out: list[WorkItem] = []
    parts: list[tuple[int, int, Box]] = []
    stretch_bytes = 0
    for number, pair in enumerate(matching.pairs):
        for index, copy in enumerate((*pair.copies, *pair.padding)):
            size = size_of(copy)
            for box in _cut(copy, copy.target_box, max(1, most // size), target[copy.target]):
                nbytes = box.volume * size
                if parts and stretch_bytes + nbytes > most:
                    out.append(WorkItem(len(out), tuple(parts), stretch_bytes))
                    parts, stretch_bytes = [], 0
                parts.append((number, index, box))
                stretch_bytes += nbytes
    if parts:
        out.append(WorkItem(len(out), tuple(parts), stretch_bytes))
    return out


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
    crew: Crew,
    work: Sequence[WorkItem],
    matching: Matching,
    sides: tuple[Side, Side],
    *,
    tile_bytes: int,
    tolerance: Tolerance | None,
) -> Values:
    """Compares the elements of all pairs.

    Args:
        crew: Who does it.
        work: What `stretches` made.
        matching: What belongs together.
        sides: The checkpoints.
        tile_bytes: Bytes of a tile.
        tolerance: How far apart values may be; None asks for equal bits.

    Raises:
        IntegrityError: A record does not match its checksum; the error says of which side.
        FormatError: A file cannot be read.
        Interrupted: Asked to stop.
    """
    shared = _Shared(crew, matching, sides, tile_bytes, tolerance)
    results = crew.map(work, lambda: _Worker(shared), shared.leave)
    differences = [(Difference(), Difference()) for _ in matching.pairs]
    for number in sorted(results):
        for at, padding, values in results[number]:
            differences[at][padding].add(_unpacked(values))
    bytes_a, bytes_b, records = (sum(numbers) for numbers in zip(*crew.left, strict=True))
    return Values(differences, (bytes_a, bytes_b), records)


class _Shared:
    """What the workers of a process share."""

    def __init__(
        self,
        crew: Crew,
        matching: Matching,
        sides: tuple[Side, Side],
        tile_bytes: int,
        tolerance: Tolerance | None,
    ) -> None:
        self.crew, self.matching, self.tile_bytes, self.tolerance = crew, matching, tile_bytes, tolerance
        self.tensors = [{**side.tensors, **matching.reshaped} if side.is_hf else side.tensors for side in sides]
        self.sides = sides
        self.sources = [Sources(side.reader, each) for side, each in zip(sides, self.tensors, strict=True)]

    def leave(self) -> list[int]:
        """Reads what is left of records that were read in part; bytes read of each side, and records compared."""
        for side, sources in zip(self.sides, self.sources, strict=True):
            gatherer = Gatherer(sources)
            try:
                with blaming(side):
                    sources.complete(gatherer, self.crew.check)
            finally:
                gatherer.close()
        return [*(sources.bytes_read for sources in self.sources), sum(s.records_checked for s in self.sources)]


@contextmanager
def blaming(side: Side) -> Iterator[None]:
    """Says of an error in reading which of the two checkpoints has it."""
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

    def __init__(self, shared: _Shared) -> None:
        self._shared = shared
        self._checker = TileChecker(shared.sources, check=shared.crew.check)
        self.close = self._checker.close

    def do(self, task: WorkItem) -> list[Any]:
        """See `read_values`; plain data, as it may travel to another rank."""
        matching = self._shared.matching
        differences: dict[tuple[int, int], Difference] = {}
        for at, index, box in task.parts:
            pair = matching.pairs[at]
            padding = int(index >= len(pair.copies))
            copy = pair.padding[index - len(pair.copies)] if padding else pair.copies[index]
            out = differences.setdefault((at, padding), Difference())
            for tile in self._tiles(copy, box):
                self._compare(copy, tile, out)
        return [(*where, _packed(difference)) for where, difference in differences.items()]

    def _tiles(self, copy: Copy, box: Box) -> Iterator[Box]:
        source, target = self._infos(copy)
        size = max(source.dtype.itemsize, target.dtype.itemsize)
        most = max(1, self._shared.tile_bytes // size)
        if copy.op is not Op.TRANSPOSE or all(chunk.transposed for chunk in target.chunks()):
            yield from _cut(copy, box, most, target)
            return
        side = max(1, math.isqrt(most))  # rows of one are columns of the other: squares keep the runs of both long
        first, second = _axes(copy)
        for rows in box.split(first, side):
            yield from rows.split(second, side)

    def _infos(self, copy: Copy) -> tuple[TensorInfo, TensorInfo]:
        shown, tensors = self._shared.matching.shown, self._shared.tensors
        return tensors[1 - shown][copy.source], tensors[shown][copy.target]

    def _compare(self, copy: Copy, tile: Box, out: Difference) -> None:
        """Takes a tile in."""
        shown = self._shared.matching.shown
        source, target = self._infos(copy)
        part = landing(reversed_copy(copy), tile)
        kind = prepared_type(source.dtype, copy.op, target.dtype)

        def theirs(gatherer: Gatherer) -> NDArray[Any]:
            with blaming(self._shared.sides[1 - shown]):
                bits = gatherer.gather(copy.source, part)
            self._shared.crew.moved(Moved(bits.nbytes), bits.nbytes)
            return prepared(bits, source.dtype, copy.op, target.dtype).reshape(tile.shape)

        def ours(gatherer: Gatherer) -> NDArray[Any]:
            with blaming(self._shared.sides[shown]):
                bits = gatherer.gather(copy.target, tile)
            self._shared.crew.moved(Moved(bits.nbytes), bits.nbytes)
            return bits

        kinds = (kind, target.dtype) if shown else (target.dtype, kind)
        question = Apart(*kinds, self._shared.tolerance, out)
        self._checker.ask_tile(question, tile, (theirs, ours) if shown else (ours, theirs))


_FIELDS = tuple(f.name for f in fields(Difference))


def _packed(difference: Difference) -> list[Any]:
    return [getattr(difference, name) for name in _FIELDS]


def _unpacked(values: Sequence[Any]) -> Difference:
    out = Difference(**dict(zip(_FIELDS, values, strict=True)))
    for name in ("first", "worst"):
        spot = getattr(out, name)
        if spot is not None:
            setattr(out, name, (tuple(spot[0]), spot[1], spot[2]))
    return out
