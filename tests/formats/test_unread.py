"""What lies in torch files beside the model and its optimizer: carried, or said not to be; never lost in silence."""

from __future__ import annotations

import argparse
import shutil

import pytest
import torch

from converters.formats import open_checkpoint
from converters.megatron.layout import Layout
from converters.write.convert import plan_convert
from distckpt_cli.app import main
from harness.support import GOLDEN
from harness.verify_cases import cli, found, golden_folder

FILE = "model_optim_rng.pt"
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # torch.load imports megatron-core's classes


class Holder:
    """An object that a training script keeps tensors in."""

    def __init__(self, value: torch.Tensor) -> None:
        self.shadow = {"weight": value}


def change(folder, how) -> None:
    for number, path in enumerate(sorted(folder.rglob(FILE))):
        tree = torch.load(path, weights_only=False)
        how(tree, number)
        torch.save(tree, path)


@pytest.fixture
def legacy(tmp_path):
    copy = tmp_path / "iter_0000010"
    shutil.copytree(golden_folder("legacy_llama_adam_tp2pp2"), copy)
    return copy


def warnings(folder) -> list[str]:
    report = found(folder)
    assert report.good
    return [f.message for check in report.checks for f in check.findings]


def test_nothing_is_said_of_what_megatron_writes(legacy):
    change(legacy, lambda tree, number: None)
    assert warnings(legacy) == []


def test_keys_that_begin_like_the_model_are_kept(legacy, tmp_path, capsys):
    change(legacy, lambda tree, number: tree.update(model_version=7, models=["a"], model_extra={"x": torch.ones(3)}))
    (text,) = warnings(legacy)  # 3 elements of fp32 in each of the three files that the common state is not taken from
    assert text.startswith("mp_rank_")
    assert " and 2 more: 36 bytes of tensors under model_extra are not read" in text
    assert open_checkpoint(legacy).catalog.common["model_version"] == 7
    out = tmp_path / "out"
    assert main(["convert", str(legacy), str(out), "--to", "torch_dist", "--progress", "off"]) == 0
    assert f"note: {text}" in capsys.readouterr().err
    common = torch.load(out / "iter_0000010" / "common.pt", weights_only=False)
    assert (common["model_version"], common["models"]) == (7, ["a"])
    assert torch.equal(common["model_extra"]["x"], torch.ones(3))


def test_tensors_in_attributes_of_objects(legacy, tmp_path, capsys):
    """In the common state they are carried; those of the other ranks' files are not."""
    change(legacy, lambda tree, number: tree.update(ema=Holder(torch.full((5,), 2.0))))
    (text,) = warnings(legacy)
    assert " and 2 more: 60 bytes of tensors under ema are not read" in text
    out = tmp_path / "out"
    assert main(["convert", str(legacy), str(out), "--to", "torch_dist", "--progress", "off"]) == 0
    assert f"note: {text}" in capsys.readouterr().err
    common = torch.load(out / "iter_0000010" / "common.pt", weights_only=False)
    assert torch.equal(common["ema"].shadow["weight"], torch.full((5,), 2.0))


def test_a_torch_file(tmp_path, capsys):
    path = tmp_path / "model.pt"
    weight = torch.nn.Parameter(torch.ones(4, 4))
    weight.history = torch.zeros(100)  # an attribute of the tensor itself
    state = {
        "model": {"a.weight": weight, "b.weight": torch.ones(2)},
        "ema": Holder(torch.ones(6)),
        "step": torch.ones(1),
    }
    torch.save(state, path)
    (text,) = warnings(path)
    assert text.startswith("model.pt: 424 bytes of tensors under ")
    assert {"model", "ema"} <= {word.strip(",") for word in text.split()}
    code, out, _ = cli(path)
    assert code == 0
    assert "structure look  model.pt: 424 bytes of tensors" in out
    assert main(["convert", str(path), str(tmp_path / "out"), "--to", "safetensors", "--progress", "off"]) == 0
    assert text in capsys.readouterr().err


def test_arguments_with_tensors_are_told(tmp_path):
    path = tmp_path / "model.pt"
    args = argparse.Namespace(window=torch.ones(8))
    torch.save({"model": {"a.weight": torch.ones(2)}, "args": args}, path)
    assert "32 bytes of tensors under args are not read" in warnings(path)[0]


def test_the_state_of_modelopt_is_named(legacy, tmp_path, capsys):
    """A legacy job keeps it in each rank's file, one of torch_dist in a folder: in common.pt nobody would look for it."""
    state = {
        "modelopt_state_dict": [("quantize", {"config": {"quant_cfg": "fp8"}, "metadata": {}})],
        "modelopt_version": "1",
    }
    change(legacy, lambda tree, number: tree.update(modelopt_state=state))
    out = tmp_path / "out"
    assert main(["convert", str(legacy), str(out), "--to", "torch_dist", "--progress", "off"]) == 0
    captured = capsys.readouterr()
    assert "modelopt_state" in captured.out + captured.err
    plan = plan_convert(open_checkpoint(legacy), tmp_path / "again", "torch_dist", layout=Layout(), options={})
    assert "only ModelOpt" in dict(plan.dropped)["modelopt_state"]
    assert "modelopt_state" not in open_checkpoint(out).catalog.common


def test_goldens_hold_nothing_else():
    for name in ("legacy_llama_distopt_tp2pp2dp2", "legacy_gpt_adam_tp2pp2", "torch_mixtral_megatron", "hf_gpt2_bin"):
        place = GOLDEN / name
        files = list(place.glob("*.pt"))
        assert open_checkpoint(files[0] if files else place).catalog.problems == ()
