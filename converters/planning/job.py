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
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from converters.box import Box
from converters.errors import IntegrityError, RequestError
from converters.names import printable
from converters.planning.plan import Copy, Op, Target
from converters.planning.tasks import Task, Tasks, TaskTable, Tile

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
    """Where a target tensor lies.

    Attributes:
        file: Position in the job's files.
        offset: Its first byte there.
        record: Number of the output record it belongs to; -1 for none.
        base: Bytes of that record's payload before it.
    """

    file: int
    offset: int
    record: int = -1
    base: int = 0


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
        base: Bytes of that record's payload before the array.
    """

    part: Box
    file: int
    offset: int
    shape: tuple[int, ...]
    landing: Box
    dtype: DType
    op: Op = Op.COPY
    record: int = -1
    base: int = 0


Kind = tuple["DType", "DType", Op]
"""Type of an element at its source, type at its target, and what else happens to it."""


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

    def kinds(self, sources: Mapping[str, TensorInfo]) -> set[Kind]:
        """What happens to elements: type at the source, type at the target, operation. Mere moving may be left out."""
        ...

    def digest(self) -> str:
        """Changes when any of it changes."""
        ...


class Seals(Protocol):
    """Output records that end with their own checksum (torch.save archives).

    Attributes:
        apart: A record can be sealed as soon as it is filled, by whoever filled it; otherwise all are, at the end.
    """

    @property
    def apart(self) -> bool:
        """See above."""
        ...

    def fills(self) -> Iterable[tuple[int, int, int]]:
        """`(record, first byte, bytes)` of payload that no source fills: it stays zero."""
        ...

    def nbytes(self, record: int) -> int:
        """Payload bytes of a record."""
        ...

    def rereads(self) -> Iterable[tuple[int, int, int]]:
        """`(record, file, first byte)` of payloads whose sums are not taken on the way, but from the file at the end."""
        ...

    def seal(self, record: int, crc: int) -> tuple[int, list[tuple[int, bytes]]]:
        """The file of a record and what stands around its payload as `(offset, bytes)`, given the payload's CRC-32."""
        ...

    def end(self) -> Iterable[tuple[int, list[tuple[int, bytes]]]]:
        """What ends the files, as `seal` gives it, when all records are sealed.

        Raises:
            DistckptError: One was not.
        """
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
                where, into = (place.file, place.offset, target.shape), landing(copy, part)
                yield Move(part, *where, into, target.dtype, copy.op, place.record, place.base)

    def touched(self, source: str, box: Box) -> tuple[Iterable[int], int]:
        """See `Routes`."""
        return total(self.reached(source, box))

    def kinds(self, sources: Mapping[str, TensorInfo]) -> set[Kind]:
        """See `Routes`."""
        copies = ((sources[name].dtype, copy) for name, mine in self.copies.items() for copy in mine)
        return {(dtype, self.targets[copy.target].dtype, copy.op) for dtype, copy in copies}

    def digest(self) -> str:
        """See `Routes`."""
        digest = hashlib.sha256()
        for mine in self.copies.values():
            for copy in mine:
                digest.update(f"{copy.source}{copy.source_box}{copy.target}{copy.target_box}{copy.op.value};".encode())
        for name, place in self.places.items():
            digest.update(f"{name}@{place.file}+{place.offset}:{self.targets[name].dtype};".encode())
        return digest.hexdigest()


@dataclass(frozen=True)
class Job:
    """Everything the engine needs, and everything `--dry-run` prints.

    Attributes:
        sources: The source tensors that are read, in the order in which they are read.
        routes: Where their elements go.
        files: The output files.
        fingerprint: Digest of the source, the routes and the layout of the output; what a resume must agree with.
        tile_bytes: Size of a tile.
        peak_memory: Bytes of buffers that all workers hold together.
        computes: Some elements change their type or value on the way.
        seals: The output records that end with a checksum of their own, if the format has such.
        source_fingerprint: Digest of the source as it was when the job was made; it must be the same while it is read.
        known_tasks: The tasks, if they are known from an earlier job that was the same but for its source's bytes.
    """

    sources: Mapping[str, TensorInfo]
    routes: Routes
    files: Sequence[OutputFile]
    fingerprint: str
    tile_bytes: int
    threads: int
    peak_memory: int
    computes: bool = False
    seals: Seals | None = None
    source_fingerprint: str = ""
    known_tasks: TaskTable | None = None

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
        known_tasks: TaskTable | None = None,
    ) -> Job:
        """Orders the work by output file and cuts it into tiles that fit in `max_memory` bytes of buffers.

        With `known_tasks`, `sources` are exactly those that the routes read, in their order.

        Raises:
            RequestError: `max_memory` is too small to hold a tile for one worker.
            IntegrityError: A tensor is needed that the checkpoint lacks, though it has its like: one moment of two.
        """
        absent = next((name for name in routes.sources() if name not in sources), None) if known_tasks is None else None
        if absent is not None:
            raise IntegrityError(
                f"{printable(absent)} is missing",
                hint="distckpt verify says what else is; --optimizer none keeps the weights",
                tensor=absent,
            )
        kinds = routes.kinds(sources)
        # the tile, and a scratch that holds it in its widest form
        buffers = 1 + max((-(-new.itemsize // old.itemsize) for old, new, _ in kinds), default=1)
        tile, threads = _tile_size(buffers, max_memory, threads)
        digest = hashlib.sha256(f"1:{source_fingerprint}:{tile}:{routes.digest()}".encode())
        for output in files:
            digest.update(f"{output.name}:{output.size}:".encode())
            digest.update(hashlib.sha256(output.literal).digest())
            for piece in output.slices:
                given = piece.content if isinstance(piece.content, bytes) else str(piece.content).encode()
                digest.update(f"{piece.at}:".encode() + hashlib.sha256(given).digest())
        used = sources if known_tasks else {name: sources[name] for name in routes.sources()}
        peak = threads * tile * buffers
        computes = any(old != new or op in (Op.ADD_ONE, Op.SUBTRACT_ONE) for old, new, op in kinds)
        return cls(
            used,
            routes,
            files,
            digest.hexdigest(),
            tile,
            threads,
            peak,
            computes,
            seals,
            source_fingerprint,
            known_tasks,
        )

    @cached_property
    def task_table(self) -> TaskTable:
        """The work in units, as columns."""
        return self.known_tasks or TaskTable.make(self.sources, self.routes, self.tile_bytes)

    @cached_property
    def tasks(self) -> Tasks:
        """The work in units, in order; the same list on every machine and for every number of workers."""
        return Tasks(self.task_table, self.sources, self.tile_bytes)

    @property
    def bytes_read(self) -> int:
        """Bytes of tensor data that will be read."""
        return sum(source.nbytes for source in self.sources.values())

    @property
    def bytes_written(self) -> int:
        """Bytes of all output files."""
        return sum(output.size for output in self.files)


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


def _tile_size(buffers: int, max_memory: int, threads: int) -> tuple[int, int]:
    # the tile does not depend on the number of workers, so that a run may be continued with another number
    tile = min(_TILE, max_memory // buffers // 4096 * 4096)
    if tile < _SMALLEST_TILE:
        raise RequestError(
            f"--max-memory of {max_memory:,} bytes is too small: one worker needs {buffers * _SMALLEST_TILE:,} bytes",
            hint="give at least 1MiB; 64MiB is the default",
        )
    return tile, max(1, min(threads, max_memory // (buffers * tile)))
