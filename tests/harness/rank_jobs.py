"""Jobs of several ranks as processes of this machine."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import NamedTuple

from harness.cli_support import environment
from harness.processes import finish, fork, start

DRIVER = Path(__file__).parents[1] / "harness" / "rank_driver.py"
HIDDEN = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


class Ran(NamedTuple):
    codes: list
    out: str
    err: str
    seconds: float


def ended(ranks, begin=None):
    """How processes end by themselves, and how long that takes since `begin`."""
    begin = time.monotonic() if begin is None else begin
    said = finish(ranks)
    codes = [process.returncode for process in ranks]
    return Ran(codes, *("".join(s[n] for s in said) for n in (0, 1)), time.monotonic() - begin)


def plain_environment(**more):
    return {k: v for k, v in environment().items() if k not in HIDDEN} | {k: str(v) for k, v in more.items()}


def started(world, *args, **env):
    """The ranks as a launcher would start them, without one."""
    own = [plain_environment(RANK=rank, WORLD_SIZE=world, LOCAL_RANK=rank, **env) for rank in range(world)]
    if "LD_PRELOAD" in env:
        return [start([sys.executable, DRIVER, *args], env=more) for more in own]
    return [fork(DRIVER, *args, env=more) for more in own]


def ranks(world, *args, **env):
    return ended(started(world, *args, **env))
