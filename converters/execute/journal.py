"""The journal of a run: which tasks are on disk, or which files in a store. One file for each rank, of JSON lines.

A line enters a journal only after the data it speaks of was synced, so it can be trusted after a power cut as after a kill.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from typing import TYPE_CHECKING, Any

from converters.errors import DestinationError
from converters.execute.disk import trouble_with, write_all

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

JOURNAL = ".journal"
_VERSION = 2
_LONGEST = 1 << 20


def header(fingerprint: str, about: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The first line of the journal of a job.

    Args:
        about: What a person wants to know who comes across it; plain data.
    """
    return {"version": _VERSION, "fingerprint": fingerprint, **({"about": dict(about)} if about else {})}


def first_line(path: Path) -> dict[str, Any] | None:
    """The first line of a file if that is a journal's; None if it is not, or cannot be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(fd, "rb") as file:
            document = json.loads(file.readline(_LONGEST))
    except (OSError, ValueError, RecursionError):
        return None
    ours = isinstance(document, dict) and document.get("version") == _VERSION
    return document if ours and isinstance(document.get("fingerprint"), str) else None


def read(path: Path, fingerprint: str) -> tuple[list[dict[str, Any]], int]:
    """The trustworthy lines of a job's journal behind the first one, and how many bytes of the file are good.

    Nothing, and 0 bytes, if there is no journal or it is another job's.
    """
    lines: list[dict[str, Any]] = []
    good = 0
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return [], 0
    for text in raw.splitlines(keepends=True):
        try:
            document = json.loads(text) if text.endswith(b"\n") else None
        except ValueError:
            document = None
        if not isinstance(document, dict):
            break  # cut short by a crash; what it spoke of is done again
        lines.append(document)
        good += len(text)
    same = lines and all(lines[0].get(name) == value for name, value in header(fingerprint).items())
    return (lines[1:], good) if same else ([], 0)


def merged(folder: Path, fingerprint: str, own_lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines that other ranks left in `.journal-*` and that say something new.

    Args:
        folder: The staging folder.
        fingerprint: Of the job.
        own_lines: Lines of rank 0's journal; a crash may have come between taking others over and removing their files.
    """
    done = {number for line in own_lines for number in line["tasks"]}
    out = []
    for path in sorted(path for path in folder.iterdir() if path.name.startswith(f"{JOURNAL}-")):
        for line in read(path, fingerprint)[0]:
            # all or nothing: the checksums of a line cannot be told apart by task
            if done.isdisjoint(line["tasks"]):
                done.update(line["tasks"])
                out.append(line)
    return out


class Journal:
    """The journal of one rank, open for more lines; the job's, to be continued, or begun anew.

    Args:
        path: The file.
        fingerprint: Of the job.
        about: See `header`.

    Attributes:
        lines: What earlier runs have done.

    Raises:
        DestinationError: It cannot be read or written.
    """

    def __init__(self, path: Path, fingerprint: str, about: Mapping[str, Any] | None = None) -> None:
        self._path, self._lock = path, threading.Lock()
        with trouble_with(path, "opening"):
            self.lines, good = read(path, fingerprint)
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            with trouble_with(path, "opening"):
                os.ftruncate(self._fd, good)  # a kill may have cut the last line
            if not good:
                self.append(header(fingerprint, about))
        except DestinationError:
            self.close()
            raise

    def append(self, *lines: Mapping[str, Any]) -> None:
        """Appends lines and syncs them. The data they speak of must have been synced before."""
        data = b"".join(json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in lines)
        with self._lock, trouble_with(self._path, "writing"):
            write_all(self._fd, data)
            os.fsync(self._fd)

    def close(self) -> None:
        """Closes the file; every line of it was synced."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self._fd)
            self._fd = -1
