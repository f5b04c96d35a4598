"""How Megatron-LM's Namespace, Bridge's run_config.yaml and NeMo's model.yaml spell the options of a model.

One table of names for the options that are plain numbers, and a function for each group that needs a rule.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from converters.megatron.bridge_families import read_provider
from converters.megatron.layer_pattern import LayerPattern, all_but_every_nth, moe_layers, read_pattern
from converters.megatron.option_values import Facts, as_bool, as_float, as_int, as_str
from converters.megatron.rope_options import read_rope

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def _samples(value: Any) -> int | None:
    return as_int(value) or None


# field -> how to read it, and its names, newest first. Sources: Megatron-LM core_v0.4 to 0.20 arguments.py,
# TransformerConfig (Bridge and NeMo 2 dump its fields), NeMo 1 megatron_gpt_config.yaml; last, transformers' config.json
NAMES: dict[str, tuple[Callable[[Any], Any], tuple[str, ...]]] = {
    "num_layers": (as_int, ("num_layers", "encoder_num_layers", "num_hidden_layers", "n_layer")),
    "hidden_size": (as_int, ("hidden_size", "n_embd")),
    "num_attention_heads": (as_int, ("num_attention_heads", "n_head")),
    "num_query_groups": (as_int, ("num_query_groups", "num_key_value_heads")),
    "head_dim": (as_int, ("kv_channels", "head_dim")),
    "ffn_hidden_size": (as_int, ("ffn_hidden_size", "intermediate_size", "n_inner")),
    "vocab_size": (as_int, ("vocab_size",)),
    "max_position_embeddings": (as_int, ("max_position_embeddings", "seq_length", "encoder_seq_length")),
    "norm_epsilon": (as_float, ("layernorm_epsilon", "norm_epsilon")),
    "zero_centered_norm": (as_bool, ("layernorm_zero_centered_gamma", "apply_layernorm_1p")),
    "tied_embeddings": (as_bool, ("share_embeddings_and_output_weights",)),
    "add_bias_linear": (as_bool, ("add_bias_linear", "bias")),
    "add_qkv_bias": (as_bool, ("add_qkv_bias", "qkv_bias")),
    "qk_layernorm": (as_bool, ("qk_layernorm",)),
    "position_embedding_type": (as_str, ("position_embedding_type",)),
    "rotary_base": (as_float, ("rotary_base",)),
    "rotary_percent": (as_float, ("rotary_percent", "rotary_percentage")),
    "rotary_interleaved": (as_bool, ("rotary_interleaved",)),
    "num_experts": (as_int, ("num_experts", "num_moe_experts", "num_local_experts", "n_routed_experts")),
    "moe_topk": (as_int, ("moe_router_topk", "num_experts_per_tok")),
    "moe_ffn_hidden_size": (as_int, ("moe_ffn_hidden_size", "ffn_hidden_size")),
    "moe_shared_expert_size": (as_int, ("moe_shared_expert_intermediate_size",)),
    "moe_shared_expert_gate": (as_bool, ("moe_shared_expert_gate",)),
    "moe_score_function": (as_str, ("moe_router_score_function",)),
    "moe_pre_softmax": (as_bool, ("moe_router_pre_softmax",)),
    "moe_num_groups": (as_int, ("moe_router_num_groups",)),
    "moe_group_topk": (as_int, ("moe_router_group_topk",)),
    "moe_scaling_factor": (as_float, ("moe_router_topk_scaling_factor",)),
    "moe_expert_bias": (as_bool, ("moe_router_enable_expert_bias",)),
    "moe_aux_loss": (as_float, ("moe_aux_loss_coeff",)),
    "mla": (as_bool, ("multi_latent_attention",)),
    "q_lora_rank": (as_int, ("q_lora_rank",)),
    "kv_lora_rank": (as_int, ("kv_lora_rank",)),
    "qk_head_dim": (as_int, ("qk_head_dim",)),
    "qk_pos_emb_head_dim": (as_int, ("qk_pos_emb_head_dim",)),
    "v_head_dim": (as_int, ("v_head_dim",)),
    "mla_down_fused": (as_bool, ("mla_down_proj_fusion",)),
    "mtp_num_layers": (as_int, ("mtp_num_layers",)),
    "mamba_num_heads": (as_int, ("mamba_num_heads",)),
    "mamba_head_dim": (as_int, ("mamba_head_dim",)),
    "mamba_num_groups": (as_int, ("mamba_num_groups",)),
    "mamba_state_dim": (as_int, ("mamba_state_dim",)),
    "linear_num_key_heads": (as_int, ("linear_num_key_heads",)),
    "linear_num_value_heads": (as_int, ("linear_num_value_heads",)),
    "linear_key_head_dim": (as_int, ("linear_key_head_dim",)),
    "linear_value_head_dim": (as_int, ("linear_value_head_dim",)),
    "linear_conv_kernel_dim": (as_int, ("linear_conv_kernel_dim",)),
    "init_method_std": (as_float, ("init_method_std",)),
    "attention_dropout": (as_float, ("attention_dropout",)),
    "hidden_dropout": (as_float, ("hidden_dropout",)),
    "tp": (as_int, ("tensor_model_parallel_size", "model_parallel_size")),
    "pp": (as_int, ("pipeline_model_parallel_size",)),
    "vpp": (as_int, ("virtual_pipeline_model_parallel_size",)),
    "ep": (as_int, ("expert_model_parallel_size",)),
    "etp": (as_int, ("expert_tensor_parallel_size", "expert_tensor_model_parallel_size")),
    "cp": (as_int, ("context_parallel_size",)),
    "dp": (as_int, ("data_parallel_size",)),
    "world_size": (as_int, ("world_size",)),
    "consumed_train_samples": (_samples, ("consumed_train_samples",)),
}
# what an option that a version did not have yet amounts to
DEFAULTS: dict[str, Any] = {
    "norm_epsilon": 1e-5,
    "zero_centered_norm": False,
    "add_qkv_bias": False,
    "qk_layernorm": False,
    "rotary_base": 10000.0,
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
    "moe_score_function": "softmax",
    "moe_pre_softmax": False,
    "moe_shared_expert_gate": False,
    "moe_expert_bias": False,
    "mla": False,
}
# what is not understood of them stays among the extras, so that neither a default nor absence stands for it
_NEVER_ASSUMED = {*DEFAULTS, "moe_num_groups", "moe_group_topk", "moe_scaling_factor"}
# options that change the forward pass, by the value that leaves it unchanged (besides None and absence)
_EXTRAS: dict[str, Any] = {
    "activation_func_clamp_value": 0,
    "apply_residual_connection_post_layernorm": False,
    "attention_output_gate": False,
    "attn_logit_softcapping": 0,
    "bridge_family": "",  # these three: `read_provider`, in arguments that were made of its facts
    "enable_hyper_connections": False,
    "experimental_attention_variant": "",
    "final_logit_softcapping": 0,
    "glu_linear_offset": 0.0,
    "headscale": False,
    "heterogeneous_block_specs": False,
    "heterogeneous_layers_config_encoded_json": "",
    "hybrid_layer_pattern": "",
    "interleaved_attn_pattern": [],
    "hybrid_override_pattern": "",
    "is_hybrid_model": False,
    "linear_attention_freq": 0,
    "moe_apply_probs_on_input": False,
    "moe_latent_size": 0,
    "moe_mlp_glu_interleave_size": 0,
    "moe_router_force_biased": 0,
    "moe_router_force_load_balancing": False,
    "moe_router_topk_limited_devices": 0,
    "moe_shared_expert_glu_interleave_size": 0,
    "mtp_use_repeated_layer": False,
    "no_rope_freq": 0,
    "qk_l2_norm": False,
    "query_pre_attn_scalar": 0,
    "rotary_base_local": 0,
    "scale_embeddings": False,
    "softmax_scale": 0,
    "softmax_type": "vanilla",
    "use_mup": False,
    "window_attn_skip_freq": 0,
}


def read_options(facts: Facts, label: str, options: Mapping[str, Any]) -> None:
    """Takes what one set of options says.

    Args:
        label: "args" or "config", the first part of every source.
        options: Option -> value; inert pickled values are recognised by their `name`.
    """
    options = read_provider(facts, label, options)
    for name, (convert, spellings) in NAMES.items():
        for spelling in spellings:
            stated = options.get(spelling)
            value = convert(stated)
            if value is not None:
                facts.put(name, value, f"{label}.{spelling}")
                break
            if stated is not None and name in _NEVER_ASSUMED:  # a rotary base for each layer, say
                facts.extras.setdefault(spelling, stated)
    for name, neutral in _EXTRAS.items():
        value = options.get(name)
        if value is not None and value is not False and value != neutral:
            facts.extras.setdefault(name, value)
    _read_negated(facts, label, options)
    _read_normalization(facts, label, options)
    _read_activation(facts, label, options)
    read_rope(facts, label, options)
    _read_window(facts, label, options)
    _read_spec(facts, options)
    hybrid = _read_pattern(facts, label, options)
    layers = facts.values.get("num_layers")
    if facts.values.get("num_experts") and layers:
        balancing = options.get("moe_router_load_balancing_type")
        kinds = balancing if isinstance(balancing, list | tuple) else (balancing,)
        if any(kind not in _BALANCED_BY_LOSS for kind in kinds):
            facts.extras.setdefault("moe_router_load_balancing_type", balancing)
        capacity = as_float(options.get("moe_expert_capacity_factor"))
        if capacity is not None:
            facts.notes.append(
                f"trained with an expert capacity factor of {capacity:g}: Megatron drops tokens beyond it"
            )
        if not hybrid:  # which stores the default of moe_layer_freq and ignores it
            facts.put("moe_layers", moe_layers(options.get("moe_layer_freq", 1), layers), f"{label}.moe_layer_freq")


_BALANCED_BY_LOSS = (None, "none", "aux_loss", "seq_aux_loss", "global_aux_loss")
"""Values of `moe_router_load_balancing_type` that leave the routing alone; "sinkhorn" and "quantile_balancing" choose and
weigh experts otherwise (moe/router.py, core_v0.16.1 and later)."""
_VARIANTS = ("gated_delta_net", "gdn", "gdn2", "dsa")
"""Values of `experimental_attention_variant`, core 0.16 to 0.20; the first is the second's older name."""


def _read_pattern(facts: Facts, label: str, options: Mapping[str, Any]) -> bool:
    """Takes which layers are what. Returns whether the model is a hybrid, whose layers a pattern describes."""
    variant = options.get("experimental_attention_variant")
    if isinstance(variant, str) and variant:
        if variant not in _VARIANTS:
            facts.unknown.append(f"{label}.experimental_attention_variant is {variant!r}")
        layers = facts.values.get("num_layers")
        if variant in _VARIANTS[:3] and layers:
            flags = all_but_every_nth(options.get("linear_attention_freq"), layers)
            facts.put("linear_layers", flags, f"{label}.linear_attention_freq")
    stated = read_pattern(options)
    if stated is None:
        return False
    text, option = stated
    try:
        pattern = LayerPattern.parse(text)
    except ValueError as error:
        facts.unknown.append(f"{label}.{option} {text!r} {error}")
        return True
    facts.put("layer_pattern", pattern.layers, f"{label}.{option}")
    if option in facts.extras:  # where a stage ends changes nothing that the model computes
        facts.extras[option] = pattern.written()
    facts.put("mtp_num_layers", pattern.depths or None, f"{label}.{option}")
    if facts.values.get("num_experts") and "E" in pattern.layers:
        facts.put("moe_layers", tuple(symbol == "E" for symbol in pattern.layers), f"{label}.{option}")
    return True


def _read_negated(facts: Facts, label: str, options: Mapping[str, Any]) -> None:
    untied = as_bool(options.get("untie_embeddings_and_output_weights"))
    if untied is not None:
        facts.put("tied_embeddings", not untied, f"{label}.untie_embeddings_and_output_weights")
    without = as_bool(options.get("disable_bias_linear"))
    if without is not None:
        facts.put("add_bias_linear", not without, f"{label}.disable_bias_linear")
    # the number of groups means nothing unless grouping is on: Megatron-LM's default is 1
    grouped = as_bool(options.get("group_query_attention"))
    heads = as_int(options.get("num_attention_heads"))
    stated = any(options.get(name) is not None for name in ("num_query_groups", "num_key_value_heads"))
    if heads and (grouped is False or (grouped is None and not stated)):
        facts.override("num_query_groups", heads, f"{label}.num_attention_heads")


def _read_normalization(facts: Facts, label: str, options: Mapping[str, Any]) -> None:
    text = as_str(options.get("normalization"))
    if text is None:
        return
    source = f"{label}.normalization"
    lowered = text.lower().replace("_", "")
    name = "RMSNorm" if lowered == "rmsnorm" else "LayerNorm" if lowered.startswith(("layernorm", "lowpre")) else text
    if lowered == "layernorm1p":  # NeMo 1: the stored weight is gamma - 1
        facts.override("zero_centered_norm", True, source)
    facts.put("normalization", name, source)


_NAMED_ACTIVATIONS = {
    "swish": "silu",
    "fast-swiglu": "silu",
    "swiglu": "silu",
    "geglu": "gelu",
    "fast-geglu": "gelu",
    "squared-relu": "relu2",
    "squared_relu": "relu2",
    "openai_gelu": "gelu_tanh",
    "fast_gelu": "gelu_tanh",
    "quick_gelu": "quick_gelu",
}


def _function_name(named: Any) -> str:
    """Name of a function that a configuration gives as text, as an inert pickled value, or with arguments bound to it."""
    if not isinstance(named, dict):
        return str(named if isinstance(named, str) else getattr(named, "name", "")).rsplit(".", 1)[-1]
    text = str(named.get("_target_", "")).rsplit(".", 1)[-1]
    plain = ("_target_", "_partial_", "_call_")
    bound = {name: value for name, value in named.items() if name not in plain and (name, value) != ("_args_", [])}
    if text == "gelu" and bound == {"approximate": "tanh"}:
        return "gelu_tanh"
    return f"{text} with {bound}" if bound else text


def _read_activation(facts: Facts, label: str, options: Mapping[str, Any]) -> None:
    """Megatron-LM has one flag per activation; Bridge and NeMo 2 name a function; NeMo 1 a string."""
    named = options.get("activation_func", options.get("activation"))
    if named is not None:
        text = _function_name(named)
        source = f"{label}.activation_func" if "activation_func" in options else f"{label}.activation"
        gated = as_bool(options.get("gated_linear_unit"))
        facts.put("gated", text.endswith("glu") if gated is None else gated, source)
        activation = _NAMED_ACTIVATIONS.get(text, text)
        if activation == "gelu" and not facts.values["gated"] and as_bool(options.get("bias_activation_fusion")):
            activation = "gelu_tanh"
        facts.put("activation", activation, source)
        return
    if "gated_linear_unit" in options:  # a provider class whose default function was not written out
        gated = bool(options["gated_linear_unit"])
        facts.put("gated", gated, f"{label}.gated_linear_unit")
        facts.put("activation", "silu" if gated else None, f"{label}._target_")
    for flag, gated, activation in (
        ("swiglu", True, "silu"),
        ("quick_geglu", True, "quick_gelu"),
        ("geglu", True, "gelu"),
        ("squared_relu", False, "relu2"),
        ("openai_gelu", False, "gelu_tanh"),
    ):
        if options.get(flag) is True:
            facts.put("gated", gated, f"{label}.{flag}")
            facts.put("activation", activation, f"{label}.{flag}")
            return
    if "swiglu" in options or "bias_gelu_fusion" in options:
        # core/fusions/fused_bias_gelu.py is the tanh approximation, as are TransformerEngine's kernels
        tanh = options.get("bias_gelu_fusion") is True or options.get("use_te_activation_func") is True
        facts.put("gated", False, f"{label}.swiglu")
        facts.put("activation", "gelu_tanh" if tanh else "gelu", f"{label}.bias_gelu_fusion")


def _read_window(facts: Facts, label: str, options: Mapping[str, Any]) -> None:
    window = options.get("window_size")
    if isinstance(window, str):
        window = [int(n) for n in re.findall(r"-?\d+", window)]
    if isinstance(window, list | tuple) and window and as_int(window[0]) is not None and window[0] >= 0:
        # (left, right): a query sees `left` keys before itself, and itself
        facts.put("window_size", int(window[0]) + 1, f"{label}.window_size")
    elif window is not None and not (isinstance(window, list | tuple) and window and as_int(window[0]) is not None):
        facts.extras.setdefault("window_size", window)


def _read_spec(facts: Facts, options: Mapping[str, Any]) -> None:
    """Modules of somebody's own compute what they like, whatever their tensors are called.

    Megatron-LM's `spec` is a module and what to take of it; Bridge and NeMo 2 write the function that makes one.
    """
    for name in ("spec", "transformer_layer_spec", "mamba_stack_spec", "hybrid_stack_spec"):
        spec = options.get(name)
        if isinstance(spec, dict):
            spec = spec.get("_target_")
        if isinstance(spec, list | tuple):  # of names; anything else is somebody's own and may be endless as text
            spec = ".".join(part if isinstance(part, str) else "?" for part in spec)
        if not isinstance(spec, str) or not spec or spec == "local" or spec.startswith("megatron.core."):
            continue
        if spec.rpartition(".")[2] not in _PLAIN_SPECS:
            facts.extras.setdefault(name, spec)


# functions of Bridge's providers and NeMo's model classes that choose among Megatron-Core's own layers
_PLAIN_SPECS = {
    *("default_layer_spec", "local_layer_spec", "transformer_engine_layer_spec", "transformer_engine_full_layer_spec"),
    *("quantization_layer_spec", "mtp_block_spec", "modelopt_transformer_layer_spec", "modelopt_mamba_stack_spec"),
    *("transformer_engine_mamba_stack_spec", "get_default_mamba_stack_spec", "default_stack_spec", "mamba_stack_spec"),
}
