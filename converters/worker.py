"""One worker of the engine: gathers a tile from the source's records, scatters it into the output files."""

from __future__ import annotations

import itertools
import os
import zlib
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from converters.box import Box, runs
from converters.errors import FormatError
from converters.formats.folder import close_source, open_source, read_at
from converters.names import printable
from converters.plan import Op
from converters.publish import os_trouble, write_at

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from converters.catalog import Chunk
    from converters.crc import RecordSums, Segment
    from converters.dtypes import DType
    from converters.formats.base import Reader
    from converters.job import Job, Move, Task, Tile
    from converters.publish import Staging
    from converters.records import Payload
    from converters.team import TeamStaging

    Bytes = NDArray[np.uint8]

__all__ = ["Segments", "Worker"]

_OPEN_FILES = 128
_DROP_BYTES = 1 << 20  # smaller ranges are not worth a system call
_UNSIGNED: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("<u2"),
    4: np.dtype("<u4"),
    8: np.dtype("<u8"),
    16: np.dtype("<c16"),
}
# what torch takes from numpy without a copy
_SIGNED: dict[int, np.dtype[Any]] = _UNSIGNED | {n: np.dtype(f"i{n}") for n in (1, 2, 4, 8)}

Segments = list[tuple[int, int, int, int]]


class Shared(Protocol):
    """What a worker needs of the run it belongs to."""

    job: Job
    reader: Reader
    staging: Staging | TeamStaging
    sums: RecordSums

    def should_stop(self) -> bool: ...
    def count_read(self, nbytes: int) -> None: ...
    def chunks_of(self, source: str) -> list[Chunk]: ...
    def payload(self, record: int, locate: Callable[[], Payload]) -> Payload: ...
    def check_sum(self, record: int, payload: Payload) -> None: ...
    def wrote(self, record: int, segment: Segment, log: Segments) -> None: ...


class Worker:
    """Buffers and open files of one thread. Nothing here grows with the model.

    Attributes:
        written: Checksums of what the current task wrote into sealed records.
    """

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._tile = np.empty(0, np.uint8)
        self._scratch = np.empty(0, np.uint8)
        self._sources = _OpenFiles(open_source, close_source)
        self._outputs = _OpenFiles(_open_output, os.close)
        self._segments: Segments = []
        self.written: Segments = []

    def close(self) -> None:
        """Closes all files.

        Raises:
            DestinationError: An output could not be closed; some file systems say only then that writing failed.
        """
        self._sources.close()
        try:
            self._outputs.close()
        except OSError as error:
            raise os_trouble(error, self._shared.staging.folder, "writing to") from error

    def do(self, task: Task) -> Segments | None:
        """Does a task; returns the checksums of what was read, or None if it was asked to stop before the end."""
        self._segments, self.written = [], []
        for tile in task.tiles:
            if self._shared.should_stop():
                return None
            elements = self._gather(tile)
            for move in self._shared.job.routes.reached(tile.source, tile.box):
                self._scatter(tile, elements, move)
        return self._segments

    # ------------------------------------------------------------------ reading

    def payload(self, record: int) -> Payload:
        """Where a record's elements lie."""
        reader = self._shared.reader
        path = reader.files[reader.file_of(record)]
        return self._shared.payload(record, lambda: reader.locate(record, self._reader(path)))

    def _reader(self, path: Path) -> Callable[[int, int], bytes]:
        def read(offset: int, length: int) -> bytes:
            try:
                return read_at(self._sources.get(path), offset, length)
            except OSError as error:
                raise _unreadable(path, error) from error

        return read

    def _gather(self, tile: Tile) -> NDArray[Any]:
        """The elements of a tile, as unsigned integers of their size, in the tile's shape."""
        dtype = self._shared.job.sources[tile.source].dtype
        nbytes = tile.box.volume * dtype.itemsize
        self._tile = _at_least(self._tile, nbytes)
        elements: NDArray[Any] = self._tile[:nbytes].view(_UNSIGNED[dtype.itemsize]).reshape(tile.box.shape)
        for chunk in self._shared.chunks_of(tile.source):
            part = chunk.box.intersect(tile.box) if tile.box.shape else tile.box
            if part is not None:
                self._read_part(chunk, part, elements[part.relative_to(tile.box.start).slices], dtype)
        return elements

    def _read_part(self, chunk: Chunk, part: Box, into: NDArray[Any], dtype: DType) -> None:
        payload = self.payload(chunk.record)
        size = dtype.itemsize
        first, length, outer = runs(part.relative_to(chunk.box.start), chunk.box.shape)
        begin = payload.offset + (chunk.base + first) * size
        if begin + length * size > payload.offset + payload.nbytes:
            raise FormatError(f"a chunk reaches beyond its record of {payload.nbytes} bytes")
        straight = into.flags.c_contiguous
        if straight:
            packed = into.reshape(-1).view(np.uint8)
        else:
            self._scratch = _at_least(self._scratch, part.volume * size)
            packed = self._scratch[: part.volume * size]
        at = 0
        for skip in _offsets(outer):
            piece = packed[at : at + length * size]
            self._read_bytes(chunk.record, payload, begin + skip * size, piece)
            at += length * size
        if not straight:
            np.copyto(into, packed.view(into.dtype).reshape(into.shape))
        self._shared.check_sum(chunk.record, payload)

    def _read_bytes(self, record: int, payload: Payload, offset: int, into: Bytes) -> None:
        """Reads a range of a record, adds its checksum, and lets the page cache forget it."""
        if not into.size:
            return
        reader = self._shared.reader
        path = reader.files[reader.file_of(record)]
        view, at = into.data, 0
        try:
            fd = self._sources.get(path)
            while at < len(view):
                n = os.preadv(fd, [view[at:]], offset + at)
                if not n:
                    raise FormatError(
                        f"{printable(path.name)} ends early", details=[f"needed bytes up to {offset + len(view)}"]
                    )
                at += n
            if len(view) >= _DROP_BYTES:
                os.posix_fadvise(fd, offset, len(view), os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise _unreadable(path, error) from error
        self._shared.count_read(len(view))
        if payload.crc is not None:
            segment = (offset - payload.crc_offset, len(view), zlib.crc32(view))
            self._shared.sums.add(record, segment)
            self._segments.append((record, *segment))

    def read_through(self, record: int, payload: Payload, start: int, nbytes: int) -> None:
        """Reads a range of a record's member for its checksum alone."""
        step = self._shared.job.tile_bytes
        self._scratch = _at_least(self._scratch, min(step, nbytes))
        for at in range(start, start + nbytes, step):
            piece = self._scratch[: min(step, start + nbytes - at)]
            self._read_bytes(record, payload, payload.crc_offset + at, piece)

    # ------------------------------------------------------------------ writing

    def _scatter(self, tile: Tile, elements: NDArray[Any], move: Move) -> None:
        values = elements[move.part.relative_to(tile.box.start).slices]
        if move.op is Op.TRANSPOSE:
            values = values.T
        source_type = self._shared.job.sources[tile.source].dtype
        if move.dtype != source_type or move.op in (Op.ADD_ONE, Op.SUBTRACT_ONE):
            values = self._convert(values, source_type, move.dtype, move.op)
        elif not values.flags.c_contiguous:
            self._scratch = _at_least(self._scratch, values.nbytes)
            packed = self._scratch[: values.nbytes].view(values.dtype).reshape(values.shape)
            np.copyto(packed, values)
            values = packed
        size = move.dtype.itemsize
        first, length, outer = runs(move.landing, move.shape)
        data, at = values.reshape(-1).view(np.uint8).data, 0
        path = self._shared.staging.folder / self._shared.job.files[move.file].name
        try:
            fd = self._outputs.get(path)
            for skip in _offsets(outer):
                piece, inside = data[at : at + length * size], (first + skip) * size
                write_at(fd, piece, move.offset + inside)
                if move.record >= 0:
                    self._shared.wrote(move.record, (inside, len(piece), zlib.crc32(piece)), self.written)
                at += length * size
            if not outer and len(data) >= _DROP_BYTES:  # also starts the write-back, so that the last sync is short
                os.posix_fadvise(fd, move.offset + first * size, len(data), os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise os_trouble(error, path, "writing") from error

    def _convert(self, values: NDArray[Any], source: DType, target: DType, op: Op) -> NDArray[Any]:
        """Casts and shifts with torch, whose rounding is the one training used; norm shifts are done in fp32."""
        import torch

        nbytes = values.size * target.itemsize
        self._scratch = _at_least(self._scratch, nbytes)
        result = self._scratch[:nbytes]
        if values.size:
            # strided as it is (a transposed tile): no copy in between
            taken = torch.from_numpy(values.view(_SIGNED[source.itemsize])).view(getattr(torch, source.name))
            if op is Op.ADD_ONE:
                taken = taken.float() + 1
            elif op is Op.SUBTRACT_ONE:
                taken = taken.float() - 1
            torch.frombuffer(result.data, dtype=getattr(torch, target.name)).reshape(values.shape).copy_(taken)
        converted: NDArray[Any] = result.view(_UNSIGNED[target.itemsize]).reshape(values.shape)
        return converted


class _OpenFiles:
    """A few open file descriptors, least recently used closed first."""

    def __init__(self, opener: Callable[[Path], int], closer: Callable[[int], None]) -> None:
        self._opener, self._closer = opener, closer
        self._open: OrderedDict[Path, int] = OrderedDict()

    def get(self, path: Path) -> int:
        """The descriptor of a file."""
        fd = self._open.get(path)
        if fd is None:
            if len(self._open) >= _OPEN_FILES:
                self._closer(self._open.popitem(last=False)[1])
            fd = self._open[path] = self._opener(path)
        else:
            self._open.move_to_end(path)
        return fd

    def close(self) -> None:
        """Closes all, then raises the first trouble there was."""
        trouble: OSError | None = None
        while self._open:
            try:
                self._closer(self._open.popitem()[1])
            except OSError as error:
                trouble = trouble or error
        if trouble is not None:
            raise trouble


def _open_output(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _unreadable(path: Path, error: OSError) -> FormatError:
    return FormatError(f"reading {printable(path.name)} failed: {error.strerror or error}")


def _at_least(buffer: Bytes, nbytes: int) -> Bytes:
    return buffer if buffer.nbytes >= nbytes else np.empty(nbytes, np.uint8)


def _offsets(outer: Sequence[tuple[int, int]]) -> Iterator[int]:
    """Element offsets of the runs of a box, from the (count, stride) pairs that `box.runs` gives."""
    if not outer:
        yield 0
        return
    for index in itertools.product(*(range(count) for count, _ in outer)):
        yield sum(i * stride for i, (_, stride) in zip(index, outer, strict=True))
