"""Where the elements of every source tensor go: moves, and the routes that copies of pieces make."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from converters.box import Box
from converters.planning.plan import SCALE_BLOCK, Op, Piece, prove

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from converters.catalog import TensorInfo
    from converters.dtypes import DType
    from converters.planning.plan import Copy, Drop


@dataclass(frozen=True, slots=True)
class Location:
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
class Move:
    """Where some elements of a tile go.

    Attributes:
        source_box: The elements, in the source's coordinates.
        file: Position of the output file.
        offset: First byte there of the array that receives them.
        shape: Shape of that array, stored in C order.
        target_box: The elements in its coordinates.
        dtype: Its element type.
        op: What happens on the way.
        record: Number of the output record whose checksum they belong to; -1 for none.
        base: Bytes of that record's payload before the array.
    """

    source_box: Box
    file: int
    offset: int
    shape: tuple[int, ...]
    target_box: Box
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

    def sources(self) -> Sequence[str]:
        """The source tensors to be read, in the order that fills the output files one after the other."""

    def reached(self, source: str, box: Box) -> Iterable[Move]:
        """The places that take elements of a box of a source tensor."""

    def touched(self, source: str, box: Box) -> tuple[Iterable[int], int]:
        """The output files that take elements of a box of a source tensor, and the bytes they take."""

    def kinds(self, sources: Mapping[str, TensorInfo]) -> set[Kind]:
        """What happens to elements: type at the source, type at the target, operation. Mere moving may be left out."""

    def digest(self) -> str:
        """Changes when any of it changes."""


@dataclass(frozen=True)
class CopyRoutes:
    """Routes to pieces, each of which has its place.

    Attributes:
        pieces: The pieces.
        locations: Where each of them lies.
        copies: For each source tensor, what goes where: the number of the piece, and the copy.
    """

    pieces: Sequence[Piece]
    locations: Sequence[Location]
    copies: Mapping[str, Sequence[tuple[int, Copy]]]

    @classmethod
    def of(cls, located: Iterable[tuple[Piece, Location]]) -> CopyRoutes:
        """Groups copies by source and orders the sources by where their first element lands."""
        pieces, locations = list[Piece](), list[Location]()
        copies: dict[str, list[tuple[int, Copy]]] = defaultdict(list)
        first: dict[str, tuple[int, int]] = {}
        for number, (piece, location) in enumerate(located):
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
            taken = copy.source_box.intersect(box) if box.shape else box
            if taken is not None:
                piece, location = self.pieces[number], self.locations[number]
                array = (location.file, location.offset, piece.laid)
                yield Move(
                    taken, *array, target_box_of(copy, taken), piece.dtype, copy.op, location.record, location.base
                )

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


def total(moves: Iterable[Move]) -> tuple[set[int], int]:
    """The files that moves go to, and their bytes."""
    files, nbytes = set(), 0
    for move in moves:
        files.add(move.file)
        nbytes += move.target_box.volume * move.dtype.itemsize
    return files, nbytes


def target_box_of(copy: Copy, box: Box) -> Box:
    """Where a box of a copy's source goes, in the target's coordinates."""
    inner = box.relative_to(copy.source_box.start)
    if copy.op is Op.SCALES:
        grid = Box(*(tuple(n // SCALE_BLOCK for n in numbers) for numbers in (inner.start, inner.shape)))
        return grid.shifted(copy.target_box.start)
    shape = copy.source_box.shape
    if copy.op is Op.TRANSPOSE:
        inner, shape = inner.flipped, shape[::-1]
    if shape != copy.target_box.shape:
        inner = _with_axes(inner, shape, copy.target_box.shape)
    return inner.shifted(copy.target_box.start)


def _with_axes(inner: Box, old: tuple[int, ...], new: tuple[int, ...]) -> Box:
    """The box with the axes of length 1 that `new` has; `plan.prove` has checked that the shapes differ in no other."""
    axes = iter([(a, n) for a, n, m in zip(inner.start, inner.shape, old, strict=True) if m != 1])
    pairs = [next(axes) if m != 1 else (0, 1) for m in new]
    return Box(tuple(a for a, _ in pairs), tuple(n for _, n in pairs))
