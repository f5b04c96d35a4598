"""Where the processor's time goes: seconds for each GiB of the source, of each command beside `cp -r`, sampled by `perf`.

    python scripts/make_big.py /tmp/big && python scripts/bench_import.py /tmp/hf --make 2 --runs 1 --route cp
    python scripts/bench_profile.py /tmp/big --hf /tmp/hf [--runs 3] [--dir TMP]

  read, write        the kernel's: copying, page cache, file system (`cp` does both in one call)
  cache, sync        posix_fadvise, fsync
  checksum           CRC-32 of what is read and written
  copy               memmove and numpy: gathering, transposing, casting
  python             the interpreter; the start of Python and imports included
  memory             page faults, mappings, processes
  other              the rest of the kernel: interrupts, scheduling

The source is not in the page cache. Medians of the runs. Needs Linux's `perf`.
"""

import argparse
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from bench_export import GIB, environment, forget, machine

HERTZ = 499
KERNEL = (
    ("read", r"vfs_read|do_preadv|vfs_readv|ksys_read|ksys_pread"),
    ("write", r"vfs_write|do_pwritev|vfs_writev|ksys_write|ksys_pwrite"),
    ("read", r"copy_file_range|splice"),
    ("cache, sync", r"fadvise|fsync|sync_file_range|fallocate"),
    ("memory", r"page_fault|mmap|munmap|execve|clone|exit_mm|brk|madvise"),
)
LIBRARIES = (("checksum", r"isal|libz"), ("copy", r"_multiarray|numpy"))
COLUMNS = ("read", "write", "cache, sync", "checksum", "copy", "python", "memory", "other")


def kind(frames):
    """What a sample was doing: its frames are (symbol, library), innermost first."""
    symbol, library = frames[0]
    if "kernel" in library:
        names = " ".join(name for name, _ in frames)
        return next((kind for kind, pattern in KERNEL if re.search(pattern, names)), "other")
    if "libc" in library and re.search(r"mem(move|cpy|set)", symbol):
        return "copy"
    return next((kind for kind, pattern in LIBRARIES if re.search(pattern, library)), "python")


def profile(command, folder):
    """Seconds of the processor by kind."""
    data = folder / "perf.data"
    record = ["perf", "record", "-q", "-g", "-e", "cpu-clock", "-F", str(HERTZ), "-o", str(data)]
    subprocess.run([*record, *command], env=environment(), check=True, stdout=subprocess.DEVNULL)
    script = ["perf", "script", "-i", str(data), "-F", "comm,ip,sym,dso"]
    text = subprocess.run(script, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout
    seconds = Counter()
    for sample in text.split("\n\n"):
        frames = re.findall(r"^\s+[0-9a-f]+ (.*) \((.*)\)$", sample, re.MULTILINE)
        if frames:
            seconds[kind(frames)] += 1 / HERTZ
    return seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--hf", type=Path, help="a Hugging Face folder, for import-hf")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--dir", type=Path, help="where to write; by default beside the checkpoint")
    asked = parser.parse_args()
    if not shutil.which("perf"):
        sys.exit("perf is not on PATH")
    source, hf = str(asked.checkpoint), asked.hf and str(asked.hf)
    distckpt = [sys.executable, "-m", "distckpt_cli"]
    print(f"{machine()}; medians of {asked.runs}, CPU seconds for each GiB of the source\n")
    print("| | all | " + " | ".join(COLUMNS) + " |\n|" + "---|" * (len(COLUMNS) + 2))
    with tempfile.TemporaryDirectory(dir=asked.dir or asked.checkpoint.parent, prefix="bench-") as name:
        work = Path(name)
        out = str(work / "out")
        routes = {
            "`cp -r`": (source, ["cp", "-r", source, out]),
            "`export-hf`": (source, [*distckpt, "export-hf", source, out, "-q"]),
            "`reshard --tp 8`": (source, [*distckpt, "reshard", source, out, "--tp", "8", "-q"]),
            "`reshard --tp 2`": (source, [*distckpt, "reshard", source, out, "--tp", "2", "-q"]),
            "`convert --to legacy`": (source, [*distckpt, "convert", source, out, "--to", "legacy", "-q"]),
        }
        if hf:
            routes["`import-hf`"] = (hf, [*distckpt, "import-hf", hf, out, "-q"])
        results = {title: [] for title in routes}
        for _ in range(asked.runs):
            for title, (folder, command) in routes.items():
                forget(Path(folder))
                os.sync()
                results[title].append(profile(command, work))
                shutil.rmtree(out)
    for title, runs in results.items():
        size = sum(p.stat().st_size for p in Path(routes[title][0]).rglob("*") if p.is_file()) / GIB
        cells = [statistics.median(run[column] for run in runs) / size for column in COLUMNS]
        every = statistics.median(sum(run.values()) for run in runs) / size
        print(f"| {title} | {every:.2f} | " + " | ".join(f"{cell:.2f}" for cell in cells) + " |")


if __name__ == "__main__":
    main()
