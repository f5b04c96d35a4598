"""The folders of a store, from its listings: requested once, and kept until a caller checks for changes.

A folder is listed when it is first read. When a fifth one of the folders in a folder is looked into, that one is
listed with all below it: there is a request for each thousand objects, never one for each file or folder.
"""

from __future__ import annotations

import functools
import itertools
import posixpath
import threading
from collections import Counter
from typing import TYPE_CHECKING

from converters.remote.store import store_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from converters.remote.address import Root
    from converters.remote.store import Properties, Store

    Folder = dict[str, "Properties | None"]

_LOOKED_INTO = 4  # folders beside each other, each with a request of its own
_MOST_OBJECTS = 200_000  # of a listing at any depth: a whole training run is not listed for a few of its iterations


@functools.cache
def tree_of(root: Root) -> Tree:
    """The tree of a bucket; one for the whole process."""
    return Tree(store_of(root))


class Tree:
    """Folders of a bucket, as far as they were listed; safe for several threads."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._folders: dict[str, Folder] = {}
        self._single: dict[str, Properties | None] = {}  # objects that were asked for by name; None: absent
        self._listed: dict[str, bool] = {}  # prefixes that were listed, and whether at any depth
        self._looked_into: Counter[str] = Counter()
        self._lock = threading.RLock()

    def find(self, key: str) -> Properties | None:
        """The properties of an object; None if there is a folder.

        Raises:
            FileNotFoundError: Neither.
            NotADirectoryError: What is above it is an object.
            OSError: The store cannot be asked.
        """
        with self._lock:
            folder = next((at for at in _upwards(key) if at in self._folders), None)
            if folder is None:
                return self._find_alone(key)
            return self._descend(folder, key)

    def entries(self, key: str) -> Folder:
        """The entries of a folder.

        Raises:
            FileNotFoundError: There is no such folder.
            NotADirectoryError: It is an object.
            OSError: The store cannot be asked.
        """
        with self._lock:
            if key not in self._folders and self.find(key) is not None:
                raise self._no_folder(key)
            if key not in self._folders:
                self._look_into(key)
            return self._folders[key]

    def refresh(self, key: str) -> None:
        """Lists anew what is remembered at and below a key, and the folder that it is in."""
        with self._lock:
            listed = {
                at: deep for at, deep in self._listed.items()
                if _is_below(at, key) or (deep and _is_below(key, at)) or at == key.rpartition("/")[0]
            }  # fmt: skip
            for at in [at for at in self._single if _is_below(at, key)]:
                del self._single[at]
            for at, deep in listed.items():
                for folder in [folder for folder in self._folders if folder == at or (deep and _is_below(folder, at))]:
                    del self._folders[folder]
                self._list(at, deep=deep)

    def _descend(self, folder: str, key: str) -> Properties | None:
        """Follows a key from a folder that was listed; folders on the way are listed, too."""
        while folder != key:
            part = key[len(folder) + 1 if folder else 0 :].partition("/")[0]
            if part not in self._folders[folder]:
                raise self._missing(key)
            entry = self._folders[folder][part]
            folder = posixpath.join(folder, part)
            if entry is not None and folder == key:
                return entry
            if entry is not None:
                raise self._no_folder(folder)
            if folder != key and folder not in self._folders:
                self._look_into(folder)
        return None

    def _find_alone(self, key: str) -> Properties | None:
        """Finds out what is at a key when nothing above it was listed."""
        if key not in self._single:
            self._ask(key)
        if key in self._folders:
            return None
        entry = self._single[key]
        if entry is not None:
            return entry
        above = key.rpartition("/")[0]
        if above and self.find(above) is not None:
            raise self._no_folder(above)
        raise self._missing(key)

    def _missing(self, key: str) -> FileNotFoundError:
        return FileNotFoundError(2, "no such object", f"{self.store.root}/{key}")

    def _no_folder(self, key: str) -> NotADirectoryError:
        return NotADirectoryError(20, "an object, not a folder", f"{self.store.root}/{key}")

    def _ask(self, key: str) -> None:
        """Finds out what is at a key whose folder was not listed: two requests at most."""
        self._list(key, deep=False)
        if self._folders[key] or not key:
            return
        del self._folders[key], self._listed[key]
        try:
            self._single[key] = self.store.retried(key, lambda: self.store.head(key))
        except FileNotFoundError:
            self._single[key] = None

    def _look_into(self, key: str) -> None:
        above = key.rpartition("/")[0]
        self._looked_into[above] += 1
        if self._looked_into[above] > _LOOKED_INTO and self._listed.get(above) is False:
            self._looked_into[above] = -1 << 60  # if it has too many objects, that is not found out again
            self._list(above, deep=True)
        if key not in self._folders:
            self._list(key, deep=False)

    def _list(self, key: str, *, deep: bool) -> None:
        limit = _MOST_OBJECTS + 1 if deep else None
        listed = self.store.retried(key, lambda: list(itertools.islice(self.store.list(key, deep=deep), limit)))
        if limit is not None and len(listed) == limit:
            return
        self._listed[key] = deep
        folder = self._folders[key] = {}
        self._add(key, folder, listed)

    def _add(self, key: str, folder: Folder, listed: Iterable[tuple[str, Properties | None]]) -> None:
        for path, properties in listed:
            inner, (*folders, name) = folder, path[len(key) :].lstrip("/").split("/")
            at = key
            for part in folders:
                inner[part] = None
                at = posixpath.join(at, part)
                inner = self._folders.setdefault(at, {})
            is_marker = properties is not None and name in inner and inner[name] is None  # an object named as a folder
            if name and not is_marker:
                inner[name] = properties


def _upwards(key: str) -> Iterator[str]:
    """A key and the folders that it is in, innermost first."""
    while key:
        yield key
        key = key.rpartition("/")[0]
    yield ""


def _is_below(key: str, folder: str) -> bool:
    return not folder or key == folder or key.startswith(f"{folder}/")
