"""Commands whose system calls are made to fail one after the other, and what must be true after each such failure.

The faults are injected by `fault.c`, loaded with LD_PRELOAD into a warm process (`server.py`) that forks for every case.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import ClassVar, NamedTuple

from harness.checkpoints import GOLDEN, copy_golden, tree

HERE = Path(__file__).parent
COMPILER = shutil.which("gcc") or shutil.which("cc")

LOOKING = ("open", "close", "stat", "list")
READING = ("read", "pread", "preadv", *LOOKING)
WRITING = ("write", "pwrite", "fsync", "rename", "link", "mkdir", "fallocate", "ftruncate", "unlink", "rmdir", *LOOKING)
ACTIONS = {
    **dict.fromkeys(("write", "pwrite"), ("EIO", "ENOSPC", "EDQUOT", "EINTR", "SHORT", "KILL", "AFTER")),
    **dict.fromkeys(("read", "pread", "preadv"), ("EIO", "ESTALE", "EINTR", "SHORT")),
    "fsync": ("EIO", "ENOSPC", "KILL", "AFTER"),
    "rename": ("EIO", "ENOSPC", "KILL", "AFTER"),
    "link": ("EIO", "ENOSPC", "EPERM", "KILL", "AFTER"),
    **dict.fromkeys(("stat", "list"), ("EIO", "ESTALE", "EACCES")),
    "open": ("EIO", "EACCES", "EINTR", "KILL"),
    "mkdir": ("EIO", "ENOSPC", "EACCES", "KILL", "AFTER"),
    "fallocate": ("EIO", "ENOSPC", "EINTR", "EOPNOTSUPP", "KILL", "AFTER"),
    "ftruncate": ("EIO", "ENOSPC", "EINTR", "KILL"),
    "close": ("EIO", "ENOSPC", "EINTR", "KILL"),
    "unlink": ("EIO", "KILL", "AFTER"),
    "rmdir": ("EIO", "KILL", "AFTER"),
}
HARMLESS = {"EINTR", "SHORT", "EOPNOTSUPP"}  # to be retried; closing is over even if interrupted
DEADLY = {"KILL", "AFTER"}


class Ended(NamedTuple):
    """How a run ended: exit code (negative for a signal), calls by name, what it said, bytes it read."""

    code: int
    counts: dict
    text: str
    read: int


class Server:
    """The warm process.

    Args:
        folder: For the library and what runs say.
        shim: Whether system calls can be made to fail.
    """

    def __init__(self, folder, *, shim=True):
        self.folder, self.process = folder, None
        self.environment = environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            environment.pop(name, None)
        if shim:
            library = folder / "fault.so"
            command = [COMPILER, "-Wall", "-Werror", "-O1", "-shared", "-fPIC", "-o", library, HERE / "fault.c", "-ldl"]
            subprocess.run(command, check=True)
            environment["LD_PRELOAD"] = str(library)
        self.launches = 0

    def _ask(self, request):
        """What the process answers; it is started when it is first needed, and anew after a test that gave up on it."""
        if self.process is None:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            command = [sys.executable, HERE / "server.py"]
            self.process = subprocess.Popen(command, env=self.environment, start_new_session=True, **pipes)
            assert self.process.stdout.readline() == "ready\n", "the server did not start"
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            return json.loads(self.process.stdout.readline())
        except BaseException:  # the limit of a test, Ctrl-C: an answer that comes later is nobody's
            self.close()
            raise

    def together(self, runs, **request):
        """Runs several command lines at the same time; see server.py for what else can be said."""
        logs = [self.folder / f"log-{number}" for number in range(len(runs))]
        runs = [run | {"argv": [*map(str, run["argv"])], "log": str(log)} for run, log in zip(runs, logs, strict=True)]
        answer = self._ask(request | {"runs": runs})
        said = [log.read_text() for log in logs]
        assert not answer["late"], said
        return [
            Ended(found["status"], found["counts"], text, found["read"])
            for found, text in zip(answer["runs"], said, strict=True)
        ]

    def run(self, argv, call="", nth=0, action="NONE", path="/", **more):
        """Runs one command line with one fault armed: its exit code, its calls, what it said."""
        return self.together([{"argv": argv, "fault": [call, nth, action, str(path)]} | more])[0][:3]

    def ranks(self, world, argv, more=(), constants=(), env=()):
        """Runs a command line as several ranks; `more` has additions to the runs of some of them, by rank."""
        self.launches += 1
        common = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "TORCHELASTIC_RUN_ID": str(self.launches)}
        runs = []
        for rank in range(world):
            run = {"argv": argv, "constants": dict(constants)} | dict(more).get(rank, {})
            own = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} | dict(env) | run.get("env", {})
            runs.append(run | {"env": own})
        return self.together(runs)

    def close(self):
        """Ends it with all that it has started."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.communicate()
            self.process = None


def folder_of(golden, place):
    """A copy of a golden checkpoint."""
    return copy_golden(golden, place / "iter_0000010")


def tar_of(golden, place):
    """A golden NeMo checkpoint packed as NeMo 1 packs it."""
    place.mkdir()
    path = place / "model.nemo"
    with tarfile.open(path, "w:") as tar:
        tar.add(GOLDEN / golden, arcname=".")
    return path


def contents(path):
    return tree(path) if path.is_dir() else path.read_bytes()


def spread(count, most):
    """At most so many of the numbers from 1 to `count`, the first and the last among them."""
    if count <= most:
        return list(range(1, count + 1))
    return sorted({1 + round(at * (count - 1) / (most - 1)) for at in range(most)})


class Case:
    """A command that makes a destination, and its points of failure.

    Args:
        server: The warm process.
        root: A folder for this case.
        golden: Name of the source.
        argv: The command, with SRC and DST in the places of both.
        make: Makes the source from the golden checkpoint.
    """

    positions = 20  # of each call that are tried; the hundreds of reads and writes of a run are much the same
    constants: ClassVar = {}

    def __init__(self, server, root, golden, *argv, make=folder_of):
        self.server = server
        self.source = make(golden, root / "source")
        self.out = root / "dst" / "out"
        places = {"SRC": self.source, "DST": self.out}
        self.argv = [places.get(word, word) for word in argv]
        self.before, self.stats = contents(self.source), self.times()
        self.counts = {}
        for area in self.areas():
            # one counted run per area: what is counted depends on the path
            self.clean()
            code, self.counts[area], text = self.execute("any", 0, "NONE", area)
            assert code == 0, text
        self.wanted = contents(self.out)

    def areas(self):
        """Paths below which calls fail, and which calls."""
        return {self.out.parent: WRITING, self.source: READING}

    def execute(self, *fault):
        return self.server.run(self.argv, *fault, constants=self.constants)

    def unchanged(self):
        """The source is byte for byte what it was."""
        assert contents(self.source) == self.before

    def prepare(self):
        """Hook: what lies at the destination before a run."""

    def times(self):
        return {path: path.stat().st_mtime_ns for path in (self.source, *self.source.rglob("*"))}

    def clean(self):
        shutil.rmtree(self.out.parent, ignore_errors=True)
        self.prepare()

    def points(self, area, positions=None):
        """What can fail below a path, at so many positions of each call, spread from its first to its last."""
        for call in self.areas()[area]:
            for nth in spread(self.counts[area][call], positions or self.positions):
                for action in ACTIONS[call]:
                    yield call, nth, action

    def check(self, area, call, nth, action):
        """One fault: the invariants, then a run without faults."""
        self.clean()
        code, _, text = self.execute(call, nth, action, area)
        where = f"{call} {nth} {action} at {area.name}: exit {code}\n{text}"
        assert self.times() == self.stats, where
        complete = self.complete()
        assert "Traceback" not in text, where
        assert "internal error" not in text, where
        self.judge(area, call, action, code, complete, where)
        if code == 0:
            assert complete, where
        elif code > 0:
            assert self.says_why(code, text), where
        self.again(complete, where)
        assert self.complete(), where
        self.tidy(where)
        return code, complete

    def says_why(self, code, text):
        return "error: " in text

    def judge(self, area, call, action, code, complete, where):
        """Which exit codes there may be."""
        if action in DEADLY:
            assert code == -9 or (code == 0 and complete), where
        elif action in HARMLESS and call != "open":
            assert (code, complete) == (0, True) or (call == "close" and code in (5, 0)), where
        else:
            assert code in ((3, 5, 0) if area == self.source else (5, 0)), where

    def again(self, complete, where):
        """The same command without a fault has to complete what is not complete; returns what it says."""
        again, _, text = self.server.run(self.argv)
        if complete and "--overwrite" not in self.argv:
            assert again == 5, where  # it exists: published before the failure
            if len(list(self.out.parent.iterdir())) > 1:  # what tidying up could not remove, the next run does
                assert self.server.run([*self.argv, "--overwrite"])[0] == 0, where
        else:
            assert again == 0, f"{where}\nthen exit {again}\n{text}"
        return text

    def tidy(self, where):
        assert [path.name for path in self.out.parent.iterdir()] == ["out"], where

    def complete(self):
        """Whether the destination holds the result; anything but that and nothing is a violation."""
        if not self.out.exists():
            return False
        assert contents(self.out) == self.wanted, f"{self.out.name} is neither absent nor right"
        return True


class Resuming(Case):
    """The second run of a command, which goes on with what a killed one has left.

    Attributes:
        lost: A file of the unfinished result that is gone meanwhile; then the command begins anew.
    """

    lost = ""

    def prepare(self):
        ended = self.server.together([{"argv": self.argv, "phase": ["checking", "KILL"]}])
        assert ended[0].code == -9, ended
        if self.lost:
            (self.out.with_name(f".{self.out.name}.distckpt-partial") / self.lost).unlink()


class BeginningAnew(Resuming):
    """The second run of a command, which cannot go on with what a killed one has left."""

    lost = "model-00002-of-00004.safetensors"


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


class Swapping(Replacing):
    """The same where two folders cannot be exchanged in one step, as on NFS."""

    constants: ClassVar = {"execute.disk._EXCHANGE": 128}

    def complete(self):
        """For a moment neither is in place; the next run puts one there."""
        old = self.out.with_name(".out.distckpt-old")
        if not self.out.exists():
            assert (old / "theirs.txt").exists()
            return False
        return super().complete()


class Manifest(Case):
    """verify --write-manifest: one new file, complete or absent, beside files that nobody touches."""

    def __init__(self, server, root, golden, *argv, **more):
        self.file = root / "source" / "iter_0000010" / "integrity.json"
        super().__init__(server, root, golden, *argv, **more)

    @property
    def out(self):
        return self.file

    @out.setter
    def out(self, path):
        pass

    def areas(self):
        return {self.source: (*WRITING, "read", "pread", "preadv")}

    def times(self):
        return {path: path.stat().st_mtime_ns for path in self.source.rglob("*") if "integrity.json" not in path.name}

    def clean(self):
        for path in self.source.glob("*integrity.json*"):
            path.unlink()

    def judge(self, area, call, action, code, complete, where):
        if action in DEADLY:
            assert code == -9, where
        else:
            assert code in ((0,) if action in HARMLESS and call not in ("open", "close") else (0, 1, 3, 5)), where
        if code in (1, 3):
            assert not complete, where  # what cannot be read is not vouched for

    def says_why(self, code, text):
        return ("damaged" if code == 1 else "error: ") in text

    def again(self, complete, where):
        again, _, text = self.server.run(self.argv)
        assert again == 0, f"{where}\nthen exit {again}\n{text}"
        return text

    def unchanged(self):
        self.clean()
        super().unchanged()

    def tidy(self, where):
        assert [path.name for path in self.source.glob("*integrity.json*")] == ["integrity.json"], where


class Pair(Case):
    """The same command as two ranks, one of which meets the fault."""

    world, victim, positions = 2, 1, 9
    constants: ClassVar = {"execute.rank_sync._ARRIVAL": 1}  # times the timeout
    timeout = 60.0  # seconds until a silent rank is lost

    def check(self, *point):
        """Ranks wait for one that has met a fault and falls silent: not for long, unless the machine is that slow."""
        try:
            self.timeout = 1.0
            return super().check(*point)
        except AssertionError as error:
            if "has not responded" not in str(error) and "did not start" not in str(error):
                raise
            self.timeout = 30.0
            return super().check(*point)
        finally:
            del self.timeout

    def execute(self, *fault):
        more = {self.victim: {"fault": [*fault[:3], str(fault[3])]}}
        request = {"constants": self.constants, "env": {"DISTCKPT_RANK_TIMEOUT": str(self.timeout)}}
        ended = self.server.ranks(self.world, self.argv, more, **request)
        self.codes = [run.code for run in ended]
        hurt, leader = ended[self.victim], ended[0]
        text = "".join(f"rank {rank}, exit {run.code}:\n{run.text}" for rank, run in enumerate(ended))
        return leader.code, hurt.counts, text

    def says_why(self, code, text):
        return "error: " in text or (code == 143 and "stopped" in text)

    def judge(self, area, call, action, code, complete, where):
        others = [found for rank, found in enumerate(self.codes) if rank != self.victim]
        if action in DEADLY:
            # a rank that was killed after the end, or before it came, hinders nobody
            assert self.codes[self.victim] == -9 or set(self.codes) == {0}, where
            assert all(found in (0, 143) for found in others), where
            return
        # who cannot write a word cannot say why it ends; the others then wait for it in vain
        assert len({found == 0 for found in self.codes}) == 1, where
        assert len(set(self.codes) - {143}) <= 1, where
        allowed = (0,) if action in HARMLESS and call not in ("open", "close") else (0, 3, 5, 143)
        assert code in allowed, where


class PairLed(Pair):
    """The fault meets rank 0."""

    victim = 0


SMALL = ("--max-shard-size", "20kB")
RESHARD = ("reshard", "SRC", "DST")
RANKS = (*RESHARD, "--tp", "4", "--threads", "1", "--progress", "off")
COMMANDS = {
    "export-hf": (Case, "llama_singleton_weights_tp2pp2", ("export-hf", "SRC", "DST", *SMALL, "--threads", "2")),
    "reshard": (Case, "llama_dpreshardable_tp2pp2dp2", (*RESHARD, "--tp", "4")),
    "flat": (Case, "mixtral_adam_ep2tp2", (*RESHARD, "--ep", "2", "--optimizer", "dp_reshardable")),
    "torch": (Case, "llama_adam_tp2pp2", ("convert", "SRC", "DST", "--to", "torch")),
    "safetensors": (Case, "v009_zarr_llama_adam_tp2pp2", ("convert", "SRC", "DST", "--to", "safetensors", *SMALL)),
    "legacy": (Case, "llama_adam_tp2pp2", ("convert", "SRC", "DST", "--to", "legacy")),
    "tar": (Case, "nemo1_zarr_llama4_weights_tp2pp2", ("export-hf", "SRC", "DST", *SMALL)),
    "resuming": (Resuming, "llama_singleton_weights_tp2pp2", ("export-hf", "SRC", "DST", *SMALL)),
    "replacing": (Replacing, "llama_singleton_weights_tp2pp2", ("export-hf", "SRC", "DST", "--overwrite")),
    "swapping": (Swapping, "llama_singleton_weights_tp2pp2", ("export-hf", "SRC", "DST", "--overwrite")),
    "manifest": (Manifest, "llama_singleton_weights_tp2pp2", ("verify", "SRC", "--write-manifest")),
    "rank 1": (Pair, "llama_singleton_weights_tp2pp2", RANKS),
    "rank 0": (PairLed, "llama_singleton_weights_tp2pp2", RANKS),
}
"""What has points of failure: how it is judged, the source, the command."""


def case_of(server, root, name, *more):
    """One of `COMMANDS`, ready to be disturbed."""
    kind, golden, argv = COMMANDS[name]
    progress = () if "--progress" in argv else ("--progress", "off")
    make = {"make": tar_of} if name == "tar" else {}
    return kind(server, root, golden, *argv, *progress, *more, **make)
