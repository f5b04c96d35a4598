"""`gs://` and `az://` addresses through obstore's in-process store: no emulator of either is a Python package."""

import obstore
import pytest

from converters.formats import open_checkpoint
from converters.remote.address import named_path
from distckpt_cli.app import main
from harness.checkpoints import golden, tree
from harness.remote_fixtures import forget

SOURCE = golden("llama_adam_tp2pp2")
SCHEMES = {"gs": "GCSStore", "az": "AzureStore"}


@pytest.fixture(params=SCHEMES)
def bucket(request, monkeypatch):
    """An address of the scheme whose bucket lies in the memory of this process, and the store behind it."""
    memory, names = obstore.store.MemoryStore(), []

    def store(name, **_):
        names.append(name)
        return memory

    monkeypatch.setattr(f"obstore.store.{SCHEMES[request.param]}", store)
    forget()
    yield f"{request.param}://bucket/run", memory
    assert set(names) == {"bucket"}  # nothing went anywhere else
    forget()


def upload(memory, folder):
    for path in folder.rglob("*"):
        if path.is_file():
            obstore.put(memory, f"run/{path.relative_to(folder)}", path.read_bytes())


def downloaded(memory, prefix, into):
    for page in obstore.list(memory, prefix=prefix):
        for item in page:
            path = into / item["path"].removeprefix(f"{prefix}/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(bytes(obstore.get(memory, item["path"]).bytes()))
    return into


def test_a_checkpoint_is_read(bucket, tmp_path, capsys):
    address, memory = bucket
    upload(memory, SOURCE)
    assert open_checkpoint(named_path(address)).catalog.tensors.keys() == open_checkpoint(SOURCE).catalog.tensors.keys()
    for command in (("verify", address), ("inspect", address), ("ls", address), ("diff", address, SOURCE)):
        assert main([str(word) for word in command]) == 0, capsys.readouterr().err
    assert main(["export-hf", address, str(tmp_path / "remote"), "-q"]) == 0
    assert main(["export-hf", str(SOURCE), str(tmp_path / "local"), "-q"]) == 0
    ours, local = tree(tmp_path / "remote"), tree(tmp_path / "local")
    assert {n: c for n, c in ours.items() if "report" not in n} == {n: c for n, c in local.items() if "report" not in n}


def test_a_result_is_written(bucket, tmp_path):
    address, memory = bucket
    command = ("--tp", "4", "--pp", "1", "-q")
    assert main(["reshard", str(SOURCE), f"{address}/out", "--scratch", str(tmp_path / "scratch"), *command]) == 0
    assert main(["reshard", str(SOURCE), str(tmp_path / "out"), *command]) == 0
    assert tree(downloaded(memory, "run/out", tmp_path / "down")) == tree(tmp_path / "out")
    forget()
    assert main(["diff", f"{address}/out", str(tmp_path / "out")]) == 0
