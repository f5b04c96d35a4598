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
from fuzz.parts import PARTS
from fuzz.trial import Fault, tried
from hostile.server import keep_parsers, warm

_ROUND, _WHOLE = 200, 5
"""Mutants of a target in a round, and how many of these are built and given to commands."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--from", type=int, default=1000, dest="first")
    parser.add_argument("--target", choices=sorted(TARGETS))
    asked = parser.parse_args()
    begin, whole, alone, found, number = time.monotonic(), 0, 0, 0, asked.first
    kinds: set[str] = set()
    keep_parsers()
    warm()
    with tempfile.TemporaryDirectory() as folder:
        while time.monotonic() < begin + asked.seconds:
            for target in [asked.target] if asked.target else TARGETS:
                made = [mutant(target, number + k) for k in range(_ROUND)]
                parts = made[_WHOLE:] if TARGETS[target].part in PARTS else []
                for fault in (*tried(made[:_WHOLE], Path(folder)), *tried(parts, Path(folder), whole=False)):
                    found += 1
                    show(fault, kinds)
                whole, alone = whole + _WHOLE, alone + len(parts)
            number += _ROUND
            counts = f"{whole} mutants with commands and {alone} parts to number {number}"
            print(f"{counts}, {time.monotonic() - begin:.0f} s: {found} faults of {len(kinds)} kinds", flush=True)
    return 1 if found else 0


def show(fault: Fault, kinds: set[str]) -> None:
    """Prints a fault, one of a kind at length."""
    if fault.kind in kinds:
        return
    kinds.add(fault.kind)
    print(f"-- {fault.kind}: {fault.command}\n{fault.text}\n{fault.mutant.line()[:20000]}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
