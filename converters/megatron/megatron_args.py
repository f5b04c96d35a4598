"""Megatron-LM's training arguments for a model that NeMo or Megatron-Bridge describe: `ModelArgs` read backwards.

Megatron-LM needs them to resume (sizes of the saving job, samples seen), for `--use-checkpoint-args`, and Megatron-Bridge
to take a checkpoint of Megatron-LM. What nothing tells is left out.

Sources: megatron/training/arguments.py and checkpointing.py (load_args_from_checkpoint), tags core_v0.9.0 to core_v0.19.0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from converters.megatron.model_fields import OPTIONS
from converters.megatron.rope_options import YARN

if TYPE_CHECKING:
    from collections.abc import Mapping

    from converters.megatron.model_args import ModelArgs

# argument -> field of `ModelArgs`: the newest name, but for what has a rule or another one on the command line
_RULED = {"num_query_groups", "tied_embeddings", "rotary_base", "mla", "norm_epsilon", "zero_centered_norm"}
_SAME = {options[0]: name for name, options in OPTIONS.items() if name not in _RULED} | {
    "norm_epsilon": "norm_epsilon",
    "apply_layernorm_1p": "zero_centered_norm",
    "padded_vocab_size": "padded_vocab_size",
    "normalization": "normalization",
}
# (gated, activation) -> the arguments that choose it
_ACTIVATIONS: dict[tuple[bool, str], dict[str, Any]] = {
    (True, "silu"): {"swiglu": True},
    (True, "quick_gelu"): {"swiglu": False, "quick_geglu": True},
    (False, "relu2"): {"swiglu": False, "squared_relu": True},
    (False, "gelu"): {"swiglu": False, "bias_gelu_fusion": False},
    (False, "gelu_tanh"): {"swiglu": False, "bias_gelu_fusion": True},
}


def megatron_arguments(model: ModelArgs, options: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with which Megatron-LM builds a model, and those that describe the job that saved it.

    Args:
        options: The options that it was read from, for those that are spelt alike everywhere.
    """
    values = {argument: getattr(model, name) for argument, name in _SAME.items()}
    if model.num_attention_heads and model.num_query_groups and not model.mla:
        values["group_query_attention"] = model.num_query_groups != model.num_attention_heads
        values["num_query_groups"] = model.num_query_groups
    if model.tied_embeddings is not None:
        values["untie_embeddings_and_output_weights"] = not model.tied_embeddings
    if model.moe_layers is not None:
        values["moe_layer_freq"] = [int(layer) for layer in model.moe_layers]
    if model.window_size is not None:
        values["window_size"] = (model.window_size - 1, 0)
    if model.rotary_base is not None:
        values["rotary_base"] = int(model.rotary_base) if model.rotary_base.is_integer() else model.rotary_base
    if model.dtype in ("bfloat16", "float16"):
        values |= {"bf16": model.dtype == "bfloat16", "fp16": model.dtype == "float16"}
    if model.mla:
        values["multi_latent_attention"] = True
    for name in ("make_vocab_size_divisible_by", "seq_length", "transformer_impl"):
        if isinstance(options.get(name), int | str):
            values[name] = options[name]
    plain = {name: v for name, v in model.extras.items() if isinstance(v, bool | int | float | str | list | tuple)}
    values |= _activation_flags(model) or {}
    values |= _rope_arguments(model) | plain
    return {name: value for name, value in values.items() if value is not None}


def without_argument(model: ModelArgs) -> list[str]:
    """A sentence on each fact of a model that Megatron-LM has no argument for."""
    out = []
    if (family := model.extras.get("bridge_family")) is not None:
        out.append(f"Megatron-LM has no arguments for this model ({family}); Megatron-Bridge builds it")
    if _activation_flags(model) is None:
        kind = "gated " if model.gated else ""
        out.append(f"Megatron-LM has no argument for the {kind}{model.activation} of this model")
    return out


def ignored_scaling(model: ModelArgs) -> list[str]:
    """A sentence on a scaled rotary embedding of which Megatron-LM does not heed the argument."""
    factor = model.rope_factor
    if model.rope_scaling == "llama3" and factor != 8:  # no version's model builder passes the argument on
        return [f"Megatron-LM scales the rotary embedding of Llama 3 by 8, this model by {factor:g}"]
    if model.rope_scaling == "linear":
        return [f"Megatron-LM before 0.19 ignores that the rotary embedding of this model is scaled by {factor:g}"]
    return []


def _activation_flags(model: ModelArgs) -> dict[str, Any] | None:
    """The arguments that choose the activation; None if there are none for it."""
    if model.activation is None or model.gated is None:
        return {}
    return _ACTIVATIONS.get((model.gated, model.activation))


def _rope_arguments(model: ModelArgs) -> dict[str, Any]:
    kind = model.rope_scaling
    if kind == "llama3":
        return {"use_rope_scaling": True, "rope_scaling_factor": model.rope_factor}
    if kind == "linear":
        return {"rotary_seq_len_interpolation_factor": model.rope_factor}
    if kind == "yarn":
        values = {argument: getattr(model, name) for name, (argument, _) in YARN.items()}
        if model.mla:
            return {"rope_type": "yarn", **values}
        return {f"yarn_{name}": value for name, value in values.items()}
    return {"rope_type": "rope"} if model.mla else {}
