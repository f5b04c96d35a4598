"""Addresses of files that are not on a disk: `s3://bucket/run/iter_0001000`, as paths."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path, PosixPath
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote

from converters.errors import AddressError
from converters.names import printable

if TYPE_CHECKING:
    from collections.abc import Generator

    from converters.remote.store import Properties
    from converters.remote.tree import Tree

_URL = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*)://([^/]*)(.*)", re.DOTALL)
_ROOT_PARTS = {"s3:": 2, "gs:": 2, "az:": 2, "http:": 2, "https:": 2, "hf:": 3}
_SCHEMES = "s3://, gs://, az://, https://, http://, hf:// and file://"
_OTHER_NAMES = {"s3a": "s3", "gcs": "gs", "azure": "az", "abfs": "az", "abfss": "az"}


NO_LISTING = (
    "a web server does not list folders: name one file, such as a tar file, a .safetensors file or the "
    "model.safetensors.index.json"
)


class Root(NamedTuple):
    """A bucket, container, host or repository.

    Attributes:
        scheme: `s3`, `gs`, `az`, `http`, `https`, `hf`.
        name: The bucket, the container, the host, or the repository with its revision.
    """

    scheme: str
    name: str

    def __str__(self) -> str:
        return f"{self.scheme}://{self.name}"


class RemotePath(PosixPath):
    """The address of an object or of a prefix, which is a folder here: a path whose questions go to the store.

    Everything that only rearranges names (`/`, `parent`, `relative_to`) is inherited and keeps the type.
    """

    def __str__(self) -> str:
        scheme, *path = self.parts or ("",)
        return f"{scheme}//{'/'.join(path)}" if scheme in _ROOT_PARTS else super().__str__()

    @property
    def root_and_key(self) -> tuple[Root, str]:
        """Its root and its key in there; the key of the root itself is empty.

        Raises:
            FileNotFoundError: The path does not even name a bucket.
        """
        parts = self.parts
        count = _ROOT_PARTS.get(parts[0], 0) if parts else 0
        if not count or len(parts) < count:
            raise FileNotFoundError(2, "no such bucket", str(self))
        return Root(parts[0][:-1], "/".join(parts[1:count])), "/".join(parts[count:])

    def properties(self) -> Properties | None:
        """The store's properties of the object; None for a folder.

        Raises:
            FileNotFoundError: There is neither.
            NotADirectoryError: The path leads into an object.
            OSError: The store cannot be asked.
        """
        tree, key = self._tree_and_key()
        return tree.find(key)

    def entries(self) -> dict[str, Properties | None]:
        """Names in a folder, with what the store says of objects; None for folders.

        Raises:
            FileNotFoundError: There is no such folder.
            NotADirectoryError: It is an object.
            OSError: The store cannot be asked.
        """
        tree, key = self._tree_and_key()
        return tree.entries(key)

    def refresh(self) -> None:
        """Lists anew what is remembered at and below it.

        Raises:
            OSError: The store cannot be asked.
        """
        tree, key = self._tree_and_key()
        tree.refresh(key)

    def _tree_and_key(self) -> tuple[Tree, str]:
        from converters.remote.tree import tree_of

        root, key = self.root_and_key
        return tree_of(root), key

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """As of a file; see `Properties.mtime_ns` for the time."""
        object_ = self.properties()
        mode, size, time = (stat.S_IFDIR, 0, 0) if object_ is None else (stat.S_IFREG, object_.size, object_.mtime_ns)
        seconds = time // 10**9
        return os.stat_result((mode | 0o444, 0, 0, 1, 0, 0, size, seconds, seconds, seconds), {"st_mtime_ns": time})

    def lstat(self) -> os.stat_result:
        """As `stat`: there are no links."""
        return self.stat()

    def exists(self, *, follow_symlinks: bool = True) -> bool:
        """Whether there is an object or a folder."""
        try:
            self.properties()
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        """Whether there is a folder."""
        return self.exists() and self.properties() is None

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        """Whether there is an object."""
        return self.exists() and self.properties() is not None

    def is_symlink(self) -> bool:
        """Never."""
        return False

    def is_mount(self) -> bool:
        """Never."""
        return False

    def iterdir(self) -> Generator[RemotePath, None, None]:
        """The paths in a folder."""
        return (self / name for name in self.entries())

    def resolve(self, strict: bool = False) -> RemotePath:
        """The address itself: there are no links."""
        return self

    def absolute(self) -> RemotePath:
        """The address itself."""
        return self


def repository_of(path: Path) -> str:
    """The repository of an address of the hub, `org/name`, without its revision; empty of any other path."""
    return "/".join(path.parts[1:3]).partition("@")[0] if path.parts[:1] == ("hf:",) else ""


def is_bucket(path: Path) -> bool:
    """Whether a path is all of a bucket, or of what is like one: nothing is beside it."""
    return isinstance(path, RemotePath) and len(path.parts) <= _ROOT_PARTS.get(path.parts[0], 0)


def named_path(name: str | Path) -> Path:
    """The path that a person means by a path or a URL.

    Raises:
        AddressError: A URL of another kind, one without a bucket, or one with credentials in it.
    """
    if isinstance(name, RemotePath):
        return name
    match = _URL.fullmatch(str(name)) if isinstance(name, str) else None
    if match is None:
        return Path(os.path.expanduser(name))  # noqa: PTH111 - pathlib's fails for a user that is not there
    scheme, authority, path = match[1].lower(), match[2], match[3]
    if scheme == "file":
        if authority not in ("", "localhost") or not path:
            raise AddressError("a file:// URL has three slashes: file:///folder/checkpoint")
        return Path(unquote(path))
    _refuse_secrets(scheme, authority, path)
    if f"{scheme}:" not in _ROOT_PARTS:
        instead = f"write {_OTHER_NAMES[scheme]}://" if scheme in _OTHER_NAMES else f"known: {_SCHEMES}"
        raise AddressError(f"{printable(scheme)}:// is not an address that distckpt supports", hint=instead)
    path = unquote(path) if scheme in ("http", "https") else path
    parts = [part for part in path.split("/") if part]
    if not authority or len(parts) + 2 < _ROOT_PARTS[f"{scheme}:"]:
        example = "hf://org/name" if scheme == "hf" else f"{scheme}://{'host' if 'http' in scheme else 'bucket'}/path"
        raise AddressError(f"{printable(str(name))} names no bucket or path", hint=f"it looks like {example}")
    if {".", ".."}.intersection(parts):
        raise AddressError(f"{printable(str(name))} has '.' or '..' in it", hint="name it without them")
    return RemotePath(f"{scheme}:", authority, *parts)


def _refuse_secrets(scheme: str, authority: str, path: str) -> None:
    """Whoever sees the command line, a journal or a report would see them, too."""
    if "@" in authority or "?" in path or "?" in authority:
        plain = f"{scheme}://{authority.rpartition('@')[2].partition('?')[0]}{path.partition('?')[0]}"
        raise AddressError(
            f"a URL with credentials or a query in it is not taken: {printable(plain)}",
            hint="credentials come from the environment or the cloud's configuration files: AWS_ACCESS_KEY_ID, "
            "AWS_PROFILE, GOOGLE_APPLICATION_CREDENTIALS, AZURE_STORAGE_ACCOUNT_KEY, HF_TOKEN",
        )
