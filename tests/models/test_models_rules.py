"""What an export refuses, what it leaves out and says so, and how a supplied config.json is compared."""

import json
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from converters import models
from converters.dtypes import dtype
from converters.errors import RequestError
from converters.megatron.model_args import ModelArgs
from converters.models.config_check import find_contradictions
from converters.models.export import HfMapping, map_to_hf
from converters.planning.plan import Copy, Op, prove
from harness import model_cases as cases
from harness.model_exports import export, logits_of


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("llama", {"rotary_interleaved": True}, "rotary_interleaved is True"),
        ("llama", {"rotary_percent": 0.5}, "rotary_percent is 0.5"),
        ("llama", {"position_embedding_type": "mrope"}, "position_embedding_type is mrope"),
        ("llama", {"position_embedding_type": "none"}, "position_embedding_type is none"),
        ("llama", {"window_size": (7, 0)}, "window_size is 8"),
        ("llama", {"window_size": (7, 0), "window_attn_skip_freq": 2}, "window_attn_skip_freq = 2"),
        ("llama", {"add_qkv_bias": True}, "output projection has none"),
        ("llama", {"swiglu": False, "quick_geglu": True}, "activation is quick_gelu"),
        ("llama", {"attention_output_gate": True}, "attention_output_gate = True"),
        ("llama", {"softmax_type": "learnable"}, "softmax_type = 'learnable'"),
        ("llama", {"layernorm_epsilon": None, "rotary_base": None, "num_attention_heads": None}, "is not known"),
        ("qwen2", {"add_qkv_bias": False}, "add_qkv_bias is False"),
        ("qwen3", {"qk_layernorm": False}, "qk_layernorm is False"),
        ("mixtral", {"moe_router_pre_softmax": True}, "moe_pre_softmax is True"),
        ("mixtral", {"moe_router_topk_scaling_factor": 2.0}, "moe_scaling_factor is 2.0"),
        ("mixtral", {"moe_router_score_function": "sigmoid"}, "moe_score_function is sigmoid"),
        ("mixtral", {"moe_layer_freq": [0, 1, 1]}, "layer 0 has no experts"),
        ("qwen3_moe", {"moe_shared_expert_intermediate_size": 14}, "moe_shared_expert_size is 14"),
        ("qwen2_moe", {"moe_shared_expert_gate": False}, "moe_shared_expert_gate is False"),
        ("deepseek_v2", {"moe_router_pre_softmax": False}, "moe_pre_softmax is False"),
        ("deepseek_v2", {"moe_router_num_groups": 2, "moe_router_group_topk": 1}, "by their best 2 experts"),
        ("deepseek_v3", {"moe_router_num_groups": 4, "moe_router_group_topk": 2}, "by their best 1 experts"),
        ("deepseek_v3", {"moe_layer_freq": [1, 0, 1]}, "layer 1 has no experts, but a layer before it has"),
        ("deepseek_v3", {"moe_shared_expert_intermediate_size": 15}, "15 columns are not a multiple"),
        ("deepseek_v3", {"moe_router_enable_expert_bias": False}, "moe_expert_bias is False"),
        ("gpt2", {"num_query_groups": 2, "group_query_attention": True}, "share 2 query groups"),
        ("gpt2", {"swiglu": False, "squared_relu": True}, "activation is relu2"),
        ("gpt2", {"kv_channels": 8}, "6 heads of 8"),
        ("nemotron", {"layernorm_zero_centered_gamma": False}, "zero_centered_norm is False"),
        ("granitemoeshared", {"moe_shared_expert_gate": True}, "moe_shared_expert_gate is True"),
    ],
)
def test_what_a_family_cannot_express_is_refused_by_name(family, changes, reason):
    facts = ModelArgs.from_catalog(cases.make_catalog({}, cases.case(family, **changes)))
    with pytest.raises(RequestError, match="cannot express") as error:
        models.by_name(family).requires(facts)
    assert any(reason in text for text in error.value.details), error.value.details


def test_nothing_fits_and_the_nearest_say_why():
    args = cases.case("llama", attention_output_gate=True)
    catalog = cases.make_catalog(cases.megatron_shapes(args), args)
    with pytest.raises(RequestError, match="no known architecture") as error:
        models.infer(ModelArgs.from_catalog(catalog), catalog)
    assert all(text.startswith("not ") and "attention_output_gate = True" in text for text in error.value.details)
    assert "qwen3_moe" in (error.value.hint or "")


def test_without_arguments_it_is_said_what_is_not_known():
    catalog = cases.make_catalog(cases.megatron_shapes(cases.case("llama")))
    with pytest.raises(RequestError) as error:
        models.infer(ModelArgs.from_catalog(catalog), catalog)
    assert "num_attention_heads is not known" in str(error.value)


def test_not_a_decoder():
    catalog = cases.make_catalog({"encoder.layers.0.self_attention.linear_qkv.weight": (12, 4)})
    with pytest.raises(RequestError, match="is a BERT, for which no Hugging Face architecture is known"):
        models.infer(ModelArgs.from_catalog(catalog), catalog)


def test_by_name():
    assert models.by_name("Qwen3MoeForCausalLM") is models.by_name("qwen3-moe") is models.by_name("qwen3_moe")
    with pytest.raises(RequestError, match="unknown architecture") as error:
        models.by_name("bert")
    assert "llama" in (error.value.hint or "")


def test_contradictions_refuse_with_both_numbers():
    args = cases.case("llama")
    catalog = cases.make_catalog(cases.megatron_shapes(args), args | {"num_query_groups": 3})
    with pytest.raises(RequestError, match="do not fit") as error:
        map_to_hf(catalog, ModelArgs.from_catalog(catalog), models.by_name("llama"))
    assert "num_query_groups 3" in error.value.details[0]
    assert "fits 2" in error.value.details[0]


def test_a_missing_and_a_surplus_tensor():
    args = cases.case("qwen3")
    shapes = cases.megatron_shapes(args)
    del shapes["decoder.layers.1.self_attention.k_layernorm.weight"]
    catalog = cases.make_catalog(shapes, args)
    with pytest.raises(RequestError, match=r"decoder\.layers\.1 has no self_attention\.k_layernorm\.weight"):
        map_to_hf(catalog, ModelArgs.from_catalog(catalog), models.by_name("qwen3"))
    shapes = cases.megatron_shapes(args) | {"decoder.layers.0.mlp.gauge.weight": (2, 2)}
    catalog = cases.make_catalog(shapes, args)
    mapping = map_to_hf(catalog, ModelArgs.from_catalog(catalog), models.by_name("qwen3"))
    with pytest.raises(RequestError, match="would be lost"):
        prove(mapping.pieces.values(), shapes, mapping.drops)


def test_vocabulary():
    _, _, mapping, _ = export("llama")
    assert (mapping.config["vocab_size"], mapping.targets["lm_head.weight"].shape) == (50, (50, 24))
    assert {drop.reason for drop in mapping.drops} == {"padding rows of the vocabulary"}
    _, _, mapping, _ = export("llama", vocab_size=40)
    assert mapping.targets["model.embed_tokens.weight"].shape == (40, 24)
    args = cases.case("llama", vocab_size=None)
    catalog = cases.make_catalog(cases.megatron_shapes(args), args)
    mapping = map_to_hf(catalog, ModelArgs.from_catalog(catalog), models.by_name("llama"))
    assert (mapping.config["vocab_size"], mapping.drops) == (64, [])
    assert "64 rows" in mapping.notes[0]
    with pytest.raises(RequestError, match="65"):
        export("llama", vocab_size=65)


def test_dtype_leaves_the_router_bias_alone():
    _, _, mapping, _ = export("deepseek_v3", dtype=dtype("bfloat16"))
    names = {t.dtype.name: name for name, t in mapping.targets.items() if not name.endswith("correction_bias")}
    assert list(names) == ["bfloat16"]
    assert mapping.targets["model.layers.1.mlp.gate.e_score_correction_bias"].dtype.name == "float32"
    assert mapping.config["dtype"] == mapping.config["torch_dtype"] == "bfloat16"


def test_multi_token_prediction():
    _, _, kept, _ = export("deepseek_v3")
    assert kept.config["num_nextn_predict_layers"] == 1
    assert kept.targets["model.layers.3.eh_proj.weight"].shape == (24, 48)
    assert "model.layers.3.mlp.experts.3.down_proj.weight" in kept.targets
    _, _, dropped, _ = export("deepseek_v3", mtp="drop")
    assert dropped.config["num_nextn_predict_layers"] == 0
    assert dropped.targets.keys() == {n for n in kept.targets if not n.startswith("model.layers.3.")}
    assert all(drop.source.startswith("mtp.") for drop in dropped.drops if drop.box is None)
    _, _, auto, _ = export("mixtral", mtp_num_layers=1)
    assert "left out" in auto.notes[0]
    with pytest.raises(RequestError, match="cannot hold multi-token prediction layers"):
        export("mixtral", mtp_num_layers=1, mtp="keep")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"rope_type": "default", "rope_theta": 10000.0}),
        (
            {"use_rope_scaling": True, "rotary_base": 500000},
            {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "original_max_position_embeddings": 8192},
        ),
        (
            {"position_embedding_type": "yarn", "rotary_scaling_factor": 4.0, "original_max_position_embeddings": 16},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 1.0},
        ),
    ],
)
def test_old_and_new_rope_keys_mean_the_same_to_transformers(changes, expected, tmp_path):
    _, _, mapping, _ = export("llama", **changes)
    both = mapping.config
    for missing in ((), ("rope_parameters", "dtype"), ("rope_theta", "rope_scaling", "torch_dtype")):
        written = {key: value for key, value in both.items() if key not in missing}
        (tmp_path / "config.json").write_text(json.dumps(written))
        config = AutoConfig.from_pretrained(tmp_path)
        assert expected.items() <= config.rope_parameters.items()
        assert config.dtype == torch.float32
        assert config.head_dim == 4


def test_a_supplied_config_is_compared_with_the_tensors():
    for family in cases.FAMILIES:
        _, _, mapping, _ = export(family)
        assert find_contradictions(mapping.config, mapping) == []
    _, _, mapping, _ = export("qwen2_moe")
    wrong = mapping.config | {"num_experts": 8, "vocab_size": 64, "tie_word_embeddings": True}
    found = find_contradictions(wrong, mapping)
    assert "config.json says vocab_size 64, but the checkpoint gives 50" in found
    assert len(found) == 3
    bare = {k: v for k, v in mapping.config.items() if k not in ("rope_theta", "rope_scaling", "rope_parameters")}
    assert find_contradictions(bare, mapping) == []
    for rope in ({"rope_theta": 1e6}, {"rope_parameters": {"rope_theta": 1e6}}):
        assert find_contradictions(bare | rope, mapping) == [
            "config.json says rope_theta 1000000.0, but the checkpoint gives 10000.0"
        ]
    scaled = {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}}
    assert len(find_contradictions(bare | scaled, mapping)) == 2


def changed_ops(mapping, before, after):
    copies = [
        Copy(c.source, c.source_box, c.target, c.target_box, after if c.op is before else c.op) for c in mapping.copies
    ]
    return HfMapping(mapping.targets, copies, [], mapping.config, mapping.generation_config, [])


def test_forgotten_plus_one_moves_the_logits(tmp_path):
    catalog, facts, arrays = cases.golden_case("llama_ln1p_weights_tp2pp2", "llama_ln1p")
    mapping = map_to_hf(catalog, facts, models.by_name("llama"), dtype=cases.FP32)
    assert sum(copy.op is Op.ADD_ONE for copy in mapping.copies) == 5
    golden = load_file(cases.GOLDEN / "truth" / "llama_ln1p-bf16.logits.safetensors")
    logits = logits_of(tmp_path, changed_ops(mapping, Op.ADD_ONE, Op.COPY), arrays, golden["tokens"])
    assert (logits - golden["logits"]).abs().max() > 1e-3


def test_forgotten_transpose_is_refused_or_moves_the_logits(tmp_path):
    catalog, facts, arrays = cases.golden_case("gpt_adam_tp2pp2", "gpt")
    mapping = map_to_hf(catalog, facts, models.by_name("gpt2"), dtype=cases.FP32)
    wrong = changed_ops(mapping, Op.TRANSPOSE, Op.COPY)
    with pytest.raises(RequestError, match="does not fit"):
        prove(wrong.pieces.values(), {n: t.shape for n, t in catalog.weights.items()}, mapping.drops)
    square = [c for c in mapping.copies if "attn.c_proj.weight" in c.target]  # (32, 32): no shape shows it
    kept = [c for c in mapping.copies if c not in square]
    wrong.copies[:] = kept + [Copy(c.source, c.source_box, c.target, c.target_box) for c in square]
    golden = load_file(cases.GOLDEN / "truth" / "gpt-bf16.logits.safetensors")
    logits = logits_of(tmp_path, wrong, arrays, golden["tokens"])
    assert (logits - golden["logits"]).abs().max() > 1e-3


def test_query_groups_taken_for_one_block_are_another_model():
    _, facts, mapping, shapes = export("llama")
    source = cases.random_arrays(shapes)
    out = cases.run_copies(mapping.copies, {n: t.shape for n, t in mapping.targets.items()}, source)
    fused = source["decoder.layers.0.self_attention.linear_qkv.weight"]
    # independent of the rule: the view that Megatron's attention takes of the projection's output
    grouped = fused.reshape(2, 5, 4, 24)
    assert np.array_equal(out["model.layers.0.self_attn.q_proj.weight"], grouped[:, :3].reshape(24, 24))
    assert np.array_equal(out["model.layers.0.self_attn.k_proj.weight"], grouped[:, 3].reshape(8, 24))
    assert np.array_equal(out["model.layers.0.self_attn.v_proj.weight"], grouped[:, 4].reshape(8, 24))
    assert facts.num_query_groups == 2


def test_deepseek_v3_at_its_real_size_takes_about_a_second():
    args = cases.case(
        "deepseek_v3", num_layers=61, hidden_size=7168, num_attention_heads=128, kv_channels=128, num_experts=256,
        moe_layer_freq=[0] * 3 + [1] * 58, moe_router_topk=8,
    )  # fmt: skip
    shapes = cases.megatron_shapes(args)
    catalog = cases.make_catalog(shapes, args)
    start = time.process_time()
    facts = ModelArgs.from_catalog(catalog)
    mapping = map_to_hf(catalog, facts, models.infer(facts, catalog))
    assert time.process_time() - start < 20  # about 0.5 s when nothing else runs
    assert len(mapping.copies) > 45000


def test_the_tables_import_neither_torch_nor_transformers_nor_a_format():
    code = "import sys, converters.models; print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert not [
        m for m in out.split() if m.split(".")[0] in ("torch", "transformers") or m.startswith("converters.formats")
    ]
