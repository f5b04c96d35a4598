"""File system calls: writing, allocating, syncing, renaming."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
from typing import TYPE_CHECKING

from converters.errors import DestinationError
from converters.io.gather import DROP_BYTES
from converters.names import printable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_EXCHANGE = 2
_DONTCACHE = [0x80]  # RWF_DONTCACHE; empty once a file system has refused it


def os_trouble(error: OSError, path: Path | str, doing: str) -> DestinationError:
    """The error to raise when writing failed: what, where, and what helps."""
    shown = printable(str(path))
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        reason = "the disk is full" if error.errno == errno.ENOSPC else "the disk quota is exhausted"
        return DestinationError(
            f"{reason}: {doing} {shown} failed",
            hint="free some space and run the same command again; finished work is kept",
        )
    return DestinationError(f"{doing} {shown} failed: {error.strerror or error}", hint="nothing was published")


@contextlib.contextmanager
def trouble_with(path: Path, doing: str) -> Iterator[None]:
    """Raises what the file system says meanwhile as a `DestinationError`: what failed, where, and what helps."""
    try:
        yield
    except OSError as error:
        raise os_trouble(error, path, doing) from error


@contextlib.contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    """Opens a file, never through a link, and closes it; some file systems say only then that writing failed."""
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        yield fd
    finally:
        os.close(fd)


def write_at(fd: int, data: memoryview | bytes, offset: int) -> None:
    """Writes all of `data` at an offset. Large pieces go to the disk at once, so that the last sync is short."""
    view = memoryview(data)
    while view:
        n = _write_uncached(fd, view, offset) if len(view) >= DROP_BYTES else os.pwrite(fd, view, offset)
        view, offset = view[n:], offset + n


def _write_uncached(fd: int, view: memoryview, offset: int) -> int:
    """One write whose pages leave the page cache as soon as they are on the disk (Linux 6.14; not all file systems)."""
    if _DONTCACHE:
        try:
            return os.pwritev(fd, [view], offset, _DONTCACHE[0])
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
            _DONTCACHE.clear()
    n = os.pwrite(fd, view, offset)
    os.posix_fadvise(fd, offset, n, os.POSIX_FADV_DONTNEED)  # of pages not yet written this only starts the write-back
    return n


def write_all(fd: int, data: bytes) -> None:
    """Writes all of `data` where the file stands."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def write_synced(path: Path, data: bytes) -> None:
    """Writes a small file and syncs it."""
    with opened(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as fd:
        write_all(fd, data)
        os.fsync(fd)


def reserve(fd: int, nbytes: int) -> None:
    """Gives an empty file its size and, where the file system can, its blocks: a full disk shows now, not hours later."""
    libc = ctypes.CDLL(None, use_errno=True)
    while nbytes and hasattr(libc, "fallocate"):  # not posix_fallocate: where blocks cannot be had it writes zeros
        if libc.fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(nbytes)) == 0:
            return
        number = ctypes.get_errno()
        if number in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            break
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))
    os.ftruncate(fd, nbytes)


def lock(fd: int, *, shared: bool = False) -> bool:
    """Locks an open file or folder, as long as it is open.

    Returns:
        Whether the file system has locks: some NFS and Lustre mounts do not.

    Raises:
        BlockingIOError: Another process holds it.
    """
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True


def lock_folder(folder: Path, destination: Path) -> tuple[int, bool]:
    """Holds a folder for this process, as long as what is returned is open.

    Args:
        folder: What is locked.
        destination: What is made in it, for the error.

    Returns:
        The open folder, and whether the file system has locks at all.

    Raises:
        DestinationError: Another process holds it, or has just published or removed it.
    """
    with contextlib.ExitStack() as closing:
        shown = printable(str(destination))
        message, hint = (
            f"another distckpt has just finished writing {shown}",
            "look at it, or run the same command again",
        )
        with contextlib.suppress(FileNotFoundError):  # published or removed since the folder was made
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            closing.callback(os.close, fd)
            try:
                has_locks = lock(fd)
                if os.path.samestat(os.fstat(fd), folder.stat()):
                    closing.pop_all()
                    return fd, has_locks
            except BlockingIOError:
                message = f"another distckpt is writing {shown} right now"
                hint = "wait for it, or choose another directory"
        raise DestinationError(message, hint=hint)


def raise_error(error: OSError) -> None:
    """For `os.walk`, which otherwise leaves out what it cannot list."""
    raise error


def sync_folder(folder: Path) -> None:
    """Sees to it that a new name in a folder survives a power cut."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot sync a folder
            raise
    finally:
        os.close(fd)


def make_folders(folder: Path) -> list[Path]:
    """Makes a folder and what is missing above it, so that it survives a power cut.

    Returns:
        What was made, innermost first.
    """
    if folder.is_dir():
        return []
    above = make_folders(folder.parent)
    folder.mkdir(exist_ok=True)
    sync_folder(folder.parent)
    return [folder, *above]


def remove_folder(folder: Path) -> None:
    """Removes a folder with all in it, as far as that is possible."""
    with contextlib.suppress(OSError):  # of looking at it, or of closing it, rmtree does not ignore errors
        shutil.rmtree(folder, ignore_errors=True)


def exchange(first: Path, second: Path) -> bool:
    """Swaps two folders in one step, so that both names exist at any time; False where that is not possible."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    at_cwd = -100  # AT_FDCWD
    if libc.renameat2(at_cwd, os.fsencode(first), at_cwd, os.fsencode(second), _EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), str(second))
