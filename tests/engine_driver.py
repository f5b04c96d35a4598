"""An export in a process of its own, slowed down or measured, for the tests that kill it.

    python engine_driver.py SRC DST [--sleep SECONDS] [--safe-point SECONDS] [--signals] [--measure] [OPTION=VALUE ...]

Prints one JSON object at the end; `started` on a line of its own when workers begin.
"""

import argparse
import ast
import json
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from converters.dtypes import from_option
from converters.errors import DistckptError, Interrupted
from converters.events import Moved, PlanReady, StopFlag
from converters.execute import run as engine
from converters.execute.worker import Worker
from converters.formats import open_checkpoint
from converters.write.export import ExportOptions, plan_export, run_export


def anonymous():
    """Anonymous memory of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("src", type=Path)
    parser.add_argument("dst", type=Path)
    parser.add_argument("--sleep", type=float, default=0.0)
    parser.add_argument("--safe-point", type=float)
    parser.add_argument("--signals", action="store_true")
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("options", nargs="*")
    asked = parser.parse_intermixed_args()
    given = dict(text.split("=", 1) for text in asked.options)
    options = ExportOptions(**{k: from_option(v) if k == "dtype" else ast.literal_eval(v) for k, v in given.items()})
    if asked.safe_point is not None:
        engine._SAFE_POINT_SECONDS = asked.safe_point
    if asked.sleep:
        slow_down(asked.sleep)
    if "dtype" in given:  # casts are torch's work; what it takes itself is not the engine's memory
        import torch

        torch.set_num_threads(1)
        torch.zeros(8).bfloat16().float()
    try:
        plan = plan_export(open_checkpoint(asked.src), asked.dst, options)
    except DistckptError as error:
        print(json.dumps({"error": type(error).__name__, "message": error.message}), flush=True)
        sys.exit(error.exit_code)
    base = peak = anonymous()
    done = threading.Event()

    def watch():
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, anonymous())

    if asked.measure:
        threading.Thread(target=watch, daemon=True).start()
    try:
        answer = run(plan, asked.signals)
    except DistckptError as error:
        answer = {"error": type(error).__name__, "message": error.message, "code": error.exit_code, "hint": error.hint}
        if isinstance(error, Interrupted):
            answer["code"] = 128 + error.signum
    done.set()
    answer |= {"base": base, "peak": max(peak, anonymous()), "planned": plan.job.peak_memory}
    print(json.dumps(answer), flush=True)
    sys.exit(answer.get("code", 0))


def run(plan, signals):
    def listener(event):
        if isinstance(event, PlanReady | Moved):
            print("started" if isinstance(event, PlanReady) else "moved", flush=True)

    if signals:
        from distckpt_cli.signals import stop_on_signals

        with stop_on_signals() as stop:
            return vars(run_export(plan, listener=listener, stop=stop))
    return vars(run_export(plan, listener=listener, stop=StopFlag()))


def slow_down(seconds):
    original = Worker._write

    def scatter(self, *arguments):
        time.sleep(seconds)
        original(self, *arguments)

    Worker._write = scatter


if __name__ == "__main__":
    main()
