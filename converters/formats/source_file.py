"""An open file of a checkpoint, whatever its bytes come from: a descriptor, a member of a tar file, an object of a store."""

from __future__ import annotations

import contextlib
import os
from typing import Protocol

from converters.errors import FormatError
from converters.names import printable


class Content(Protocol):
    """What the bytes of an open file are asked of: a descriptor, or an object."""

    def read_into(self, view: memoryview, offset: int) -> int:
        """Fills `view` from an offset on; returns how many bytes came, less than asked for at any time."""

    def read(self, offset: int, length: int) -> bytes:
        """So many bytes from an offset on; less only at the end."""

    def expect(self, offset: int, length: int) -> None:
        """Says that a range will be read from front to back, by one thread."""

    def read_rows(self, rows: memoryview, offset: int, stride: int) -> None:
        """Fills the rows of a matrix of bytes, each `stride` bytes behind the one before.

        Raises:
            EOFError: The file ends before.
        """


class FileContent:
    """The bytes of a file on a disk, through its descriptor."""

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def read_into(self, view: memoryview, offset: int) -> int:
        """See `Content`."""
        return os.preadv(self.fd, [view], offset)

    def read(self, offset: int, length: int) -> bytes:
        """See `Content`: network file systems may return it in pieces."""
        pieces = []
        while length > 0 and (piece := os.pread(self.fd, length, offset)):
            pieces.append(piece)
            offset, length = offset + len(piece), length - len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def expect(self, offset: int, length: int) -> None:
        """See `Content`."""
        os.posix_fadvise(self.fd, offset, length, os.POSIX_FADV_SEQUENTIAL)

    def read_rows(self, rows: memoryview, offset: int, stride: int) -> None:
        """See `Content`."""
        assert rows.shape is not None
        length, flat = rows.shape[1], rows.cast("B")
        for number in range(rows.shape[0]):
            row, filled = flat[number * length : (number + 1) * length], 0
            while filled < length:  # network file systems may give less than was asked for
                count = os.preadv(self.fd, [row[filled:] if filled else row], offset + number * stride + filled)
                if not count:
                    raise EOFError
                filled += count


class SourceFile:
    """An open file of a checkpoint, read-only: a file of its own, or a range of a tar file.

    Attributes:
        content: Its bytes; `base` is the offset there of this file's first byte.
        size: Bytes.
        name: Its name, for errors.
    """

    __slots__ = ("base", "content", "name", "size")

    def __init__(self, content: Content, base: int, size: int, name: str) -> None:
        self.content, self.base, self.size, self.name = content, base, size, name

    def __enter__(self) -> SourceFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file. That it fails (a network file system, gone) changes nothing about what was read."""
        if isinstance(self.content, FileContent):
            with contextlib.suppress(OSError):
                os.close(self.content.fd)

    def read(self, offset: int, length: int) -> bytes:
        """`length` bytes at `offset`, fewer only at the end of the file.

        Raises:
            FormatError: Reading failed.
        """
        try:
            return self.content.read(self.base + offset, max(min(length, self.size - offset), 0))
        except OSError as error:
            raise read_failure(self.name, error) from error

    def read_into(self, view: memoryview, offset: int) -> int:
        """Fills `view` from an offset on; returns how many bytes came, less than asked for at the end or any time."""
        room = self.size - offset
        return self.content.read_into(view[:room] if len(view) > room else view, self.base + offset) if room > 0 else 0

    def read_rows(self, rows: memoryview, offset: int, stride: int) -> None:
        """Fills the rows of a matrix of bytes, the first from an offset on, each `stride` bytes behind the one before.

        Raises:
            EOFError: The file ends before.
        """
        assert rows.shape is not None
        count, length = rows.shape
        if offset + (count - 1) * stride + length > self.size:
            raise EOFError
        self.content.read_rows(rows, self.base + offset, stride)

    def forget(self, offset: int, length: int) -> None:
        """Lets the page cache drop a range."""
        if isinstance(self.content, FileContent):
            os.posix_fadvise(self.content.fd, self.base + offset, length, os.POSIX_FADV_DONTNEED)

    def expect(self, offset: int, length: int) -> None:
        """Says that a range will be read from front to back, by one thread."""
        self.content.expect(self.base + offset, length)


def read_failure(path: object, error: OSError) -> FormatError:
    """The error that says what could not be read, a file or a folder, and why."""
    return FormatError(f"reading {printable(str(path))} failed: {error.strerror or error}")
