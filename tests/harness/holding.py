"""Workers that stand still in the middle of a run, so that a test can disturb them however slow the machine is.

HOLD=FILE   from its third task on a process waits while that file is there, unless it is to stop
PIDS=DIR    gets a file for each rank, with its process id, when it begins its first task
BUG_RANK=R  that rank fails at its first task
"""

import itertools
import os
import time
from pathlib import Path


def install():
    """Arms this process; imports the engine, nothing else."""
    from converters.execute.worker import TileWriter

    rank, number, do = os.environ.get("RANK", "0"), itertools.count(), TileWriter.do
    hold, first = Path(os.environ.get("HOLD", "/nonexistent")), int(os.environ.get("HOLD_FROM", "2"))

    def held(self, task):
        begun = next(number)
        if begun == 0 and "PIDS" in os.environ:
            new = Path(os.environ["PIDS"]) / f"{rank}.new"
            new.write_text(str(os.getpid()))
            new.replace(new.with_suffix(""))  # whoever sees it can read it
        if os.environ.get("BUG_RANK") == rank:
            raise ZeroDivisionError("a bug of this rank")
        while begun >= first and hold.exists() and not self._run.sharing.should_stop():
            time.sleep(0.005)
        do(self, task)

    TileWriter.do = held
