"""`converters.reshard`, `convert`, `export_hf`, `import_hf`: what the commands do, same defaults; reports; notebooks."""

from __future__ import annotations

import dataclasses
import inspect
import json
import pydoc
import re

import numpy as np
import pytest

import converters
from converters.commands import CHOICES
from converters.errors import RequestError
from converters.formats import open_checkpoint
from converters.write.convert import WRITERS
from converters.write.export import ExportOptions
from converters.write.import_start import ImportOptions
from converters.write.reshard import ReshardOptions
from distckpt_cli.app import main
from harness.support import GOLDEN

LLAMA = GOLDEN / "llama_adam_tp2pp2"
HUB = GOLDEN / "hf_llama_safetensors"
CALLS = {
    "reshard": (LLAMA, {"tp": 1}, ["--tp", "1"]),
    "convert": (LLAMA, {"to": "legacy"}, ["--to", "legacy"]),
    "export_hf": (LLAMA, {"dtype": "fp16"}, ["--dtype", "fp16"]),
    "import_hf": (HUB, {"tp": 2}, ["--tp", "2"]),
}


def tree(folder):
    """Every file but reports, which state where they lie."""
    files = (p for p in folder.rglob("*") if p.is_file() and p.name != "distckpt-report.json")
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in files}


@pytest.mark.parametrize("name", CALLS)
def test_a_function_does_what_its_command_does(name, tmp_path, capsys):
    source, options, words = CALLS[name]
    report = getattr(converters, name)(source, tmp_path / "library", **options)
    assert report.path.exists()
    assert main([name.replace("_", "-"), str(source), str(tmp_path / "shell"), *words, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert tree(tmp_path / "library") == tree(tmp_path / "shell")
    own = json.loads(report.to_json())
    different = {"schema", "seconds", "destination", "free_bytes"}
    assert {k: v for k, v in own.items() if k not in different} == {
        k: v for k, v in shown.items() if k not in different
    }
    assert f"wrote     {report.path}" in repr(report)


@pytest.mark.parametrize("name", CALLS)
def test_a_dry_run_writes_nothing_and_says_what_it_would(name, tmp_path):
    source, options, _ = CALLS[name]
    report = getattr(converters, name)(source, tmp_path / "out", **options, dry_run=True)
    assert list(tmp_path.iterdir()) == []
    assert report.document()["dry_run"] is True
    assert report.document()["bytes_written"] > 0
    assert "write     " in repr(report)


def test_signatures_are_the_option_classes(tmp_path):
    for function, options in (
        (converters.reshard, ReshardOptions),
        (converters.export_hf, ExportOptions),
        (converters.import_hf, ImportOptions),
    ):
        parameters = inspect.signature(function).parameters
        for field in dataclasses.fields(options):
            if field.name != "threads":
                assert parameters[field.name].default == field.default, field.name
    with pytest.raises(TypeError, match="tpp"):
        converters.reshard(LLAMA, tmp_path / "out", tpp=2)
    with pytest.raises(RequestError, match="needs at least one change"):
        converters.reshard(LLAMA, tmp_path / "out")
    with pytest.raises(RequestError, match="rng='kep' is not a choice"):
        converters.reshard(LLAMA, tmp_path / "out", tp=1, rng="kep")
    assert list(tmp_path.iterdir()) == []


def test_every_word_in_choices_is_an_option():
    options = {f.name for o in (ReshardOptions, ExportOptions, ImportOptions) for f in dataclasses.fields(o)}
    for writer in WRITERS.values():
        options |= writer.takes()
    assert options >= CHOICES.keys()


def test_help_shows_the_functions_and_their_docstrings():
    text = pydoc.plain(pydoc.render_doc(converters))
    for name in ("open", "reshard", "convert", "export_hf", "import_hf", "verify", "diff", "load"):
        assert re.search(rf"^    {name}\(", text, re.MULTILINE), name
        assert inspect.getdoc(getattr(converters, name)).splitlines()[0] in text


def test_reports_say_it_in_repr_json_and_html():
    verified = converters.verify(LLAMA)
    assert "is good" in repr(verified)
    assert json.loads(verified.to_json())["good"] is True
    compared = converters.diff(LLAMA, GOLDEN / "qwen3_adam_tp2")
    assert " differ: " in repr(compared)
    assert json.loads(compared.to_json())["identical"] is False
    assert "<b style" in compared._repr_html_()
    with converters.open(LLAMA) as checkpoint:
        assert "llama, 2 layers, hidden 32" in repr(checkpoint)
        assert "<table>" in checkpoint._repr_html_()


def test_html_of_a_notebook_is_escaped(tmp_path):
    (tmp_path / "<script>alert(1)").symlink_to(GOLDEN / "llama_adam_tp2pp2" / "iter_0000010")
    with converters.open(tmp_path / "<script>alert(1)", follow_links=True) as checkpoint:
        assert "<script>" not in checkpoint._repr_html_()


def test_bf16_is_numpys_through_ml_dtypes():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    with converters.open(LLAMA, framework="np") as checkpoint, converters.open(LLAMA) as other:
        for name in ("output_layer.weight", "decoder.layers.0.mlp.linear_fc1.weight"):
            array = checkpoint.get_tensor(name)
            assert array.dtype == ml_dtypes.bfloat16
            assert np.array_equal(array.astype(np.float32), other.get_tensor(name).float().numpy())


@pytest.mark.parametrize("name", ["llama_adam_tp2pp2", "deepseek_mtp_adam_ep2pp2", "mixtral_adam_ep2tp2"])
def test_every_command_counts_the_same_parameters(name, tmp_path):
    from converters.megatron.identity import identify

    wanted = identify(open_checkpoint(GOLDEN / name).catalog).parameters
    exported = converters.export_hf(GOLDEN / name, tmp_path / "a", dry_run=True).document()["parameters"]
    whole = converters.convert(GOLDEN / name, tmp_path / "b", to="safetensors", dry_run=True).document()["parameters"]
    torch_file = converters.convert(GOLDEN / name, tmp_path / "c.pt", to="torch", dry_run=True).document()["parameters"]
    assert (exported, whole, torch_file) == (wanted, wanted, wanted)
