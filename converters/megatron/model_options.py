"""How Megatron-LM's Namespace, Bridge's run_config.yaml and NeMo's model.yaml spell the options of a model.

The names of options that are plain numbers are in `model_fields`; here is a function for each group that needs a rule.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from converters.megatron.bridge_families import read_provider
from converters.megatron.heterogeneous import ENCODED, first_sizes, read_blocks
from converters.megatron.layer_pattern import LayerPattern, all_but_every_nth, moe_layers, read_pattern
from converters.megatron.model_fields import DEFAULTS, FIELD_TYPES, OPTIONS
from converters.megatron.option_values import Facts, as_bool, as_float, as_int, as_str
from converters.megatron.rope_options import read_rope

if TYPE_CHECKING:
    from collections.abc import Mapping


_READERS = {"int": as_int, "float": as_float, "bool": as_bool, "str": as_str}
# of these, what is not understood stays among the extras, so that neither a default nor absence stands for it
_NEVER_ASSUMED = {*DEFAULTS, "moe_num_groups", "moe_group_topk", "moe_scaling_factor"}
# options that change the forward pass unless they are absent, 0 or empty
_EXTRAS = (
    *("activation_func_clamp_value", "apply_residual_connection_post_layernorm", "attention_output_gate"),
    *("attn_logit_softcapping", "bridge_family", "enable_hyper_connections", "experimental_attention_variant"),
    *("final_logit_softcapping", "glu_linear_offset", "headscale", "heterogeneous_block_specs"),
    *(ENCODED, "hybrid_layer_pattern", "hybrid_override_pattern"),
    *("interleaved_attn_pattern", "is_hybrid_model", "linear_attention_freq", "moe_apply_probs_on_input"),
    *("moe_latent_size", "moe_mlp_glu_interleave_size", "moe_router_force_biased", "moe_router_force_load_balancing"),
    *("moe_router_topk_limited_devices", "moe_shared_expert_glu_interleave_size", "mtp_use_repeated_layer"),
    *("no_rope_freq", "qk_l2_norm", "query_pre_attn_scalar", "rotary_base_local", "scale_embeddings"),
    *("softmax_scale", "use_mup", "window_attn_skip_freq"),
)


def read_options(facts: Facts, label: str, options: Mapping[str, Any]) -> None:
    """Takes what one set of options says.

    Args:
        label: "args" or "config", the first part of every source.
        options: Option -> value; inert pickled values are recognised by their `name`.
    """
    options = read_provider(facts, label, options)
    for name, spellings in OPTIONS.items():
        for spelling in spellings:
            stated = options.get(spelling)
            value = _READERS[FIELD_TYPES[name]](stated)
            if value is not None:
                facts.put(name, value, f"{label}.{spelling}")
                break
            if stated is not None and name in _NEVER_ASSUMED:  # a rotary base for each layer, say
                facts.extras.setdefault(spelling, stated)
    for name in _EXTRAS:
        if options.get(name):
            facts.extras.setdefault(name, options[name])
    if options.get("softmax_type") not in (None, "vanilla"):
        facts.extras.setdefault("softmax_type", options["softmax_type"])
    _read_negated(facts, label, options)
    _read_normalization(facts, label, options)
    _read_activation(facts, label, options)
    read_rope(facts, label, options)
    _read_window(facts, label, options)
    _read_spec(facts, options)
    _read_blocks(facts, label, options)
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
    facts.put("prediction_pattern", pattern.prediction or None, f"{label}.{option}")
    if facts.values.get("num_experts") and "E" in pattern.layers:
        facts.put("moe_layers", tuple(symbol == "E" for symbol in pattern.layers), f"{label}.{option}")
    return True


def _read_blocks(facts: Facts, label: str, options: Mapping[str, Any]) -> None:
    """Takes the sizes of the first layer that has them, where each layer has its own."""
    text, heads, hidden = options.get(ENCODED), facts.values.get("num_attention_heads"), facts.values.get("hidden_size")
    if not text:
        if path := options.get("heterogeneous_layers_config_path"):
            name = repr(path)[:80] if isinstance(path, str) else "no text"  # a hostile graph has no end as text
            facts.unknown.append(f"{label}.heterogeneous_layers_config_path is {name}, and {ENCODED} is not stated")
        return
    try:
        if not isinstance(text, str):
            raise ValueError("is no text")
        blocks = read_blocks(text, heads or 0, hidden or 0)
    except ValueError as error:
        facts.unknown.append(f"{label}.{ENCODED} {error}")
        return
    for name, size in zip(("num_query_groups", "ffn_hidden_size"), first_sizes(blocks), strict=True):
        if size is not None:
            facts.override(name, size, f"{label}.{ENCODED}")


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
    left = as_int(window[0]) if isinstance(window, list | tuple) and window else None
    if left is None and window is not None:
        facts.extras.setdefault("window_size", window)
    elif left is not None and left >= 0:  # (left, right): a query sees `left` keys before itself, and itself
        facts.put("window_size", left + 1, f"{label}.window_size")


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
