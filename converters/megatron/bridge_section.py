"""The section `model:` of Megatron-Bridge's run_config.yaml for a model: `ModelArgs` read backwards.

Only what the model is goes into it: what a provider's class says by itself, and what is of a job, is left to the class.

Source: Megatron-Bridge 067f987d (2026-08), models/gpt_provider.py, models/conversion/model_bridge.py (`CONFIG_MAPPING`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from converters.megatron.bridge_families import FAMILIES, MODELS
from converters.megatron.heterogeneous import ENCODED
from converters.megatron.megatron_args import megatron_arguments

if TYPE_CHECKING:
    from converters.megatron.model_args import ModelArgs

# argument of Megatron-LM -> field of a provider, where they differ
_FIELDS = {
    "norm_epsilon": "layernorm_epsilon",
    "apply_layernorm_1p": "layernorm_zero_centered_gamma",
    "num_experts": "num_moe_experts",
    "max_position_embeddings": "seq_length",
    "use_rope_scaling": "rope_scaling",
    "rotary_seq_len_interpolation_factor": "seq_len_interpolation_factor",
    "mamba_rms_norm": "rmsnorm",
}
_NOT_FIELDS = {"swiglu", "squared_relu", "quick_geglu", "bias_gelu_fusion", "group_query_attention"}
_NOT_FIELDS |= {"untie_embeddings_and_output_weights", "padded_vocab_size", "bridge_family", "rotary_base_local"}
_FUNCTIONS = {
    "silu": "torch.nn.functional.silu",
    "gelu_tanh": "megatron.core.activations.fast_gelu",
    "relu2": "megatron.core.activations.squared_relu",
}


def beyond_provider(model: ModelArgs) -> list[str]:
    """What of a model this file has no provider of Megatron-Bridge for, as sentences; empty if it has one for all."""
    out = []
    single_layers = model.layer_pattern is not None and model.extras.get("bridge_family") != "falcon_h1"
    for kind, present in (
        ("latent attention", model.mla),
        ("a stack of single layers", single_layers),
        ("linear attention", model.linear_layers is not None),
    ):
        if present:
            out.append(f"a model with {kind} is not written for Megatron-Bridge, which imports it itself")
    if model.moe_layers is not None and any(model.moe_layers) and not all(model.moe_layers):
        # gpt_provider.py, default_layer_spec: one kind of layer, whatever moe_layer_freq says
        out.append("Megatron-Bridge's GPTModelProvider builds experts in all layers or in none")
    if ENCODED in model.extras:
        out.append("layers of different sizes are not written for Megatron-Bridge, which imports them itself")
    if model.mtp_num_layers:
        out.append("prediction layers are not written for Megatron-Bridge (--mtp drop leaves them out)")
    if model.activation not in _FUNCTIONS:
        out.append(f"the activation {model.activation} is not written for Megatron-Bridge")
    return out


def provider_section(model: ModelArgs) -> dict[str, Any]:
    """The section for a model; `read_options` of it tells what of the model it cannot say.

    Args:
        model: Its facts; `dtype` is what it is trained in.
    """
    values = megatron_arguments(model, {})
    family = model.extras.get("bridge_family")
    provider, layers = FAMILIES.get(str(family), ("gpt_provider.GPTModelProvider", ""))
    section: dict[str, Any] = {"_target_": MODELS + provider}
    section |= {_FIELDS.get(name, name): _plain(value) for name, value in values.items() if name not in _NOT_FIELDS}
    if model.moe_layers is not None and all(model.moe_layers):
        section["moe_layer_freq"] = 1
    if model.num_experts:
        section |= {"moe_grouped_gemm": True, "moe_token_dispatcher_type": "alltoall"}
        if model.moe_expert_bias or family == "olmoe":
            section["moe_router_dtype"] = "fp32"
    if family == "olmoe":
        section["moe_router_load_balancing_type"] = "seq_aux_loss"
    section |= {
        "share_embeddings_and_output_weights": bool(model.tied_embeddings),
        "gated_linear_unit": bool(model.gated),
        "params_dtype": _class(f"torch.{model.dtype}"),
        "bf16": model.dtype == "bfloat16",
        "fp16": model.dtype == "float16",
    }
    if model.activation in _FUNCTIONS:
        section["activation_func"] = _class(_FUNCTIONS[model.activation])
    if layers:
        section["transformer_layer_spec"] = _class(MODELS + layers)
    if family == "gemma3":
        section |= {
            "rotary_base": [model.extras.get("rotary_base_local"), model.rotary_base],
            "window_size": model.window_size,
            "rope_scaling_factor": model.rope_factor or 1.0,
        }
        section.pop("seq_len_interpolation_factor", None)
    return section


def _class(path: str) -> dict[str, Any]:
    return {"_target_": path, "_call_": False}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
