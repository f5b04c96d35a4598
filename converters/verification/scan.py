"""Reads files from front to back and compares every checksum that is in them.

    one pass over a file, in blocks of some MiB
    +-----------------+--------------+-----------------------------------+-----
    | zip header      | data.pkl ... | data/0                            | zip directory, next record
    +-----------------+--------------+-----------------------------------+-----
      located as the reader says: type, shape, size     CRC-32 of each member     SHA-256 of all, for a manifest

Formats say where their `torch.save` archives lie (`Reader.archives`); a file that is one archive is recognised. What has no
checksum is still read, once: a disk that cannot deliver it is found, a flipped bit is not, and the report says so.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from converters.crc import crc32, crc32_combine
from converters.errors import FormatError, UnsupportedError
from converters.events import FileDone
from converters.formats.base import StoredArchive
from converters.formats.folder import is_folder, open_source
from converters.names import printable
from converters.torchzip.records import member_offset, read_directory, read_pickle
from converters.verification.blocks import BLOCK_BYTES, Blocks
from converters.verification.duplicate_shards import fingerprint
from converters.words import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from converters.execute.work_sharing import WorkSharing
    from converters.formats.base import Reader
    from converters.torchzip.records import Member, Payload
    from converters.verification.files import FileRead, FileTask, RecordIndex

_OBJECT_PICKLE = 64 << 20  # larger ones are compared with their checksum, not read
_ZIP = b"PK\x03\x04"

Note = tuple[str, str, str, int, str | None, str | None, list[int]]
"""(file, check, sentence, first byte or -1, needed, found, records)."""


class Segment(NamedTuple):
    """A part of an archive's member, in one piece of its file.

    Attributes:
        file: Name of the file.
        member: The member, as it is shown.
        at: First byte of the member.
        nbytes: Bytes of the member.
        crc: CRC-32 that the member should have.
        record: The record that the archive is, or -1.
        start: First byte of the part.
        part_bytes: Bytes of the part.
        part_crc: CRC-32 of the part.
    """

    file: str
    member: str
    at: int
    nbytes: int
    crc: int
    record: int
    start: int
    part_bytes: int
    part_crc: int


@dataclass
class Scan:
    """The results of reading the files of a task; `vars` of it is plain data.

    Attributes:
        findings: What is wrong.
        archives: Archives whose directory is in order.
        members: Members whose checksum was compared.
        checked: Bytes they have.
        unchecked: Bytes of tensors without a checksum.
        beyond: `(file, its size, first byte, one past the last, record, key)` of archives that it is too short for.
        segments: Parts of members that reach into other pieces of their file.
        fingerprints: Record and fingerprint of its elements, one after the other.
        read: Bytes read.
        sha256: Of each whole file where it is wanted.
        file: The file that is read now.
    """

    findings: list[Note] = field(default_factory=list)
    archives: int = 0
    members: int = 0
    checked: int = 0
    unchecked: int = 0
    beyond: list[tuple[str, int, int, int, int, str]] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    fingerprints: list[int] = field(default_factory=list)
    read: int = 0
    sha256: dict[str, str] = field(default_factory=dict)
    file: str = ""

    def note(self, check: str, text: str, at: int = -1, *records: int, needed: str = "", found: str = "") -> None:
        """Adds an error."""
        records = tuple(r for r in records if r >= 0)
        self.findings.append((self.file, check, text, at, needed or None, found or None, list(records)))

    def differs(self, part: Segment, crc: int, records: Iterable[int]) -> None:
        """Adds an error about the checksum of a part's member."""
        self.file = part.file
        span = f"{printable(part.file)} at {part.at:,}: the {part.nbytes:,} bytes of {part.member}"
        text = f"{span} do not match their checksum"
        self.note("checksums", text, part.at, *records, needed=f"CRC-32 {part.crc:08x}", found=f"CRC-32 {crc:08x}")


def joined(scans: Iterable[Mapping[str, Any]], index: RecordIndex, positions: Mapping[str, tuple[int, ...]]) -> Scan:
    """All scans as one: what lies in several pieces of a file is put together and compared.

    Args:
        scans: What the workers returned.
        index: The records.
        positions: `FileRead.positions` by the names of files.
    """
    out, cut, split = Scan(), dict[str, list[tuple[Any, ...]]](), dict[tuple[str, int], list[Segment]]()
    for scan in scans:
        out.findings += [tuple(note) for note in scan["findings"]]
        for name in ("archives", "members", "checked", "unchecked", "read"):
            setattr(out, name, getattr(out, name) + scan[name])
        out.fingerprints += scan["fingerprints"]
        out.sha256 |= scan["sha256"]
        for file, *beyond in scan["beyond"]:
            cut.setdefault(file, []).append(tuple(beyond))
        for part in map(Segment._make, scan["segments"]):
            split.setdefault((part.file, part.at), []).append(part)
    for out.file, beyond in cut.items():
        size, begin, _, _, key = beyond[0]
        end = max(stop for _, _, stop, _, _ in beyond)
        verb = "is" if len(beyond) == 1 else "are"
        text = f"{printable(out.file)} is {size:,} bytes: {counted(len(beyond), 'record')} up to byte {end:,} {verb} cut off"
        text += f", the first at {begin:,}: {key}"
        out.note("records", text, begin, *(r for *_, r, _ in beyond), needed=f"{end} bytes", found=f"{size} bytes")
    for parts in split.values():
        crc = covered = 0
        first = parts[0]
        for part in sorted(parts, key=lambda part: part.start):
            if part.start == part.at + covered:
                crc, covered = crc32_combine(crc, part.part_crc, part.part_bytes), covered + part.part_bytes
        if covered < first.nbytes:
            continue  # not all of it could be read, which has been noted
        out.members += 1
        if crc != first.crc:
            records = [first.record] if first.record >= 0 else index.by_offset(positions[first.file]).get(first.at, [])
            out.differs(first, crc, records)
    order = {name: number for number, name in enumerate(positions)}
    out.findings.sort(key=lambda note: (order.get(note[0], -1), note[3], note[6]))
    return out


class FileWorker:
    """Reads files, one at a time.

    Args:
        reader: The checkpoint.
        index: Which records lie where.
        sharing: Who is told how far it is, and says when to stop.
        drop: Let the page cache forget what was read.
    """

    def __init__(self, reader: Reader, index: RecordIndex, sharing: WorkSharing, *, drop: bool = True) -> None:
        self._reader, self._index, self._sharing, self._drop = reader, index, sharing, drop
        path = reader.catalog.path
        self._base = path if is_folder(path) else path.parent
        self._buffer = np.empty(BLOCK_BYTES, np.uint8)

    def close(self) -> None:
        """Nothing stays open between files."""

    def do(self, task: FileTask) -> dict[str, Any]:
        """Reads files; what `Scan` says of them."""
        out = Scan()
        for file in task.files:
            out.file = file.name
            self._read(file, out)
            if file.last:
                self._sharing.report(FileDone(file.name, file.size))
        return vars(out)

    def _read(self, file: FileRead, out: Scan) -> None:
        path = self._reader.files[file.positions[0]] if file.positions else self._base / file.name
        try:
            source = open_source(path)
        except FormatError as error:
            if isinstance(error.__cause__, PermissionError):  # not damage: it is unknown
                text = f"{printable(str(path))} cannot be read: {error.__cause__.strerror}"
                hint = "its contents were not checked; get permission and run this again"
                raise FormatError(text, hint=hint) from error
            if not file.piece:
                out.note("records", error.message)
            return
        blocks = Blocks(source, file, self._buffer, self._sharing, drop=self._drop)
        try:
            source.expect(file.begin, file.nbytes)
            _FileScan(self._reader, self._index, file, blocks, out).run()
            digest = blocks.finish()
            if digest is not None:
                out.sha256[file.name] = digest
        except OSError as error:
            out.note("checksums", f"reading {printable(file.name)} failed: {error.strerror or error}")
        finally:
            source.close()
        out.read += blocks.read


class _FileScan:
    """The checks of a file, or of a piece of one, from front to back."""

    def __init__(self, reader: Reader, index: RecordIndex, file: FileRead, blocks: Blocks, out: Scan) -> None:
        self._reader, self._index, self._file, self._blocks, self._out = reader, index, file, blocks, out

    def run(self) -> None:
        """Reads it all."""
        file, out = self._file, self._out
        archives = [archive for position in file.positions for archive in self._reader.archives(position)]
        archived = {archive.record for archive in archives}
        records = [n for position in file.positions for n in self._index.records(position) if n not in archived]
        inside: list[int] = []
        if not archives and self._is_archive(records[:1]):
            archives, inside = [StoredArchive(0, file.size, -1, "")], records
        elif not archives and not records and not file.piece and self._holds_objects():
            out.note("records", f"{printable(file.name)} is not a file that torch.save wrote")
        for record in records[file.piece :: file.pieces]:
            payload = self._locate(record, -1)
            if payload is not None and payload.crc is None:
                out.unchecked += payload.nbytes
        at, reached, reread_budget = file.begin, 0, file.size
        overlapping: list[StoredArchive] = []
        for archive in sorted(archives, key=lambda a: a.start):
            stop = archive.start + archive.length
            reread_budget -= archive.length if archive.start < reached else 0
            if reread_budget < 0:  # else a million records at one place would read it a million times
                overlapping.append(archive)
                continue
            reached = max(reached, stop)
            if (archive.start < file.end and stop > file.begin) or file.owns(archive.start):
                self._skim(at, archive.start)
                self._archive(archive, inside)
                at = max(at, stop)
        self._skim(at, file.size)
        if overlapping and file.owns(overlapping[0].start):
            text = f"{printable(file.name)}: {counted(len(overlapping), 'record')} over others: not read"
            out.note("records", text, overlapping[0].start, *(archive.record for archive in overlapping))

    def _is_archive(self, records: list[int]) -> bool:
        """Whether a file is one archive whose members have checksums."""
        if self._blocks.peek(0, 4) != _ZIP:
            return False
        try:
            return all(self._reader.locate(record, self._blocks.peek).crc is not None for record in records)
        except FormatError:
            return True

    def _holds_objects(self) -> bool:
        """Whether the file is an object of the checkpoint, and nothing else."""
        objects = self._reader.catalog.objects.values()
        return any(item.file == self._file.name and not item.wrapped for item in objects)

    def _skim(self, at: int, stop: int) -> None:
        """Reads what is in no archive: whether the disk can deliver it."""
        try:
            for _ in self._blocks.stream(at, min(stop, self._file.end) - at):
                pass
        except FormatError as error:
            self._out.note("records", error.message, at)

    def _locate(self, record: int, at: int) -> Payload | None:
        file, out = self._file, self._out
        try:
            payload = self._reader.locate(record, self._blocks.peek)
        except UnsupportedError:  # no damage: the whole checkpoint is not checked
            raise
        except FormatError as error:
            stored = error.message.rpartition(" holds ")[2] if " holds " in error.message else ""
            needed = error.details[0].removeprefix("the metadata promises ") if error.details else ""
            out.note("records", str(error).replace("\n", "; "), at, record, needed=needed, found=stored)
            return None
        if payload.end > file.size:
            text = f"{printable(file.name)} is {file.size:,} bytes, a record needs {payload.end:,}"
            out.note("records", text, payload.offset, record, needed=f"{payload.end}", found=f"{file.size}")
            return None
        out.fingerprints += [record, fingerprint(payload)]
        return payload

    def _archive(self, archive: StoredArchive, inside: list[int]) -> None:
        """The members of an archive that are in this piece of the file; what has its first byte looks at the rest, too.

        `inside` are the records that it holds if it is a whole file.
        """
        file, blocks, out = self._file, self._blocks, self._out
        at, owned = archive.start, file.owns(archive.start)
        key = f": {printable(archive.key)}" if archive.key else ""
        title = f"{printable(file.name)} at {at:,}{key}"
        if at + archive.length > file.size:
            if owned:
                end = at + archive.length
                out.beyond.append((file.name, file.size, at, end, archive.record, printable(archive.key)))
            return
        try:
            members = read_directory(blocks.peek, at, archive.length, title)
            if owned and archive.record < 0 and file.positions and not inside:
                read_pickle(blocks.peek, at, archive.length, title, limit=_OBJECT_PICKLE)
        except FormatError as error:
            if owned:
                out.note("records", str(error).replace("\n", "; "), at, archive.record, *inside)
            return
        if owned:
            out.archives += 1
            if archive.record >= 0:
                self._locate(archive.record, at)
        summed = any(member.crc for member in members.values())  # torch.serialization.set_crc32_options(False)
        ordered = sorted(members.values(), key=lambda m: m.header)
        for member, behind in zip(ordered, [*(m.header for m in ordered[1:]), archive.length], strict=False):
            if at + member.header < file.end and at + behind > file.begin:
                self._member(archive, member, title, summed=summed)

    def _member(self, archive: StoredArchive, member: Member, title: str, *, summed: bool) -> None:
        file, blocks, out = self._file, self._blocks, self._out
        try:
            at = member_offset(blocks.peek, archive.start, member, title)
        except FormatError as error:
            if file.owns(archive.start + member.header):
                out.note("records", str(error), archive.start + member.header, archive.record)
            return
        start, stop = max(at, file.begin), min(at + member.size, file.end)
        complete = stop - start == member.size
        if start >= stop and not (complete and file.owns(at)):
            return
        crc = 0
        try:
            for piece in blocks.stream(start, stop - start):
                crc = crc32(piece, crc) if summed else 0
        except FormatError as error:
            out.note("records", str(error), at, archive.record)
            return
        if not summed:
            out.unchecked += stop - start
            return
        out.checked += stop - start
        name = f"member {printable(member.name)}" + (f" of {printable(archive.key)}" if archive.key else "")
        part = Segment(file.name, name, at, member.size, member.crc, archive.record, start, stop - start, crc)
        if not complete:
            out.segments.append(part)
            return
        out.members += 1
        if crc != member.crc:
            out.differs(part, crc, [archive.record] if archive.record >= 0 else self._records_by_offset.get(at, []))

    @cached_property
    def _records_by_offset(self) -> dict[int, list[int]]:
        return self._index.by_offset(self._file.positions)
