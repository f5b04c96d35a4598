"""The oracle itself: megatron-core loads what it wrote at another layout, and a difference is seen."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

GOLDEN = Path(__file__).parents[1] / "golden"
pytestmark = pytest.mark.megatron


@pytest.mark.parametrize(
    ("config", "saved", "loaded"),
    [
        ("llama", {"tp": 2, "pp": 2}, {"tp": 4}),
        ("mixtral", {"tp": 2, "ep": 2}, {"pp": 2, "ep": 2}),
        ("gpt2", {"pp": 2, "per_layer": True}, {"tp": 2}),
    ],
)
def test_loads_at_another_layout(megatron_checkpoint, megatron_load, config, saved, loaded):
    made = megatron_checkpoint(config, **saved)
    answer = megatron_load(made.folder, made.expected, config, **loaded)
    assert answer["ok"], answer
    assert answer["iteration"] == 10
    assert answer["tensors"] == len(load_file(made.expected))


def test_values_do_not_depend_on_the_layout(megatron_checkpoint):
    split = megatron_checkpoint("llama", tp=2, pp=2)
    whole = megatron_checkpoint("llama")
    first, second = load_file(split.expected), load_file(whole.expected)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert torch.equal(load_file(split.logits)["logits"], load_file(whole.logits)["logits"])


def test_a_difference_of_one_element_is_seen(megatron_checkpoint, megatron_load, tmp_path):
    made = megatron_checkpoint("llama", tp=2, pp=2)
    expected = load_file(made.expected)
    name = "decoder.layers.1.mlp.linear_fc1.weight"
    expected[name][-1, -1] += 1
    save_file(expected, tmp_path / "other.safetensors")
    answer = megatron_load(made.folder, tmp_path / "other.safetensors", tp=2)
    assert not answer["ok"]
    assert list(answer["wrong"]) == ["decoder.layers.mlp.linear_fc1.weight"]


@pytest.mark.parametrize(
    ("name", "truth", "config", "layout"),
    [
        ("llama_adam_tp2pp2", "llama", "llama", {"tp": 4}),
        ("mixtral_adam_ep2tp2", "mixtral", "mixtral", {"ep": 4}),
        ("gpt_adam_tp2pp2", "gpt", "gpt2", {"pp": 2}),
        ("v009_llama_modelspace_tp2pp2dp2", "llama", "llama", {"tp": 2}),
    ],
)
def test_golden_checkpoints_hold_their_truth(megatron_load, name, truth, config, layout):
    answer = megatron_load(GOLDEN / name, GOLDEN / "truth" / f"{truth}-bf16.safetensors", config, **layout)
    assert answer["ok"], answer
