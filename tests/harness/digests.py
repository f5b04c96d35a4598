"""Digests of everything that every writing command makes of every golden checkpoint, to prove that a change changes nothing.

    python tests/harness/digests.py record FILE [--quick] [--only PATTERN]     before the change
    python tests/harness/digests.py compare FILE [--quick] [--only PATTERN]    after it: exit 1 and the differences, or 0

FILE holds, for each command line, its exit code, the SHA-256 of each file it wrote and of what it said (`--json` without
what differs from run to run). Not a test: a change that is meant to change bytes records anew.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS.parent))
GOLDEN = TESTS / "golden"

VOLATILE = {"seconds", "free_bytes"}
QUIET = ("--json", "--quiet", "--threads", "2")

# DST stands for the folder of the run; sizes that are not given are the source's
ONE = "--tp 1 --pp 1 --ep 1 --cp 1 --dp 1"
TWO = "--tp 2 --pp 1 --ep 1 --cp 1 --dp 1"
QUICK = {
    "reshard 1": [f"reshard SRC DST/out {ONE}"],
    "reshard tp2": [f"reshard SRC DST/out {TWO} --optimizer keep"],
    "legacy": [f"convert SRC DST/out --to legacy {TWO}"],
    "safetensors hf": ["convert SRC DST/out --to safetensors --names hf"],
    "torch": ["convert SRC DST/out.pt --to torch"],
    "export-hf": ["export-hf SRC DST/out"],
}
FULL = QUICK | {
    "reshard plan": ["reshard SRC DST/out --tp 2 --pp 2 --dry-run"],
    "reshard pp2 dp": ["reshard SRC DST/out --pp 2 --dp 4 --optimizer dp_reshardable"],
    "reshard ep": ["reshard SRC DST/out --tp 2 --ep 2 --fully-parallel --mcore 0.19"],
    "reshard weights": ["reshard SRC DST/out --tp 4 --optimizer none --layers per-layer --rng drop"],
    "torch_dist": ["convert SRC DST/out --to torch_dist --tp 2 --pp 2"],
    "legacy pp2": ["convert SRC DST/out --to legacy --pp 2 --ep 2 --optimizer distributed --dp 2"],
    "legacy local": ["convert SRC DST/out --to legacy --spec local --optimizer plain --experts sequential"],
    "safetensors": ["convert SRC DST/out --to safetensors --max-shard-size 100KB"],
    "torch hf": ["convert SRC DST/out.pt --to torch --names hf"],
    "export-hf fp32": ["export-hf SRC DST/out --dtype fp32 --max-shard-size 60KB"],
    "export-hf plan": ["export-hf SRC DST/out --dry-run"],
}


def sources() -> list[str]:
    """Every golden checkpoint that is a folder of its own."""
    return sorted(path.name for path in GOLDEN.iterdir() if path.is_dir() and path.name not in ("truth", "pickles"))


def _steady(value: object) -> object:
    if isinstance(value, dict):
        return {key: _steady(inner) for key, inner in value.items() if key not in VOLATILE}
    if isinstance(value, list):
        return [_steady(inner) for inner in value]
    return value


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


def _tree(top: Path) -> dict[str, str]:
    return {
        path.relative_to(top).as_posix(): _digest(path.read_bytes())
        for path in sorted(top.rglob("*"))
        if path.is_file()
    }


def run(task: tuple[str, str]) -> tuple[str, dict[str, object]]:
    """Runs the command lines of one group on one golden; their digests."""
    from distckpt_cli.app import main

    source, group = task
    os.chdir(GOLDEN)
    top = Path(tempfile.mkdtemp(prefix="digests-"))
    answers = []
    try:
        for line in FULL[group]:
            words = [word.replace("SRC", source).replace("DST", str(top)) for word in line.split()]
            words += QUIET
            out, err = io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                code = main(words)
            said = out.getvalue().replace(str(top), "DST")
            with contextlib.suppress(ValueError):
                said = json.dumps(_steady(json.loads(said)), sort_keys=True)
            error = re.sub(r"[\d.]+ s\b", "s", err.getvalue().replace(str(top), "DST")) if code else ""
            answers.append([code, _digest(said.encode()), _digest(error.encode())])
        return f"{source} | {group}", {"answers": answers, "files": _tree(top)}
    finally:
        shutil.rmtree(top)


def everything(groups: list[str], only: str) -> dict[str, dict[str, object]]:
    """The digests of all groups on all goldens whose name matches, by `GOLDEN | GROUP`."""
    tasks = [(source, group) for source in sources() if re.search(only, source) for group in groups]
    import torch  # noqa: F401 - once, not in each process

    import distckpt_cli.app  # noqa: F401

    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=fork) as pool:
        return dict(sorted(pool.map(run, tasks, chunksize=4)))


def differences(before: dict[str, dict], after: dict[str, dict]) -> list[str]:
    """What differs of those groups that both have, one line each."""
    out = []
    for name in sorted(before.keys() & after.keys()):
        was, is_now = before[name], after[name]
        for number, (old, new) in enumerate(zip(was["answers"], is_now["answers"], strict=True)):
            for what, a, b in zip(("exit code", "answer", "error"), old, new, strict=True):
                if a != b:
                    out.append(f"{name}: {what} of line {number + 1}: {a} -> {b}")
        old, new = was["files"], is_now["files"]
        changed = [file for file in sorted(old.keys() | new.keys()) if old.get(file) != new.get(file)]
        out += [f"{name}: {file} {'differs' if file in old and file in new else 'is not in both'}" for file in changed]
    return out


def main() -> int:
    """Records or compares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--quick", action="store_true", help="six command lines for each golden, not all")
    parser.add_argument("--only", default="", metavar="PATTERN", help="goldens whose name matches")
    args = parser.parse_args()
    digests = everything(list(QUICK if args.quick else FULL), args.only)
    written = sum(len(entry["files"]) for entry in digests.values())
    codes = [answer[0] for entry in digests.values() for answer in entry["answers"]]
    tally = ", ".join(f"exit {code}: {codes.count(code)}" for code in sorted(set(codes)))
    print(f"{len(codes)} commands ({tally}), {written} files")
    if args.what == "record":
        args.file.write_text(json.dumps(digests, indent=1) + "\n")
        return 0
    lines = differences(json.loads(args.file.read_text()), digests)
    print("\n".join(lines) or "identical")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
