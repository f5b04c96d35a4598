"""Objects written and deleted. An object appears whole or not at all: that is what every store promises."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from converters.remote.patience import patiently, retry_for
from converters.remote.store import ObjectStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from converters.remote.address import RemotePath

__all__ = ["WRITABLE", "StoreWriter"]

WRITABLE = ("s3", "gs", "az")
"""Schemes of stores that are written to."""
_PART = 8 << 20
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

    def put_file(self, path: Path, to: RemotePath) -> str:
        """Writes an object with the contents of a file, in parts if it is large; returns its ETag.

        Raises:
            OSError: The store cannot be asked any more.
        """
        size = path.stat().st_size
        part = max(_PART, -(-size // _MOST_PARTS))
        many = {"use_multipart": size > _PART, "chunk_size": part, "max_concurrency": _PARTS_AT_ONCE}
        return self._put(path, to, **many)

    def put_bytes(self, data: bytes, to: RemotePath) -> str:
        """Writes a small object; returns its ETag.

        Raises:
            OSError: The store cannot be asked.
        """
        return self._put(data, to, use_multipart=False)

    def _put(self, content: Any, to: RemotePath, **how: Any) -> str:
        key = to.root_and_key[1]

        def put() -> str:
            answer = self._store.obstore.put(self._store.handle, key, content, **how)
            return str(answer["e_tag"] or "").removeprefix("W/").strip('"')

        return patiently(self.root, key, put, renew=self._store.renew)

    def delete(self, paths: Iterable[RemotePath]) -> None:
        """Deletes objects; one that is gone already is no trouble.

        Raises:
            OSError: The store cannot be asked.
        """
        for path in paths:
            key = path.root_and_key[1]
            with contextlib.suppress(FileNotFoundError):
                self._patiently(key, lambda key=key: self._store.obstore.delete(self._store.handle, key))  # type: ignore[misc]

    def _patiently(self, key: str, request: Callable[[], Any]) -> Any:
        return patiently(self.root, key, request, renew=self._store.renew)
