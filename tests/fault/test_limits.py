"""Real limits of a process, a machine and a disk: never a wrong result, never a traceback, and the reason is said."""

import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from harness.checkpoints import tree, write_llama

MIB = 1 << 20
needs_root = pytest.mark.skipif(bool(os.geteuid()), reason="needs root")


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A Llama of 32 MB."""
    root = tmp_path_factory.mktemp("llama")
    write_llama(root / "src")
    return root / "src"


def jobs(source, into):
    """Writing commands by name."""
    more = ("--max-memory", "2MiB", "--threads", "2", "--progress", "off")
    return {
        "reshard": ["reshard", source, into, "--tp", "4", *more],
        "export-hf": ["export-hf", source, into, *more],
        "legacy": ["convert", source, into, "--to", "legacy", "--tp", "4", *more],
        "torch": ["convert", source, into, "--to", "torch", *more],
        "safetensors": ["convert", source, into, "--to", "safetensors", *more],
    }


JOBS = tuple(jobs("", ""))
SAMPLED = [*JOBS[:2], *(pytest.param(name, marks=pytest.mark.slow) for name in JOBS[2:])]


def contents(path):
    return tree(path) if path.is_dir() else path.read_bytes()


@pytest.fixture(scope="module")
def wanted(server, llama, tmp_path_factory):
    """What each command makes without limits."""
    made = {}
    for name in JOBS:
        into = tmp_path_factory.mktemp(name) / "out"
        assert server.together([{"argv": jobs(llama, into)[name]}])[0].code == 0
        made[name] = contents(into)
        shutil.rmtree(into.parent)
    return made


def failed_well(ended, into, *codes):
    assert ended.code in codes, ended
    assert "error: " in ended.text
    assert "Traceback" not in ended.text
    assert "internal error" not in ended.text
    assert not into.exists()


# ---------------------------------------------------------------------- of a process


@pytest.mark.parametrize("name", SAMPLED)
def test_files_may_not_be_large(server, llama, wanted, tmp_path, name):
    """RLIMIT_FSIZE; with the limit gone the same command goes on."""
    into = tmp_path / "out"
    run = {"argv": jobs(llama, into)[name]}
    for most in (8192, 1 * MIB):
        failed_well(server.together([run | {"limits": {"FSIZE": most}}])[0], into, 5)
    assert server.together([run])[0].code == 0
    assert contents(into) == wanted[name]


@pytest.mark.parametrize("name", SAMPLED)
def test_few_files_may_be_open(server, llama, wanted, tmp_path, name):
    """RLIMIT_NOFILE, from far too few to enough."""
    codes = []
    for number, most in enumerate((3, 8, 10, 12, 14, 18, 24, 40)):
        into = tmp_path / str(number) / "out"
        ended = server.together([{"argv": jobs(llama, into)[name], "limits": {"NOFILE": most}}])[0]
        codes.append(ended.code)
        if ended.code:
            failed_well(ended, into, 3, 5)
        else:
            assert contents(into) == wanted[name]
    assert codes[0] != 0
    assert codes[-1] == 0


@contextmanager
def memory_group(most):
    """A control group whose processes may have so many bytes, page cache included; version 1 or 2, whichever is there."""
    name, one, two = f"distckpt-{os.getpid()}", Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    group = (one if one.is_dir() else two) / name
    try:
        group.mkdir()
        limit = group / ("memory.limit_in_bytes" if one.is_dir() else "memory.max")
        limit.write_text(str(most))
        if int(limit.read_text()) > most:
            raise OSError("not in force")
    except OSError as error:
        if group.is_dir():
            group.rmdir()
        pytest.skip(f"no control groups for memory here: {error}")
    try:
        yield group
    finally:
        for _ in range(50):
            try:
                group.rmdir()
                break
            except OSError:
                time.sleep(0.1)


IN_GROUP = """
import os, sys
from pathlib import Path
Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
os.execv(sys.executable, [sys.executable, "-m", "distckpt_cli", *sys.argv[2:]])
"""


def in_group(group, argv):
    command = [sys.executable, "-c", IN_GROUP, group, *argv]
    return subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)


BASELINE = 56 * MIB  # the interpreter and what it has imported; `test_the_baseline_is_measured`


@needs_root
@pytest.mark.parametrize("name", [JOBS[0], *(pytest.param(name, marks=pytest.mark.slow) for name in JOBS[1:])])
def test_memory_is_little_more_than_the_budget(big, disk, name):
    """A control group of 1.5 times the stated budget beside the interpreter: the page cache has to live in it, too."""
    into, budget = disk / "out", 32 * MIB
    argv = jobs(big, into)[name]
    argv[argv.index("--max-memory") + 1] = str(budget)
    with memory_group(BASELINE + budget * 3 // 2) as group:
        done = in_group(group, argv)
    assert done.returncode == 0, done.stderr
    shutil.rmtree(into) if into.is_dir() else into.unlink()


@needs_root
def test_far_too_little_memory_publishes_nothing(big, disk):
    """Negative control: the group's limit is in force."""
    argv = jobs(big, disk / "out")["reshard"]
    argv[argv.index("--max-memory") + 1] = str(256 * MIB)
    argv[argv.index("--threads") + 1] = "8"
    with memory_group(24 * MIB) as group:
        done = in_group(group, argv)
    assert done.returncode != 0
    assert not (disk / "out").exists()


@needs_root
def test_the_baseline_is_measured():
    with memory_group(1 << 30) as group:
        done = in_group(group, ["reshard", "missing", "out", "--tp", "4"])
        assert done.returncode == 3
        peak = group / (
            "memory.max_usage_in_bytes" if (group / "memory.max_usage_in_bytes").exists() else "memory.peak"
        )
        assert int(peak.read_text()) < BASELINE


@pytest.fixture(scope="module")
def disk():
    """A folder whose files are in memory only as long as there is room."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def big(disk):
    """A Llama of 220 MB: more than the limits, several times."""
    assert write_llama(disk / "src", layers=8, hidden=1024, ffn=2816, vocab=16384) > 200_000_000
    return disk / "src"


# ---------------------------------------------------------------------- of a disk


@needs_root
def test_a_source_on_a_read_only_mount(server, llama, wanted, tmp_path):
    mounted = tmp_path / "mounted" / llama.name  # the report names the source
    mounted.mkdir(parents=True)
    if subprocess.run(["mount", "--bind", llama, mounted], check=False).returncode:
        pytest.skip("cannot mount here")
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", mounted], check=True)
        for name in JOBS:
            into = tmp_path / name / "out"
            assert server.together([{"argv": jobs(mounted, into)[name]}])[0].code == 0
            assert contents(into) == wanted[name]
            shutil.rmtree(into.parent)
        assert server.together([{"argv": ["verify", mounted]}])[0].code == 0
        ended = server.together([{"argv": ["verify", mounted, "--write-manifest"]}])[0]
        assert ended.code == 5
        assert "Read-only" in ended.text
        assert server.together([{"argv": ["diff", mounted, llama]}])[0].code == 0
    finally:
        subprocess.run(["umount", mounted], check=True)


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "small"
    folder.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m", "none", folder]).returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("name", SAMPLED)
def test_a_disk_with_less_room_at_every_try(server, llama, wanted, small_disk, name):
    """Found before anything is written, until there is enough."""
    into, ballast = small_disk / "out", small_disk / "ballast"
    for free in (0, 1, 16, 30):
        ballast.write_bytes(b"x" * ((40 - free) * MIB - 8192))
        failed_well(server.together([{"argv": jobs(llama, into)[name]}])[0], into, 5)
        assert {path.name for path in small_disk.iterdir()} <= {"ballast"}
    ballast.unlink()
    assert server.together([{"argv": jobs(llama, into)[name]}])[0].code == 0
    assert contents(into) == wanted[name]


# ---------------------------------------------------------------------- of patience


@pytest.mark.parametrize("rounds", [2, pytest.param(50, marks=pytest.mark.slow)])
def test_many_run_onto_one_destination(server, llama, wanted, tmp_path, rounds):
    """Exactly one wins, and the others say why they do not."""
    for number, name in itertools.islice(enumerate(itertools.cycle(JOBS)), rounds):
        into = tmp_path / str(number) / "out"
        ended = server.together([{"argv": jobs(llama, into)[name]}] * 4)
        assert sorted(run.code for run in ended) == [0, 5, 5, 5], ended
        for run in ended:
            reasons = ("right now", "has just finished", "already exists", "meanwhile")
            assert run.code == 0 or any(reason in run.text for reason in reasons)
        assert contents(into) == wanted[name]
        assert [path.name for path in into.parent.iterdir()] == ["out"]
        shutil.rmtree(into.parent)


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("how", ["touched", "replaced", "cut short", "removed"])
def test_a_source_that_changes_while_it_is_read(server, llama, tmp_path, name, how):
    """Nothing is published, whatever has been read until then."""
    source, into = tmp_path / "src", tmp_path / "dst" / "out"
    shutil.copytree(llama, source)
    victim = sorted(source.glob("*.distcp"))[-1]
    ended = server.together([{"argv": jobs(source, into)[name], "phase": ["working", [how, str(victim)]]}])[0]
    failed_well(ended, into, 1, 3)
    if how == "touched":
        assert "source changed" in ended.text
    shutil.rmtree(tmp_path)


def test_a_slow_run_is_not_refused(server, llama, wanted, tmp_path):
    """Negative control of the above: only slow."""
    into = tmp_path / "dst" / "out"
    ended = server.together([{"argv": jobs(llama, into)["torch"], "phase": ["working", 0.05]}])[0]
    assert ended.code == 0
    assert contents(into) == wanted["torch"]
