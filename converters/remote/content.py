"""Bytes of objects: ranges, read again where an answer was cut, and never from another object than the one that was listed.

Short ranges that lie near each other are fetched as one block and remembered; long ones are fetched as they are, straight
into the caller's buffer, but for what a remembered block has of them.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict, deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

from converters.errors import IntegrityError, StoreError
from converters.names import printable
from converters.remote.failures import CutError

if TYPE_CHECKING:
    from converters.remote.address import RemotePath
    from converters.remote.store import Properties, Store

BLOCK = 256 << 10
"""Bytes that are fetched where less is asked for."""
_PIECE = 8 << 20
_PIECES_AT_ONCE = 8
_PIECE_AHEAD, _PIECES_AHEAD = 4 << 20, 4  # of each file that is read from front to back
_KEPT_BLOCKS = 256  # 64 MiB
_KEPT_WHOLE = 512 << 20


class _Key(NamedTuple):
    """Names a block, or all of an object (-1), of one version of it."""

    address: str
    tag: str
    size: int
    block: int


class _Cache:
    """Bytes that were fetched, the longest unused dropped first; safe for several threads."""

    def __init__(self, limit: int) -> None:
        self._limit, self._nbytes = limit, 0
        self._data: OrderedDict[_Key, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: _Key) -> bytes | None:
        with self._lock:
            data = self._data.get(key)
            if data is not None:
                self._data.move_to_end(key)
            return data

    def put(self, key: _Key, data: bytes) -> None:
        with self._lock:
            self._nbytes += len(data) - len(self._data.get(key, b""))
            self._data[key] = data
            while self._nbytes > self._limit:
                self._nbytes -= len(self._data.popitem(last=False)[1])


_blocks, _whole_objects = _Cache(_KEPT_BLOCKS * BLOCK), _Cache(_KEPT_WHOLE)


class RemoteContent:
    """The bytes of an object as it was listed; safe for several threads.

    Args:
        store: Where it is.
        key: Its name there.
        properties: What the listing said.
        address: For errors.
    """

    def __init__(self, store: Store, key: str, properties: Properties, address: RemotePath) -> None:
        self._store, self._key, self._properties, self._address = store, key, properties, address
        self._front = 0  # how far it was read
        self._expected = 0  # end of the range that is being read from front to back
        self._next = 0  # the first byte of it that has not been asked for
        self._ahead: deque[tuple[int, Future[memoryview]]] = deque()  # what is fetched of it already, in order

    def expect(self, offset: int, length: int) -> None:
        """Announces that one thread will read a range from front to back: some of it is fetched ahead."""
        self._expected, self._front = offset + length, offset
        self._look_ahead(offset)

    def read_into(self, view: memoryview, offset: int) -> int:
        """Fills `view` from an offset on; all of it lies within the object.

        Raises:
            StoreError: The store cannot be asked any more.
            IntegrityError: The object was replaced.
        """
        end = offset + len(view)
        if len(view) < BLOCK:
            self._read_blocks(view, offset)
            return len(view)
        first, last = self._remembered(offset), self._remembered(end - 1)
        begin, stop = offset, end
        if first is not None:
            start = offset // BLOCK * BLOCK
            begin = min(start + len(first), end)
            view[: begin - offset] = first[offset - start : begin - start]
        if last is not None and begin < end:
            start = (end - 1) // BLOCK * BLOCK
            stop = max(start, begin)
            view[stop - offset :] = last[stop - start : end - start]
        if begin < stop:
            self._fetch_into(view[begin - offset : stop - offset], begin)
        return len(view)

    def read(self, offset: int, length: int) -> bytes:
        """So many bytes at an offset; all of an object is remembered: metadata is read by several."""
        object_key = self._name(-1) if offset == 0 and length == self._properties.size else None
        data = _whole_objects.get(object_key) if object_key is not None else None
        if data is None:
            buffer = bytearray(length)
            self.read_into(memoryview(buffer), offset)
            data = bytes(buffer)
            if object_key is not None and length < _KEPT_WHOLE:
                _whole_objects.put(object_key, data)
        return data

    def read_rows(self, rows: memoryview, offset: int, stride: int) -> None:
        """Fills the rows of a matrix of bytes, the first from an offset on, each `stride` bytes behind the one before.

        What lies between rows is read along: a request costs more than these bytes.
        """
        assert rows.shape is not None
        count, length = rows.shape
        flat = rows.cast("B")
        if count == 1:
            self.read_into(flat, offset)
            return
        step = max(1, _PIECE // stride)
        for first in range(0, count, step):
            several = min(step, count - first)
            buffer = memoryview(bytearray((several - 1) * stride + length))
            self.read_into(buffer, offset + first * stride)
            for row in range(several):
                at = (first + row) * length
                flat[at : at + length] = buffer[row * stride : row * stride + length]

    def _name(self, block: int) -> _Key:
        return _Key(str(self._address), self._properties.tag, self._properties.size, block)

    def _remembered(self, offset: int) -> bytes | None:
        return _blocks.get(self._name(offset // BLOCK))

    def _read_blocks(self, view: memoryview, offset: int) -> None:
        at, end = offset, offset + len(view)
        while at < end:
            number = at // BLOCK
            data = _blocks.get(self._name(number))
            if data is None:
                start = number * BLOCK
                data = bytes(self._fetch(start, min(start + BLOCK, self._properties.size)))
                _blocks.put(self._name(number), data)
            inside = at - number * BLOCK
            piece = data[inside : inside + end - at]
            view[at - offset : at - offset + len(piece)] = piece
            at += len(piece)

    def _fetch_into(self, view: memoryview, offset: int) -> None:
        """Fetches a range; a long one in several pieces at a time."""
        filled = self._take_ahead(view, offset)
        self._look_ahead(offset + len(view))
        view, offset = view[filled:], offset + filled
        pieces = [(at, min(at + _PIECE, len(view))) for at in range(0, len(view), _PIECE)]

        def fetch(piece: tuple[int, int]) -> None:
            begin, end = piece
            view[begin:end] = self._fetch(offset + begin, offset + end)

        if len(pieces) <= 2:
            for piece in pieces:
                fetch(piece)
            return
        with ThreadPoolExecutor(min(_PIECES_AT_ONCE, len(pieces))) as pool:
            for _ in pool.map(fetch, pieces):
                pass

    def _take_ahead(self, view: memoryview, offset: int) -> int:
        """Fills the front of a range with what was fetched before; returns how many bytes that is."""
        filled = 0
        while self._ahead and filled < len(view):
            begin, future = self._ahead.popleft()
            self._fill_ahead()  # before this one is waited for: else all are waited for at the same time
            skipped = offset + filled - begin  # read from a remembered block meanwhile
            if skipped < 0:  # not read from front to back after all
                self._ahead.clear()
                break
            data = future.result()[skipped:]
            count = min(len(data), len(view) - filled)
            view[filled : filled + count] = data[:count]
            filled += count
            if count < len(data):
                remaining: Future[memoryview] = Future()
                remaining.set_result(data[count:])
                self._ahead.appendleft((begin + skipped + count, remaining))
        return filled

    def _look_ahead(self, offset: int) -> None:
        if offset < self._front:  # what is read again is not expected
            return
        self._front = offset
        if not self._ahead:
            self._next = offset
        self._fill_ahead()

    def _fill_ahead(self) -> None:
        while len(self._ahead) < _PIECES_AHEAD and self._next < self._expected:
            stop = min(self._next + _PIECE_AHEAD, self._expected)
            self._ahead.append((self._next, background().submit(self._fetch, self._next, stop)))
            self._next = stop

    def _fetch(self, begin: int, end: int) -> memoryview:
        def get() -> memoryview:
            data, now = self._store.get(self._key, begin, end)
            if (now.size, now.tag) != (self._properties.size, self._properties.tag):
                raise _Replaced
            view = memoryview(data).cast("B")
            if len(view) != end - begin:
                raise CutError(f"{len(view):,} bytes instead of {end - begin:,}")
            return view

        shown = printable(str(self._address))
        try:
            return self._store.retried(self._key, get)
        except (_Replaced, FileNotFoundError):
            raise IntegrityError(
                f"the source changed while it was read: {shown} was replaced or deleted; nothing was published",
                hint="wait until nobody writes to it, then run the same command again",
            ) from None
        except OSError as error:
            hint = "run the same command again; work that is finished is kept"
            raise StoreError(f"reading {shown} failed: {error.strerror}", hint=hint) from error


@functools.cache
def background() -> ThreadPoolExecutor:
    """The threads that fetch what has not been asked for yet."""
    return ThreadPoolExecutor(_PIECES_AT_ONCE * _PIECES_AHEAD, "object-store")


class _Replaced(Exception):
    pass
