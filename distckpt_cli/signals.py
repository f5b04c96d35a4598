"""Ctrl-C and SIGTERM: the first one asks the operation to stop where it can be resumed, the second one ends it at once.

A launcher passes on what its processes have got already, and a job manager sends it to both: among several ranks, what
comes within two seconds of the first signal is the same request. Where nothing is polled, while a command looks and
plans, both end it with an exception.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from converters.events import StopFlag
from converters.execute.ranks import Ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import FrameType

STOPS = (signal.SIGINT, signal.SIGTERM)
_SHOW_CURSOR = "\x1b[?25h"
_ECHO = 2.0


def _echoes(since: float) -> bool:
    return Ranks.from_environment().world > 1 and time.monotonic() - since < _ECHO


class Signalled(BaseException):
    """SIGINT or SIGTERM came where nothing polls a flag."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


@contextmanager
def handle_signals(
    numbers: Iterable[signal.Signals], handler: Callable[[int, FrameType | None], None]
) -> Iterator[None]:
    """Has a function handle signals while the block runs."""
    earlier = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, before in earlier.items():
            signal.signal(number, before)


@contextmanager
def raise_on_signals() -> Iterator[None]:
    """Lets SIGINT and SIGTERM raise `Signalled` while the block runs, where they would end the process without a word."""
    since: float | None = None
    usual: dict[signal.Signals, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    in_main = threading.current_thread() is threading.main_thread()
    replaced = [number for number, handler in usual.items() if in_main and signal.getsignal(number) == handler]

    def on_signal(signum: int, frame: FrameType | None) -> None:
        nonlocal since
        if since is None:
            since = time.monotonic()
            raise Signalled(signum)
        if not _echoes(since):
            signal.signal(signum, signal.SIG_DFL)
            signal.raise_signal(signum)  # the second one ends it at once

    with handle_signals(replaced, on_signal):
        yield


@contextmanager
def stop_on_signals() -> Iterator[StopFlag]:
    """A flag that SIGINT and SIGTERM set while the block runs; give it to the engine.

    Outside the main thread, where Python allows no handlers, the flag is simply never set.
    """
    flag = StopFlag()
    since = 0.0
    if threading.current_thread() is not threading.main_thread():
        yield flag
        return

    def on_signal(signum: int, frame: FrameType | None) -> None:
        nonlocal since
        # os.write, not print: the handler may interrupt a print that holds the stream's lock
        if flag.is_set():
            if _echoes(since):
                return
            if sys.stderr.isatty():
                os.write(2, _SHOW_CURSOR.encode())
            os._exit(128 + signum)
        flag.set(signum)
        since = time.monotonic()
        ranks = Ranks.from_environment()
        if ranks.rank:
            return
        how = "" if ranks.world > 1 else " (once more to abort)"  # a launcher stops ranks; no key was typed
        how = " (Ctrl-C again to abort)" if signum == signal.SIGINT else how
        os.write(2, f"\nstopping after the current tiles{how}\n".encode())

    with handle_signals(STOPS, on_signal):
        yield flag
