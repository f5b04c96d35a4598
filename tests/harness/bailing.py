"""Ling 2.0 for transformers, which has no class for it: GLM-4.5's model, under the names of Ling's files.

Both compute the same (modeling_bailing_moe_v2.py beside the model): norms of query and key heads, rotary embedding of the
first part of a head, sigmoid scores whose bias chooses experts in groups ranked by their best two, shared experts.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, Glm4MoeConfig, Glm4MoeForCausalLM, PreTrainedConfig

_SAME = (
    *(
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
    ),
    *("head_dim", "max_position_embeddings", "tie_word_embeddings", "moe_intermediate_size", "num_experts_per_tok"),
    *(
        "n_group",
        "topk_group",
        "first_k_dense_replace",
        "routed_scaling_factor",
        "rms_norm_eps",
        "partial_rotary_factor",
    ),
    "rope_theta",
)
_NAMES = (
    ("model.embed_tokens.", "model.word_embeddings."),
    (".self_attn.o_proj.", ".attention.dense."),
    (".self_attn.q_norm.", ".attention.query_layernorm."),
    (".self_attn.k_norm.", ".attention.key_layernorm."),
    (".e_score_correction_bias", ".expert_bias"),
)


def as_in_files(tensors, join):
    """GLM-4.5's tensors as Ling's files have them."""
    out, parts = {}, {}
    for key, value in tensors.items():
        if part := re.fullmatch(r"(.*)\.self_attn\.([qkv])_proj\.(weight|bias)", key):
            parts.setdefault((part[1], part[3]), {})[part[2]] = value
            continue
        name = key
        for one, other in _NAMES:
            name = name.replace(one, other)
        out[name] = value
    joined = {
        f"{p}.attention.query_key_value.{leaf}": join([three[x] for x in "qkv"]) for (p, leaf), three in parts.items()
    }
    return out | joined


class BailingConfig(PreTrainedConfig):
    model_type = "bailing_moe_v2"

    def __init__(self, **settings):
        more = {"num_attention_heads": 8, "rms_norm_eps": 1e-6, "rope_theta": 600000.0, "partial_rotary_factor": 1.0}
        more |= {"n_group": 8, "topk_group": 4, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0}
        rest = {name: settings.pop(name) for name in list(settings) if name in _SAME or name in _OWN}
        super().__init__(**settings)
        for name, value in {**more, **rest}.items():
            setattr(self, name, value)


_OWN = (
    "num_experts",
    "num_shared_experts",
    "use_qkv_bias",
    "num_nextn_predict_layers",
    "score_function",
    "norm_topk_prob",
)


class BailingForCausalLM(Glm4MoeForCausalLM):
    config_class = BailingConfig

    def __init__(self, config):
        own = {name: getattr(config, name) for name in _SAME if hasattr(config, name)}
        own |= {"n_routed_experts": config.num_experts, "n_shared_experts": config.num_shared_experts}
        own |= {"use_qk_norm": True, "attention_bias": config.use_qkv_bias, "num_nextn_predict_layers": 0}
        own["rope_parameters"] = {
            "rope_type": "default",
            "rope_theta": own.pop("rope_theta"),
            "partial_rotary_factor": own["partial_rotary_factor"],
        }
        super().__init__(Glm4MoeConfig(**own, pad_token_id=0))
        self.stated = config

    def save_pretrained(self, folder, **_more):
        super().save_pretrained(folder)
        path = Path(folder) / "model.safetensors"
        save_file(as_in_files(load_file(path), torch.cat), path, {"format": "pt"})
        stated = self.stated.to_dict() | {"model_type": "bailing_moe_v2", "architectures": ["BailingMoeV2ForCausalLM"]}
        (Path(folder) / "config.json").write_text(json.dumps(stated))


AutoConfig.register("bailing_moe_v2", BailingConfig)
AutoModelForCausalLM.register(BailingConfig, BailingForCausalLM)
