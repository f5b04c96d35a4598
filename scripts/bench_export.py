"""What an export costs, beside the cheapest thing that moves the same bytes and beside torch's own way.

    python scripts/bench_export.py CKPT [--runs 5] [--dir TMP] [--route ours --route cp --route dcp]

Per round, each from a cold page cache (fsync, then posix_fadvise DONTNEED), in an order that turns with the rounds:

  cp     `cp -r` of the checkpoint folder, then fsync of every file: a floor for moving its bytes
  ours   `distckpt export-hf`, a process from start to end
  dcp    a process that imports torch, loads all weights with torch.distributed.checkpoint into preallocated tensors and
         writes them with safetensors (no renaming, no splitting, no sync: less work than an export)

Memory is the largest sum of RssAnon over the process and its children, sampled every 10 ms. Bytes are those of
/proc/PID/io (rchar, wchar: what the process asked for) and of the block device (read_bytes). Needs Linux.
"""

import argparse
import hashlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
MIB, GIB = 1 << 20, 1 << 30

DCP_ROUTE = """
import sys
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
source, target = sys.argv[1:]
reader = dcp.FileSystemReader(source)
known = reader.read_metadata().state_dict_metadata
state = {
    key: torch.empty(value.size, dtype=value.properties.dtype)
    for key, value in known.items()
    if hasattr(value, "size") and not key.startswith(("optimizer.", "chained_"))
}
dcp.load(state, storage_reader=reader, no_dist=True)
save_file(state, target)
"""


def forget(folder):
    """Writes back and drops the page cache of every file under a folder."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def sync(folder):
    for path in [*folder.rglob("*"), folder]:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def children(pid):
    out = [pid]
    try:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in (thread / "children").read_text().split():
                out += children(int(child))
    except OSError:
        pass
    return out


def field(pid, file, name):
    try:
        for line in Path(f"/proc/{pid}/{file}").read_text().splitlines():
            if line.startswith(name + ":"):
                return int(line.split()[1])
    except OSError:
        pass
    return 0


def environment():
    """What commands run in: this repository, with the compiled modules that an installation has."""
    environ = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    return environ


def measure(command, then=None):
    """Wall and CPU seconds, peak anonymous bytes, and /proc counters of a command; `then` counts as wall time."""
    begin = time.monotonic()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment())
    peak, io = 0, dict.fromkeys(("rchar", "wchar", "read_bytes"), 0)
    while True:
        done = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        io = {name: max(io[name], field(child.pid, "io", name)) for name in io}
        if done is not None:  # a zombie still shows its counters
            break
        peak = max(peak, sum(field(pid, "status", "RssAnon") * 1024 for pid in children(child.pid)))
        time.sleep(0.01)
    with child.stderr:
        noise = child.stderr.read().decode(errors="replace")
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        sys.exit(f"{command[:4]} failed with exit code {child.returncode}:\n{noise[-2000:]}")
    if then is not None:
        then()
    cpu = usage.ru_utime + usage.ru_stime
    return {"wall": time.monotonic() - begin, "cpu": cpu, "anonymous": peak, **io}


def interleaved(todo, rounds, prepare, look=None):
    """Measures every route (command, what counts as wall time after it, what it makes) in each round, in turning order."""
    results, names = {name: [] for name in todo}, list(todo)
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            command, then, made = todo[name]
            prepare()
            results[name].append(measure(command, then))
            if look:
                look(name, made)
            shutil.rmtree(made) if made.is_dir() else made.unlink()
            print(f"  round {number + 1} {name:5} {results[name][-1]['wall']:7.2f} s  {made}", file=sys.stderr)
    return results


def parsed(parser):
    """The arguments, and the words behind `--`, which argparse takes for positionals only beside the others."""
    words = [*sys.argv[1:], "--"]
    at = words.index("--")
    return parser.parse_args(words[:at]), words[at + 1 : -1]


def digest(made):
    total = hashlib.sha256()
    for path in sorted(made.rglob("*")) if made.is_dir() else [made]:
        if path.is_file():
            total.update(path.name.encode())
            with path.open("rb") as file:
                total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()


def needed(checkpoint):
    """Bytes of the weights, and the folder that holds them."""
    sys.path.insert(0, str(REPOSITORY))
    from converters.formats import open_checkpoint

    catalog = open_checkpoint(checkpoint).catalog
    return catalog.nbytes("weight"), catalog.path


def routes(source, work, extra):
    copy, out, flat = work / "copy", work / "out", work / "flat.safetensors"
    return {
        "cp": (["cp", "-r", str(source), str(copy)], lambda: sync(copy), copy),
        "ours": (
            [sys.executable, "-m", "distckpt_cli", "export-hf", str(source), str(out), "--progress", "off", *extra],
            None,
            out,
        ),
        "dcp": ([sys.executable, "-c", DCP_ROUTE, str(source), str(flat)], None, flat),
    }


def machine():
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    versions = []
    for name in ("torch", "numpy", "safetensors"):
        from importlib.metadata import version

        versions.append(f"{name} {version(name)}")
    load = os.getloadavg()[0]
    return (
        f"{os.cpu_count()} cores, {memory:.1f} GiB, load {load:.1f}; Linux {platform.release()}, "
        f"Python {platform.python_version()}, {', '.join(versions)}"
    )


def table(results, weights, size):
    print(
        f"{'route':6} {'wall s':>16} {'to cp':>12} {'cpu s':>6} {'anon MiB':>12} {'read':>9} {'needed x':>9} {'written':>9}"
    )
    print(
        f"{'':6} {'median / min':>16} {'median / min':>12} {'median':>6} {'median / max':>12} {'MiB':>9} {'':>9} {'MiB':>9}"
    )
    for name, runs in results.items():
        wall = [run["wall"] for run in runs]
        ratio = [run["wall"] / base["wall"] for run, base in zip(runs, results.get("cp", runs), strict=True)]
        anonymous = [run["anonymous"] / MIB for run in runs]
        cpu = statistics.median(run["cpu"] for run in runs)
        read, written = (statistics.median(run[key] for run in runs) for key in ("rchar", "wchar"))
        floor = size if name == "cp" else weights
        print(
            f"{name:6} {statistics.median(wall):8.2f} /{min(wall):6.2f} {statistics.median(ratio):6.2f} /{min(ratio):5.2f}"
            f" {cpu:6.2f} {statistics.median(anonymous):6.0f} /{max(anonymous):5.0f} {read / MIB:9.1f} {read / floor:9.4f}"
            f" {written / MIB:9.1f}"
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--dir", type=Path, default=None, help="where to write; by default beside the checkpoint")
    parser.add_argument("--route", action="append", choices=["cp", "ours", "dcp"], help="only these")
    parser.add_argument("--json", type=Path, help="also write every run here")
    parser.epilog = "What follows -- are options for export-hf."
    asked, extra = parsed(parser)
    weights, source = needed(asked.checkpoint)
    size = sum(path.stat().st_size for path in source.rglob("*") if path.is_file())
    print(f"{source.name}: {size / GIB:.2f} GiB, of which weights {weights / GIB:.2f} GiB")
    print(f"{machine()}; n = {asked.runs}, interleaved, cold cache")
    digests = set()
    with tempfile.TemporaryDirectory(dir=asked.dir or source.parent.parent, prefix="bench-") as name:
        todo = routes(source, Path(name), extra)
        chosen = {route: it for route, it in todo.items() if not asked.route or route in asked.route}

        def prepare():
            forget(source)
            os.sync()

        results = interleaved(
            chosen, asked.runs, prepare, lambda name, made: digests.add(digest(made)) if name == "ours" else None
        )
    table(results, weights, size)
    if "ours" in results:
        print(f"results of ours byte-identical in all {asked.runs} runs: {'yes' if len(digests) == 1 else 'NO'}")
    if asked.json:
        asked.json.write_text(json.dumps({"machine": machine(), "weights": weights, "size": size, "runs": results}))
    return 0 if len(digests) <= 1 else 1


if __name__ == "__main__":
    sys.exit(main())
