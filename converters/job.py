"""A plan made concrete: which tile of which source goes to which range of which output file.

A tile is a box of one source tensor, contiguous in C order, small enough to be held in memory. Reading a tile gathers it
from the stored pieces; writing it scatters it to all places its elements go to. Both sides are long contiguous ranges in
nearly every conversion, whichever axis the checkpoint was split along:

    pieces in the source files          tile = rows a..b             places in the output files
    +---------+---------+               +-----------------+          q_proj  [#####............]
    | tp 0    | tp 1    |   gather ->   | rows a..b, full |  ->      k_proj  [##...............]
    |#########|#########|               | width           | scatter  v_proj  [##...............]
    +---------+---------+               +-----------------+
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from converters.box import Box, contiguous_tiles
from converters.errors import RequestError
from converters.plan import Copy, Op, Target

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from converters.catalog import TensorInfo
    from converters.dtypes import DType

__all__ = ["CopyRoutes", "Job", "Move", "OutputFile", "Place", "Routes", "Seals", "Slice", "Task", "Tile"]

MIB = 1 << 20
_TILE = 8 * MIB
_SMALLEST_TILE = 64 << 10


@dataclass(frozen=True, slots=True)
class Place:
    """Where a target tensor lies: `file` is a position in the job's files, `offset` its first byte there."""

    file: int
    offset: int


@dataclass(frozen=True, slots=True)
class Slice:
    """Bytes at an offset of an output file: given, or `(file, offset, length)` of the source."""

    at: int
    content: bytes | tuple[Path, int, int]


@dataclass(frozen=True, slots=True)
class OutputFile:
    """A file to be written.

    Attributes:
        name: Name within the destination folder.
        size: Bytes, known before anything is written.
        literal: Bytes known in advance, at the file's beginning (a header, or the whole file).
        slices: Further bytes known in advance, or copied as they are from a source file.
    """

    name: str
    size: int
    literal: bytes = b""
    slices: tuple[Slice, ...] = ()


@dataclass(frozen=True, slots=True)
class Tile:
    """A contiguous box of a source tensor, in its coordinates."""

    source: str
    box: Box


@dataclass(frozen=True, slots=True)
class Move:
    """Where some elements of a tile go.

    Attributes:
        part: The elements, in the source's coordinates.
        file: Position of the output file.
        offset: First byte there of the array that receives them.
        shape: Shape of that array, stored in C order.
        landing: The elements in its coordinates.
        dtype: Its element type.
        op: What happens on the way.
        record: Number of the output record whose checksum they belong to; -1 for none.
    """

    part: Box
    file: int
    offset: int
    shape: tuple[int, ...]
    landing: Box
    dtype: DType
    op: Op = Op.COPY
    record: int = -1


class Routes(Protocol):
    """Where the elements of every source tensor go."""

    def sources(self) -> Sequence[str]:
        """The source tensors to be read, in the order that fills the output files one after the other."""
        ...

    def reached(self, source: str, box: Box) -> Iterable[Move]:
        """The places that take elements of a box of a source tensor."""
        ...

    def touched(self, source: str, box: Box) -> tuple[Iterable[int], int]:
        """The output files that take elements of a box of a source tensor, and the bytes they take."""
        ...

    def itemsizes(self, source: str) -> Iterable[int]:
        """Element sizes of the arrays that a source tensor goes to."""
        ...

    def digest(self) -> str:
        """Changes when any of it changes."""
        ...


class Seals(Protocol):
    """Output records that end with their own checksum (torch.save archives)."""

    def fills(self) -> Iterable[tuple[int, int, int]]:
        """`(record, first byte, bytes)` of payload that no source fills: it stays zero."""
        ...

    def nbytes(self, record: int) -> int:
        """Payload bytes of a record."""
        ...

    def seal(self, record: int, crc: int) -> tuple[int, list[tuple[int, bytes]]]:
        """The file of a record and what stands around its payload as `(offset, bytes)`, given the payload's CRC-32."""
        ...


@dataclass(frozen=True)
class CopyRoutes:
    """Routes given as region copies between named tensors.

    Attributes:
        copies: For each source tensor, where its elements go.
        targets: Every target tensor.
        places: Where each target lies.
    """

    copies: Mapping[str, Sequence[Copy]]
    targets: Mapping[str, Target]
    places: Mapping[str, Place]

    @classmethod
    def of(cls, copies: Sequence[Copy], targets: Mapping[str, Target], places: Mapping[str, Place]) -> CopyRoutes:
        """Groups copies by source and orders the sources by where their first element lands."""
        by_source: dict[str, list[Copy]] = defaultdict(list)
        for copy in copies:
            by_source[copy.source].append(copy)
        first = {name: min(_position(places[c.target]) for c in mine) for name, mine in by_source.items()}
        return cls({name: by_source[name] for name in sorted(first, key=first.__getitem__)}, targets, places)

    def sources(self) -> Sequence[str]:
        """See `Routes`."""
        return list(self.copies)

    def reached(self, source: str, box: Box) -> Iterator[Move]:
        """See `Routes`."""
        for copy in self.copies[source]:
            part = copy.source_box.intersect(box) if box.shape else box
            if part is not None:
                target, place = self.targets[copy.target], self.places[copy.target]
                yield Move(part, place.file, place.offset, target.shape, landing(copy, part), target.dtype, copy.op)

    def touched(self, source: str, box: Box) -> tuple[Iterable[int], int]:
        """See `Routes`."""
        return total(self.reached(source, box))

    def itemsizes(self, source: str) -> Iterable[int]:
        """See `Routes`."""
        return (self.targets[copy.target].dtype.itemsize for copy in self.copies[source])

    def digest(self) -> str:
        """See `Routes`."""
        digest = hashlib.sha256()
        for mine in self.copies.values():
            for copy in mine:
                digest.update(f"{copy.source}{copy.source_box}{copy.target}{copy.target_box}{copy.op.value};".encode())
        for name, place in self.places.items():
            digest.update(f"{name}@{place.file}+{place.offset}:{self.targets[name].dtype};".encode())
        return digest.hexdigest()


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
class Job:
    """Everything the engine needs, and everything `--dry-run` prints.

    Attributes:
        sources: The source tensors that are read, in the order in which they are read.
        routes: Where their elements go.
        files: The output files.
        fingerprint: Digest of the source, the routes and the layout of the output; what a resume must agree with.
        tile_bytes: Size of a tile.
        threads: Workers in this process.
        peak_memory: Bytes of buffers that all workers hold together.
        seals: The output records that end with a checksum of their own, if the format has such.
        source_fingerprint: Digest of the source as it was when the job was made; it must be the same while it is read.
    """

    sources: Mapping[str, TensorInfo]
    routes: Routes
    files: Sequence[OutputFile]
    fingerprint: str
    tile_bytes: int
    threads: int
    peak_memory: int
    seals: Seals | None = None
    source_fingerprint: str = ""
    _tasks: list[Task] = field(default_factory=list)

    @classmethod
    def build(
        cls,
        sources: Mapping[str, TensorInfo],
        routes: Routes,
        files: Sequence[OutputFile],
        *,
        source_fingerprint: str,
        max_memory: int = 64 * MIB,
        threads: int = 2,
        seals: Seals | None = None,
    ) -> Job:
        """Orders the work by output file and cuts it into tiles that fit in `max_memory` bytes of buffers.

        Raises:
            RequestError: `max_memory` is too small to hold a tile for one worker.
        """
        order = routes.sources()
        buffers = _buffers(sources, order, routes)
        tile, threads = _tile_size(buffers, max_memory, threads)
        digest = hashlib.sha256(f"1:{source_fingerprint}:{tile}:{routes.digest()}".encode())
        for output in files:
            digest.update(f"{output.name}:{output.size}:".encode())
            digest.update(hashlib.sha256(output.literal).digest())
        used = {name: sources[name] for name in order}
        return cls(
            used, routes, files, digest.hexdigest(), tile, threads, threads * tile * buffers, seals, source_fingerprint
        )

    @property
    def tasks(self) -> list[Task]:
        """The work in units, in order; the same list on every machine and for every number of workers."""
        if not self._tasks:
            self._tasks.extend(self._make_tasks())
        return self._tasks

    @property
    def bytes_read(self) -> int:
        """Bytes of tensor data that will be read."""
        return sum(source.nbytes for source in self.sources.values())

    @property
    def bytes_written(self) -> int:
        """Bytes of all output files."""
        return sum(output.size for output in self.files)

    def _make_tasks(self) -> Iterator[Task]:
        waiting: list[Tile] = []
        files: set[int] = set()
        held, written, number = 0, 0, 0
        for name, source in self.sources.items():
            itemsize, whole = source.dtype.itemsize, Box.whole(source.shape)
            fits = source.nbytes <= self.tile_bytes
            for box in (whole,) if fits else contiguous_tiles(whole, max(1, self.tile_bytes // itemsize)):
                reached, nbytes = self.routes.touched(name, box)
                if not nbytes:
                    continue  # wholly dropped, padding rows for example
                size = box.volume * itemsize
                if waiting and held + size > self.tile_bytes:
                    yield Task(number, tuple(waiting), frozenset(files), written)
                    waiting, files, held, written, number = [], set(), 0, 0, number + 1
                waiting.append(Tile(name, box))
                held += size
                files.update(reached)
                written += nbytes
        if waiting:
            yield Task(number, tuple(waiting), frozenset(files), written)


def total(moves: Iterable[Move]) -> tuple[set[int], int]:
    """The files that moves go to, and their bytes."""
    files, nbytes = set(), 0
    for move in moves:
        files.add(move.file)
        nbytes += move.part.volume * move.dtype.itemsize
    return files, nbytes


def landing(copy: Copy, part: Box) -> Box:
    """Where elements `part` of a copy's source go, in the target's coordinates."""
    inner = part.relative_to(copy.source_box.start)
    if copy.op is Op.TRANSPOSE:
        inner = Box(inner.start[::-1], inner.shape[::-1])
    elif len(inner.shape) != len(copy.target_box.shape) or copy.source_box.shape != copy.target_box.shape:
        inner = _reaxed(inner, copy.source_box.shape, copy.target_box.shape)
    return inner.shifted(copy.target_box.start)


def _reaxed(inner: Box, old: tuple[int, ...], new: tuple[int, ...]) -> Box:
    # the two shapes differ in axes of length 1 only, as `plan.prove` has checked
    kept = iter([(a, n) for a, n, m in zip(inner.start, inner.shape, old, strict=True) if m != 1])
    pairs = [next(kept) if m != 1 else (0, 1) for m in new]
    return Box(tuple(a for a, _ in pairs), tuple(n for _, n in pairs))


def _position(place: Place) -> tuple[int, int]:
    return place.file, place.offset


def _buffers(sources: Mapping[str, TensorInfo], order: Iterable[str], routes: Routes) -> int:
    """Tile-sized buffers one worker needs: the tile, a scratch of the same size, more when a cast widens elements."""
    widest = 1
    for name in order:
        size = sources[name].dtype.itemsize
        widest = max(widest, *(-(-wide // size) for wide in routes.itemsizes(name)))
    return 1 + widest


def _tile_size(buffers: int, max_memory: int, threads: int) -> tuple[int, int]:
    # the tile does not depend on the number of workers, so that a run may be continued with another number
    tile = min(_TILE, max_memory // buffers // 4096 * 4096)
    if tile < _SMALLEST_TILE:
        raise RequestError(
            f"--max-memory of {max_memory:,} bytes is too small: one worker needs {buffers * _SMALLEST_TILE:,} bytes",
            hint="give at least 1MiB; 64MiB is the default",
        )
    return tile, max(1, min(threads, max_memory // (buffers * tile)))
