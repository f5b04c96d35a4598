"""Names and shapes beside those of the model that transformers itself builds: `export-hf --check`, `verify`."""

from __future__ import annotations

import json

import pytest

from converters.errors import RequestError
from converters.formats import open_checkpoint
from converters.models.built import saved_shapes, unlike_transformers
from converters.write.export import ExportOptions, plan_export
from distckpt_cli.app import main
from harness.checkpoints import golden

NAMES = ["llama_adam_tp2pp2", "mixtral_adam_ep2tp2", "deepseek_v3_weights_pp2ep2", "gpt_adam_tp2pp2"]
NAMES += ["qwen2_moe_weights_pp2ep2", "moe_shared_weights_ep2pp2", "gptneox_weights_tp2", "deepseek_mtp_adam_ep2pp2"]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_exported_is_what_transformers_has(name, tmp_path):
    plan = plan_export(open_checkpoint(golden(name)), tmp_path / "out", ExportOptions(check=True))
    shapes = {name: tuple(target["shape"]) for name, target in plan.facts["targets"].items()}
    wanted = saved_shapes(plan.facts["config"])
    assert len(set(shapes) & set(wanted)) > 10
    first, other = list(shapes)[1:3]
    del shapes[first]
    shapes[other] = (1, *shapes[other])
    unlike = unlike_transformers(plan.facts["config"], shapes)
    assert len(unlike) == 2
    assert any(first in text and "missing" in text for text in unlike)


def test_a_configuration_that_transformers_refuses():
    with pytest.raises(RequestError, match="does not take this"):
        saved_shapes({"model_type": "no such model"})
    with pytest.raises(RequestError, match="does not take this"):
        saved_shapes({"model_type": "llama", "hidden_size": "many"})


def test_the_command(tmp_path, monkeypatch, capsys):
    source, out = str(golden("llama_adam_tp2pp2")), tmp_path / "out"
    assert main(["export-hf", source, str(out), "--check", "-n", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["architecture"] == "llama"
    monkeypatch.setattr("converters.models.built.saved_shapes", lambda config: {"model.other": (3,)})
    assert main(["export-hf", source, str(out), "--check"]) == 4
    assert "model.other of [3] is missing" in capsys.readouterr().err
    assert not out.exists()
