"""Reads boxes of stored tensors of any format, and compares every stored checksum.

sources = Sources(reader, reader.catalog.tensors)     # see `sources`; shared by all threads
gatherer = Gatherer(sources)                          # one for each thread
bits = gatherer.gather("output_layer.weight", box)    # unsigned integers of the element's size
...
sources.complete(gatherer)                            # what is still unread of records that were read in part
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from converters.box import Box, contiguous_tiles, run_starts, runs
from converters.chunks import Chunk
from converters.crc import crc32
from converters.errors import FormatError
from converters.formats.folder import open_source
from converters.formats.source_file import SourceFile, read_failure
from converters.io.arithmetic import UNSIGNED, Arithmetic, examine_blocks
from converters.io.low_rank import add_product
from converters.io.padding import mean_row
from converters.io.questions import RoundsTo
from converters.io.remainders import join_masters, narrowed
from converters.io.scales import factors_of, multiply, multiply_codes, packed_boxes
from converters.names import printable

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

    from converters.catalog import Remainders, TensorInfo
    from converters.chunks import Scales
    from converters.dtypes import DType
    from converters.io.sources import Segments, Sources
    from converters.torchzip.records import Payload

    Bytes = NDArray[np.uint8]

_File = TypeVar("_File")
_OPEN_FILES = 128
_LEAST_READ = 1 << 20
_SHORT_RUN = 64 << 10
_NEIGHBOURS = 8  # elements of several tensors that lie in turn are read together, however few of them are wanted
_JOINED = 1 << 17  # elements of master weights that are put together in one go: half a mebibyte beside the tile
_UNPACKED = 1 << 18  # codes of four bits that are read in one go
DROP_BYTES = 1 << 20
"""Smaller ranges are not worth the system call that makes the page cache forget them."""


class Gatherer:
    """Buffers and open files of one thread that reads. Nothing here grows with the model.

    Args:
        sources: The tensors.
        allocate: Makes a buffer of so many bytes; ordinary memory by default.

    Attributes:
        segments: Checksums of what was read; their consumer empties the list from time to time, or sets None.
    """

    def __init__(self, sources: Sources, allocate: Callable[[int], Bytes] | None = None) -> None:
        self._sources = sources
        self._allocate = allocate or (lambda nbytes: np.empty(nbytes, np.uint8))
        self._tile = np.empty(0, np.uint8)
        self._scratch = np.empty(0, np.uint8)
        self._halves = np.empty((2, 0), np.uint16)
        self._beside = np.empty(0, np.uint8)
        self._decoded_record: tuple[int, Bytes] = (-1, self._beside)
        self._files = OpenFiles(open_source, SourceFile.close)
        self.segments: Segments | None = None

    @cached_property
    def _arithmetic(self) -> Arithmetic:
        return Arithmetic()  # most who read compute nothing, and need no scratch arrays

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
            IntegrityError: Part of the tensor is not stored, a record does not match its checksum, or a master weight does
                not round to its weight (`TensorInfo.rounds_to`).
            FormatError: A file cannot be read, or ends early.
        """
        info = self._sources.tensors[name]
        dtype = info.dtype
        nbytes = box.volume * dtype.itemsize
        if into is None:
            into = self._tile = self._resized(self._tile, nbytes)
        elements: NDArray[Any] = into[:nbytes].view(UNSIGNED[dtype.itemsize]).reshape(box.shape)
        if info.remainders is None:
            self._fill(info, box, elements)
        else:
            self._join(info, info.remainders, box, elements)
        if info.mean_rows:
            self._pad(info, box, elements)
        if info.update is not None:
            add_product(self._arithmetic, info.update, box, elements, dtype, self._fill_again)
        if info.rounds_to is not None:
            self._prove(info, info.rounds_to, box, elements)
        return elements

    def _fill(self, info: TensorInfo, box: Box, elements: NDArray[Any], *, checked: bool = True) -> None:
        """Reads the stored elements of a box; their type has the size of those of `elements`."""
        for chunk in self._sources.chunks_of(info):
            part = chunk.box.intersect(box) if box.shape else box
            if part is not None:
                into = elements[part.relative_to(box.start).slices]
                if (scales := self._sources.scales.get(chunk.record)) is None:
                    self._read_part(chunk, part, into, checked=checked)
                elif scales.packed:
                    self._unpack(scales, chunk, part, into, info.dtype)
                else:
                    self._multiply(scales, chunk, part, into, info.dtype)

    def _pad(self, info: TensorInfo, box: Box, elements: NDArray[Any]) -> None:
        """Fills the rows of a box that are the mean of those that are stored."""
        first = max(0, info.shape[0] - info.mean_rows - box.start[0])
        if first < box.shape[0]:
            row = self._sources.mean(
                info.name, lambda: mean_row(info, lambda rows, into: self._fill(info, rows, into, checked=False))
            )
            elements[first:] = row[Box(box.start[1:], box.shape[1:]).slices]

    def _fill_again(self, info: TensorInfo, box: Box, elements: NDArray[Any]) -> None:
        """As `_fill`, of a small tensor that is read for many tiles: its records are checked once, when first needed."""
        for chunk in self._sources.chunks_of(info):
            if self._sources.is_new(chunk.record) and (payload := self.payload(chunk.record)).crc is not None:
                self.read_through(chunk.record, payload, 0, payload.crc_nbytes)
                self._sources.check(chunk.record, payload)
        self._fill(info, box, elements, checked=False)

    def _multiply(self, scales: Scales, chunk: Chunk, part: Box, into: NDArray[Any], target: DType) -> None:
        """Reads quantized elements and their scales, which are as good as none beside them, and multiplies both."""
        inside = chunk.stored(part)[0]
        grid = factors_of(inside, scales)
        factors = np.empty(grid.shape, UNSIGNED[scales.dtype.itemsize])
        for piece in scales.part.chunks():
            if (overlap := piece.box.intersect(grid)) is not None:
                self._read_part(piece, overlap, factors[overlap.relative_to(grid.start).slices])
        stored = self._resized(self._beside, part.volume)[: part.volume].reshape(part.shape)
        self._beside = stored.reshape(-1)
        self._read_part(chunk, part, stored)
        values = stored.T if chunk.transposed else stored
        multiply(self._arithmetic, values, factors, inside, scales, target, into.T if chunk.transposed else into)

    def _unpack(self, scales: Scales, chunk: Chunk, part: Box, into: NDArray[Any], target: DType) -> None:
        """As `_multiply`, of codes that share a byte: whole blocks of them are read, some rows at a time."""
        inside, shape = chunk.stored(part)
        (block,), (factor,) = scales.block, scales.part.chunks()
        values = np.empty(inside.shape, into.dtype)
        for tile in contiguous_tiles(inside, _UNPACKED):
            wide, codes, grid = packed_boxes(tile, block)
            stored = np.empty(codes.shape, np.uint8)
            window = codes.start, (*shape[:-1], shape[-1] * codes.shape[-1] // wide.shape[-1])
            self._read_part(Chunk(codes, chunk.record, chunk.base // 2, window), codes, stored)
            factors = np.empty(grid.shape, np.uint8)
            window = grid.start, (*shape[:-1], shape[-1] // block)
            self._read_part(Chunk(grid, factor.record, factor.base + chunk.base // block, window), grid, factors)
            numbers = np.empty(wide.shape, into.dtype)
            multiply_codes(self._arithmetic, stored, factors, scales.dtype, target, numbers)
            values[tile.relative_to(inside.start).slices] = numbers[tile.relative_to(wide.start).slices]
        target_view = into.T if chunk.transposed else into
        target_view[...] = values.reshape(target_view.shape)

    def _join(self, info: TensorInfo, remainders: Remainders, box: Box, elements: NDArray[Any]) -> None:
        """Reads remainders and the weights that they belong to, and puts the master weights together.

        What is read of a weight counts for its checksum unless the weight is read for itself, too.
        """
        weight = remainders.weight
        alone = weight is not None and weight.name not in self._sources.tensors
        for part in [box] if box.volume <= _JOINED else contiguous_tiles(box, _JOINED):
            if self._halves.shape[1] < part.volume:
                self._halves = np.empty((2, min(_JOINED, box.volume)), np.uint16)
            high, low = (half[: part.volume].reshape(part.shape) for half in self._halves)
            into = elements[part.relative_to(box.start).slices]
            if weight is None:
                wide = self._halves.reshape(-1).view(np.uint32)[: part.volume].reshape(part.shape)
                self._fill(info, part, wide)
                into[...] = narrowed(wide, info.name)
                continue
            self._fill(weight, part, high, checked=alone)
            self._fill(info, part, low if remainders.dtype.itemsize == low.itemsize else into)
            join_masters(high, low if remainders.dtype.itemsize == low.itemsize else None, into, info.name)

    def _prove(self, master: TensorInfo, weight: TensorInfo, box: Box, elements: NDArray[Any]) -> None:
        """Reads the weights of a box beside their master weights, which must round to them.

        Raises:
            IntegrityError: One does not.
        """
        common = box.intersect(Box.whole(weight.shape)) if box.shape else box  # rows may pad the vocabulary
        size = weight.dtype.itemsize
        for part in contiguous_tiles(common, _JOINED) if common else ():
            self._beside = (
                self._beside if self._beside.nbytes >= part.volume * size else np.empty(_JOINED * size, np.uint8)
            )
            beside = self._beside[: part.volume * size].view(UNSIGNED[size]).reshape(part.shape)
            self._fill(weight, part, beside, checked=False)
            have, question = elements[part.relative_to(box.start).slices], RoundsTo(master, weight)
            question.add(part, examine_blocks(self._arithmetic, question, have, beside), (have, beside))
            question.refuse(part.volume)

    def payload(self, record: int) -> Payload:
        """Where a record's elements lie."""
        reader = self._sources.reader
        path = reader.files[reader.file_of(record)]
        return self._sources.payload(
            record, lambda: reader.locate(record, lambda at, n: self._files.get(path).read(at, n))
        )

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

    def _read_part(self, chunk: Chunk, part: Box, into: NDArray[Any], *, checked: bool = True) -> None:
        payload, size = self.payload(chunk.record), into.itemsize
        payload = payload if checked else replace(payload, crc=None)
        inside, shape = chunk.stored(part)
        if payload.decode is not None:
            stored = self._decoded(chunk.record, payload, payload.decode)[chunk.base * size :]
            _put(stored[: math.prod(shape) * size].view(into.dtype).reshape(shape)[inside.slices], chunk, into)
            return
        every = len(shape) > 1 and inside.shape[-1] < shape[-1] <= _NEIGHBOURS  # not one system call for each
        region = Box((*inside.start[:-1], 0), (*inside.shape[:-1], shape[-1])) if every else inside
        first, length, outer = runs(region, shape)
        if (chunk.base + first + length) * size > payload.nbytes:
            raise FormatError(f"a chunk reaches beyond its record of {payload.nbytes} bytes")
        straight = into.flags.c_contiguous and not chunk.transposed and not every
        packed = into.reshape(-1).view(np.uint8) if straight else self.scratch(region.volume * size)
        at, strip = 0, outer[-1] if outer and length * size < _SHORT_RUN else None
        for start in run_starts(chunk.base + first, outer[:-1] if strip else outer):
            nbytes, begin = length * size * (strip[0] if strip else 1), payload.offset + start * size
            piece = packed[at : at + nbytes]
            if strip:
                self._read_rows(chunk.record, payload, begin, strip[1] * size, piece.reshape(strip[0], -1))
            else:
                self._read_bytes(chunk.record, payload, begin, piece)
            at += nbytes
        if not straight:
            values = packed.view(into.dtype).reshape(region.shape)
            _put(values[inside.relative_to(region.start).slices], chunk, into)
        self._sources.check(chunk.record, payload)

    def _decoded(self, record: int, payload: Payload, decode: Callable[[bytes], bytes]) -> Bytes:
        """The elements of a record that is stored encoded: decoded whole, and kept until the next one."""
        if self._decoded_record[0] != record:
            self._decoded_record = -1, np.empty(0, np.uint8)  # so that there are never two of them
            raw = np.empty(payload.crc_nbytes, np.uint8)
            self._read_bytes(record, payload, payload.crc_offset, raw)
            self._decoded_record = record, np.frombuffer(decode(raw.tobytes()), np.uint8)
        return self._decoded_record[1]

    def _read_bytes(self, record: int, payload: Payload, offset: int, into: Bytes) -> None:
        """Reads a range of a record."""
        if into.size:
            self._read_rows(record, payload, offset, 0, into.reshape(1, -1))

    def _read_rows(self, record: int, payload: Payload, offset: int, stride: int, into: Bytes) -> None:
        """Reads ranges of a record, one each `stride` bytes, into the rows of `into`, and adds their checksums.

        Short ones are columns of a matrix: a system call for each, but everything around it once for all of them. The page
        cache is made to forget a long one.
        """
        path = self._sources.reader.files[self._sources.reader.file_of(record)]
        count, length = into.shape
        try:
            source = self._files.get(path)
            source.read_rows(into.data, offset, stride)
            if length >= DROP_BYTES and self._sources.drop:
                source.forget(offset, length)
        except EOFError:
            needed = offset + (count - 1) * stride + length
            raise FormatError(f"{printable(path.name)} ends early", details=[f"needed bytes up to {needed}"]) from None
        except OSError as error:
            raise read_failure(path.name, error) from error
        self._sources.read(into.size)
        if payload.crc is not None:
            sums = [crc32(row.data) for row in into]
            first = offset - payload.crc_offset
            self._sources.sums.add_runs(record, first, stride, length, sums)
            if self.segments is not None:
                self.segments += [(record, first + n * stride, length, crc) for n, crc in enumerate(sums)]


class OpenFiles(Generic[_File]):
    """A few open files, least recently used closed first."""

    def __init__(self, opener: Callable[[Path], _File], closer: Callable[[_File], None]) -> None:
        self._opener, self._closer = opener, closer
        self._open: OrderedDict[Path, _File] = OrderedDict()

    def get(self, path: Path) -> _File:
        """The file, opened if it is not."""
        file = self._open.get(path)
        if file is None:
            if len(self._open) >= _OPEN_FILES:
                self._closer(self._open.popitem(last=False)[1])
            file = self._open[path] = self._opener(path)
        else:
            self._open.move_to_end(path)
        return file

    def close(self) -> None:
        """Closes all, then raises the first failure."""
        failure: OSError | None = None
        while self._open:
            try:
                self._closer(self._open.popitem()[1])
            except OSError as error:
                failure = failure or error
        if failure is not None:
            raise failure


def _put(values: NDArray[Any], chunk: Chunk, into: NDArray[Any]) -> None:
    """Copies elements as they are stored to where they belong; axes of length 1 may differ."""
    turned = values.T if chunk.transposed else values
    np.copyto(into, turned if turned.shape == into.shape else turned.reshape(into.shape))
