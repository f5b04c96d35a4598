"""Which checkpoint a typed path means, whatever else lies beside it, and what is said where it means none."""

from __future__ import annotations

import shutil

import pytest
import torch

from converters.errors import FormatError
from converters.formats import open_checkpoint
from converters.formats.resolve import resolve
from converters.names import quoted
from harness.support import GOLDEN, nobody


@pytest.fixture
def models(tmp_path):
    folder = tmp_path / "models"
    folder.mkdir()
    torch.save({"w": torch.ones(2, 2)}, folder / "model.pt")
    return folder


def refusal(path):
    with pytest.raises(FormatError) as caught:
        open_checkpoint(path)
    return caught.value


def test_neighbours_do_not_matter(models):
    (models / "loop").symlink_to("loop")
    (models / "model").symlink_to("model")
    (models / "bad.nemo").write_bytes(bytes(257) + b"ustar\0" + bytes(20000))
    (models / "readme.txt").write_text("hello")
    (models / "zero.pt").touch()
    assert resolve(models / "model.pt") == models / "model.pt"
    assert resolve(models) == models / "model.pt"  # the only one that can be read
    for name, words in (("readme.txt", "is not a checkpoint"), ("zero.pt", "is empty (0 bytes)")):
        error = refusal(models / name)
        assert words in error.message
        assert name in error.message
        assert "bad.nemo" not in str(error)
        assert error.hint is None
    assert "bad.nemo" in refusal(models / "bad.nemo").message


def test_folders_that_may_not_be_read(models):
    (models / "private").mkdir(mode=0o000)
    (models / "shut").mkdir()
    (models / "shut" / "iter_0000001").mkdir(mode=0o000)
    open_checkpoint(models / "model.pt")  # its reader is imported
    with nobody(models):
        assert open_checkpoint(models / "model.pt").catalog.format == "torch"
        assert open_checkpoint(models).catalog.format == "torch"
        for path, closed in (("private", "private"), ("shut", "shut/iter_0000001")):
            assert refusal(models / path).message == f"{models / closed} cannot be read: Permission denied"


def test_several_files_are_not_chosen_among(models):
    torch.save({"w": torch.ones(1)}, models / "other file.pt")
    assert "2 checkpoints" in refusal(models).message
    (models / "model.pt").unlink()
    torch.save({"w": torch.ones(1)}, models / "third file.pt")
    assert refusal(models).hint == f"name one: '{models / 'other file.pt'}'"


def test_a_part_that_cannot_be_read_is_not_left_out(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / ".metadata").write_bytes(b"x")
    (tmp_path / "optimizer").symlink_to("optimizer")
    with pytest.raises((FormatError, OSError), match=r"optimizer|links"):
        open_checkpoint(tmp_path)


def test_a_path_is_quoted_for_the_shell():
    assert quoted("a b/c") == "'a b/c'"
    assert quoted("plain/path.pt") == "plain/path.pt"
    assert quoted("a;rm\x1b") == r"$'a;rm\033'"


def test_training_roots_side_by_side_are_counted(tmp_path):
    """A folder of experiments: the one that happens to be a data folder itself is not taken for all."""
    shutil.copytree(GOLDEN / "hf_llama_safetensors", tmp_path / "a")
    assert resolve(tmp_path) == tmp_path / "a"
    for name in ("b", "c"):
        shutil.copytree(GOLDEN / "qwen2_weights_tp2pp2", tmp_path / name)
    with pytest.raises(FormatError, match="holds 3 checkpoints"):
        resolve(tmp_path)
