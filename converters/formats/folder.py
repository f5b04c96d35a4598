"""Reading folders and files of a checkpoint, also those that lie in a tar file, in an object store, or both.

A path may lead into a tar file as if that were a folder: `model.nemo/model_weights/common.pt`. Nothing is unpacked: such a
file is a range of the tar file. And it may be the address of an object, whose ranges are fetched. So readers look at folders
and files only through what is here.
"""

from __future__ import annotations

import contextlib
import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from converters.errors import FormatError
from converters.formats.links import escape, follows_links, refuse_escape
from converters.formats.source_file import FileContent, SourceFile
from converters.formats.tar import read_tree
from converters.names import printable
from converters.remote.address import RemotePath

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from converters.formats.tar import Member, Tree

    Entry: TypeAlias = "os.DirEntry[str] | _ListedEntry"

_SMALL = 256 << 20


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


def open_source(path: Path) -> SourceFile:
    """Opens a regular file for reading; devices, pipes and folders are refused without waiting on them.

    Raises:
        FormatError: Missing, not a regular file, no permission, a link out of the checkpoint, or in a tar file that is
            refused.
    """
    try:
        return _open_object(path) if isinstance(path, RemotePath) else _open_file(path)
    except FileNotFoundError:
        raise _missing(path) from None
    except NotADirectoryError:
        return _open_member(path)
    except OSError as error:
        raise FormatError(f"cannot read {printable(str(path))}: {error.strerror}") from error


def _open_file(path: Path) -> SourceFile:
    refuse_escape(path)
    content = FileContent(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    try:
        file_stat = os.fstat(content.fd)
        if not stat.S_ISREG(file_stat.st_mode):
            raise _not_regular(path)
    except (OSError, FormatError):
        os.close(content.fd)
        raise
    return SourceFile(content, 0, file_stat.st_size, path.name)


def _open_object(path: RemotePath) -> SourceFile:
    from converters.remote.content import RemoteContent
    from converters.remote.store import store_of

    properties = path.properties()
    if properties is None:
        raise _not_regular(path)
    root, key = path.root_and_key
    return SourceFile(RemoteContent(store_of(root), key, properties, path), 0, properties.size, path.name)


def _not_regular(path: Path) -> FormatError:
    return FormatError(f"{printable(str(path))} is not a regular file")


def read_small(path: Path, limit: int = _SMALL) -> bytes:
    """The contents of a metadata-sized file.

    Raises:
        FormatError: Missing, unreadable, or larger than `limit` bytes.
    """
    with open_source(path) as source:
        if source.size > limit:
            raise FormatError(f"{printable(path.name)} is {source.size} bytes, more than the {limit} it may have")
        return source.read(0, source.size)


def refresh(path: Path) -> None:
    """Forgets what is remembered of the listings of an object store at and below a path; nothing is remembered of a disk.

    Raises:
        OSError: The store cannot be asked.
    """
    if isinstance(path, RemotePath):
        path.refresh()


def exists(path: Path) -> bool:
    """Whether there is anything at a path."""
    return status(path) is not None


def is_folder(path: Path) -> bool:
    """Whether a path is a folder, or a tar file."""
    path_status = status(path)
    if path_status is None or not path_status.file:
        return path_status is not None and path_status.folder
    around = _tar_around(path)
    return around is not None and not around.within


def is_file(path: Path) -> bool:
    """Whether a path is a regular file."""
    path_status = status(path)
    return path_status is not None and path_status.file


def status(path: Path) -> Status | None:
    """What is at a path; None if nothing is.

    Raises:
        FormatError: The path leads into a tar file that is refused.
        OSError: No permission, or a failing disk.
    """
    try:
        file_stat = path.stat()
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        around = _tar_around(path)
        return None if around is None else around.status()
    return Status(
        stat.S_ISDIR(file_stat.st_mode), stat.S_ISREG(file_stat.st_mode), file_stat.st_size, file_stat.st_mtime_ns
    )


@contextlib.contextmanager
def scan(folder: Path) -> Iterator[Iterator[Entry]]:
    """As `os.scandir`, also of a tar file and of folders in it; a link out of the checkpoint is refused."""
    refuse_escape(folder)
    try:
        if isinstance(folder, RemotePath):
            yield (
                _ListedEntry(name, *((stored.size, stored.mtime_ns) if stored is not None else (None,)))
                for name, stored in folder.entries().items()
            )
            return
        entries = os.scandir(folder)
    except NotADirectoryError:
        around = _tar_around(folder)
        if around is None or around.within not in around.tree:
            raise
        yield (
            _ListedEntry(name, None if member is None else member.size, around.mtime_ns)
            for name, member in around.tree[around.within].items()
        )
        return
    with entries:
        yield entries


def listing(folder: Path) -> list[str]:
    """Names of what lies in a folder, sorted."""
    with scan(folder) as entries:
        return sorted(entry.name for entry in entries)


def walk(folder: Path, within: str = "") -> Iterator[tuple[str, Status]]:
    """Every file below a folder as `(path from there, status)`, in order; links to folders are not followed.

    Raises:
        OSError: A folder cannot be listed.
    """
    with scan(folder) as scanned:
        entries = sorted(scanned, key=lambda entry: entry.name)
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from walk(folder / entry.name, f"{within}{entry.name}/")
        else:
            with contextlib.suppress(FileNotFoundError):  # gone meanwhile
                yield f"{within}{entry.name}", entry_status(folder, entry)


def entry_status(folder: Path, entry: Entry) -> Status:
    """What an entry of a folder is that is no folder; a link is a regular file only if it may be followed."""
    follow = follows_links(folder) and entry.is_file()
    size = entry.stat(follow_symlinks=follow)
    return Status(False, entry.is_file(follow_symlinks=follow), size.st_size, size.st_mtime_ns)


@dataclass(frozen=True, slots=True)
class _ListedEntry:
    """Something in a folder of a tar file or of a store, as `os.DirEntry` has it. A folder has no size."""

    name: str
    _size: int | None
    st_mtime_ns: int = 0

    @property
    def st_size(self) -> int:
        return self._size or 0

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return self._size is None

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return self._size is not None

    def is_symlink(self) -> bool:
        return False

    def stat(self, *, follow_symlinks: bool = True) -> _ListedEntry:
        return self


@dataclass(frozen=True, slots=True)
class _TarMember:
    """A path within a tar file.

    Attributes:
        tar: The tar file.
        tree: What is in it.
        within: The path, `a/b`; empty for the outermost folder.
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


def _tar_around(path: Path) -> _TarMember | None:
    """The tar file that a path leads into; None if it leads into none."""
    for outer in (path, *path.parents):
        try:
            file_stat = outer.stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        if not stat.S_ISREG(file_stat.st_mode) or escape(outer) is not None:
            return None
        tree = read_tree(
            outer, (file_stat.st_dev, file_stat.st_ino, file_stat.st_size, file_stat.st_mtime_ns), open_source
        )
        if tree is None:
            return None
        return _TarMember(outer, tree, "/".join(path.relative_to(outer).parts), file_stat.st_mtime_ns)
    return None


def _open_member(path: Path) -> SourceFile:
    around = _tar_around(path)
    member = around.member() if around is not None else None
    if around is None or member is None:
        raise _missing(path)
    return SourceFile(open_source(around.tar).content, member.offset, member.size, path.name)


def _missing(path: Path) -> FormatError:
    return FormatError(f"{printable(path.name)} is missing", details=[f"expected at {printable(str(path))}"])
