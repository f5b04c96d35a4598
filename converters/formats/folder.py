"""Reading files of a checkpoint: regular files only, in pieces if the file system returns pieces."""

from __future__ import annotations

import contextlib
import os
import stat
from typing import TYPE_CHECKING

from converters.errors import FormatError
from converters.names import printable

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["close_source", "open_source", "read_at", "read_small"]

_SMALL = 256 << 20


def open_source(path: Path) -> int:
    """A read-only file descriptor of a regular file; devices, pipes and folders are refused without waiting on them.

    Raises:
        FormatError: Missing, not a regular file, or no permission.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | getattr(os, "O_CLOEXEC", 0))
    except FileNotFoundError:
        raise FormatError(
            f"{printable(path.name)} is missing", details=[f"expected at {printable(str(path))}"]
        ) from None
    except OSError as error:
        raise FormatError(f"cannot read {printable(str(path))}: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise FormatError(f"{printable(str(path))} is not a regular file")
    return fd


def read_small(path: Path, limit: int = _SMALL) -> bytes:
    """The contents of a metadata-sized file.

    Raises:
        FormatError: Missing, unreadable, or larger than `limit` bytes.
    """
    fd = open_source(path)
    try:
        size = os.fstat(fd).st_size
        if size > limit:
            raise FormatError(f"{printable(path.name)} is {size} bytes, more than the {limit} it may have")
        return read_at(fd, 0, size)
    except OSError as error:
        raise FormatError(f"reading {printable(str(path))} failed: {error.strerror}") from error
    finally:
        close_source(fd)


def read_at(fd: int, offset: int, length: int) -> bytes:
    """`length` bytes at `offset`, fewer only at the end of the file: network file systems may return them in pieces."""
    pieces, left = [], length
    while left:
        piece = os.pread(fd, left, offset + length - left)
        if not piece:
            break
        pieces.append(piece)
        left -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def close_source(fd: int) -> None:
    """Closes a file that was only read; that it fails (a network file system, gone) changes nothing about what was read."""
    with contextlib.suppress(OSError):
        os.close(fd)
