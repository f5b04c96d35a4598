"""Every hostile checkpoint through every command: `python -m hostile` in `tests/`; a line for each group.

`--group`, `--case` and `--command` take a part of them. What must not be is printed in full, and the exit code is 1.
"""

# ruff: noqa: E402

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[1])]

from hostile.corpus import cases
from hostile.runs import COMMANDS, Server, Tally, attack


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m hostile")
    everything = cases()
    parser.add_argument("--group", action="append", choices=sorted({case.group for case in everything}))
    parser.add_argument("--case", default="", help="part of a title")
    parser.add_argument("--command", action="append", choices=list(COMMANDS))
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    server, wrong = Server(), 0
    for group in asked.group or dict.fromkeys(case.group for case in everything):
        tally = Tally()
        try:
            for case in everything:
                if case.group == group and asked.case in case.title:
                    with tempfile.TemporaryDirectory() as folder:
                        attack(server, case, asked.command or COMMANDS, Path(folder) / "it", tally)
        finally:  # also when it is stopped
            if tally.runs:
                print(f"{group}: {tally}", *tally.wrong, sep="\n  ", flush=True)
        wrong += len(tally.wrong)
    server.close()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
