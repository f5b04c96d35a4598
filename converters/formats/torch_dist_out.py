"""Writing `torch_dist`: which record lies where in which rank's file, and the metadata that says so.

A record is a `torch.save` archive whose elements are streamed into place by the engine; this module knows its surroundings.
A million records are arrays: tensors that are cut alike share one `Cut`, and a tensor needs only the number of its first
record.

    __0_0.distcp (what rank 0 saves)
    +---------+---------+------------------------------+------------------------------+----
    | objects, copied   | record of the first tensor   | record of the next tensor    | ...
    | from the source   | prefix | elements   | suffix | prefix | elements   | suffix |
    +---------+---------+------------------------------+------------------------------+----

Source: torch/distributed/checkpoint/filesystem.py and Megatron-Core's filesystem_async.py, 0.16.1.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from converters import __version__
from converters.box import Box, runs
from converters.errors import RequestError
from converters.formats.dcp_metadata_out import ChunkTable, write_metadata
from converters.job import Move, OutputFile, Slice, total
from converters.records_out import RecordLayout

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from converters.dtypes import DType

__all__ = ["Cut", "FlatOut", "ObjectOut", "TensorOut", "TorchDistOutput"]


@dataclass(frozen=True)
class Cut:
    """How tensors of one type and shape are cut into records.

    Attributes:
        dtype: Element type.
        shape: Shape of the tensor.
        boxes: The pieces, in the tensor's coordinates; they tile it.
        source_shape: Shape of the source tensor, smaller or larger along the vocabulary axis only.
        leading: How many (layer, expert) axes of length 1 a record has before the tensor's own.
    """

    dtype: DType
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    source_shape: tuple[int, ...]
    leading: int = 0
    layouts: tuple[RecordLayout, ...] = field(init=False)

    def __post_init__(self) -> None:
        made: dict[tuple[int, ...], RecordLayout] = {}
        for box in self.boxes:
            if box.shape not in made:
                made[box.shape] = RecordLayout(self.dtype, (*(1,) * self.leading, *box.shape))
        object.__setattr__(self, "layouts", tuple(made[box.shape] for box in self.boxes))


@dataclass(frozen=True, slots=True)
class TensorOut:
    """A canonical tensor to be written.

    Attributes:
        source: Canonical name of the tensor it is read from.
        key: Key of the array it is stored in.
        prefix: Its indices along that array's leading (layer, expert) axes.
        lead: Sizes of those axes.
        cut: How it is cut.
        ranks: For each piece, the rank whose file holds it.
    """

    source: str
    key: str
    prefix: tuple[int, ...]
    lead: tuple[int, ...]
    cut: Cut
    ranks: tuple[int, ...]

    @property
    def layouts(self) -> tuple[RecordLayout, ...]:
        """The records of its pieces."""
        return self.cut.layouts

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array it is stored in."""
        return (*self.lead, *self.cut.shape)

    def moves(self, source: str, box: Box) -> Iterator[tuple[int, Box, tuple[int, ...], Box]]:
        """`(piece, part of the box, shape of the piece, landing)` for elements of the source."""
        for piece, target in enumerate(self.cut.boxes):
            part = target.intersect(box) if box.shape else box
            if part is not None:
                yield piece, part, target.shape, part.relative_to(target.start)

    def fills(self) -> Iterator[tuple[int, int, int]]:
        """`(piece, first byte, bytes)` of rows of the padded vocabulary that the source does not have."""
        cut = self.cut
        if cut.source_shape == cut.shape:
            return
        for piece, (box, layout) in enumerate(zip(cut.boxes, cut.layouts, strict=True)):
            if box.stop[0] > cut.source_shape[0]:
                row = layout.nbytes // box.shape[0]
                kept = max(0, cut.source_shape[0] - box.start[0])
                yield piece, kept * row, layout.nbytes - kept * row


@dataclass(frozen=True)
class FlatOut:
    """A stored piece of a flat optimizer bucket.

    Attributes:
        key: Key of the bucket's 1-D array.
        numel: Its elements.
        start: First element of this piece.
        length: Elements of this piece.
        dtype: Element type.
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
    def ranks(self) -> tuple[int, ...]:
        """See `TensorOut`."""
        return (self.rank,)

    @property
    def layouts(self) -> tuple[RecordLayout, ...]:
        """See `TensorOut`."""
        return (_flat_layout(self.dtype, self.length),)

    @property
    def shape(self) -> tuple[int, ...]:
        """See `TensorOut`."""
        return (self.numel,)

    def moves(self, source: str, box: Box) -> Iterator[tuple[int, Box, tuple[int, ...], Box]]:
        """See `TensorOut`."""
        for name, piece, at in self.copies:
            part = piece.intersect(box) if name == source else None
            for inner in _straight(part, piece) if part is not None else ():
                first = at + runs(inner.relative_to(piece.start), piece.shape)[0]
                yield 0, inner, (self.length,), Box((first,), (inner.volume,))

    def fills(self) -> Iterator[tuple[int, int, int]]:
        """See `TensorOut`."""
        size = self.dtype.itemsize
        return ((0, first * size, count * size) for first, count in self.gaps)


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


class TorchDistOutput:
    """The files of a checkpoint, from the lists of what is in them. Implements `Routes` and `Seals` of a job.

    Args:
        tensors: The tensors, in the order in which their sources are read.
        objects: The objects.

    Attributes:
        files: The data files, by rank.
    """

    def __init__(self, tensors: Sequence[TensorOut | FlatOut], objects: Sequence[ObjectOut]) -> None:
        self._tensors, self._objects = tensors, objects
        self._at: dict[str, list[int]] = {}
        for number, tensor in enumerate(tensors):
            names = (tensor.source,) if isinstance(tensor, TensorOut) else dict.fromkeys(c[0] for c in tensor.copies)
            for name in names:
                self._at.setdefault(name, []).append(number)
        self._firsts = np.cumsum([0, *(len(t.ranks) for t in tensors)])
        rank = np.concatenate([np.zeros(0, np.int64), *(np.asarray(t.ranks, np.int64) for t in tensors)])
        length = self._lengths()
        ranks = sorted({*np.unique(rank).tolist(), *(o.rank for o in objects)})
        self._number = {value: number for number, value in enumerate(ranks)}
        self._file = np.searchsorted(np.asarray(ranks, np.int64), rank)
        self.object_places: list[tuple[int, int]] = []
        ends = [0] * len(ranks)
        for thing in objects:
            number = self._number[thing.rank]
            self.object_places.append((number, ends[number]))
            ends[number] += thing.length
        self._start = _stack(self._file, length, ends)
        self._length = length
        sizes = np.asarray(ends, np.int64)
        np.maximum.at(sizes, self._file, self._start + length)
        self.files = self._output_files(ranks, sizes.tolist())

    def _lengths(self) -> NDArray[np.int64]:
        known: dict[int, NDArray[np.int64]] = {}
        parts = [np.zeros(0, np.int64)]
        for tensor in self._tensors:
            layouts = tensor.layouts  # shared by tensors that are cut alike
            if id(layouts) not in known or isinstance(tensor, FlatOut):
                known[id(layouts)] = np.asarray([layout.length for layout in layouts], np.int64)
            parts.append(known[id(layouts)])
        return np.concatenate(parts)

    def _output_files(self, ranks: Sequence[int], sizes: Sequence[int]) -> list[OutputFile]:
        slices: list[list[Slice]] = [[] for _ in ranks]
        for thing, (number, at) in zip(self._objects, self.object_places, strict=True):
            slices[number].append(Slice(at, thing.content))
        return [
            OutputFile(f"__{rank}_0.distcp", size, slices=tuple(mine))
            for rank, size, mine in zip(ranks, sizes, slices, strict=True)
        ]

    # ------------------------------------------------------------------ Routes

    def sources(self) -> Sequence[str]:
        """See `Routes`."""
        return list(self._at)

    def itemsizes(self, source: str) -> Iterable[int]:
        """See `Routes`."""
        return (_dtype(self._tensors[number]).itemsize for number in self._at[source])

    def reached(self, source: str, box: Box) -> Iterator[Move]:
        """See `Routes`."""
        for number in self._at[source]:
            tensor, first = self._tensors[number], int(self._firsts[number])
            dtype, layouts = _dtype(tensor), tensor.layouts
            for piece, part, shape, landing in tensor.moves(source, box):
                record = first + piece
                begin = int(self._start[record]) + len(layouts[piece].prefix)
                yield Move(part, int(self._file[record]), begin, shape, landing, dtype, record=record)

    def touched(self, source: str, box: Box) -> tuple[Iterable[int], int]:
        """See `Routes`."""
        numbers = self._at[source]
        tensor = self._tensors[numbers[0]]
        if len(numbers) > 1 or isinstance(tensor, FlatOut) or box.shape != tensor.cut.source_shape:
            return total(self.reached(source, box))
        first = int(self._firsts[numbers[0]])
        kept = min(tensor.cut.shape[0], box.shape[0]) * (box.volume // box.shape[0]) if box.volume and box.shape else 1
        files = self._file[first : first + len(tensor.ranks)].tolist()
        return files, kept * tensor.cut.dtype.itemsize if box.volume else 0

    def digest(self) -> str:
        """See `Routes`."""
        digest = hashlib.sha256()
        for tensor in self._tensors:
            origin = tensor.source + str(tensor.prefix) if isinstance(tensor, TensorOut) else str(tensor.copies)
            digest.update(f"{origin}>{tensor.key}{tensor.shape}{_dtype(tensor)};".encode())
        for thing in self._objects:
            content = thing.content if isinstance(thing.content, bytes) else str(thing.content).encode()
            digest.update(f"{thing.key}@{thing.rank}".encode() + hashlib.sha256(content).digest())
        for array in (self._file, self._start, self._length):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    # ------------------------------------------------------------------ Seals

    def fills(self) -> Iterator[tuple[int, int, int]]:
        """See `Seals`."""
        for first, tensor in zip(self._firsts.tolist(), self._tensors, strict=False):
            for piece, start, nbytes in tensor.fills():
                yield first + piece, start, nbytes
            if not all(layout.nbytes for layout in tensor.layouts):
                yield from ((first + n, 0, 0) for n, layout in enumerate(tensor.layouts) if not layout.nbytes)

    def nbytes(self, record: int) -> int:
        """See `Seals`."""
        return self._layout(record).nbytes

    def seal(self, record: int, crc: int) -> tuple[int, list[tuple[int, bytes]]]:
        """See `Seals`."""
        layout = self._layout(record)
        start = int(self._start[record])
        end = start + len(layout.prefix) + layout.nbytes
        return int(self._file[record]), [(start, layout.prefix), (end, layout.suffix(crc))]

    def _layout(self, record: int) -> RecordLayout:
        number = int(np.searchsorted(self._firsts, record, side="right")) - 1
        return self._tensors[number].layouts[record - int(self._firsts[number])]

    # ------------------------------------------------------------------ metadata

    def metadata(self, name: str) -> bytes:
        """The contents of `.metadata`.

        Args:
            name: What to record as the checkpoint's id: the folder's name.
        """
        members: dict[str, list[int]] = {}
        for number, tensor in enumerate(self._tensors):
            members.setdefault(tensor.key, []).append(number)
        tables = {key: self._table(numbers) for key, numbers in members.items()}
        objects = ((o.key, file, at, o.length) for o, (file, at) in zip(self._objects, self.object_places, strict=True))
        names = [file.name for file in self.files]
        return write_metadata(tables, objects, names, checkpoint_id=name, save_id=f"distckpt {__version__}")

    def _table(self, numbers: Sequence[int]) -> ChunkTable:
        first = self._tensors[numbers[0]]
        rows = np.concatenate([np.arange(self._firsts[n], self._firsts[n + 1]) for n in numbers])
        where = (self._file[rows], self._start[rows], self._length[rows])
        if isinstance(first, FlatOut):
            pieces = [self._tensors[n] for n in numbers]
            offsets = np.array([[p.start] for p in pieces if isinstance(p, FlatOut)], np.int64)
            sizes = np.array([[p.length] for p in pieces if isinstance(p, FlatOut)], np.int64)
            return ChunkTable(first.dtype, first.shape, offsets, sizes, *where)
        cut, depth = first.cut, len(first.lead)
        count, ndim = len(cut.boxes), len(cut.shape)
        starts = np.array([box.start for box in cut.boxes], np.int64).reshape(count, ndim)
        extents = np.array([box.shape for box in cut.boxes], np.int64).reshape(count, ndim)
        prefixes = np.array([t.prefix for n in numbers if isinstance(t := self._tensors[n], TensorOut)], np.int64)
        offsets = np.hstack(
            [np.repeat(prefixes.reshape(len(numbers), depth), count, axis=0), np.tile(starts, (len(numbers), 1))]
        )
        sizes = np.hstack([np.ones((len(rows), depth), np.int64), np.tile(extents, (len(numbers), 1))])
        return ChunkTable(cut.dtype, first.shape, offsets, sizes, *where)


def _dtype(tensor: TensorOut | FlatOut) -> DType:
    return tensor.dtype if isinstance(tensor, FlatOut) else tensor.cut.dtype


def _stack(file: NDArray[np.int64], length: NDArray[np.int64], begin: Sequence[int]) -> NDArray[np.int64]:
    """Where each record begins when the records of a file lie one behind the other, in order."""
    order = np.argsort(file, kind="stable")
    lengths = length[order]
    ends = np.cumsum(lengths)
    counts = np.bincount(file, minlength=len(begin))
    base = (
        np.repeat(np.concatenate([[0], ends])[np.concatenate([[0], np.cumsum(counts)[:-1]])], counts)
        if len(begin)
        else ends
    )
    start = np.empty_like(length)
    start[order] = ends - lengths - base + np.repeat(np.asarray(begin, np.int64), counts)
    return start


def check_tiling(sources: Mapping[str, Any], tensors: Sequence[TensorOut | FlatOut]) -> None:
    """Checks that the pieces of every tensor tile it (once for each way of cutting), and a bucket's copies and gaps it.

    Raises:
        RequestError: They do not.
    """
    from converters.box import find_overlap, uncovered

    seen: set[int] = set()
    for tensor in tensors:
        if isinstance(tensor, FlatOut):
            spans = [Box((at,), (box.volume,)) for _, box, at in tensor.copies]
            spans += [Box((first,), (count,)) for first, count in tensor.gaps]
            if uncovered((tensor.length,), spans) is not None or find_overlap(spans) is not None:
                raise RequestError(f"the parameters do not fill {tensor.key} at {tensor.start}")
            continue
        if tensor.source not in sources:
            raise RequestError(f"the checkpoint has no tensor {tensor.source}", tensor=tensor.source)
        if id(tensor.cut) in seen:
            continue
        seen.add(id(tensor.cut))
        if uncovered(tensor.cut.shape, tensor.cut.boxes) is not None or find_overlap(tensor.cut.boxes) is not None:
            raise RequestError(f"the pieces of {tensor.source} do not tile it", tensor=tensor.source)
