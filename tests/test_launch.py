"""`distckpt --workers N`: local ranks without a launcher, with the exit code that one process would give."""

import os
import signal
import subprocess
import sys
import time

import pytest
from checkpoints import golden, run_cli, tree
from cli_support import environment

SOURCE = golden("llama_adam_tp2pp2")
HIDDEN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID")
# loaded by every process of a run: each write waits, and says who it is
SLOW = """
import os, sys, time, pathlib
if "distckpt_cli" in sys.orig_argv and "RANK" in os.environ:
    from converters.worker import Worker
    original = Worker._scatter
    def scatter(self, *arguments):
        (pathlib.Path(os.environ["PIDS"]) / os.environ["RANK"]).write_text(str(os.getpid()))
        time.sleep(0.3)
        original(self, *arguments)
    Worker._scatter = scatter
"""


def distckpt(*args, **env):
    return subprocess.Popen(
        [sys.executable, "-m", "distckpt_cli", *map(str, args)],
        env={k: v for k, v in environment().items() if k not in HIDDEN} | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process):
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


@pytest.fixture
def slow(tmp_path):
    """A run that takes long enough to be disturbed, and where its ranks leave their process ids."""
    (tmp_path / "path").mkdir()
    (tmp_path / "pids").mkdir()
    (tmp_path / "path" / "sitecustomize.py").write_text(SLOW)
    earlier = environment().get("PYTHONPATH", "")
    path = os.pathsep.join(filter(None, [str(tmp_path / "path"), earlier]))
    env = {"PYTHONPATH": path, "PIDS": str(tmp_path / "pids"), "DISTCKPT_RANK_TIMEOUT": "5"}
    args = ("--workers", 2, "reshard", SOURCE, tmp_path / "out", "--tp", 4, "--max-memory", "256KiB", "--threads", 1)
    process = distckpt(*args, **env)
    pids = tmp_path / "pids"
    deadline = time.monotonic() + 30
    while len(list(pids.iterdir())) < 2:
        assert process.poll() is None, finish(process)
        assert time.monotonic() < deadline
        time.sleep(0.02)
    yield process, [int((pids / str(rank)).read_text()) for rank in range(2)]
    process.kill()
    process.communicate()


def test_the_result_is_that_of_one_process(tmp_path):
    code, out, err = finish(distckpt("--workers", 3, "reshard", SOURCE, tmp_path / "three", "--tp", 4))
    assert code == 0, err
    assert out.count("wrote ") == 1
    assert run_cli("reshard", SOURCE, tmp_path / "one", "--tp", "4").returncode == 0
    assert tree(tmp_path / "three") == tree(tmp_path / "one")


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (("reshard", SOURCE, "DST", "--tp", 3), 4, "4 attention heads cannot be split"),
        (("reshard", "missing", "DST"), 3, "missing does not exist"),
        (("reshard", SOURCE, "FULL"), 5, "already exists"),
        (("reshard", SOURCE), 2, "missing argument"),
    ],
)
def test_exit_codes_are_precise_and_errors_shown_once(tmp_path, args, code, message):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    places = {"DST": tmp_path / "dst", "FULL": tmp_path / "full"}
    found, out, err = finish(distckpt("--workers", 2, *(places.get(word, word) for word in args)))
    assert found == code
    assert err.count("error:") == 1
    assert message in err
    assert not out


def test_a_signal_stops_all_ranks_and_the_same_command_continues(slow, tmp_path):
    process, pids = slow
    process.send_signal(signal.SIGTERM)
    code, _, err = finish(process)
    assert code == 143, err
    assert not any(alive(pid) for pid in pids)
    assert not (tmp_path / "out").exists()
    args = ("--workers", 2, "reshard", SOURCE, tmp_path / "out", "--tp", 4, "--max-memory", "256KiB", "--threads", 1)
    code, _, err = finish(distckpt(*args))
    assert code == 0, err
    assert run_cli("reshard", SOURCE, tmp_path / "one", "--tp", "4").returncode == 0
    assert tree(tmp_path / "out") == tree(tmp_path / "one")


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_publishes_nothing(slow, tmp_path, victim):
    process, pids = slow
    os.kill(pids[victim], signal.SIGKILL)
    code, _, err = finish(process)
    assert code not in (0, 1, 2), err
    assert not (tmp_path / "out").exists()
    assert not alive(pids[1 - victim])


def test_ranks_do_not_outlive_their_launcher(slow, tmp_path):
    process, pids = slow
    process.kill()
    deadline = time.monotonic() + 20
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert not (tmp_path / "out").exists()


def test_where_it_does_not_belong():
    code, _, err = finish(distckpt("inspect", SOURCE, "--workers", 2))
    assert code == 2
    assert "distckpt --workers N inspect" in err
    code, _, err = finish(distckpt("--workers", 2, "inspect", SOURCE, RANK="0", WORLD_SIZE="2", LOCAL_RANK="0"))
    assert code == 2
    assert "the ranks are there already" in err


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return False
