"""`distckpt cache`: what unfinished runs left, the command that continues each, and what --clear does not touch."""

import fcntl
import hashlib
import json
import os
import shlex
import shutil
from pathlib import Path

import pytest

from converters.errors import DestinationError, Interrupted
from converters.execute import journal
from converters.execute.leftovers import clear_leftover, leftovers
from converters.execute.publish import Staging
from distckpt_cli.app import main
from harness import remote_stores
from harness.remote_fixtures import forget, proxy, server, session_proxy
from harness.support import GOLDEN

__all__ = ["proxy", "server", "session_proxy"]

LLAMA = str(GOLDEN / "llama_adam_tp2pp2")


def _kept(capsys, *folders):
    capsys.readouterr()
    assert main(["cache", *map(str, folders), "--json"]) == 0
    return json.loads(capsys.readouterr().out)["kept"]


def _interrupt(monkeypatch, *words):
    """Runs a command line to the point where all is written and nothing is published."""

    def stop(self):
        raise Interrupted(15, "stopped by a test")

    with monkeypatch.context() as patched:
        patched.setattr(Staging, "publish", stop)
        assert main([*words, "-q", "--progress", "off"]) == 143


@pytest.fixture
def stopped(tmp_path, monkeypatch):
    """A folder in which an interrupted run lies."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a b").mkdir()
    _interrupt(monkeypatch, "reshard", LLAMA, "a b/out", "--tp", "1")
    return tmp_path


def test_the_command_that_is_shown_continues(stopped, capsys, monkeypatch):
    (item,) = _kept(capsys, stopped)
    staging = stopped / "a b" / ".out.distckpt-partial"
    assert (item["state"], item["kind"], item["path"]) == ("unfinished", "staging", str(staging))
    assert item["nbytes"] >= sum(path.stat().st_size for path in staging.rglob("*.distcp"))
    assert item["command"] == f"distckpt reshard {LLAMA} 'a b/out' --tp 1 -q --progress off"
    assert main(["cache", str(stopped)]) == 0
    said = capsys.readouterr()
    assert "unfinished  staging" in said.out
    assert f"continue: {item['command']}" in said.out
    assert f"next: distckpt cache '{staging}' --clear" in said.err
    monkeypatch.chdir("/")
    (elsewhere,) = _kept(capsys, stopped)
    assert elsewhere["command"] == f"cd {shlex.quote(str(stopped))} && {item['command']}"
    monkeypatch.chdir(stopped)
    assert main([*shlex.split(item["command"])[1:], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bytes_kept"] > 0
    assert not _kept(capsys, stopped)


def test_clear_removes_what_is_unfinished_and_nothing_else(stopped, capsys):
    (stopped / "a b" / "mine.txt").write_text("mine")
    assert main(["cache", "--clear"]) == 2
    assert "none was named" in capsys.readouterr().err
    assert main(["cache", str(stopped), "--clear", "--json"]) == 0
    (item,) = json.loads(capsys.readouterr().out)["kept"]
    assert item["removed"]
    assert [path.name for path in (stopped / "a b").iterdir()] == ["mine.txt"]
    assert main(["cache", "."]) == 0
    assert capsys.readouterr().out == "no unfinished runs\n"


def test_a_living_run_is_not_touched(stopped, capsys):
    staging = stopped / "a b" / ".out.distckpt-partial"
    before = sorted(staging.rglob("*"))
    (item,) = leftovers(stopped)
    fd = os.open(staging, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    assert _kept(capsys, stopped)[0]["state"] == "running"
    assert main(["cache", str(staging), "--clear"]) == 0
    assert "its run is still going" in capsys.readouterr().out
    with pytest.raises(DestinationError, match="a run has begun to use it"):  # also if it began after the list was made
        clear_leftover(item)
    os.close(fd)
    meeting = staging.with_name(".out.distckpt-ranks-1")
    meeting.mkdir()
    with (meeting / "lock-1").open("w") as file:  # rank 0 has died, rank 1 still writes
        fcntl.flock(file, fcntl.LOCK_EX)
        assert {one["state"] for one in _kept(capsys, stopped)} == {"running"}
        with pytest.raises(DestinationError, match="ranks of its run are still going"):
            clear_leftover(item)
    assert sorted(staging.rglob("*")) == before
    assert main(["cache", str(stopped)]) == 0
    assert "where the processes of a run met" in capsys.readouterr().out
    assert main(["cache", str(stopped), "--clear", "-q"]) == 0
    assert not list((stopped / "a b").iterdir())


@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder: (folder / ".journal").unlink(),
        lambda folder: (folder / ".journal").write_text("{}\n"),
        lambda folder: (folder / ".journal").write_text('{"version": 2}\n'),
        lambda folder: (folder / ".journal").write_bytes(b"\xff\n"),
        lambda folder: ((folder / ".journal").rename(folder / "x"), (folder / ".journal").symlink_to("x")),
    ],
)
def test_what_has_no_journal_of_ours_stays(spoil, stopped, capsys):
    staging = stopped / "a b" / ".out.distckpt-partial"
    spoil(staging)
    assert main(["cache", str(stopped), "--clear"]) == 0
    assert "no journal of distckpt" in capsys.readouterr().out
    assert any(staging.rglob("*.distcp"))


def test_links_and_what_overwrite_replaces_stay(stopped, tmp_path, capsys):
    staging = stopped / "a b" / ".out.distckpt-partial"
    (stopped / ".x.distckpt-partial").symlink_to(staging)
    (stopped / ".y.distckpt-old").mkdir()
    kept = _kept(capsys, stopped)
    assert [(one["kind"], one["state"]) for one in kept] == [("replaced", "unknown"), ("staging", "unfinished")]
    (staging / "link").symlink_to(tmp_path)
    assert main(["cache", str(stopped), "--clear"]) == 0
    assert sorted(path.name for path in stopped.iterdir()) == [".x.distckpt-partial", ".y.distckpt-old", "a b"]


def test_a_journal_cannot_name_another_program(stopped, capsys):
    record = stopped / "a b" / ".out.distckpt-partial" / ".journal"
    about = {"typed": ["x; rm -rf ~", "$(id)"], "folder": "/tmp/`id`", "destination": 7}
    record.write_text(json.dumps(journal.header("f", about)) + "\n")
    (item,) = _kept(capsys, stopped)
    assert shlex.split(item["command"]) == ["cd", "/tmp/`id`", "&&", "distckpt", "x; rm -rf ~", "$(id)"]
    assert item["destination"] == str(stopped / "a b" / "out")


def test_a_clearing_that_is_cut_short_leaves_what_nobody_continues(stopped, monkeypatch, capsys):
    (item,) = leftovers(stopped)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", lambda *_: (_ for _ in ()).throw(OSError(5, "disk")))
        with pytest.raises(DestinationError, match="removing"):
            clear_leftover(item)
    assert _kept(capsys, stopped)[0]["state"] == "unfinished"
    assert main(["reshard", LLAMA, "a b/out", "--tp", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bytes_kept"] == 0
    assert main(["verify", "a b/out", "-q"]) == 0


def test_an_upload_is_listed_where_it_waits_and_in_the_store(server, proxy, tmp_path, monkeypatch, capsys):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("DISTCKPT_SCRATCH", str(scratch))
    monkeypatch.chdir(tmp_path)
    prefix = hashlib.sha256(b"cache").hexdigest()[:12]
    bucket = f"s3://{remote_stores.BUCKET}/{prefix}"
    line = ["reshard", LLAMA, f"{bucket}/out", "--tp", "1"]
    proxy.set(rules=[["PUT", r"/out/.*\.metadata", 403, "<Error><Code>AccessDenied</Code></Error>", 10**6]])
    assert main([*line, "-q", "--progress", "off"]) == 5
    proxy.set()
    forget()
    ours = [one for one in _kept(capsys) if Path(one["path"]).resolve().is_relative_to(scratch)]
    command = f"distckpt {shlex.join(line)} -q --progress off"
    assert [(one["kind"], one["state"], one["command"]) for one in ours] == [("upload", "unfinished", command)]
    assert ours[0]["destination"] == f"{bucket}/out"
    (mark,) = _kept(capsys, bucket)
    assert (mark["kind"], mark["state"], mark["command"]) == ("mark", "unknown", command)
    folder = next(scratch.iterdir())
    fd = os.open(folder, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)  # as an upload does that is under way
    assert _kept(capsys, scratch)[0]["state"] == "running"
    assert main([*line, "-q"]) == 5
    assert "is writing" in capsys.readouterr().err
    os.close(fd)
    assert main(["cache", str(scratch), "--clear"]) == 0
    assert not list(scratch.iterdir())
    assert main([*line, "-q", "--progress", "off"]) == 0
    assert not _kept(capsys, bucket, scratch)
