"""How the tests of the command line run it: in this process, in a child, or on a terminal of a given width."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pty
import struct
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from distckpt_cli.app import main

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent


class Ran(NamedTuple):
    code: int
    out: str
    err: str


def environment(**more: str) -> dict[str, str]:
    """The environment without what would change the output."""
    hidden = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "RANK", "PYTHONPATH")
    kept = {k: v for k, v in os.environ.items() if k not in hidden and not k.startswith("DISTCKPT_")}
    return kept | {"PYTHONPATH": str(ROOT)} | more


def here(*args: str | Path) -> Ran:
    """Runs `distckpt ARGS` in this process, which has imported everything already."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(word) for word in args])
    return Ran(code, out.getvalue(), err.getvalue())


def child(*args: str, cwd: Path = TESTS / "golden", **env: str) -> Ran:
    """Runs `distckpt ARGS` as a process whose output is a pipe."""
    done = subprocess.run(
        [sys.executable, "-m", "distckpt_cli", *args], cwd=cwd, env=environment(**env), capture_output=True, text=True
    )
    return Ran(done.returncode, done.stdout, done.stderr)


def terminal(command: list[str], columns: int, cwd: Path = TESTS / "golden", **env: str) -> tuple[int, str]:
    """Runs a command on a pseudo terminal; exit code and everything it wrote, `\\r\\n` as `\\n`."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    process = subprocess.Popen(
        command, cwd=cwd, env=environment(**{"TERM": "xterm", **env}), stdin=slave, stdout=slave, stderr=slave
    )
    os.close(slave)
    data = b""
    try:
        while piece := os.read(master, 65536):
            data += piece
    except OSError:  # Linux says EIO when the other side is closed
        pass
    finally:
        os.close(master)
    return process.wait(), data.decode("utf-8").replace("\r\n", "\n")


def wall_seconds(*args: str, cwd: Path = TESTS / "golden", runs: int = 7) -> float:
    """Wall time of `distckpt ARGS` on a quiet machine of the kind that the limits were set for.

    The fastest of several runs, scaled by how long importing numpy takes here and now: 0.08 s there. The two are run in
    turns, so that a neighbour's load slows both. Bytecode is kept, as it is of what is installed.
    """

    def run(*command: str) -> float:
        begin = time.perf_counter()
        subprocess.run([sys.executable, *command], check=True, capture_output=True, env=kept, cwd=cwd)
        return time.perf_counter() - begin

    with tempfile.TemporaryDirectory() as folder:
        kept = environment(PYTHONPYCACHEPREFIX=folder, PYTHONDONTWRITEBYTECODE="")
        times = [(run("-c", "import numpy"), run("-m", "distckpt_cli", *args)) for _ in range(runs)]
    return min(mine for _, mine in times) / max(1.0, min(scale for scale, _ in times) / 0.08)


def same_as_file(text: str, name: str) -> None:
    """Compares with `harness/expected/NAME`; DISTCKPT_UPDATE_GOLDEN=1 writes it instead."""
    path = Path(__file__).parent / "expected" / name
    if os.environ.get("DISTCKPT_UPDATE_GOLDEN"):
        path.write_text(text)
        pytest.skip(f"wrote {name}")
    assert text == path.read_text()
