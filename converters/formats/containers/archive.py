"""Files of torch.save with hundreds of tensors: directory and pickle read once, storages numbered as records.

A record is a whole storage, which several tensors may share as views: with Megatron's distributed optimizer all weights of
a rank do.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from converters.archive.records import Member, Payload, member_offset, read_directory, read_pickle
from converters.catalog import FileInfo, StoredArray
from converters.errors import FormatError
from converters.formats.folder import open_source, read_at, status
from converters.pickles import PickleFormatError, parse_stream

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from converters.archive.records import TensorRef
    from converters.formats.base import Read

__all__ = ["PtFile", "StorageReader", "Storages"]


@dataclass
class PtFile:
    """One file, its pickle as an inert tree.

    Attributes:
        name: Path relative to the iteration's folder: `mp_rank_00_000/model_optim_rng.pt`.
        position: Its place in the reader's list of files.
    """

    name: str
    size: int
    tree: Any
    members: dict[str, Member]
    position: int = -1

    @classmethod
    def read(cls, folder: Path, name: str) -> PtFile:
        """Reads directory and pickle of a file, no tensor data.

        Raises:
            FormatError: Missing, cut short, unsafe, or not a zip archive at all.
        """
        with open_source(folder / name) as source:
            size = source.size

            def read(at: int, n: int) -> bytes:
                return read_at(source, at, n)

            if read(0, 4) != b"PK\x03\x04":
                raise _no_archive(read(0, 256), name, size)
            members = read_directory(read, 0, size, name)
            order = members.get("byteorder")
            if order is not None and read(member_offset(read, 0, order, name), order.size) != b"little":
                raise FormatError(f"{name} was written on a big-endian machine, which is not supported")
            return cls(name, size, read_pickle(read, 0, size, name, members=members), members)

    def contents(self, folder: Path, member: str, limit: int = 1 << 28) -> bytes:
        """The bytes of a small member."""
        found = self.members.get(member)
        if found is None or found.size > limit:
            size = "missing" if found is None else f"{found.size} bytes"
            raise FormatError(f"{self.name}: member {member} is {size}")
        with open_source(folder / self.name) as source:
            begin = member_offset(lambda at, n: read_at(source, at, n), 0, found, self.name)
            return read_at(source, begin, found.size)


def _no_archive(head: bytes, name: str, size: int) -> FormatError:
    if not size:
        return FormatError(f"{name} is empty")
    try:  # the magic number, alone in a pickle, that torch.save began its files with
        old = parse_stream(head, what=name)[0] == 0x1950A86A20F9469CFC6C
    except PickleFormatError:
        old = False
    if old:
        return FormatError(
            f"{name} was saved by a torch before 1.6, or with _use_new_zipfile_serialization=False: its tensors cannot be "
            "located without unpickling all of it",
            hint="rewrite each file once with torch.save(torch.load(f, map_location='cpu'), f), where you trust it",
        )
    return FormatError(f"{name} is not a file that torch.save wrote: it begins with {head[:8]!r}")


class Storages:
    """Record numbers of storages: each storage of each file is one record, read as elements of one type.

    Attributes:
        known: Those that have one, by position of the file, key and element type.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: list[PtFile] = []
        self.file: list[int] = []
        self.member: list[Member] = []
        self.known: dict[tuple[int, str, str], StoredArray] = {}

    def add(self, file: PtFile) -> None:
        """Gives a file its position."""
        file.position = len(self.files)
        self.files.append(file)

    def array(self, file: PtFile, ref: TensorRef, what: str) -> StoredArray:
        """The whole storage that a tensor lies in, as an array of one chunk.

        Raises:
            FormatError: The archive has no such storage, or the tensor's elements do not lie in C order.
        """
        if not ref.contiguous:
            raise FormatError(f"{what} has strides {list(ref.strides)}; only C order can be read", tensor=what)
        key = (file.position, ref.storage, ref.dtype.name)
        found = self.known.get(key)
        if found is None:
            member = file.members.get(f"data/{ref.storage}")
            if member is None or member.size != ref.storage_numel * ref.dtype.itemsize:
                have = "no such member" if member is None else f"{member.size} bytes"
                raise FormatError(
                    f"{file.name}: data/{ref.storage} should have {ref.storage_numel * ref.dtype.itemsize} bytes, "
                    f"found {have}"
                )
            name = f"{file.name}: data/{ref.storage}"
            starts, sizes = np.zeros((1, 1), np.int64), np.array([[ref.storage_numel]], np.int64)
            records = np.array([len(self.member)], np.int64)
            found = self.known[key] = StoredArray(name, (ref.storage_numel,), starts, sizes, records)
            self.file.append(file.position)
            self.member.append(member)
        return found

    def locate(self, record: int, read: Read) -> Payload:
        """Where a storage lies in its file."""
        file, member = self.files[self.file[record]], self.member[record]
        begin = member_offset(read, 0, member, file.name)
        # torch.serialization.set_crc32_options(False) writes 0 for every member, data.pkl too
        crc = member.crc if member.crc or file.members["data.pkl"].crc else None
        return Payload(begin, member.size, crc, begin, member.size)


class StorageReader:
    """What the readers of such files have in common: they have `_storages`, and `files` as those lie in them."""

    _storages: Storages
    files: Sequence[Path]

    def file_of(self, record: int) -> int:
        """Position in `files` of the file that holds a record."""
        return self._storages.file[record]

    def locate(self, record: int, read: Read) -> Payload:
        """Where in its file the elements of a storage lie."""
        return self._storages.locate(record, read)

    def fingerprint(self) -> str:
        """Digest of names, sizes and times of the files, and of the checksums in their directories."""
        digest = hashlib.sha256()
        for file, path in zip(self._storages.files, self.files, strict=True):
            found = status(path)
            sums = "".join(f"{m.crc:08x}" for m in file.members.values())
            digest.update(f"{file.name}:{found and found[2:]}:{sums};".encode())
        return digest.hexdigest()

    def _stored_files(self) -> list[FileInfo]:
        out = []
        for file in self._storages.files:
            sizes = [member.size for name, member in file.members.items() if name.startswith("data/")]
            out.append(FileInfo(file.name, file.size, len(sizes), file.size, sum(sizes)))
        return out
