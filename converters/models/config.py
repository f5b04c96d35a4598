"""Blocks of config.json that architectures share, and the needs that go with them.

Where transformers 5 renamed a key, both spellings are written: 5.x reads the old one too, and 4.x and the inference
servers of its time read nothing else.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from converters.megatron.layer_pattern import all_but_every_nth
from converters.megatron.option_values import first_stated
from converters.models.model import SET, UNSET

if TYPE_CHECKING:
    from collections.abc import Mapping

    from converters.megatron.model_args import ModelArgs


DELTA_NET_SIZES = (
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    "linear_conv_kernel_dim",
)
"""Sizes of a gated delta net, which config.json calls as `ModelArgs` does."""
# field of `ModelArgs` -> its names in config.json
KEYS: dict[str, tuple[str, ...]] = {
    "num_layers": ("num_hidden_layers", "n_layer"),
    "hidden_size": ("hidden_size", "n_embd"),
    "num_attention_heads": ("num_attention_heads", "n_head"),
    "num_query_groups": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "ffn_hidden_size": ("intermediate_size", "n_inner"),
    "vocab_size": ("vocab_size",),
    "max_position_embeddings": ("max_position_embeddings", "n_positions"),
    "num_experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "moe_ffn_hidden_size": ("moe_intermediate_size",),
    "moe_shared_expert_size": (
        "shared_expert_intermediate_size",
        "shared_intermediate_size",
        "moe_shared_expert_intermediate_size",
    ),
    "q_lora_rank": ("q_lora_rank",),
    "kv_lora_rank": ("kv_lora_rank",),
    "qk_head_dim": ("qk_nope_head_dim",),
    "qk_pos_emb_head_dim": ("qk_rope_head_dim",),
    "v_head_dim": ("v_head_dim",),
    "mtp_num_layers": ("num_nextn_predict_layers",),
    "mamba_num_heads": ("mamba_num_heads", "mamba_n_heads"),
    "mamba_head_dim": ("mamba_head_dim", "mamba_d_head"),
    "mamba_num_groups": ("n_groups", "mamba_n_groups"),
    "mamba_state_dim": ("ssm_state_size", "mamba_d_state"),
    **{name: (name,) for name in DELTA_NET_SIZES},
}
# the same for what no shape shows
STATED: dict[str, tuple[str, ...]] = {
    "norm_epsilon": ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_epsilon", "norm_eps"),
    "moe_topk": ("num_experts_per_tok",),
    "moe_aux_loss": ("router_aux_loss_coef",),
    "moe_scaling_factor": ("routed_scaling_factor",),
    "attention_dropout": ("attention_dropout", "attn_pdrop"),
    "hidden_dropout": ("hidden_dropout", "resid_pdrop", "residual_dropout"),
    "init_method_std": ("initializer_range",),
}
ACTIVATION_SPELLINGS = {
    "swish": "silu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
"""Names of functions in config.json -> those of `ModelArgs.activation`; all others are spelt alike."""
_FACTS = {key: fact for table in (KEYS, STATED) for fact, keys in table.items() for key in keys}


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary embedding that a config.json states, in the spelling of transformers 4 or 5."""
    section = config.get("rope_parameters") or config.get("rope_scaling") or {}
    parameters = dict(section) if isinstance(section, dict) else {}
    parameters.setdefault("rope_theta", first_stated(config, ("rope_theta", "rotary_emb_base")))
    parameters.setdefault("partial_rotary_factor", first_stated(config, ("partial_rotary_factor", "rotary_pct")))
    parameters.setdefault("rope_type", parameters.get("type") or "default")
    if parameters["rope_type"] == "linear" and parameters.get("factor") == 1:
        parameters["rope_type"] = "default"
    return parameters


def without_idle_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with options that change nothing set to what they have no effect with."""
    out = dict(config)
    groups, experts = out.get("n_group"), first_stated(out, KEYS["num_experts"])
    sizes = type(groups) is int and type(experts) is int and 0 < 2 * groups <= experts and experts % groups == 0
    if sizes and groups == out.get("topk_group"):  # experts are chosen from all groups
        out |= {"n_group": 1, "topk_group": 1}
        if out.get("topk_method") == "group_limited_greedy":
            out["topk_method"] = "greedy"
    if out.get("mamba_rms_norm") is False:  # there is no norm to be before the gate
        out["mamba_norm_before_gate"] = False
    return out


def required(*facts: str) -> dict[str, tuple[Any, ...]]:
    """Needs of facts that must be known, whatever their values are."""
    return dict.fromkeys(facts, (SET,))


DECODER: dict[str, tuple[Any, ...]] = {
    **required("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings", "norm_epsilon"),
    "zero_centered_norm": (True, False),
    "tied_embeddings": (True, False),
}
GROUPED_ATTENTION: dict[str, tuple[Any, ...]] = {
    "mla": (False,),
    **required("num_query_groups", "head_dim"),
    "qk_layernorm": (False,),
    "window_size": (UNSET,),
}
RMS: dict[str, tuple[Any, ...]] = {"normalization": ("RMSNorm",)}
SWIGLU: dict[str, tuple[Any, ...]] = {"gated": (True,), "activation": ("silu",)}
QKV_BIAS: dict[str, tuple[Any, ...]] = {"add_bias_linear": (False,), "add_qkv_bias": (True, False)}
NO_BIAS: dict[str, tuple[Any, ...]] = {"add_bias_linear": (False,), "add_qkv_bias": (False,)}
DENSE: dict[str, tuple[Any, ...]] = {"num_experts": (UNSET,), "ffn_hidden_size": (SET,)}
ROPE: dict[str, tuple[Any, ...]] = {
    "position_embedding_type": ("rope", "yarn"),
    "rotary_base": (SET,),
    "rotary_percent": (1.0,),
    "rotary_interleaved": (False,),
    "rope_scaling": (UNSET, "linear", "llama3", "yarn"),
}
PARTIAL_ROPE: dict[str, tuple[Any, ...]] = {"rotary_percent": (SET,), "rope_scaling": (UNSET,)}
LLAMA: dict[str, tuple[Any, ...]] = {**DECODER, **GROUPED_ATTENTION, **RMS, **SWIGLU, **ROPE}
LAYER_NORM: dict[str, tuple[Any, ...]] = {**DECODER, **GROUPED_ATTENTION, **ROPE, **DENSE}
LAYER_NORM |= {"normalization": ("LayerNorm",), "gated": (False,)}
EXPERTS = required("num_experts", "moe_topk", "moe_ffn_hidden_size", "moe_layers")
NO_SHARED_EXPERT: dict[str, tuple[Any, ...]] = {"moe_shared_expert_size": (UNSET,)}
SHARED_EXPERT: dict[str, tuple[Any, ...]] = {"moe_shared_expert_size": (SET,), "moe_shared_expert_gate": (False,)}
GATED_SHARED_EXPERT: dict[str, tuple[Any, ...]] = {**SHARED_EXPERT, "moe_shared_expert_gate": (True,)}
# top-k over a softmax, nothing else
PLAIN_ROUTER: dict[str, tuple[Any, ...]] = {
    **EXPERTS,
    "moe_score_function": ("softmax",),
    "moe_group_topk": (UNSET,),
    "moe_scaling_factor": (UNSET, 1.0),
    "moe_expert_bias": (False,),
}


def keys_of(args: ModelArgs, *keys: str) -> dict[str, Any]:
    """Keys of config.json that each state one fact."""
    return {key: getattr(args, _FACTS[key]) for key in keys}


def decoder(args: ModelArgs) -> dict[str, Any]:
    """Sizes that every decoder has, under the names that all but GPT-2 use."""
    return {
        "hidden_size": args.hidden_size,
        "intermediate_size": args.ffn_hidden_size or args.moe_ffn_hidden_size,
        "num_hidden_layers": args.num_layers,
        "num_attention_heads": args.num_attention_heads,
        "max_position_embeddings": args.max_position_embeddings,
        "hidden_act": args.activation,
        "attention_dropout": args.attention_dropout or 0.0,
    }


def attention(args: ModelArgs) -> dict[str, Any]:
    """Query groups, with the head size explicit: consumers otherwise take hidden_size / heads for it."""
    return {"num_key_value_heads": args.num_query_groups, "head_dim": args.head_dim}


def rope(args: ModelArgs) -> dict[str, Any]:
    """Rotary embedding: `rope_theta` and `rope_scaling` of transformers 4, `rope_parameters` of 5."""
    scaling = _rope_scaling(args)
    parameters = {"rope_theta": args.rotary_base, "rope_type": "default", **(scaling or {})}
    # `type` is how remote code before transformers 4.43 (DeepSeek's own) spells it
    legacy = {"type": scaling["rope_type"], **scaling} if scaling else None
    return {"rope_theta": args.rotary_base, "rope_scaling": legacy, "rope_parameters": parameters}


def _rope_scaling(args: ModelArgs) -> dict[str, Any] | None:
    if args.rope_scaling == "linear":
        return {"rope_type": "linear", "factor": args.rope_factor}
    if args.rope_scaling == "llama3":
        return {
            "rope_type": "llama3",
            "factor": args.rope_factor,
            "low_freq_factor": args.rope_low_freq_factor,
            "high_freq_factor": args.rope_high_freq_factor,
            "original_max_position_embeddings": args.rope_original_max_position_embeddings,
        }
    if args.rope_scaling == "yarn":
        return _yarn(args)
    return None


def _yarn(args: ModelArgs) -> dict[str, Any]:
    factor, mscale, all_dim = args.rope_factor or 1.0, args.rope_mscale, args.rope_mscale_all_dim
    out = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": args.rope_original_max_position_embeddings,
        "beta_fast": args.rope_beta_fast,
        "beta_slow": args.rope_beta_slow,
        "mscale": mscale,
        "mscale_all_dim": all_dim,
    }
    if args.extras.get("yarn_correction_range_round_to_int") is False:
        out["truncate"] = False
    # transformers looks at mscale only if mscale_all_dim is not 0; Megatron always divides one by the other
    if mscale is not None and mscale != 1 and not all_dim:
        out["attention_factor"] = 0.1 * mscale * math.log(factor) + 1
    return out


def llama(args: ModelArgs) -> dict[str, Any]:
    """Sizes, query groups and rotary embedding: what most architectures have in common with Llama."""
    return {**decoder(args), **attention(args), **rope(args)}


def rms_llama(args: ModelArgs) -> dict[str, Any]:
    """The same with the epsilon of RMSNorm."""
    return {**llama(args), "rms_norm_eps": args.norm_epsilon}


def dense_layers(args: ModelArgs) -> list[int]:
    """Numbers of the layers without experts."""
    return [layer for layer, experts in enumerate(args.moe_layers or ()) if not experts]


def window_layer_types(args: ModelArgs) -> list[str]:
    """What each layer sees, as `layer_types` says it."""
    layers, freq = args.num_layers or 0, args.extras.get("window_attn_skip_freq")
    flags = all_but_every_nth(freq, layers) or (args.window_size is not None,) * layers
    return ["sliding_attention" if flag else "full_attention" for flag in flags]


def mixture(args: ModelArgs) -> dict[str, Any]:
    """The router keys that all mixture-of-experts architectures spell alike."""
    return {
        "num_experts_per_tok": args.moe_topk,
        "router_aux_loss_coef": args.moe_aux_loss or 0.0,
        "output_router_logits": False,
    }
