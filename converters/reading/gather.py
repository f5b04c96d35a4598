"""Reading boxes of stored tensors, whatever they are stored in, with every checksum that there is checked on the way.

sources = Sources(reader, reader.catalog.tensors)     # shared by all threads
gatherer = Gatherer(sources)                          # one for each thread
bits = gatherer.gather("output_layer.weight", box)    # unsigned integers of the element's size
...
sources.complete(gatherer)                            # what is still unread of records that were read in part
"""

from __future__ import annotations

import itertools
import os
import threading
import zlib
from collections import OrderedDict
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from converters.box import Box, runs
from converters.crc import RecordSums
from converters.errors import FormatError, IntegrityError
from converters.facts.damage import check_stored
from converters.formats.folder import close_source, open_source, read_at
from converters.names import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from converters.archive.records import Payload
    from converters.catalog import Chunk, TensorInfo
    from converters.formats.base import Reader

    Bytes = NDArray[np.uint8]

__all__ = ["DROP_BYTES", "UNSIGNED", "Gatherer", "OpenFiles", "Segments", "Sources", "offsets"]

_File = TypeVar("_File")
_OPEN_FILES = 128
_KEPT_PAYLOADS = 1 << 16
_KEPT_CHUNKS = 64
_LEAST_READ = 1 << 20
_SHORT_RUN = 64 << 10
DROP_BYTES = 1 << 20
"""Smaller ranges are not worth the system call that makes the page cache forget them."""
UNSIGNED: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("<u2"),
    4: np.dtype("<u4"),
    8: np.dtype("<u8"),
    16: np.dtype("<c16"),
}
"""What elements are held as, by their size in bytes: values are moved, not looked at."""

Segments = list[tuple[int, int, int, int]]
"""`(record, first byte within its member, bytes, CRC-32)`."""


class Sources:
    """The tensors of a run, shared by its threads: where their records lie, and their checksums as far as they were read.

    Args:
        reader: The checkpoint.
        tensors: What will be read, by name.
        damaged: Called for each record that does not match its checksum; by default the error is raised.
        sums: What keeps the checksums of pieces; by default a `RecordSums`.
        drop: Let the page cache forget what was read. Not where another process is about to read the same.
        checked: Compute and compare checksums; not of what has been checked before.

    Attributes:
        sums: Checksums of pieces of records that have not been read whole.
        bytes_read: Bytes of records read so far.
        records_checked: Records whose checksum was compared so far.
    """

    def __init__(
        self,
        reader: Reader,
        tensors: Mapping[str, TensorInfo],
        damaged: Callable[[IntegrityError], None] | None = None,
        *,
        sums: RecordSums | None = None,
        drop: bool = True,
        checked: bool = True,
    ) -> None:
        self.reader, self.tensors, self.drop, self.checked = reader, tensors, drop, checked
        self.sums = RecordSums() if sums is None else sums
        self.bytes_read = self.records_checked = 0
        self._damaged = damaged
        self._payloads: OrderedDict[int, Payload] = OrderedDict()
        self._chunks: OrderedDict[str, list[Chunk]] = OrderedDict()
        self._lock = threading.Lock()

    def chunks(self, name: str) -> list[Chunk]:
        """The stored pieces of a tensor, checked to tile it.

        Raises:
            IntegrityError: A hole, an overlap, or a missing record.
        """
        with self._lock:
            known = self._chunks.get(name)
            if known is not None:
                self._chunks.move_to_end(name)
                return known
        info = self.tensors[name]
        check_stored(info)
        made = info.chunks()
        with self._lock:
            self._chunks[name] = made
            while len(self._chunks) > _KEPT_CHUNKS:
                self._chunks.popitem(last=False)
        return made

    def payload(self, record: int, locate: Callable[[], Payload]) -> Payload:
        """Where a record's elements lie; `locate` finds out the first time."""
        known = self._payloads.get(record)
        if known is None:
            known = locate() if self.checked else replace(locate(), crc=None)
            with self._lock:
                self._payloads[record] = known
                while len(self._payloads) > _KEPT_PAYLOADS:
                    self._payloads.popitem(last=False)
        return known

    def read(self, nbytes: int) -> None:
        """Notes bytes that were read."""
        with self._lock:
            self.bytes_read += nbytes

    def check(self, record: int, payload: Payload) -> None:
        """Compares a record's checksum if all of it has been read, and forgets the record.

        Raises:
            IntegrityError: They differ.
        """
        if payload.crc is None:
            return
        found = self.sums.take(record, payload.crc_nbytes)
        if found is None:
            return
        with self._lock:
            self.records_checked += 1
            self._payloads.pop(record, None)
        if found == payload.crc:
            return
        file, tensor = self.reader.files[self.reader.file_of(record)].name, self._owner(record)
        error = IntegrityError(
            f"{printable(file)} is damaged: the bytes of {printable(tensor)} do not match their checksum",
            details=[
                f"record at byte {payload.crc_offset}, {payload.crc_nbytes} bytes: "
                f"stored CRC-32 {payload.crc:08x}, computed {found:08x}"
            ],
            hint="restore this file from a copy, or use another iteration",
            tensor=tensor,
        )
        if self._damaged is None:
            raise error
        self._damaged(error)

    def complete(self, gatherer: Gatherer, check: Callable[[], None] = lambda: None) -> None:
        """Reads what is still unread of records that were read in part, so that every record used is checked.

        Args:
            gatherer: What reads it.
            check: Called before each record; raises if there is no time for it any more.

        Raises:
            IntegrityError: One does not match its checksum.
        """
        for record in sorted(self.sums.pieces):
            check()
            payload = gatherer.payload(record)
            for start, nbytes in self.sums.gaps(record, payload.crc_nbytes):
                gatherer.read_through(record, payload, start, nbytes)
            self.check(record, payload)
            if record in self.sums.pieces:  # parts of it were read twice, in other pieces: their sums cannot be joined
                self.sums.forget(record)
                gatherer.read_through(record, payload, 0, payload.crc_nbytes)
                self.check(record, payload)

    def _owner(self, record: int) -> str:
        """The tensor that a record belongs to; looked for only when something is wrong with it."""
        for name, info in self.tensors.items():
            if any((part.array.records[part.rows()] == record).any() for part in info.parts):
                return name
        return "?"


class Gatherer:
    """Buffers and open files of one thread that reads. Nothing here grows with the model.

    Args:
        sources: The tensors.
        allocate: Makes a buffer of so many bytes; ordinary memory by default.

    Attributes:
        segments: Checksums of what was read; whoever wants them empties the list from time to time, or sets None.
    """

    def __init__(self, sources: Sources, allocate: Callable[[int], Bytes] | None = None) -> None:
        self._sources = sources
        self._allocate = allocate or _ordinary
        self._tile = np.empty(0, np.uint8)
        self._scratch = np.empty(0, np.uint8)
        self._files = OpenFiles(open_source, close_source)
        self.segments: Segments | None = None

    def close(self) -> None:
        """Closes all files."""
        self._files.close()

    def gather(self, name: str, box: Box, into: Bytes | None = None) -> NDArray[Any]:
        """The elements of a box of a tensor, as unsigned integers of their size, in the box's shape and C order.

        Args:
            name: The tensor.
            box: In its coordinates.
            into: At least as many bytes as are needed, to be filled; by default a buffer that the next call fills anew.

        Raises:
            IntegrityError: Part of the tensor is not stored, or a record does not match its checksum.
            FormatError: A file cannot be read, or ends early.
        """
        dtype = self._sources.tensors[name].dtype
        nbytes = box.volume * dtype.itemsize
        if into is None:
            into = self._tile = self._resized(self._tile, nbytes)
        elements: NDArray[Any] = into[:nbytes].view(UNSIGNED[dtype.itemsize]).reshape(box.shape)
        for chunk in self._sources.chunks(name):
            part = chunk.box.intersect(box) if box.shape else box
            if part is not None:
                self._read_part(chunk, part, elements[part.relative_to(box.start).slices], dtype.itemsize)
        return elements

    def payload(self, record: int) -> Payload:
        """Where a record's elements lie."""
        reader = self._sources.reader
        path = reader.files[reader.file_of(record)]
        return self._sources.payload(record, lambda: reader.locate(record, self._reader(path)))

    def read_through(self, record: int, payload: Payload, start: int, nbytes: int) -> None:
        """Reads a range of a record's member for its checksum alone, a tile at a time."""
        buffer = self.scratch(min(max(len(self._tile), _LEAST_READ), nbytes))
        for at in range(start, start + nbytes, len(buffer)):
            piece = buffer[: min(len(buffer), start + nbytes - at)]
            self._read_bytes(record, payload, payload.crc_offset + at, piece)

    def scratch(self, nbytes: int) -> Bytes:
        """A buffer for whatever the thread does with a tile, until it gathers the next one."""
        self._scratch = self._resized(self._scratch, nbytes)
        return self._scratch[:nbytes]

    def _resized(self, buffer: Bytes, nbytes: int) -> Bytes:
        return buffer if buffer.nbytes >= nbytes else self._allocate(nbytes)

    def _reader(self, path: Path) -> Callable[[int, int], bytes]:
        def read(offset: int, length: int) -> bytes:
            return read_at(self._files.get(path), offset, length)

        return read

    def _read_part(self, chunk: Chunk, part: Box, into: NDArray[Any], size: int) -> None:
        payload = self.payload(chunk.record)
        first, length, outer = runs(part.relative_to(chunk.box.start), chunk.box.shape)
        begin = payload.offset + (chunk.base + first) * size
        if begin + length * size > payload.offset + payload.nbytes:
            raise FormatError(f"a chunk reaches beyond its record of {payload.nbytes} bytes")
        straight = into.flags.c_contiguous
        packed = into.reshape(-1).view(np.uint8) if straight else self.scratch(part.volume * size)
        at, strip = 0, outer[-1] if outer and length * size < _SHORT_RUN else None
        for skip in offsets(outer[:-1] if strip else outer):
            nbytes = length * size * (strip[0] if strip else 1)
            piece = packed[at : at + nbytes]
            if strip:
                self._read_strip(
                    chunk.record, payload, begin + skip * size, strip[1] * size, piece.reshape(strip[0], -1)
                )
            else:
                self._read_bytes(chunk.record, payload, begin + skip * size, piece)
            at += nbytes
        if not straight:
            np.copyto(into, packed.view(into.dtype).reshape(into.shape))
        self._sources.check(chunk.record, payload)

    def _read_strip(self, record: int, payload: Payload, offset: int, stride: int, into: Bytes) -> None:
        """Reads short runs of a record, one each `stride` bytes, into the rows of `into`: columns of a matrix.

        A system call for each, but everything around it once for all of them.
        """
        sums: list[int] = []
        path = self._sources.reader.files[self._sources.reader.file_of(record)]
        length = into.shape[1]
        try:
            source = self._files.get(path)
            fd, begin = source.fd, source.base + offset
            if offset + (len(into) - 1) * stride + length > source.size:
                raise _short(path, offset + (len(into) - 1) * stride + length)
            for number, row in enumerate(into):
                at, got = begin + number * stride, os.preadv(fd, [row.data], begin + number * stride)
                while got < length:  # network file systems may give less than was asked for
                    more = os.preadv(fd, [row.data[got:]], at + got)
                    if not more:
                        raise _short(path, at - source.base + length)
                    got += more
                if payload.crc is not None:
                    sums.append(zlib.crc32(row.data))
        except OSError as error:
            raise _unreadable(path, error) from error
        self._sources.read(into.size)
        if sums:
            first = offset - payload.crc_offset
            self._sources.sums.add_runs(record, first, stride, length, sums)
            if self.segments is not None:
                self.segments += [(record, first + n * stride, length, crc) for n, crc in enumerate(sums)]

    def _read_bytes(self, record: int, payload: Payload, offset: int, into: Bytes) -> None:
        """Reads a range of a record, adds its checksum, and lets the page cache forget it."""
        if not into.size:
            return
        reader = self._sources.reader
        path = reader.files[reader.file_of(record)]
        view, at = into.data, 0
        try:
            source = self._files.get(path)
            while at < len(view):
                n = source.read_into(view[at:], offset + at)
                if not n:
                    raise _short(path, offset + len(view))
                at += n
            if len(view) >= DROP_BYTES and self._sources.drop:
                source.forget(offset, len(view))
        except OSError as error:
            raise _unreadable(path, error) from error
        self._sources.read(len(view))
        if payload.crc is not None:
            segment = (offset - payload.crc_offset, len(view), zlib.crc32(view))
            self._sources.sums.add(record, segment)
            if self.segments is not None:
                self.segments.append((record, *segment))


class OpenFiles(Generic[_File]):
    """A few open files, least recently used closed first."""

    def __init__(self, opener: Callable[[Path], _File], closer: Callable[[_File], None]) -> None:
        self._opener, self._closer = opener, closer
        self._open: OrderedDict[Path, _File] = OrderedDict()

    def get(self, path: Path) -> _File:
        """The file, opened if it is not."""
        found = self._open.get(path)
        if found is None:
            if len(self._open) >= _OPEN_FILES:
                self._closer(self._open.popitem(last=False)[1])
            found = self._open[path] = self._opener(path)
        else:
            self._open.move_to_end(path)
        return found

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


def _ordinary(nbytes: int) -> Bytes:
    return np.empty(nbytes, np.uint8)


def offsets(outer: Sequence[tuple[int, int]]) -> Iterator[int]:
    """Element offsets of the runs of a box, from the (count, stride) pairs that `box.runs` gives."""
    if not outer:
        yield 0
        return
    for index in itertools.product(*(range(count) for count, _ in outer)):
        yield sum(i * stride for i, (_, stride) in zip(index, outer, strict=True))


def _short(path: Path, needed: int) -> FormatError:
    return FormatError(f"{printable(path.name)} ends early", details=[f"needed bytes up to {needed}"])


def _unreadable(path: Path, error: OSError) -> FormatError:
    return FormatError(f"reading {printable(path.name)} failed: {error.strerror or error}")
