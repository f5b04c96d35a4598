"""Files beside the tensors of an iteration: carried to where they are looked for, or left out with the reason."""

from __future__ import annotations

import json
import shutil

import pytest

from converters.formats import open_checkpoint
from converters.megatron.layout import Layout
from converters.verification.run import verify
from converters.write.convert import WRITERS, plan_convert
from converters.write.export import plan_export
from converters.write.reshard import plan_reshard
from converters.write.write_plan import run_conversion
from harness.support import GOLDEN

LLAMA = GOLDEN / "llama_adam_tp2pp2"
FILES = {
    "tokenizer/tokenizer.json": b'{"model": 1}',
    "tokenizer/tokenizer_config.json": b'{"auto_map": {"a": "b.C"}, "x": 1}',
    "tokenizer/evil.py": b"raise SystemExit",
    "modelopt_state/.metadata": b"\x80\x04N.",
    "modelopt_state/common.pt": b"modelopt" * 4,
    "hf/config.json": b"{}",
    "train_dataloader_dprank000.pt": b"rank 0",
    "non_persistent/iter_1/x.pt": b"local",
    "integrity.json": b"",
    ".save_done": b"",
    "notes.txt": b"mine",
    "large.bin": bytes(2 << 20),
    "odd.tmp": b"x",
}
CARRIED = {name for name in FILES if name.startswith(("tokenizer/", "modelopt_state/", "hf/"))} | {
    ".save_done",
    "notes.txt",
}
LOADERS = {"train_dataloader_dprank000.pt"}


@pytest.fixture
def source(tmp_path):
    shutil.copytree(LLAMA, tmp_path / "source")
    inside = tmp_path / "source" / "iter_0000010"
    for name, content in FILES.items():
        (inside / name).parent.mkdir(parents=True, exist_ok=True)
        if name != "integrity.json":
            (inside / name).write_bytes(content)
    (inside / "out.txt").symlink_to("/etc/hostname")
    (tmp_path / "source" / "progress.txt").write_text("40 %")
    return tmp_path / "source"


def below(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def accounted(plan, carried, source):
    """Every file of the source is in the result or among what is left out, by its name or its folder's."""
    dropped = {what for what, _ in plan.dropped}
    for name in [*FILES, "out.txt"]:
        if name == "integrity.json":
            continue
        told = name in dropped or f"{name.partition('/')[0]}/" in dropped
        assert (name in carried) != told, name


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(tp=2, dp=2)], ids=str)
def test_reshard(source, tmp_path, layout):
    plan = plan_reshard(open_checkpoint(source), tmp_path / "out", layout)
    run_conversion(plan)
    result = below(tmp_path / "out" / "iter_0000010")
    expected = CARRIED | (LOADERS if layout.dp == 1 else set())
    assert {name: result[name] for name in FILES if name in result} == {name: FILES[name] for name in expected}
    accounted(plan, expected, source)
    assert (tmp_path / "out" / "progress.txt").read_text() == "40 %"
    reasons = dict(plan.dropped)
    assert "link" in reasons["out.txt"]
    assert "2,097,152" in reasons["large.bin"]
    assert "facts.json" in reasons  # beside the iterations, and not this one's
    assert verify(tmp_path / "out").good


def test_legacy(source, tmp_path):
    plan = plan_convert(open_checkpoint(source), tmp_path / "out", "legacy", layout=Layout(), options={})
    run_conversion(plan)
    result = below(tmp_path / "out" / "iter_0000010")
    expected = {name for name in CARRIED | LOADERS if not name.startswith("modelopt_state")}
    assert {name for name in FILES if name in result} == expected
    accounted(plan, expected, source)
    assert "model_optim_rng.pt" in dict(plan.dropped)["modelopt_state/"]


def test_safetensors_and_torch(source, tmp_path):
    plan = plan_convert(open_checkpoint(source), tmp_path / "out", "safetensors", options={})
    run_conversion(plan)
    expected = {name for name in FILES if name.startswith("tokenizer/")}
    assert {name for name in FILES if name in below(tmp_path / "out")} == expected
    accounted(plan, expected, source)
    accounted(plan_convert(open_checkpoint(source), tmp_path / "x.pt", "torch", options={}), set(), source)


def test_tokenizer_of_an_export(source, tmp_path):
    plan = plan_export(open_checkpoint(source), tmp_path / "hf")
    run_conversion(plan)
    result = below(tmp_path / "hf")
    assert result["tokenizer.json"] == FILES["tokenizer/tokenizer.json"]
    assert json.loads(result["tokenizer_config.json"]) == {"x": 1}  # what names code is left out, as from --hf-config
    assert "evil.py" not in result
    assert any("evil.py" in note for note in plan.notes)
    assert not any("holds no tokenizer" in text for text in plan.advice)
    accounted(plan, {name for name in FILES if name.startswith("tokenizer/")}, source)


def test_without_a_tokenizer(tmp_path):
    plan = plan_export(open_checkpoint(LLAMA), tmp_path / "hf")
    assert any("holds no tokenizer" in text for text in plan.advice)


def test_a_changed_file_is_another_job(source, tmp_path):
    before = plan_reshard(open_checkpoint(source), tmp_path / "out", Layout()).job.fingerprint
    (source / "iter_0000010" / "notes.txt").write_bytes(b"more")
    assert plan_reshard(open_checkpoint(source), tmp_path / "out", Layout()).job.fingerprint != before


def test_verify_names_files_that_nobody_knows(source):
    report = verify(source, quick=True)
    assert report.good
    text = " ".join(report.unchecked)
    assert "notes.txt" in text
    assert "large.bin" in text
    assert "tokenizer.json" not in text
    assert report.document()["not_checked"] == report.unchecked


def test_bridge_has_its_tokenizer_whatever_the_target(tmp_path):
    source = GOLDEN / "bridge_llama4_weights_tp2pp2"
    for to in WRITERS:
        layout = Layout() if WRITERS[to].layout else None
        plan = plan_convert(open_checkpoint(source), tmp_path / to, to, layout=layout, options={})
        names = {file.name.rpartition("iter_0000010/")[2] for file in plan.job.files} | {
            name.rpartition("iter_0000010/")[2] for name in plan.extra_files
        }
        left = {what for what, _ in plan.dropped}
        for name in ("run_config.yaml", "train_state.pt"):
            assert name in names | left, (to, name)
