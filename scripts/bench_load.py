"""What it costs to load a checkpoint into the memory of a job, beside torch's DCP and megatron-core's own load.

    python scripts/make_big.py /tmp/big --layers 34                       # 4.3 GB, TP 4
    python scripts/bench_load.py /tmp/big --tp 4 --tp 8 [--runs 5] [--all-ranks] [--device cuda]

Per round and target, each from a cold page cache, in an order that turns:

  ours   `converters.load`, checksums included
  stream the same with stream=True, every tensor taken; also seconds until the first tensor
  dcp    torch.distributed.checkpoint.load: its own planner's read items for the rank's chunks, its own reader
  mcore  megatron-core's dist_checkpointing.load of the sharded state that a rank of such a job has

A route is a process that loads the part of rank 0; with --all-ranks one for each rank, all at once, and ours loads as one
job (replicas, and checksums of records put together). megatron-core loads only so. Seconds are those of the load, without
Python's start, imports and process groups, of the slowest rank; bytes read are those the kernel was asked for (rchar), of
all ranks, per byte of the result; host memory is the peak of anonymous memory above that before the load, of the largest
rank, result included (dcp and mcore: what is allocated before is not); device memory that of torch's allocator. `same`
compares a tensor's checksum between routes. Weights only. Needs Linux and, for mcore, the `test` extra.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
import zlib
from argparse import Namespace
from pathlib import Path

from bench_export import GIB, MIB, REPOSITORY, environment, field, forget, machine

sys.path.insert(0, str(REPOSITORY))
SAMPLE = "decoder.layers.0.self_attention.linear_proj.weight"


class Meter:
    """Seconds, bytes asked for and peak anonymous memory of what happens inside."""

    def __enter__(self):
        self.base = self.peak = field(os.getpid(), "status", "RssAnon") * 1024
        self.asked = field(os.getpid(), "io", "rchar")
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        self.begin = time.monotonic()
        return self

    def watch(self):
        while not self.over.wait(0.005):
            self.peak = max(self.peak, field(os.getpid(), "status", "RssAnon") * 1024)

    def __exit__(self, *_):
        self.seconds = time.monotonic() - self.begin
        self.over.set()
        self.thread.join()
        self.read = field(os.getpid(), "io", "rchar") - self.asked
        self.host = max(self.peak, field(os.getpid(), "status", "RssAnon") * 1024) - self.base


class Room:
    """Stands for make_big's pool of values: memory to load into."""

    def window(self, shape, dtype, seed):
        import torch

        return torch.empty(tuple(shape), dtype=dtype)


def shards(folder, tp, rank):
    """What a rank of a Llama at this tensor-parallel size holds, as megatron-core's sharded tensors with memory."""
    from converters import load_common, load_metadata
    from make_big import Model

    args = load_common(folder)["args"]
    rows = load_metadata(folder)["embedding.word_embeddings.weight"].shape[0]
    options = Namespace(
        layers=args.num_layers,
        hidden=args.hidden_size,
        ffn=args.ffn_hidden_size,
        heads=args.num_attention_heads,
        groups=args.num_query_groups,
        padded_vocab=rows,
        tp=tp,
        pp=1,
        optimizer=False,
    )
    model = Model(options, Room(), rank)
    model.add_extra_state = lambda *_, **__: None
    return model.fill()


def dcp_chunks(folder, tp, rank):
    """`(stored key, box in it, element type)` of all that a rank holds, as a job's own state dict would ask for it."""
    from converters import Layout
    from converters.box import Box
    from converters.formats import open_checkpoint
    from converters.loading.rank_plan import plan_load

    plan = plan_load(open_checkpoint(folder), Layout(tp=tp), rank)
    boxes = {}
    for item in plan.read_items:
        if item.copies:
            boxes.setdefault(item.source, []).append(item.box)
    for source, tiles in boxes.items():
        info, whole = plan.sources[source], []
        for tile in sorted(tiles, key=lambda box: box.start):  # tiles of one box are behind each other along its rows
            last = whole[-1] if whole else None
            if last and last.start[1:] == tile.start[1:] and last.start[0] + last.shape[0] == tile.start[0]:
                whole[-1] = Box(last.start, (last.shape[0] + tile.shape[0], *tile.shape[1:]))
            else:
                whole.append(tile)
        (part,) = info.parts
        depth = len(part.prefix)
        for box in whole:
            yield part.array.key, Box((*part.prefix, *box.start), (*(1,) * depth, *box.shape)), info.dtype.name


def ours(folder, tp, rank, device, *, job):
    import torch.distributed as dist

    import converters.loading.exchange
    import converters.loading.state  # noqa: F401
    from converters import Layout, load
    from converters.formats import open_checkpoint

    open_checkpoint(folder)  # imports what reads the format, as dcp and mcore have theirs imported

    if job:
        dist.init_process_group("gloo")  # as a training job has one

    def take():
        state = load(folder, Layout(tp=tp), None if job else rank, device=device, broadcast="auto" if job else False)
        return state, state.report.nbytes, state[SAMPLE]

    return take


def stream(folder, tp, rank, device, *, job):
    from converters import Layout, load
    from converters.formats import open_checkpoint

    open_checkpoint(folder)
    if job:
        sys.exit("the route stream is of one rank")

    def take():
        begin = time.monotonic()
        with load(folder, Layout(tp=tp), rank, device=device, stream=True) as tensors:
            state = dict([next(tensors)])
            take.first = time.monotonic() - begin
            state |= tensors
        return state, sum(tensor.nbytes for tensor in state.values() if tensor is not None), state[SAMPLE]

    return take


def dcp(folder, tp, rank, device, *, job):
    import torch
    import torch.distributed.checkpoint as dist_cp
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
    from torch.distributed.checkpoint.planner import LoadPlan
    from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

    parts = {}
    for key, box, kind in dcp_chunks(folder, tp, rank):
        parts.setdefault(key, {})[torch.Size(box.start)] = torch.empty(
            box.shape, dtype=getattr(torch, kind), device=device
        )

    class Chunks(dist_cp.DefaultLoadPlanner):
        def create_local_plan(self):
            items = []
            for key, chunks in parts.items():
                wanted = [ChunkStorageMetadata(at, data.shape) for at, data in chunks.items()]
                items += create_read_items_for_chunk_list(key, self.metadata.state_dict_metadata[key], wanted)
            return LoadPlan(items)

        def resolve_tensor(self, item):
            data = parts[item.dest_index.fqn][item.dest_index.offset]
            for axis, (start, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
                data = data.narrow(axis, start, length)
            return data

        def commit_tensor(self, item, tensor):
            pass

    def take():
        dist_cp.load({}, checkpoint_id=folder, planner=Chunks(), no_dist=True)
        everything = [data for chunks in parts.values() for data in chunks.values()]
        sample = next(d for at, d in parts[SAMPLE.replace("layers.0.", "layers.")].items() if at[0] == 0)
        return parts, sum(data.nbytes for data in everything), sample

    return take


def mcore(folder, tp, rank, device, *, job):
    sys.path.insert(0, str(REPOSITORY / "tests"))
    from oracle import cpu

    cpu.install()
    import torch.distributed as dist
    from megatron.core import dist_checkpointing

    cpu.after_import()
    dist.init_process_group("gloo")  # without the other ranks it cannot place their shards
    state = {f"{key}": shard for key, shard in shards(folder, tp, rank).items()}
    first = next(name for name, shard in state.items() if shard.key.endswith("linear_proj.weight"))

    def take():
        loaded = dist_checkpointing.load(state, str(folder), validate_access_integrity=False)
        tensors = [value for name, value in loaded.items() if name in state]
        return loaded, sum(tensor.nbytes for tensor in tensors), loaded[first]

    return take


ROUTES = {"ours": ours, "stream": stream, "dcp": dcp, "mcore": mcore}


def child(asked):
    """One rank of one route; prints what it measured."""
    import warnings

    import torch

    warnings.filterwarnings("ignore")
    torch.zeros(1).add_(1)
    if asked.device != "cpu":
        torch.zeros(1, device=asked.device)
        torch.cuda.reset_peak_memory_stats()
    take = ROUTES[asked.child](asked.checkpoint, asked.tp[0], asked.rank, asked.device, job=asked.all_ranks)
    with Meter() as meter:
        state, nbytes, sample = take()
        if asked.device != "cpu":
            torch.cuda.synchronize()
    raw = sample.cpu().contiguous().view(torch.uint8).reshape(-1).numpy()
    on_device = torch.cuda.max_memory_allocated() if asked.device != "cpu" else 0
    del state
    answer = {
        "seconds": meter.seconds,
        "first": getattr(take, "first", meter.seconds),
        "read": meter.read,
        "host": meter.host,
        "nbytes": nbytes,
    }
    print(json.dumps(answer | {"device": on_device, "sample": zlib.crc32(raw)}))


def run(route, folder, tp, asked):
    """A route on rank 0, or on all ranks at once."""
    ranks = range(tp) if asked.all_ranks else range(1)
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        port = made.getsockname()[1]
    env = environment() | {"OMP_NUM_THREADS": "1"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        env.pop(name, None)
    processes = []
    for rank in ranks:
        command = [sys.executable, __file__, str(folder), "--child", route, "--tp", str(tp), "--rank", str(rank)]
        command += ["--device", asked.device] + (["--all-ranks"] if asked.all_ranks else [])
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(tp)} if asked.all_ranks else {}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)} if asked.all_ranks else {}
        own = env | (place if route != "dcp" else {})
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=own, text=True))
    answers = []
    for process in processes:
        out, noise = process.communicate()
        if process.returncode:
            sys.exit(f"{route} failed with exit code {process.returncode}:\n{noise[-2000:]}")
        answers.append(json.loads(out.strip().splitlines()[-1]))
    return {
        "seconds": max(answer["seconds"] for answer in answers),
        "first": max(answer["first"] for answer in answers),
        "read": sum(answer["read"] for answer in answers) / sum(answer["nbytes"] for answer in answers),
        "host": max(answer["host"] for answer in answers),
        "device": max(answer["device"] for answer in answers),
        "nbytes": sum(answer["nbytes"] for answer in answers),
        "sample": answers[0]["sample"],
    }


def transfer_rate(device):
    """Bytes a second from pinned memory to the device, and how long reading alone cannot hide."""
    import torch

    host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    for _ in range(2):
        torch.cuda.synchronize()
        begin = time.monotonic()
        there.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
    return host.numel() / (time.monotonic() - begin)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--tp", type=int, action="append", required=True, help="a target; may be repeated")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--route", action="append", choices=list(ROUTES), help="only these")
    parser.add_argument("--all-ranks", action="store_true", help="a process for each rank, all at once")
    parser.add_argument("--device", default="cpu", help="cuda: for ours and dcp; megatron-core's load stays on the CPU")
    parser.add_argument("--json", type=Path, help="also write the medians here")
    parser.add_argument("--child", choices=list(ROUTES), help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        child(asked)
        return 0
    from converters.formats import open_checkpoint

    folder = open_checkpoint(asked.checkpoint).catalog.path
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    who = "all ranks at once" if asked.all_ranks else "rank 0"
    print(f"{folder.name}: {size / GIB:.2f} GiB; {machine()}; {who}, n = {asked.runs}, interleaved, cold cache")
    if asked.device != "cpu":
        print(f"from pinned memory to {asked.device}: {transfer_rate(asked.device) / 1e9:.1f} GB/s")
    head = f"{'to tp':>5} {'route':6} {'result MiB':>10} {'median s':>9} {'least':>7} {'first':>7} {'GB/s':>6} {'x ours':>7}"
    print(f"{head} {'read x':>7} {'host MiB':>9} {'device MiB':>10} same")
    failed, medians = False, {}
    for tp in asked.tp:
        others = ("stream",) if asked.all_ranks else ("mcore",)
        names = asked.route or [name for name in ROUTES if name not in others]
        results = {name: [] for name in names}
        for number in range(asked.runs):
            for name in names if number % 2 else names[::-1]:
                forget(folder)
                results[name].append(run(name, folder, tp, asked))
                print(f"  tp {tp} round {number + 1} {name:5} {results[name][-1]['seconds']:7.2f} s", file=sys.stderr)
        samples = {one["sample"] for runs in results.values() for one in runs}
        base = statistics.median(one["seconds"] for one in results[names[0]])
        medians[tp] = {}
        for name, runs in results.items():
            middle = statistics.median(one["seconds"] for one in runs)
            medians[tp][name] = {"seconds": middle}
            last = runs[-1]
            print(
                f"{tp:5} {name:6} {last['nbytes'] / MIB:10.0f} {middle:9.2f} {min(one['seconds'] for one in runs):7.2f}"
                f" {statistics.median(one['first'] for one in runs):7.2f}"
                f" {last['nbytes'] / middle / 1e9:6.2f} {middle / base:7.2f} {last['read']:7.3f}"
                f" {max(one['host'] for one in runs) / MIB:9.0f} {last['device'] / MIB:10.0f}"
                f" {'yes' if len(samples) == 1 else 'NO'}"
            )
        failed = failed or len(samples) != 1
    if asked.json:
        asked.json.write_text(json.dumps(medians))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
