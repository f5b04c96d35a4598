"""What would be wrong in silence: numbers that a type cannot hold, unfinished results, files that a page would replace."""

import shutil

import pytest
from safetensors.torch import load_file, save_file

from distckpt_cli.app import main
from harness.support import GOLDEN

RUN = GOLDEN / "llama_dpreshardable_tp2pp2dp2"


def said(capsys, *words):
    code = main([str(word) for word in words])
    return code, capsys.readouterr().err


def test_a_number_too_large_for_fp16_is_no_infinity(tmp_path, capsys):
    shutil.copytree(GOLDEN / "hf_llama_safetensors", tmp_path / "hf")
    path = sorted(tmp_path.glob("hf/*.safetensors"))[0]
    tensors = load_file(path)
    tensors["model.embed_tokens.weight"][0, 0] = 1e6
    save_file(tensors, path, {"format": "pt"})
    code, err = said(capsys, "import-hf", tmp_path / "hf", tmp_path / "out", "--dtype", "fp16")
    assert code == 4
    assert "too large for float16" in err
    assert "word_embeddings" in err
    assert not (tmp_path / "out").exists()
    assert said(capsys, "import-hf", tmp_path / "hf", tmp_path / "out", "--dtype", "fp32")[0] == 0


@pytest.mark.parametrize("command", [["inspect"], ["verify"], ["export-hf"]])
def test_what_an_interrupted_run_left_is_no_checkpoint(command, tmp_path, capsys):
    left = tmp_path / ".out.distckpt-partial"
    shutil.copytree(GOLDEN / "hf_llama_safetensors", left)
    code, err = said(capsys, *command, left, *([tmp_path / "x"] if command == ["export-hf"] else []))
    assert code == 3
    assert "unfinished result" in err


def test_a_page_replaces_only_a_page(tmp_path, capsys):
    copy = shutil.copytree(RUN, tmp_path / "run")
    common = next(copy.rglob("common.pt"))
    before = common.read_bytes()
    assert said(capsys, "inspect", copy, "--html", common)[0] == 5
    assert common.read_bytes() == before
    for _ in range(2):
        assert said(capsys, "inspect", copy, "--html", tmp_path / "page.html")[0] == 0
    assert said(capsys, "inspect", copy, "--html", tmp_path / "page.html", "--json")[0] == 2
    assert said(capsys, "inspect", copy, "--verification", tmp_path / "v.json")[0] == 2


def test_trained_rows_do_not_become_padding(tmp_path, capsys):
    code, err = said(capsys, "edit-args", RUN, tmp_path / "out", "--set", "vocab_size=100")
    assert code == 4
    assert "trained rows" in err


def test_a_run_is_not_its_own_results(tmp_path, capsys):
    copy = shutil.copytree(RUN, tmp_path / "run")
    assert said(capsys, "watch", copy, copy, "--once", "--", "strip")[0] == 2


def test_a_diff_of_nothing_is_no_answer(capsys):
    code, err = said(capsys, "diff", RUN, RUN, "--ignore", "*")
    assert code == 4
    assert "nothing" in err or "no tensor" in err


def test_a_version_that_is_told_decides(capsys):
    flags = "--tp 4 --pp 1 --no-load-optim --no-load-rng --mcore"
    answers = [main(["doctor", str(RUN), "--for", f"{flags} {version}"]) for version in ("0.15", "0.16")]
    out = capsys.readouterr().out
    assert answers == [1, 0]
    assert out.count("needs Megatron-Core 0.16 or later") == 1


@pytest.mark.parametrize("words", [["--sort", "size"], ["-i"], ["--regex"], ["--flat"], ["--depth", "5"]])
def test_an_option_for_lists_wants_a_list(words, capsys):
    assert said(capsys, "inspect", RUN, *words)[0] == 2
    lists = {"--depth": "--tree", "--regex": "--tensors=decoder"}
    assert said(capsys, "inspect", RUN, *words, lists.get(words[0], "--tensors"))[0] == 0
