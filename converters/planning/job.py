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
from converters.planning.plan import SCALE_BLOCK, Op, Piece, prove
from converters.planning.tasks import Task, Tasks, TaskTable, Tile

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from converters.catalog import TensorInfo
    from converters.dtypes import DType
    from converters.planning.plan import Copy, Drop

__all__ = ["CopyRoutes", "Job", "Move", "OutputFile", "Place", "Routes", "Seals", "Slice", "Task", "Tile"]

MIB = 1 << 20
_TILE = 8 * MIB
_SMALLEST_TILE = 64 << 10


@dataclass(frozen=True, slots=True)
class Place:
    """Where a piece lies.

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
    """Bytes at an offset of an output file.

    Attributes:
        at: The offset.
        content: The bytes, or `(file, offset, length)` of the source: a `torch.save` archive whose checksums are compared.
        plain: It is no such archive, but any file, last changed at this time in ns; -1 for an archive.
    """

    at: int
    content: bytes | tuple[Path, int, int]
    plain: int = -1


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

    def prove(self, sources: Mapping[str, Sequence[int]], drops: Iterable[Drop]) -> None:
        """Checks that every element of the result is written once, and every element of the sources used or dropped.

        Args:
            sources: The shapes of the tensors that are read.
            drops: What of them is left out, and why.

        Raises:
            RequestError: See `planning.plan.prove`.
        """
        ...

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
    """Routes to pieces, each of which has its place.

    Attributes:
        pieces: The pieces.
        locations: Where each of them lies.
        copies: For each source tensor, what goes where: the number of the piece, and the copy.
    """

    pieces: Sequence[Piece]
    locations: Sequence[Place]
    copies: Mapping[str, Sequence[tuple[int, Copy]]]

    @classmethod
    def of(cls, placed: Iterable[tuple[Piece, Place]]) -> CopyRoutes:
        """Groups copies by source and orders the sources by where their first element lands."""
        pieces, locations = list[Piece](), list[Place]()
        copies: dict[str, list[tuple[int, Copy]]] = defaultdict(list)
        first: dict[str, tuple[int, int]] = {}
        for number, (piece, location) in enumerate(placed):
            pieces.append(piece)
            locations.append(location)
            position = (location.file, location.offset)
            for copy in piece.copies:
                copies[copy.source].append((number, copy))
                first[copy.source] = min(first.get(copy.source, position), position)
        return cls(pieces, locations, {name: copies[name] for name in sorted(first, key=first.__getitem__)})

    def sources(self) -> Sequence[str]:
        """See `Routes`."""
        return list(self.copies)

    def prove(self, sources: Mapping[str, Sequence[int]], drops: Iterable[Drop]) -> None:
        """See `Routes`."""
        prove(self.pieces, sources, drops)

    def reached(self, source: str, box: Box) -> Iterator[Move]:
        """See `Routes`."""
        for number, copy in self.copies.get(source, ()):
            part = copy.source_box.intersect(box) if box.shape else box
            if part is not None:
                piece, location = self.pieces[number], self.locations[number]
                array = (location.file, location.offset, piece.laid)
                yield Move(part, *array, landing(copy, part), piece.dtype, copy.op, location.record, location.base)

    def touched(self, source: str, box: Box) -> tuple[Iterable[int], int]:
        """See `Routes`."""
        return total(self.reached(source, box))

    def kinds(self, sources: Mapping[str, TensorInfo]) -> set[Kind]:
        """See `Routes`."""
        copies = ((sources[name].dtype, number, copy) for name, mine in self.copies.items() for number, copy in mine)
        return {(dtype, self.pieces[number].dtype, copy.op) for dtype, number, copy in copies}

    def digest(self) -> str:
        """See `Routes`."""
        digest = hashlib.sha256()
        for piece, location in zip(self.pieces, self.locations, strict=True):
            digest.update(f"{piece.dtype}{piece.laid}@{location.file}+{location.offset};".encode())
            for copy in piece.copies:
                digest.update(f"{copy.source}{copy.source_box}{copy.target_box}{copy.op.value};".encode())
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
        drops: Iterable[Drop] = (),
    ) -> Job:
        """Proves the work complete, orders it by output file, and cuts it into tiles that fit in `max_memory` bytes.

        Args:
            drops: Elements of the sources that go nowhere, and why.

        Raises:
            RequestError: Something is not written, written twice or lost (`planning.plan.prove`), or `max_memory` is too
                small to hold a tile for one worker.
            IntegrityError: A tensor is needed that the checkpoint lacks, though it has its like: one moment of two.
        """
        absent = next((name for name in routes.sources() if name not in sources), None)
        if absent is not None:
            raise IntegrityError(
                f"{printable(absent)} is missing",
                hint="distckpt verify says what else is; --optimizer none keeps the weights",
                tensor=absent,
            )
        used = {name: sources[name] for name in routes.sources()}
        routes.prove({name: info.shape for name, info in used.items()}, [drop for drop in drops if drop.source in used])
        kinds = routes.kinds(used)
        # the tile, and a scratch that holds it in its widest form
        widths = (-(-new.itemsize // old.itemsize) for old, new, op in kinds if op is not Op.SCALES)
        buffers = 1 + max(widths, default=1)
        tile, threads = _tile_size(buffers, max_memory, threads)
        digest = hashlib.sha256(f"1:{source_fingerprint}:{tile}:{routes.digest()}".encode())
        for output in files:
            digest.update(f"{output.name}:{output.size}:".encode())
            digest.update(hashlib.sha256(output.literal).digest())
            for part in output.slices:
                content = part.content if isinstance(part.content, bytes) else str(part.content).encode()
                content += str(part.plain).encode() if part.plain >= 0 else b""
                digest.update(f"{part.at}:".encode() + hashlib.sha256(content).digest())
        peak = threads * tile * buffers
        kinds = {kind for kind in kinds if kind[2] not in (Op.QUANTIZE, Op.SCALES)}  # these on the host
        computes = any(old != new or op in (Op.ADD_ONE, Op.SUBTRACT_ONE) for old, new, op in kinds)
        computes = computes or any(info.shift for info in used.values())
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
        )

    @cached_property
    def task_table(self) -> TaskTable:
        """The work in units, as columns."""
        return TaskTable.make(self.sources, self.routes, self.tile_bytes)

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
        nbytes += move.landing.volume * move.dtype.itemsize
    return files, nbytes


def landing(copy: Copy, part: Box) -> Box:
    """Where elements `part` of a copy's source go, in the target's coordinates."""
    inner = part.relative_to(copy.source_box.start)
    if copy.op is Op.SCALES:
        grid = Box(*(tuple(n // SCALE_BLOCK for n in numbers) for numbers in (inner.start, inner.shape)))
        return grid.shifted(copy.target_box.start)
    shape = copy.source_box.shape
    if copy.op is Op.TRANSPOSE:
        inner, shape = inner.flipped, shape[::-1]
    if shape != copy.target_box.shape:
        inner = _reaxed(inner, shape, copy.target_box.shape)
    return inner.shifted(copy.target_box.start)


def _reaxed(inner: Box, old: tuple[int, ...], new: tuple[int, ...]) -> Box:
    # the two shapes differ in axes of length 1 only, as `plan.prove` has checked
    kept = iter([(a, n) for a, n, m in zip(inner.start, inner.shape, old, strict=True) if m != 1])
    pairs = [next(kept) if m != 1 else (0, 1) for m in new]
    return Box(tuple(a for a, _ in pairs), tuple(n for _, n in pairs))


def _tile_size(buffers: int, max_memory: int, threads: int) -> tuple[int, int]:
    # the tile does not depend on the number of workers, so that a run may be continued with another number
    tile = min(_TILE, max_memory // buffers // 4096 * 4096)
    if tile < _SMALLEST_TILE:
        raise RequestError(
            f"--max-memory of {max_memory:,} bytes is too small: one worker needs {buffers * _SMALLEST_TILE:,} bytes",
            hint="give at least 1MiB; 64MiB is the default",
        )
    return tile, max(1, min(threads, max_memory // (buffers * tile)))
