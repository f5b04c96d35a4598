"""Fuzzing for as long as one likes: `python -m fuzz --seconds 3600` in `tests/`, with this repository on the path.

What is found is printed as a line for `seeds/found.jsonl`, with what happened. `--from` chooses where the numbers begin, so
that runs do not repeat each other; `--target` takes one target.
"""

# ruff: noqa: E402

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[1])]

from fuzz.mutants import TARGETS, mutant
from fuzz.trial import Fault, tried
from hostile.server import warm


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--from", type=int, default=1000, dest="first")
    parser.add_argument("--target", choices=sorted(TARGETS))
    asked = parser.parse_args()
    end, count, found, number = time.monotonic() + asked.seconds, 0, 0, asked.first
    kinds: set[str] = set()
    warm()
    with tempfile.TemporaryDirectory() as folder:
        while time.monotonic() < end:
            for target in [asked.target] if asked.target else TARGETS:
                made = [mutant(target, number + k) for k in range(10)]
                for fault in tried(made, Path(folder)):
                    found += 1
                    show(fault, kinds)
                count += len(made)
            number += 10
    print(f"{count} mutants to number {number}, {found} faults of {len(kinds)} kinds")
    return 1 if found else 0


def show(fault: Fault, kinds: set[str]) -> None:
    """Prints a fault, one of a kind at length."""
    if fault.kind in kinds:
        return
    kinds.add(fault.kind)
    print(f"-- {fault.kind}: {fault.command}\n{fault.text}\n{fault.mutant.line()[:20000]}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
