"""What it costs to read a checkpoint over a network, beside the raw client, and beside copying it to a disk first.

    python scripts/make_big.py /tmp/big
    python scripts/bench_remote.py /tmp/big [--latency 0 20 100] [--rate 100] [--threads 16] [--runs 3]

The checkpoint is packed into one tar file, which a web server in a process of its own serves: each request after a latency,
and with so many MB/s. Per latency, in an order that turns:

  verify  distckpt verify on the address: all bytes and their checksums, nothing written
  export  distckpt export-hf from the address onto a disk: all weights, read tile by tile, and their checksums
  raw     obstore alone: the same file in ranges of 4 MiB, as many requests at a time, thrown away
  copy    obstore writes the file to a disk, then distckpt verify there

`raw` is what the link gives; `share` is how much of it is reached. Start-up of Python, planning, writing and syncing are in
all of them. `verify` has up to four requests of what comes next in flight for each file that it reads: it is given a quarter
of the threads.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench_export import MIB, REPOSITORY, machine

sys.path.insert(0, str(REPOSITORY / "tests"))
from harness.remote_stores import file_server

RANGE = 4 << 20
AHEAD = 4
PACKED = "checkpoint.tar"


def fetch(url, folder, threads, into):
    """All files by the raw client; to a disk, or thrown away."""
    import obstore
    from obstore.store import HTTPStore

    store = HTTPStore.from_url(url, client_options={"allow_http": True, "timeout": "600s"})
    if into is not None:
        for path in folder.iterdir():
            with (into / path.name).open("wb") as file:
                os.truncate(file.fileno(), path.stat().st_size)

    def get(task):
        name, begin, end = task
        data = memoryview(obstore.get(store, name, options={"range": (begin, end)}).bytes())
        if into is not None:
            fd = os.open(into / name, os.O_WRONLY)
            os.pwrite(fd, data, begin)
            os.close(fd)

    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    tasks = [(n, at, min(at + RANGE, size)) for n, size in sizes.items() for at in range(0, size, RANGE)]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(get, tasks))


def distckpt(*words):
    subprocess.run([sys.executable, "-m", "distckpt_cli", *words, "--silent"], cwd=REPOSITORY, check=True)


def route(name, port, folder, threads):
    """Seconds of one route, in a process of its own."""
    url = f"http://127.0.0.1:{port}"
    begin = time.monotonic()
    into = tempfile.mkdtemp(dir=folder.parent) if name in ("copy", "export") else ""
    if name == "verify":
        distckpt("verify", f"{url}/{PACKED}", "--threads", str(max(1, threads // AHEAD)))
    elif name == "export":  # a tile, room for its elements in another type, and what a request brings
        memory = f"{threads * 3 * 8}MiB"
        distckpt("export-hf", f"{url}/{PACKED}", f"{into}/hf", "--threads", str(threads), "--max-memory", memory)
    if name in ("verify", "export"):
        took = time.monotonic() - begin
        shutil.rmtree(into, ignore_errors=True)
        return took
    command = [sys.executable, __file__, str(folder), "--fetch", url, into, "--threads", str(threads)]
    subprocess.run(command, check=True)
    if into:
        distckpt("verify", f"{into}/{PACKED}")
        shutil.rmtree(into)
    return time.monotonic() - begin


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a checkpoint")
    parser.add_argument("--latency", type=float, nargs="+", default=[0, 20, 100], help="milliseconds")
    parser.add_argument("--rate", type=float, default=100, help="MB/s of each request; 0: no limit")
    parser.add_argument("--threads", type=int, default=16, help="requests at a time")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--fetch", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    folder = options.folder.resolve()
    if options.fetch:
        url, into = options.fetch
        fetch(url, folder, options.threads, Path(into) if into else None)
        return
    with tempfile.TemporaryDirectory(dir=folder.parent) as packed:
        subprocess.run(["tar", "-cf", f"{packed}/{PACKED}", "-C", folder, "."], check=True)
        measure(Path(packed), options)


def measure(folder, options):
    size = sum(path.stat().st_size for path in folder.iterdir())
    rows = []
    for latency in options.latency:
        times = {"verify": [], "export": [], "raw": [], "copy": []}
        with file_server(folder, latency / 1000, options.rate * 1e6) as port:
            for turn in range(options.runs):
                names = list(times)
                for name in names[turn % 4 :] + names[: turn % 4]:
                    times[name].append(route(name, port, folder, options.threads))
        middle = {name: statistics.median(values) for name, values in times.items()}
        rows.append({"latency_ms": latency, **{name: round(value, 2) for name, value in middle.items()},
                     "share": {name: round(middle["raw"] / middle[name], 2) for name in ("verify", "export")},
                     "copy_over_verify": round(middle["copy"] / middle["verify"], 2)})  # fmt: skip
        print(json.dumps(rows[-1]), flush=True)
    print(json.dumps({"machine": machine(), "MiB": round(size / MIB), "threads": options.threads, "rate_MB": options.rate,
                      "runs": options.runs, "rows": rows}))  # fmt: skip


if __name__ == "__main__":
    main()
