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
import io
import pickle
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from converters import __version__
from converters.errors import RequestError
from converters.job import Move, OutputFile, Slice
from converters.records_out import RecordLayout

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from converters.box import Box
    from converters.dtypes import DType

__all__ = ["Cut", "ObjectOut", "TensorOut", "TorchDistOutput"]


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

    def __init__(self, tensors: Sequence[TensorOut], objects: Sequence[ObjectOut]) -> None:
        self._tensors, self._objects = tensors, objects
        self._at: dict[str, list[int]] = {}
        for number, tensor in enumerate(tensors):
            self._at.setdefault(tensor.source, []).append(number)
        self._firsts = np.cumsum([0, *(len(t.cut.boxes) for t in tensors)])
        rank = np.concatenate([np.zeros(0, np.int64), *(np.asarray(t.ranks, np.int64) for t in tensors)])
        length = self._per_piece(lambda cut: [layout.length for layout in cut.layouts])
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

    def _per_piece(self, value: Any) -> NDArray[np.int64]:
        known: dict[int, NDArray[np.int64]] = {}
        parts = [np.zeros(0, np.int64)]
        for tensor in self._tensors:
            if id(tensor.cut) not in known:
                known[id(tensor.cut)] = np.asarray(value(tensor.cut), np.int64)
            parts.append(known[id(tensor.cut)])
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
        return (self._tensors[number].cut.dtype.itemsize for number in self._at[source])

    def reached(self, source: str, box: Box) -> Iterator[Move]:
        """See `Routes`."""
        for number in self._at[source]:
            cut, first = self._tensors[number].cut, int(self._firsts[number])
            for piece, (target, layout) in enumerate(zip(cut.boxes, cut.layouts, strict=True)):
                part = target.intersect(box) if box.shape else box
                if part is not None:
                    record = first + piece
                    begin = int(self._start[record]) + len(layout.prefix)
                    landing = part.relative_to(target.start)
                    yield Move(part, int(self._file[record]), begin, target.shape, landing, cut.dtype, record=record)

    def digest(self) -> str:
        """See `Routes`."""
        digest = hashlib.sha256()
        for tensor in self._tensors:
            digest.update(f"{tensor.source}>{tensor.key}{tensor.prefix}{tensor.lead}{tensor.cut.dtype};".encode())
        for thing in self._objects:
            content = thing.content if isinstance(thing.content, bytes) else str(thing.content).encode()
            digest.update(f"{thing.key}@{thing.rank}".encode() + hashlib.sha256(content).digest())
        for array in (self._file, self._start, self._length):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    # ------------------------------------------------------------------ Seals

    def fills(self) -> Iterator[tuple[int, int, int]]:
        """See `Seals`: rows of the padded vocabulary that the source does not have, and empty records."""
        for number, tensor in enumerate(self._tensors):
            cut = tensor.cut
            if cut.source_shape == cut.shape and cut.shape and all(box.volume for box in cut.boxes):
                continue
            for piece, (box, layout) in enumerate(zip(cut.boxes, cut.layouts, strict=True)):
                record = int(self._firsts[number]) + piece
                if not layout.nbytes:
                    yield record, 0, 0
                elif cut.shape and box.stop[0] > cut.source_shape[0]:
                    kept = max(0, cut.source_shape[0] - box.start[0])
                    row = layout.nbytes // box.shape[0]
                    yield record, kept * row, layout.nbytes - kept * row

    def nbytes(self, record: int) -> int:
        """See `Seals`."""
        return self._piece(record)[1].nbytes

    def seal(self, record: int, crc: int) -> tuple[int, list[tuple[int, bytes]]]:
        """See `Seals`."""
        layout = self._piece(record)[1]
        start = int(self._start[record])
        end = start + len(layout.prefix) + layout.nbytes
        return int(self._file[record]), [(start, layout.prefix), (end, layout.suffix(crc))]

    def _piece(self, record: int) -> tuple[TensorOut, RecordLayout]:
        number = int(np.searchsorted(self._firsts, record, side="right")) - 1
        tensor = self._tensors[number]
        return tensor, tensor.cut.layouts[record - int(self._firsts[number])]

    # ------------------------------------------------------------------ metadata

    def metadata(self, name: str) -> bytes:
        """The contents of `.metadata`, with torch's own classes, for torch DCP and every Megatron-Core.

        Args:
            name: What to record as the checkpoint's id: the folder's name.
        """
        from torch import Size
        from torch.distributed.checkpoint import metadata as dcp
        from torch.distributed.checkpoint.filesystem import _StorageInfo

        names = [file.name for file in self.files]
        tensors: dict[str, Any] = {}
        storage: dict[Any, Any] = {}
        for thing, (number, at) in zip(self._objects, self.object_places, strict=True):
            tensors[thing.key] = dcp.BytesStorageMetadata()
            storage[dcp.MetadataIndex(thing.key)] = _StorageInfo(names[number], at, thing.length)
        ones: dict[int, tuple[int, ...]] = {n: (1,) * n for n in range(4)}
        for first, tensor in zip(self._firsts.tolist(), self._tensors, strict=False):
            entry = tensors.get(tensor.key)
            if entry is None:
                entry = tensors[tensor.key] = dcp.TensorStorageMetadata(
                    _properties(tensor.cut.dtype), Size((*tensor.lead, *tensor.cut.shape)), []
                )
            where = zip(
                self._file[first : first + len(tensor.ranks)].tolist(),
                self._start[first : first + len(tensor.ranks)].tolist(),
                self._length[first : first + len(tensor.ranks)].tolist(),
                strict=True,
            )
            for box, (file, start, length) in zip(tensor.cut.boxes, where, strict=True):
                offset = Size((*tensor.prefix, *box.start))
                size = Size((*ones[len(tensor.prefix)], *box.shape))
                entry.chunks.append(dcp.ChunkStorageMetadata(offset, size))
                storage[dcp.MetadataIndex(tensor.key, offset)] = _StorageInfo(names[file], start, length)
        document = dcp.Metadata(
            tensors, None, storage, dcp.StorageMeta(checkpoint_id=name, save_id=f"distckpt {__version__}")
        )
        # readers before Megatron-Core 0.15 look here for flattened tensors; nothing of ours is
        document.mcore_data = {key: {} for key, entry in tensors.items() if hasattr(entry, "chunks")}  # type: ignore[attr-defined]
        buffer = io.BytesIO()
        pickle.Pickler(buffer, protocol=4).dump(document)
        return buffer.getvalue()


def _properties(dtype: DType) -> Any:
    import torch
    from torch.distributed.checkpoint.metadata import TensorProperties

    return TensorProperties(dtype=getattr(torch, dtype.name))


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


def check_tiling(sources: Mapping[str, Any], tensors: Sequence[TensorOut]) -> None:
    """Checks that the pieces of every tensor tile it, once for each way of cutting.

    Raises:
        RequestError: They do not.
    """
    from converters.box import find_overlap, uncovered

    seen: set[int] = set()
    for tensor in tensors:
        if tensor.source not in sources:
            raise RequestError(f"the checkpoint has no tensor {tensor.source}", tensor=tensor.source)
        if id(tensor.cut) in seen:
            continue
        seen.add(id(tensor.cut))
        if uncovered(tensor.cut.shape, tensor.cut.boxes) is not None or find_overlap(tensor.cut.boxes) is not None:
            raise RequestError(f"the pieces of {tensor.source} do not tile it", tensor=tensor.source)
