"""Writes and deletes objects. Every store guarantees that an object appears completely or not at all."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any

from converters.remote.patience import patiently, retry_for
from converters.remote.store import ObjectStore, etag_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from converters.remote.address import RemotePath

WRITABLE = ("s3", "gs", "az")
"""Schemes of stores that are written to."""
PART = 8 << 20
"""Larger files are uploaded in parts of so many bytes."""
_MOST_PARTS = 9000  # S3 takes 10,000
_PARTS_AT_ONCE = 4


class StoreWriter:
    """Writes objects of one bucket; safe for several threads.

    Args:
        destination: Something in the bucket.
    """

    def __init__(self, destination: RemotePath) -> None:
        self.root = destination.root_and_key[0]
        self._store = patiently(self.root, "", lambda: ObjectStore(self.root, max(retry_for(), 1.0)))

    def put_file(self, path: Path, to: RemotePath, moved: Callable[[int], None] = lambda nbytes: None) -> str:
        """Writes an object with the contents of a file, in parts if it is large; returns its ETag.

        Args:
            path: The file.
            to: The object.
            moved: Called with the size of each part that is about to be sent; what it raises ends the upload, and is raised.

        Raises:
            OSError: The store cannot be asked any more.
        """
        size, sent = path.stat().st_size, 0
        part = max(PART, -(-size // _MOST_PARTS))

        def parts() -> Iterator[bytes]:
            nonlocal sent
            with path.open("rb") as file:
                while piece := file.read(part):
                    moved(max(0, file.tell() - sent))  # nothing is counted twice where an upload is begun anew
                    sent = max(sent, file.tell())
                    yield piece

        if size <= PART:
            moved(size)
            return self._put(lambda: path, to, use_multipart=False)
        return self._put(parts, to, use_multipart=True, chunk_size=part, max_concurrency=_PARTS_AT_ONCE)

    def put_bytes(self, data: bytes, to: RemotePath) -> str:
        """Writes a small object; returns its ETag.

        Raises:
            OSError: The store cannot be asked.
        """
        return self._put(lambda: data, to, use_multipart=False)

    def _put(self, content: Callable[[], Any], to: RemotePath, **options: Any) -> str:
        key = to.root_and_key[1]

        def put() -> str:
            return etag_of(self._store.obstore.put(self._store.handle, key, content(), **options))

        return self._store.retried(key, put)

    def delete(self, paths: Iterable[RemotePath]) -> None:
        """Deletes objects; one that is gone already is no trouble.

        Raises:
            OSError: The store cannot be asked.
        """
        for path in paths:
            key = path.root_and_key[1]
            with contextlib.suppress(FileNotFoundError):
                self._store.retried(key, partial(self._store.obstore.delete, self._store.handle, key))
