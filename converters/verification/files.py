"""Reads files from front to back and compares every checksum that is in them.

    one pass over a file, in blocks of some MiB
    +-----------------+--------------+-----------------------------------+-----
    | zip header      | data.pkl ... | data/0                            | zip directory, next record
    +-----------------+--------------+-----------------------------------+-----
      located as the reader says: type, shape, size     CRC-32 of each member     SHA-256 of all, for a manifest

Formats say where their `torch.save` archives lie (`ArchiveReader`); a file that is one archive is recognised. What has no
checksum is still read, once: a disk that cannot deliver it is found, a flipped bit is not, and the report says so.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from converters.archive.records import member_offset, read_directory, read_pickle
from converters.errors import FormatError
from converters.events import FileDone, Moved
from converters.formats.base import ArchiveReader, StoredArchive
from converters.formats.folder import close_source, is_folder, open_source, read_at
from converters.names import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from numpy.typing import NDArray

    from converters.archive.records import Member, Payload
    from converters.catalog import TensorInfo
    from converters.engine.crew import Crew
    from converters.formats.base import Reader
    from converters.formats.folder import SourceFile

__all__ = ["BLOCK_BYTES", "FileRead", "FileTask", "FileWorker", "RecordIndex"]

BLOCK_BYTES = 8 << 20
_BATCH_BYTES, _BATCH_FILES = BLOCK_BYTES, 256
_OBJECT_PICKLE = 64 << 20  # larger ones are compared with their checksum, not read
_ZIP = b"PK\x03\x04"


@dataclass(frozen=True, slots=True)
class FileRead:
    """A file to be read.

    Attributes:
        name: Path relative to the checkpoint.
        positions: Its places in the reader's list of files; none for a file that holds no records.
        nbytes: Its size.
        hashed: Whether its SHA-256 is wanted.
    """

    name: str
    positions: tuple[int, ...]
    nbytes: int
    hashed: bool


@dataclass(frozen=True, slots=True)
class FileTask:
    """Files to be read: one, or many small ones.

    Attributes:
        number: Among all tasks.
        files: The files.
        nbytes: Their size.
    """

    number: int
    files: tuple[FileRead, ...]
    nbytes: int

    @classmethod
    def batches(cls, files: Iterable[FileRead]) -> Iterator[FileTask]:
        """Tasks for all files, numbered from 0: a checkpoint may have a million of a few KiB."""
        number, held, nbytes = 0, list[FileRead](), 0
        for file in files:
            if held and (nbytes + file.nbytes > _BATCH_BYTES or len(held) == _BATCH_FILES):
                yield cls(number, tuple(held), nbytes)
                number, held, nbytes = number + 1, [], 0
            held.append(file)
            nbytes += file.nbytes
        if held:
            yield cls(number, tuple(held), nbytes)


class RecordIndex:
    """The records of each file, and the tensors of each record."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        arrays = {id(p.array): p.array for info in reader.catalog.tensors.values() for p in info.parts}
        found = [np.zeros(0, np.int64), *(array.records for array in arrays.values())]
        numbers = np.unique(np.concatenate(found))
        self._numbers = numbers[numbers >= 0]

    @cached_property
    def _by_file(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Files in ascending order, and the record of each."""
        files = np.fromiter(map(self._reader.file_of, self._numbers.tolist()), np.int64, len(self._numbers))
        order = np.argsort(files, kind="stable")
        return files[order], self._numbers[order]

    def records(self, position: int) -> list[int]:
        """The records in a file."""
        files, numbers = self._by_file
        low, high = np.searchsorted(files, [position, position + 1])
        found: list[int] = numbers[low:high].tolist()
        return found

    def __len__(self) -> int:
        return len(self._numbers)

    def tensors(self, records: set[int], tensors: Mapping[str, TensorInfo]) -> dict[int, tuple[str, ...]]:
        """Names of those of some tensors that have elements in each of some records."""
        wanted, out = np.array(sorted(records), np.int64), {record: list[str]() for record in records}
        for name, info in tensors.items() if records else ():
            for part in info.parts:
                mine = part.array.records[part.rows()]
                for record in np.intersect1d(mine, wanted).tolist():
                    out[record].append(name)
        return {record: tuple(dict.fromkeys(names)) for record, names in out.items()}


@dataclass
class Scan:
    """What was found in the files of a task; plain data once `vars` is taken of it.

    Attributes:
        findings: `(file, check, sentence, first byte or -1, needed, found, records)`.
        archives: Archives whose directory is in order.
        members: Members whose checksum was compared.
        checked: Bytes they have.
        unchecked: Bytes of tensors without a checksum.
        beyond: `(first byte, one past the last, record, key)` of archives that the file is too short for.
        read: Bytes read.
        sha256: Of each whole file where it is wanted.
        file: The file that is read now.
    """

    findings: list[tuple[str, str, str, int, str | None, str | None, list[int]]] = field(default_factory=list)
    archives: int = 0
    members: int = 0
    checked: int = 0
    unchecked: int = 0
    beyond: list[tuple[int, int, int, str]] = field(default_factory=list)
    read: int = 0
    sha256: dict[str, str] = field(default_factory=dict)
    file: str = ""

    def cut(self, name: str, size: int) -> None:
        """Notes, once, what a file is too short for."""
        if self.beyond:
            at, _, _, key = self.beyond[0]
            end = max(stop for _, stop, _, _ in self.beyond)
            text = f"{name} is {size:,} bytes: {len(self.beyond):,} records up to byte {end:,} are cut off"
            text += f", the first at {at:,}: {key}"
            records = [record for _, _, record, _ in self.beyond]
            self.note("records", text, at, *records, needed=f"{end} bytes", found=f"{size} bytes")
            self.beyond = []

    def note(self, check: str, text: str, at: int = -1, *records: int, needed: str = "", found: str = "") -> None:
        """Notes something that is wrong."""
        records = tuple(r for r in records if r >= 0)
        self.findings.append((self.file, check, text, at, needed or None, found or None, list(records)))


class _Blocks:
    """A file read once from front to back in large blocks, with small looks anywhere."""

    def __init__(
        self, source: SourceFile, task: FileRead, buffer: NDArray[np.uint8], crew: Crew, *, drop: bool
    ) -> None:
        self._source, self._name, self._buffer, self._crew, self._drop = source, task.name, buffer, crew, drop
        self._digest = hashlib.sha256() if task.hashed else None
        self._hashed = 0
        self._start, self._view = 0, memoryview(b"")
        self.read = 0

    def look(self, at: int, length: int) -> bytes:
        """A few bytes anywhere, fewer only at the end of the file."""
        begin = at - self._start
        if begin >= 0 and begin + length <= len(self._view):
            return bytes(self._view[begin : begin + length])
        return read_at(self._source, at, length)

    def stream(self, at: int, length: int) -> Iterator[memoryview]:
        """The bytes of a range, in pieces that are overwritten when the next one is asked for.

        Raises:
            FormatError: The file ends before the range does.
        """
        end = at + length
        while at < end:
            if not self._start <= at < self._start + len(self._view):
                self._load(at)
            begin = at - self._start
            piece = self._view[begin : min(begin + end - at, len(self._view))]
            if begin < 0 or not piece:
                raise FormatError(f"{printable(self._name)} ends early: bytes up to {end:,} are needed")
            yield piece
            at += len(piece)

    def finish(self) -> str | None:
        """SHA-256 of the whole file, after reading what is left of it; None if it was not wanted."""
        if self._digest is None:
            return None
        while self._fill(self._hashed):
            pass
        return self._digest.hexdigest()

    def _load(self, at: int) -> None:
        """Makes the block that holds a byte the current one; with a digest to make, all before it are read."""
        if self._digest is None or at < self._hashed:
            self._fill(at)
            return
        while self._hashed <= at and self._fill(self._hashed):
            pass

    def _fill(self, at: int) -> bool:
        """Reads a block; False at the end of the file."""
        self._crew.check()
        if self._drop and self._view:
            self._source.forget(self._start, len(self._view))
        whole, got = memoryview(self._buffer.data), 0
        while got < len(whole):
            n = self._source.read_into(whole[got:], at + got)
            if not n:
                break
            got += n
        self._start, self._view = at, whole[:got]
        if self._digest is not None and at == self._hashed:
            self._digest.update(self._view)
            self._hashed += got
        self.read += got
        self._crew.moved(Moved(got), got)
        return got > 0


class FileWorker:
    """Reads files, one at a time.

    Args:
        reader: The checkpoint.
        index: Which records lie where.
        crew: Who is told how far it is, and says when to stop.
        drop: Let the page cache forget what was read.
    """

    def __init__(self, reader: Reader, index: RecordIndex, crew: Crew, *, drop: bool = True) -> None:
        self._reader, self._index, self._crew, self._drop = reader, index, crew, drop
        place = reader.catalog.path
        self._base = place if is_folder(place) else place.parent
        self._buffer = np.empty(BLOCK_BYTES, np.uint8)

    def close(self) -> None:
        """Nothing stays open between files."""

    def do(self, task: FileTask) -> dict[str, Any]:
        """Reads files; what `Scan` says of them."""
        out = Scan()
        for file in task.files:
            out.file = file.name
            self._read(file, out)
            self._crew.moved(FileDone(file.name, file.nbytes), 0)
        return vars(out)

    def _read(self, file: FileRead, out: Scan) -> None:
        path = self._reader.files[file.positions[0]] if file.positions else self._base / file.name
        try:
            source = open_source(path)
        except FormatError as error:
            if isinstance(error.__cause__, PermissionError):  # no damage: nobody can say
                text = f"{printable(str(path))} cannot be read: {error.__cause__.strerror}"
                raise FormatError(
                    text, hint="nothing is said of its contents; get permission and run this again"
                ) from error
            out.note("records", error.message)
            return
        blocks = _Blocks(source, file, self._buffer, self._crew, drop=self._drop)
        try:
            os.posix_fadvise(source.fd, source.base, source.size, os.POSIX_FADV_SEQUENTIAL)
            self._contents(file, blocks, out)
            out.cut(printable(file.name), file.nbytes)
            digest = blocks.finish()
            if digest is not None:
                out.sha256[file.name] = digest
        except OSError as error:
            out.note("checksums", f"reading {printable(file.name)} failed: {error.strerror or error}")
        finally:
            close_source(source)
        out.read += blocks.read

    def _contents(self, task: FileRead, blocks: _Blocks, out: Scan) -> None:
        """Everything that is known to lie in a file, from front to back."""
        archives: list[StoredArchive] = []
        if isinstance(self._reader, ArchiveReader):
            archives = [archive for position in task.positions for archive in self._reader.archives(position)]
        located = self._located(task, {archive.record for archive in archives}, blocks, out)
        inside: dict[int, int] = {}
        bare = any(payload.crc is None for payload, _ in located)
        if not archives and not bare and blocks.look(0, 4) == _ZIP:
            archives = [StoredArchive(0, task.nbytes, -1, "")]
            inside, located = {payload.crc_offset: record for payload, record in located}, []
        elif not archives and not located and self._holds_objects(task.name):
            out.note("records", f"{printable(task.name)} is not a file that torch.save wrote")
        parts: list[StoredArchive | tuple[Payload, int]] = [*archives, *located]
        for part in sorted(parts, key=lambda p: p.start if isinstance(p, StoredArchive) else p[0].crc_offset):
            if isinstance(part, StoredArchive):
                self._archive(task, part, blocks, out, inside)
            else:
                payload, record = part
                size, crc = payload.crc_nbytes, payload.crc
                self._sum(task, payload.crc_offset, size, crc, "its elements", record, blocks, out)

    def _holds_objects(self, name: str) -> bool:
        """Whether a file is an object of the checkpoint, and nothing else."""
        catalog = self._reader.catalog
        return any(item.file == name and not item.wrapped for item in catalog.objects.values())

    def _located(self, task: FileRead, known: set[int], blocks: _Blocks, out: Scan) -> list[tuple[Payload, int]]:
        """Records that are in none of the archives that the reader knows of."""
        found = []
        for record in [n for position in task.positions for n in self._index.records(position) if n not in known]:
            payload = self._locate(task, record, -1, blocks, out)
            if payload is not None:
                found.append((payload, record))
        return found

    def _locate(self, task: FileRead, record: int, at: int, blocks: _Blocks, out: Scan) -> Payload | None:
        try:
            payload = self._reader.locate(record, blocks.look)
        except FormatError as error:
            found = error.message.rpartition(" holds ")[2] if " holds " in error.message else ""
            needed = error.details[0].removeprefix("the metadata promises ") if error.details else ""
            out.note("records", str(error).replace("\n", "; "), at, record, needed=needed, found=found)
            return None
        end = max(payload.offset + payload.nbytes, payload.crc_offset + payload.crc_nbytes)
        if end > task.nbytes:
            text = f"{printable(task.name)} is {task.nbytes:,} bytes, a record needs {end:,}"
            out.note("records", text, payload.offset, record, needed=f"{end}", found=f"{task.nbytes}")
            return None
        return payload

    def _archive(
        self,
        task: FileRead,
        archive: StoredArchive,
        blocks: _Blocks,
        out: Scan,
        inside: Mapping[int, int],
    ) -> None:
        """Every member of an archive; `inside` says which record begins at which byte where there are several."""
        at = archive.start
        key = f": {printable(archive.key)}" if archive.key else ""
        what = f"{printable(task.name)} at {at:,}{key}"
        if at + archive.length > task.nbytes:
            out.beyond.append((at, at + archive.length, archive.record, printable(archive.key)))
            return
        records = dict(inside)
        try:
            members = read_directory(blocks.look, at, archive.length, what)
            if archive.record < 0 and task.positions and not records:
                read_pickle(blocks.look, at, archive.length, what, limit=_OBJECT_PICKLE)
        except FormatError as error:
            out.note("records", str(error).replace("\n", "; "), at, archive.record, *records.values())
            return
        if archive.record >= 0:
            payload = self._locate(task, archive.record, at, blocks, out)
            if payload is not None:
                records[payload.crc_offset] = archive.record
        out.archives += 1
        summed = any(member.crc for member in members.values())  # torch.serialization.set_crc32_options(False)
        for member in sorted(members.values(), key=lambda m: m.header):
            self._member(task, archive, member, what, records, blocks, out, summed=summed)

    def _member(
        self,
        task: FileRead,
        archive: StoredArchive,
        member: Member,
        what: str,
        records: Mapping[int, int],
        blocks: _Blocks,
        out: Scan,
        *,
        summed: bool,
    ) -> None:
        try:
            begin = member_offset(blocks.look, archive.start, member, what)
        except FormatError as error:
            out.note("records", str(error), archive.start + member.header, archive.record)
            return
        record = records.get(begin, archive.record)
        name = f"member {printable(member.name)}" + (f" of {printable(archive.key)}" if archive.key else "")
        self._sum(task, begin, member.size, member.crc if summed else None, name, record, blocks, out)

    def _sum(
        self,
        task: FileRead,
        at: int,
        nbytes: int,
        wanted: int | None,
        what: str,
        record: int,
        blocks: _Blocks,
        out: Scan,
    ) -> None:
        crc = 0
        try:
            for piece in blocks.stream(at, nbytes):
                crc = zlib.crc32(piece, crc) if wanted is not None else 0
        except FormatError as error:
            out.note("records", str(error), at, record)
            return
        if wanted is None:
            out.unchecked += nbytes
            return
        out.members += 1
        out.checked += nbytes
        if crc != wanted:
            text = f"{printable(task.name)} at {at:,}: the {nbytes:,} bytes of {what} do not match their checksum"
            out.note("checksums", text, at, record, needed=f"CRC-32 {wanted:08x}", found=f"CRC-32 {crc:08x}")
