"""An export in a process of its own, measured, or held until a signal comes.

    python engine_driver.py SRC DST [--hold N] [--measure] [OPTION=VALUE ...]

Prints one JSON object at the end; `held` on a line of its own when N tasks are done and it waits for the signal.
"""

import argparse
import ast
import json
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from converters.dtypes import from_option
from converters.errors import DistckptError, Interrupted
from converters.events import Moved
from converters.formats import open_checkpoint
from converters.write.export import ExportOptions, plan_export
from converters.write.write_plan import run_conversion


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
    parser.add_argument("--hold", type=int, metavar="N")
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("options", nargs="*")
    asked = parser.parse_intermixed_args()
    given = dict(text.split("=", 1) for text in asked.options)
    options = ExportOptions(**{k: from_option(v) if k == "dtype" else ast.literal_eval(v) for k, v in given.items()})
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
        answer = run(plan, asked.hold)
    except DistckptError as error:
        answer = {"error": type(error).__name__, "message": error.message, "code": error.exit_code, "hint": error.hint}
        if isinstance(error, Interrupted):
            answer["code"] = 128 + error.signum
    done.set()
    answer |= {"base": base, "peak": max(peak, anonymous()), "planned": plan.job.peak_memory}
    print(json.dumps(answer), flush=True)
    sys.exit(answer.get("code", 0))


def run(plan, hold):
    if hold is None:
        return vars(run_conversion(plan))
    from distckpt_cli.signals import stop_on_signals

    done = 0
    with stop_on_signals() as stop:

        def listener(event):
            nonlocal done
            done += isinstance(event, Moved)
            if done == hold:
                print("held", flush=True)
            while done >= hold and not stop.wait(1.0):
                pass

        return vars(run_conversion(plan, listener=listener, stop=stop))


if __name__ == "__main__":
    main()
