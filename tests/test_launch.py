"""`distckpt --workers N`: local ranks without a launcher, with the exit code that one process would give."""

import os
import signal
import subprocess
import sys
import time

import pytest
from checkpoints import golden, tree
from cli_support import environment

from distckpt_cli import launch
from distckpt_cli.app import main

SOURCE = golden("llama_adam_tp2pp2")
HIDDEN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID")
RESHARD = ("--tp", 4, "--max-memory", "256KiB", "--threads", 1)
# loaded by every process of a run: each write waits, and says who it is; one may get a signal before it does anything
SLOW = """
import os, sys, time, pathlib
if "distckpt_cli" in sys.orig_argv and "RANK" in os.environ:
    if os.environ.get("VICTIM") == os.environ["RANK"]:
        os.kill(os.getpid(), int(os.environ["SIGNAL"]))
    from converters.execute.worker import Worker
    original = Worker._write
    def scatter(self, *arguments):
        pid = pathlib.Path(os.environ["PIDS"]) / os.environ["RANK"]
        pid.with_suffix(".new").write_text(str(os.getpid()))
        pid.with_suffix(".new").replace(pid)  # whoever sees it can read it
        time.sleep(0.3)
        original(self, *arguments)
    Worker._write = scatter
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


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """What one process makes."""
    into = tmp_path_factory.mktemp("one") / "out"
    assert main([*map(str, ("reshard", SOURCE, into, *RESHARD)), "-q"]) == 0
    return tree(into)


@pytest.fixture
def path(tmp_path):
    """An import path on which the ranks are slow."""
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "sitecustomize.py").write_text(SLOW)
    return os.pathsep.join(filter(None, [str(tmp_path / "path"), environment().get("PYTHONPATH", "")]))


@pytest.fixture
def slow(tmp_path, path):
    """A run that takes long enough to be disturbed, and where its ranks leave their process ids."""
    pids = tmp_path / "pids"
    pids.mkdir()
    env = {"PYTHONPATH": path, "PIDS": str(pids), "DISTCKPT_RANK_TIMEOUT": "5"}
    process = distckpt("--workers", 2, "reshard", SOURCE, tmp_path / "out", *RESHARD, **env)
    deadline = time.monotonic() + 120
    while not all((pids / str(rank)).exists() for rank in range(2)):
        assert process.poll() is None, finish(process)
        assert time.monotonic() < deadline
        time.sleep(0.02)
    yield process, [int((pids / str(rank)).read_text()) for rank in range(2)]
    process.kill()
    process.communicate()


WRONG = {
    "impossible": (("reshard", SOURCE, "DST", "--tp", 3), 4, "4 attention heads cannot be split"),
    "missing": (("reshard", "missing", "DST", "--tp", 1), 3, "missing does not exist"),
    "full": (("reshard", SOURCE, "FULL", "--tp", 1), 5, "already exists"),
    "usage": (("reshard", SOURCE), 2, "missing argument"),
}


@pytest.fixture(scope="module")
def wrong(tmp_path_factory):
    """How runs end that cannot succeed; started all at once."""
    root = tmp_path_factory.mktemp("wrong")
    (root / "full").mkdir()
    (root / "full" / "file").touch()
    places = {"DST": root / "dst", "FULL": root / "full"}
    started = {
        name: distckpt("--workers", 2, *(places.get(word, word) for word in args)) for name, (args, *_) in WRONG.items()
    }
    return {name: finish(process) for name, process in started.items()}


@pytest.mark.parametrize("name", WRONG)
def test_exit_codes_are_precise_and_errors_shown_once(wrong, name):
    (_, code, message), (found, out, err) = WRONG[name], wrong[name]
    assert found == code
    assert err.count("error:") == 1
    assert message in err
    assert not out


def test_a_signal_stops_all_ranks_and_the_same_command_continues(slow, tmp_path, expected):
    process, pids = slow
    process.send_signal(signal.SIGTERM)
    code, _, err = finish(process)
    assert code == 143, err
    assert not any(alive(pid) for pid in pids)
    assert not (tmp_path / "out").exists()
    code, out, err = finish(distckpt("--workers", 3, "reshard", SOURCE, tmp_path / "out", *RESHARD))
    assert code == 0, err
    assert out.count("wrote ") == 1
    assert tree(tmp_path / "out") == expected


@pytest.mark.parametrize(
    ("number", "timeout", "told"),
    [  # killed: only the launcher knows, and need not wait for five times the timeout; suspended: rank 0 finds out
        (signal.SIGKILL, 60, "stopped rank 1 ended with SIGKILL; ending rank 0, where it was not noticed"),
        (signal.SIGSTOP, 0.4, "stopped rank 0 ended with exit code 143; ending rank 1, where it was not noticed"),
    ],
)
def test_a_rank_that_the_others_never_meet(number, timeout, told, tmp_path, path, expected, monkeypatch, capfd):
    monkeypatch.setattr(launch, "_GRACE", 2.0)
    monkeypatch.setattr(launch, "_PATIENCE", 2.0 if number == signal.SIGSTOP else 20.0)
    for name in HIDDEN:
        monkeypatch.delenv(name, raising=False)
    for name, value in (("PYTHONPATH", path), ("VICTIM", "1"), ("SIGNAL", str(int(number)))):
        monkeypatch.setenv(name, value)
    begin = time.monotonic()
    command = [*map(str, ("reshard", SOURCE, tmp_path / "out", *RESHARD, "--rank-timeout", timeout))]
    assert launch.launch(2, command) == 143
    assert time.monotonic() - begin < 30
    _, err = capfd.readouterr()
    assert f"{told}\nhint:  run the same command again" in err
    assert "to abort" not in err  # nobody asked for it
    assert "file system" not in err  # there is one machine only
    assert not (tmp_path / "out").exists()
    monkeypatch.delenv("VICTIM")
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    assert launch.launch(2, command) == 0
    assert tree(tmp_path / "out") == expected


EARLY = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "distckpt_cli.app" and ("RANK" in os.environ) == (os.environ["WHO"] == "ranks"):
            os.kill(os.getpid(), int(os.environ["SIGNAL"]))
sys.meta_path.insert(0, Finder())
if os.environ["WHO"] == "ranks" and "RANK" in os.environ:
    os.kill(os.getpid(), int(os.environ["SIGNAL"]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("who", ["launcher", "ranks"])
def test_a_signal_before_anything_is_imported(who, number, tmp_path):
    """Ctrl-C a moment after the command was typed: no traceback of Python's, whichever process it finds."""
    (tmp_path / "sitecustomize.py").write_text(EARLY)
    path = os.pathsep.join([str(tmp_path), environment()["PYTHONPATH"]])
    command = ("--workers", 2, "reshard", SOURCE, tmp_path / "out", *RESHARD)
    code, out, err = finish(distckpt(*command, PYTHONPATH=path, WHO=who, SIGNAL=str(int(number))))
    assert (code, out, err) == (128 + number, "", f"stopped by {number.name}\n")


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


def test_where_it_does_not_belong(monkeypatch, capsys):
    assert main(["inspect", str(SOURCE), "--workers", "2"]) == 2
    assert "distckpt --workers N inspect" in capsys.readouterr().err
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    assert main(["--workers", "2", "inspect", str(SOURCE)]) == 2
    assert "the ranks are there already" in capsys.readouterr().err


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return False
