"""What each command costs, as a ratio that can be compared between machines: a guard against becoming slow.

    scripts/bench --quick [--dir FOLDER] [--json FILE] [COMMAND ...]     # 0.3 GiB, 3 rounds: two minutes on a quiet machine
    scripts/bench [--gib 2] [--runs 7]

A Llama in torch_dist, TP 4, is written once; then, per round, each from a cold page cache and in an order that turns:

  export-hf, reshard, convert, import-hf    beside `cp -r` of what is read, and fsync of every file
  load                                      rank 0 of twice the tensor parallel size, beside dcp.load (bench_load.py)
  inspect, verify                           by themselves: there is nothing like them

The ratio is the median of those within a round, so that it says something on a machine that does other work, too. Seconds of
the processor include start-up and, for import-hf, the import of transformers. The other files bench_*.py look closer at one
command each. Needs Linux.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench_export import GIB, MIB, REPOSITORY, forget, interleaved, machine, sync

sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests")]
TP = 4
WRITERS = {
    "export-hf": [],
    "reshard": ["--tp", str(2 * TP)],
    "convert": ["--to", "torch"],
    "import-hf": ["--tp", str(TP)],
}
READERS = {"inspect": [], "verify": []}
COMMANDS = (*WRITERS, "load", *READERS)


def write_source(folder, gib):
    """A checkpoint of about so many GiB, a record at a time."""
    from harness.checkpoints import write_llama

    hidden, ffn, vocab = (2048, 5632, 16384) if gib >= 0.1 else (256, 512, 1024)
    layer = 2 * hidden * (3 * hidden + 3 * ffn)
    layers = max(1, round((gib * GIB - 4 * vocab * hidden) / layer))
    write_llama(folder / "iter_0000007", layers=layers, hidden=hidden, ffn=ffn, vocab=vocab, tp=TP, pp=1)
    (folder / "latest_checkpointed_iteration.txt").write_text("7")
    return folder


def distckpt(*words):
    return [sys.executable, "-m", "distckpt_cli", *map(str, words)]


def measure_writer(name, source, work, runs):
    """Runs of ours and of `cp`."""
    copy, out = work / "copy", work / ("out.pt" if name == "convert" else "out")
    todo = {
        "cp": (["cp", "-r", str(source), str(copy)], lambda: sync(copy), copy),
        "ours": (distckpt(name, source, out, "--progress", "off", *WRITERS[name]), None, out),
    }
    return interleaved(todo, runs, lambda: forget(source))


def measure_reader(name, source, work, runs):
    """Runs of ours; what is made is a file of nothing."""
    stamp = work / "stamp"
    todo = {"ours": (distckpt(name, source), lambda: stamp.write_text(""), stamp)}
    return interleaved(todo, runs, lambda: forget(source))


def measure_load(source, work, runs):
    """Medians of `load` and `dcp.load`, from bench_load.py."""
    answer = work / "load.json"
    command = [sys.executable, str(REPOSITORY / "scripts/bench_load.py"), str(source), "--tp", str(2 * TP)]
    subprocess.run([*command, "--runs", str(runs), "--json", str(answer)], check=True, stdout=subprocess.DEVNULL)
    routes = json.loads(answer.read_text())[str(2 * TP)]
    return {"ours": [{"wall": routes["ours"]["seconds"]}], "dcp": [{"wall": routes["dcp"]["seconds"]}]}


def row(name, results):
    """What the table says of a command."""
    ours = results.pop("ours")
    line = {"command": name, "seconds": statistics.median(run["wall"] for run in ours)}
    if "cpu" in ours[0]:
        line["cpu"] = statistics.median(run["cpu"] for run in ours)
        line["anonymous"] = max(run["anonymous"] for run in ours) / MIB
    for beside, runs in results.items():
        ratios = [one["wall"] / other["wall"] for one, other in zip(ours, runs, strict=True)]
        line |= {"beside": {"cp": "cp + fsync", "dcp": "dcp.load"}[beside], "ratio": statistics.median(ratios)}
        line["floor"] = statistics.median(run["wall"] for run in runs)
    return line


def shown(line):
    """The row of a table in Markdown."""
    cells = [f"`{line['command']}`", f"{line['seconds']:.2f}"]
    cells += [f"{line['cpu']:.2f}" if "cpu" in line else "", f"{line['anonymous']:.0f}" if "cpu" in line else ""]
    cells += [line["beside"], f"{line['floor']:.2f}", f"**{line['ratio']:.2f}**"] if "ratio" in line else ["", "", ""]
    return "| " + " | ".join(cells) + " |"


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commands", nargs="*", metavar="COMMAND", help=f"only these of {', '.join(COMMANDS)}")
    parser.add_argument("--quick", action="store_true", help="0.3 GiB and 3 rounds")
    parser.add_argument("--gib", type=float, help="size of the checkpoint; 2 by default")
    parser.add_argument("--runs", type=int, help="rounds; 7 by default")
    parser.add_argument("--dir", type=Path, help="where to write; by default the temporary folder")
    parser.add_argument("--json", type=Path, help="also write the table here")
    asked = parser.parse_args(arguments)
    if unknown := [name for name in asked.commands if name not in COMMANDS]:
        parser.error(f"{unknown[0]} is none of {', '.join(COMMANDS)}")
    gib, runs = asked.gib or (0.3 if asked.quick else 2.0), asked.runs or (3 if asked.quick else 7)
    print(f"{time.strftime('%Y-%m-%d')}; {machine()}; {gib:g} GiB, {runs} rounds, cold cache\n")
    print("| command | s | CPU s | MiB | beside | s | ratio |\n|---|---|---|---|---|---|---|", flush=True)
    table = []
    with tempfile.TemporaryDirectory(dir=asked.dir, prefix="bench-") as name:
        work = Path(name)
        source = write_source(work / "source", gib)
        for command in asked.commands or COMMANDS:
            given = source
            if command == "import-hf":
                given = work / "hf"
                subprocess.run(distckpt("export-hf", source, given, "-q"), check=True, stdout=subprocess.DEVNULL)
            if command == "load":
                results = measure_load(source, work, runs)
            else:
                results = (measure_writer if command in WRITERS else measure_reader)(command, given, work, runs)
            table.append(row(command, results))
            print(shown(table[-1]), flush=True)
    if asked.json:
        asked.json.write_text(json.dumps({"machine": machine(), "gib": gib, "runs": runs, "table": table}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
