"""`distckpt` as one rank among several, held or broken on purpose (see holding.py), for the tests that kill ranks.

    RANK=.. WORLD_SIZE=.. LOCAL_RANK=.. python rank_driver.py export-hf SRC DST

HURRY=FILE: silence for HURRY_SECONDS is enough for a rank to be lost once that file is there.
"""

import dataclasses
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from converters.execute import run as engine
from converters.execute.rank_sync import RankSync
from distckpt_cli.app import main
from harness import holding

HURRY_SECONDS = 4.0


def hurry(file):
    failure_of = RankSync._failure_of

    def hurried(self, *arguments):
        if file.exists():
            self.ranks = dataclasses.replace(self.ranks, timeout=HURRY_SECONDS)
        return failure_of(self, *arguments)

    RankSync._failure_of = hurried


if __name__ == "__main__":
    engine._SAFE_POINT_SECONDS = 0.05
    holding.install()
    if "HURRY" in os.environ:
        hurry(Path(os.environ["HURRY"]))
    sys.exit(main())
