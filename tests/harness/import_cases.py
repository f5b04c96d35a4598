"""Small models of every architecture that is imported, as transformers saves them: random weights, odd sizes."""

from __future__ import annotations

import copy
import json
from functools import partial

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import harness.bailing  # a class for it
import harness.decilm
import harness.mimo  # and for it
from harness import predictions

# three layers; a vocabulary that is a multiple of nothing; heads times head_dim is not hidden_size where a class permits it
BASE = {
    "vocab_size": 251,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
WIDE = BASE | {"head_dim": 10}
MIXED = {"num_experts_per_tok": 2, "moe_intermediate_size": 20}
LATENT = {
    "num_key_value_heads": 8,
    "q_lora_rank": 14,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "rms_norm_eps": 1e-6,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 4096,
    "mscale": 0.7,
    "mscale_all_dim": 0.7,
}
PHI = {"pad_token_id": 0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
DRY = {"attention_dropout": 0.0, "residual_dropout": 0.0, "attention_bias": True}
ROUTED = {
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
}
HALF = {"num_nextn_predict_layers": 0, "partial_rotary_factor": 0.4}
NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 5,
    "linear_value_head_dim": 7,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "partial_rotary_factor": 0.4,
}
SCAN = {
    "num_hidden_layers": ...,
    "mamba_num_heads": 6,
    "mamba_head_dim": 5,
    "n_groups": 2,
    "ssm_state_size": 7,
    "pad_token_id": 0,
}
TIED = {"tie_word_embeddings": True}
PARALLEL = {
    "mamba_d_ssm": 48,
    "mamba_n_heads": 6,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 7,
    "mamba_norm_before_gate": False,
    "embedding_multiplier": 5.65625,
    "key_multiplier": 0.3125,
    "attention_in_multiplier": 1.25,
    "attention_out_multiplier": 0.9375,
    "ssm_in_multiplier": 1.5,
    "ssm_out_multiplier": 0.625,
    "mlp_multipliers": [0.875, 0.5625],
    "ssm_multipliers": [0.3535, 0.25, 0.1767, 0.5, 0.3535],
}
UNEVEN = BASE | {
    "num_hidden_layers": 6,
    "num_key_value_heads": ...,
    "intermediate_size": ...,
    "max_position_embeddings": 16384,
    "rope_theta": 500000.0,
    "rope_scaling": LLAMA3,
    "block_configs": [
        harness.decilm.block(attention=2, ffn=2.0),
        harness.decilm.block(attention=None, ffn=10.5),
        harness.decilm.block(attention=4, ffn=None),
        harness.decilm.block(attention="linear", ffn=20),
        harness.decilm.block(attention=2, ffn="linear"),
        harness.decilm.block(attention=1, ffn=2.0),
    ],
}
SINKS = {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 5}
CASES = {
    "llama": BASE,
    "llama31": BASE | {"max_position_embeddings": 16384, "rope_theta": 500000.0, "rope_scaling": LLAMA3},
    "llama_bias_tied": BASE | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "mistral": WIDE | {"sliding_window": 7},
    "qwen2": BASE | {"tie_word_embeddings": True},
    "mimo": WIDE | {"num_nextn_predict_layers": 2, "sliding_window": 64},
    "qwen3": WIDE,
    "qwen2_moe": BASE | MIXED | {"num_experts": 6, "shared_expert_intermediate_size": 22, "mlp_only_layers": [1]},
    "qwen3_moe": WIDE | MIXED | {"num_experts": 6, "norm_topk_prob": True},
    "mixtral": WIDE | {"num_local_experts": 6, "num_experts_per_tok": 2},
    "granitemoeshared": BASE
    | {
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 22,
        "attention_multiplier": 6**-0.5,
    },
    "deepseek_v2": BASE | MIXED | LATENT | {"q_lora_rank": None},
    "deepseek_v2_q_lora": BASE | MIXED | LATENT,
    "deepseek_v3": BASE
    | MIXED
    | LATENT
    | {"hidden_size": 44, "n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 0},
    "deepseek_v3_yarn": BASE
    | MIXED
    | LATENT
    | {
        "max_position_embeddings": 16384,
        "num_nextn_predict_layers": 0,
        "n_group": 2,
        "topk_group": 1,
        "rope_scaling": YARN,
    },
    "gpt2": {
        "vocab_size": 251,
        "n_embd": 40,
        "n_layer": 3,
        "n_head": 8,
        "n_inner": 56,
        "n_positions": 64,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    },
    "gpt_neox": BASE
    | {"num_key_value_heads": ..., "use_parallel_residual": False, "rotary_pct": 0.4, "hidden_act": "gelu"},
    "starcoder2": BASE | {"sliding_window": 9},
    "nemotron": BASE | {"head_dim": 8, "partial_rotary_factor": 0.5},
    "phi3": BASE | PHI | {"sliding_window": 7, "hidden_size": 64, "partial_rotary_factor": 0.75},
    "seed_oss": WIDE | DRY,
    "smollm3": BASE | {"no_rope_layers": [1, 0, 1], "pad_token_id": 0},
    "ministral": WIDE | {"sliding_window": 7, "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    "glm": WIDE | {"partial_rotary_factor": 0.4, "pad_token_id": 0},
    "glm4_moe": WIDE | MIXED | ROUTED | {"use_qk_norm": True, "attention_bias": True} | HALF,
    "glm4_moe_plain": WIDE | MIXED | ROUTED | {"n_group": 2, "tie_word_embeddings": True} | HALF,
    "glm4_moe_lite": BASE
    | MIXED
    | LATENT
    | {"first_k_dense_replace": ..., "mlp_layer_types": ["sparse", "dense", "sparse"], "routed_scaling_factor": 1.8},
    "dots1": WIDE | MIXED | ROUTED | {"sliding_window": None},
    "bailing_moe_v2": WIDE
    | MIXED
    | {
        "num_experts": 6,
        "num_shared_experts": 2,
        "use_qkv_bias": True,
        "n_group": 2,
        "topk_group": 1,
        "routed_scaling_factor": 2.5,
        "partial_rotary_factor": 0.4,
    },
    "ernie4_5": WIDE,
    "arcee": WIDE,
    "granite": BASE | {"attention_multiplier": 6**-0.5},
    "granitemoe": BASE | {"num_local_experts": 6, "num_experts_per_tok": 2, "attention_multiplier": 6**-0.5},
    "qwen3_next": WIDE
    | MIXED
    | NET
    | {"num_experts": 6, "shared_expert_intermediate_size": 22, "mlp_only_layers": [1]},
    "qwen3_5_text": WIDE | NET | {"tie_word_embeddings": True},
    "qwen3_5_moe_text": WIDE
    | MIXED
    | NET
    | {"num_experts": 6, "shared_expert_intermediate_size": 22, "intermediate_size": ...},
    "nemotron_h": WIDE
    | SCAN
    | MIXED
    | {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "moe"],
        "moe_shared_expert_intermediate_size": 22,
        "n_routed_experts": 6,
        "moe_latent_size": 16,
        "routed_scaling_factor": 2.5,
    },
    "nemotron_h_dense": WIDE | SCAN | {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"]},
    "gpt_oss": WIDE | SINKS | {"rope_parameters": {"rope_type": "default", "rope_theta": 150000.0}},
    "gpt_oss_yarn": WIDE | SINKS | {"max_position_embeddings": 131072},
    "bamba": BASE
    | {"mamba_n_heads": 12, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 7, "attn_layer_indices": [1]},
    "gemma": WIDE | TIED,
    "gemma2": WIDE | TIED | {"query_pre_attn_scalar": 12, "sliding_window": 7},
    "gemma3_text": WIDE | TIED | {"query_pre_attn_scalar": 12, "sliding_window": 7},
    "gemma3_text_mixed": WIDE
    | TIED
    | {
        "query_pre_attn_scalar": 12,
        "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 20000.0},
        },
    },
    "falcon_h1": WIDE | PARALLEL,
    "falcon_h1_norm": WIDE | PARALLEL | TIED | {"mamba_rms_norm": True, "lm_head_multiplier": 0.375},
    "exaone4": WIDE
    | TIED
    | {
        "sliding_window": None,
        "layer_types": ["full_attention"] * 3,
        "max_position_embeddings": 16384,
        "rope_scaling": LLAMA3 | {"factor": 16.0},
    },
    "olmoe": BASE | {"num_key_value_heads": 8, "num_experts": 6, "num_experts_per_tok": 2, "pad_token_id": 0},
    "nemotron-nas": UNEVEN,
    "nemotron-nas_tied": UNEVEN
    | TIED
    | {
        "num_hidden_layers": 3,
        "block_configs": [
            harness.decilm.block(attention="linear", ffn=None),
            harness.decilm.block(attention=1, ffn="linear"),
            harness.decilm.block(attention=8, ffn=10.5),
        ],
    },
    "minimax_m2": WIDE | {"num_local_experts": 6, "num_experts_per_tok": 2, "partial_rotary_factor": 0.4},
}
CASES |= {name: CASES[name.removesuffix("_mtp")] | about.whole for name, about in predictions.CASES.items()}
FAMILY = {
    **{name: name.removesuffix("_mtp") for name in predictions.CASES},
    "falcon_h1_norm": "falcon_h1",
    "nemotron-nas_tied": "nemotron-nas",
    "gemma3_text_mixed": "gemma3_text",
    "gpt_oss_yarn": "gpt_oss",
    "nemotron_h_dense": "nemotron_h",
    "glm4_moe_plain": "glm4_moe",
    "deepseek_v2_q_lora": "deepseek_v2",
    "llama31": "llama",
    "llama_bias_tied": "llama",
    "deepseek_v3_yarn": "deepseek_v3",
}


LAYOUTS = {"nemotron-nas": [(2, 1), (1, 2), (2, 2)]}
"""Tensor and pipeline parallel sizes at which the sweep of imports computes a case as well."""


def family(name):
    """The `model_type` of a case."""
    return FAMILY.get(name, name)


def mcore(name):
    """The version of Megatron-LM that builds all of a case; the first where several do."""
    return "0.19" if name in ("gpt_oss_yarn", "nemotron_h_mtp") else "0.16"


def settings(name):
    """What config.json of a case says; a copy, as transformers adds keys to the rope_scaling that it is given."""
    return copy.deepcopy({key: value for key, value in CASES[name].items() if value is not ...})


def config(name, **changes):
    """Its configuration."""
    kind = family(name)
    return AutoConfig.for_model(kind).from_dict({"model_type": kind, **settings(name), **changes})


def zero_centred(name, key):
    """Whether a norm's weight is stored as gamma - 1."""
    centred = ("nemotron", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "gemma", "gemma2", "gemma3_text")
    return family(name) in centred and "linear_attn" not in key


def model(name, dtype=torch.bfloat16, seed=11, **changes):
    """A model with random weights, norms and biases included."""
    torch.manual_seed(seed)
    made = AutoModelForCausalLM.from_config(config(name, **changes))
    with torch.no_grad():
        for key, value in (*made.named_parameters(), *made.named_buffers()):
            if "inv_freq" in key or not value.is_floating_point():
                continue
            noise = torch.randn(value.shape)
            norm = "norm" in key or ".ln_" in key
            centre = 1.0 if norm and key.endswith("weight") and not zero_centred(name, key) else 0.0
            value.copy_(centre + (0.1 if value.dim() == 1 else 0.15) * noise)
    made = made.to(dtype)
    for key, value in (*made.named_buffers(), *made.named_parameters()):
        if "e_score_correction_bias" in key:
            value.data = value.data.float()
    return made.eval()


def save(name, folder, shard="5GB", **changes):
    """Saves a case; returns the model."""
    made = model(name, **changes)
    made.save_pretrained(folder, max_shard_size=shard)
    if name in predictions.CASES:
        dtype = changes.get("dtype", torch.bfloat16)
        predictions.add_predictions(name, folder, made, partial(save, family(name), seed=12, dtype=dtype))
    return made


def rewrite_config(folder, **changes):
    """Changes keys of a folder's config.json; None takes one away."""
    path = folder / "config.json"
    document = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in document.items() if value is not ...}))
