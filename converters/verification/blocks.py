"""Reads a file once, front to back, computes its SHA-256 and checks its records."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from converters.errors import FormatError
from converters.events import Moved
from converters.names import printable

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import NDArray

    from converters.execute.work_sharing import WorkSharing
    from converters.formats.source_file import SourceFile
    from converters.verification.files import FileRead

BLOCK_BYTES = 8 << 20


class Blocks:
    """A file, or a piece of one, read once from front to back in large blocks, with a few bytes anywhere in between.

    Args:
        source: The open file.
        task: What of it is to be read.
        buffer: Where blocks go; its size is theirs.
        sharing: Who is told how far it is, and says when to stop.
        drop: Let the page cache forget what was read.

    Attributes:
        read: Bytes of blocks that were read.
    """

    def __init__(
        self, source: SourceFile, task: FileRead, buffer: NDArray[np.uint8], sharing: WorkSharing, *, drop: bool
    ) -> None:
        self._source, self._name, self._buffer, self._sharing, self._drop = source, task.name, buffer, sharing, drop
        self._limit = task.end
        self._digest = hashlib.sha256() if task.hashed else None
        self._hashed = 0
        self._start, self._view = 0, memoryview(b"")
        self.read = 0

    def peek(self, at: int, length: int) -> bytes:
        """A few bytes anywhere, fewer only at the end of the file."""
        begin = at - self._start
        if begin >= 0 and begin + length <= len(self._view):
            return bytes(self._view[begin : begin + length])
        return self._source.read(at, length)

    def stream(self, at: int, length: int) -> Iterator[memoryview]:
        """The bytes of a range, in pieces that are overwritten when the next one is asked for.

        Raises:
            FormatError: The file ends before the range does.
        """
        end = at + length
        while at < end:
            if not self._start <= at < self._start + len(self._view):
                self._load(at)
            begin = at - self._start
            piece = self._view[begin : min(begin + end - at, len(self._view))]
            if begin < 0 or not piece:
                raise FormatError(f"{printable(self._name)} ends early: bytes up to {end:,} are needed")
            yield piece
            at += len(piece)

    def finish(self) -> str | None:
        """SHA-256 of the whole file, after reading what is left of it; None if it was not wanted."""
        if self._digest is None:
            return None
        while self._fill(self._hashed):
            pass
        return self._digest.hexdigest()

    def _load(self, at: int) -> None:
        """Makes the block that holds a byte the current one; with a digest to make, all before it are read."""
        if self._digest is None or at < self._hashed:
            self._fill(at)
            return
        while self._hashed <= at and self._fill(self._hashed):
            pass

    def _fill(self, at: int) -> bool:
        """Reads a block, of a piece of a file no more than that; False at the end."""
        self._sharing.check()
        if self._drop and self._view:
            self._source.forget(self._start, len(self._view))
        block, filled = memoryview(self._buffer.data)[: max(0, self._limit - at)], 0
        while filled < len(block):
            n = self._source.read_into(block[filled:], at + filled)
            if not n:
                break
            filled += n
        self._start, self._view = at, block[:filled]
        if self._digest is not None and at == self._hashed:
            self._digest.update(self._view)
            self._hashed += filled
        self.read += filled
        self._sharing.report(Moved(filled))
        return filled > 0
