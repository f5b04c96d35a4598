"""Plans kept between runs, for jobs that convert every new iteration of the same training.

A file holds plain data and arrays under a key of everything that the plan was made from:

    magic | SHA-256 of what follows | length of the header | header: JSON, with a table of the arrays | the arrays

Nothing in it is executed, sizes and shapes are checked before use, and whatever is not as expected is as if it were not
there: a plan is then made as always.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import stat
import struct
import time
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from converters.names import printable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

__all__ = ["PlanCache", "code_digest"]

_MAGIC = b"distckpt plan 1\n"
_HEAD = struct.Struct("<32sQ")
_TYPES = {"|u1", "<u2", "<i4", "<i8"}
_ALIGN = 64
_MOST_FILES = 20
_MOST_BYTES = 1 << 30
_STALE_SECONDS = 3600.0  # what a killed process left behind

Stored = tuple[dict[str, Any], "dict[str, NDArray[Any]]"]


@dataclass
class PlanCache:
    """A folder with kept plans.

    Attributes:
        folder: The folder; it is made when something is kept.
        most_files: How many plans are kept; the least recently used go first.
        most_bytes: How many bytes they take together.
        said: What a person who wants to know everything may read: why a kept plan was used, or not.
        keeps: Whether plans that are made are kept, too.
    """

    folder: Path
    most_files: int = _MOST_FILES
    most_bytes: int = _MOST_BYTES
    said: list[str] = field(default_factory=list)
    keeps: bool = True

    @classmethod
    def default(cls, folder: str | Path | None = None, *, keeps: bool = True) -> PlanCache | None:
        """The cache in a folder, by default DISTCKPT_PLAN_CACHE or one of the user's own; None if it cannot be used."""
        if not folder:
            base = os.environ.get("XDG_CACHE_HOME", "")
            home = Path(base) if base.startswith("/") else Path("~/.cache")
            folder = os.environ.get("DISTCKPT_PLAN_CACHE") or home / "distckpt" / "plans"
        path = Path(folder)
        with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: nobody knows where home is
            path = path.expanduser()
            if keeps:
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not keeps or os.access(path, os.W_OK | os.X_OK):
                return cls(path, keeps=keeps)
        return None

    def load(self, key: Mapping[str, Any]) -> Stored | None:
        """What was stored under a key: facts and arrays."""
        path = self._path(key)
        try:
            found = _read(path, key)
            os.utime(path)
        except FileNotFoundError:
            self.said.append(f"no plan is kept for this kind of checkpoint{'; one will be' if self.keeps else ''}")
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            self.refuse(key, error)
        else:
            return found
        return None

    def taken(self, key: Mapping[str, Any]) -> None:
        """Says that what is stored under a key was used."""
        self.said.append(f"the plan of an earlier run serves this one, too: {printable(str(self._path(key)))}")

    def refuse(self, key: Mapping[str, Any], error: Exception) -> None:
        """Says that what is stored under a key is of no use."""
        text = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
        self.said.append(f"the kept plan {printable(str(self._path(key)))} is not used: {printable(text)}")

    def store(self, key: Mapping[str, Any], facts: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
        """Keeps something under a key; that it cannot be is no error."""
        if not self.keeps:
            return
        path = self._path(key)
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        try:
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with open(fd, "wb") as file:
                for part in _encoded(key, facts, arrays):
                    file.write(part)
                file.flush()
                os.fsync(fd)
            temporary.replace(path)
            self._prune()
        except OSError as error:
            self.said.append(f"the plan was not kept in {printable(str(self.folder))}: {error.strerror or error}")
            with contextlib.suppress(OSError):
                temporary.unlink()

    def _path(self, key: Mapping[str, Any]) -> Path:
        return self.folder / f"{hashlib.sha256(_json(key)).hexdigest()[:32]}.plan"

    def _prune(self) -> None:
        found = []
        with os.scandir(self.folder) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    if entry.name.endswith(".plan"):
                        found.append((status.st_mtime_ns, status.st_size, entry.path))
                    elif ".plan." in entry.name and time.time() - status.st_mtime > _STALE_SECONDS:
                        Path(entry.path).unlink()
        kept = 0
        for number, (_, size, name) in enumerate(sorted(found, reverse=True)):
            kept += size
            if number and (number >= self.most_files or kept > self.most_bytes):
                with contextlib.suppress(OSError):  # another process was faster
                    Path(name).unlink()


@cache
def code_digest() -> str:
    """Digest of this library: a plan is worth nothing to another version, released or not."""
    digest = hashlib.sha256()
    folder = Path(__file__).parents[1]
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder)}:".encode() + path.read_bytes())
    return digest.hexdigest()


def _json(document: Any) -> bytes:
    return json.dumps(document, sort_keys=True).encode()


def _encoded(key: Mapping[str, Any], facts: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> list[Any]:
    parts: list[Any] = []
    table, at = [], 0
    for name, array in arrays.items():
        table.append([name, array.dtype.str, array.shape, at])
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        parts += [data, bytes(-len(data) % _ALIGN)]
        at += len(data) + -len(data) % _ALIGN
    header = _json({"key": key, "facts": facts, "arrays": table})
    header += b" " * (-(len(_MAGIC) + _HEAD.size + len(header)) % _ALIGN)
    digest = hashlib.sha256(header)
    for part in parts:
        digest.update(part)
    return [_MAGIC, _HEAD.pack(digest.digest(), len(header)), header, *parts]


def _read(path: Path, key: Mapping[str, Any]) -> Stored:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise ValueError("it is not this user's")
        if status.st_size > _MOST_BYTES:
            raise ValueError(f"it has {status.st_size:,} bytes")
        raw = file.read()
    begin = len(_MAGIC) + _HEAD.size
    if len(raw) < begin or not raw.startswith(_MAGIC):
        raise ValueError("it is something else")
    digest, length = _HEAD.unpack_from(raw, len(_MAGIC))
    view = memoryview(raw)
    if length > len(raw) - begin or hashlib.sha256(view[begin:]).digest() != digest:
        raise ValueError("it is damaged")
    header = json.loads(raw[begin : begin + length])
    if _json(header["key"]) != _json(key):
        raise ValueError("it was made from something else")
    base = begin + length
    arrays = {name: _array(raw, kind, shape, base + at) for name, kind, shape, at in header["arrays"]}
    return header["facts"], arrays


def _array(raw: bytes, kind: str, shape: list[int], at: int) -> NDArray[Any]:
    if kind not in _TYPES or len(shape) > 2 or any(type(n) is not int or n < 0 for n in (*shape, at)):
        raise ValueError("it holds an array of another kind")
    count = shape[0] * shape[1] if len(shape) == 2 else shape[0]
    if at + count * np.dtype(kind).itemsize > len(raw):
        raise ValueError("an array lies outside of it")
    return np.frombuffer(raw, np.dtype(kind), count, at).reshape(shape)
