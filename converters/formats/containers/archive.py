"""Shared base of readers of files with many tensors: storages of torch.save and others as numbered records.

A record is a whole storage, which several tensors may share as views: with Megatron's distributed optimizer all weights of
a rank do. Of a file of torch.save, directory and pickle are read once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from converters.catalog import FileInfo
from converters.chunks import StoredArray
from converters.errors import FormatError, UnsupportedError
from converters.formats.base import Reader, digest_of
from converters.formats.broken import damage_in
from converters.formats.folder import open_source, status
from converters.formats.registry import BEFORE_ZIP
from converters.torchzip.records import (
    Member,
    check_storage_size,
    read_directory,
    read_member,
    read_pickle,
    refuse_big_endian,
    storage_payload,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from converters.formats.containers.safetensors import SafetensorsFile
    from converters.torchzip.records import Payload, Read
    from converters.torchzip.tensor_refs import TensorRef

    TensorFile: TypeAlias = "PtFile | SafetensorsFile"


_SMALL = 1 << 28


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor, and the file that it lies in."""

    ref: TensorRef
    file: TensorFile


@dataclass
class PtFile:
    """A file of torch.save, its pickle as an inert tree.

    Attributes:
        name: Path relative to the iteration's folder: `mp_rank_00_000/model_optim_rng.pt`.
        size: Bytes.
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
        with damage_in(folder, name), open_source(folder / name) as source:
            read, size = source.read, source.size
            if read(0, 4) != b"PK\x03\x04":
                raise _no_archive(read(0, 256), name, size)
            members = read_directory(read, 0, size, name)
            refuse_big_endian(read, 0, members, name)
            tree = read_pickle(read, 0, size, name, members=members)
        return cls(name, size, tree, members)

    def storages(self) -> dict[str, int]:
        """Bytes of every storage, by its key."""
        return {name[5:]: member.size for name, member in self.members.items() if name.startswith("data/")}

    def locate(self, storage: str, read: Read) -> Payload:
        """Where a storage's bytes lie."""
        return storage_payload(read, 0, self.members, storage, self.name)

    def checksums(self) -> str:
        """What the file says of its contents, for a fingerprint."""
        return "".join(f"{member.crc:08x}" for member in self.members.values())

    def contents(self, folder: Path, member: str) -> bytes:
        """The bytes of a small member."""
        entry = self.members.get(member)
        if entry is None or entry.size > _SMALL:
            size = "missing" if entry is None else f"{entry.size} bytes"
            raise FormatError(f"{self.name}: member {member} is {size}")
        with open_source(folder / self.name) as source:
            return read_member(source.read, 0, entry, self.name)


def _no_archive(head: bytes, name: str, size: int) -> FormatError:
    if not size:
        return FormatError(f"{name} is empty")
    if head.startswith(BEFORE_ZIP):
        return UnsupportedError(
            f"{name} was saved by a torch before 1.6, or with _use_new_zipfile_serialization=False: its tensors cannot be "
            "located without unpickling all of it",
            hint="rewrite each file once with torch.save(torch.load(f, map_location='cpu'), f), where you trust it",
        )
    return FormatError(f"{name} is not a file that torch.save wrote: it begins with {head[:8]!r}")


class Storages:
    """Record numbers of storages: each storage of each file is one record, read as elements of one type.

    Attributes:
        arrays: Those that have one, by position of the file, key and element type.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: list[TensorFile] = []
        self.records: list[tuple[TensorFile, str]] = []
        self.arrays: dict[tuple[int, str, str], StoredArray] = {}
        self._sizes: list[Mapping[str, int]] = []

    def add(self, file: TensorFile) -> None:
        """Gives a file its position."""
        file.position = len(self.files)
        self.files.append(file)
        self._sizes.append(file.storages())

    def array(self, file: TensorFile, ref: TensorRef, label: str) -> StoredArray:
        """The whole storage that a tensor lies in, if its elements lie there in C order.

        Raises:
            FormatError: The file has no such storage, or the elements lie in another order.
        """
        if not ref.contiguous:
            raise UnsupportedError(f"{label} has strides {list(ref.strides)}; only C order can be read", tensor=label)
        return self.storage(file, ref)

    def storage(self, file: TensorFile, ref: TensorRef) -> StoredArray:
        """The whole storage that a tensor lies in, as an array of one chunk.

        Raises:
            FormatError: The file has no such storage.
        """
        key = (file.position, ref.storage, ref.dtype.name)
        array = self.arrays.get(key)
        if array is None:
            check_storage_size(ref, self._sizes[file.position].get(ref.storage), file.name)
            name = f"{file.name}: data/{ref.storage}"
            array = self.arrays[key] = StoredArray.one_chunk(name, (ref.storage_numel,), len(self.records))
            self.records.append((file, ref.storage))
        return array


class StorageReader(Reader):
    """What the readers of such files have in common: they have `_storages`, and `files` as those lie in them."""

    _storages: Storages

    def file_of(self, record: int) -> int:
        """Position in `files` of the file that holds a record."""
        return self._storages.records[record][0].position

    def locate(self, record: int, read: Read) -> Payload:
        """Where in its file the elements of a storage lie."""
        file, storage = self._storages.records[record]
        return file.locate(storage, read)

    def fingerprint(self) -> str:
        """Digest of names, sizes and times of the files, and of the checksums in their directories."""
        states = ((file, status(path)) for file, path in zip(self._storages.files, self.files, strict=True))
        return digest_of(f"{file.name}:{state and state[2:]}:{file.checksums()};" for file, state in states)

    def _stored_files(self) -> list[FileInfo]:
        out = []
        for file in self._storages.files:
            sizes = file.storages().values()
            out.append(FileInfo(file.name, file.size, len(sizes), file.size, sum(sizes)))
        return out
