"""`Reader`: the interface of a storage format.

A format describes; it does not move bytes. Its reader says which tensors there are (`catalog`) and in which range of which
file a stored piece lies (`locate`). The engine does all reading, for every format alike.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from converters.errors import FormatError
from converters.formats.common_state import Archive
from converters.formats.folder import exists, refresh
from converters.formats.links import followed_links
from converters.formats.source_file import read_failure
from converters.lazy import LazySequence
from converters.names import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from converters.catalog import Catalog
    from converters.chunks import StoredArray
    from converters.param_order import Order
    from converters.torchzip.records import Payload, Read
    from converters.torchzip.tensor_refs import TensorRef

COMMON_OBJECT = "common_state/shard_0_1"
"""Key of the object that holds the common state where there is no `common.pt` (Megatron-Core 0.19 and later)."""


class Reader(ABC):
    """An open checkpoint.

    A format answers four questions: which tensors there are (`catalog`), which file a record is in (`file_of`), where in it
    the elements lie (`locate`), and whether all of that is still the same (`fingerprint`). All others have an answer here,
    which is that of a folder with a `common.pt` and one `torch.save` archive for each object.

    Attributes:
        name: Name of the format, as `inspect` prints it.
        catalog: What the checkpoint holds.
        files: The files that records refer to, by position; a format with a file for each chunk makes the paths on demand.
        modules: How the job's modules were made, where their names tell.
    """

    name: ClassVar[str]
    catalog: Catalog
    files: Sequence[Path]
    modules: Order | None = None

    @classmethod
    def open(cls, folder: Path) -> Reader:
        """Reads what is needed to know the catalog; no tensor data.

        Raises:
            FormatError: Unreadable, unsafe, or not in this format after all; or no folder is of this kind (a view).
        """
        raise FormatError(f"{printable(folder.name)} is not opened as {cls.name}")

    @abstractmethod
    def file_of(self, record: int) -> int:
        """Position in `files` of the file that holds a record."""

    def file_name(self, position: int) -> str:
        """Name of one of `files`: relative to the checkpoint's folder, where it lies in there."""
        path, folder = self.files[position], self.catalog.path
        return path.relative_to(folder).as_posix() if folder in path.parents else path.name

    @abstractmethod
    def locate(self, record: int, read: Read) -> Payload:
        """Where in that file the record's elements lie.

        Args:
            record: A record number from `Chunk.record`.
            read: Returns `n` bytes at an offset of that file.

        Raises:
            FormatError: The record is damaged, or holds something else than the catalog says.
        """

    @abstractmethod
    def fingerprint(self) -> str:
        """A digest that changes when the checkpoint changes: its metadata, its files' sizes and times."""

    def common_state(self) -> Archive | None:
        """The common state as a `common.pt` holds it; a new one with each call, which the caller may change.

        Returns:
            None if the checkpoint has none.
        """
        path = self.catalog.path / "common.pt"
        if exists(path):
            return Archive.read(path)
        return self.stored_object(COMMON_OBJECT) if COMMON_OBJECT in self.catalog.objects else None

    def stored_object(self, key: str) -> Archive:
        """An object of the catalog, whose value is the archive's tree; a new one with each call.

        Raises:
            FormatError: It cannot be read, or there is none of this key.
        """
        info = self.catalog.objects.get(key)
        if info is None:
            raise FormatError(f"{printable(self.catalog.path.name)} holds no object {printable(key)}")
        label = printable(f"{info.file}: {info.key}")
        archive = Archive.read(self.catalog.path / info.file, info.start, info.length, label)
        if info.wrapped and isinstance(archive.tree, list) and len(archive.tree) == 1:
            archive.tree = archive.tree[0]
        return archive

    def object_value(self, key: str) -> Any:
        """The inert tree of a stored object, None if there is none; tensors in it are not read."""
        return None

    def object_array(self, key: str, ref: TensorRef) -> StoredArray:
        """A tensor inside the tree of `object_value`, as an array with a record number of its own.

        Raises:
            FormatError: The format has no tensors there.
        """
        raise FormatError(f"{self.name} has no tensor inside {printable(key)}")

    def archives(self, file: int) -> Iterable[StoredArchive]:
        """The `torch.save` archives in a file that is not itself one, in the order in which they lie in it.

        Every member of such an archive has a checksum, not only those with elements: `verify` compares them all.

        Args:
            file: Position in `files`.
        """
        return ()


class ReaderView(Reader):
    """The same records under another catalog.

    Args:
        reader: The open checkpoint.
        catalog: What its records are seen as.
    """

    name: ClassVar[str] = "safetensors"

    def __init__(self, reader: Reader, catalog: Catalog) -> None:
        self._reader, self.catalog, self.files = reader, catalog, reader.files

    def file_of(self, record: int) -> int:
        """See `Reader`."""
        return self._reader.file_of(record)

    def locate(self, record: int, read: Read) -> Payload:
        """See `Reader`."""
        return self._reader.locate(record, read)

    def fingerprint(self) -> str:
        """See `Reader`."""
        return self._reader.fingerprint()


class ReaderPair(ReaderView):
    """Two checkpoints as one source: the records of the second have numbers behind those of the first.

    Args:
        first: An open checkpoint.
        second: Another one.
        offset: What is added to the record numbers of the second; greater than all numbers of the first.
        catalog: What the records of both are seen as.
    """

    def __init__(self, first: Reader, second: Reader, offset: int, catalog: Catalog) -> None:
        super().__init__(first, catalog)
        self._second, self._offset = second, offset
        self.files = _Chained(first.files, second.files)

    def file_of(self, record: int) -> int:
        """See `Reader`."""
        if record < self._offset:
            return super().file_of(record)
        return len(self._reader.files) + self._second.file_of(record - self._offset)

    def locate(self, record: int, read: Read) -> Payload:
        """See `Reader`."""
        if record < self._offset:
            return super().locate(record, read)
        return self._second.locate(record - self._offset, read)

    def fingerprint(self) -> str:
        """See `Reader`."""
        return digest_of((super().fingerprint(), ":", self._second.fingerprint()))


class _Chained(LazySequence["Path"]):
    """The files of one checkpoint and those of another, of which either may make its paths on demand."""

    def __init__(self, first: Sequence[Path], second: Sequence[Path]) -> None:
        self._first, self._second = first, second

    def __len__(self) -> int:
        return len(self._first) + len(self._second)

    def _item(self, position: int) -> Path:
        beyond = position - len(self._first)
        return self._first[position] if beyond < 0 else self._second[beyond]


@dataclass(frozen=True, slots=True)
class StoredArchive:
    """A `torch.save` archive inside a file.

    Attributes:
        start: First byte in the file.
        length: Bytes.
        record: The record it is, -1 for an object.
        key: Names it in messages.
    """

    start: int
    length: int
    record: int
    key: str


def digest_of(parts: Iterable[str]) -> str:
    """SHA-256 of texts, one after the other; names of files may hold bytes that are no text."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def fingerprint_of(reader: Reader) -> str:
    """`reader.fingerprint()` of a checkpoint whose disk may fail.

    Raises:
        FormatError: A file cannot be asked for its size and time.
    """
    try:
        refresh(reader.catalog.path)
        digest, links = reader.fingerprint(), "".join(followed_links(reader.files))
        return digest_of((digest, links)) if links else digest
    except OSError as error:
        raise read_failure(error.filename or reader.catalog.path, error) from error
