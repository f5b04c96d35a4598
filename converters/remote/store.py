"""Requests to an object store: listings, properties, byte ranges. Each is sent once; `Store.retried` repeats them."""

from __future__ import annotations

import functools
import os
from datetime import timedelta
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from converters.errors import RequestError
from converters.remote.aws import shared_settings
from converters.remote.patience import FIRST_PAUSE, LONGEST_PAUSE, patiently

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from converters.remote.address import Root

_T = TypeVar("_T")


class Properties(NamedTuple):
    """A store's properties of an object.

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
    """A bucket, or what is like one: each request is sent once."""

    root: Root

    def renew(self) -> None:
        """Looks for credentials anew."""
        return  # those of most stores do not expire

    def retried(self, key: str, request: Callable[[], _T]) -> _T:
        """The answer to a request about a key; see `patiently`."""
        return patiently(self.root, key, request, renew=self.renew)

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


class ObjectStore(Store):
    """A store that `obstore` reaches: S3, Google Cloud Storage, Azure.

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
        """See `Store`."""
        self.handle = self._open()

    def _open(self) -> Any:
        stores, name = import_module("obstore.store"), self.root.name
        settings = shared_settings(os.environ) if self.root.scheme == "s3" else {}
        plain = settings.get("endpoint", "").startswith("http://") or _is_plain_http_stated()
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
                return stores.S3Store(name, **settings, **common)
            case "gs":
                return stores.GCSStore(name, **common)
            case "az":
                return stores.AzureStore(name, **common)
        return stores.HTTPStore.from_url(str(self.root), **common)

    def list(self, prefix: str, *, deep: bool) -> Iterator[tuple[str, Properties | None]]:
        """See `Store`."""
        if deep:
            for page in self.obstore.list(self.handle, prefix or None, chunk_size=1000):
                yield from ((entry["path"], properties_of(entry)) for entry in page)
            return
        answer = self.obstore.list_with_delimiter(self.handle, prefix or None)
        yield from ((entry["path"], properties_of(entry)) for entry in answer["objects"])
        yield from ((name.rstrip("/"), None) for name in answer["common_prefixes"])

    def head(self, key: str) -> Properties:
        """See `Store`."""
        return properties_of(self.obstore.head(self.handle, key))

    def get(self, key: str, start: int, end: int) -> tuple[Any, Properties]:
        """See `Store`."""
        answer = self.obstore.get(self.handle, key, options={"range": (start, end)} if end > start else {})
        return answer.bytes(), properties_of(answer.meta)


def properties_of(entry: Mapping[str, Any]) -> Properties:
    """The properties in `obstore`'s description of an object."""
    return Properties(entry["size"], entry["last_modified"].timestamp(), etag_of(entry))


def etag_of(entry: Mapping[str, Any]) -> str:
    """The ETag in what `obstore` says of an object, without quotes; empty if there is none."""
    return (entry["e_tag"] or "").removeprefix("W/").strip('"')


def _obstore() -> Any:
    try:
        return import_module("obstore")
    except ImportError:
        raise RequestError(
            "addresses of object stores need the package obstore, which is not installed",
            hint="pip install 'distckpt[remote]'",
        ) from None


def _is_plain_http_stated() -> bool:
    """Whether a variable of the environment names an endpoint without TLS."""
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
