"""The tensors of a run, shared by its threads: where their records lie, what has been read of them, and their checksums."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from converters.crc import RecordSums
from converters.errors import DistckptError, IntegrityError
from converters.formats.folder import open_source
from converters.megatron.damage import stored_chunks
from converters.names import printable
from converters.remote.address import RemotePath

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from numpy.typing import NDArray

    from converters.catalog import TensorInfo
    from converters.chunks import Chunk, Scales
    from converters.formats.base import Reader
    from converters.io.gather import Gatherer
    from converters.planning.tasks import Tile
    from converters.torchzip.records import Payload

_KEPT_PAYLOADS = 1 << 16
_KEPT_CHUNKS = 64

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
        scales: What the elements of quantized records are multiplied by, of the tensors asked for so far.
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
        self.scales: dict[int, Scales] = {}
        self._first_read: set[int] = set()
        self._lock = threading.Lock()
        self._means: dict[str, NDArray[Any]] = {}
        self._averaging = threading.Lock()

    def chunks(self, name: str) -> list[Chunk]:
        """The stored pieces of a tensor, checked to tile it.

        Raises:
            IntegrityError: A hole, an overlap, or a missing record.
        """
        return self.chunks_of(self.tensors[name])

    def chunks_of(self, info: TensorInfo) -> list[Chunk]:
        """As `chunks`, of a tensor that need not be among those that will be read."""
        with self._lock:
            chunks = self._chunks.get(info.name)
            if chunks is not None:
                self._chunks.move_to_end(info.name)
                return chunks
        chunks = stored_chunks(info)
        with self._lock:
            for array in (part.array for part in info.parts if part.array.scales):
                self.scales.update(dict.fromkeys(array.records.tolist(), array.scales))
            self._chunks[info.name] = chunks
            while len(self._chunks) > _KEPT_CHUNKS:
                self._chunks.popitem(last=False)
        return chunks

    def payload(self, record: int, locate: Callable[[], Payload]) -> Payload:
        """Where a record's elements lie; `locate` finds out the first time."""
        payload = self._payloads.get(record)
        if payload is None:
            payload = locate() if self.checked else replace(locate(), crc=None)
            with self._lock:
                self._payloads[record] = payload
                while len(self._payloads) > _KEPT_PAYLOADS:
                    self._payloads.popitem(last=False)
        return payload

    def mean(self, name: str, compute: Callable[[], NDArray[Any]]) -> NDArray[Any]:
        """The mean of a tensor's rows, which the first thread that needs it computes."""
        with self._averaging:
            if name not in self._means:
                self._means[name] = compute()
            return self._means[name]

    def locate_soon(self, tiles: Iterable[Tile]) -> None:
        """Finds out where the records of tiles lie before they are read, where a store takes its time to say so."""
        if not isinstance(self.reader.catalog.path, RemotePath):
            return
        from converters.remote.content import background

        for tile in tiles:
            for chunk in self.chunks(tile.source):
                wanted = not tile.box.shape or chunk.box.intersect(tile.box) is not None
                if wanted and chunk.record not in self._payloads:
                    background().submit(self._locate, chunk.record)

    def _locate(self, record: int) -> None:
        """What cannot be located is located again, and its error raised, by whoever reads it."""
        with contextlib.suppress(DistckptError), open_source(self.reader.files[self.reader.file_of(record)]) as source:
            self.payload(record, lambda: self.reader.locate(record, source.read))

    def is_new(self, record: int) -> bool:
        """Whether this is the first call for a record."""
        with self._lock:
            new = record not in self._first_read
            self._first_read.add(record)
            return new

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
        computed = self.sums.take(record, payload.crc_nbytes)
        if computed is None:
            return
        with self._lock:
            self.records_checked += 1
            self._payloads.pop(record, None)
        if computed == payload.crc:
            return
        file, tensor = self.reader.files[self.reader.file_of(record)].name, self._owner(record)
        error = IntegrityError(
            f"{printable(file)} is damaged: the bytes of {printable(tensor)} do not match their checksum",
            details=[
                f"record at byte {payload.crc_offset}, {payload.crc_nbytes} bytes: "
                f"stored CRC-32 {payload.crc:08x}, computed {computed:08x}"
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
            update = info.update
            beside = (update.rows, update.columns) if update else (info.remainders.weight if info.remainders else None,)
            for owner in (info, *beside):
                if owner is not None and any((part.array.records[part.rows()] == record).any() for part in owner.parts):
                    return name if owner is info else owner.name
        return "?"
