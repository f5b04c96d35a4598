"""`distckpt --workers N ...`: the same command as N processes on this machine, which share the work as ranks do.

torchrun would do, but it ends all processes when the first one fails, before they have agreed on the reason, and turns
every failure into exit code 1. Here they end by themselves, and the code is the one that a single process would return.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import signal
import subprocess
import sys
import time
import uuid
from typing import TYPE_CHECKING

from converters.errors import Interrupted
from converters.execute.error_json import AGAIN
from converters.execute.ranks import listed
from distckpt_cli.console import Console
from distckpt_cli.exits import ExitCode
from distckpt_cli.signals import STOPS, handle_signals

if TYPE_CHECKING:
    from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1
_GRACE = 10.0  # seconds that ranks get to learn from each other that one has failed
_PATIENCE = 5.0  # seconds that they get to end when told to; one that is suspended does not hear it


def launch(workers: int, args: Sequence[str]) -> int:
    """Runs a command line as several ranks on this machine.

    Args:
        workers: How many.
        args: What follows the program's name, without `--workers`.

    Returns:
        That of the first rank that failed and could say why; if none could, that a signal ended it.
    """
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        with handle_signals(STOPS, lambda signum, _: _pass_on(ranks, signum)):
            _start(workers, args, ranks)
            return _exit_code(_wait_for_all(ranks))
    finally:
        for process in ranks:
            process.kill()  # nothing to one that has ended
        _wait_a_while(ranks)


def _start(workers: int, args: Sequence[str], ranks: list[subprocess.Popen[bytes]]) -> None:
    run = uuid.uuid4().hex
    command = [sys.executable, "-m", "distckpt_cli", *args]
    libc = ctypes.CDLL(None)  # loaded here: the new process may only call, not load

    def follow_the_parent() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)  # if this launcher is killed, its ranks stop where they can go on

    signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)  # in the ranks, too, until they can end with a word
    try:
        for rank in range(workers):
            rank_variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "TORCHELASTIC_RUN_ID": run}
            world_variables = {"WORLD_SIZE": str(workers), "LOCAL_WORLD_SIZE": str(workers)}
            env = {**os.environ, **rank_variables, **world_variables}
            ranks.append(subprocess.Popen(command, env=env, preexec_fn=follow_the_parent))  # noqa: PLW1509
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)


def _wait_for_all(ranks: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    """Waits for all. Where some fail and the others do not hear of it, these are stopped.

    Ranks that have met tell each other. One that is killed before, while it plans, is known only here.

    Returns:
        How those ended that failed by themselves, in the order in which they did.
    """
    failed: dict[int, int] = {}
    deadline = math.inf
    while None in (codes := [process.poll() for process in ranks]) and time.monotonic() < deadline:
        failed |= {rank: code for rank, code in enumerate(codes) if code}
        if failed:
            deadline = min(deadline, time.monotonic() + _GRACE)
        time.sleep(0.02)
    failed |= {rank: code for rank, code in enumerate(codes) if code}
    if living := [rank for rank, code in enumerate(codes) if code is None]:
        cause = f"{listed(failed)} ended with {', '.join(map(_describe_ending, failed.values()))}"
        message = f"{cause}; ending {listed(living)}, where it was not noticed"
        Console().error(Interrupted(signal.SIGTERM, message, hint=AGAIN), word="stopped")
        for rank in living:
            ranks[rank].terminate()
        _wait_a_while(ranks)
    return list(failed.values())


def _wait_a_while(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """Waits for those that have been told to end, but not for ever: some may be suspended, or hang in the kernel."""
    deadline = time.monotonic() + _PATIENCE
    for process in ranks:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))


def _describe_ending(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _exit_code(failed: Sequence[int]) -> int:
    """The first word of a rank counts; where all were killed, it is what a rank says of another one that was."""
    if not failed:
        return ExitCode.OK
    signum = -failed[0] if -failed[0] in (signal.SIGHUP, *STOPS) else signal.SIGTERM
    return next((code for code in failed if code > 0), 128 + signum)


def _pass_on(ranks: Sequence[subprocess.Popen[bytes]], signum: int) -> None:
    """Passes SIGINT and SIGTERM on; a terminal's Ctrl-C has reached the ranks already, and they take both for one."""
    for process in ranks:
        process.send_signal(signum)
