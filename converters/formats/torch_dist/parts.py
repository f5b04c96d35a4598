"""What a torch_dist checkpoint is made of when it is written: how tensors are cut, pieces of flat buckets, objects."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

from converters.box import Box
from converters.planning.plan import Copy, Piece, prove
from converters.torchzip.records_out import RecordLayout

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from converters.dtypes import DType
    from converters.planning.plan import Drop


@dataclass(frozen=True)
class Cut:
    """How tensors of one type and shape are cut into records: a family of pieces, one for each record.

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
        layouts = {
            shape: RecordLayout(self.dtype, (*(1,) * self.leading, *shape)) for shape in {b.shape for b in self.boxes}
        }
        return tuple(layouts[box.shape] for box in self.boxes)

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """What is in each record, of a source tensor that is not named; padding rows of the vocabulary are zero."""
        return tuple(
            Piece(
                "",
                self.dtype,
                box.shape,
                copies=[Copy("", stored, "", stored.relative_to(box.start))] if stored.volume else (),
                fills=[padding.relative_to(box.start)] if padding.volume else (),
            )
            for box, stored, padding in self._parts()
        )

    def _parts(self) -> Iterator[tuple[Box, Box, Box]]:
        """Each record's box, the rows of it that the source has, and those that it lacks."""
        for box in self.boxes:
            if not box.shape:
                yield box, box, Box((0,), (0,))
                continue
            rows = min(max(0, self.source_shape[0] - box.start[0]), box.shape[0])
            start, shape = (box.start[0] + rows, *box.start[1:]), box.shape[1:]
            yield box, Box(box.start, (rows, *shape)), Box(start, (box.shape[0] - rows, *shape))

    def prove(self, source: str, drops: Iterable[Drop]) -> None:
        """Checks that the records tile the tensor, and that every element of its source is in one.

        Args:
            source: A tensor that is cut so.
            drops: What of it is left out on purpose.

        Raises:
            RequestError: See `planning.plan.prove`.
        """
        parts = list(self._parts())
        copies = [Copy(source, stored, source, stored) for _, stored, _ in parts if stored.volume]
        piece = Piece(
            source, self.dtype, self.shape, copies=copies, fills=[padding for _, _, padding in parts if padding.volume]
        )
        prove([piece], {source: self.source_shape}, drops)


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
class BucketOut:
    """A stored part of a flat optimizer bucket.

    Attributes:
        key: Key of the bucket's 1-D array.
        numel: Elements of that.
        start: First element of this part.
        rank: The rank whose file holds it.
        pieces: What is in it, one behind the other: boxes of parameters, and the gaps between them.
    """

    key: str
    numel: int
    start: int
    length: int
    dtype: DType
    rank: int
    pieces: Sequence[Piece]

    @property
    def layout(self) -> RecordLayout:
        """Its record."""
        return _flat_layout(self.dtype, self.length)


@lru_cache(maxsize=1024)
def _flat_layout(dtype: DType, length: int) -> RecordLayout:
    return RecordLayout(dtype, (length,))


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
