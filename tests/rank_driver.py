"""`distckpt` as one rank among several, slowed down or broken on purpose, for the tests that kill ranks.

    RANK=.. WORLD_SIZE=.. LOCAL_RANK=.. python rank_driver.py export-hf SRC DST

SLOW=SECONDS sleeps before every write; SLOW_RANKS=1,2 only on these ranks. PIDS=DIR gets a file for each rank, with its
process id, once it has written for the first time. BUG_RANK=R raises in that rank's worker.
"""

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from converters.execute import run as engine
from converters.execute.ranks import Ranks
from converters.execute.worker import Worker
from distckpt_cli.app import main

RANK = Ranks.from_environment().rank
SLOW = float(os.environ.get("SLOW", "0"))
SLOW_RANKS = os.environ.get("SLOW_RANKS", "")
PIDS = os.environ.get("PIDS")


def slow_down():
    original = Worker._write

    def scatter(self, *arguments):
        if PIDS and not (Path(PIDS) / str(RANK)).exists():
            new = Path(PIDS) / f"{RANK}.new"
            new.write_text(str(os.getpid()))
            new.replace(Path(PIDS) / str(RANK))  # whoever sees it can read it
        if os.environ.get("BUG_RANK") == str(RANK):
            raise ZeroDivisionError("a bug of this rank")
        if not SLOW_RANKS or str(RANK) in SLOW_RANKS.split(","):
            time.sleep(SLOW)
        original(self, *arguments)

    Worker._write = scatter


if __name__ == "__main__":
    engine._SAFE_POINT_SECONDS = 0.05
    slow_down()
    sys.exit(main())
