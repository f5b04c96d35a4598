"""Plans kept between runs, for jobs that convert every new iteration of the same training.

A file holds plain data and arrays under a key of everything that the plan was made from:

    magic | SHA-256 of what follows | an .npz: the facts as JSON under "header", and the arrays

Nothing in it is executed, and whatever is not as expected is as if it were not there: a plan is then made as always.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import secrets
import stat
import time
import zipfile
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

_MAGIC = b"distckpt plan 2\n"
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
        except (OSError, EOFError, ValueError, TypeError, KeyError, RecursionError, zipfile.BadZipFile) as error:
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
                file.write(_encoded(key, facts, arrays))
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


def _encoded(key: Mapping[str, Any], facts: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> bytes:
    named: dict[str, Any] = {f"array.{name}": array for name, array in arrays.items()}
    body = io.BytesIO()
    np.savez(body, header=np.frombuffer(_json({"key": key, "facts": facts}), np.uint8), **named)
    return _MAGIC + hashlib.sha256(body.getbuffer()).digest() + body.getbuffer()


def _read(path: Path, key: Mapping[str, Any]) -> Stored:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise ValueError("it is not this user's")
        if status.st_size > _MOST_BYTES:
            raise ValueError(f"it has {status.st_size:,} bytes")
        raw = memoryview(file.read())
    begin = len(_MAGIC) + 32
    if raw[: len(_MAGIC)] != _MAGIC:
        raise ValueError("it is something else")
    if hashlib.sha256(raw[begin:]).digest() != raw[len(_MAGIC) : begin]:
        raise ValueError("it is damaged")
    with np.load(io.BytesIO(raw[begin:]), allow_pickle=False) as stored:
        header = json.loads(stored["header"].tobytes())
        if _json(header["key"]) != _json(key):
            raise ValueError("it was made from something else")
        arrays = {name.removeprefix("array."): stored[name] for name in stored.files if name != "header"}
    return header["facts"], arrays
