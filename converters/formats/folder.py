"""Reading folders and files of a checkpoint, also those that lie in a tar file.

A path may lead into a tar file as if that were a folder: `model.nemo/model_weights/common.pt`. Nothing is unpacked: such a
file is a range of the tar file. So readers look at folders and files only through what is here.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from converters.errors import FormatError
from converters.formats.tar import read_tree
from converters.names import printable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from converters.formats.tar import Member, Tree

__all__ = [
    "Entry",
    "SourceFile",
    "Status",
    "close_source",
    "enclose",
    "escape",
    "exists",
    "is_file",
    "is_folder",
    "listing",
    "open_source",
    "read_at",
    "read_small",
    "scan",
    "status",
    "walk",
]

_SMALL = 256 << 20
_enclosed: dict[Path, str] = {}  # folders and files as they were named, and where they really are


class SourceFile:
    """An open file of a checkpoint, read-only: a file of its own, or a range of a tar file.

    Attributes:
        fd: Descriptor; `base` is the offset there of this file's first byte.
        size: Bytes.
        name: Its name, for errors.
    """

    __slots__ = ("base", "fd", "name", "size")

    def __init__(self, fd: int, base: int, size: int, name: str) -> None:
        self.fd, self.base, self.size, self.name = fd, base, size, name

    def __enter__(self) -> SourceFile:
        return self

    def __exit__(self, *_: object) -> None:
        close_source(self)

    def read_into(self, view: memoryview, offset: int) -> int:
        """Fills `view` from an offset on; returns how many bytes came, less than asked for at the end or any time."""
        room = self.size - offset
        return os.preadv(self.fd, [view[:room] if len(view) > room else view], self.base + offset) if room > 0 else 0

    def forget(self, offset: int, length: int) -> None:
        """Lets the page cache drop a range."""
        os.posix_fadvise(self.fd, self.base + offset, length, os.POSIX_FADV_DONTNEED)


class Status(NamedTuple):
    """What is at a path.

    Attributes:
        folder: It is a folder, or a tar file, which is one here.
        file: It is a regular file; a tar file is one, too.
        size: Bytes.
        mtime_ns: Time of the last change; of a file in a tar file, that of the tar file.
    """

    folder: bool
    file: bool
    size: int
    mtime_ns: int


class Entry(Protocol):
    """Something in a folder; `os.DirEntry` is one."""

    @property
    def name(self) -> str:
        """Its name."""
        ...

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        """Whether it is a folder."""
        ...

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        """Whether it is a regular file."""
        ...

    def is_symlink(self) -> bool:
        """Whether it is a symbolic link."""
        ...

    def stat(self, *, follow_symlinks: bool = True) -> _Sizes:
        """Size and time."""
        ...


class _Sizes(Protocol):
    """The part of `os.stat_result` that a file in a tar file has, too."""

    @property
    def st_size(self) -> int: ...
    @property
    def st_mtime_ns(self) -> int: ...


def enclose(root: Path) -> None:
    """From now on nothing below a folder is read through a link that leads out of it; the folder itself may be a link.

    Args:
        root: A checkpoint as it was named: a folder, or a file together with what lies beside it.
    """
    for place in (root,) if root.is_dir() else (root, root.parent):
        _enclosed[place] = os.path.realpath(place)


def escape(path: Path) -> str | None:
    """Where links on the way to a path lead to, if that is outside of the checkpoint; None if it is in it.

    A folder in Hugging Face's cache is all links into `blobs` beside its `snapshots`: those are its own.
    """
    root = next((place for place in (path, *path.parents) if place in _enclosed), None)
    if root is None:
        return None
    inner = itertools.takewhile(lambda place: place != root, (path, *path.parents))
    try:
        if not any(place.is_symlink() for place in inner):
            return None
    except OSError as error:
        raise _unreadable(path, error) from error
    real, home = os.path.realpath(path), _enclosed[root]
    cache, snapshots, _ = home.rpartition("/snapshots/")
    return None if real.startswith((f"{home}/", f"{cache}/blobs/" if snapshots else f"{home}/")) else real


def _refuse_escape(path: Path) -> None:
    found = escape(path)
    if found is not None:
        raise FormatError(
            f"{printable(str(path))} is a link to {printable(found)}, outside of the checkpoint",
            hint="put what it leads to in its place, or name the folder that it leads to",
        )


def open_source(path: Path) -> SourceFile:
    """Opens a regular file for reading; devices, pipes and folders are refused without waiting on them.

    Raises:
        FormatError: Missing, not a regular file, no permission, a link out of the checkpoint, or in a tar file that is
            refused.
    """
    _refuse_escape(path)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise _missing(path) from None
    except NotADirectoryError:
        return _open_member(path)
    except OSError as error:
        raise _unreadable(path, error) from error
    try:
        found = os.fstat(fd)
    except OSError as error:
        os.close(fd)
        raise _unreadable(path, error) from error
    if not stat.S_ISREG(found.st_mode):
        os.close(fd)
        raise FormatError(f"{printable(str(path))} is not a regular file")
    return SourceFile(fd, 0, found.st_size, path.name)


def _unreadable(path: Path, error: OSError) -> FormatError:
    return FormatError(f"cannot read {printable(str(path))}: {error.strerror}")


def read_small(path: Path, limit: int = _SMALL) -> bytes:
    """The contents of a metadata-sized file.

    Raises:
        FormatError: Missing, unreadable, or larger than `limit` bytes.
    """
    with open_source(path) as source:
        if source.size > limit:
            raise FormatError(f"{printable(path.name)} is {source.size} bytes, more than the {limit} it may have")
        return read_at(source, 0, source.size)


def read_at(source: SourceFile, offset: int, length: int) -> bytes:
    """`length` bytes at `offset`, fewer only at the end of the file: network file systems may return them in pieces.

    Raises:
        FormatError: Reading failed.
    """
    pieces, left = [], min(length, source.size - offset)
    while left > 0:
        try:
            piece = os.pread(source.fd, left, source.base + offset)
        except OSError as error:
            raise FormatError(f"reading {printable(source.name)} failed: {error.strerror or error}") from error
        if not piece:
            break
        pieces.append(piece)
        offset, left = offset + len(piece), left - len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def close_source(source: SourceFile) -> None:
    """Closes a file that was only read; that it fails (a network file system, gone) changes nothing about what was read."""
    with contextlib.suppress(OSError):
        os.close(source.fd)


def exists(path: Path) -> bool:
    """Whether there is anything at a path."""
    return status(path) is not None


def is_folder(path: Path) -> bool:
    """Whether a path is a folder, or a tar file."""
    found = status(path)
    if found is None or not found.file:
        return found is not None and found.folder
    around = _tar_around(path)
    return around is not None and not around.within


def is_file(path: Path) -> bool:
    """Whether a path is a regular file."""
    found = status(path)
    return found is not None and found.file


def status(path: Path) -> Status | None:
    """What is at a path; None if nothing is.

    Raises:
        FormatError: The path leads into a tar file that is refused.
        OSError: No permission, or a failing disk.
    """
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        around = _tar_around(path)
        return None if around is None else around.status()
    return Status(stat.S_ISDIR(found.st_mode), stat.S_ISREG(found.st_mode), found.st_size, found.st_mtime_ns)


@contextlib.contextmanager
def scan(folder: Path) -> Iterator[Iterator[Entry]]:
    """As `os.scandir`, also of a tar file and of folders in it; a link out of the checkpoint is refused."""
    _refuse_escape(folder)
    try:
        entries = os.scandir(folder)
    except NotADirectoryError:
        found = _tar_around(folder)
        if found is None or found.within not in found.tree:
            raise
        yield (_TarEntry(name, member, found.mtime_ns) for name, member in found.tree[found.within].items())
        return
    with entries:
        yield entries


def listing(folder: Path) -> list[str]:
    """Names of what lies in a folder, sorted."""
    with scan(folder) as entries:
        return sorted(entry.name for entry in entries)


def walk(folder: Path, within: str = "") -> Iterator[tuple[str, Status]]:
    """Every file below a folder as `(path from there, status)`, in order; links are not followed.

    Raises:
        OSError: A folder cannot be listed.
    """
    with scan(folder) as found:
        entries = sorted(found, key=lambda entry: entry.name)
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from walk(folder / entry.name, f"{within}{entry.name}/")
        else:
            with contextlib.suppress(FileNotFoundError):  # gone meanwhile
                size = entry.stat(follow_symlinks=False)
                file = entry.is_file(follow_symlinks=False)
                yield f"{within}{entry.name}", Status(False, file, size.st_size, size.st_mtime_ns)


@dataclass(frozen=True, slots=True)
class _TarEntry:
    """Something in a folder of a tar file: an `Entry`."""

    name: str
    _member: Member | None
    st_mtime_ns: int

    @property
    def st_size(self) -> int:
        return self._member.size if self._member is not None else 0

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return self._member is None

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return self._member is not None

    def is_symlink(self) -> bool:
        return False

    def stat(self, *, follow_symlinks: bool = True) -> _TarEntry:
        return self


@dataclass(frozen=True, slots=True)
class _Place:
    """A place in a tar file.

    Attributes:
        tar: The tar file.
        tree: What is in it.
        within: The place, `a/b`; empty for the outermost folder.
        mtime_ns: Time of the tar file.
    """

    tar: Path
    tree: Tree
    within: str
    mtime_ns: int

    def member(self) -> Member | None:
        """The file at this place."""
        folder, _, name = self.within.rpartition("/")
        return self.tree.get(folder, {}).get(name)

    def status(self) -> Status | None:
        """What is at this place."""
        member = self.member()
        if member is not None:
            return Status(False, True, member.size, self.mtime_ns)
        return Status(True, False, 0, self.mtime_ns) if self.within in self.tree else None


def _tar_around(path: Path) -> _Place | None:
    """The tar file that a path leads into; None if it leads into none."""
    for outer in (path, *path.parents):
        try:
            found = outer.stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        if not stat.S_ISREG(found.st_mode) or escape(outer) is not None:
            return None
        tree = read_tree(outer, (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns))
        if tree is None:
            return None
        return _Place(outer, tree, "/".join(path.relative_to(outer).parts), found.st_mtime_ns)
    return None


def _open_member(path: Path) -> SourceFile:
    place = _tar_around(path)
    member = place.member() if place is not None else None
    if place is None or member is None:
        raise _missing(path)
    return SourceFile(open_source(place.tar).fd, member.offset, member.size, path.name)


def _missing(path: Path) -> FormatError:
    return FormatError(f"{printable(path.name)} is missing", details=[f"expected at {printable(str(path))}"])
