"""The real megatron-core takes what `load` gives each rank, with `load_state_dict(strict=True)`, at any layout."""

import json
from dataclasses import asdict

import pytest

from converters.megatron.layout import Layout
from harness.checkpoints import golden
from harness.support import GOLDEN
from oracle.fixtures import run_module

pytestmark = pytest.mark.megatron

LLAMA = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 48,
    "gated_linear_unit": True,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "tied": False,
    "vocab": 128,
}
LLAMA4 = LLAMA | {
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "ffn_hidden_size": 96,
    "vocab": 256,
}
MIXTRAL = LLAMA | {"num_moe_experts": 4, "moe_ffn_hidden_size": 24}
QWEN2 = LLAMA | {"add_qkv_bias": True, "tied": True}
JOBS = {  # checkpoint, its truth, model, experts, layout
    "one rank": ("llama_adam_tp2pp2", "llama", LLAMA | {"vocab": 120}, "sequential", Layout()),
    "tp4": ("llama_dpreshardable_tp2pp2dp2", "llama", LLAMA, "sequential", Layout(tp=4)),
    "pp2 dp2": ("v009_llama_modelspace_tp2pp2dp2", "llama", LLAMA | {"vocab": 120}, "sequential", Layout(pp=2, dp=2)),
    "tp2 pp2 vpp2": ("llama4_dpreshardable_pp4dp2", "llama4", LLAMA4, "sequential", Layout(tp=2, pp=2, vpp=2)),
    "pp2 vpp2, zarr": ("nemo1_zarr_llama4_weights_tp2pp2", "llama4", LLAMA4, "sequential", Layout(pp=2, vpp=2)),
    "legacy, tp4": ("legacy_llama4_vpp2_tp2pp2", "llama4", LLAMA4, "sequential", Layout(tp=4)),
    "tied pp2": ("qwen2_weights_tp2pp2", "qwen2", QWEN2, "sequential", Layout(tp=2, pp=2)),
    "tied, one stage": ("qwen2_weights_tp2pp2", "qwen2", QWEN2 | {"vocab": 120}, "sequential", Layout()),
    "ep4": ("mixtral_adam_ep2tp2", "mixtral", MIXTRAL | {"vocab": 120}, "sequential", Layout(ep=4, dp=4)),
    "ep2 tp2 pp2": ("mixtral_dpreshardable_ep2pp2", "mixtral", MIXTRAL, "sequential", Layout(tp=2, pp=2, ep=2, dp=2)),
    "ep2 etp1": ("v012_mixtral_modelspace_ep2tp2", "mixtral", MIXTRAL, "sequential", Layout(tp=2, ep=2, etp=1, dp=2)),
    "stacked": (
        "mixtral_adam_ep2tp2",
        "mixtral",
        MIXTRAL | {"moe_grouped_gemm": True},
        "stacked",
        Layout(tp=2, ep=2, dp=2),
    ),
}


def ask(jobs):
    """What the real models say."""
    code, answer, errors = run_module("oracle.loader", text=json.dumps(jobs))
    assert code == 0, errors[-3000:]
    return json.loads(answer)


def job(name, truth=None):
    checkpoint, config, model, experts, layout = JOBS[name]
    legacy = checkpoint.startswith("legacy_")
    return {
        "path": str(GOLDEN / checkpoint if legacy else golden(checkpoint)),
        "truth": str(truth or GOLDEN / "truth" / f"{config}-bf16.safetensors"),
        "model": model,
        "experts": experts,
        "layout": asdict(layout),
        "world": layout.world_size,
    }


@pytest.fixture(scope="module")
def answers():
    return dict(zip(JOBS, ask([job(name) for name in JOBS]), strict=True))


@pytest.mark.parametrize("name", JOBS)
def test_every_rank_takes_its_part_strictly(answers, name):
    model, layout = JOBS[name][2], JOBS[name][4]
    assert answers[name]["wrong"] == []
    assert answers[name]["count"] >= 6 * model["num_layers"] * layout.tp


def test_another_truth_is_noticed(tmp_path):
    from safetensors.torch import load_file, save_file

    values = load_file(GOLDEN / "truth" / "llama-bf16.safetensors")
    values["model/0/decoder.layers.1.mlp.linear_fc1.weight"][0, 0] += 1
    save_file(values, tmp_path / "other.safetensors")
    (answer,) = ask([job("one rank", tmp_path / "other.safetensors")])
    assert len(answer["wrong"]) == 1
    assert "decoder.layers.1.mlp.linear_fc1.weight" in answer["wrong"][0]
