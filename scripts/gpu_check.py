"""Shows all that a machine with one GPU can show of the code for GPUs, and writes one report.

    scripts/gpu_check [STEP ...] [--dir FOLDER] [--report gpu-check] [--gib 4] [--simulated]

Needs torch, numpy, safetensors and, for the first step, pytest; no network, no megatron-core, nothing installed. Steps, each
a process of its own that is ended after `--limit` seconds (600):

  tests       the tests that are marked gpu, on checkpoints of hundreds of MB
  order       loads in which all work on the GPU is late, bit for bit those of the host; and three negative controls, devices
              that do not wait where they should, whose loads must be wrong
  casts       all 2^32 fp32 numbers to bf16 and fp16, all 2^16 of 16-bit types, fp8, strided, 0-dim: bits of the host
  exchange    a job of one rank over NCCL, with memory that runs out in a round; two ranks on the one GPU, over gloo
  throughput  bytes a second from the disk, with checksums, and onto the GPU, for 1 to 16 threads, beside both ceilings
  load        `load` beside `dcp.load`: at least 1.5 times as fast at the saved layout, 3 times at twice its tensor parallel
              size

What one GPU cannot show: NCCL between several, and GPUs of other machines. The report is Markdown and JSON; a step that is
run again replaces what the report says of it. Exit code 0: all steps have passed, 1: one has not, 4: there is no GPU. With
`--simulated` the device is the simulation of tests/harness/simulated.py, sizes are small, and figures say nothing.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests"), str(REPOSITORY / "scripts")]
STEPS = ("tests", "order", "casts", "exchange", "throughput", "load")
NO_GPU = 4


def machine(simulated):
    """What was measured on."""
    import torch

    facts = {"torch": torch.__version__, "python": platform.python_version(), "cores": os.cpu_count()}
    facts["load"] = round(os.getloadavg()[0], 1)
    if simulated:
        return {"device": "simulated (no figure of it means anything)"} | facts
    properties = torch.cuda.get_device_properties(0)
    facts |= {"device": properties.name, "cuda": torch.version.cuda, "memory GiB": properties.total_memory >> 30}
    return facts | {"nccl": ".".join(map(str, torch.cuda.nccl.version()))}


def run_step(name, asked, folder):
    """The result of a step, which is a process of its own."""
    command = [sys.executable, __file__, name, "--child", "--dir", str(folder), "--gib", str(asked.gib)]
    begin = time.monotonic()
    process = subprocess.Popen(
        [*command, *(["--simulated"] if asked.simulated else [])],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, _ = process.communicate(timeout=asked.limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)  # with the ranks that it has started
        process.communicate()
        result = {"verdict": "fail", "notes": [f"not done after {asked.limit} s"]}
    else:
        lines = out.strip().splitlines()
        result = {"verdict": "fail", "notes": [f"exit code {process.returncode}, see its output"]}
        if process.returncode == 0 and lines:
            result = json.loads(lines[-1])
    return result | {"step": name, "seconds": round(time.monotonic() - begin, 1)}


def markdown(report):
    """The report for people."""
    facts = ", ".join(f"{name} {value}" for name, value in report["machine"].items())
    lines = ["# What this machine's GPU shows", "", f"{report['date']}; {facts}.", ""]
    lines += ["| step | verdict | seconds |", "|---|---|---|"]
    lines += [f"| {name} | {step['verdict']} | {step['seconds']} |" for name, step in report["steps"].items()]
    for name, step in report["steps"].items():
        lines += ["", f"## {name}", "", *(f"- {note}" for note in step.get("notes", ()))]
        if step.get("rows"):
            head, *rows = step["rows"]
            lines += ["", *("| " + " | ".join(map(str, row)) + " |" for row in (head, ["---"] * len(head), *rows))]
    return "\n".join(lines) + "\n"


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"by default all: {', '.join(STEPS)}")
    parser.add_argument("--dir", type=Path, help="where checkpoints are written; by default the temporary folder")
    parser.add_argument("--report", type=Path, default=Path("gpu-check"), help="path without ending")
    parser.add_argument("--gib", type=float, default=4.0, help="size of the checkpoint of the last two steps")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds of a step")
    parser.add_argument("--simulated", action="store_true", help="without a GPU: whether the script itself works")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    steps = asked.steps or STEPS
    if unknown := [name for name in steps if name not in STEPS]:
        parser.error(f"{unknown[0]} is not a step: {', '.join(STEPS)}")
    if asked.child:
        import gpu_steps

        print(json.dumps(getattr(gpu_steps, f"check_{steps[0]}")(asked)))
        return 0
    import torch

    if not asked.simulated and not torch.cuda.is_available():
        print("gpu_check: torch finds no GPU; --simulated tries the script without one", file=sys.stderr)
        return NO_GPU
    file = asked.report.with_suffix(".json")
    report = json.loads(file.read_text()) if file.exists() else {"steps": {}}
    report |= {"date": time.strftime("%Y-%m-%d"), "machine": machine(asked.simulated)}
    with tempfile.TemporaryDirectory(dir=asked.dir, prefix="gpu-check-") as folder:
        for name in steps:
            print(f"gpu_check: {name} ...", file=sys.stderr, flush=True)
            report["steps"][name] = result = run_step(name, asked, Path(folder))
            print(f"gpu_check: {name}: {result['verdict']}, {result['seconds']} s", file=sys.stderr, flush=True)
            file.write_text(json.dumps(report, indent=1) + "\n")
            asked.report.with_suffix(".md").write_text(markdown(report))
    return int(any(report["steps"][name]["verdict"] != "pass" for name in steps))


if __name__ == "__main__":
    sys.exit(main())
