"""ModelArgs: one spelling for every version's arguments, and no number that the tensors contradict."""

from dataclasses import dataclass

import pytest

from converters.megatron.layer_pattern import moe_layers
from converters.megatron.model_args import ModelArgs
from harness import model_cases as cases


def facts(args=None, shapes=None, config=None, **changes):
    given = None if args is None else args | changes
    if shapes is None:
        shapes = cases.megatron_shapes(given or cases.case("llama"))
    return ModelArgs.from_catalog(cases.make_catalog(shapes, given, config))


def contradictions(family, shapes=None, **changes):
    catalog = cases.make_catalog(shapes or cases.megatron_shapes(cases.case(family)), cases.case(family, **changes))
    return ModelArgs.from_catalog(catalog).contradictions(catalog)


@dataclass
class Inert:
    """Stands for a pickled global that nothing imported."""

    module: str
    name: str


def test_old_and_new_names_give_the_same_facts():
    new = cases.case("llama")
    old = dict(new)
    for name, was in (("layernorm_epsilon", "norm_epsilon"), ("layernorm_zero_centered_gamma", "apply_layernorm_1p")):
        old[was] = old.pop(name)
    old["disable_bias_linear"] = not old.pop("add_bias_linear")
    ignored = {"source"}
    a, b = (vars(facts(given, cases.megatron_shapes(new))) for given in (new, old))
    assert {k: v for k, v in a.items() if k not in ignored} == {k: v for k, v in b.items() if k not in ignored}


def test_bridge_nemo2_and_nemo1_configurations():
    inner = {
        "num_layers": 3, "hidden_size": 24, "ffn_hidden_size": 40, "num_attention_heads": 6, "num_query_groups": 2,
        "kv_channels": 4, "vocab_size": 50, "normalization": "RMSNorm", "layernorm_epsilon": "1e-5", "seq_length": 32,
        "gated_linear_unit": True, "activation_func": {"_target_": "torch.nn.functional.silu"},
        "share_embeddings_and_output_weights": False, "add_bias_linear": False, "rotary_base": 500000,
        "seq_len_interpolation_factor": 2.0, "position_embedding_type": "rope",
    }  # fmt: skip
    nemo1 = inner | {"normalization": "rmsnorm", "activation": "fast-swiglu", "bias": False, "rotary_percentage": 1.0}
    for name in ("gated_linear_unit", "activation_func", "add_bias_linear"):
        del nemo1[name]
    for config in ({"model": inner}, {"config": inner}, inner, nemo1):
        found = facts(config=config)
        assert (found.num_query_groups, found.gated, found.activation, found.norm_epsilon) == (2, True, "silu", 1e-5)
        assert (found.rope_scaling, found.rope_factor, found.max_position_embeddings) == ("linear", 2.0, 32)
        assert found.source["num_layers"] == "config.num_layers"
        assert found.source["max_position_embeddings"] == "config.seq_length"
        assert found.source["rotary_percent"] in ("default", "config.rotary_percentage")


def test_nemo1_layernorm1p_is_zero_centred():
    assert facts(config={"num_layers": 3, "normalization": "layernorm1p"}).zero_centered_norm


def test_shapes_fill_what_nothing_states_and_say_so():
    args = cases.case("qwen3_moe")
    found = facts({"num_attention_heads": 6, "num_query_groups": 2}, cases.megatron_shapes(args))
    assert (found.num_layers, found.hidden_size, found.head_dim, found.num_experts) == (3, 24, 4, 4)
    assert (found.moe_ffn_hidden_size, found.moe_layers, found.qk_layernorm) == (10, (False, True, True), True)
    assert (found.gated, found.tied_embeddings, found.normalization) == (True, False, "RMSNorm")
    assert found.source["head_dim"] == "shape of decoder.layers.0.self_attention.linear_proj.weight"
    assert found.activation is None
    assert found.moe_topk is None


def test_latent_attention_is_measured():
    found = facts({"num_attention_heads": 6}, cases.megatron_shapes(cases.case("deepseek_v3")))
    assert (found.mla, found.q_lora_rank, found.kv_lora_rank, found.qk_head_dim) == (True, 12, 10, 4)
    assert (found.qk_pos_emb_head_dim, found.v_head_dim, found.mtp_num_layers) == (6, 5, 1)


@pytest.mark.parametrize(
    "shapes",
    [
        {},
        {"weight": (3,), "blocks.0.linear.weight": (4, 4)},
        {"encoder.layers.0.self_attention.linear_qkv.weight": (12, 4), "lm_head.dense.weight": (4, 4)},
        {"decoder.layers.0.mixer.in_proj.weight.z": (8, 4), "decoder.layers.2.mlp.linear_fc1.weight": (8, 4)},
        {"decoder.layers.0.self_attention.linear_proj.weight": (), "decoder.layers.0.mlp.linear_fc2.weight": (2,)},
    ],
)
def test_odd_checkpoints_do_not_crash(shapes):
    for args in ({}, {"num_layers": None, "hidden_size": "big", "params_dtype": Inert("torch", "bfloat16")}):
        catalog = cases.make_catalog(shapes, args)
        found = ModelArgs.from_catalog(catalog)
        found.contradictions(catalog)
        assert found.num_attention_heads is None


def test_options_of_unused_features_are_forgotten():
    found = facts(cases.case("llama"), kv_lora_rank=32, moe_router_topk=2, mtp_num_layers=None, qk_head_dim=128)
    assert (found.kv_lora_rank, found.moe_topk, found.qk_head_dim, found.mtp_num_layers) == (None,) * 4


def test_groups_mean_nothing_without_grouping():
    found = facts(cases.case("gpt2"), num_query_groups=1)
    assert found.num_query_groups == found.num_attention_heads == 6


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"swiglu": True}, (True, "silu")),
        ({"swiglu": False, "squared_relu": True}, (False, "relu2")),
        ({"swiglu": False, "quick_geglu": True}, (True, "quick_gelu")),
        ({"swiglu": False, "openai_gelu": True}, (False, "gelu_tanh")),
        ({"swiglu": False, "bias_gelu_fusion": True}, (False, "gelu_tanh")),
        ({"swiglu": False, "bias_gelu_fusion": False}, (False, "gelu")),
    ],
)
def test_activations(flags, expected):
    found = ModelArgs.from_catalog(cases.make_catalog({}, flags))
    assert (found.gated, found.activation) == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (1, (True,) * 4),
        (2, (True, False, True, False)),
        ([0, 1, 1, 1], (False, True, True, True)),
        ("([0]*1+[1]*3)", (False, True, True, True)),
        ("[0,1]+[1]*2", (False, True, True, True)),
        ("([0]+[1])*2", None),
        ("__import__('os')", None),
    ],
)
def test_expert_layer_patterns(given, expected):
    assert moe_layers(given, 4) == expected


def test_llama3_scaling_is_by_8_whatever_megatron_lm_was_told():
    found = facts(cases.case("llama"), use_rope_scaling=True, rope_scaling_factor=32.0)
    assert (found.rope_scaling, found.rope_factor, found.rope_original_max_position_embeddings) == ("llama3", 8.0, 8192)
    assert "32" in found.notes[0]
    bridge = facts(config={"num_layers": 3, "rope_scaling": True, "rope_scaling_factor": 32.0})
    assert (bridge.rope_factor, bridge.notes) == (32.0, ())


def test_latent_attention_uses_yarn_unless_told_otherwise():
    base = cases.case("deepseek_v2", rope_type=None, mscale=0.8, mscale_all_dim=0.5)
    assert facts(base, rotary_scaling_factor=1.0).rope_scaling is None  # yarn by 1 is no scaling
    found = facts(base, rotary_scaling_factor=4.0)
    assert (found.rope_scaling, found.rope_factor, found.rope_mscale) == ("yarn", 4.0, 0.8)
    assert (found.rope_beta_fast, found.rope_original_max_position_embeddings) == (32.0, 4096)
    assert facts(base, rope_type="rope", rotary_scaling_factor=4.0).extras == {"mscale_all_dim": 0.5}


def test_layout_and_samples():
    args = cases.case("llama", tensor_model_parallel_size=4, pipeline_model_parallel_size=2, world_size=64)
    found = facts(args, consumed_train_samples=80, context_parallel_size=2)
    assert (found.tp, found.pp, found.cp, found.dp, found.consumed_train_samples) == (4, 2, 2, 4, 80)


@pytest.mark.parametrize(
    ("family", "changes", "parts"),
    [
        ("llama", {"num_query_groups": 3}, ("args say num_query_groups 3", "linear_qkv.weight (40, 24) fits 2")),
        ("llama", {"num_layers": 5}, ("args say num_layers 5", "holds 3 layers")),
        ("llama", {"hidden_size": 32}, ("args say hidden_size 32", "(64, 24) fits 24")),
        ("llama", {"ffn_hidden_size": 64}, ("args say ffn_hidden_size 64", "fits 40")),
        ("llama", {"num_attention_heads": 5, "kv_channels": None}, ("fits no whole number",)),
        ("llama", {"untie_embeddings_and_output_weights": False}, ("tied_embeddings True", "output_layer.weight exists")),
        ("qwen2", {"untie_embeddings_and_output_weights": True}, ("tied_embeddings False", "does not exist")),
        ("llama", {"swiglu": False, "bias_gelu_fusion": False}, ("gated False", "2 times the 40 columns")),
        ("llama", {"add_bias_linear": True}, ("add_bias_linear True", "does not exist")),
        ("llama", {"qk_layernorm": True}, ("qk_layernorm True", "does not exist")),
        ("llama", {"vocab_size": 65}, ("vocab_size is 65", "64 rows")),
        ("mixtral", {"num_experts": 8}, ("num_experts 8", "4 experts")),
        ("mixtral", {"moe_layer_freq": [0, 1, 1]}, ("moe_layers 011", "111")),
        ("llama", {"num_experts": 8}, ("num_experts 8", "no experts")),
        ("mixtral", {"moe_shared_expert_intermediate_size": 4}, ("moe_shared_expert_size 4", "no shared expert")),
        ("deepseek_v3", {"kv_lora_rank": 8}, ("kv_lora_rank 8", "fits 10")),
        ("deepseek_v3", {"mtp_num_layers": 2}, ("mtp_num_layers 2", "1 MTP layer")),
        ("gpt2", {"position_embedding_type": "rope"}, ("position_embedding_type rope", "position_embeddings.weight exists")),
        ("gpt2", {"normalization": "RMSNorm"}, ("normalization RMSNorm", "final_layernorm.bias exists")),
    ],
)  # fmt: skip
def test_contradictions_name_both_numbers(family, changes, parts):
    assert not contradictions(family)
    found = contradictions(family, **changes)
    assert any(all(part in text for part in parts) for text in found), found


def test_tensors_that_disagree_with_each_other():
    shapes = cases.megatron_shapes(cases.case("mixtral"))
    uneven = shapes | {"decoder.layers.1.self_attention.linear_proj.weight": (24, 20)}
    assert "is (24, 20), but" in contradictions("mixtral", uneven)[0]
    without = {name: shape for name, shape in shapes.items() if ".layers.1." not in name}
    assert "layer 1 of 3 has no tensors" in contradictions("mixtral", without)
    gap = {name: shape for name, shape in shapes.items() if "layers.2.mlp.experts.1." not in name}
    assert "layer 2 has no expert 1" in contradictions("mixtral", gap)


# those of torch_dist: folders of other DCP writers have arguments of their own kind, or none
TORCH_DIST = sorted(
    path.parent
    for path in cases.GOLDEN.glob("**/.metadata")
    if path.parts[-3] != "nemo2_llama_weights_tp1"  # nor has what NeMo's writer makes without a context folder
    and '"torch_dist"' in (meta.read_text() if (meta := path.with_name("metadata.json")).exists() else "")
)


# arguments that say which layers a model has, and how its attention is gated: no Hugging Face class has them
OF_LAYERS = {
    "attention_output_gate",
    "experimental_attention_variant",
    "hybrid_layer_pattern",
    "hybrid_override_pattern",
    "is_hybrid_model",
    "linear_attention_freq",
}


@pytest.mark.parametrize("folder", TORCH_DIST, ids=lambda p: p.parts[-2])
def test_golden_arguments_fit_their_tensors(folder):
    from converters.formats.torch_dist.reader import TorchDistReader

    assert len(TORCH_DIST) > 30
    catalog = TorchDistReader.open(folder).catalog
    found = ModelArgs.from_catalog(catalog)
    assert found.contradictions(catalog) == []
    assert found.extras.keys() <= OF_LAYERS
    assert found.vocab_size in (117, 120, 250, 300)
    assert found.tp is not None
    every_field_has_a_source = {k for k, v in vars(found).items() if v is not None} - {
        "source",
        "extras",
        "notes",
        "unknown",
    }
    assert every_field_has_a_source == set(found.source)
