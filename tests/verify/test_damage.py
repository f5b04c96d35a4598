"""A source that is recognised, but damaged: every command says so alike, and says the same."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
from contextlib import redirect_stderr, redirect_stdout
from typing import TYPE_CHECKING

import pytest

from converters.formats import open_checkpoint
from converters.pickles.nodes import fields, set_field
from distckpt_cli.app import main
from harness.checkpoints import copy_golden, edit_metadata
from harness.support import GOLDEN

if TYPE_CHECKING:
    from pathlib import Path

FLAT = "llama_dpreshardable_tp2pp2dp2"
WRITING = (
    ("reshard", "--tp", "2"),
    ("reshard", "--tp", "2", "--optimizer", "none"),
    ("convert", "--to", "legacy"),
    ("convert", "--to", "torch"),
    ("convert", "--to", "safetensors"),
    ("export-hf",),
)


def cli(command: str, *args: str | Path) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main([command, *map(str, args)])
    return code, out.getvalue(), err.getvalue()


def written(source: Path, target: Path, words: tuple[str, ...]) -> tuple[int, str]:
    """Exit code and errors of a command that writes; a target that is left is an error of the test."""
    command, *options = words
    code, _, err = cli(command, source, target, *options)
    assert not target.exists(), "damage was written"
    return code, err


@pytest.mark.parametrize("words", WRITING, ids=" ".join)
@pytest.mark.parametrize("size", [None, 10_000])
def test_a_damaged_data_file(words, size, tmp_path):
    """Gone or cut off: what is lost is listed before anything is read, in every command, with one exit code."""
    source = copy_golden(FLAT, tmp_path / "iter_0000010")
    if size is None:
        (source / "__4_0.distcp").unlink()
    else:
        os.truncate(source / "__4_0.distcp", size)
    what = "is missing" if size is None else "is 10,000 bytes"
    code, err = written(source, tmp_path / "out", words)
    assert code == 1, err
    assert err.startswith(f"error: __4_0.distcp {what}, the metadata needs 56,562 bytes\n       needed for\n"), err
    assert "       decoder.final_layernorm.weight\n" in err
    optimizer = words[0] != "export-hf" and "none" not in words and "safetensors" not in words
    assert (".bucket_idx_0.exp_avg\n" in err) is optimizer, err
    assert f"hint:  distckpt verify {source} says what else is; restore it from a copy, or use another" in err
    code, out, _ = cli("verify", source, "--progress", "off")
    assert (code, f"__4_0.distcp {what}, the metadata needs 56,562 bytes" in out) == (1, True)


def test_a_lost_object(tmp_path):
    """A random state in a file of its own: the file's loss is refused only where the object is carried."""
    source, lost = copy_golden(FLAT, tmp_path / "iter_0000010"), "rng_state/shard_1.0_2.2"

    def change(state):
        (info,) = [info for at, info in state["storage_data"].items() if fields(at)["fqn"] == lost]
        set_field(info, "relative_path", "__9_0.distcp")

    edit_metadata(source, change)
    words = ("--tp", "2", "--pp", "2", "--dp", "2", "--rng")
    code, err = written(source, tmp_path / "out", ("reshard", *words, "keep"))
    assert (code, f"needed for\n       {lost}\n" in err) == (1, True), err
    assert cli("reshard", source, tmp_path / "out", *words, "drop")[0] == 0


@pytest.mark.parametrize("words", [*WRITING, ("inspect",)], ids=" ".join)
@pytest.mark.parametrize(
    ("name", "raw", "said"),
    [
        (".metadata", b"", "is empty (0 bytes)"),
        (".metadata", None, "is missing: the save was not finished, or the hidden file was not copied"),
        ("metadata.json", b"{bad", "is not JSON"),
        ("metadata.json", b"", "is empty (0 bytes)"),
    ],
)
def test_what_describes_it_is_damaged(words, name, raw, said, tmp_path):
    """It cannot be opened: 3, with a hint; to `verify` the same is an answer."""
    source = copy_golden(FLAT, tmp_path / "iter_0000010")
    (source / name).unlink()
    if raw is not None:
        (source / name).write_bytes(raw)
    _cannot_open(source, words, f"{name} {said}", tmp_path / "out")


@pytest.mark.parametrize("raw", [b"{bad", b""])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_what_describes_a_hugging_face_folder_is_damaged(name, raw, tmp_path):
    source = tmp_path / "hf"
    shutil.copytree(GOLDEN / "hf_llama_safetensors", source)
    json.loads((source / name).read_bytes())
    (source / name).write_bytes(raw)
    said = f"{name} is not JSON" if raw else f"{name} is empty (0 bytes)"
    for words in (("inspect",), ("convert", "--to", "torch")):
        _cannot_open(source, words, said, tmp_path / "out")


def _cannot_open(source: Path, words: tuple[str, ...], said: str, target: Path) -> None:
    if words == ("inspect",):
        code, _, err = cli("inspect", source)
    else:
        code, err = written(source, target, words)
    assert code == 3, err
    assert err.startswith(f"error: {said}"), err
    assert f"hint:  distckpt verify {source} compares with integrity.json" in err
    code, out, err = cli("verify", source, "--progress", "off")
    assert code == 1, err
    assert f"structure BAD   {said}" in out
    assert "restore the damaged files from a copy" in err


def hinted(err: str) -> list[str]:
    """The command that a hint names, without `distckpt`."""
    (found,) = re.findall(r"distckpt (convert \S+ OUT --to safetensors) keeps the weights", err)
    return shlex.split(found)


def test_what_is_hinted_at_for_a_lost_common_state_works(tmp_path):
    """Every refusal names the one way that is left, and it is one."""
    source = copy_golden(FLAT, tmp_path / "iter_0000010")
    (source / "common.pt").unlink()
    code, _, err = cli("verify", source, "--progress", "off")
    assert code == 1
    assert "restore common.pt from a copy" in err
    assert "--optimizer none" not in err, "a reshard needs the common state, too"
    named = [hinted(err)]
    for words in WRITING[:4]:
        code, err = written(source, tmp_path / "out", words)
        assert code == 4, err
        named.append(hinted(err))
    for words in ((), ("--arch", "llama"), ("--hf-config", str(GOLDEN / "hf_llama_safetensors"))):
        code, err = written(source, tmp_path / "out", ("export-hf", *words))
        assert code == 4, err
        assert "convert --to safetensors keeps the weights" in err
    assert [words[0] for words in named] == ["convert"] * 5
    for number, (command, _, _, *options) in enumerate(named[:1] + named[-1:]):
        assert cli(command, source, tmp_path / f"out{number}", *options)[0] == 0
        ours = open_checkpoint(tmp_path / f"out{number}").catalog.weights
        assert ours.keys() == open_checkpoint(source).catalog.weights.keys()


@pytest.mark.parametrize("words", [*WRITING, ("inspect",)], ids=" ".join)
def test_a_flipped_bit_in_the_arguments(words, tmp_path):
    """The sum of the arguments' pickle is compared before they are believed: a number of theirs would change the model."""
    source = copy_golden(FLAT, tmp_path / "iter_0000010")
    raw = bytearray((source / "common.pt").read_bytes())
    raw[len(raw) // 2] ^= 1
    (source / "common.pt").write_bytes(raw)
    _cannot_open(source, words, "common.pt is damaged: data.pkl does not match its checksum", tmp_path / "out")
