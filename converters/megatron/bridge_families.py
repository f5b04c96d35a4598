"""The section `model:` of Megatron-Bridge's run_config.yaml: which of its models a checkpoint is.

    model:
      _target_: megatron.bridge.models.gemma.gemma2_provider.Gemma2ModelProvider     whose class builds it
      transformer_layer_spec: {_target_: megatron.bridge....gemma2_layer_spec}       of which layers
      num_layers: 26                                                                 the options; absent: the class's own

A provider or a layer of Bridge's own computes what none of Megatron-LM's options says: the fact `bridge_family` of a
`ModelArgs`. What names a class is only ever compared as text.

Source: Megatron-Bridge 067f987d (2026-08), models/gpt_provider.py, models/*/*_provider.py, utils/instantiate_utils.py.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from converters.megatron.layer_pattern import MOST_LAYERS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from converters.megatron.option_values import Facts

MODELS = "megatron.bridge.models."
# fact `bridge_family` -> provider, layers, both behind `MODELS`
FAMILIES: dict[str, tuple[str, str]] = {
    "gemma": ("gemma.gemma_provider.GemmaModelProvider", ""),
    "gemma2": ("gemma.gemma2_provider.Gemma2ModelProvider", "gemma.gemma2_provider.gemma2_layer_spec"),
    "gemma3": ("gemma.gemma3_provider.Gemma3ModelProvider", "gemma.gemma3_provider.gemma3_layer_spec"),
    "exaone4": ("gpt_provider.GPTModelProvider", "exaone.exaone4.exaone4_provider.exaone4_layer_spec"),
    "olmoe": ("gpt_provider.GPTModelProvider", "olmoe.olmoe_provider.olmoe_layer_spec"),
    "minimax_m2": ("gpt_provider.GPTModelProvider", "minimax_m2.minimax_m2_provider.minimax_m2_layer_spec"),
    "falcon_h1": ("falcon_h1.falconh1_provider.FalconH1ModelProvider", ""),
}
WIDE_NORMS = frozenset({"olmoe", "minimax_m2"})
"""Families whose norms of queries and keys have a weight for each element of all heads."""
DIVIDED_NORMS = frozenset({"minimax_m2"})
"""Those of them that divide these norms over tensor parallelism (minimax_m2_provider.py, `_FullDimRMSNorm`)."""
FALCON_H1_SCALES = (
    *("embedding_multiplier", "lm_head_multiplier", "key_multiplier", "attention_in_multiplier"),
    *("attention_out_multiplier", "ssm_in_multiplier", "ssm_out_multiplier"),
)
"""Options of Falcon-H1's provider that scale what one of its parts takes or gives; 1 unless stated."""
FALCON_H1_VECTORS = {"mlp_multipliers": 2, "ssm_multipliers": 5}
"""The same for the gate and the result of the MLP, and for z, x, B, C and dt of the mixer: how many numbers."""
# its other options that change what is computed, with the one value that is understood
_FALCON_H1_FIXED: dict[str, Any] = {
    "d_conv": 4,
    "conv_bias": True,
    "norm_before_gate": False,
    "D_has_hdim": False,
    "use_mamba": True,
    "use_attention": True,
    "use_mlp": True,
    "hybrid_attention_ratio": 0.0,
    "hybrid_mlp_ratio": 0.0,
}
_FALCON_H1_LAYERS = f"{MODELS}falcon_h1.falconh1_provider.get_default_falconh1_stack_spec"

# providers and layers that only set options, v0.2 to 067f987d; every other one is a family of its own
_OPTIONS_ONLY = re.compile(
    r"(?:gpt_provider|mla_provider|(?:deepseek|glm|gpt|gpt_oss|hybrid|kimi|llama|llama_nemotron|mamba|mistral|nemotron"
    r"|nemotronh|qwen|sarvam)\.(?!kimi_k3|llama4)\w+)\.\w+|olmoe\.olmoe_provider\.OlMoEModelProvider"
)


def read_provider(facts: Facts, label: str, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Takes what only a provider of Megatron-Bridge says.

    Returns:
        The options that are left to be read.
    """
    target = options.get("_target_")
    if not isinstance(target, str) or not target.startswith(MODELS):
        return options
    layers = options.get("transformer_layer_spec")
    path = layers.get("_target_") if isinstance(layers, dict) else None
    provider, spec = target.removeprefix(MODELS), str(path).removeprefix(MODELS)
    only_options = _OPTIONS_ONLY.fullmatch(provider) is not None
    for family, (family_provider, family_spec) in FAMILIES.items():
        same = only_options if _OPTIONS_ONLY.fullmatch(family_provider) else provider == family_provider
        if same and (spec == family_spec or not family_spec):
            facts.extras["bridge_family"] = family
            taken = {"transformer_layer_spec"} if family_spec else set()
            taken |= _read_gemma3(facts, label, options) if family == "gemma3" else set()
            if family == "falcon_h1":
                _read_falcon_h1(facts, label, options)
            return {name: value for name, value in options.items() if name not in taken}
    if not only_options:
        facts.extras["bridge_family"] = provider
    return options


def _read_gemma3(facts: Facts, label: str, options: Mapping[str, Any]) -> set[str]:
    """Two rotary bases, a window that counts the query's own position, scaling of the wider base alone."""
    taken = set()
    bases = options.get("rotary_base")
    if isinstance(bases, list | tuple) and len(bases) == 2 and all(isinstance(base, int | float) for base in bases):
        facts.extras["rotary_base_local"] = float(bases[0])
        facts.put("rotary_base", float(bases[1]), f"{label}.rotary_base")
        taken.add("rotary_base")
    window, factor = options.get("window_size"), options.get("rope_scaling_factor")
    if type(window) is int:
        facts.put("window_size", window, f"{label}.window_size")
        taken.add("window_size")
    if isinstance(factor, int | float) and factor != 1:
        facts.put("rope_scaling", "linear", f"{label}.rope_scaling_factor")
        facts.put("rope_factor", float(factor), f"{label}.rope_scaling_factor")
    pattern = options.get("interleaved_attn_pattern", [5, 1])
    if isinstance(pattern, list | tuple):
        facts.extras["interleaved_attn_pattern"] = list(pattern)
    return taken


def _read_falcon_h1(facts: Facts, label: str, options: Mapping[str, Any]) -> None:
    """Its multipliers, and layers that all are a Mamba mixer beside attention unless a pattern says otherwise."""
    for name in FALCON_H1_SCALES:
        facts.extras[name] = options.get(name, 1.0)
    for name, length in FALCON_H1_VECTORS.items():
        value = options.get(name, [1.0] * length)
        facts.extras[name] = list(value) if isinstance(value, tuple) else value
    facts.extras["mamba_rms_norm"] = options.get("rmsnorm", True)
    unlike = {name: options[name] for name, value in _FALCON_H1_FIXED.items() if options.get(name, value) != value}
    facts.extras.update(unlike)
    spec = options.get("falconh1_stack_spec")
    if spec is not None and not (isinstance(spec, dict) and spec.get("_target_") == _FALCON_H1_LAYERS):
        facts.extras["falconh1_stack_spec"] = str(spec)[:200]
    layers, ratio = options.get("num_layers"), options.get("falconh1_ratio", 1.0)
    if ratio != 1:
        facts.extras["falconh1_ratio"] = ratio
    elif isinstance(layers, int) and 0 < layers <= MOST_LAYERS and not options.get("hybrid_override_pattern"):
        facts.put("layer_pattern", "P" * layers, f"{label}.falconh1_ratio")
