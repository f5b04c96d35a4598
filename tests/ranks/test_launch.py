"""`distckpt --workers N`: local ranks without a launcher, with the exit code that one process would give."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from distckpt_cli import launch
from distckpt_cli.app import main
from harness.checkpoints import golden, tree
from harness.cli_support import environment
from harness.processes import finish, is_alive, start, wait_until

SOURCE = golden("llama_adam_tp2pp2")
HIDDEN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID")
RESHARD = ("--tp", 4, "--max-memory", "256KiB", "--threads", 1)
# loaded by every process of a run: its ranks stand still in the middle; one may get a signal before it does anything
ARMED = f"""
import os, sys
if "distckpt_cli" in sys.orig_argv and "RANK" in os.environ:
    if os.environ.get("VICTIM") == os.environ["RANK"]:
        os.kill(os.getpid(), int(os.environ["SIGNAL"]))
    sys.path.append({str(Path(__file__).parents[1])!r})
    from harness import holding
    holding.install()
"""


def distckpt(*args, **env):
    env = {k: v for k, v in environment().items() if k not in HIDDEN} | env
    return start([sys.executable, "-m", "distckpt_cli", *args], env=env)


def how(process):
    """How a process ends: its exit code, stdout, stderr."""
    ((out, err),) = finish([process])
    return process.returncode, out, err


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """What one process makes."""
    into = tmp_path_factory.mktemp("one") / "out"
    assert main([*map(str, ("reshard", SOURCE, into, *RESHARD)), "-q"]) == 0
    return tree(into)


@pytest.fixture
def path(tmp_path):
    """An import path that arms the ranks."""
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "sitecustomize.py").write_text(ARMED)
    return os.pathsep.join(filter(None, [str(tmp_path / "path"), environment().get("PYTHONPATH", "")]))


@pytest.fixture
def running(tmp_path, path):
    """A launcher and the process ids of its ranks, which are at work until they are to stop."""
    pids = tmp_path / "pids"
    pids.mkdir()
    (pids / "hold").touch()
    env = {"PYTHONPATH": path, "PIDS": str(pids), "HOLD": str(pids / "hold"), "HOLD_FROM": "0"}
    process = distckpt("--workers", 2, "reshard", SOURCE, tmp_path / "out", *RESHARD, **env)
    wait_until(lambda: all((pids / str(rank)).exists() for rank in range(2)), process)
    return process, [int((pids / str(rank)).read_text()) for rank in range(2)]


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
    return {name: how(process) for name, process in started.items()}


@pytest.mark.parametrize("name", WRONG)
def test_exit_codes_are_precise_and_errors_shown_once(wrong, name):
    (_, code, message), (found, out, err) = WRONG[name], wrong[name]
    assert found == code
    assert err.count("error:") == 1
    assert message in err
    assert not out


def test_a_signal_stops_all_ranks_and_the_same_command_continues(running, tmp_path, expected):
    process, pids = running
    process.send_signal(signal.SIGTERM)
    code, _, err = how(process)
    assert code == 143, err
    assert not any(is_alive(pid) for pid in pids)
    assert not (tmp_path / "out").exists()
    code, out, err = how(distckpt("--workers", 3, "reshard", SOURCE, tmp_path / "out", *RESHARD))
    assert code == 0, err
    assert out.count("wrote ") == 1
    assert tree(tmp_path / "out") == expected


@pytest.mark.parametrize(
    ("number", "timeout", "told"),
    [  # killed: only the launcher knows, and need not wait for five times the timeout; suspended: rank 0 finds out
        (signal.SIGKILL, 60, "stopped rank 1 ended with SIGKILL; ending rank 0, where it was not noticed"),
        (signal.SIGSTOP, 0.2, "stopped rank 0 ended with exit code 143; ending rank 1, where it was not noticed"),
    ],
)
def test_a_rank_that_the_others_never_meet(number, timeout, told, tmp_path, path, expected, monkeypatch, capfd):
    monkeypatch.setattr(launch, "_GRACE", 0.5)
    monkeypatch.setattr(launch, "_PATIENCE", 0.5 if number == signal.SIGSTOP else 200.0)
    for name in HIDDEN:
        monkeypatch.delenv(name, raising=False)
    for name, value in (("PYTHONPATH", path), ("VICTIM", "1"), ("SIGNAL", str(int(number)))):
        monkeypatch.setenv(name, value)
    begin = time.monotonic()
    command = [*map(str, ("reshard", SOURCE, tmp_path / "out", *RESHARD))]
    assert launch.launch(2, [*command, "--rank-timeout", str(timeout)]) == 143
    assert time.monotonic() - begin < 250
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
    code, out, err = how(distckpt(*command, PYTHONPATH=path, WHO=who, SIGNAL=str(int(number))))
    again = "hint:  run the same command again\n"
    assert (code, out, err) == (128 + number, "", f"stopped by {number.name}\n{again}")


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_publishes_nothing(running, tmp_path, victim):
    process, pids = running
    os.kill(pids[victim], signal.SIGKILL)
    code, _, err = how(process)
    assert code not in (0, 1, 2), err
    assert not (tmp_path / "out").exists()
    assert not is_alive(pids[1 - victim])


def test_ranks_do_not_outlive_their_launcher(running, tmp_path):
    process, pids = running
    process.kill()
    wait_until(lambda: not any(is_alive(pid) for pid in pids))
    assert not (tmp_path / "out").exists()


def test_where_it_does_not_belong(monkeypatch, capsys):
    assert main(["inspect", str(SOURCE), "--workers", "2"]) == 2
    assert "distckpt --workers N inspect" in capsys.readouterr().err
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    assert main(["--workers", "2", "inspect", str(SOURCE)]) == 2
    assert "the ranks are there already" in capsys.readouterr().err
