"""Results written into an object store: the bytes of a disk, complete or not loadable, continued by the same command."""

from __future__ import annotations

import fcntl
import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from converters.errors import Interrupted
from converters.formats import open_checkpoint
from converters.remote.address import named_path
from converters.remote.unfinished import list_unfinished
from converters.remote.writing import StoreWriter
from distckpt_cli.app import main
from harness import remote_stores
from harness.checkpoints import tree
from harness.remote_fixtures import forget, proxy, server, session_proxy, uploaded
from harness.support import GOLDEN

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


KILLS = [("reshard", after) for after in range(1, 40, 4)]
KILLS += [(command, after) for command in ("export-hf", "convert") for after in range(3, 40, 9)]


@pytest.mark.slow
@pytest.mark.parametrize(("command", "after"), KILLS)
def test_killed_at_any_request(command, after, bucket, proxy, uploaded, tmp_path):
    """From a store into a store: killed while it reads, or while it uploads, the same command completes it."""
    source = uploaded("llama_adam_tp2pp2")
    line = [source if word == LLAMA else word for word in argv(command, bucket.url())]
    proxy.set(seconds=0.1)
    with subprocess.Popen([sys.executable, "-m", "distckpt_cli", *line], cwd=Path(__file__).parents[2]) as process:
        count = 0
        while process.poll() is None and count < after:
            count += len(proxy.taken())
            time.sleep(0.02)
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
    proxy.set()
    assert main(line) in (0, 5)  # 5: it had ended
    assert main(argv(command, tmp_path / "disk")) == 0
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


LAUNCHERS = {
    "workers": ["-m", "distckpt_cli", "--workers", "2"],
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "distckpt_cli"],
}


def launched(launcher, arguments):
    """The exit code and what is said of a command that two processes run together."""
    command = [sys.executable, *LAUNCHERS[launcher], *arguments]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    return done.returncode, done.stderr


@pytest.mark.parametrize("launcher", ["workers", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_several_processes(launcher, bucket, proxy, tmp_path, scratch):
    """They make the result on the disk that they share, and upload it together; the next launch continues."""
    proxy.set(rules=[["PUT", r"/out/.*\.metadata", 403, "<Error><Code>AccessDenied</Code></Error>", 10**6]])
    status, error = launched(launcher, argv("reshard", bucket.url()))
    assert status == (5 if launcher == "workers" else 1)
    assert "no permission" in error
    (folder,) = scratch.glob("distckpt-*")
    journals = {path.name: path.read_text().splitlines()[1:] for path in folder.glob(".journal*")}
    assert {name: bool(lines) for name, lines in journals.items()} == {".journal": True, ".journal-1": True}
    proxy.set()
    proxy.taken()
    status, error = launched(launcher, argv("reshard", bucket.url()))
    assert status == 0, error
    assert not [path for method, path, _ in proxy.taken() if method == "PUT" and path.endswith(".distcp")]
    assert main(argv("reshard", tmp_path / "disk")) == 0
    assert without_report(bucket.tree("out")) == without_report(tree(tmp_path / "disk"))
    assert not list(scratch.iterdir())


def begun(port, key):
    """Begins an upload in parts, and leaves it; the client."""
    import botocore.session

    client = botocore.session.get_session().create_client(
        "s3", "us-east-1", endpoint_url=f"http://127.0.0.1:{port}", aws_access_key_id="a", aws_secret_access_key="b"
    )
    upload = client.create_multipart_upload(Bucket=remote_stores.BUCKET, Key=key)["UploadId"]
    client.upload_part(Bucket=remote_stores.BUCKET, Key=key, UploadId=upload, PartNumber=1, Body=b"x" * 1000)
    return client


def unfinished(client, prefix):
    return [
        u["Key"] for u in client.list_multipart_uploads(Bucket=remote_stores.BUCKET, Prefix=prefix).get("Uploads", [])
    ]


def stopped_upload(bucket, proxy):
    """An upload that fails when the files of tensors are there."""
    proxy.set(rules=[["PUT", r"/out/.*\.metadata", 403, "<Error><Code>AccessDenied</Code></Error>", 10**6]])
    assert main(argv("reshard", bucket.url())) == 5
    proxy.set()
    forget()


def test_unfinished_uploads_are_aborted(bucket, server, proxy, capsys):
    stopped_upload(bucket, proxy)
    begun(server, f"{bucket.prefix}/out/iter_0000010/__0_0.distcp")
    client = begun(server, f"{bucket.prefix}/outside/of-a-neighbour")
    line = [word for word in argv("reshard", bucket.url()) if word != "-q"]
    assert main(line) == 0
    assert "1 unfinished upload of an earlier run aborted" in capsys.readouterr().err
    assert unfinished(client, bucket.prefix) == [f"{bucket.prefix}/outside/of-a-neighbour"]


def test_that_they_cannot_be_listed_is_said(bucket, server, proxy, capsys):
    stopped_upload(bucket, proxy)
    proxy.set(rules=[["GET", r"uploads", 403, "<Error><Code>AccessDenied</Code></Error>", 10**6]])
    assert main([word for word in argv("reshard", bucket.url()) if word != "-q"]) == 0
    assert "could not be listed: AccessDenied; a lifecycle rule" in " ".join(capsys.readouterr().err.split())


def test_what_a_run_left_is_cleared(bucket, server, proxy, scratch, capsys):
    """With its unfinished uploads; objects that are there stay until the same command has written all of them."""
    stopped_upload(bucket, proxy)
    client = begun(server, f"{bucket.prefix}/out/x")
    before = bucket.tree()
    assert main(["cache", str(scratch), "--clear"]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "1 unfinished upload of an earlier run aborted; what was uploaded to" in said
    assert unfinished(client, bucket.prefix) == []
    assert bucket.tree() == before
    assert not list(scratch.iterdir())
    assert main(argv("reshard", bucket.url())) == 0
    assert main(["verify", bucket.url()]) == 0


def test_uploads_of_another_command_are_not_aborted(bucket, server, proxy, scratch, tmp_path, monkeypatch):
    stopped_upload(bucket, proxy)
    client = begun(server, f"{bucket.prefix}/out/x")
    remote_stores.put(server, f"{bucket.prefix}/.out.distckpt-upload", b'{"fingerprint": "other", "uploading": true}')
    forget()
    assert main(["cache", str(scratch), "--clear"]) == 0
    assert unfinished(client, bucket.prefix) == [f"{bucket.prefix}/out/x"]


def test_one_at_a_time(bucket, proxy, scratch, capsys):
    stopped_upload(bucket, proxy)
    (folder,) = scratch.glob("distckpt-*")
    fd = os.open(folder, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    assert main(argv("reshard", bucket.url())) == 5
    assert "another distckpt is writing" in capsys.readouterr().err
    os.close(fd)
    assert main(argv("reshard", bucket.url())) == 0


def test_a_large_file_in_parts(bucket, proxy, tmp_path):
    """In parts, some of which fail: what is told of it adds up, and a listener that stops it leaves nothing behind."""
    data, told = os.urandom(1 << 20) * 20, []
    (tmp_path / "large").write_bytes(data)
    writer, path = StoreWriter(named_path(bucket.url())), named_path(bucket.url("large"))
    proxy.set(rules=[["PUT", "partNumber=2", 503, "<Error><Code>SlowDown</Code></Error>", 1]])
    writer.put_file(tmp_path / "large", path, told.append)
    assert sum(told) == len(data)
    assert len(told) == 3
    assert bucket.tree()["large"] == hashlib.sha256(data).hexdigest()

    def stop(nbytes):
        raise Interrupted(2, "stopped")

    with pytest.raises(Interrupted, match="stopped"):
        writer.put_file(tmp_path / "large", named_path(bucket.url("other")), stop)
    assert list(list_unfinished(named_path(bucket.url("other")))) == []


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
