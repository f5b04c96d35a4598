"""The record of a watch beside its results: its run and command, and the results for which --exec is still to run."""

from __future__ import annotations

import json
import os
import shlex
from typing import TYPE_CHECKING, Any

from converters.errors import DestinationError
from converters.formats.folder import exists, listing, read_small, refresh
from converters.names import printable
from converters.remote.address import RemotePath

if TYPE_CHECKING:
    from pathlib import Path

RECORD = ".distckpt-watch"
_NEW_RECORD = f"{RECORD}.new"
_VERSION = 1
_LIMIT = 64 << 20
_FREE = {"-q", "--quiet", "--silent", "-v", "-vv", "--verbose", "--json"}  # options that change nothing in a result
_FREE_VALUES = {"--threads", "--max-memory", "--progress", "--scratch", "--device", "--retry-for", "--rank-timeout"}


class WatchRecord:
    """The record of one folder of results.

    Args:
        results: The folder.
        run: The training run that is watched.
        command: The command with its options.

    Attributes:
        states: By iteration: "started": its command may have written it; "written": the command of --exec has not
            succeeded yet; "done".

    Raises:
        DestinationError: The folder holds results of another run or command, or iterations that no watch has written.
    """

    def __init__(self, results: Path, run: Path, command: list[str]) -> None:
        self._path = results / RECORD
        self._head = {"version": _VERSION, "run": str(run.resolve()), "command": _significant(command)}
        self.states: dict[str, str] = {}
        refresh(results)
        earlier = _read(self._path)
        folder = printable(str(results))
        inside = listing(results) if exists(results) else []
        if set(inside) <= {RECORD, _NEW_RECORD}:  # nothing came of the watch before: a mistyped command, say
            earlier = None
        if earlier is not None:
            self.states = dict(earlier.get("iterations") or {})
            if {name: earlier.get(name) for name in self._head} != self._head:
                before = f"distckpt {shlex.join(map(str, earlier.get('command') or ()))} of {earlier.get('run')}"
                raise DestinationError(
                    f"{folder} holds the results of another watch",
                    details=[printable(before)],
                    hint="name another folder for OUT",
                )
        present = [name for name in inside if name.startswith("iter_") and name not in self.states]
        strange = [name for name in present if listing(results / name)]
        if strange:
            raise DestinationError(
                f"{folder} holds {printable(strange[0])}, which this watch has not written",
                hint="name another folder for OUT",
            )

    def note(self, name: str, state: str) -> None:
        """Records the state of an iteration; when this returns, it is on the disk.

        Raises:
            DestinationError: It cannot be written.
        """
        self.states[name] = state
        data = json.dumps({**self._head, "iterations": self.states}, indent=1).encode() + b"\n"
        try:
            if isinstance(self._path, RemotePath):
                from converters.remote.writing import StoreWriter

                StoreWriter(self._path).put_bytes(data, self._path)
                return
            self._path.parent.mkdir(parents=True, exist_ok=True)
            new = self._path.with_name(_NEW_RECORD)
            with new.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            new.replace(self._path)
        except OSError as error:
            raise DestinationError(f"writing {printable(str(self._path))} failed: {error.strerror or error}") from error


def _significant(command: list[str]) -> list[str]:
    """A command without the options that change nothing in what it writes."""
    out: list[str] = []
    words = iter(command)
    for word in words:
        if word in _FREE_VALUES:
            next(words, None)
        elif word not in _FREE and word.partition("=")[0] not in _FREE_VALUES:
            out.append(word)
    return out


def _read(path: Path) -> dict[str, Any] | None:
    if not exists(path):
        return None
    try:
        document = json.loads(read_small(path, _LIMIT))
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise DestinationError(
            f"{printable(str(path))} is not what distckpt watch writes", hint="name another folder for OUT"
        )
    return document
