"""Ctrl-C and SIGTERM: the first one asks the operation to stop where it can be resumed, the second one ends it at once.

A launcher passes on what its processes have got already, and a job manager sends it to both: among several ranks, what
comes within two seconds of the first signal is the same request.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from converters.events import StopFlag
from converters.ranks import Ranks

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

__all__ = ["stop_on_signals"]

_SHOW_CURSOR = "\x1b[?25h"


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
