"""Processes that tests start: none outlives its test, and none has to be quick.

What a test waits for comes in milliseconds on an idle machine. A limit is there only to end what hangs, so it is as long
as the runner lets a test be: whoever needs a shorter one waits for a condition instead.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
import warnings
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

__all__ = ["PATIENCE", "end_all", "finish", "forget_failure", "fork", "is_alive", "start", "wait_until"]

PATIENCE = 600.0  # seconds; pytest ends a test after 900
_started: list[subprocess.Popen[str]] = []


def start(command: Sequence[str | Path | int], **options: Any) -> subprocess.Popen[str]:
    """A process whose output goes to pipes, ended at the latest with the test that started it."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([*map(str, command)], **(pipes | options))
    _started.append(process)
    return process


def finish(processes: Iterable[subprocess.Popen[str]]) -> list[tuple[str, str]]:
    """Waits until processes end by themselves: what each wrote to stdout and stderr."""
    return [process.communicate(timeout=PATIENCE) for process in processes]


def end_all() -> None:
    """Kills what tests have started and not waited for, and closes its pipes."""
    for process in (*_started, *subprocess._active):  # type: ignore[attr-defined]  # whose objects are gone, not they
        process.kill()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
        process.wait()
    _started.clear()
    subprocess._active.clear()  # type: ignore[attr-defined]


def forget_failure(error: BaseException | None) -> None:
    """Lets go of what a failed test had open: else the warning that it was not closed would fail another test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        while error is not None:
            traceback.clear_frames(error.__traceback__)
            for frame, _ in traceback.walk_tb(error.__traceback__):
                frame.f_locals  # noqa: B018 - pytest has looked at them: what it saw is kept until somebody looks again
            error = error.__cause__ or error.__context__
        gc.collect()
        end_all()


def wait_until(condition: Callable[[], Any], *watched: subprocess.Popen[str]) -> Any:
    """What a condition gives once that is true; fails if a process that is watched has ended without it."""
    deadline = time.monotonic() + PATIENCE
    while not (answer := condition()):
        assert time.monotonic() < deadline, "it did not happen"
        for process in watched:
            if process.poll() is not None and not (answer := condition()):
                raise AssertionError(f"exit code {process.returncode}", *process.communicate())
        if answer:
            break
        time.sleep(0.01)
    return answer


def is_alive(pid: int) -> bool:
    """Whether a process has not ended; one that nobody has waited for has."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return False


class Forked(subprocess.Popen):  # type: ignore[type-arg]
    """A process that runs a script as `python SCRIPT ARGS` would, but has imported already what this one has.

    A fork of this process: for what a start costs, not for what it imports.
    """

    def _execute_child(self, *arguments: Any) -> None:
        given = inspect.signature(subprocess.Popen._execute_child).bind(self, *arguments).arguments
        ends = given["p2cread"], given["c2pwrite"], given["errwrite"]
        self.pid = os.fork()
        if not self.pid:
            _become(given["args"], given["env"], ends)
        self._child_created = True
        for end in {*ends} - {-1}:
            os.close(end)


def fork(script: Path, *arguments: str | Path | int, env: dict[str, str]) -> subprocess.Popen[str]:
    """`start([python, script, *arguments])`, at once."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = Forked([str(script), *map(str, arguments)], env=env, **pipes)
    _started.append(process)
    return process


def _become(argv: list[str], env: dict[str, str], ends: tuple[int, int, int]) -> NoReturn:
    code = 1
    try:
        gc.freeze()  # what is garbage of the other process may hold numbers of files that are ours now
        for number, end in enumerate(ends):
            os.dup2(end, number)
        os.closerange(3, 1 << 16)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        sys.stdin, sys.stdout, sys.stderr = map(os.fdopen, (0, 1, 2), "rww")
        os.environ.clear()
        os.environ.update(env)
        sys.argv = argv
        runpy.run_path(argv[0], run_name="__main__")
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
