"""Progress on a terminal, and in a log.

Rich's own bar prints nothing where there is no terminal until it is finished, and a log is exactly where a person wants
to see whether a job is alive; so there are two renderers behind one listener.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from converters.events import FileDone, Moved, Note, Phase, PlanReady, Resumed
from converters.execute.ranks import Ranks
from converters.names import printable
from converters.words import format_size

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from converters.events import Event
    from distckpt_cli.console import Console

_WINDOW = 30.0  # seconds over which the rate is averaged
_REFRESH = 4  # times a second


def choose_mode(mode: str, *, quiet: bool = False) -> str:
    """The renderer for `--progress`: "bar", "log" or "off". Of several ranks only rank 0 shows anything."""
    if quiet or Ranks.from_environment().rank:
        return "off"
    if mode != "auto":
        return mode
    return "bar" if sys.stderr.isatty() and os.environ.get("TERM") != "dumb" else "log"


def format_time(seconds: float) -> str:
    """A duration: `51s`, `4m 05s`, `2h 10m`."""
    rounded = int(seconds + 0.5)
    if rounded < 60:
        return f"{rounded}s"
    if rounded < 3600:
        return f"{rounded // 60}m {rounded % 60:02d}s"
    return f"{rounded // 3600}h {rounded % 3600 // 60:02d}m"


@dataclass
class _State:
    """The sums of all events. Bytes of an earlier run count as done, but not into the rate."""

    command: str = ""
    phase: str = ""
    total: int = 0
    done: int = 0
    files_total: int = 0
    files_done: int = 0
    samples: deque[tuple[float, int]] = field(default_factory=deque)

    def sample(self, now: float) -> None:
        if not self.samples or now - self.samples[-1][0] >= 0.25:
            self.samples.append((now, self.done))
        while len(self.samples) > 2 and now - self.samples[0][0] > _WINDOW:
            self.samples.popleft()

    def rate(self, now: float) -> float:
        """Bytes per second over the last half minute; 0 while unknown."""
        if not self.samples:
            return 0.0
        then, done = self.samples[0]
        return (self.done - done) / (now - then) if now - then > 0.05 else 0.0

    @property
    def percent(self) -> int:
        return self.done * 100 // self.total if self.total else 0

    def line(self, now: float, *, short: bool = False) -> str:
        rate = self.rate(now)
        left = f"eta {format_time((self.total - self.done) / rate)}" if rate > 0 else "eta -"
        speed = f"{_brief(rate)}/s"
        files = f"{self.files_done}/{self.files_total} file{'s' if self.files_total != 1 else ''}"
        moved = f"{_brief(self.done)} of {_brief(self.total)}"
        percent = f"{self.percent:3d}%"
        counted = [files] if self.files_total else []
        return "  ".join([percent, speed, left] if short else [percent, moved, speed, left, *counted])


def _brief(nbytes: float) -> str:
    """One digit after the point is enough for what changes all the time."""
    number, unit = format_size(nbytes).split(" ")
    return f"{float(number):.1f} {unit}" if unit != "B" else f"{number} B"


class Progress:
    """A listener for the library's events, and a context manager around the operation.

    Args:
        console: Where notes go.
        mode: "bar", "log" or "off", from `choose_mode`.
        interval: Seconds between two lines of a log, and before the first: a short run needs none.
        clock: Monotonic seconds; replaced in tests.
        stamp: Time of day for a line of a log; replaced in tests.
    """

    def __init__(
        self,
        console: Console,
        mode: str,
        *,
        interval: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
        stamp: Callable[[], str] = lambda: time.strftime("%H:%M:%S"),
    ) -> None:
        self._console = console
        self._mode = mode
        self._interval = interval
        self._clock = clock
        self._stamp = stamp
        self._begun = clock()
        self._state = _State()
        self._lock = threading.Lock()
        self._finished = threading.Event()
        self._thread: threading.Thread | None = None
        self._live: Any = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._finished.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._live is not None:
            self._live.stop()
            self._live = None

    def __call__(self, event: Event) -> None:
        """Takes an event, from any thread."""
        with self._lock:
            state, now = self._state, self._clock()
            if isinstance(event, Moved):
                state.done += event.nbytes
                state.sample(now)
            elif isinstance(event, FileDone):
                state.files_done += 1
            elif isinstance(event, PlanReady):
                state.command, state.total, state.files_total = event.command, event.bytes_written, event.files
                state.phase, state.done, state.files_done = "", 0, 0
                state.samples.clear()
                state.sample(now)
                self._begin()
            elif isinstance(event, Resumed):
                state.done += event.bytes_done
                state.files_done += event.files_done
                state.samples.clear()
                state.sample(now)
                self._say("resuming", f"{event.files_done} of {state.files_total} files already done")
            elif isinstance(event, Note):
                self._say("note:", event.text)
            elif isinstance(event, Phase):
                state.phase = event.name
                if self._mode == "log" and now - self._begun >= self._interval:
                    self._err(f"{self._stamp()} {state.command or 'distckpt'}  {printable(event.name)}")

    @property
    def bytes_done(self) -> int:
        """Bytes of the target that are in place, earlier runs included."""
        with self._lock:
            return self._state.done

    def _begin(self) -> None:
        if self._thread is not None or self._live is not None:
            return
        if self._mode == "log":
            self._thread = threading.Thread(target=self._log_lines, name="progress", daemon=True)
            self._thread.start()
        elif self._mode == "bar":
            self._live = _bar(self._state, self._clock)
            self._live.start()

    def _log_lines(self) -> None:
        while not self._finished.wait(self._interval):
            with self._lock:
                self._log_line()

    def _log_line(self) -> None:
        self._err(f"{self._stamp()} {self._state.command}  {self._state.line(self._clock())}")

    def _say(self, word: str, text: str) -> None:
        if self._live is not None:
            from rich.text import Text

            self._live.console.print(Text(f"{word} {printable(text)}"))
        else:
            self._console.label(word, text)

    def _err(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


def _bar(state: _State, clock: Callable[[], float]) -> Any:
    """A Rich live display that draws the state; it vanishes when stopped."""
    from rich.console import Console as RichConsole
    from rich.live import Live
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    console = RichConsole(stderr=True, markup=False, highlight=False, emoji=False)

    class Bar:
        """Drawn anew at every refresh, from whatever the state is then."""

        def __rich__(self) -> Table:
            wide = console.width >= 100
            grid = Table.grid(padding=(0, 1), expand=True)
            grid.add_column(no_wrap=True)
            grid.add_column(ratio=1)
            grid.add_column(no_wrap=True)
            word = printable(state.phase or state.command)
            done = min(state.done, state.total)
            grid.add_row(
                Text(word),
                ProgressBar(total=max(state.total, 1), completed=done),
                Text(state.line(clock(), short=not wide)),
            )
            return grid

    return Live(Bar(), console=console, refresh_per_second=_REFRESH, transient=True, redirect_stdout=False)
