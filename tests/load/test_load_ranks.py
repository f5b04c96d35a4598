"""`load` by several processes, as torchrun starts them: bytes read once, exchanged over gloo, and one failure for all."""

import contextlib
import datetime
import hashlib
import itertools
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import types
from pathlib import Path

import pytest

from converters import Layout, load
from converters.box import Box
from converters.errors import DistckptError, Interrupted, RequestError
from converters.events import StopFlag
from converters.formats import open_checkpoint
from converters.loading import job_ranks
from converters.loading.job_ranks import JobRanks, naming_lost_ranks, refuse_differences
from converters.loading.plan import LoadOptions, ReadItem
from converters.loading.rank_plan import plan_load
from converters.loading.rounds import rounds
from harness.checkpoints import REPOSITORY, SCALE, flip, golden, payloads, write_llama
from harness.processes import finish, fork, start

DRIVER = Path(__file__).parents[1] / "harness" / "load_driver.py"


def digest_of(state):
    """As the driver makes it."""
    import torch

    made = hashlib.sha256()
    for name in sorted(state):
        value = state[name]
        made.update(f"{name} {None if value is None else (tuple(value.shape), value.dtype)}".encode())
        if value is not None:
            made.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return made.hexdigest()


def free_port():
    """A port that nobody listens on, and that the system gives to nobody who asks for any: see ip_local_port_range."""
    for at in range(PORTS):
        port = FIRST_PORT + (os.getpid() + at) % PORTS
        with socket.socket() as tried, contextlib.suppress(OSError):
            tried.bind(("127.0.0.1", port))
            return port
    raise AssertionError("all ports are taken")


FIRST_PORT, PORTS = 20_000, 10_000


def run(cases, world, folder, codes=0, gpu=False):
    """The answers of all ranks, by case: [[rank 0, rank 1, ...], ...]. CUDA does not survive a fork."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cases.json").write_text(json.dumps(cases))
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world)}
    shared |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(REPOSITORY)}
    processes = []
    for rank in range(world):
        env = os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        files = folder / "cases.json", folder / f"{rank}.json"
        processes.append(start([sys.executable, DRIVER, *files], env=env) if gpu else fork(DRIVER, *files, env=env))
    errors = [error for _, error in finish(processes)]
    if codes == 0:
        assert [process.returncode for process in processes] == [0] * world, "\n".join(errors)[-3000:]
    answers = [
        json.loads((folder / f"{rank}.json").read_text()) for rank in range(world) if (folder / f"{rank}.json").exists()
    ]
    return [list(row) for row in zip(*answers, strict=codes == 0)]


@pytest.fixture(scope="module")
def big(tmp_path_factory):
    folder = tmp_path_factory.mktemp("big") / "ckpt"
    write_llama(folder, layers=2, hidden=256 * SCALE, ffn=1024 * SCALE, vocab=2048 * SCALE, tp=2, pp=1)
    return folder


@pytest.fixture(scope="module")
def damaged(big, tmp_path_factory):
    """A byte in the columns that the last of four tensor-parallel ranks has; no rank reads all of its record."""
    folder = tmp_path_factory.mktemp("damaged") / "ckpt"
    shutil.copytree(big, folder)
    found = [p for p in payloads(folder) if p[0].endswith("1.mlp.linear_fc2.weight")]
    _, path, offset, size = found[-1]
    flip(path, offset + size - 1)
    return folder


DP2 = {"tp": 2, "dp": 2}


@pytest.fixture(scope="module")
def four(big, damaged, tmp_path_factory):
    """Cases for four ranks, all in one launch."""
    adam, moe = str(golden("llama_adam_tp2pp2")), str(golden("mixtral_adam_ep2tp2"))
    once = {"broadcast": True}
    soon = once | {"timeout": 200}
    copy, other = (str(tmp_path_factory.mktemp(name) / name) for name in ("copy", "other"))
    shutil.copytree(adam, copy)  # times and all
    shutil.copytree(adam, other, copy_function=shutil.copyfile)  # as another run, or iteration, of the same job
    cases = {
        "dp2 tp2": {"path": adam, "layout": DP2, "options": once | {"optimizer": True}},
        "dp4": {"path": str(big), "layout": {"dp": 4}, "options": once},
        "dp4, a group exists": {"path": str(big), "layout": {"dp": 4}, "options": once, "existing": True},
        "a group is bound to a gpu": {"path": str(big), "layout": DP2, "options": once, "existing": "bound"},
        "tp4": {"path": str(big), "layout": {"tp": 4}, "options": once},
        "pp2 dp2": {"path": adam, "layout": {"pp": 2, "dp": 2}, "options": once},
        "experts": {"path": moe, "layout": {"tp": 2, "ep": 2, "dp": 2}, "options": once},
        "tied": {"path": str(golden("qwen2_weights_tp2pp2")), "layout": {"tp": 2, "pp": 2}, "options": once},
        "hf": {"path": adam, "layout": {"dp": 4}, "options": once | {"names": "hf", "dtype": "fp32"}},
        "stream": {"path": str(big), "layout": DP2, "options": once | {"stream": True, "max_memory": 4 << 20}},
        "staged": {"path": str(big), "layout": DP2, "options": once, "staged": "shared"},
        "own gpus": {"path": str(big), "layout": DP2, "options": once, "staged": "own"},
        "own gpus, tp4": {"path": adam, "layout": {"tp": 4}, "options": once | {"dtype": "fp32"}, "staged": "own"},
        "everyone reads": {"path": str(big), "layout": DP2, "options": {"broadcast": False}},
        "auto, little": {"path": str(big), "layout": DP2},
        "auto, slow disk": {"path": str(big), "layout": DP2, "worth": 1, "rates": [1e6, 1e9]},
        "auto, fast disk": {"path": str(big), "layout": DP2, "worth": 1, "rates": [1e9, 1e6]},
        "auto, measured": {"path": str(big), "layout": DP2, "worth": 1},
        "raise": {"path": str(big), "layout": DP2, "options": once, "break": {"rank": 2, "how": "raise"}},
        "raise, no exchange": {
            "path": str(big),
            "layout": {"tp": 4},
            "options": {"broadcast": False},
            "break": {"rank": 1, "how": "raise"},
        },
        "refuse": {"path": str(big), "layout": DP2, "options": once, "break": {"rank": 3, "how": "refuse"}},
        "leave": {
            "path": str(big),
            "layout": DP2,
            "options": once | {"stream": True},
            "break": {"rank": 1, "how": "leave"},
        },
        "begin": {
            "path": str(big),
            "layout": DP2,
            "options": once | {"stream": True},
            "break": {"rank": 1, "how": "begin"},
        },
        "scatter": {"path": str(big), "layout": DP2, "options": soon, "break": {"rank": 2, "how": "scatter"}},
        "scatter, tp4": {"path": adam, "layout": {"tp": 4}, "options": soon, "break": {"rank": 3, "how": "scatter"}},
        "allocate": {"path": str(big), "layout": DP2, "options": soon, "break": {"rank": 2, "how": "allocate"}},
        "damaged together": {"path": str(damaged), "layout": {"tp": 4}},
        "damaged, dp": {"path": str(damaged), "layout": {"dp": 4}, "options": once},
        "all": {"path": str(big), "layout": {"tp": 4}, "options": {"verify": "all"}},
        "world": {"path": str(big), "layout": {"tp": 2}},
        "other rank": {"path": str(big), "layout": {"tp": 4}, "options": {"rank": 0}},
        "alone": {"path": str(big), "layout": {"tp": 2}, "options": {"rank": 1, "broadcast": False}},
        "other checkpoint": {"path": adam, "layout": {"dp": 4}, "options": once, "ranks": {"2": {"path": other}}},
        "other checkpoint, auto": {"path": adam, "layout": {"dp": 4}, "ranks": {"2": {"path": other}}},
        "a copy": {"path": adam, "layout": {"dp": 4}, "options": once, "ranks": {"2": {"path": copy}}},
        "other layout": {
            "path": adam,
            "layout": {"dp": 4},
            "options": once,
            "ranks": {"0": {"layout": {"tp": 2, "dp": 2}}},
        },
        "other world": {"path": adam, "layout": {"dp": 4}, "options": once, "ranks": {"3": {"layout": {"dp": 2}}}},
        "other options": {
            "path": adam,
            "layout": {"dp": 4},
            "options": once,
            "ranks": {
                "1": {"options": {"dtype": "fp32", "broadcast": False}},
                "3": {"options": once | {"stream": True}},
            },
        },
        "again": {"path": str(big), "layout": DP2, "options": once},
    }
    answers = run(list(cases.values()), 4, tmp_path_factory.mktemp("four"))
    return {name: (case, rows) for (name, case), rows in zip(cases.items(), answers, strict=True)}


@pytest.mark.parametrize(
    "name",
    [
        *("dp2 tp2", "dp4", "dp4, a group exists", "a group is bound to a gpu", "tp4", "pp2 dp2", "experts", "tied"),
        *("hf", "stream", "staged", "own gpus", "own gpus, tp4", "again"),
    ],
)
def test_each_byte_is_read_once_and_every_rank_has_all_of_its_own(four, name):
    case, rows = four[name]
    layout, options = (
        Layout(**case["layout"]),
        {k: v for k, v in case["options"].items() if k in ("names", "optimizer", "dtype")},
    )
    reader = open_checkpoint(case["path"])
    needed = set()
    for rank, row in enumerate(rows):
        assert "error" not in row, row
        assert row["digest"] == digest_of(load(case["path"], layout, rank, **options)), rank
        report = row["report"]
        assert report["exchange"] == ("nccl" if case.get("staged") == "own" else "gloo")
        compared = 8 / 7 if options.get("optimizer") else 1  # a master weight's own weight is read beside it
        assert 1 <= (report["bytes_read"] + report["bytes_received"]) / report["bytes_needed"] <= compared
        plan = plan_load(
            reader, layout, rank, LoadOptions(names=options.get("names", "megatron"), optimizer="optimizer" in options)
        )
        needed |= {(item.key, item.nbytes) for item in plan.read_items}
        for item in plan.read_items:
            if weight := plan.sources[item.source].rounds_to:
                common = item.box.intersect(Box.whole(weight.shape))
                needed.add((("beside", *item.key), common.volume * weight.dtype.itemsize if common else 0))
        assert not row["threads"]
        assert row["group"] == bool(case.get("existing"))
    read = [row["report"]["bytes_read"] for row in rows]
    assert sum(read) == sum(nbytes for _, nbytes in needed)
    if name in ("dp4", "hf"):  # shares that differ by one item at the most
        assert max(read) - min(read) <= max(nbytes for _, nbytes in needed)


def test_every_record_is_checked_once_by_the_ranks_together(four):
    """With more tensor-parallel ranks than were saved no rank reads a whole record."""
    rows = [row["report"] for row in four["tp4"][1]]
    reader = open_checkpoint(four["tp4"][0]["path"])
    records = sum(info.chunk_count for info in reader.catalog.tensors.values())
    assert rows[0]["records_unchecked"] == 0
    assert sum(row["records_checked"] for row in rows) == records
    whole = [row["report"]["records_checked"] for row in four["dp4"][1]]
    assert sum(whole) == records


def test_a_record_that_no_rank_reads_whole_is_checked(four):
    for name in ("damaged together", "damaged, dp"):
        rows = four[name][1]
        assert {row["kind"] for row in rows} == {"IntegrityError"}, rows
        assert all("damaged" in row["error"] and "another iteration" in row["hint"] for row in rows)
        assert any("decoder.layers.1.mlp.linear_fc2.weight" in row["error"] for row in rows)


def test_what_ranks_share_is_read_by_all_where_that_is_faster(four):
    for name in ("everyone reads", "auto, little", "auto, fast disk"):
        for rank, row in enumerate(four[name][1]):
            report = row["report"]
            assert report["exchange"] == "read by every rank"
            assert report["bytes_read"] == report["bytes_needed"]
            assert row["digest"] == four["again"][1][rank]["digest"]
    assert "too little" in four["auto, little"][1][0]["report"]["reason"]
    assert "GB/s" in four["auto, fast disk"][1][0]["report"]["reason"]
    assert {row["report"]["exchange"] for row in four["auto, slow disk"][1]} == {"gloo"}
    chosen = {row["report"]["exchange"] for row in four["auto, measured"][1]}
    assert len(chosen) == 1  # whatever it is, all ranks do the same
    assert chosen <= {"gloo", "read by every rank"}


@pytest.mark.parametrize("name", ["raise", "raise, no exchange"])
def test_a_rank_that_fails_stops_all_with_its_message(four, name):
    case, rows = four[name]
    failed = case["break"]["rank"]
    assert rows[failed]["kind"] == "ZeroDivisionError"
    for rank, row in enumerate(rows):
        assert not row["threads"]
        assert not row["group"]
        if rank != failed:
            assert row["error"] == f"rank {failed} failed: ZeroDivisionError: the disk is on fire"


def test_a_rank_that_cannot_begin_stops_all(four):
    rows = four["refuse"][1]
    assert [row["error"] for row in rows] == ["rank 3 failed: this rank does not want to"] * 3 + [
        "this rank does not want to"
    ]
    assert {row["kind"] for row in rows} == {"RequestError"}
    assert {row["hint"] for row in rows} == {"ask it again"}


@pytest.mark.parametrize("name", ["scatter", "scatter, tp4"])
def test_a_rank_that_fails_behind_a_round_stops_all(four, name):
    """What it has exchanged it cannot use: the others are a round further, or through with all of them."""
    case, rows = four[name]
    failed = case["break"]["rank"]
    for rank, row in enumerate(rows):
        assert row["kind"] == ("ZeroDivisionError" if rank == failed else "DistckptError"), row
        assert rank == failed or row["error"] == f"rank {failed} failed: ZeroDivisionError: the disk is on fire"
        assert row["seconds"] < 150


def test_a_rank_without_memory_for_the_exchange_stops_all(four):
    rows = four["allocate"][1]
    assert [row["error"] for row in rows] == [
        "cpu is out of memory" if rank == 2 else "rank 2 failed: cpu is out of memory" for rank in range(4)
    ]
    assert max(row["seconds"] for row in rows) < 150


@pytest.mark.parametrize("name", ["leave", "begin"])
def test_a_caller_that_leaves_its_stream_stops_all(four, name):
    rows = four[name][1]
    assert "error" not in rows[1]
    assert {row["error"] for rank, row in enumerate(rows) if rank != 1} == {
        "rank 1 failed: its caller stopped before all tensors were taken"
    }


def test_the_rest_of_records_is_read_by_one_rank_each(four):
    rows = [row["report"] for row in four["all"][1]]
    assert sum(row["records_unchecked"] for row in rows) == 0
    assert sum(row["bytes_read"] for row in rows) <= 1.02 * sum(row["bytes_needed"] for row in rows)  # nothing was left


def test_ranks_that_are_asked_for_different_things_say_so(four):
    """All with one error, before anything is exchanged: else tensors of two checkpoints come together, or gloo aborts."""
    said = {}
    for name in ("other checkpoint", "other checkpoint, auto", "other layout", "other options"):
        rows = four[name][1]
        assert {row["kind"] for row in rows} == {"RequestError"}, rows
        assert len({(row["error"], row["hint"]) for row in rows}) == 1, rows
        assert not any(row["threads"] or row["group"] for row in rows)
        said[name] = rows[0]["error"].splitlines()
    assert said["other checkpoint"] == said["other checkpoint, auto"]
    what, first, second = said["other checkpoint"]
    assert what == "the ranks of this job do not load the same: checkpoint differs"
    assert re.fullmatch(r"ranks 0..1, 3: .*/llama_adam_tp2pp2/iter_0000010, iteration 10, fingerprint \w{16}", first)
    assert re.fullmatch(r"rank 2: .*/other, iteration 10, fingerprint \w{16}", second)
    assert first[-16:] != second[-16:]
    assert "cp -p" in four["other checkpoint"][1][0]["hint"]
    what, *facts = said["other layout"]
    assert what.endswith(": layout differs")
    assert facts == ["rank 0: Layout(tp=2, dp=2)", "ranks 1..3: Layout(dp=4)"]
    what, *facts = said["other options"]
    assert what.endswith(": dtype, broadcast differ")  # `stream` is each rank's own affair
    assert facts[:2] == ["ranks 0, 2..3: dtype=None", "rank 1: dtype='fp32'"]
    assert facts[2:] == ["ranks 0, 2..3: broadcast=True", "rank 1: broadcast=False"]


def test_a_checkpoint_may_lie_elsewhere_on_some_ranks(four):
    """As where each machine has a copy."""
    assert {row.get("digest") for row in four["a copy"][1]} == {four["a copy"][1][0]["digest"]}
    assert {row["report"]["exchange"] for row in four["a copy"][1]} == {"gloo"}


def test_differences_between_a_thousand_ranks_are_told_in_a_few_lines():
    asked = [{"layout": (str(r % 2), f"layout {r % 2}"), "dtype": (str(r), f"dtype={r}")} for r in range(1000)]
    with pytest.raises(RequestError, match="layout, dtype differ") as caught:
        refuse_differences(asked)
    assert caught.value.details[:2] == [
        "500 ranks, the first of them 0: layout 0",
        "500 ranks, the first of them 1: layout 1",
    ]
    assert caught.value.details[2:] == [*(f"rank {r}: dtype={r}" for r in range(8)), "and 992 more"]
    refuse_differences([asked[0]] * 1000)


def test_processes_that_do_not_fit_the_layout(four):
    alone = four["other world"][1]
    assert alone[3]["error"].startswith("4 processes were started, the layout has 2 ranks")
    assert {row["error"] for row in alone[:3]} == {f"rank 3 failed: {alone[3]['error']}"}
    for row in four["world"][1]:
        assert row["kind"] == "RequestError"
        assert "4 processes were started, the layout has 2 ranks" in row["error"]
    said = [row["error"] for row in four["other rank"][1]]
    assert said[0] == "rank 1 failed: process 1 of the job asked for the tensors of rank 0"
    assert said[2] == "process 2 of the job asked for the tensors of rank 0"
    assert all(row["report"]["reason"] == "this process loads alone" for row in four["alone"][1])


def test_under_torchrun(big, tmp_path):
    """The launcher's own environment; two ranks make a group from it and take it down again."""
    cases = tmp_path / "cases.json"
    cases.write_text(json.dumps([{"path": str(big), "layout": {"dp": 2}, "options": {"broadcast": True}}]))
    starter = tmp_path / "start.py"
    starter.write_text(
        f"import os, sys; sys.path.insert(0, {str(DRIVER.parents[1])!r}); from harness import load_driver; "
        f"load_driver.main({str(cases)!r}, {str(tmp_path)!r} + '/' + os.environ['RANK'] + '.json')"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", starter]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    subprocess.run(command, check=True, capture_output=True, env=environment)
    rows = [json.loads((tmp_path / f"{rank}.json").read_text())[0] for rank in range(2)]
    assert sum(row["report"]["bytes_read"] for row in rows) == rows[0]["report"]["bytes_needed"]
    assert rows[0]["digest"] == rows[1]["digest"] == digest_of(load(big, Layout(), 0))


def test_a_rank_that_dies_leaves_nobody_waiting(big, tmp_path):
    case = {"path": str(big), "layout": {"dp": 2}, "options": {"broadcast": True, "timeout": 200}}
    rows = run([case | {"break": {"rank": 1, "how": "exit"}}], 2, tmp_path / "died", codes=7)
    assert "another rank of the job has ended" in rows[0][0]["error"]
    assert not rows[0][0]["threads"]


def test_what_torch_raises_is_not_always_a_lost_rank():
    with pytest.raises(DistckptError, match="another rank of the job has ended"), naming_lost_ranks():
        raise RuntimeError(
            "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:17068. This is typical"
        )
    with pytest.raises(DistckptError, match=r"^torch.distributed failed\nInvalid device string"), naming_lost_ranks():
        raise RuntimeError("Invalid device string: 'cuda:x'\nsecond line")


def test_a_rank_that_is_stopped_does_not_wait_for_others_for_ever(monkeypatch):
    """Its question was never answered: it asks nothing more, and is not told that another one failed."""
    pending = types.SimpleNamespace(is_completed=lambda: False)
    aborted = []
    group = types.SimpleNamespace(allreduce=lambda *_: pending, abort=lambda: aborted.append(1))
    monkeypatch.setattr("converters.loading.job_ranks._PATIENCE", 0.05)
    ranks = object.__new__(JobRanks)
    ranks.has_left, ranks._stop, ranks._timeout = False, StopFlag(), 0.0
    with pytest.raises(DistckptError, match="has ended or does not answer"):
        ranks.wait(pending, group)
    ranks.has_left, ranks._timeout = False, 1000.0
    ranks._stop.set(2)
    with pytest.raises(Interrupted) as caught:
        ranks.all_true(True, group)
    assert len(aborted) == 2  # else NCCL's kernel stays on the GPU, and all that is asked of it waits
    assert not ranks.all_true(True, group)
    with pytest.raises(Interrupted):
        ranks.raise_any(caught.value)


def test_nccl_may_not_end_the_process(monkeypatch):
    """What torch reads when a communicator is made, and only then."""
    seen = {}

    def made(store, rank, size, options):
        seen.update({name: os.environ.get(name) for name in names}, arguments=(store, rank, size, options._timeout))
        return "group"

    names = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING")
    made.Options = types.SimpleNamespace
    monkeypatch.setattr("torch.distributed.distributed_c10d.ProcessGroupNCCL", made, raising=False)
    monkeypatch.setenv(names[0], "3")
    monkeypatch.delenv(names[1], raising=False)
    limit = datetime.timedelta(seconds=7)
    assert job_ranks._nccl("store", 1, 4, limit) == "group"
    assert seen == dict.fromkeys(names, "0") | {"arguments": ("store", 1, 4, limit)}
    assert (os.environ[names[0]], os.environ.get(names[1])) == ("3", None)


@pytest.mark.gpu
def test_ranks_exchange_between_gpus(big, tmp_path):
    """NCCL where each rank has a GPU of its own; ranks that share one exchange over gloo and go through pinned memory."""
    import torch

    shared = {"path": str(big), "layout": {"dp": 2}, "options": {"broadcast": True, "device": "cuda:0"}}
    own = shared | {"options": {"broadcast": True, "device": "cuda"}}
    cases = [shared, shared | {"options": shared["options"] | {"stream": True, "dtype": "fp32"}}]
    rows = run([*cases, own] if torch.cuda.device_count() > 1 else cases, 2, tmp_path / "gpu", gpu=True)
    want = [digest_of(load(big, Layout(), 0, dtype=dtype)) for dtype in (None, "fp32", None)]
    for number, answers in enumerate(rows):
        assert {row["digest"] for row in answers} == {want[number]}, answers
        assert {row["report"]["exchange"] for row in answers} == {"nccl" if number == 2 else "gloo"}
        assert sum(row["report"]["bytes_read"] for row in answers) == answers[0]["report"]["bytes_needed"]


def test_ranks_need_a_place_to_meet(big, monkeypatch):
    """srun says who a process is, but not where rank 0 listens."""
    for name, value in {
        "SLURM_PROCID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_LOCALID": "0",
        "SLURM_STEP_ID": "0",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RequestError, match="MASTER_ADDR and MASTER_PORT do not say where they meet"):
        load(big, Layout(dp=2))


# ---------------------------------------------------------------------- dealing out


def read_items(sizes):
    return [ReadItem(f"t{n}", Box((0,), (size,)), size, ()) for n, size in enumerate(sizes)]


@pytest.mark.parametrize("members", [2, 3, 8])
def test_items_are_dealt_out_evenly_and_fit(members):
    sizes = [8 << 20] * 37 + [1 << 20] * 50 + [4096] * 200
    made = rounds(read_items(sizes), members, 8 << 20)
    dealt = [read for parts in made for read in parts]
    assert sorted(read.item.nbytes for read in dealt) == sorted(sizes)
    shares = [sum(read.item.nbytes for read in dealt if read.owner == owner) for owner in range(members)]
    assert max(shares) - min(shares) <= 8 << 20
    for parts in made:
        for owner in range(members):
            mine = sorted((read.at, read.item.nbytes) for read in parts if read.owner == owner)
            assert all(at + size <= following for (at, size), (following, _) in itertools.pairwise(mine))
            assert sum(size for _, size in mine) <= max(8 << 20, (32 << 20) // members)
    full = [sum(read.item.nbytes for read in parts) for parts in made[:-1]]
    assert min(full) >= 8 << 20  # batches worth a collective


def test_the_order_of_items_does_not_matter():
    sizes = [5 << 20, 1 << 20, 8 << 20, 64, 3 << 20]
    assert rounds(read_items(sizes), 3, 8 << 20) == rounds(read_items(sizes)[::-1], 3, 8 << 20)


def test_groups_are_the_same_seen_from_every_member():
    reader, layout = open_checkpoint(golden("mixtral_adam_ep2tp2")), Layout(tp=2, pp=2, ep=2, dp=4)
    plans = [plan_load(reader, layout, rank) for rank in range(layout.world_size)]
    for rank, plan in enumerate(plans):
        for members, shared in plan.groups.items():
            assert rank in members
            for other in members:
                assert {f.key for f in plans[other].groups[members]} == {f.key for f in shared}
