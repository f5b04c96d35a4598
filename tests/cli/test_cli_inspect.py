"""`distckpt inspect` on real checkpoints, on damaged ones, and on names that try to act on the terminal."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from converters.catalog import Catalog, FileInfo, ObjectInfo, Part, Problem, TensorInfo
from converters.chunks import StoredArray
from converters.dtypes import dtype
from converters.formats.base import Reader
from distckpt_cli import app
from harness.cli_support import ROOT, child, environment, same_as_file, terminal, wall_seconds
from harness.support import GOLDEN

CONTROL = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


@pytest.fixture(autouse=True)
def at_golden(monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR", "DISTCKPT_DEBUG", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(GOLDEN)


def run(capsys, *args: str) -> tuple[int, str, str]:
    code = app.main(["inspect", *args])
    return code, *capsys.readouterr()


VIEWS = {
    "card_llama_adam": ["llama_adam_tp2pp2"],
    "card_deepseek_mtp": ["deepseek_mtp_adam_ep2pp2"],
    "card_dpreshardable": ["llama4_dpreshardable_pp4dp2"],
    "card_nemo2": ["nemo2_llama4_weights_tp2pp2"],
    "card_v009_modelspace": ["v009_llama_modelspace_tp2pp2dp2"],
    "tensors_llama_adam": ["llama_adam_tp2pp2", "--tensors", "decoder.*"],
    "tensors_flat_mixtral": ["mixtral_adam_ep2tp2", "--tensors", "*.experts.*fc1*", "--flat"],
    "tensors_optimizer": ["llama_dpreshardable_tp2pp2dp2", "--tensors", "*optimizer*"],
    "files_llama_dpzero": ["llama_dpzero_tp2pp2dp2", "--files"],
    "args_llama_adam": ["llama_adam_tp2pp2", "--args", "*lr*"],
    "objects_mixtral": ["mixtral_adam_ep2tp2", "--objects"],
    "objects_flat": ["llama_adam_tp2pp2", "--objects", "rng*", "--flat"],
}


@pytest.mark.parametrize("name", VIEWS)
def test_views(name, capsys):
    code, out, _ = run(capsys, *VIEWS[name])
    assert code == 0
    same_as_file(out, f"cli_{name}.txt")


def test_only_the_answer_is_on_stdout(capsys):
    _, out, err = run(capsys, "llama_adam_tp2pp2")
    assert "next:" not in out
    assert err == "next: distckpt inspect llama_adam_tp2pp2 --tensors 'decoder.*'\n"


@pytest.mark.parametrize("path", sorted({p.relative_to(GOLDEN).parts[0] for p in GOLDEN.rglob("metadata.json")}))
def test_every_golden_checkpoint_has_a_card(path, capsys):
    code, out, err = run(capsys, path)
    assert code == 0
    assert re.search(r"^model +.*\b[124] layers?[, ]", out, re.MULTILINE)
    broken = path.startswith("broken_")
    assert bool(re.search(r"^(error|warning) ", out, re.MULTILINE)) == broken
    assert (err == f"next: distckpt verify {path}\n") == broken


# choosing


@pytest.mark.parametrize("glob", [[], ["*"]])
def test_names_only(glob, capsys):
    _, out, err = run(capsys, "llama_adam_tp2pp2", "--names", *(["--tensors", *glob] if glob else []))
    names = out.splitlines()
    assert err == ""
    assert names[0] == "decoder.final_layernorm.weight"
    assert len(names) == len(set(names)) == 60
    assert "optimizer.state.exp_avg.output_layer.weight" in names


def test_names_of_the_other_views(capsys):
    assert run(capsys, "llama_adam_tp2pp2", "--names", "--files")[1].splitlines()[:1] == ["__0_0.distcp"]
    assert run(capsys, "llama_adam_tp2pp2", "--names", "--args", "lr")[1] == "lr\n"
    assert run(capsys, "llama_adam_tp2pp2", "--names", "--objects", "rng_state")[1].count("\n") == 4


@pytest.mark.parametrize(
    ("glob", "count"),
    [
        ("decoder.layers.{0..1}.mlp.linear_fc1.weight", 2),
        ("decoder.layers.{1}.mlp.linear_fc?.weight", 2),
        ("decoder.layers.{0,1..7}.mlp.*.weight", 4),
        ("decoder.layers.mlp.linear_fc1.weight", 2),  # the key as the file spells it
        ("*.output_layer.*", 3),
        ("embedding.word_embeddings.weight", 1),
    ],
)
def test_globs(glob, count, capsys):
    code, out, _ = run(capsys, "llama_adam_tp2pp2", "--tensors", glob, "--json")
    assert code == 0
    assert len(json.loads(out)["tensors"]) == count


@pytest.mark.parametrize("order", [["llama_adam_tp2pp2", "--tensors"], ["--tensors", "llama_adam_tp2pp2"]])
def test_a_glob_may_be_left_out(order, capsys):
    code, out, _ = run(capsys, *order)
    assert code == 0
    assert out.splitlines()[-1].startswith("60 tensors, ")


@pytest.mark.parametrize(
    ("option", "glob", "hint"),
    [
        ("--tensors", "decoder.layer.*", "did you mean 'decoder.layers.*'?  (12 tensors)"),
        ("--tensors", "decoder.layers.0.mlp.linear_fc3.weight", "did you mean "),
        (
            "--tensors",
            "[zq]*",
            "there are 60 stored tensors, for example output_layer.weight, decoder.final_layernorm.weight, ",
        ),
        ("--tensors", "layernorm", "did you mean '*layernorm*'?  (4 tensors)"),
        ("--tensors", "mtp", "there are 60 stored tensors, for example "),
        ("--args", "hiden_size", "did you mean 'hidden_size'?  (1 argument)"),
        ("--objects", "rng_stat", "did you mean 'rng_state'?  (1 object)"),
    ],
)
def test_no_match_is_exit_4_with_the_nearest_name(option, glob, hint, capsys):
    code, out, err = run(capsys, "llama_adam_tp2pp2", option, glob)
    assert (code, out) == (4, "")
    assert err.startswith(f"error: no {option[2:-1].replace('arg', 'argument')} matches '{glob}'\nhint:  {hint}")


# JSON


def test_json_document(capsys):
    code, out, err = run(capsys, "llama_dpreshardable_tp2pp2dp2", "--json")
    document = json.loads(out)
    assert (code, err) == (0, "")
    assert document["schema"] == "distckpt.inspect/1"
    assert document["format"] == "torch_dist"
    assert document["iteration"] == 10
    assert document["architecture"] == {"name": "llama", "class": "LlamaForCausalLM"}
    assert document["model"]["hidden_size"] == 32
    assert document["layout"] | {"tp": 2, "pp": 2, "dp": 2, "ranks": 8} == document["layout"]
    assert document["optimizer"]["name"] == "dp_reshardable"
    assert document["fully_parallel_save"]["value"] is True
    assert document["bytes"] == sum(c["bytes"] for c in document["components"])
    assert document["disk_bytes"] == sum(f["size"] for f in document["files"])
    assert document["writers"] == list(range(8))
    assert document["problems"] == []
    assert "tensors" not in document


def test_json_tensors(capsys):
    args = ["llama_adam_tp2pp2", "--json", "--tensors", "decoder.layers.0.mlp.linear_fc1.weight"]
    brief = json.loads(run(capsys, *args)[1])["tensors"][0]
    assert brief == {
        "name": "decoder.layers.0.mlp.linear_fc1.weight",
        "keys": ["decoder.layers.mlp.linear_fc1.weight"],
        "dtype": "bfloat16",
        "shape": [96, 32],
        "bytes": 6144,
        "kind": "weight",
        "opaque": None,
        "chunk_count": 4,
    }
    whole = json.loads(run(capsys, *args, "--flat")[1])["tensors"][0]
    assert [c["offset"] for c in whole["chunks"]] == [[0, 0], [24, 0], [48, 0], [72, 0]]
    assert all(c["shape"] == [24, 32] and re.fullmatch(r"__[01]_[01]\.distcp", c["file"]) for c in whole["chunks"])


def test_json_holds_all_views_at_once(capsys):
    code, out, _ = run(capsys, "v019_llama_fullyreshardable_tp2dp2", "--json", "--args", "--objects", "--tensors")
    document = json.loads(out)
    assert code == 0
    assert document["args"]["hidden_size"] == 32
    assert {"args", "objects", "tensors", "files"} <= document.keys()
    assert any(o["key"] == "common_state/shard_0_1" for o in document["objects"])


# damaged and absent


def damaged(tmp_path: Path) -> Path:
    folder = tmp_path / "ckpt"
    shutil.copytree(GOLDEN / "llama_adam_tp2pp2", folder)
    data = folder / "iter_0000010"
    for path in [folder, data, *data.iterdir()]:
        path.chmod(0o755)
    with open(data / "__0_1.distcp", "r+b") as file:
        file.truncate(50_000)
    (data / "__3_1.distcp").unlink()
    shutil.copy(data / "__0_0.distcp", data / "__9_0.distcp")
    return folder


def test_problems_are_on_the_card_and_the_card_is_an_answer(tmp_path, capsys):
    folder = damaged(tmp_path)
    code, out, err = run(capsys, str(folder))
    assert code == 1
    assert "error     __0_1.distcp is 50,000 bytes, the metadata needs 68,345 bytes\naffects   decoder.layers.0." in out
    assert "error     __3_1.distcp is missing" in out
    assert "warning   __9_0.distcp" in out
    assert err.startswith("next: distckpt ")


def test_problems_in_the_files_view(tmp_path, capsys):
    lines = run(capsys, str(damaged(tmp_path)), "--files")[1].splitlines()
    status = {line.split()[-1]: line for line in lines}
    assert "SHORT by 18,345 bytes" in status["__0_1.distcp"]
    assert "MISSING" in status["__3_1.distcp"]
    assert "UNREFERENCED" in status["__9_0.distcp"]


def test_problems_as_json(tmp_path, capsys):
    document = json.loads(run(capsys, str(damaged(tmp_path)), "--json")[1])
    assert sorted(p["severity"] for p in document["problems"]) == ["error", "error", "warning"]
    assert all(p["tensors"] for p in document["problems"] if p["severity"] == "error")


@pytest.mark.parametrize("what", ["nothing", "empty", "file", "foreign"])
def test_unreadable_sources_are_exit_3(what, tmp_path, capsys):
    path = tmp_path / what
    if what in ("empty", "foreign"):
        path.mkdir()
    if what == "foreign":
        (path / "notes.txt").write_text("x")
    if what == "file":
        path.write_text("x")
    code, out, err = run(capsys, str(path))
    assert (code, out) == (3, "")
    assert err.startswith("error: ")
    assert "Traceback" not in err
    assert json.loads(run(capsys, str(path), "--json")[1])["error"]["exit_code"] == 3


# terminals


def test_forty_columns():
    code, text = terminal([sys.executable, "-m", "distckpt_cli", "inspect", "llama_adam_tp2pp2"], 40, TERM="dumb")
    assert code == 0
    wide = [line for line in text.splitlines() if len(line) > 40 and not line.startswith(("llama_adam", "next:"))]
    assert wide == []
    assert CONTROL.search(text) is None


def test_forty_columns_never_cut_a_name():
    command = [sys.executable, "-m", "distckpt_cli", "inspect", "llama_adam_tp2pp2", "--tensors", "*fc1*"]
    _, text = terminal(command, 40, TERM="dumb")
    assert "\n  decoder.layers.{0..1}.mlp.linear_fc1.layer_norm_weight\n" in text


def test_the_same_text_on_a_terminal_and_in_a_pipe():
    command = [sys.executable, "-m", "distckpt_cli", "inspect", "llama_adam_tp2pp2", "--files"]
    _, shown = terminal(command, 200, NO_COLOR="1")
    piped = child("inspect", "llama_adam_tp2pp2", "--files")
    assert sorted(shown.splitlines()) == sorted((piped.out + piped.err).splitlines())


HOSTILE = [
    "decoder.layers.0.mlp.\x1b[2J\x1b[31mowned",
    "decoder.layers.1.[/bold][link=http://x]click[/link]",
    "decoder.\u202egpj.exe",
    "decoder.\x9b31mcsi\x07",
    "line\nbreak\rreturn\ttab",
    "decoder.layers.2.{curly}.%s.{0}",
    "\udcff.surrogate",
]


class MadeReader(Reader):
    """A reader whose catalog is full of names that no sane program writes."""

    name = "torch_dist"
    file_name = Reader.file_name

    def __init__(self) -> None:
        one = np.ones((1, 1), np.int64)
        tensors = {}
        for number, name in enumerate(HOSTILE):
            array = StoredArray(name, (1,), one - 1, one, np.array([number]))
            kind = ("weight", "optimizer", "other")[number % 3]
            tensors[name] = TensorInfo(name, dtype("float32"), (1,), kind, (Part(array),))
        files = tuple(FileInfo(f"{name}.distcp", 4, 1, 4, 4) for name in HOSTILE)
        self.catalog = Catalog(
            Path("ck\x1b]0;title\x07pt"),
            "torch_dist",
            "Megatron-LM",
            tensors,
            objects={n: ObjectInfo(n, f"{n}/shard_0_1", (0,), (1,), f"{n}.distcp", 0, 4) for n in HOSTILE},
            args={name: name for name in HOSTILE} | {"normalization": "\x1b[5m"},
            producer=("Megatron\x1b[7m", "x"),
            content={"distrib_optim_sharding_type": "\x1b[8mhidden"},
            files=files,
            problems=(Problem("error", "bad \x1b[1mthing", tensors=tuple(HOSTILE)),),
        )
        self.files = [Path(f.name) for f in files]

    def file_of(self, record: int) -> int:
        return record

    def locate(self, record, read):
        raise NotImplementedError

    def fingerprint(self):
        return ""


@pytest.mark.parametrize(
    "view",
    [
        *(
            "",
            "--names",
            "--tree",
            "--tensors",
            "--tensors --flat",
            "--files",
            "--args",
            "--objects",
            "--objects --flat",
        ),
        "--json --tensors --flat --args --objects",
        "--tensors \x1b[31m*",
    ],
)
def test_hostile_names_never_reach_the_terminal(view, monkeypatch, capsys):
    monkeypatch.setattr("converters.formats.open_checkpoint", lambda path, **_: MadeReader())
    code, out, err = run(capsys, "ckpt\x1b[3m", *view.split())
    assert code in (1, 4)
    assert CONTROL.search(out + err) is None
    if "--tensors" in view and code == 1:
        assert "[/bold][link=http://x]click[/link]" in out  # shown as it is: nothing here is markup


# speed


def test_no_heavy_imports():
    code = (
        "import sys; from distckpt_cli.app import main; code = main(['inspect', 'llama_adam_tp2pp2'])\n"
        "heavy = {'torch', 'transformers', 'tensorstore', 'rich', 'pydantic', 'numpy.ma'} & sys.modules.keys()\n"
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), cwd=GOLDEN)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def thousand_chunks(tmp_path_factory) -> Path:
    """A checkpoint of 1,000 tensors, each a key of its own: more work to open than 1,000 chunks of stacked keys."""
    folder = tmp_path_factory.mktemp("thousand")
    code = (
        "import sys, torch, torch.distributed.checkpoint as dcp\n"
        "names = [f'decoder.layers.{i}.mlp.linear_fc{k}.weight' for i in range(500) for k in (1, 2)]\n"
        "dcp.save({name: torch.zeros(4, 4) for name in names}, checkpoint_id=sys.argv[1], no_dist=True)"
    )
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True, capture_output=True, cwd=ROOT)
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    return folder


@pytest.mark.slow  # speed is measured by scripts/; a loaded machine must not turn the suite red
def test_a_thousand_chunks_take_less_than_0_4_seconds(thousand_chunks):
    assert wall_seconds("inspect", str(thousand_chunks)) < 0.4


@pytest.mark.parametrize(
    ("name", "model", "parts"),
    [
        ("hf_llama_safetensors", "llama, 2 layers", ["embedding", "attention", "mlp", "norms", "output layer"]),
        ("hf_gpt2_bin", "gpt2, 2 layers", ["embedding", "attention", "mlp", "norms", "output layer"]),
        (
            "hf_mixtral_bin",
            "mixtral, 2 layers",
            ["embedding", "attention", "router", "experts", "norms", "output layer"],
        ),
    ],
)
def test_hugging_face_folders_are_known_by_name(name, model, parts, capsys):
    """config.json names the model, and every weight belongs to a part that people know."""
    code, out, _ = run(capsys, name)
    assert code == 0
    assert f"model     {model}" in out
    assert ", vocab 120, bf16\n" in out
    table = out.split("COMPONENT")[1].splitlines()[1:]
    assert [line[:14].strip() for line in table] == parts
    document = json.loads(run(capsys, name, "--json")[1])
    assert document["architecture"]["name"] == model.split(",")[0]
