"""What the rest of distckpt asks of a storage format.

A format describes; it does not move bytes. Its reader says which tensors there are (`catalog`) and in which range of which
file a stored piece lies (`locate`). The engine does all reading, for every format alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol, runtime_checkable

from converters.errors import FormatError
from converters.names import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from converters.archive.records import Payload
    from converters.catalog import Catalog
    from converters.formats.common_state import Archive

__all__ = ["ArchiveReader", "CommonReader", "Reader", "StoredArchive", "fingerprint_of"]


class Reader(Protocol):
    """An open checkpoint.

    Attributes:
        name: Name of the format, as `inspect` prints it.
        catalog: What the checkpoint holds.
    """

    name: ClassVar[str]
    catalog: Catalog

    @property
    def files(self) -> Sequence[Path]:
        """The files that records refer to, by position; a format with a file for each chunk makes the paths on demand."""
        ...

    @classmethod
    def open(cls, folder: Path) -> Reader:
        """Reads what is needed to know the catalog; no tensor data.

        Raises:
            FormatError: Unreadable, unsafe, or not in this format after all.
        """
        ...

    def file_of(self, record: int) -> int:
        """Position in `files` of the file that holds a record."""
        ...

    def locate(self, record: int, read: Read) -> Payload:
        """Where in that file the record's elements lie.

        Args:
            record: A record number from `Chunk.record`.
            read: Returns `n` bytes at an offset of that file.

        Raises:
            FormatError: The record is damaged, or holds something else than the catalog says.
        """
        ...

    def fingerprint(self) -> str:
        """A digest that changes when the checkpoint changes: its metadata, its files' sizes and times."""
        ...


@runtime_checkable
class CommonReader(Reader, Protocol):
    """A reader whose checkpoint has neither `common.pt` nor objects in records of their own: it makes them.

    Attributes:
        optimizer_doubt: Why the optimizer's tensors must be proved before anything is published; None if they are certain.
    """

    optimizer_doubt: str | None

    def common_archive(self) -> Archive:
        """The common state as a `common.pt` would hold it; a new one with each call, which the caller may change."""
        ...

    def object_record(self, key: str) -> bytes:
        """The record of an object of the catalog, as torch_dist stores it."""
        ...


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


@runtime_checkable
class ArchiveReader(Reader, Protocol):
    """A reader whose files are not one `torch.save` archive each, but hold several, or one among other things.

    Every member of such an archive has a checksum, not only those with elements: `verify` compares them all.
    """

    def archives(self, file: int) -> Iterable[StoredArchive]:
        """The archives of a file, in the order in which they lie in it.

        Args:
            file: Position in `files`.
        """
        ...


class Read(Protocol):
    """Reads `length` bytes at `offset` of a file already chosen; fewer only at the file's end."""

    def __call__(self, offset: int, length: int, /) -> bytes: ...


def fingerprint_of(reader: Reader) -> str:
    """`reader.fingerprint()` of a checkpoint whose disk may fail.

    Raises:
        FormatError: A file cannot be asked for its size and time.
    """
    try:
        return reader.fingerprint()
    except OSError as error:
        what = printable(str(error.filename or reader.catalog.path))
        raise FormatError(f"reading {what} failed: {error.strerror or error}") from error
