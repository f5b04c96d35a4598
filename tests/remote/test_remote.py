"""Checkpoints at addresses: read from a real S3 server as from a disk, whatever the network does."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
import time

import pytest

from converters.errors import AddressError, IntegrityError
from converters.formats import open_checkpoint
from converters.formats.base import fingerprint_of
from converters.formats.folder import open_source, walk
from converters.overview.runs import survey
from converters.remote.address import RemotePath, named_path
from converters.remote.content import BLOCK
from converters.remote.tree import tree_of
from distckpt_cli.app import main
from formats import (
    test_bytecheckpoint,
    test_containers_read,
    test_fsdp_dtensor,
    test_legacy,
    test_torch_dcp,
    test_torch_dist,
    test_vescale,
    test_zarr,
)
from harness import conformance, remote_stores
from harness.checkpoints import tree
from harness.remote_fixtures import forget, proxy, server, session_proxy, uploaded
from harness.support import GOLDEN

__all__ = ["proxy", "server", "session_proxy", "uploaded"]

LLAMA = "llama_adam_tp2pp2"
FORMATS = [
    test_torch_dist.TestTorchDist, test_legacy.TestLegacy, test_zarr.TestZarr, test_torch_dcp.TestTorchDcp,
    test_fsdp_dtensor.TestFsdpDtensor, test_fsdp_dtensor.TestMegatronDcp, test_vescale.TestVeScale,
    test_bytecheckpoint.TestByteCheckpoint, test_containers_read.TestSafetensors, test_containers_read.TestTorch,
]  # fmt: skip


@pytest.fixture
def url(uploaded, proxy):
    return uploaded(LLAMA)


@pytest.fixture
def alone(server, proxy):
    """The same with nothing beside it, for `ls`, which looks into all that is."""
    return remote_stores.upload(server, GOLDEN / LLAMA, f"alone/{LLAMA}")


# ---------------------------------------------------------------------- addresses


def test_an_address_is_a_path():
    path = named_path("s3://bucket/runs/iter_0000010")
    assert str(path / "a" / "b") == "s3://bucket/runs/iter_0000010/a/b"
    assert str(path.parent) == "s3://bucket/runs"
    assert path.name == "iter_0000010"
    assert isinstance(path.parent, RemotePath)
    assert str((path / "x").relative_to(path)) == "x"
    assert path.with_name("other").root_and_key == (("s3", "bucket"), "runs/other")
    assert named_path(path) is path
    assert named_path("hf://org/name@main/sub").root_and_key == (("hf", "org/name@main"), "sub")


def test_a_file_address_is_a_disk():
    path = named_path("file:///some/folder%20of/mine")
    assert not isinstance(path, RemotePath)
    assert str(path) == "/some/folder of/mine"


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("s3://key:hush@bucket/x", "credentials"),
        ("https://host/model.tar?X-Amz-Signature=hush", "credentials"),
        ("ftp://host/x", "is not an address"),
        ("s3a://bucket/x", "is not an address"),
        ("s3:///x", "names no bucket or path"),
        ("hf://org", "names no bucket or path"),
        ("s3://bucket/a/../b", "without them"),
        ("file://host/x", "three slashes"),
    ],
)
def test_addresses_that_cannot_be_meant(address, says, capsys):
    with pytest.raises(AddressError) as caught:
        named_path(address)
    assert says in f"{caught.value.message} {caught.value.hint}"
    assert main(["inspect", address]) == 2
    said = capsys.readouterr()
    assert "hush" not in said.out + said.err + str(caught.value)


def test_without_obstore(monkeypatch, capsys):
    forget()
    monkeypatch.setitem(sys.modules, "obstore", None)
    assert main(["inspect", "s3://bucket/x"]) == 4
    assert "pip install 'distckpt[remote]'" in capsys.readouterr().err
    forget()


def test_nothing_is_imported_for_a_disk():
    code = (
        "import sys; from distckpt_cli.app import main; main(['inspect', sys.argv[1], '--names']); "
        "assert not {'obstore', 'huggingface_hub', 'converters.remote.store'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(GOLDEN / LLAMA)], check=True, stdout=subprocess.DEVNULL)


# ---------------------------------------------------------------------- every format, on S3


@pytest.mark.parametrize("kind", FORMATS, ids=[kind.FORMAT for kind in FORMATS])
def test_every_format(kind, proxy, uploaded, monkeypatch):
    case = kind.CASES[0]
    uploaded(case.golden)
    monkeypatch.setattr(conformance, "GOLDEN", named_path(f"s3://{remote_stores.BUCKET}/golden"))
    kind().test_what_it_is(case)
    kind().test_every_tensor_is_the_truth(case)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "case"), [(kind, case) for kind in FORMATS for case in kind.CASES], ids=lambda x: getattr(x, "golden", "")
)
def test_every_golden(kind, case, proxy, uploaded, monkeypatch):
    uploaded(case.golden)
    monkeypatch.setattr(conformance, "GOLDEN", named_path(f"s3://{remote_stores.BUCKET}/golden"))
    kind().test_what_it_is(case)
    kind().test_every_tensor_is_the_truth(case)


@pytest.mark.parametrize("damage", ["a_missing_file", "a_short_file", "a_flipped_byte"])
@pytest.mark.parametrize(
    "kind", [FORMATS[0], *(pytest.param(kind, marks=pytest.mark.slow) for kind in FORMATS[1:])], ids=lambda k: k.FORMAT
)
def test_damage(damage, kind, proxy, server, tmp_path, capsys):
    """As on a disk: every command refuses it by the file's name, and publishes nothing."""

    class There(kind):
        def source(self, copy):
            return named_path(remote_stores.upload(server, copy, f"damaged/{tmp_path.name}"))

        def _refused(self, copy, deep, tmp_path, capsys, name, codes=(1, 3)):
            name += "|the checkpoint lacks 1 of the 4 folders"  # a store has no folders that are empty
            return super()._refused(copy, deep, tmp_path, capsys, name, codes)

    deep = kind.CASES[0]
    copy = tmp_path / "src"
    shutil.copytree(GOLDEN / deep.golden, copy)
    more = ["half of a weight"] if damage == "a_short_file" else []
    getattr(There(), f"test_{damage}")(*more, copy, deep, tmp_path, capsys)


# ---------------------------------------------------------------------- every command


def run(argv, out):
    """The bytes of what a command writes."""
    assert main([*argv, str(out), "--progress", "off", "-q"]) == 0, argv
    return {name: data for name, data in tree(out).items() if not name.endswith("report.json")}


WRITING = {
    "export-hf": (["export-hf", "SRC"], []),
    "reshard": (["reshard", "SRC"], ["--tp", "1"]),
    "convert": (["convert", "SRC"], ["--to", "safetensors"]),
}


@pytest.mark.parametrize("command", WRITING)
def test_commands_that_write(command, url, tmp_path):
    head, more = WRITING[command]

    def argv(source):
        return [{"SRC": source}.get(word, word) for word in head] + more

    assert run(argv(url), tmp_path / "remote") == run(argv(str(GOLDEN / LLAMA)), tmp_path / "disk")


def test_commands_that_read(alone, capsys):
    for argv in (
        ["inspect", alone],
        ["inspect", alone, "--files"],
        ["verify", alone],
        ["show", alone, "output_layer.weight"],
    ):
        assert main(argv) == 0, argv
    assert main(["ls", alone.rpartition("/")[0]]) == 0
    assert alone in capsys.readouterr().out
    assert main(["diff", alone, str(GOLDEN / LLAMA)]) == 0
    assert "identical in everything" in capsys.readouterr().out


def test_ls_shows_the_age_of_the_newest_object(url, hub, capsys):
    """A folder of a store has no time of its own, and the hub tells no times."""
    before = time.time()
    (of_s3,) = survey(url)
    assert of_s3.modified is not None
    assert before - 3600 < of_s3.modified < before + 60  # uploaded by this session
    (of_hub,) = survey("hf://org/hf_llama_safetensors")
    assert of_hub.modified is None
    assert main(["ls", "hf://org/hf_llama_safetensors"]) == 0
    row = capsys.readouterr().out.splitlines()[1]
    assert row.split()[-2:] == ["-", "hf://org/hf_llama_safetensors"]


def test_import_hf(uploaded, proxy, tmp_path):
    source = uploaded("hf_llama_safetensors")
    there = run(["import-hf", source], tmp_path / "remote")
    assert there == run(["import-hf", str(GOLDEN / "hf_llama_safetensors")], tmp_path / "disk")


def test_the_library(url, proxy):
    import converters

    with converters.open(url) as checkpoint:
        assert checkpoint.catalog.iteration == 10
    assert converters.verify(url).good
    assert converters.diff(url, str(GOLDEN / LLAMA)).identical


def test_a_tar_file_in_a_store(proxy, server, tmp_path):
    packed = tmp_path / "it.tar"
    subprocess.run(["tar", "-cf", packed, "-C", GOLDEN / LLAMA, "iter_0000010"], check=True)
    remote_stores.put(server, "tars/it.tar", packed.read_bytes())
    assert main(["diff", "s3://models/tars/it.tar", str(GOLDEN / LLAMA / "iter_0000010")]) == 0
    assert main(["inspect", "s3://models/tars/it.tar/iter_0000010"]) == 0


# ---------------------------------------------------------------------- how much is asked


def test_few_requests(proxy, server, capsys):
    """A thousand files: as many requests after the listing as for eleven, and no byte of the tensors."""
    remote_stores.upload(server, GOLDEN / LLAMA / "iter_0000010", "wide/iter_0000010")
    for number in range(1000):
        remote_stores.put(server, f"wide/iter_0000010/extra_{number}.txt", b"x")
    proxy.taken()
    assert main(["inspect", "s3://models/wide/iter_0000010"]) == 0
    requests = proxy.taken()
    mine = "prefix=wide%2Fiter_0000010%2F&"
    lists = [path for _, path, _ in requests if "list-type=2" in path and mine in f"{path}&"]
    assert len(requests) - len(lists) <= 15, requests
    assert len(lists) <= 3  # a page has 1,000 objects
    assert not [path for _, path, _ in requests if ".distcp" in path]


def test_nothing_is_read_twice(url, proxy, tmp_path):
    """`verify` and `convert` fetch at most 1.05 of the bytes that lie there."""
    files = {name: status.size for name, status in walk(named_path(url)) if name.endswith(".distcp")}
    proxy.taken()
    forget()
    assert main(["convert", url, str(tmp_path / "out"), "--to", "safetensors", "-q", "--progress", "off"]) == 0
    spans = [span.removeprefix("bytes=").split("-") for _, path, span in proxy.taken() if ".distcp" in path]
    assert sum(int(last) - int(first) + 1 for first, last in spans) <= 1.05 * sum(files.values())


def test_ranges(proxy, server):
    """Every way to read a range gives the bytes of the object."""
    data = os.urandom(3 * BLOCK + 12345)
    remote_stores.put(server, "ranges/x.bin", data)
    with open_source(named_path("s3://models/ranges/x.bin")) as source:
        assert source.size == len(data)
        ranges = [(0, 1), (5, 100), (BLOCK - 3, 10), (0, BLOCK), (7, 2 * BLOCK), (0, len(data)), (100, BLOCK + 1)]
        for offset, length in ranges:
            assert source.read(offset, length) == data[offset : offset + length]
        assert source.read(len(data) - 4, 100) == data[-4:]
        rows = bytearray(5 * 11)
        source.read_rows(memoryview(rows).cast("B", (5, 11)), 1000, 70_000)
        assert bytes(rows) == b"".join(data[1000 + n * 70_000 :][:11] for n in range(5))
        with pytest.raises(EOFError):
            source.read_rows(memoryview(rows).cast("B", (5, 11)), len(data) - 60, 20)


def test_a_range_that_is_expected(proxy, server):
    """It is fetched before it is asked for, once, whatever is read of it in which order."""
    data = os.urandom(1 << 20) * 25
    remote_stores.put(server, "ranges/ahead.bin", data)
    for order in ([100, 5 << 20, BLOCK, 9 << 20, len(data)], [3 << 20] * 8 + [len(data)], [1, len(data)]):
        forget()
        proxy.taken()
        with open_source(named_path("s3://models/ranges/ahead.bin")) as source:
            source.expect(0, len(data))
            at = 0
            for length in order:
                piece = source.read(at, length)
                assert piece == data[at : at + length]
                at += len(piece)
            assert at == len(data)
            assert source.read(1 << 20, 3 << 20) == data[1 << 20 : 4 << 20]  # back to the front
        spans = [span.removeprefix("bytes=").split("-") for _, _, span in proxy.taken() if span]
        fetched = sum(int(last) - int(first) + 1 for first, last in spans)
        assert fetched <= len(data) + (3 << 20) + 3 * BLOCK


def test_a_long_object_in_pieces(proxy, server):
    data = os.urandom(1 << 20) * 27
    remote_stores.put(server, "ranges/long.bin", data)
    with open_source(named_path("s3://models/ranges/long.bin")) as source:
        assert source.read(3, len(data) - 3) == data[3:]
    assert len(proxy.taken()) > 3


# ---------------------------------------------------------------------- faults


@pytest.mark.parametrize("command", [*WRITING, "import-hf"])
def test_a_bad_network_changes_nothing(command, url, uploaded, proxy, tmp_path):
    """Every fifth request fails, every seventh body is cut: the bytes are those of a disk."""
    golden = "hf_llama_safetensors" if command == "import-hf" else LLAMA
    source = uploaded(golden)
    head, more = WRITING.get(command, (["import-hf", "SRC"], []))
    proxy.set(fail=5, cut=7)
    there, here = (
        run([{"SRC": where}.get(word, word) for word in head] + more, tmp_path / name)
        for name, where in (("remote", source), ("disk", str(GOLDEN / golden)))
    )
    assert there == here


def test_what_is_said_on_a_bad_network(alone, proxy, capsys):
    """Of the commands that read, the answers do not change, either."""
    lines = (
        ["inspect", alone, "--json"], ["inspect", alone, "--files"], ["verify", alone], ["ls", alone.rpartition("/")[0]],
        ["show", alone, "output_layer.weight", "--json"], ["diff", alone, str(GOLDEN / LLAMA)],
    )  # fmt: skip
    answers = []
    for faults in ({}, {"fail": 4, "cut": 5}):
        proxy.set(**faults)
        forget()
        for line in lines:
            assert main(line) == 0, line
        untimed = re.sub(r"[\d.]+ (s|min|h)\b|[\d.]+ .iB/s", "", capsys.readouterr().out)  # durations, ages, rates
        answers.append(re.sub(" +", " ", untimed))
    assert answers[0] == answers[1]


@pytest.mark.parametrize("status", [429, 500, 503])
def test_passing_answers(status, url, proxy):
    proxy.set(rules=[["GET", "distcp", status, "<Error><Code>SlowDown</Code></Error>", 3]])
    assert main(["verify", url]) == 0


def test_it_is_given_up(url, proxy, capsys):
    proxy.set(rules=[["GET", "distcp", 503, "<Error><Code>SlowDown</Code></Error>", 10**6]])
    assert main(["verify", url, "--retry-for", "0.5"]) == 3
    said = capsys.readouterr()
    assert "503 SlowDown" in said.err
    assert "damaged" not in said.out


SENTENCES = [
    (403, "AccessDenied", "no permission"),
    (403, "InvalidAccessKeyId", "does not accept the credentials"),
    (403, "SignatureDoesNotMatch", "does not accept the credentials"),
    (400, "ExpiredToken", "have expired"),
    (301, "PermanentRedirect", "another region"),
    (400, "AuthorizationHeaderMalformed", "another region"),
    (403, "RequestTimeTooSkewed", "clock"),
    (404, "NoSuchBucket", "there is no bucket"),
]


@pytest.mark.parametrize(("status", "code", "says"), SENTENCES, ids=[code for _, code, _ in SENTENCES])
def test_sentences(status, code, says, url, proxy, capsys):
    body = f"<Error><Code>{code}</Code><AWSAccessKeyId>hush</AWSAccessKeyId></Error>"
    proxy.set(rules=[["*", ".*", status, body, 10**6]])
    assert main(["inspect", url]) == 3
    said = capsys.readouterr().err
    assert says in said
    assert code in said or code in ("NoSuchBucket", "PermanentRedirect")
    assert "hush" not in said
    assert "secret" not in said
    assert "Traceback" not in said
    assert len(said.splitlines()) <= 2


def test_a_server_without_ranges(url, proxy, capsys):
    """It is said at once, not tried for two minutes, and nothing is read from the wrong place."""
    proxy.set(whole=True)
    assert main(["verify", url]) == 3
    said = capsys.readouterr()
    assert "does not serve byte ranges" in said.err
    assert "copy the checkpoint to a disk" in said.err
    assert "damaged" not in said.out


NO_CREDENTIALS = {
    "az://container/run": "AZURE_STORAGE_ACCOUNT_NAME",
    "gs://bucket/run": "GOOGLE_APPLICATION_CREDENTIALS",
    "s3://bucket/run": "AWS_ACCESS_KEY_ID",
}


@pytest.mark.parametrize("address", NO_CREDENTIALS)
def test_no_credentials(address, monkeypatch, capsys):
    """What a store finds out when it asks the machine it runs on, as obstore says it."""
    from converters.remote.store import ObjectStore

    class Handle:
        pass

    def fail(*_, **__):
        raise RuntimeError(
            "token request: Error performing GET http://169.254.169.254/token - 403 Forbidden, secret=hush"
        )

    monkeypatch.setattr(ObjectStore, "_open", lambda self: Handle())
    monkeypatch.setattr(ObjectStore, "list", fail)
    monkeypatch.setattr(ObjectStore, "head", fail)
    forget()
    assert main(["inspect", address]) == 3
    said = capsys.readouterr().err
    assert f"no credentials for {address.rpartition('/')[0]}" in said
    assert NO_CREDENTIALS[address] in said
    assert "hush" not in said
    forget()


def test_no_account_is_named(monkeypatch, capsys):
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    forget()
    assert main(["inspect", "az://container/run"]) == 3
    assert "set AZURE_STORAGE_ACCOUNT_NAME" in capsys.readouterr().err
    forget()


def test_nobody_listens(url, monkeypatch, capsys):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    forget()
    assert main(["inspect", url, "--retry-for", "0"]) == 3
    assert "cannot be reached: connection refused" in capsys.readouterr().err


def test_nothing_there(url, proxy, capsys):
    assert main(["inspect", f"{url}-nope"]) == 3
    assert "does not exist" in capsys.readouterr().err
    assert main(["inspect", "s3://models-of-nobody/x"]) == 3
    assert "there is no bucket models-of-nobody" in capsys.readouterr().err


def test_a_replaced_object_is_noticed(server, proxy):
    source = remote_stores.upload(server, GOLDEN / LLAMA, "replaced")
    reader = open_checkpoint(source)
    before = fingerprint_of(reader)
    assert fingerprint_of(reader) == before
    path = reader.files[0]
    key = path.root_and_key[1]
    data = (GOLDEN / LLAMA / "iter_0000010" / path.name).read_bytes()
    with open_source(path) as opened:
        remote_stores.put(server, key, data[:-1] + bytes([data[-1] ^ 1]))  # the same size, in the same second
        with pytest.raises(IntegrityError, match="changed while it was read"):
            opened.read(0, 10)
    assert fingerprint_of(reader) != before


def test_several_threads_ask_once(url, proxy):
    tree_of(named_path(url).root_and_key[0])
    path, sizes = named_path(url) / "iter_0000010", []
    threads = [threading.Thread(target=lambda: sizes.append(path.stat().st_size)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sizes == [0] * 8
    assert len(proxy.taken()) <= 2


# ---------------------------------------------------------------------- web servers and the hub


@pytest.fixture(scope="module")
def web():
    """A web server of models; it speaks as the hub does, too."""
    with remote_stores.file_server(GOLDEN) as port:
        yield f"http://127.0.0.1:{port}"


def test_a_web_server(web, capsys, monkeypatch):
    monkeypatch.setenv("DISTCKPT_RETRY_FOR", "1")
    forget()
    names = sorted(path.name for path in (GOLDEN / "hf_llama_safetensors").iterdir())
    index = next((name for name in names if name.endswith("index.json")), "model.safetensors")
    assert main(["diff", f"{web}/hf_llama_safetensors/{index}", str(GOLDEN / "hf_llama_safetensors")]) == 0
    assert "bit for bit" in capsys.readouterr().out
    assert main(["inspect", f"{web}/llama_adam_tp2pp2"]) == 3
    assert "does not list folders" in capsys.readouterr().err


@pytest.fixture
def hub(web, monkeypatch):
    from huggingface_hub import constants

    for name in ("ENDPOINT",):
        monkeypatch.setattr(constants, name, web)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", web + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setenv("DISTCKPT_RETRY_FOR", "1")
    forget()
    yield
    forget()


def test_the_hub(hub, tmp_path, capsys):
    disk = GOLDEN / "hf_llama_safetensors"
    assert main(["diff", "hf://org/hf_llama_safetensors", str(disk)]) == 0
    assert main(["inspect", "hf://org/hf_llama_safetensors@main"]) == 0
    there = run(["import-hf", "hf://org/hf_llama_safetensors"], tmp_path / "remote")
    assert there == run(["import-hf", str(disk)], tmp_path / "disk")
    capsys.readouterr()
    assert main(["inspect", "hf://org/nothing"]) == 3
    assert "there is no model org/nothing" in capsys.readouterr().err
    assert main(["inspect", "hf://org/gated"]) == 3
    assert "gated or private" in capsys.readouterr().err


# ---------------------------------------------------------------------- Google's and Azure's


@pytest.fixture(params=["gs", "az"])
def in_memory(request, monkeypatch):
    """A bucket of obstore's own store in memory in the place of a cloud's: the same interface, without a network."""
    obstore = pytest.importorskip("obstore")
    from converters.remote.store import ObjectStore

    held = obstore.store.MemoryStore()
    monkeypatch.setattr(ObjectStore, "_open", lambda self: held)
    forget()
    for path in (GOLDEN / LLAMA).rglob("*"):
        if path.is_file():
            obstore.put(held, f"run/{path.relative_to(GOLDEN / LLAMA)}", path.read_bytes())
    yield f"{request.param}://bucket"
    forget()


def test_other_clouds(in_memory, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("DISTCKPT_SCRATCH", str(tmp_path))
    assert main(["diff", f"{in_memory}/run", str(GOLDEN / LLAMA)]) == 0
    assert main(["reshard", f"{in_memory}/run", f"{in_memory}/out", "--tp", "1", "--progress", "off"]) == 0
    assert main(["verify", f"{in_memory}/out"]) == 0
    assert f"{in_memory}/out" in capsys.readouterr().out


def test_load(url):
    """One rank of a job of another layout, its tensors straight from the store."""
    from converters import Layout, load

    torch = pytest.importorskip("torch")
    ours, disk = (load(source, Layout(tp=1), device="cpu", optimizer=True) for source in (url, str(GOLDEN / LLAMA)))
    there, here = ours.chunk(), disk.chunk()
    assert there.keys() == here.keys()
    tensors = [name for name, value in here.items() if isinstance(value, torch.Tensor)]
    assert len(tensors) > 10
    assert all(torch.equal(there[name], here[name]) for name in tensors)
