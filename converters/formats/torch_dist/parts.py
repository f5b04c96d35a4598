"""What a torch_dist checkpoint is made of when it is written: how tensors are cut, pieces of flat buckets, objects."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

from converters.archive.records_out import RecordLayout
from converters.box import Box, find_overlap, runs, uncovered
from converters.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from converters.dtypes import DType

__all__ = ["ArrayOut", "Cut", "FlatOut", "ObjectOut"]


@dataclass(frozen=True)
class Cut:
    """How tensors of one type and shape are cut into records.

    Attributes:
        boxes: The pieces, in the tensor's coordinates; they tile it.
        source_shape: Shape of the source tensor, smaller or larger along the vocabulary axis only.
        leading: How many (layer, expert) axes of length 1 a record has before the tensor's own.
    """

    dtype: DType
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    source_shape: tuple[int, ...]
    leading: int = 0

    @cached_property
    def layouts(self) -> tuple[RecordLayout, ...]:
        """The record of each piece."""
        made: dict[tuple[int, ...], RecordLayout] = {}
        for box in self.boxes:
            if box.shape not in made:
                made[box.shape] = RecordLayout(self.dtype, (*(1,) * self.leading, *box.shape))
        return tuple(made[box.shape] for box in self.boxes)

    def check(self, key: str) -> None:
        """Checks that the pieces tile the tensor.

        Raises:
            RequestError: They do not.
        """
        if uncovered(self.shape, self.boxes) is not None or find_overlap(self.boxes) is not None:
            raise RequestError(f"the pieces of {key} do not tile it")

    def moves(self, box: Box) -> Iterator[tuple[int, Box, tuple[int, ...], Box]]:
        """`(piece, part of the box, shape of the piece, landing)` for elements of the source."""
        for piece, target in enumerate(self.boxes):
            part = target.intersect(box) if box.shape else box
            if part is not None:
                yield piece, part, target.shape, part.relative_to(target.start)

    def fills(self) -> list[tuple[int, int, int]]:
        """`(piece, first byte, bytes)` that no source fills: padding rows of the vocabulary; empty pieces, to be sealed."""
        out = []
        for piece, (box, layout) in enumerate(zip(self.boxes, self.layouts, strict=True)):
            if not layout.nbytes:
                out.append((piece, 0, 0))
            elif self.source_shape != self.shape and box.stop[0] > self.source_shape[0]:
                row = layout.nbytes // box.shape[0]
                kept = max(0, self.source_shape[0] - box.start[0])
                out.append((piece, kept * row, layout.nbytes - kept * row))
        return out


@dataclass(frozen=True, slots=True)
class ArrayOut:
    """An array of the checkpoint: one canonical tensor, or those of all layers or experts.

    Attributes:
        key: Its key.
        lead: Sizes of its leading (layer, expert) axes.
        cut: How each tensor in it is cut.
    """

    key: str
    lead: tuple[int, ...]
    cut: Cut

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole array."""
        return (*self.lead, *self.cut.shape)


@dataclass(frozen=True)
class FlatOut:
    """A stored piece of a flat optimizer bucket.

    Attributes:
        key: Key of the bucket's 1-D array.
        start: First element of this piece.
        length: Elements of this piece.
        rank: The rank whose file holds it.
        copies: `(source, box, at)`: elements of a source tensor that fill the piece from `at` on, in C order.
        gaps: `(first element, elements)` that nothing fills.
    """

    key: str
    numel: int
    start: int
    length: int
    dtype: DType
    rank: int
    copies: tuple[tuple[str, Box, int], ...]
    gaps: tuple[tuple[int, int], ...]

    @property
    def layout(self) -> RecordLayout:
        """Its record."""
        return _flat_layout(self.dtype, self.length)

    def check(self) -> None:
        """Checks that copies and gaps tile the piece.

        Raises:
            RequestError: They do not.
        """
        spans = [Box((at,), (box.volume,)) for _, box, at in self.copies]
        spans += [Box((first,), (count,)) for first, count in self.gaps]
        if uncovered((self.length,), spans) is not None or find_overlap(spans) is not None:
            raise RequestError(f"the parameters do not fill {self.key} at {self.start}")

    def moves(self, source: str, box: Box) -> Iterator[tuple[Box, Box]]:
        """`(part of the box, landing)` for elements of a source."""
        for name, piece, at in self.copies:
            part = piece.intersect(box) if name == source else None
            for inner in _straight(part, piece) if part is not None else ():
                first = at + runs(inner.relative_to(piece.start), piece.shape)[0]
                yield inner, Box((first,), (inner.volume,))

    def fills(self) -> Iterator[tuple[int, int]]:
        """`(first byte, bytes)` that no source fills."""
        if not self.length:
            yield 0, 0
        size = self.dtype.itemsize
        yield from ((first * size, count * size) for first, count in self.gaps)


@lru_cache(maxsize=1024)
def _flat_layout(dtype: DType, length: int) -> RecordLayout:
    return RecordLayout(dtype, (length,))


def _straight(part: Box, whole: Box) -> Iterator[Box]:
    """Cuts `part` of a box until each piece lies in one run of it. A tile's part does, but for odd shapes."""
    if not runs(part.relative_to(whole.start), whole.shape)[2]:
        yield part
        return
    axis = next(axis for axis, n in enumerate(part.shape) if n > 1)
    for inner in part.split(axis, 1):
        yield from _straight(inner, whole)


@dataclass(frozen=True, slots=True)
class ObjectOut:
    """A stored object: bytes of a record, given or copied from the source.

    Attributes:
        key: Its key, grid suffix included.
        rank: The rank whose file holds it.
        content: The record, or where to copy it from.
    """

    key: str
    rank: int
    content: bytes | tuple[Path, int, int]

    @property
    def length(self) -> int:
        """Bytes of the record."""
        return len(self.content) if isinstance(self.content, bytes) else self.content[2]
