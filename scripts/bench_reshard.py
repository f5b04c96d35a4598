"""What a reshard costs, optimizer included, beside the cheapest thing that moves the same bytes.

    python scripts/make_big.py /tmp/big --optimizer --layers 12 --hidden 1024 --ffn 2816 --vocab 32768 --tp 4   # 3 GB
    python scripts/bench_reshard.py /tmp/big --tp 8 --tp 16 [--runs 5] [--dir TMP]

Per round and target, each from a cold page cache (fsync, then posix_fadvise DONTNEED), in an order that turns:

  cp     `cp -r` of the checkpoint folder, then fsync of every file
  ours   `distckpt reshard`, a process from start to end

For torch's DCP the table says what the ranks of the target job would read: torch's own load planner is asked which stored
items each target chunk touches, and its reader reads every such item whole. Memory, bytes and seconds are measured as in
bench_export.py; `needed` is the bytes of all weights and optimizer tensors. Needs Linux.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from bench_export import GIB, MIB, REPOSITORY, digest, forget, interleaved, machine, parsed, sync

sys.path.insert(0, str(REPOSITORY))


def needed(checkpoint):
    """Bytes of every tensor, and the folder that holds them."""
    from converters.formats import open_checkpoint

    catalog = open_checkpoint(checkpoint).catalog
    return sum(tensor.nbytes for tensor in catalog.tensors.values()), catalog.path


def dcp_reads(source, target):
    """Bytes that torch's reader reads for the chunks of a target, per byte of those chunks."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

    stored = FileSystemReader(source).read_metadata()
    wanted = FileSystemReader(target).read_metadata()
    read = size = 0
    for key, entry in wanted.state_dict_metadata.items():
        # fp32_param is the older name of what a reshard calls param
        here = stored.state_dict_metadata.get(key) or stored.state_dict_metadata.get(
            key.replace("optimizer.state.param.", "optimizer.state.fp32_param.")
        )
        if here is None or not hasattr(entry, "chunks"):
            continue
        name = key if key in stored.state_dict_metadata else key.replace("state.param.", "state.fp32_param.")
        for item in create_read_items_for_chunk_list(name, here, entry.chunks):
            read += stored.storage_data[item.storage_index].length
        size += sum(chunk.sizes.numel() for chunk in entry.chunks) * entry.properties.dtype.itemsize
    return read / size


def run(source, work, tp, rounds, extra):
    copy, out = work / "copy", work / "out"
    ours = [sys.executable, "-m", "distckpt_cli", "reshard", str(source), str(out)]
    todo = {
        "cp": (["cp", "-r", str(source), str(copy)], lambda: sync(copy), copy),
        "ours": ([*ours, "--tp", str(tp), "--progress", "off", *extra], None, out),
    }
    digests, amplified = set(), []

    def look(route, made):
        if route == "ours":
            digests.add(digest(made))
            if not amplified:
                amplified.append(dcp_reads(source, next(made.glob("*/.metadata")).parent))

    results = interleaved(todo, rounds, lambda: forget(source), look)
    return results, len(digests) == 1, amplified[0]


def row(tp, results, floor, same, amplified):
    ours, cp = results["ours"], results["cp"]
    ratios = [mine["wall"] / base["wall"] for mine, base in zip(ours, cp, strict=True)]
    wall, base = (statistics.median(run["wall"] for run in runs) for runs in (ours, cp))
    read = statistics.median(run["rchar"] for run in ours) / floor
    cpu, base_cpu = (statistics.median(run["cpu"] for run in runs) for runs in (ours, cp))
    anonymous = max(run["anonymous"] for run in ours) / MIB
    print(
        f"{tp:6} {base:8.2f} {wall:8.2f} {statistics.median(ratios):7.2f} {min(ratios):6.2f}"
        f" {base_cpu:7.2f} {cpu:7.2f} {anonymous:9.0f}"
        f" {read:8.4f} {amplified:8.2f} {'yes' if same else 'NO':>6}"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--tp", type=int, action="append", required=True, help="a target; may be repeated")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--dir", type=Path, default=None, help="where to write; by default beside the checkpoint")
    parser.epilog = "What follows -- are options for reshard."
    asked, extra = parsed(parser)
    floor, source = needed(asked.checkpoint)
    size = sum(path.stat().st_size for path in source.rglob("*") if path.is_file())
    print(f"{source.name}: {size / GIB:.2f} GiB")
    print(f"{machine()}; n = {asked.runs}, interleaved, cold cache")
    print(
        f"{'to tp':>6} {'cp s':>8} {'ours s':>8} {'ratio':>7} {'least':>6} {'anon MiB':>9} {'read x':>8} {'dcp x':>8} same"
    )
    failed = False
    with tempfile.TemporaryDirectory(dir=asked.dir or source.parent.parent, prefix="bench-") as name:
        for tp in asked.tp:
            results, same, amplified = run(source, Path(name), tp, asked.runs, extra)
            row(tp, results, floor, same, amplified)
            failed = failed or not same
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
