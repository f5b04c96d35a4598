"""Progress of a running operation, as its listener receives it, and the flag that stops it.

The library never prints. It calls a listener with one of the events below, from any thread; the shell draws a bar or
writes a log line, a notebook may do something else.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PlanReady:
    """A part of the operation whose bytes are counted begins: a check of the source, or the writing itself.

    Attributes:
        command: The verb, as progress shows it: `export`.
        files: Number of files to be written.
        bytes_read: Bytes to be read from the source.
        bytes_written: Bytes to be written; the total that progress is measured against.
        peak_memory: Bytes of buffers at the most.
    """

    command: str
    files: int
    bytes_read: int
    bytes_written: int
    peak_memory: int


@dataclass(frozen=True, slots=True)
class Moved:
    """More of the target is in place.

    Attributes:
        nbytes: Bytes of the target written since the previous event of this kind.
    """

    nbytes: int


@dataclass(frozen=True, slots=True)
class FileDone:
    """A file of the target is complete and on disk.

    Attributes:
        name: Its path within the target.
        nbytes: Its size. Its bytes were reported by `Moved` already.
    """

    name: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Resumed:
    """An earlier, interrupted run did part of the work.

    Attributes:
        bytes_done: Bytes of the target that are kept.
        files_done: Complete files among them.
    """

    bytes_done: int
    files_done: int


@dataclass(frozen=True, slots=True)
class Note:
    """Something a person should know, in one sentence; not an error.

    Attributes:
        text: The sentence. It may contain names from the checkpoint, which the printer must escape.
    """

    text: str


@dataclass(frozen=True, slots=True)
class Phase:
    """A step without a byte count begins.

    Attributes:
        name: What happens now: `planning`, `syncing`, `publishing`.
    """

    name: str


Event = PlanReady | Moved | FileDone | Resumed | Note | Phase
Listener = Callable[[Event], None]


def ignore(event: object) -> None:
    """The listener of those who have none."""


class StopFlag:
    """Set once, by a signal handler; polled by the engine between tiles.

    Attributes:
        signum: Number of the signal that set it, None before.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self._event = threading.Event()

    def set(self, signum: int) -> None:
        """Asks the running operation to stop at the next safe point."""
        self.signum = signum
        self._event.set()

    def is_set(self) -> bool:
        """Whether it was asked to stop."""
        return self._event.is_set()

    def wait(self, timeout: float) -> bool:
        """Sleeps up to `timeout` seconds; True as soon as the flag is set."""
        return self._event.wait(timeout)
