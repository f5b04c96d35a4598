"""Results written into an object store: the bytes of a disk, complete or not loadable, continued by the same command."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import remote_stores
from checkpoints import tree
from remote_fixtures import forget, proxy, server, session_proxy, uploaded
from support import GOLDEN

from converters.formats import open_checkpoint
from distckpt_cli.app import main

__all__ = ["proxy", "server", "session_proxy", "uploaded"]

LLAMA = str(GOLDEN / "llama_adam_tp2pp2")
QUIET = ("--progress", "off", "-q")


@pytest.fixture
def scratch(tmp_path, monkeypatch):
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setenv("DISTCKPT_SCRATCH", str(folder))
    return folder


@pytest.fixture
def bucket(server, proxy, scratch, request):
    """A prefix of the test's own; what lies there, as digests by name."""
    prefix = hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:12]
    return Bucket(server, prefix)


class Bucket:
    def __init__(self, port, prefix):
        self.port, self.prefix = port, prefix

    def url(self, name="out"):
        return f"s3://{remote_stores.BUCKET}/{self.prefix}/{name}"

    def tree(self, name=""):
        prefix = f"{self.prefix}/{name}".rstrip("/")
        return {key: hashlib.sha256(data).hexdigest() for key, data in remote_stores.keys(self.port, prefix).items()}


def without_report(files):
    return {name: digest for name, digest in files.items() if not name.endswith("report.json")}


COMMANDS = {
    "reshard": ["reshard", LLAMA, "DST", "--tp", "1"],
    "export-hf": ["export-hf", LLAMA, "DST", "--max-shard-size", "20KB"],
    "convert": ["convert", LLAMA, "DST", "--to", "safetensors"],
    "legacy": ["convert", LLAMA, "DST", "--to", "legacy"],
}


def argv(command, destination):
    return [{"DST": str(destination)}.get(word, word) for word in COMMANDS[command]] + list(QUIET)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_bytes_of_a_disk(command, bucket, tmp_path, scratch):
    assert main(argv(command, tmp_path / "disk")) == 0
    assert main(argv(command, bucket.url())) == 0
    assert without_report(bucket.tree("out")) == without_report(tree(tmp_path / "disk"))
    assert set(bucket.tree()) == {f"out/{name}" for name in tree(tmp_path / "disk")}  # and nothing beside it
    assert not list(scratch.iterdir())
    assert main(["diff", bucket.url(), str(tmp_path / "disk")]) == 0


def test_a_single_file(bucket, tmp_path):
    line = ["convert", LLAMA, "DST", "--to", "torch", *QUIET]
    for where in (tmp_path / "model.pt", bucket.url("model.pt")):
        assert main([str(where) if word == "DST" else word for word in line]) == 0
    assert bucket.tree() == {"model.pt": hashlib.sha256((tmp_path / "model.pt").read_bytes()).hexdigest()}


def test_from_a_store_into_a_store(bucket, uploaded, tmp_path):
    source = uploaded("hf_llama_safetensors")
    assert main(["import-hf", source, bucket.url(), *QUIET]) == 0
    assert open_checkpoint(bucket.url()).catalog.format == "torch_dist"


def test_what_makes_it_loadable_comes_last(bucket, proxy):
    assert main(argv("reshard", bucket.url())) == 0
    puts = [path.rpartition("/")[2] for method, path, _ in proxy.taken() if method == "PUT"]
    assert puts[-1] == "latest_checkpointed_iteration.txt"
    described = min(puts.index(name) for name in (".metadata", "metadata.json", "common.pt"))
    assert all(puts.index(name) < described for name in puts if name.endswith(".distcp"))


def test_overwrite(bucket, capsys):
    assert main(argv("export-hf", bucket.url())) == 0
    first = bucket.tree("out")
    assert main(argv("reshard", bucket.url())) == 5
    assert "already exists" in capsys.readouterr().err
    assert bucket.tree("out") == first
    assert main([*argv("reshard", bucket.url()), "--overwrite"]) == 0
    assert not any(name.endswith(".safetensors") for name in bucket.tree("out"))
    assert main(["verify", bucket.url()]) == 0


def test_overwrite_deletes_no_stranger(bucket, server, capsys):
    remote_stores.put(server, f"{bucket.prefix}/out/diary.txt", b"dear diary")
    assert main([*argv("reshard", bucket.url()), "--overwrite"]) == 5
    assert "does not look like a checkpoint" in capsys.readouterr().err
    assert set(bucket.tree()) == {"out/diary.txt"}


def test_a_bad_network(bucket, proxy, tmp_path):
    proxy.set(fail=4)
    assert main(argv("export-hf", bucket.url())) == 0
    proxy.set()
    assert main(argv("export-hf", tmp_path / "disk")) == 0
    assert without_report(bucket.tree("out")) == without_report(tree(tmp_path / "disk"))


def test_an_upload_that_fails_is_continued(bucket, proxy, capsys, tmp_path):
    proxy.set(rules=[["PUT", r"/out/.*\.metadata", 403, "<Error><Code>AccessDenied</Code></Error>", 10**6]])
    assert main(argv("reshard", bucket.url())) == 5
    said = capsys.readouterr().err
    assert "no permission" in said
    assert "same command" in said
    proxy.set()
    forget()
    assert main(["inspect", bucket.url()]) == 3
    assert "unfinished" in capsys.readouterr().err
    assert main(argv("export-hf", bucket.url())) == 5  # another command's
    assert "unfinished upload of another command" in capsys.readouterr().err
    proxy.taken()
    assert main(argv("reshard", bucket.url())) == 0
    assert not [path for method, path, _ in proxy.taken() if method == "PUT" and path.endswith(".distcp")]
    assert main(argv("reshard", tmp_path / "disk")) == 0
    assert without_report(bucket.tree("out")) == without_report(tree(tmp_path / "disk"))
    assert main(["verify", bucket.url()]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("after", range(1, 24, 3))
def test_killed_at_any_request(after, bucket, proxy, tmp_path):
    proxy.set(seconds=0.1)
    command = [sys.executable, "-m", "distckpt_cli", *argv("reshard", bucket.url())]
    with subprocess.Popen(command, cwd=Path(__file__).parents[1]) as process:
        count = 0
        while process.poll() is None and count < after:
            count += len(proxy.taken())
            time.sleep(0.02)
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
    proxy.set()
    assert main(argv("reshard", bucket.url())) in (0, 5)  # 5: it had ended
    assert main(argv("reshard", tmp_path / "disk")) == 0
    assert without_report(bucket.tree("out")) == without_report(tree(tmp_path / "disk"))


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("destination", "says"),
    [
        ("https://host/out", "can only be read"),
        ("hf://org/name", "can only be read"),
        ("s3://models", "a whole bucket"),
        ("s3://models-of-nobody/out", "there is no bucket"),
    ],
)
def test_destinations_that_cannot_be_meant(destination, says, bucket, capsys, scratch):
    assert main(argv("reshard", destination)) == 5
    assert says in capsys.readouterr().err
    assert not list(scratch.iterdir())


@pytest.mark.parametrize("inside", ["", "/iter_0000010/out"])
def test_the_source_itself(inside, bucket, uploaded, capsys):
    source = uploaded("llama_adam_tp2pp2")
    assert main(["reshard", source, f"{source}{inside}", "--tp", "1"]) == 5
    assert "the source" in capsys.readouterr().err


def test_an_object_where_a_folder_shall_be(bucket, server, capsys):
    remote_stores.put(server, f"{bucket.prefix}/out", b"x")
    assert main([*argv("reshard", bucket.url()), "--overwrite"]) == 5
    assert "an object, and the result is a folder" in capsys.readouterr().err


def test_no_permission_is_said_before_the_work(bucket, proxy, capsys, scratch):
    proxy.set(rules=[["PUT", ".*", 403, "<Error><Code>AccessDenied</Code></Error>", 10**6]])
    assert main(argv("reshard", bucket.url())) == 5
    assert "no permission" in capsys.readouterr().err
    assert not list(scratch.iterdir())


def test_ranks_need_a_disk_that_they_share(bucket, monkeypatch, capsys):
    monkeypatch.delenv("DISTCKPT_SCRATCH")
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert main(argv("reshard", bucket.url())) == 4
    assert "--scratch" in capsys.readouterr().err


def test_a_dry_run_writes_nothing(bucket, capsys, scratch):
    assert main([*argv("reshard", bucket.url()), "-n"]) == 0
    assert bucket.url() in capsys.readouterr().out
    assert bucket.tree() == {}


@pytest.mark.slow
def test_several_processes(bucket, tmp_path, scratch):
    """They make the result on the disk that they share; one of them uploads it."""
    command = [sys.executable, "-m", "distckpt_cli", "--workers", "2", *argv("reshard", bucket.url())]
    subprocess.run(command, cwd=Path(__file__).parents[1], check=True)
    assert main(argv("reshard", tmp_path / "disk")) == 0
    assert without_report(bucket.tree("out")) == without_report(tree(tmp_path / "disk"))
    assert not list(scratch.iterdir())


def test_a_result_is_not_made_twice(bucket, proxy, scratch, capsys):
    """Killed after the result was published on the disk and before anything was uploaded."""
    proxy.set(rules=[["PUT", r"/out/", 403, "<Error><Code>AccessDenied</Code></Error>", 10**6]])
    assert main(argv("reshard", bucket.url())) == 5
    proxy.set()
    forget()
    line = [word for word in argv("reshard", bucket.url()) if word != "-q"]
    assert main(line) == 0
    assert "0 B in" not in capsys.readouterr().out
    assert main(["verify", bucket.url()]) == 0
