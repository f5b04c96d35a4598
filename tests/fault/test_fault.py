"""A failing system call at any point of a command: the result is complete or absent, the source untouched, a rerun good.

The faults are injected by `fault.c`, loaded with LD_PRELOAD into a warm process (`server.py`) that forks for every case.
"""

import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import copy_golden, run_cli, tree, write_llama

HERE = Path(__file__).parent
COMPILER = shutil.which("gcc") or shutil.which("cc")

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C compiler: faults cannot be injected")

WRITING = ("write", "pwrite", "fsync", "rename", "open", "mkdir", "fallocate", "ftruncate", "close", "unlink", "rmdir")
READING = ("read", "pread", "preadv", "open", "close")
ACTIONS = {
    **dict.fromkeys(("write", "pwrite"), ("EIO", "ENOSPC", "EDQUOT", "EINTR", "SHORT", "KILL", "AFTER")),
    **dict.fromkeys(("read", "pread", "preadv"), ("EIO", "ESTALE", "EINTR", "SHORT")),
    "fsync": ("EIO", "ENOSPC", "KILL", "AFTER"),
    "rename": ("EIO", "ENOSPC", "KILL", "AFTER"),
    "open": ("EIO", "EACCES", "EINTR", "KILL"),
    "mkdir": ("EIO", "ENOSPC", "EACCES", "KILL", "AFTER"),
    "fallocate": ("EIO", "ENOSPC", "EINTR", "EOPNOTSUPP", "KILL", "AFTER"),
    "ftruncate": ("EIO", "ENOSPC", "EINTR", "KILL"),
    "close": ("EIO", "ENOSPC", "EINTR", "KILL"),
    "unlink": ("EIO", "KILL", "AFTER"),
    "rmdir": ("EIO", "KILL", "AFTER"),
}
HARMLESS = {"EINTR", "SHORT", "EOPNOTSUPP"}  # to be retried; closing is over even if interrupted


class Server:
    """The warm process."""

    def __init__(self, folder):
        library = folder / "fault.so"
        command = [COMPILER, "-Wall", "-Werror", "-O1", "-shared", "-fPIC", "-o", library, HERE / "fault.c", "-ldl"]
        subprocess.run(command, check=True)
        self.log = folder / "log"
        environment = os.environ | {"LD_PRELOAD": str(library), "PYTHONDONTWRITEBYTECODE": "1"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen([sys.executable, HERE / "server.py"], env=environment, **pipes)
        while (line := self.process.stdout.readline()) != "ready\n":
            assert line, "the server did not start"

    def run(self, argv, call="", nth=0, action="NONE", path="/"):
        request = {"argv": [*map(str, argv)], "call": call, "nth": nth, "action": action, "path": str(path)}
        self.process.stdin.write(json.dumps(request | {"log": str(self.log)}) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        return answer["status"], answer["counts"], self.log.read_text()

    def close(self):
        self.process.stdin.close()
        self.process.wait(timeout=30)
        self.process.stdout.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    made = Server(tmp_path_factory.mktemp("shim"))
    yield made
    made.close()


COMMANDS = {
    "export-hf": ("llama_singleton_weights_tp2pp2", ("export-hf",), ("--max-shard-size", "20kB", "--threads", "2")),
    "reshard": ("llama_dpreshardable_tp2pp2dp2", ("reshard",), ("--tp", "4", "--no-plan-cache")),
    "flat": ("mixtral_adam_ep2tp2", ("reshard",), ("--ep", "2", "--optimizer", "dp_reshardable", "--no-plan-cache")),
    "torch": ("llama_adam_tp2pp2", ("convert",), ("--to", "torch")),
    "safetensors": ("v009_zarr_llama_adam_tp2pp2", ("convert",), ("--to", "safetensors", "--max-shard-size", "20kB")),
}
"""Source, command and options; the destination stands between."""


class Case:
    """A command whose points of failure are tried one after the other."""

    def __init__(self, server, root, command="export-hf", *more):
        golden, verb, options = COMMANDS[command]
        self.server = server
        self.source = copy_golden(golden, root / "source" / "iter_0000010")
        self.out = root / "dst" / "out"
        self.argv = [*verb, self.source, self.out, "--progress", "off", *options, *more]
        self.before = tree(self.source)
        self.stats = self.times()
        self.counts = {}
        for area in (self.source, self.out.parent):
            # one counted run per area: what is counted depends on the path
            shutil.rmtree(self.out.parent, ignore_errors=True)
            self.prepare()
            code, self.counts[area], text = server.run(self.argv, "any", 0, "NONE", area)
            assert code == 0, text
        self.wanted = contents(self.out)

    def prepare(self):
        """Hook: what lies at the destination before a run."""

    def times(self):
        return {path: path.stat().st_mtime_ns for path in self.source.rglob("*")}

    def clean(self):
        shutil.rmtree(self.out.parent, ignore_errors=True)
        self.prepare()

    def points(self, area, calls):
        for call in calls:
            for nth in range(1, self.counts[area][call] + 1):
                for action in ACTIONS[call]:
                    yield call, nth, action

    def check(self, area, call, nth, action):
        """One fault: the invariants, then a run without faults."""
        self.clean()
        code, _, text = self.server.run(self.argv, call, nth, action, area)
        where = f"{call} {nth} {action} at {area.name}: exit {code}\n{text}"
        assert self.times() == self.stats, where
        complete = self.complete()
        assert "Traceback" not in text, where
        assert "internal error" not in text, where
        if action in ("KILL", "AFTER"):
            assert code == -9 or (code == 0 and complete), where
        elif action in HARMLESS and call != "open":
            assert (code, complete) == (0, True) or (call == "close" and code in (5, 0)), where
        else:
            assert code in ((3, 5, 0) if area == self.source else (5, 0)), where
        if code == 0:
            assert complete, where
        elif code > 0:
            assert "error: " in text, where
        again, _, text = self.server.run(self.argv)
        if complete and "--overwrite" not in self.argv:
            assert again == 5, where  # it exists: published before the failure
        else:
            assert again == 0, f"{where}\nthen exit {again}\n{text}"
        assert self.complete(), where
        assert [path.name for path in self.out.parent.iterdir()] == ["out"], where
        return code, complete

    def complete(self):
        """Whether the destination holds the result; anything but that and nothing is a violation."""
        if not self.out.exists():
            return False
        assert contents(self.out) == self.wanted
        return True


def contents(path):
    return tree(path) if path.is_dir() else path.read_bytes()


@pytest.fixture(scope="module")
def case(server, tmp_path_factory):
    return Case(server, tmp_path_factory.mktemp("case"))


def sweep(case, area, calls, step=1, offset=0):
    tried, published = 0, 0
    for call, nth, action in itertools.islice(case.points(area, calls), offset, None, step):
        _, complete = case.check(area, call, nth, action)
        tried, published = tried + 1, published + complete
    assert tree(case.source) == case.before
    return tried, published


def test_the_shim_counts_and_fails(case):
    """The proof would be empty if nothing failed: known points, known answers."""
    counts = case.counts[case.out.parent]
    assert counts["fsync"] >= 8
    assert counts["pwrite"] >= 10
    assert counts["rename"] == 1
    assert case.counts[case.source]["preadv"] >= 10
    assert case.check(case.out.parent, "pwrite", 1, "ENOSPC") == (5, False)
    case.clean()
    assert "disk is full" in case.server.run(case.argv, "pwrite", 1, "ENOSPC", case.out.parent)[2]
    assert case.check(case.out.parent, "rename", 1, "EIO") == (5, False)
    assert case.check(case.out.parent, "rename", 1, "AFTER") == (-9, True)
    assert case.check(case.out.parent, "fsync", 3, "KILL") == (-9, False)
    assert case.check(case.out.parent, "fallocate", 1, "ENOSPC") == (5, False)
    assert case.check(case.out.parent, "fallocate", 2, "EOPNOTSUPP") == (0, True)
    assert case.check(case.source, "preadv", 2, "EIO") == (3, False)
    assert case.check(case.source, "preadv", 2, "SHORT") == (0, True)


def test_the_last_sync_says_that_the_result_is_there(case):
    last = case.counts[case.out.parent]["fsync"]
    case.clean()
    code, _, text = case.server.run(case.argv, "fsync", last, "EIO", case.out.parent)
    assert code == 5
    assert case.complete()
    assert "is complete" in text
    assert "nothing was published" not in text


def test_a_failing_rename_loses_no_work(case):
    case.clean()
    assert case.server.run(case.argv, "rename", 1, "EIO", case.out.parent)[0] == 5
    code, _, text = case.server.run(case.argv)
    assert (code, case.complete()) == (0, True)
    assert "kept from before" in text


@pytest.mark.parametrize("command", COMMANDS)
def test_faults(server, tmp_path, command):
    """A sample of the points; `--all` tries each of them."""
    case = Case(server, tmp_path, command)
    for area, calls, most in ((case.out.parent, WRITING, 40), (case.source, READING, 15)):
        points = sum(1 for _ in case.points(area, calls))
        tried, _ = sweep(case, area, calls, step=max(1, points // most))
        assert tried >= min(most, points)


@pytest.mark.slow
@pytest.mark.timeout(6000)
@pytest.mark.parametrize("command", COMMANDS)
def test_every_fault(server, tmp_path, command, record_property):
    case = Case(server, tmp_path, command)
    tried = sum(sweep(case, area, calls)[0] for area, calls in ((case.out.parent, WRITING), (case.source, READING)))
    record_property("points", tried)
    print(f"{command}: {tried} points, none violated")
    assert tried >= 300


class Replacing(Case):
    """--overwrite onto something of the user's: at any time either that or the new result is there."""

    def prepare(self):
        (self.out / "sub").mkdir(parents=True)
        (self.out / "theirs.txt").write_text("old")
        (self.out / "config.json").write_text("{}")  # a folder without any such mark is not replaced
        (self.out / "sub" / "more.txt").write_text("old")

    def complete(self):
        assert self.out.exists(), "neither the old nor the new contents are there"
        if (self.out / "theirs.txt").exists():
            assert tree(self.out).keys() == {"theirs.txt", "config.json", "sub/more.txt"}
            return False
        assert tree(self.out) == self.wanted
        return True


def test_faults_while_replacing(server, tmp_path):
    case = Replacing(server, tmp_path, "export-hf", "--overwrite")
    calls = ("rename", "fsync", "unlink", "rmdir")
    tried, published = sweep(case, case.out.parent, calls, step=3)
    assert tried >= 10
    assert published > 1


# ---------------------------------------------------------------------- a disk that is really full


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "small"
    folder.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", folder]).returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_too_small_a_disk_is_refused_before_anything_is_written(small_disk, tmp_path):
    write_llama(tmp_path / "src", layers=2, hidden=256, ffn=512, vocab=2048)
    done = run_cli("export-hf", tmp_path / "src", small_disk / "out", "--progress", "off")
    assert done.returncode == 5
    assert "not enough room" in done.stderr
    assert "bytes are needed" in done.stderr
    assert "1,048,576 are free" in done.stderr
    assert not list(small_disk.iterdir())


def test_a_disk_that_fills_up_meanwhile(small_disk, tmp_path, monkeypatch):
    """Room when it was planned, none when it is written; with room again the same command goes on."""
    from converters import conversion, export
    from converters.errors import DestinationError
    from converters.formats import open_checkpoint

    write_llama(tmp_path / "src", layers=2, hidden=64, ffn=256, vocab=2048)
    plan = export.plan_export(open_checkpoint(tmp_path / "src"), small_disk / "out")
    conversion._need_room(plan.destination, plan.job.bytes_written)
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"x" * (700 << 10))
    monkeypatch.setattr(conversion, "_need_room", lambda *_: None)
    with pytest.raises(DestinationError, match="disk is full") as caught:
        export.run_export(plan)
    assert "free some space" in caught.value.hint
    assert not (small_disk / "out").exists()
    ballast.unlink()
    export.run_export(plan)
    assert (small_disk / "out" / "model.safetensors").exists()
