"""The steps of gpu_check.py, each a function that gives its verdict, notes and a table; see there."""

import contextlib
import dataclasses
import functools
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest import mock

import numpy as np
import torch

from converters import Layout, load
from converters.dtypes import dtype
from converters.errors import RequestError
from converters.formats import open_checkpoint
from converters.io.cast import Caster
from converters.io.gather import Gatherer
from converters.io.platforms import Cuda
from converters.io.sources import Sources
from converters.loading.loader import LoadedState
from converters.loading.plan import LoadOptions
from converters.loading.rank_plan import plan_load
from converters.loading.run import LoadRequest, PreparedLoad
from converters.planning.plan import Op
from harness.checkpoints import write_llama
from harness.device_faults import FAULTS, applied, with_fault
from harness.simulated import Simulated

REPOSITORY = Path(__file__).resolve().parent.parent
MIB, GIB = 1 << 20, 1 << 30
GPU_TESTS = ("tests/load/test_load.py", "tests/unit/test_cast.py", "tests/load/test_load_ranks.py")
_CYCLES = 20_000_000  # of the GPU's clock: about 10 ms
_BF16_BYTES = 400 * MIB


def result(failed, notes, rows=()):
    """What a step gives: what has failed comes first among the notes."""
    return {"verdict": "fail" if failed else "pass", "notes": [*failed, *notes], "rows": [list(row) for row in rows]}


def on_device(device):
    """A context in which `load` has this device."""
    return mock.patch("converters.loading.loader.find_device", return_value=device)


def device_class(asked):
    """The class of the device, made with `()`."""
    return Simulated if asked.simulated else functools.partial(Cuda, 0)


def same(have, want):
    """Whether two states have the same bits."""
    return have.keys() == want.keys() and all(
        value is None or torch.equal(_bytes(value), _bytes(want[name])) for name, value in have.items()
    )


def _bytes(tensor):
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8)


def checkpoint(asked, nbytes=_BF16_BYTES, *, tp=4, padded=True):
    """A Llama of about so many bytes, small on the simulation."""
    hidden, ffn, vocab = (256, 512, 500) if asked.simulated else (2048, 5632, 16000 if padded else 16384)
    layer = 2 * hidden * (3 * hidden + 3 * ffn)
    layers = 2 if asked.simulated else max(1, round((nbytes - 4 * vocab * hidden) / layer))
    folder = asked.dir / f"llama-{layers}-{tp}"
    if not folder.exists():
        write_llama(folder, layers=layers, hidden=hidden, ffn=ffn, vocab=vocab, tp=tp, pp=1)
    return folder


# ---------------------------------------------------------------------- tests


def check_tests(asked):
    """pytest -m gpu."""
    mark = "not gpu and not slow" if asked.simulated else "gpu"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", mark, *GPU_TESTS]
    if asked.simulated:
        command += ["-k", "a_device_casts or does_not_wait"]
    env = os.environ | {"DISTCKPT_TEST_SCALE": "1" if asked.simulated else "8", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True, check=False)
    lines = (done.stdout + done.stderr).strip().splitlines()
    ran = any(" passed" in line for line in lines)
    failed = [] if done.returncode == 0 and ran else [f"pytest ended with {done.returncode}"]
    return result(failed, lines[-1:] if not failed else lines[-30:])


# ---------------------------------------------------------------------- order


class Late(Cuda):
    """A GPU that is behind with everything, and whose memory was another's, who is still to write to it."""

    def __init__(self):
        super().__init__(0)

    def submit(self, stream, work, event, after=()):
        super().submit(stream, lambda: (torch.cuda._sleep(_CYCLES), work()), event, after)

    def do(self, work):
        super().do(lambda: (torch.cuda._sleep(_CYCLES), work()))

    def empty(self, dtype, shape):
        tensor = super().empty(dtype, shape)
        if tensor.numel():
            self.do(lambda: tensor.reshape(-1).view(torch.uint8).fill_(0xA5))
        return tensor


def check_order(asked):
    """Loads onto a late device, with and without faults."""
    folder, late = checkpoint(asked), Simulated if asked.simulated else Late
    cases = [(Layout(), 0, None), (Layout(), 0, "fp32"), (Layout(tp=8), 7, None)]
    failed, rows = [], [("device", "layout", "same bits", "wanted")]
    for fault in (None, *FAULTS):
        for layout, rank, kind in cases if fault is None else cases[-1:]:
            want = load(folder, layout, rank, dtype=kind)
            device = with_fault(late, fault)()
            with on_device(device), applied(fault):
                state = load(folder, layout, rank, device="cuda", dtype=kind)
                equal = _equal(device, state, want, waits=fault is None)
            name = "late" if fault is None else f"late, fault: {fault}"
            rows.append((name, f"tp {layout.tp}, {kind or 'as stored'}", equal, fault is None))
            if equal != (fault is None):
                failed.append(f"{name}: the bits are {'the same' if equal else 'not the same'}")
    return result(failed, [f"{folder.name}: {sum(f.stat().st_size for f in folder.iterdir()) / MIB:,.0f} MiB"], rows)


def _equal(device, state, want, *, waits):
    """Compares as a caller would: behind what was asked of the home stream, and no later."""
    if isinstance(device, Simulated):
        device.wait()
        return same(state, want)
    copies = {name: value if value is None else value.to("cpu") for name, value in state.items()}
    if not waits:
        torch.cuda.synchronize()
    return same(copies, want)


# ---------------------------------------------------------------------- casts


_SHORT = ("float16", "bfloat16")
_BLOCK = 1 << 26


def check_casts(asked):
    """Every element of a type, on the device and on the host."""
    device = device_class(asked)()
    failed, rows = [], [("from", "to", "elements", "different")]

    def compare(source, target, blocks, op=Op.COPY):
        with mock.patch("converters.io.cast.find_device", return_value=device):
            there = Caster("cuda:0")
        here, kinds = Caster("cpu"), (dtype(source), dtype(target))
        count = different = 0
        for bits in blocks:
            results = [np.empty(bits.size * kinds[1].itemsize, np.uint8) for _ in range(2)]
            a, b = (
                caster.cast(bits, *kinds, op, memory) for caster, memory in zip((there, here), results, strict=True)
            )
            count, different = count + bits.size, different + int(np.count_nonzero(a != b))
        rows.append((f"{source}{'' if op is Op.COPY else ' ' + op.value}", target, f"{count:,}", different))
        if different or not count:
            failed.append(f"{source} to {target}: {different:,} of {count:,} differ")

    # of the simulation a sample: it is the host's arithmetic on both sides
    block, step = (1 << 12, 1 << 26) if asked.simulated else (_BLOCK, _BLOCK)
    for target in _SHORT:
        starts = range(0, 1 << 32, step)
        compare("float32", target, (np.arange(at, at + block, dtype=np.uint64).astype("<u4") for at in starts))
    every = np.arange(1 << 16, dtype="<u2")
    forms = [every, every.reshape(256, 256).T, every[::3], every[5:6].reshape(())]  # strided, and of no dimension
    for source in _SHORT:
        for target in ("float32", "float64", *_SHORT):
            for op in (Op.COPY, Op.ADD_ONE, Op.SUBTRACT_ONE) if target != "float64" else (Op.COPY,):
                compare(source, target, forms, op)
    nans = np.array([0x7FC1, 0xFF81, 0x7F81, 0xFFFF], "<u2")
    compare("bfloat16", "float16", [np.array(nan) for nan in nans])
    for source in ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"):
        for target in ("float32", *_SHORT):
            compare(source, target, [np.arange(256, dtype=np.uint8)])
    return result(failed, [], rows)


# ---------------------------------------------------------------------- exchange


def check_exchange(asked):
    """A job of one rank over NCCL, then two ranks on one GPU."""
    failed, notes = [], []
    folder = checkpoint(asked)
    _one_rank(asked, folder, failed, notes)
    _two_ranks(asked, folder, failed, notes)
    return result(failed, notes)


def _free_port():
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return made.getsockname()[1]


def _one_rank(asked, folder, failed, notes):
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    from converters.loading import job_ranks

    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "RANK": "0", "WORLD_SIZE": "1"}
    device = device_class(asked)()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, place))
        if asked.simulated:
            stack.enter_context(mock.patch.object(job_ranks, "_nccl", distributed_c10d.ProcessGroupGloo))
            stack.enter_context(mock.patch.object(dist, "is_nccl_available", return_value=True))
            dist.init_process_group("gloo")
        else:
            torch.cuda.set_device(0)
            dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
        stack.callback(dist.destroy_process_group)
        want = load(folder, Layout(), 0, broadcast=False)

        def take():
            reader = open_checkpoint(folder)
            plan = plan_load(reader, Layout(), 0)
            shared = dataclasses.replace(plan, groups={(0,): plan.read_items})  # all of it goes through the exchange
            options = LoadOptions(broadcast=True, timeout=60.0)
            prepared = PreparedLoad(lambda _: LoadRequest(reader, shared, device), options, 0, in_job=True)
            state = LoadedState(prepared.report)
            state.update(prepared.tensors())
            device.wait()
            return state

        state = take()
        if state.report.exchange != "nccl":
            failed.append(f"the exchange was {state.report.exchange}: {state.report.reason}")
        if not same(state, {name: want[name] for name in state}):
            failed.append("what went through the exchange is not what the host loads")
        notes.append(f"one rank, all through the exchange: {state.report.exchange}, {state.report.nbytes:,} bytes")
        error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        with mock.patch("converters.loading.moving._copy_into", side_effect=error):
            try:
                take()
                failed.append("memory that runs out in a round was not noticed")
            except RequestError as refused:
                notes.append(f"memory that runs out in a round: {refused.message}")
            except torch.OutOfMemoryError:
                notes.append("memory that runs out in a round: torch's own error (the simulation has no words for it)")
        if not same(take(), {name: want[name] for name in state}):
            failed.append("the load after one that ran out of memory is wrong")


def _two_ranks(asked, folder, failed, notes):
    options = {"broadcast": True, "timeout": 60}
    case = {"path": str(folder), "layout": {"dp": 2}, "options": options}
    case |= {"staged": "shared"} if asked.simulated else {"options": options | {"device": "cuda:0"}}
    broken = case | {"break": {"rank": 1, "how": "raise"}}
    work = asked.dir / "two-ranks"
    work.mkdir(exist_ok=True)
    (work / "cases.json").write_text(json.dumps([case, broken, case]))
    place = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "WORLD_SIZE": "2",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    place["PYTHONPATH"] = str(REPOSITORY)
    ranks = [
        subprocess.Popen(
            [sys.executable, REPOSITORY / "tests/harness/load_driver.py", work / "cases.json", work / f"{rank}.json"],
            env=os.environ | place | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]
    codes = [rank.wait() for rank in ranks]
    if any(codes):
        failed.append(f"two ranks: exit codes {codes}")
        return
    rows = zip(*(json.loads((work / f"{rank}.json").read_text()) for rank in range(2)), strict=True)
    first, wrong, again = rows
    if {row.get("digest") for row in (*first, *again)} != {first[0].get("digest")} or "digest" not in first[0]:
        failed.append(f"two ranks on one GPU do not load the same: {[row.get('error') for row in (*first, *again)]}")
    elif {row["report"]["exchange"] for row in first} != {"gloo"}:
        failed.append("two ranks on one GPU have not exchanged over gloo")
    if not all("the disk is on fire" in row.get("error", "") for row in wrong):
        failed.append(f"an error of one of two ranks: {[row.get('error') for row in wrong]}")
    notes.append(f"two ranks on one device: {first[0].get('report', {}).get('exchange')}; an error of one stops both")


# ---------------------------------------------------------------------- throughput


def check_throughput(asked):
    """Bytes a second for each number of threads, beside what disk and bus can do."""
    folder = checkpoint(asked, int(asked.gib * GIB), padded=False)
    files = sorted(folder.glob("*.distcp"))
    size = sum(file.stat().st_size for file in files)
    rows, best = [("threads", "page cache", "read GB/s", "+ checksum GB/s", "+ onto the device GB/s")], 0.0
    for threads in (1, 2) if asked.simulated else (1, 2, 4, 8, 16):
        for cold in (True, False):
            rates = []
            for way in (_read, _checked, _loaded):
                _warm(files, cold=cold)
                begin = time.monotonic()
                nbytes = way(asked, folder, files, threads)
                rates.append(nbytes / (time.monotonic() - begin) / 1e9)
            best = max(best, rates[-1])
            rows.append((threads, "cold" if cold else "warm", *(f"{rate:.2f}" for rate in rates)))
    notes = [f"{size / GIB:.2f} GiB in {len(files)} files", f"the most onto the device: {best:.2f} GB/s"]
    if not asked.simulated:
        from bench_load import transfer_rate

        notes.append(f"ceiling from pinned memory to the device: {transfer_rate('cuda:0') / 1e9:.1f} GB/s")
    return result([] if best > 0 else ["nothing was measured"], notes, rows)


def _warm(files, *, cold):
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED if cold else os.POSIX_FADV_WILLNEED)
        os.close(fd)
        if not cold:
            with file.open("rb", buffering=0) as raw:
                while raw.read(8 * MIB):
                    pass


def _in_threads(threads, work, items):
    queue, lock, total = iter(items), threading.Lock(), []

    def run():
        do, finish = work()
        while True:
            with lock:
                item = next(queue, None)
            if item is None:
                return finish()
            total.append(do(item))

    workers = [threading.Thread(target=run) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return sum(total)


def _read(asked, folder, files, threads):
    pieces = [(file, at) for file in files for at in range(0, file.stat().st_size, 8 * MIB)]
    opened = {file: os.open(file, os.O_RDONLY) for file in files}

    def work():
        buffer = bytearray(8 * MIB)
        return lambda piece: os.preadv(opened[piece[0]], [buffer], piece[1]), lambda: None

    try:
        return _in_threads(threads, work, pieces)
    finally:
        for fd in opened.values():
            os.close(fd)


def _checked(asked, folder, files, threads):
    plan = plan_load(reader := open_checkpoint(folder), Layout(), 0)
    sources = Sources(reader, plan.sources, drop=False)

    def work():
        gatherer = Gatherer(sources)
        return lambda item: gatherer.gather(item.source, item.box).nbytes, gatherer.close

    return _in_threads(threads, work, plan.read_items)


def _loaded(asked, folder, files, threads):
    device = device_class(asked)()
    with on_device(device):
        state = load(folder, Layout(), 0, device="cuda", threads=threads, broadcast=False)
        device.wait()
    return state.report.nbytes


# ---------------------------------------------------------------------- load


def check_load(asked):
    """bench_load.py: at the layout that was saved, and at twice its tensor parallel size; simulated, only there."""
    folder = checkpoint(asked, int(asked.gib * GIB), tp=2 if asked.simulated else 4, padded=False)
    saved = 2 if asked.simulated else 4
    report = asked.dir / "bench-load.json"
    command = [sys.executable, REPOSITORY / "scripts/bench_load.py", folder, "--json", report, "--runs"]
    command += ["1" if asked.simulated else "5", "--device", "cpu" if asked.simulated else "cuda:0"]
    for tp in [2 * saved] if asked.simulated else [saved, 2 * saved]:
        command += ["--tp", str(tp)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return result([f"bench_load.py ended with {done.returncode}"], (done.stderr or done.stdout).splitlines()[-10:])
    rows, failed = [("to tp", "ours s", "dcp.load s", "times as fast", "wanted")], []
    for tp, routes in json.loads(report.read_text()).items():
        ours, dcp = (routes[name]["seconds"] for name in ("ours", "dcp"))
        wanted = 1.5 if int(tp) == saved else 3.0
        rows.append((tp, f"{ours:.2f}", f"{dcp:.2f}", f"{dcp / ours:.2f}", wanted))
        if dcp / ours < wanted and not asked.simulated:
            failed.append(f"tp {tp}: {dcp / ours:.2f} times as fast as dcp.load, wanted {wanted}")
    return result(failed, done.stdout.splitlines()[:2], rows)
