"""Many ranks as processes: torchrun and srun, killed, stopped, broken and resumed. In one process: test_ranks.py."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.checkpoints import flip, golden, payloads, tree, write_llama
from harness.cli_support import ROOT
from harness.processes import fork, start, wait_until
from harness.rank_driver import HURRY_SECONDS
from harness.rank_jobs import DRIVER, ended, plain_environment, ranks, started

MIXTRAL = golden("mixtral_adam_ep2tp2")
RESHARD = ("--tp", "2", "--pp", "2", "--ep", "2", "--max-memory", "128KiB")  # tiles small enough for work for all
SMALL = ("--max-memory", "1MiB", "--max-shard-size", "4MiB")


def start_torchrun(world, program, *args, **env):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", world]
    return start([*command, *program, *args], env=plain_environment(OMP_NUM_THREADS=1, **env))


def torchrun(world, *args, **env):
    return ended([start_torchrun(world, ("-m", "distckpt_cli"), *args, **env)])


def alone(*args):
    return ended([fork(DRIVER, *args, env=plain_environment())])


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
    slurm = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}
    command = [sys.executable, "-m", "distckpt_cli", "reshard", str(MIXTRAL), str(tmp_path / "out"), *RESHARD]
    done = ended([start(command, env=plain_environment(**slurm, SLURM_PROCID=rank)) for rank in range(2)])
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


class Held:
    """Ranks that stand still in the middle of their work, until they are to stop or are let go; see holding.py.

    Attributes:
        pids: The process id of each.
    """

    def __init__(self, folder, into, world, begin):
        self.folder, self._hold = folder, folder / "hold"
        self._hold.touch()
        self.processes = begin({"HOLD": self._hold, "PIDS": folder, "HURRY": folder / "hurry"})
        partial = into.with_name(f".{into.name}.distckpt-partial")
        journals = [partial / (f".journal-{rank}" if rank else ".journal") for rank in range(world)]

        def all_work():
            return all(path.exists() and path.read_bytes().count(b"\n") > 1 for path in journals)

        wait_until(all_work, *self.processes)
        self.pids = {int(path.name): int(path.read_text()) for path in folder.glob("[0-9]")}

    def let_go(self):
        self._hold.unlink()

    def hurry(self):
        """From now on it is soon that a silent rank is lost."""
        (self.folder / "hurry").touch()


@pytest.fixture
def held(tmp_path):
    """A function that starts ranks of `distckpt ARGS`, which writes to `into`; all have begun to work."""
    folder = tmp_path / "held"
    folder.mkdir()

    def begin(world, into, *args, **env):
        return Held(folder, into, world, lambda more: started(world, *args, **env | more))

    return begin


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
    into = tmp_path / "out"
    args = ("export-hf", llama[0], into, *SMALL)
    (tmp_path / "held").mkdir()
    job = Held(tmp_path / "held", into, 3, lambda env: [start_torchrun(3, (DRIVER,), *args, **env)])
    os.kill(job.pids[victim], signal.SIGKILL)
    done = ended(job.processes)
    assert done.codes == [1]  # torchrun's own
    assert f"rank {victim} on " in done.err
    assert "ended without an error message" in done.err
    assert done.err.count("\nstopped") == 1
    assert "run the same command again" in done.err
    assert not into.exists()
    resume(again, llama[0], into, llama[1])


@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_killed_rank_is_noticed_without_a_launcher(victim, held, llama, tmp_path):
    """By its lock, not by its silence, which would take a minute."""
    into = tmp_path / "out"
    job = held(3, into, "export-hf", llama[0], into, *SMALL)
    os.kill(job.pids[victim], signal.SIGKILL)
    done = ended(job.processes)
    assert sorted(done.codes) == [-9, 143, 143]
    assert done.err.count("\nstopped") + done.err.startswith("stopped") == 1
    assert f"rank {victim} on " in done.err
    assert "has not responded" not in done.err
    assert not into.exists()


def test_a_hung_rank_ends_the_job(held, llama, tmp_path):
    into = tmp_path / "out"
    job = held(3, into, "export-hf", llama[0], into, *SMALL)
    begin = time.monotonic()
    os.kill(job.pids[2], signal.SIGSTOP)
    job.hurry()
    done = ended(job.processes[:2], begin)
    assert done.seconds > HURRY_SECONDS - 1  # of which one beat may have passed
    assert done.codes == [143, 143]
    assert "rank 2 on " in done.err
    assert f"has not responded for {HURRY_SECONDS:g} s" in done.err
    assert not into.exists()
    os.kill(job.pids[2], signal.SIGCONT)  # it wakes up, and does not go on
    assert ended(job.processes[2:]).codes == [143]
    resume(2, llama[0], into, llama[1])


# ---------------------------------------------------------------------- what network mounts do


@pytest.fixture(scope="module")
def slow_view(tmp_path_factory):
    """Environment of a process that sees others' files late, on a mount without locks; see shims/slow_view.c."""
    if shutil.which("gcc") is None:
        pytest.skip("no gcc")
    library = tmp_path_factory.mktemp("shim") / "slow_view.so"
    source = Path(__file__).parents[1] / "harness" / "shims" / "slow_view.c"
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
def test_without_locks_a_killed_rank_is_noticed_by_its_silence(held, slow_view, llama, tmp_path):
    into = tmp_path / "out"
    job = held(3, into, "export-hf", llama[0], into, *SMALL, **slow_view)
    os.kill(job.pids[1], signal.SIGKILL)
    job.hurry()
    done = ended(job.processes)
    assert sorted(done.codes) == [-9, 143, 143]
    assert "rank 1 on " in done.err
    assert f"has not responded for {HURRY_SECONDS:g} s" in done.err
    assert not into.exists()
    resume(2, llama[0], into, llama[1])


def test_a_failing_rank_is_the_one_that_is_heard(llama, tmp_path):
    done = ranks(3, "export-hf", llama[0], tmp_path / "out", *SMALL, BUG_RANK=2)
    assert done.codes == [70, 70, 70]
    assert done.err.count("a bug of this rank") == 1
    assert "found by rank 2 on" in done.err
    assert not (tmp_path / "out").exists()


def test_torchrun_reports_the_cause(llama, tmp_path):
    done = ended([start_torchrun(2, (DRIVER,), "export-hf", llama[0], tmp_path / "out", *SMALL, BUG_RANK=1)])
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


def test_a_signal_to_all_is_an_interruption(held, llama, tmp_path):
    into = tmp_path / "out"
    job = held(3, into, "export-hf", llama[0], into, *SMALL)
    for _ in range(2):  # a job manager and a launcher, both to all
        for process in job.processes:
            process.send_signal(signal.SIGTERM)
    done = ended(job.processes)
    assert done.codes == [143] * 3
    assert done.err.count("stopping after") == 1
    assert done.err.count("stopped finished work is kept") == 1
    resume(1, llama[0], into, llama[1])


def test_a_reshard_goes_on_with_another_number_of_ranks(held, resharded, tmp_path):
    """Output records written by ranks of two runs: their checksums are put together from all journals."""
    into = tmp_path / "out"
    job = held(2, into, "reshard", MIXTRAL, into, *RESHARD, "--threads", 1)
    job.processes[1].kill()
    done = ended(job.processes)
    assert done.codes == [143, -9]
    assert not into.exists()
    done = ranks(3, "reshard", MIXTRAL, into, *RESHARD, "--json")
    assert done.codes == [0, 0, 0], done.err
    assert json.loads(done.out)["bytes_kept"] > 0
    assert tree(into) == resharded


def test_a_second_launch_is_refused(held, llama, tmp_path):
    into = tmp_path / "out"
    first = held(2, into, "export-hf", llama[0], into, *SMALL, MASTER_PORT=1)
    second = ranks(2, "export-hf", llama[0], into, *SMALL, MASTER_PORT=2)
    assert second.codes == [5, 5]
    assert second.err.count("another distckpt is writing") == 1
    first.let_go()
    done = ended(first.processes)
    assert done.codes == [0, 0], done.err
    assert tree(into) == llama[1]


def test_torch_is_not_imported(tmp_path):
    code = (
        "import sys; from distckpt_cli.app import main; code = main(sys.argv[1:]);"
        " sys.exit(code or ('torch' in sys.modules and 99))"
    )
    command = [sys.executable, "-c", code, "export-hf", MIXTRAL, tmp_path / "out"]
    env = [plain_environment(RANK=rank, WORLD_SIZE=2, LOCAL_RANK=rank, PYTHONPATH=ROOT) for rank in range(2)]
    assert ended([start(command, env=own) for own in env]).codes == [0, 0]
