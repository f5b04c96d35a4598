"""`distckpt --workers N ...`: the same command as N processes on this machine, which share the work as ranks do.

torchrun would do, but it ends all processes when the first one fails, before they have agreed on the reason, and turns
every failure into exit code 1. Here they end by themselves, and the code is the one that a single process would return.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
import uuid
from typing import TYPE_CHECKING

from converters.engine.ranks import listed
from converters.errors import Interrupted
from distckpt_cli.console import Console
from distckpt_cli.exits import ExitCode

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import FrameType

__all__ = ["launch"]

_PR_SET_PDEATHSIG = 1
_GRACE = 10.0  # seconds that ranks get to learn from each other that one has failed


def launch(workers: int, args: Sequence[str]) -> int:
    """Runs a command line as several ranks on this machine.

    Args:
        workers: How many.
        args: What follows the program's name, without `--workers`.

    Returns:
        The exit code on which the ranks agreed; that of a rank that died, if the others could not say more.
    """
    run = uuid.uuid4().hex
    command = [sys.executable, "-m", "distckpt_cli", *args]
    libc = ctypes.CDLL(None)  # loaded here: the new process may only call, not load

    def follow_the_parent() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)  # if this launcher is killed, its ranks stop where they can go on

    ranks: list[subprocess.Popen[bytes]] = []
    try:
        with _forwarded(ranks):
            for rank in range(workers):
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "TORCHELASTIC_RUN_ID": run}
                world = {"WORLD_SIZE": str(workers), "LOCAL_WORLD_SIZE": str(workers)}
                ranks.append(
                    subprocess.Popen(command, env={**os.environ, **own, **world}, preexec_fn=follow_the_parent)  # noqa: PLW1509
                )
            failed = _watch(ranks)
    finally:
        for process in ranks:
            with contextlib.suppress(ProcessLookupError):
                if process.poll() is None:
                    process.kill()
    return _verdict([process.returncode for process in ([ranks[rank] for rank in failed] or ranks)])


def _watch(ranks: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    """Waits for all. Where some fail and the others do not hear of it, these are stopped; returns who failed then.

    Ranks that have met tell each other. One that is killed before, while it plans, is known only here.
    """
    deadline = None
    while None in (codes := [process.poll() for process in ranks]):
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed and deadline is None:
            deadline = time.monotonic() + _GRACE
        if deadline is not None and time.monotonic() > deadline:
            what = f"{listed(failed)} ended with {', '.join(_ending(ranks[rank].returncode) for rank in failed)}"
            message = f"{what}, and the others had not met {'it' if len(failed) == 1 else 'them'}"
            Console().error(Interrupted(signal.SIGTERM, message), word="stopped")
            for process in ranks:
                if process.poll() is None:
                    process.terminate()
            for process in ranks:
                process.wait()
            return failed
        time.sleep(0.02)
    return []


def _ending(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _verdict(codes: Sequence[int]) -> int:
    """Rank 0 speaks for all, unless it was killed; then those that noticed do."""
    said = [code for code in codes if code > 0]
    if codes[0] >= 0:
        return codes[0] or (said[0] if said else ExitCode.OK if not any(codes) else 128 - min(codes))
    return said[0] if said else 128 - codes[0]


@contextlib.contextmanager
def _forwarded(ranks: Sequence[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Passes SIGINT and SIGTERM on; a terminal's Ctrl-C has reached the ranks already, and they take both for one."""

    def pass_on(signum: int, frame: FrameType | None) -> None:
        for process in ranks:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signum)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
