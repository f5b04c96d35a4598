"""`distckpt edit-args`: other training arguments, every other byte as it was."""

import json
import os
import pickle
import shutil
import signal

import pytest
import torch

import converters
from converters.errors import DistckptError
from converters.events import Moved, StopFlag
from converters.pickles.nodes import Global
from converters.torchzip.records import read_directory
from converters.write.argument_values import LiteralText, argument_value
from distckpt_cli.app import main
from harness.support import GOLDEN

COMMON, EMBEDDED, LEGACY = (
    "llama_adam_tp2pp2",
    "v019_llama_fullyreshardable_tp2dp2",
    "legacy_llama_distopt_tp2pp2dp2",
)
REWRITTEN = {COMMON: {"common.pt"}, EMBEDDED: {".metadata", "__0_0.distcp"}, LEGACY: None}
LONG = "/a/path/" + "much longer than the one before " * 9


def _files(root):
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def _edit(name, out, *words):
    return main(["edit-args", str(GOLDEN / name), str(out), *words])


@pytest.mark.parametrize("name", REWRITTEN)
@pytest.mark.parametrize("text", ["x", LONG])
def test_arguments_change_and_nothing_else(name, text, tmp_path, capsys):
    words = ["--set", "lr=0.5", "--set", "main_grads_dtype=float16", "--set", f"save={json.dumps(text)}"]
    words += ["--set", "invented=[1, null]", "--new", "--unset", "weight_decay"]
    assert _edit(name, tmp_path / "out", *words) == 0
    before, after = (_files(root / "iter_0000010") for root in (GOLDEN / name, tmp_path / "out"))
    assert before.keys() == after.keys()
    differ = {file for file in before if before[file] != after[file]}
    assert differ == (REWRITTEN[name] or {file for file in before if file.endswith("/model_optim_rng.pt")})
    assert converters.verify(tmp_path / "out").good
    with converters.open(GOLDEN / name) as old, converters.open(tmp_path / "out") as new:
        changed = {k for k in old.args | new.args if repr(old.args.get(k)) != repr(new.args.get(k))}
        changed -= {k for k, v in old.args.items() if v is not None and "<" in repr(v)}
        assert changed | {"main_grads_dtype"} == {"lr", "main_grads_dtype", "save", "invented", "weight_decay"}
        assert "weight_decay" not in new.args
        assert new.args["save"] == text
        assert new.args["invented"] == [1, None]
    capsys.readouterr()
    assert main(["diff", str(GOLDEN / name), str(tmp_path / "out"), "--json"]) == 1  # the arguments
    assert not json.loads(capsys.readouterr().out)["tensors"]


def test_torch_loads_every_legacy_file_with_the_same_tensors(tmp_path):
    assert _edit(LEGACY, tmp_path / "out", "--set", f"save={json.dumps(LONG)}") == 0
    compared = 0
    for path in (tmp_path / "out").rglob("model_optim_rng.pt"):
        name = path.relative_to(tmp_path / "out")
        old = read_directory(_reading(GOLDEN / LEGACY / name), 0, (GOLDEN / LEGACY / name).stat().st_size, "old")
        new = read_directory(_reading(path), 0, path.stat().st_size, "new")
        assert {(n, m.size, m.crc) for n, m in new.items() if n.startswith("data/")} == {
            (n, m.size, m.crc) for n, m in old.items() if n.startswith("data/")
        }
        reader = torch._C.PyTorchFileReader(str(path))  # torch's own reader of archives
        theirs = torch._C.PyTorchFileReader(str(GOLDEN / LEGACY / name))
        for member in old.keys() - {"data.pkl", ".data/serialization_id"}:
            assert reader.get_record(member) == theirs.get_record(member)
            compared += 1
    assert compared > 20


def _reading(path):
    raw = path.read_bytes()
    return lambda at, n: raw[at : at + n]


def test_torch_finds_every_record_behind_the_longer_common_state(tmp_path):
    assert _edit(EMBEDDED, tmp_path / "out", "--set", f"save={json.dumps(LONG)}") == 0
    old, new = (
        pickle.loads((root / "iter_0000010" / ".metadata").read_bytes())
        for root in (GOLDEN / EMBEDDED, tmp_path / "out")
    )
    assert old.state_dict_metadata.keys() == new.state_dict_metadata.keys()
    moved = 0
    for index, place in new.storage_data.items():
        was = old.storage_data[index]
        record, before = (
            _record(root / "iter_0000010" / p.relative_path, p)
            for root, p in ((tmp_path / "out", place), (GOLDEN / EMBEDDED, was))
        )
        assert (record == before) == (index.fqn != "common_state/shard_0_1")
        moved += place.offset != was.offset
    assert moved


def _record(path, place):
    return path.read_bytes()[place.offset : place.offset + place.length]


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["--set", "tensor_model_parallel_size=4"], 4, "distckpt reshard"),
        (["--set", "padded_vocab_size=256"], 4, "the stored shards show padded_vocab_size 128"),
        (["--unset", "pipeline_model_parallel_size"], 4, "distckpt reshard"),
        (["--set", "hidden_size=64"], 4, "the stored tensors contradict hidden_size"),
        (["--set", "no_such=1"], 4, "--new"),
        (["--unset", "no_such"], 4, "no argument no_such"),
        (["--set", "save=text"], 2, "is no literal"),
        (["--set", "save=__import__('os').getcwd()"], 2, "is no literal"),
        (["--set", "save=b'raw'"], 4, "not plain data"),
        (["--set", "params_dtype=3"], 4, "and 3 is none"),
        (["--set", "params_dtype=float32"], 4, "no weight is float32, they are bfloat16"),
        (["--set", "fp16=true"], 4, "no weight is float16"),
        (["--set", 'lr="abc"'], 4, "lr is a number in the checkpoint, 0.01, and 'abc' is none"),
        (["--set", "lr=true"], 4, "lr is a number"),
        (["--set", "lr=1e999"], 4, "is not plain data: inf"),
        (["--set", "num_workers=1.5"], 4, "num_workers is a whole number"),
        (["--set", "bf16=1"], 4, "bf16 is true or false"),
        (["--set", "save=[1]"], 4, "save is a text"),
        (["--set", "iteration=11"], 4, "which is of iteration 10"),
        (["--set", "lr=0.01"], 4, "nothing would change"),
        (["--set", "lr=1", "--unset", "lr"], 2, "both set and unset"),
        (["--set", "lr"], 2, "not KEY=VALUE"),
        ([], 2, "needs at least one change"),
    ],
)
@pytest.mark.parametrize("name", [COMMON, LEGACY])
def test_refused(name, words, code, text, tmp_path, capsys):
    assert _edit(name, tmp_path / "out", *words) == code
    assert text in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_wrong_layout_argument_is_put_right(tmp_path, monkeypatch):
    """An argument of the layout may become what the stored shards show: here the rows of the embedding."""
    with monkeypatch.context() as patched:
        patched.setattr("converters.write.edit_args._refuse_contradictions", lambda *_: None)
        assert _edit(COMMON, tmp_path / "wrong", "--set", "padded_vocab_size=256") == 0
    assert main(["edit-args", str(tmp_path / "wrong"), str(tmp_path / "out"), "--set", "padded_vocab_size=128"]) == 0
    with converters.open(tmp_path / "out") as checkpoint:
        assert checkpoint.args["padded_vocab_size"] == 128


@pytest.mark.parametrize(
    ("text", "before", "value"),
    [
        ("null", 1, None),
        ("None", 1, None),
        ("true", None, True),
        ("8", None, 8),
        ("8", 1.0, 8.0),
        ("1e-5", 1.0, 1e-5),
        ('"8"', None, "8"),
        ("(1, 2)", None, (1, 2)),
        ("[1, 2]", (3,), (1, 2)),
        ('{"a": [1]}', None, {"a": [1]}),
    ],
)
def test_literals(text, before, value):
    parsed = argument_value("x", LiteralText(text), before)
    assert (parsed, type(parsed)) == (value, type(value))
    for typed in ("torch.bfloat16", LiteralText('"bfloat16"'), torch.bfloat16):
        assert argument_value("params_dtype", typed, Global("torch", "float32")).path == "torch.bfloat16"


def test_the_library_takes_values_of_python(tmp_path):
    report = converters.edit_args(
        GOLDEN / COMMON, tmp_path / "out", values={"lr": 1, "save": "a", "main_grads_dtype": torch.bfloat16}
    )
    with converters.open(report.path) as checkpoint:
        assert (checkpoint.args["lr"], checkpoint.args["save"]) == (1.0, "a")
    assert converters.edit_args(GOLDEN / COMMON, tmp_path / "dry", unset=("lr",), dry_run=True).stats is None
    assert not (tmp_path / "dry").exists()


@pytest.mark.parametrize("name", [EMBEDDED, LEGACY])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_copy_that_is_stopped_goes_on(name, threads, tmp_path):
    """Files are copied by the engine: in tiles, with a journal, and a second run copies what is left."""
    edit = {"values": {"save": LONG}, "max_memory": 1 << 20}
    converters.edit_args(GOLDEN / name, tmp_path / "whole", **edit)
    stop, seen = StopFlag(), []

    def listener(event):
        if isinstance(event, Moved):
            seen.append(event.nbytes)
            stop.set(signal.SIGTERM)

    with pytest.raises(DistckptError, match="finished work is kept"):
        converters.edit_args(GOLDEN / name, tmp_path / "out", listener=listener, stop=stop, threads=1, **edit)
    assert not (tmp_path / "out").exists()
    assert (tmp_path / ".out.distckpt-partial" / ".journal").exists()
    report = converters.edit_args(GOLDEN / name, tmp_path / "out", threads=threads, **edit)
    assert report.stats.bytes_kept == sum(seen) > 0
    assert _files(tmp_path / "out") == _files(tmp_path / "whole")


def test_a_source_that_changes_meanwhile_is_noticed(tmp_path):
    source = tmp_path / "source"
    shutil.copytree(GOLDEN / LEGACY, source)
    file = next(source.rglob("distrib_optim.pt"))

    def listener(event):
        if isinstance(event, Moved):
            os.utime(file, (1, 1))

    with pytest.raises(DistckptError, match="the source changed"):
        converters.edit_args(source, tmp_path / "out", values={"lr": 0.5}, listener=listener)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["hf_llama_safetensors", "nemo2_llama4_weights_tp2pp2"])
def test_other_formats_are_refused_with_the_way(name, tmp_path, capsys):
    assert _edit(name, tmp_path / "out", "--set", "lr=1.0") == 4
    assert "hint" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
