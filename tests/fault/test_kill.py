"""Runs that are killed or stopped at random times and run again until they are through: the bytes are the same."""

import random
import shutil
import signal
import time

import pytest

from harness.checkpoints import tree, write_llama

TILES = ("--max-memory", "1MiB", "--threads", "2", "--progress", "off")
JOBS = {
    "reshard": ("reshard", "SRC", "DST", "--tp", "4", *TILES),
    "export-hf": ("export-hf", "SRC", "DST", "--max-shard-size", "8MB", *TILES),
    "legacy": ("convert", "SRC", "DST", "--to", "legacy", "--tp", "4", *TILES),
    "torch": ("convert", "SRC", "DST", "--to", "torch", *TILES),
}
SAFE_POINTS = {"execute.run._SAFE_POINT_SECONDS": 0.01}


@pytest.fixture(scope="module")
def llama(memory):
    """A Llama of 76 MB."""
    root = memory()
    assert write_llama(root / "src", layers=8, hidden=512, ffn=2048, vocab=8192) > 70_000_000
    yield root / "src"
    shutil.rmtree(root)


def contents(path):
    return tree(path) if path.is_dir() else path.read_bytes()


class Killed:
    """A job that is killed again and again.

    Attributes:
        kills: Runs that a signal ended.
        rounds: Results that were completed and compared.
        kept: Rounds that took work over from a killed run.
    """

    def __init__(self, server, source, root, name, seed=0):
        self.server, self.random, self.out = server, random.Random(f"{name} {seed}"), root / "dst" / "out"
        places = {"SRC": source, "DST": self.out}
        self.argv = [str(places.get(word, word)) for word in JOBS[name]]
        self.duration = min(self.complete() for _ in range(2))
        self.wanted = contents(self.out)
        self.kills = self.rounds = self.kept = 0

    def complete(self):
        """Seconds of a run that nobody disturbs."""
        shutil.rmtree(self.out.parent, ignore_errors=True)
        begin = time.monotonic()
        assert self.run().code == 0
        return time.monotonic() - begin

    def run(self, kill=None, **more):
        return self.server.together([{"argv": self.argv, "constants": SAFE_POINTS} | more], kill=kill)[0]

    def round(self):
        """One result, after one kill or more."""
        shutil.rmtree(self.out.parent, ignore_errors=True)
        killed, kill = 0, True
        while kill:
            kill = not killed or self.random.random() < 0.3
            number = self.random.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM))
            ended = self.run([self.random.uniform(0.1, 1) * self.duration, number] if kill else None)
            if self.out.exists():
                assert contents(self.out) == self.wanted
            if kill and ended.code not in (0, 5):
                # SIGTERM is taken for a request while there is work that can go on later
                assert ended.code in (-number, 143 if number == signal.SIGTERM else -number), ended
                killed += 1
            elif ended.code == 5:  # it was killed between the rename and the end
                assert "already exists" in ended.text
                assert self.out.exists()
                break
            else:
                assert ended.code == 0, ended
                assert [path.name for path in self.out.parent.iterdir()] == ["out"]
                self.kept += "kept from before" in ended.text
                break  # perhaps faster than the signal
        assert contents(self.out) == self.wanted
        self.kills += killed
        self.rounds += 1


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kills", [3, pytest.param(50, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", JOBS)
def test_killed_at_any_time(server, llama, memory, name, kills, record_property):
    """Four jobs of 50 kills each with `--all`."""
    before = tree(llama)
    job = Killed(server, llama, memory(), name)
    begin = time.monotonic()
    while job.kills < kills:
        assert time.monotonic() - begin < 1500
        job.round()
    shutil.rmtree(job.out.parent)
    assert tree(llama) == before
    assert job.kept >= kills // 20  # work was really taken over
    for figure in ("kills", "rounds", "kept"):
        record_property(figure, getattr(job, figure))
    print(f"{name}: {job.kills} kills, {job.rounds} results, all of them right, {job.kept} with work taken over")
