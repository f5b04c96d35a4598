"""Power cuts on a real file system: copies of its disk, taken while commands write to it, are mounted and looked at.

An ext4 on a loop device; a copy of the backing file is what a disk would hold if the machine stopped at that moment, as
what is only in the page cache is not in it. Mounting the copy replays the file system's journal, as after a crash.
"""

import os
import shutil
import subprocess
import threading
import time

import pytest
from checkpoints import tree, write_llama

from converters.engine import journal, publish
from converters.engine import run as engine
from converters.formats import open_checkpoint
from converters.targets.export import ExportOptions, plan_export, run_export

MIB = 1 << 20
SIZE = 24 * MIB

pytestmark = [
    pytest.mark.skipif(bool(os.geteuid()), reason="mounting needs root"),
    pytest.mark.skipif(shutil.which("mkfs.ext4") is None, reason="no mkfs.ext4"),
]


def mount(image, folder):
    folder.mkdir(exist_ok=True)
    if subprocess.run(["mount", "-o", "loop", image, folder], capture_output=True, check=False).returncode:
        pytest.skip("no loop devices here")


def umount(folder):
    subprocess.run(["umount", folder], check=True)


class Disk:
    """A file system in a file, on which one result after the other is made until enough copies of it have been taken."""

    def __init__(self, root, source):
        self.image, self.place = root / "memory" / "disk", root / "mounted"
        self.snapshots, self.source = root / "snapshots", source
        self.snapshots.mkdir()
        with self.image.open("wb") as file:
            file.truncate(SIZE)
        subprocess.run(["mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0", self.image], check=True)
        export(source, root / "wanted")
        self.wanted = tree(root / "wanted")
        self.acknowledged = 0

    def work(self, copies):
        """Takes copies; returns for each of them how many results had been acknowledged before it was begun."""
        mount(self.image, self.place)
        told, stop = [], threading.Event()

        def take():
            for number in range(copies):
                time.sleep(0.02)
                acknowledged, found = self.at_one_moment()
                told.append(acknowledged)
                (self.snapshots / str(number)).write_bytes(found)
            stop.set()

        thread = threading.Thread(target=take)
        thread.start()
        try:
            while not stop.is_set():
                number = self.acknowledged
                export(self.source, self.place / str(number))
                self.acknowledged += 1
                if number >= 8:
                    shutil.rmtree(self.place / str(number - 8))
        finally:
            thread.join()
            umount(self.place)
        return told

    def at_one_moment(self):
        """How many results had been acknowledged, and what the disk held right after: in two readings alike."""
        while True:
            acknowledged, found = self.acknowledged, self.image.read_bytes()
            if self.image.read_bytes() == found:
                return acknowledged, found

    def look(self, number, acknowledged):
        """What a copy holds: results that are right, broken ones, and acknowledged ones that are lost."""
        folder = self.snapshots / f"{number}-mounted"
        mount(self.snapshots / str(number), folder)
        try:
            whole = {path.name: tree(path) for path in folder.iterdir() if path.name.isdigit()}
        finally:
            umount(folder)
        # the oldest are being removed meanwhile
        kept = {name: found for name, found in whole.items() if int(name) >= acknowledged - 6}
        right = sum(found == self.wanted for found in kept.values())
        lost = sum(str(n) not in whole for n in range(max(0, acknowledged - 6), acknowledged))
        return right, len(kept) - right, lost


def export(source, into):
    plan = plan_export(open_checkpoint(source), into, ExportOptions(max_memory=MIB, max_shard_bytes=MIB // 4))
    run_export(plan)


def look_at_copies(disk, copies):
    found = [disk.look(number, told) for number, told in enumerate(disk.work(copies))]
    return [sum(column) for column in zip(*found, strict=True)]


@pytest.fixture
def disk(tmp_path):
    """Its backing file is in memory: reading all of it has to be faster than what is written to it."""
    write_llama(tmp_path / "src", layers=2, hidden=128, ffn=256, vocab=512)
    (tmp_path / "memory").mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "none", tmp_path / "memory"], check=False).returncode:
        pytest.skip("cannot mount here")
    yield Disk(tmp_path, tmp_path / "src")
    subprocess.run(["umount", tmp_path / "memory"], check=True)


@pytest.mark.parametrize("copies", [10, pytest.param(150, marks=pytest.mark.slow)])
def test_what_is_there_after_a_power_cut_is_right(disk, copies):
    right, broken, lost = look_at_copies(disk, copies)
    print(f"{copies} copies: {right} results right, {broken} broken, {lost} acknowledged and lost")
    assert (broken, lost) == (0, 0)
    assert right > copies


@pytest.mark.parametrize("copies", [10, pytest.param(50, marks=pytest.mark.slow)])
def test_without_syncing_it_is_not(disk, monkeypatch, copies):
    """Negative control: the same with every fsync left out."""
    for module in (engine, journal, publish):
        monkeypatch.setattr(module.os, "fsync", lambda fd: None)
    right, broken, lost = look_at_copies(disk, copies)
    print(f"{copies} copies without fsync: {right} results right, {broken} broken, {lost} acknowledged and lost")
    assert broken + lost > 0
