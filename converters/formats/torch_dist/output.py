"""Writing `torch_dist`: which record lies where in which rank's file, and the metadata that says so.

A record is a `torch.save` archive whose elements are streamed into place by the engine; this module knows its surroundings.
A million records are arrays (`Columns`); only parts of flat buckets, of which there are few, are objects.

    __0_0.distcp (what rank 0 saves)
    +---------+---------+------------------------------+------------------------------+----
    | objects, copied   | record of the first tensor   | record of the next tensor    | ...  buckets
    | from the source   | prefix | elements   | suffix | prefix | elements   | suffix |
    +---------+---------+------------------------------+------------------------------+----

Source: torch/distributed/checkpoint/filesystem.py and Megatron-Core's filesystem_async.py, 0.16.1.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np

from converters import __version__
from converters.formats.dcp.metadata_out import write_metadata
from converters.formats.dcp.stored import StoredTensor
from converters.formats.torch_dist.columns import Columns, stack
from converters.planning.job import OutputFile, Slice
from converters.planning.plan import Op
from converters.planning.routes import CopyRoutes, Location, Move, target_box_of, total

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from converters.box import Box
    from converters.catalog import TensorInfo
    from converters.formats.torch_dist.parts import ArrayOut, BucketOut, ObjectOut
    from converters.planning.plan import Drop, Piece
    from converters.planning.routes import Kind
    from converters.torchzip.records_out import RecordLayout


class TorchDistOutput:
    """The files of a checkpoint, from what is in them. Implements `Routes` and `Seals` of a job.

    Args:
        columns: The tensors, in the order in which their sources are read.
        buckets: The stored parts of flat buckets; their records come after those of the tensors.
        objects: The objects.

    Attributes:
        files: The data files, by rank.
        apart: See `Seals`.
    """

    apart = True

    def __init__(self, columns: Columns, buckets: Sequence[BucketOut], objects: Sequence[ObjectOut]) -> None:
        self.columns, self.buckets, self._objects = columns, buckets, objects
        ranks = sorted({*columns.ranks, *(b.rank for b in buckets), *(o.rank for o in objects)})
        number_of = {rank: number for number, rank in enumerate(ranks)}
        self._locate_objects(number_of)
        numbers = np.asarray([number_of[rank] for rank in columns.ranks], np.int64)
        same = len(numbers) == len(ranks)  # both ascend
        file = columns.file if same else numbers[columns.file]
        ends = self._begin.copy()
        ends[numbers] += np.asarray(columns.sizes, np.int64)
        bucket_file = np.asarray([number_of[b.rank] for b in buckets], file.dtype)
        bucket_length = np.asarray([b.layout.length for b in buckets], np.int64)
        bucket_start, sizes = stack(bucket_file, bucket_length, len(ranks))
        # of every record, those of the buckets behind those of the tensors
        self._file: NDArray[Any] = np.concatenate([file, bucket_file])
        self._start = np.concatenate([columns.start + self._begin[file], bucket_start + ends[bucket_file]])
        self._length = np.concatenate([columns.length, bucket_length])
        self._in_buckets = CopyRoutes.of(self._located_pieces())
        self.files = self._output_files(ranks, (ends + sizes).tolist())

    def _located_pieces(self) -> Iterator[tuple[Piece, Location]]:
        """The pieces of the buckets, each with its place in the files."""
        for number, bucket in enumerate(self.buckets):
            inside, record = 0, self.columns.records + number
            file, start = self._where(record)
            for piece in bucket.pieces:
                yield piece, Location(file, start + len(bucket.layout.prefix) + inside, record, inside)
                inside += piece.nbytes

    def _locate_objects(self, number_of: Mapping[int, int]) -> None:
        ends = [0] * len(number_of)
        self.object_spans: list[tuple[int, int]] = []
        for item in self._objects:
            number = number_of[item.rank]
            self.object_spans.append((number, ends[number]))
            ends[number] += item.length
        self._begin = np.asarray(ends, np.int64)  # where the tensors of each file begin

    def _output_files(self, ranks: Sequence[int], sizes: Sequence[int]) -> list[OutputFile]:
        slices: list[list[Slice]] = [[] for _ in ranks]
        for item, (number, at) in zip(self._objects, self.object_spans, strict=True):
            slices[number].append(Slice(at, item.content))
        return [
            OutputFile(f"__{rank}_0.distcp", size, slices=tuple(file_slices))
            for rank, size, file_slices in zip(ranks, sizes, slices, strict=True)
        ]

    # ------------------------------------------------------------------ Routes

    def sources(self) -> Sequence[str]:
        """See `Routes`."""
        names = self.columns.names
        return list(dict.fromkeys([*names, *self._in_buckets.copies])) if self.buckets else names

    def prove(self, sources: Mapping[str, Sequence[int]], drops: Iterable[Drop]) -> None:
        """See `Routes`: tensors that are cut alike once."""
        drops, flat = list(drops), self._in_buckets.copies
        self.columns.prove(drops)
        self._in_buckets.prove({name: sources[name] for name in flat}, [drop for drop in drops if drop.source in flat])

    def kinds(self, sources: Mapping[str, TensorInfo]) -> set[Kind]:
        """See `Routes`."""
        columns, kinds = self.columns, self._in_buckets.kinds(sources)
        numbers, firsts = np.unique(columns.array, return_index=True)  # the tensors of an array are alike
        for number, first in zip(numbers.tolist(), firsts.tolist(), strict=True):
            kinds.add((sources[columns.names[first]].dtype, columns.arrays[number].cut.dtype, Op.COPY))
        return {(old, new, op) for old, new, op in kinds if old != new}

    def reached(self, source: str, box: Box) -> Iterator[Move]:
        """See `Routes`."""
        columns, number = self.columns, self.columns.number.get(source)
        if number is not None:
            cut, first = columns.arrays[columns.array[number]].cut, int(columns.first[number])
            for record, (piece, layout) in enumerate(zip(cut.pieces, cut.layouts, strict=True), first):
                for copy in piece.copies:
                    taken = copy.source_box.intersect(box) if box.shape else box
                    if taken is not None:
                        file, start = self._where(record)
                        array = (file, start + len(layout.prefix), piece.shape)
                        yield Move(taken, *array, target_box_of(copy, taken), piece.dtype, record=record)
        yield from self._in_buckets.reached(source, box)

    def touched(self, source: str, box: Box) -> tuple[Iterable[int], int]:
        """See `Routes`."""
        columns, number = self.columns, self.columns.number.get(source)
        if number is None or source in self._in_buckets.copies:
            return total(self.reached(source, box))
        cut = columns.arrays[columns.array[number]].cut
        if box.shape != cut.source_shape:
            return total(self.reached(source, box))
        first = int(columns.first[number])
        volume = box.volume
        elements = min(cut.shape[0], box.shape[0]) * (volume // box.shape[0]) if volume and box.shape else 1
        files = self._file[first : first + len(cut.boxes)].tolist()
        return files, elements * cut.dtype.itemsize if volume else 0

    def digest(self) -> str:
        """See `Routes`."""
        digest = hashlib.sha256(self.columns.digest.encode())
        digest.update(self._in_buckets.digest().encode())
        for bucket in self.buckets:
            digest.update(f"{bucket.key}:{bucket.start}:{bucket.numel}@{bucket.rank};".encode())
        for item in self._objects:
            digest.update(f"{item.key}@{item.rank};".encode())
        for file, begin in zip(self.files, self._begin.tolist(), strict=True):
            digest.update(f"{file.name}:{begin}:{file.size};".encode())
        return digest.hexdigest()

    # ------------------------------------------------------------------ Seals

    def fills(self) -> Iterator[tuple[int, int, int]]:
        """See `Seals`."""
        columns = self.columns
        for number, array in enumerate(columns.arrays):
            spans = [(at, *span) for at, piece in enumerate(array.cut.pieces) for span in _zero_bytes(piece)]
            for first in columns.first[:-1][columns.array == number].tolist() if spans else ():
                yield from ((first + at, start, nbytes) for at, start, nbytes in spans)
        for record, bucket in enumerate(self.buckets, columns.records):
            if not bucket.length:
                yield record, 0, 0
        for piece, location in zip(self._in_buckets.pieces, self._in_buckets.locations, strict=True):
            yield from ((location.record, location.base + start, nbytes) for start, nbytes in piece.zero_bytes())

    def nbytes(self, record: int) -> int:
        """See `Seals`."""
        return self._layout(record).nbytes

    def seal(self, record: int, crc: int) -> tuple[int, list[tuple[int, bytes]]]:
        """See `Seals`."""
        layout = self._layout(record)
        file, start = self._where(record)
        end = start + len(layout.prefix) + layout.nbytes
        return file, [(start, layout.prefix), (end, layout.suffix(crc))]

    def rereads(self) -> Iterable[tuple[int, int, int]]:
        """See `Seals`."""
        return ()

    def end(self) -> Iterable[tuple[int, list[tuple[int, bytes]]]]:
        """See `Seals`."""
        return ()

    def _where(self, record: int) -> tuple[int, int]:
        """File and first byte of a record."""
        return int(self._file[record]), int(self._start[record])

    def _layout(self, record: int) -> RecordLayout:
        columns = self.columns
        if record >= columns.records:
            return self.buckets[record - columns.records].layout
        number = int(np.searchsorted(columns.first, record, side="right")) - 1
        layouts: Sequence[RecordLayout] = columns.arrays[columns.array[number]].cut.layouts
        return layouts[record - int(columns.first[number])]

    # ------------------------------------------------------------------ metadata

    def metadata(self, name: str) -> bytes:
        """The contents of `.metadata`.

        Args:
            name: What to record as the checkpoint's id: the folder's name.
        """
        tables = [self._table(a, numbers) for a, numbers in self._members()]
        by_key: dict[str, list[int]] = {}
        for number, bucket in enumerate(self.buckets):
            by_key.setdefault(bucket.key, []).append(number)
        tables += [self._bucket(key, numbers) for key, numbers in by_key.items()]
        objects = ((o.key, file, at, o.length) for o, (file, at) in zip(self._objects, self.object_spans, strict=True))
        names = [file.name for file in self.files]
        return write_metadata(tables, objects, names, checkpoint_id=name, save_id=f"distckpt {__version__}")

    def _members(self) -> Iterator[tuple[ArrayOut, NDArray[np.int64]]]:
        """Every array with the positions of its tensors."""
        columns = self.columns
        order = np.argsort(columns.array, kind="stable")
        bounds = np.searchsorted(columns.array[order], np.arange(len(columns.arrays) + 1)).tolist()
        for number, array in enumerate(columns.arrays):
            yield array, order[bounds[number] : bounds[number + 1]]

    def _table(self, array: ArrayOut, numbers: NDArray[np.int64]) -> StoredTensor:
        cut, depth, columns = array.cut, len(array.lead), self.columns
        count, ndim = len(cut.boxes), len(cut.shape)
        rows = (columns.first[numbers][:, None] + np.arange(count)).reshape(-1)
        starts = np.array([box.start for box in cut.boxes], np.int64).reshape(count, ndim)
        extents = np.array([box.shape for box in cut.boxes], np.int64).reshape(count, ndim)
        prefixes = columns.prefix[numbers, :depth].astype(np.int64)
        offsets = np.hstack([np.repeat(prefixes, count, axis=0), np.tile(starts, (len(numbers), 1))])
        sizes = np.hstack([np.ones((len(rows), depth), np.int64), np.tile(extents, (len(numbers), 1))])
        return StoredTensor(array.key, cut.dtype.name, array.shape, offsets, sizes, *self._places(rows))

    def _bucket(self, key: str, numbers: Sequence[int]) -> StoredTensor:
        parts = [self.buckets[number] for number in numbers]
        offsets, sizes = (np.array([[getattr(part, name)] for part in parts], np.int64) for name in ("start", "length"))
        rows = self.columns.records + np.asarray(numbers)
        return StoredTensor(key, parts[0].dtype.name, (parts[0].numel,), offsets, sizes, *self._places(rows))

    def _places(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]:
        """File, first byte and bytes of records."""
        return self._file[rows].astype(np.int32), self._start[rows], self._length[rows]


def _zero_bytes(piece: Piece) -> Iterator[tuple[int, int]]:
    """`(first byte, bytes)` of a record that no source fills; `(0, 0)` for one without elements: it is sealed, too."""
    return piece.zero_bytes() if piece.nbytes else iter([(0, 0)])
