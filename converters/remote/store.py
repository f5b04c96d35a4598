"""Requests to an object store: listings, properties, byte ranges. Each is sent once; `patience` retries."""

from __future__ import annotations

import functools
import os
from datetime import timedelta
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from converters.errors import RequestError
from converters.remote.aws import shared_settings
from converters.remote.patience import FIRST_PAUSE, LONGEST_PAUSE, patiently

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from datetime import datetime

    from converters.remote.address import Root


class Properties(NamedTuple):
    """What a store says of an object.

    Attributes:
        size: Bytes.
        seconds: Time of its last change, since 1970.
        tag: Its ETag without quotes; empty if the store has none.
    """

    size: int
    seconds: float
    tag: str

    @property
    def mtime_ns(self) -> int:
        """The time, as of a file. Stores count whole seconds: the digits below are the ETag's, so that a change shows."""
        import zlib

        return int(self.seconds) * 10**9 + zlib.crc32(self.tag.encode()) % 10**9


class Store(Protocol):
    """A bucket, or what is like one."""

    root: Root

    def list(self, prefix: str, *, deep: bool) -> Iterable[tuple[str, Properties | None]]:
        """Keys in a folder with their properties; folders with None.

        Args:
            prefix: The folder's key, without a slash at its end; empty for all.
            deep: All objects at any depth, and no folders; else only what lies in this folder.
        """
        ...

    def head(self, key: str) -> Properties:
        """What the store says of an object.

        Raises:
            FileNotFoundError: There is none.
        """
        ...

    def get(self, key: str, start: int, end: int) -> tuple[Any, Properties]:
        """Bytes `start` to `end` of an object, as a buffer, and what it is now."""
        ...


class ObjectStore:
    """A store that `obstore` reaches: S3, Google Cloud Storage, Azure; each request is made once.

    Args:
        root: Scheme and bucket.
        retry_seconds: For how long obstore itself makes a request again; uploads cannot be begun anew from here.
    """

    def __init__(self, root: Root, retry_seconds: float = 0.0) -> None:
        self.root = root
        self.obstore = _obstore()
        self._retry_seconds = retry_seconds
        self.handle = self._open()

    def renew(self) -> None:
        """Looks for credentials anew."""
        self.handle = self._open()

    def _open(self) -> Any:
        stores, name = import_module("obstore.store"), self.root.name
        own = shared_settings(os.environ) if self.root.scheme == "s3" else {}
        plain = own.get("endpoint", "").startswith("http://") or _plain_http_allowed()
        common: dict[str, Any] = {
            "client_options": {
                "timeout": "120s",
                "connect_timeout": "10s",
                "allow_http": self.root.scheme == "http" or plain,
            },
            "retry_config": {
                "max_retries": 1000 if self._retry_seconds else 0,
                "retry_timeout": timedelta(seconds=max(self._retry_seconds, 1)),
                "backoff": {"init_backoff": timedelta(seconds=FIRST_PAUSE), "base": 2,
                            "max_backoff": timedelta(seconds=LONGEST_PAUSE)},
            },
        }  # fmt: skip
        match self.root.scheme:
            case "s3":
                return stores.S3Store(name, **own, **common)
            case "gs":
                return stores.GCSStore(name, **common)
            case "az":
                return stores.AzureStore(name, **common)
        return stores.HTTPStore.from_url(str(self.root), **common)

    def list(self, prefix: str, *, deep: bool) -> Iterator[tuple[str, Properties | None]]:
        """See `Store`."""
        if deep:
            for page in self.obstore.list(self.handle, prefix or None, chunk_size=1000):
                yield from ((entry["path"], _properties(entry)) for entry in page)
            return
        answer = self.obstore.list_with_delimiter(self.handle, prefix or None)
        yield from ((entry["path"], _properties(entry)) for entry in answer["objects"])
        yield from ((name.rstrip("/"), None) for name in answer["common_prefixes"])

    def head(self, key: str) -> Properties:
        """See `Store`."""
        return _properties(self.obstore.head(self.handle, key))

    def get(self, key: str, start: int, end: int) -> tuple[Any, Properties]:
        """See `Store`."""
        answer = self.obstore.get(self.handle, key, options={"range": (start, end)} if end > start else {})
        return answer.bytes(), _properties(answer.meta)


def _properties(entry: dict[str, Any]) -> Properties:
    modified: datetime = entry["last_modified"]
    return Properties(entry["size"], modified.timestamp(), (entry["e_tag"] or "").removeprefix("W/").strip('"'))


def _obstore() -> Any:
    try:
        return import_module("obstore")
    except ImportError:
        raise RequestError(
            "addresses of object stores need the package obstore, which is not installed",
            hint="pip install 'distckpt[remote]'",
        ) from None


def _plain_http_allowed() -> bool:
    """Whether a store of one's own is reached without TLS: said to obstore, or by the scheme of its endpoint."""
    names = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AWS_ENDPOINT_URL_S3", "AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT")
    return any(os.environ.get(name, "").startswith("http://") for name in names)


@functools.cache
def store_of(root: Root) -> Store:
    """The store of a bucket; one for the whole process.

    Raises:
        RequestError: A package that is needed is not installed.
        OSError: It cannot be set up: no credentials, say.
    """
    if root.scheme == "hf":
        from converters.remote.hub import HubStore

        return HubStore(root)
    if root.scheme in ("http", "https"):
        from converters.remote.web import WebStore

        return WebStore(root)
    return patiently(root, "", lambda: ObjectStore(root))
