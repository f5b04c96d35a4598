"""`distckpt inspect` of several checkpoints, sorted, as a tree; its exit codes; the commands that it names."""

from __future__ import annotations

import json
import shlex
import shutil
import sys

import pytest

from converters.formats import open_checkpoint
from converters.overview.tree import module_tree
from distckpt_cli.app import main
from harness.cli_support import terminal
from harness.support import GOLDEN

SOURCES = sorted(p.name for p in GOLDEN.iterdir() if p.is_dir() and p.name not in ("truth", "pickles"))


@pytest.fixture(autouse=True)
def at_golden(monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR", "DISTCKPT_DEBUG", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(GOLDEN)


def run(capsys, *args):
    code = main(["inspect", *map(str, args)])
    return code, *capsys.readouterr()


def next_commands(err):
    return [shlex.split(line.removeprefix("next: ")) for line in err.splitlines() if line.startswith("next: ")]


@pytest.mark.parametrize("name", SOURCES)
def test_the_next_command_works_on_every_golden(name, capsys):
    code, _, err = run(capsys, name)
    (words,) = next_commands(err)
    assert words[0] == "distckpt"
    assert main([*words[1:], *(["--quick"] if words[1] == "verify" else [])]) == (code if words[1] == "verify" else 0)
    assert capsys.readouterr().out


@pytest.mark.parametrize("view", [[], ["--files"], ["--json"], ["-q"], ["--silent"]])
def test_a_lost_file_is_exit_1(view, tmp_path, capsys):
    shutil.copytree(GOLDEN / "llama_adam_tp2pp2", tmp_path / "run")
    assert run(capsys, tmp_path / "run", *view)[0] == 0
    next(tmp_path.glob("run/iter_*/__1_0.distcp")).unlink()
    code, out, err = run(capsys, tmp_path / "run", *view)
    assert code == 1
    assert ("__1_0.distcp" in out) == (view != ["--silent"])
    assert (out, err) == ("", "") or view != ["--silent"]


def test_several_have_a_card_each_and_many_a_row(capsys):
    names = ["llama_adam_tp2pp2", "qwen3_adam_tp2"]
    code, out, err = run(capsys, *names)
    assert code == 0
    assert [out.count(f"{name}/iter_") for name in names] == [1, 1]
    assert len(next_commands(err)) == 2
    document = json.loads(run(capsys, *names, "--json")[1])
    assert [c["architecture"]["name"] for c in document["checkpoints"]] == ["llama", "qwen3"]
    code, out, _ = run(capsys, *SOURCES[:5])
    assert code == 0
    assert out.splitlines()[0].startswith("STATUS")
    assert len(out.splitlines()) == 7  # columns, rows, total


@pytest.mark.parametrize("view", ["--tensors", "--html=page.html", "--names", "--tree"])
def test_a_view_of_one_is_not_ignored_for_many(view, capsys):
    code, _, err = run(capsys, ".", view)
    assert code == 2
    assert "shows one checkpoint" in err


def test_a_folder_of_several_runs_is_listed_with_nemos(tmp_path, capsys):
    shutil.copytree(GOLDEN / "llama_adam_tp2pp2", tmp_path / "real" / "mlm")
    shutil.copytree(GOLDEN / "nemo2_llama4_weights_tp2pp2", tmp_path / "real" / "deep" / "nemo")
    code, out, _ = run(capsys, tmp_path / "real")
    assert code == 0
    assert "real/mlm/iter_0000010 *" in out
    assert "real/deep/nemo" in out
    rows = json.loads(run(capsys, tmp_path / "real", "--json")[1])
    assert rows["schema"] == "distckpt.ls/1"
    assert len(rows["checkpoints"]) == 2


def test_other_iterations_of_a_run_are_mentioned(tmp_path, capsys):
    shutil.copytree(GOLDEN / "llama_adam_tp2pp2", tmp_path / "run")
    shutil.copytree(tmp_path / "run" / "iter_0000010", tmp_path / "run" / "iter_0000005")
    code, out, err = run(capsys, tmp_path / "run")
    assert (code, "iter_0000010" in out) == (0, True)
    assert (
        f"note: the run has 2 iterations; its tracker file names this one. All: distckpt ls {tmp_path / 'run'}" in err
    )


def test_weights_come_before_optimizer_state_and_size_sorts(capsys):
    names = [line.split()[-1] for line in run(capsys, "mixtral_adam_ep2tp2", "--tensors")[1].splitlines()[1:-1]]
    optimizer = [name.startswith(("optimizer", "chained")) for name in names]
    assert any(optimizer)
    assert optimizer == sorted(optimizer)
    sizes = [t["bytes"] for t in _tensors(capsys, "--sort", "size")]
    assert sizes == sorted(sizes, reverse=True)


def _tensors(capsys, *options):
    return json.loads(run(capsys, "mixtral_adam_ep2tp2", "--tensors", "*", "--json", *options)[1])["tensors"]


def test_a_single_file_is_named_and_says_what_it_holds(capsys):
    path = str(GOLDEN / "truth" / "gdn-bf16.safetensors")
    assert main(["inspect", path, "--tensors", "--flat", "--json"]) == 0
    tensors = json.loads(capsys.readouterr().out)["tensors"]
    assert {chunk["file"] for tensor in tensors for chunk in tensor["chunks"]} == {"gdn-bf16.safetensors"}
    assert main(["inspect", path, "--files"]) == 0
    assert "weights 0.41 MiB" in capsys.readouterr().out


def test_regular_expressions_and_case(capsys):
    lines = run(capsys, "llama_adam_tp2pp2", "--tensors", r"layers\.[01]\..*FC2", "--regex", "-i", "--names")[1].split()
    weights = [name for name in lines if not name.startswith("optimizer")]
    assert weights == ["decoder.layers.0.mlp.linear_fc2.weight", "decoder.layers.1.mlp.linear_fc2.weight"]
    assert run(capsys, "llama_adam_tp2pp2", "--tensors", "DECODER.*", "-i", "--names")[1].startswith("decoder.")
    code, _, err = run(capsys, "llama_adam_tp2pp2", "--tensors", "*FC2*")
    assert (code, "hint:  -i ignores the case: 8 tensors" in err) == (4, True)
    code, _, err = run(capsys, "llama_adam_tp2pp2", "--tensors", "(", "--regex")
    assert (code, "is not a regular expression" in err) == (2, True)


@pytest.mark.parametrize("name", SOURCES)
def test_a_tree_adds_up_to_all_tensors(name):
    tensors = open_checkpoint(GOLDEN / name).catalog.tensors.values()

    def check(module):
        for what in ("nbytes", "parameters", "tensors"):
            below = [getattr(child, what) for child in module.children.values()]
            assert sum(below) <= getattr(module, what)
        for child in module.children.values():
            check(child)

    for folded in (True, False):
        roots = module_tree(tensors, folded=folded)
        assert sum(root.nbytes for root in roots) == sum(t.nbytes for t in tensors)
        assert sum(root.tensors for root in roots) == len(tensors)
        for root in roots:
            check(root)


def test_the_tree_is_shown_with_bars_where_there_is_room(capsys):
    code, out, _ = run(capsys, "llama_adam_tp2pp2", "--du", "--depth", "2", "--sort", "size")
    assert code == 0
    assert out.splitlines()[0].split() == ["SIZE", "SHARE", "TENSORS", "MODULE"]
    assert out.splitlines()[1].split()[:5] == ["0.27", "MiB", "86%", "#" * 17, "45"]
    assert "layers.{0..1}" in out
    document = json.loads(run(capsys, "llama_adam_tp2pp2", "--tree", "--json")[1])
    assert [root["name"] for root in document["tree"]] == ["weights", "optimizer state"]
    command = [sys.executable, "-m", "distckpt_cli", "inspect", "llama_adam_tp2pp2", "--tree"]
    code, text = terminal(command, 40, TERM="dumb")
    assert code == 0
    assert "#" not in text
    assert max(map(len, text.splitlines())) <= 60


@pytest.mark.parametrize("option", [["--tensors"], ["--tree"]])
def test_views_exclude_each_other(option, capsys):
    assert run(capsys, "llama_adam_tp2pp2", "--files", *option)[0] == 2
