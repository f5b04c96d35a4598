"""Tar files as sources: what comes out is that of the folder, nothing is unpacked, hostile members are refused by name."""

import filecmp
import io
import json
import os
import shutil
import tarfile
from pathlib import Path

import pytest

from converters.errors import FormatError
from converters.formats import open_checkpoint
from converters.formats.folder import exists, is_file, is_folder, listing, open_source, scan, status
from distckpt_cli.app import main
from harness.checkpoints import golden
from harness.hostile_tars import GOOD, HOSTILE, member
from harness.support import GOLDEN

NEMO1 = "nemo1_zarr_llama4_weights_tp2pp2"
SOURCES = [
    NEMO1,
    "nemo2_llama4_weights_tp2pp2",
    "bridge_llama4_weights_tp2pp2",
    "llama_dpreshardable_tp2pp2dp2",
    "v019_llama_fullyreshardable_tp2dp2",
    "legacy_mixtral_distopt_ep2pp2",
]
COMMANDS = {
    "export": ["export-hf"],
    "reshard": ["reshard", "--tp", "1", "--pp", "2"],
    "convert": ["convert", "--to", "torch_dist", "--tp", "2"],
}

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def pack(folder, path, arcname=".", form=tarfile.PAX_FORMAT):
    """As NeMo's `SaveRestoreConnector._make_nemo_file_from_folder` does."""
    with tarfile.open(path, "w:", format=form) as tar:
        tar.add(folder, arcname=arcname)
    return path


def tree(folder):
    return {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_writes_what_it_writes_from_the_folder(name, command, tmp_path):
    (tmp_path / "in").mkdir()
    source = pack(GOLDEN / name, tmp_path / "in" / "model.nemo")
    verb, *options = COMMANDS[command]
    for src, dst in ((GOLDEN / name, "plain"), (source, "packed")):
        assert main([verb, str(src), str(tmp_path / dst), *options]) == 0
    plain, packed = tree(tmp_path / "plain"), tree(tmp_path / "packed")
    assert list(plain) == list(packed)
    different = [file for file in plain if not filecmp.cmp(plain[file], packed[file], shallow=False)]
    assert set(different) <= {"distckpt-report.json"}  # it names the source
    assert [path.name for path in (tmp_path / "in").iterdir()] == ["model.nemo"]


@pytest.mark.parametrize("name", SOURCES)
def test_inspect_and_verify(name, tmp_path, capsys):
    source = pack(GOLDEN / name, tmp_path / "model.nemo")
    documents = []
    for path in (GOLDEN / name, source):
        assert main(["inspect", "--json", "--tensors", "*", "--flat", str(path)]) == 0
        documents.append(json.loads(capsys.readouterr().out))
    for document in documents:
        document.pop("path", None)
    assert json.dumps(documents[0]) == json.dumps(documents[1])
    assert main(["verify", str(source)]) == 0
    assert main(["diff", str(GOLDEN / name), str(source)]) == 0


@pytest.mark.parametrize("name", ["llama_dpreshardable_tp2pp2dp2", "legacy_mixtral_distopt_ep2pp2"])
def test_a_flipped_byte_is_found(name, tmp_path):
    source = pack(GOLDEN / name, tmp_path / "model.nemo")
    with tarfile.open(source) as tar:
        member = max((m for m in tar.getmembers() if m.name.endswith((".distcp", ".pt"))), key=lambda m: m.size)
    with source.open("r+b") as file:
        file.seek(member.offset_data + member.size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))
    assert main(["verify", str(source)]) == 1


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_dialects_long_names_and_a_folder_around_it(form, tmp_path):
    around = "a_folder_with_a_name_that_is_rather_long" if form == tarfile.USTAR_FORMAT else "x" * 120
    source = pack(GOLDEN / NEMO1, tmp_path / "it.tar", around, form)
    found, wanted = open_checkpoint(source).catalog, open_checkpoint(GOLDEN / NEMO1).catalog
    assert found.tensors.keys() == wanted.tensors.keys()
    assert found.framework == "NeMo 1"
    assert found.root == source
    assert main(["export-hf", str(source), str(tmp_path / "hf")]) == 0


def test_one_iteration_of_several_is_named_inside(tmp_path):
    root = tmp_path / "root"
    for number in (10, 20):
        shutil.copytree(golden("llama_adam_tp2pp2"), root / f"iter_{number:07d}")
    source = pack(root, tmp_path / "run.tar")
    assert "2 iterations" in refused(source).message
    assert open_checkpoint(source / "iter_0000020").catalog.path == source / "iter_0000020"
    (root / "latest_checkpointed_iteration.txt").write_text("20")
    assert open_checkpoint(pack(root, tmp_path / "run2.tar")).catalog.path.name == "iter_0000020"


def test_a_replaced_file_is_read_anew(tmp_path):
    source = pack(GOLDEN / NEMO1, tmp_path / "it.tar")
    first = open_checkpoint(source).fingerprint()
    assert open_checkpoint(source).fingerprint() == first
    os.utime(source, ns=(1, 1))
    assert open_checkpoint(source).fingerprint() != first
    pack(golden("llama_adam_tp2pp2"), tmp_path / "other.tar").replace(source)
    assert open_checkpoint(source).catalog.format == "torch_dist"


def test_the_source_is_not_overwritten(tmp_path, capsys):
    source = pack(GOLDEN / NEMO1, tmp_path / "it.nemo")
    before = source.read_bytes()
    for destination in (source, source / "out", source / "model_weights"):
        assert main(["export-hf", str(source), str(destination), "--overwrite"]) in (2, 5)
    assert source.read_bytes() == before


# ---------------------------------------------------------------------- looking into a tar file


def test_files_and_folders_inside(tmp_path):
    source = pack(GOLDEN / NEMO1, tmp_path / "it.tar")
    for path in sorted((GOLDEN / NEMO1).rglob("*")):
        inside = source / path.relative_to(GOLDEN / NEMO1)
        assert (is_folder(inside), is_file(inside)) == (path.is_dir(), path.is_file())
        if path.is_dir():
            assert listing(inside) == sorted(inner.name for inner in path.iterdir())
            continue
        content = path.read_bytes()
        file = open_source(inside)
        assert (file.size, file.read(0, 1 << 20)) == (len(content), content)
        assert file.read(5, 3) == content[5:8]
        assert file.read(len(content) - 1, 100) == content[-1:]  # and nothing of the member that follows
        assert file.read(len(content), 1) == b""
        view = memoryview(bytearray(len(content) + 50))
        assert file.read_into(view, 0) == len(content)
        file.close()
    for absent in ("nothing", "model_config.yaml/below", "../it.tar", "model_weights/../model_config.yaml"):
        assert not exists(source / absent)
        with pytest.raises(FormatError):
            open_source(source / absent)
    with pytest.raises(NotADirectoryError), scan(source / "model_config.yaml"):
        pass
    assert status(source / "model_weights").folder


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_members_beyond_8_gib(form, tmp_path):
    """Their size does not fit the field: GNU writes it in binary, pax as an attribute. The file has holes."""
    big = tarfile.TarInfo("big")
    big.size = 9 << 30
    small = tarfile.TarInfo("small")
    small.size = 4
    with (tmp_path / "big.tar").open("wb") as file:
        file.write(big.tobuf(form))
        file.seek(big.size, os.SEEK_CUR)
        file.write(small.tobuf(form) + b"here".ljust(512, b"\0") + bytes(1024))
    file = open_source(tmp_path / "big.tar" / "small")
    assert file.read(0, 10) == b"here"
    file.close()
    assert status(tmp_path / "big.tar" / "big").size == 9 << 30


# ---------------------------------------------------------------------- hostile and damaged


def refused(path):
    with pytest.raises(FormatError) as caught:
        open_checkpoint(path)
    return caught.value


@pytest.mark.parametrize("what", HOSTILE)
def test_refused_by_name(what, tmp_path):
    content, words = HOSTILE[what]
    path = tmp_path / "evil.nemo"
    path.write_bytes((b"" if content.startswith(GOOD) else GOOD) + content + bytes(1024))
    error = refused(path)
    assert words in error.message
    assert "evil.nemo" in error.message
    assert "\x1b" not in error.message
    assert [p.name for p in tmp_path.iterdir()] == ["evil.nemo"]


def test_a_good_one_of_the_same_make_is_not_refused(tmp_path):
    """The negative control of all of the above: it fails for what is in it, not for being a tar file."""
    path = tmp_path / "good.nemo"
    path.write_bytes(GOOD + member("model_weights/metadata.json", b'{"sharded_backend": "none"}') + bytes(1024))
    assert "is in the format 'none'" in refused(path).message


@pytest.mark.parametrize("keep", [0.5, 0.9])
def test_cut_short(keep, tmp_path):
    source = pack(GOLDEN / NEMO1, tmp_path / "it.nemo")
    content = source.read_bytes()
    source.write_bytes(content[: int(len(content) * keep) // 512 * 512])
    assert "cut short" in refused(source).message
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        last = tar.getmembers()[-1]
    end = last.offset_data + -(-last.size // 512) * 512
    source.write_bytes(content[:end])  # between two members: nothing but the mark of the end is missing
    assert "cut short" in refused(source).message


@pytest.mark.parametrize(("mode", "name"), [("w:gz", "gzip"), ("w:bz2", "bzip2"), ("w:xz", "xz")])
def test_compressed_ones_say_what_to_type(mode, name, tmp_path):
    path = tmp_path / "old.nemo"
    with tarfile.open(path, mode) as tar:
        tar.add(GOLDEN / NEMO1, arcname=".")
    error = refused(path)
    assert f"compressed with {name}" in error.message
    assert error.exit_code == 4
    assert "tar -xf" in error.hint


def test_other_files_are_not_taken_for_tar_files(tmp_path):
    for content in (b"", b"x", bytes(512), b"y" * 5000, bytes(257) + b"ustar"):
        (tmp_path / "file").write_bytes(content)
        assert not is_folder(tmp_path / "file")
        assert "is not a checkpoint" in (message := refused(tmp_path / "file").message) or "is empty (0" in message
    assert not exists(Path(tmp_path / "file" / "inner"))
