"""How fast a `.metadata` is read: chunks, size of the file, seconds (elapsed, of the processor), peak memory.

    python scripts/bench_metadata.py [--chunks 1000 128000 1000000] [--slow] [--protocol 4]

The files are pickled from torch's own classes in three shapes: `stacked` (few keys, many chunks each, as Megatron
stacks layers and experts), `keys` (8 chunks per key, as with one key per layer and expert) and `single` (a key for
each chunk). Every reading is a process of its own.
"""

from __future__ import annotations

import argparse
import pickle
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def write(path: Path, chunks: int, shape: str, protocol: int) -> None:
    """A synthetic `.metadata` as rank 0 writes it after gathering every rank's results."""
    import torch
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
        TensorProperties,
        TensorStorageMetadata,
    )

    keys = {"stacked": max(1, min(1000, chunks // 64)), "keys": max(1, chunks // 8), "single": chunks}[shape]
    per_key = chunks // keys
    state, storage, ends = {}, {}, {}
    for key in range(keys):
        name = f"optimizer.state.exp_avg.decoder.layers.{key}.mlp.experts.linear_fc1.weight"
        dims = 1 + key % 3
        tail = (4096, 1024)[: dims - 1]
        items = []
        for chunk in range(per_key):
            offsets = torch.Size((chunk * 14336, *(0 for _ in tail)))
            items.append(ChunkStorageMetadata(offsets, torch.Size((14336, *tail))))
            file = f"__{(key * 7 + chunk) % 512}_{chunk % 2}.distcp"
            length = 14336 * 2 + 1577 + chunk % 64
            # Each rank's results arrive in a pickle of their own, so equal names are not the same object.
            index = MetadataIndex("".join([name[:1], name[1:]]), offsets)
            storage[index] = _StorageInfo(file, ends.get(file, 0), length)
            ends[file] = ends.get(file, 0) + length * 4096
        size = torch.Size((14336 * per_key, *tail))
        state[name] = TensorStorageMetadata(TensorProperties(torch.bfloat16), size, items)
    metadata = Metadata(state, None, storage, StorageMeta("ckpt"), "1.0.0")
    with path.open("wb") as out:
        pickle.dump(metadata, out, protocol)


def read(path: Path, fast: bool) -> None:
    """Print times and peak memory in MiB of reading one file."""
    from converters.formats.dcp.metadata import read_metadata

    start, busy = time.perf_counter(), time.process_time()
    found = read_metadata(path.read_bytes(), fast=fast)
    seconds = time.perf_counter() - start
    count = sum(len(tensor.file) for tensor in found.tensors.values())
    assert not found.stray
    assert all((tensor.file >= 0).all() for tensor in found.tensors.values())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    cpu = time.process_time() - busy
    print(f"{count:>9}  {path.stat().st_size / 2**20:8.1f}  {seconds:8.2f}  {cpu:8.2f}  {peak:9.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, nargs="+", default=[1000, 128_000, 1_000_000])
    parser.add_argument("--protocol", type=int, default=4)
    parser.add_argument("--slow", action="store_true", help="also without columns")
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--shape", default="stacked", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.read:
        read(args.read, not args.slow)
        return
    if args.write:
        write(args.write, args.chunks[0], args.shape, args.protocol)
        return
    print("shape      chunks       MiB   seconds       cpu   peak MiB", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for shape in ("stacked", "keys", "single"):
            for chunks in args.chunks:
                path = Path(folder) / ".metadata"
                common = [sys.executable, __file__, "--protocol", str(args.protocol), "--shape", shape]
                subprocess.run([*common, "--write", str(path), "--chunks", str(chunks)], check=True)
                print(f"{shape:7}", end="  ", flush=True)
                subprocess.run([*common, "--read", str(path)], check=True)
                if args.slow:
                    print("  slow ", end="  ", flush=True)
                    subprocess.run([*common, "--read", str(path), "--slow"], check=True)


if __name__ == "__main__":
    main()
