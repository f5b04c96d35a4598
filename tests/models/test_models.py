"""Every architecture: names and shapes are transformers' own, nothing is lost, and the logits are Megatron's."""

from itertools import starmap

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from converters import models
from converters.models.export import HfMapping, map_to_hf
from converters.planning.plan import prove
from harness import model_cases as cases
from harness.model_exports import export, logits_of, write_config


def disk_shapes(folder):
    out = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            out |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return out


@pytest.mark.parametrize("family", cases.FAMILIES)
def test_names_and_shapes_are_those_that_transformers_writes(family, tmp_path):
    _, _, mapping, _ = export(family, **({"mtp": "drop"} if family == "deepseek_v3" else {}))
    write_config(tmp_path, mapping)
    config = AutoConfig.from_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_config(config)
    assert type(model).__name__ == mapping.config["architectures"][0]
    model.save_pretrained(tmp_path / "saved")
    assert {name: t.shape for name, t in mapping.targets.items()} == disk_shapes(tmp_path / "saved")


@pytest.mark.parametrize("family", cases.FAMILIES)
def test_infer_finds_the_family(family):
    catalog, facts, _, _ = export(family)
    assert models.infer(facts, catalog).name == family


@pytest.mark.parametrize("family", cases.FAMILIES)
def test_the_way_back_restores_every_bit(family):
    _, _, mapping, shapes = export(family)
    source = cases.random_arrays(shapes)
    targets = {name: t.shape for name, t in mapping.targets.items()}
    there = cases.run_copies(mapping.copies, targets, source, fill=np.nan)
    assert not any(np.isnan(value).any() for value in there.values())
    back = cases.run_back(mapping, shapes, there)
    for drop in mapping.drops:
        back[drop.source][drop.box.slices] = source[drop.source][drop.box.slices]
    assert all(np.array_equal(back[name], source[name]) for name in shapes)


@pytest.mark.parametrize("family", ["llama", "qwen2", "deepseek_v2", "gpt2"])
def test_zero_centred_norms_gain_one_and_lose_it_again(family):
    _, _, mapping, shapes = export(family, layernorm_zero_centered_gamma=True)
    _, _, plain, _ = export(family)
    source = {name: np.round(value * 64) / 64 for name, value in cases.random_arrays(shapes).items()}
    targets = {name: t.shape for name, t in mapping.targets.items()}
    with_one, without = (cases.run_copies(m.copies, targets, source) for m in (mapping, plain))
    for name in targets:
        norm = name.endswith(("norm.weight", "ln_1.weight", "ln_2.weight", "ln_f.weight"))
        assert np.array_equal(with_one[name], without[name] + norm), name
    back = cases.run_back(mapping, shapes, with_one)
    assert all(np.array_equal(back[n][:50], source[n][:50]) for n in shapes)


GOLDEN = [
    ("llama_adam_tp2pp2", "llama", "llama"),
    ("v009_llama_modelspace_tp2pp2dp2", "llama", "llama"),
    ("llama_localspec_weights_tp2pp2", "llama", "llama"),
    ("llama_singleton_weights_tp2pp2", "llama", "llama"),
    ("bridge_llama4_weights_tp2pp2", "llama4", "llama"),
    ("nemo2_llama4_weights_tp2pp2", "llama4", "llama"),
    ("llama31_weights_tp2pp2", "llama31", "llama"),
    ("llama_ln1p_weights_tp2pp2", "llama_ln1p", "llama"),
    ("mistral_weights_tp2pp2", "mistral", "mistral"),
    ("qwen2_weights_tp2pp2", "qwen2", "qwen2"),
    ("qwen3_adam_tp2", "qwen3", "qwen3"),
    ("qwen3_hd16_weights_tp2pp2", "qwen3_hd16", "qwen3"),
    ("mixtral_adam_ep2tp2", "mixtral", "mixtral"),
    ("v012_mixtral_modelspace_ep2tp2", "mixtral", "mixtral"),
    ("qwen2_moe_weights_pp2ep2", "qwen2_moe", "qwen2_moe"),
    ("qwen3_moe_weights_tp2ep2", "qwen3_moe", "qwen3_moe"),
    ("deepseek_mtp_adam_ep2pp2", "deepseek_mtp", "deepseek_v3"),
    ("deepseek_v2_weights_pp2ep2", "deepseek_v2", "deepseek_v2"),
    ("deepseek_v3_weights_pp2ep2", "deepseek_v3", "deepseek_v3"),
    ("gpt_adam_tp2pp2", "gpt", "gpt2"),
    ("gpt_untied_weights_tp2pp2", "gpt_untied", "gpt2"),
    ("gpt_tanh_weights_tp2", "gpt_tanh", "gpt2"),
    ("gptneox_weights_tp2", "gptneox", "gpt_neox"),
    ("starcoder2_weights_tp2pp2", "starcoder2", "starcoder2"),
    ("nemotron_weights_tp2", "nemotron", "nemotron"),
    ("moe_shared_weights_ep2pp2", "moe_shared", "granitemoeshared"),
]


@pytest.mark.parametrize(("checkpoint", "config", "family"), GOLDEN, ids=[row[0] for row in GOLDEN])
def test_logits_are_megatrons(checkpoint, config, family, tmp_path):
    catalog, facts, arrays = cases.golden_case(checkpoint, config)
    model = models.infer(facts, catalog)
    assert model.name == family
    mapping = map_to_hf(catalog, facts, model, dtype=cases.FP32)
    prove(mapping.pieces.values(), {n: t.shape for n, t in catalog.weights.items()}, mapping.drops)
    golden = load_file(cases.GOLDEN / "truth" / f"{config}-bf16.logits.safetensors")
    logits = logits_of(tmp_path, mapping, arrays, golden["tokens"])
    rows = logits.shape[-1]
    assert rows == facts.vocab_size
    assert (logits - golden["logits"][..., :rows].float()).abs().max() <= 1e-5


def test_transformers_reads_the_multi_token_prediction_layer(tmp_path):
    catalog, facts, arrays = cases.golden_case("deepseek_mtp_adam_ep2pp2", "deepseek_mtp")
    mapping = map_to_hf(catalog, facts, models.by_name("deepseek_v3"), dtype=cases.FP32)
    logits_of(tmp_path, mapping, arrays, torch.zeros((1, 4), dtype=torch.long))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    # transformers 5.23 looks for them at layer 61 only, where the released model has its own
    model._keys_to_ignore_on_load_unexpected = [r"model\.layers\.2.*"]
    loaded = MtpModel.from_pretrained(model)  # raises if a weight is missing
    joined = arrays["mtp.layers.0.eh_proj.weight"]
    assert np.array_equal(loaded.layers[0].eh_proj.weight.detach().numpy(), joined)
    assert np.array_equal(
        loaded.layers[0].post_norm.weight.detach().numpy(), arrays["mtp.layers.0.final_layernorm.weight"]
    )


def test_a_wrong_table_moves_the_logits(tmp_path):
    """The mutations that a mistaken table would make: each is far outside the tolerance of the test above."""
    catalog, facts, arrays = cases.golden_case("qwen3_adam_tp2", "qwen3")
    mapping = map_to_hf(catalog, facts, models.by_name("qwen3"), dtype=cases.FP32)
    golden = load_file(cases.GOLDEN / "truth" / "qwen3-bf16.logits.safetensors")

    def swapped(one, other):
        def rename(name):
            return name.replace(one, other) if one in name else name.replace(other, one)

        copies = [type(c)(c.source, c.source_box, rename(c.target), c.target_box, c.op) for c in mapping.copies]
        return HfMapping(mapping.targets, copies, [], mapping.config, mapping.generation_config, [])

    pairs = [
        ("gate_proj", "up_proj"),
        ("k_proj", "v_proj"),
        ("q_norm", "k_norm"),
        ("input_layernorm", "post_attention_layernorm"),
    ]
    for i, changed in enumerate(starmap(swapped, pairs)):
        folder = tmp_path / str(i)
        folder.mkdir()
        logits = logits_of(folder, changed, arrays, golden["tokens"])
        assert (logits - golden["logits"]).abs().max() > 1e-4, pairs[i]
