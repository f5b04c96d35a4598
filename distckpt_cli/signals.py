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

from converters.engine.ranks import Ranks
from converters.events import StopFlag

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

__all__ = ["Signalled", "raise_on_signals", "stop_on_signals"]

_SHOW_CURSOR = "\x1b[?25h"


class Signalled(BaseException):
    """SIGINT or SIGTERM came where nothing polls a flag."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


@contextmanager
def raise_on_signals() -> Iterator[None]:
    """Lets SIGINT and SIGTERM raise `Signalled` while the block runs, where they would end the process without a word."""
    usual: dict[signal.Signals, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    in_main = threading.current_thread() is threading.main_thread()
    taken = [number for number, handler in usual.items() if in_main and signal.getsignal(number) == handler]

    def on_signal(signum: int, frame: FrameType | None) -> None:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)  # the second one ends it at once
        raise Signalled(signum)

    for number in taken:
        signal.signal(number, on_signal)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, usual[number])


@contextmanager
def stop_on_signals() -> Iterator[StopFlag]:
    """A flag that SIGINT and SIGTERM set while the block runs; give it to the engine.

    Outside the main thread, where Python allows no handlers, the flag is simply never set.
    """
    flag = StopFlag()
    ranks = Ranks.from_environment()
    since = 0.0
    if threading.current_thread() is not threading.main_thread():
        yield flag
        return

    def on_signal(signum: int, frame: FrameType | None) -> None:
        nonlocal since
        # os.write, not print: the handler may interrupt a print that holds the stream's lock
        if flag.is_set():
            if ranks.world > 1 and time.monotonic() - since < 2.0:
                return
            if sys.stderr.isatty():
                os.write(2, _SHOW_CURSOR.encode())
            os._exit(128 + signum)
        flag.set(signum)
        since = time.monotonic()
        if ranks.rank:
            return
        again = "Ctrl-C again" if signum == signal.SIGINT else "once more"
        os.write(2, f"\nstopping after the current tiles ({again} to abort)\n".encode())

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield flag
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
