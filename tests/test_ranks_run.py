"""Many ranks as processes: torchrun and srun, killed, stopped, broken and resumed. In one process: test_ranks.py."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest
from checkpoints import flip, golden, payloads, tree, write_llama
from cli_support import ROOT, environment

DRIVER = Path(__file__).parent / "rank_driver.py"
MIXTRAL = golden("mixtral_adam_ep2tp2")
RESHARD = ("--tp", "2", "--pp", "2", "--ep", "2", "--max-memory", "128KiB")  # tiles small enough for work for all
SMALL = ("--max-memory", "1MiB", "--max-shard-size", "4MiB")
HIDDEN = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


class Ran(NamedTuple):
    codes: list
    out: str
    err: str
    seconds: float


def finish(processes, begin, timeout):
    try:
        said = [process.communicate(timeout=timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()
    codes = [process.returncode for process in processes]
    return Ran(codes, *("".join(s[n] for s in said) for n in (0, 1)), time.monotonic() - begin)


def popen(command, env):
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def plain_environment(**more):
    return {k: v for k, v in environment().items() if k not in HIDDEN} | more


def start(world, *args, **env):
    """The ranks as a launcher would start them, without one."""
    return [
        popen(
            [sys.executable, str(DRIVER), *map(str, args)],
            plain_environment(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), **env),
        )
        for rank in range(world)
    ]


def ranks(world, *args, timeout=60, **env):
    begin = time.monotonic()
    return finish(start(world, *args, **env), begin, timeout)


def start_torchrun(world, program, *args, **env):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    return popen([*command, *program, *map(str, args)], plain_environment(OMP_NUM_THREADS="1", **env))


def torchrun(world, *args, **env):
    begin = time.monotonic()
    return finish([start_torchrun(world, ("-m", "distckpt_cli"), *args, **env)], begin, 90)


def alone(*args):
    return finish([popen([sys.executable, "-m", "distckpt_cli", *map(str, args)], plain_environment())], 0, 60)


def left_beside(into):
    return sorted(path.name for path in into.parent.iterdir() if path.name.startswith(f".{into.name}."))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A Llama of 32 MB and what one process makes of it."""
    root = tmp_path_factory.mktemp("llama")
    write_llama(root / "src")
    assert alone("export-hf", root / "src", root / "out", *SMALL).codes == [0]
    return root / "src", tree(root / "out")


@pytest.fixture(scope="module")
def resharded(tmp_path_factory):
    """What one process makes of a small Mixtral for another layout."""
    root = tmp_path_factory.mktemp("mixtral")
    done = alone("reshard", MIXTRAL, root / "out", *RESHARD)
    assert done.codes == [0], done.err
    return tree(root / "out")


# ---------------------------------------------------------------------- the same bytes


def test_torchrun_reshards(resharded, tmp_path):
    done = torchrun(2, "reshard", MIXTRAL, tmp_path / "out", *RESHARD)
    assert done.codes == [0], done.err
    assert tree(tmp_path / "out") == resharded
    assert done.out.count("wrote ") == 1
    assert done.err.count("next:") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_torchrun_makes_the_same_bytes(world, llama, resharded, tmp_path):
    assert torchrun(world, "reshard", MIXTRAL, tmp_path / "reshard", *RESHARD).codes == [0]
    assert tree(tmp_path / "reshard") == resharded
    assert torchrun(world, "export-hf", llama[0], tmp_path / "export", *SMALL).codes == [0]
    assert tree(tmp_path / "export") == llama[1]


@pytest.mark.parametrize("world", [3, pytest.param(8, marks=pytest.mark.slow)])
def test_any_number_of_ranks_makes_the_same_bytes(world, resharded, tmp_path):
    done = ranks(world, "reshard", MIXTRAL, tmp_path / "out", *RESHARD, "--json")
    assert done.codes == [0] * world, done.err
    assert tree(tmp_path / "out") == resharded
    answer = json.loads(done.out)  # one document, not one for each rank
    single = json.loads(alone("reshard", MIXTRAL, tmp_path / "alone", *RESHARD, "--json").out)
    for name in ("bytes_read", "bytes_written", "records_checked"):
        assert answer[name] == single[name]


def test_srun(resharded, tmp_path):
    """srun starts processes with these variables; nothing else of it is needed."""
    begin = time.monotonic()
    slurm = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}
    command = [sys.executable, "-m", "distckpt_cli", "reshard", str(MIXTRAL), str(tmp_path / "out"), *RESHARD]
    processes = [popen(command, plain_environment(**slurm, SLURM_PROCID=str(rank))) for rank in range(2)]
    done = finish(processes, begin, 60)
    assert done.codes == [0, 0], done.err
    assert tree(tmp_path / "out") == resharded
    assert done.out.count("wrote ") == 1


@pytest.mark.parametrize("args", [("inspect", MIXTRAL), ("inspect", MIXTRAL, "--json"), ("formats",)], ids=str)
def test_an_answer_is_given_once(args):
    single, several = alone(*args), ranks(2, *args)
    assert several.codes == [0, 0]
    assert several.out == single.out
    assert several.err == single.err


def test_an_error_before_the_work_is_said_once(tmp_path):
    done = ranks(3, "export-hf", tmp_path / "nothing", tmp_path / "out")
    assert done.codes == [3, 3, 3]
    assert done.err.count("error:") == 1
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------------- ranks that fail


def working(pids, into, world, timeout=120):
    """Process ids of the ranks, once each of them has a finished task in its journal."""
    folder = into.with_name(f".{into.name}.distckpt-partial")
    journals = [folder / (f".journal-{rank}" if rank else ".journal") for rank in range(world)]
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if all(path.exists() and path.read_bytes().count(b"\n") > 1 for path in journals):
            return {int(path.name): int(path.read_text()) for path in pids.glob("[0-9]")}
        time.sleep(0.02)
    raise AssertionError("the ranks did not begin to work")


def resume(world, source, into, expected):
    """Runs the same command with so many ranks; what was done before must be kept."""
    args = ("export-hf", source, into, *SMALL, "--json")
    done = alone(*args) if world == 1 else ranks(world, *args)
    assert set(done.codes) == {0}, done.err
    assert json.loads(done.out)["bytes_kept"] > 0
    assert tree(into) == expected
    assert left_beside(into) == []


@pytest.mark.parametrize(
    ("victim", "again"),
    [(1, 3), pytest.param(0, 1, marks=pytest.mark.slow), pytest.param(2, 2, marks=pytest.mark.slow)],
)
def test_a_killed_rank_ends_the_job(victim, again, llama, tmp_path):
    into, pids = tmp_path / "out", tmp_path / "pids"
    pids.mkdir()
    begin = time.monotonic()
    args = ("export-hf", llama[0], into, *SMALL, "--rank-timeout", "20")
    launcher = start_torchrun(3, (str(DRIVER),), *args, SLOW="0.2", PIDS=str(pids))
    try:
        os.kill(working(pids, into, 3)[victim], signal.SIGKILL)
    finally:
        done = finish([launcher], begin, 60)
    assert done.codes == [1]  # torchrun's own
    assert f"rank {victim} on " in done.err
    assert "ended without a word" in done.err
    assert done.err.count("\nstopped") == 1
    assert "run the same command again" in done.err
    assert not into.exists()
    resume(again, llama[0], into, llama[1])


@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_killed_rank_is_noticed_without_a_launcher(victim, llama, tmp_path):
    into, pids = tmp_path / "out", tmp_path / "pids"
    pids.mkdir()
    processes = start(3, "export-hf", llama[0], into, *SMALL, SLOW="0.2", PIDS=str(pids))
    try:
        os.kill(working(pids, into, 3)[victim], signal.SIGKILL)
        begin = time.monotonic()
    finally:
        done = finish(processes, begin, 30)
    assert done.seconds < 12
    assert sorted(done.codes) == [-9, 143, 143]
    assert done.err.count("\nstopped") + done.err.startswith("stopped") == 1
    assert f"rank {victim} on " in done.err
    assert not into.exists()


def test_a_hung_rank_ends_the_job(llama, tmp_path):
    into, pids = tmp_path / "out", tmp_path / "pids"
    pids.mkdir()
    args = ("export-hf", llama[0], into, *SMALL, "--rank-timeout", "3")
    processes = start(3, *args, SLOW="0.3", PIDS=str(pids))
    hung = working(pids, into, 3)[2]
    os.kill(hung, signal.SIGSTOP)
    try:
        begin = time.monotonic()
        done = finish(processes[:2], begin, 30)
        assert 2 < done.seconds < 3 + 10
        assert done.codes == [143, 143]
        assert "rank 2 on " in done.err
        assert "has not responded for 3 s" in done.err
        assert not into.exists()
        os.kill(hung, signal.SIGCONT)  # it wakes up, and does not go on
        assert finish(processes[2:], begin, 30).codes == [143]
    finally:
        os.kill(hung, signal.SIGCONT) if processes[2].poll() is None else None
        processes[2].kill()
    resume(2, llama[0], into, llama[1])


# ---------------------------------------------------------------------- what network mounts do


@pytest.fixture(scope="module")
def slow_view(tmp_path_factory):
    """Environment of a process that sees others' files late, on a mount without locks; see shims/slow_view.c."""
    if shutil.which("gcc") is None:
        pytest.skip("no gcc")
    library = tmp_path_factory.mktemp("shim") / "slow_view.so"
    source = Path(__file__).parent / "shims" / "slow_view.c"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl", "-pthread"], check=True)
    return {"LD_PRELOAD": str(library), "SLOW_VIEW_SECONDS": "0.7", "SLOW_VIEW_NO_LOCKS": "1"}


@pytest.mark.parametrize("seconds", ["0.7", pytest.param("4", marks=pytest.mark.slow)])
def test_ranks_that_see_each_other_late_and_have_no_locks(seconds, slow_view, resharded, tmp_path):
    """A proof, then the writing: what is left of the first list of work must not be taken for the second."""
    into = tmp_path / "out"
    args = ("reshard", MIXTRAL, into, *RESHARD, "--json")
    done = ranks(3, *args, **slow_view | {"SLOW_VIEW_SECONDS": seconds})
    assert done.codes == [0, 0, 0], done.err
    assert tree(into) == resharded
    assert done.seconds > 2 * float(seconds)  # it is seen late
    assert left_beside(into) == []


@pytest.mark.slow
def test_without_locks_a_killed_rank_is_noticed_by_its_silence(slow_view, llama, tmp_path):
    into, pids = tmp_path / "out", tmp_path / "pids"
    pids.mkdir()
    args = ("export-hf", llama[0], into, *SMALL, "--rank-timeout", "4")
    processes = start(3, *args, SLOW="0.3", PIDS=str(pids), **slow_view)
    try:
        os.kill(working(pids, into, 3)[1], signal.SIGKILL)
        begin = time.monotonic()
    finally:
        done = finish(processes, begin, 40)
    assert sorted(done.codes) == [-9, 143, 143]
    assert "rank 1 on " in done.err
    assert "has not responded for 4 s" in done.err
    assert not into.exists()
    resume(2, llama[0], into, llama[1])


def test_a_failing_rank_is_the_one_that_is_heard(llama, tmp_path):
    done = ranks(3, "export-hf", llama[0], tmp_path / "out", *SMALL, SLOW="0.05", BUG_RANK="2")
    assert done.codes == [70, 70, 70]
    assert done.err.count("a bug of this rank") == 1
    assert "found by rank 2 on" in done.err
    assert not (tmp_path / "out").exists()


def test_torchrun_reports_the_cause(llama, tmp_path):
    done = finish(
        [start_torchrun(2, (str(DRIVER),), "export-hf", llama[0], tmp_path / "out", *SMALL, BUG_RANK="1")],
        time.monotonic(),
        60,
    )
    assert done.codes == [1]
    assert "error: internal error: ZeroDivisionError: a bug of this rank" in done.err
    assert "traceback : internal error: ZeroDivisionError" in done.err


def test_damage_that_one_rank_finds_is_published_by_none(llama, tmp_path):
    source = tmp_path / "src"
    shutil.copytree(llama[0], source)
    _, path, offset, nbytes = max(payloads(source), key=lambda entry: entry[0])  # one of the last tensors
    flip(path, offset + nbytes // 2)
    done = ranks(3, "export-hf", source, tmp_path / "out", *SMALL)
    assert done.codes == [1, 1, 1]
    assert done.err.count("is damaged") == 1
    assert not (tmp_path / "out").exists()
    assert left_beside(tmp_path / "out") == []  # it can never become a good result


def test_a_signal_to_all_is_an_interruption(llama, tmp_path):
    into, pids = tmp_path / "out", tmp_path / "pids"
    pids.mkdir()
    processes = start(3, "export-hf", llama[0], into, *SMALL, SLOW="0.2", PIDS=str(pids))
    try:
        working(pids, into, 3)
        for _ in range(2):  # a job manager and a launcher, both to all
            for process in processes:
                process.send_signal(signal.SIGTERM)
        begin = time.monotonic()
    finally:
        done = finish(processes, begin, 30)
    assert done.codes == [143] * 3
    assert done.err.count("stopping after") == 1
    assert done.err.count("stopped finished work is kept") == 1
    resume(1, llama[0], into, llama[1])


def test_a_reshard_goes_on_with_another_number_of_ranks(resharded, tmp_path):
    """Output records written by ranks of two runs: their checksums are put together from all journals."""
    into, pids = tmp_path / "out", tmp_path / "pids"
    pids.mkdir()
    processes = start(2, "reshard", MIXTRAL, into, *RESHARD, "--threads", "1", SLOW="0.03", PIDS=str(pids))
    try:
        working(pids, into, 2)
        processes[1].kill()
        begin = time.monotonic()
    finally:
        done = finish(processes, begin, 30)
    assert done.codes == [143, -9]
    assert not into.exists()
    done = ranks(3, "reshard", MIXTRAL, into, *RESHARD, "--json")
    assert done.codes == [0, 0, 0], done.err
    assert json.loads(done.out)["bytes_kept"] > 0
    assert tree(into) == resharded


def test_a_second_launch_is_refused(llama, tmp_path):
    into, pids = tmp_path / "out", tmp_path / "pids"
    pids.mkdir()
    first = start(2, "export-hf", llama[0], into, *SMALL, SLOW="0.1", PIDS=str(pids), MASTER_PORT="1")
    try:
        working(pids, into, 2)
        second = ranks(2, "export-hf", llama[0], into, *SMALL, MASTER_PORT="2")
        assert second.codes == [5, 5]
        assert second.err.count("another distckpt is writing") == 1
    finally:
        done = finish(first, time.monotonic(), 60)
    assert done.codes == [0, 0], done.err
    assert tree(into) == llama[1]


def test_torch_is_not_imported(tmp_path):
    code = (
        "import sys; from distckpt_cli.app import main; code = main(sys.argv[1:]);"
        " sys.exit(code or ('torch' in sys.modules and 99))"
    )
    command = [sys.executable, "-c", code, "export-hf", str(MIXTRAL), str(tmp_path / "out")]
    both = [
        popen(command, plain_environment(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), PYTHONPATH=str(ROOT)))
        for rank in range(2)
    ]
    assert finish(both, 0, 60).codes == [0, 0]
