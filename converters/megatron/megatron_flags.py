"""The command line with which Megatron-LM builds a model, and what its versions have no words for.

Sources: megatron/training/arguments.py, gpt_builders.py, megatron/core/transformer/transformer_config.py
(MLATransformerConfig), tags core_v0.16.1 and core_v0.19.0.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from converters.megatron.heterogeneous import ENCODED
from converters.megatron.layer_pattern import LayerPattern
from converters.megatron.megatron_args import megatron_arguments, without_argument
from converters.megatron.model_options import read_options
from converters.megatron.option_values import Facts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from converters.megatron.model_args import ModelArgs

VERSIONS = ("0.16", "0.19")

# arguments whose option is the opposite, or has another name
_UNLESS = {
    "add_bias_linear": "--disable-bias-linear",
    "bias_dropout_fusion": "--no-bias-dropout-fusion",
    "bias_gelu_fusion": "--no-bias-gelu-fusion",
    "group_query_attention": "",
    "swiglu": "",
    "yarn_correction_range_round_to_int": "--no-yarn-correction-range-round-to-int",
}
# in a Namespace, but not on the command line: they follow from others, or from the job
_UNSAID = {
    *("original_max_position_embeddings", "beta_fast", "beta_slow", "fp16", "params_dtype"),
    *("rope_scaling_factor", "tensor_model_parallel_size", "pipeline_model_parallel_size"),
    *("expert_model_parallel_size", "world_size"),
}
# of YaRN without latent attention: an attribute of the configuration -> the option that sets it (argument_utils.py,
# _apply_yarn_config_from_args, core_v0.19.0)
_YARN = {
    "yarn_rotary_scaling_factor": "rotary_scaling_factor",
    "yarn_mscale": "mscale",
    "yarn_mscale_all_dim": "mscale_all_dim",
}
HYBRID = frozenset({"is_hybrid_model", "hybrid_override_pattern", "hybrid_layer_pattern"})
"""What says that a model is a stack of single layers; `ModelArgs.layer_pattern` is what it says."""
_FIXED = {"rope_original_max_position_embeddings": 4096, "rope_beta_fast": 32.0, "rope_beta_slow": 1.0}


def inexpressible(model: ModelArgs, mcore: str) -> list[str]:
    """What Megatron-LM's command line of a version cannot say of a model, as sentences; empty if it can say all.

    Args:
        mcore: One of `VERSIONS`.
    """
    out = []
    kind, base, version = model.rope_scaling, model.rotary_base, f"Megatron-LM {mcore}"
    if kind == "llama3":
        numbers = (model.rope_factor, model.rope_low_freq_factor, model.rope_high_freq_factor)
        if (*numbers, model.rope_original_max_position_embeddings) != (8, 1, 4, 8192):
            text = f"factor {model.rope_factor:g}, low {model.rope_low_freq_factor:g}, high "
            text += f"{model.rope_high_freq_factor:g} of {model.rope_original_max_position_embeddings}"
            out.append(f"{version} scales Llama 3's rotary embedding by 8, 1, 4 of 8192 only, this model by {text}")
    elif kind == "linear":
        text = f"the rotary embedding is scaled by {model.rope_factor:g} (linear), which"
        lacking = "is imported for Megatron-Bridge only" if mcore == "0.19" else f"{version} ignores"
        out.append(f"{text} {lacking}")
    elif kind == "yarn" and model.mla:
        for name, fixed in _FIXED.items():
            if getattr(model, name) != fixed:
                out.append(
                    f"{version} has {name.removeprefix('rope_')} {fixed} only, this model {getattr(model, name)}"
                )
    elif kind == "yarn" and mcore != "0.19":
        out.append(f"{version} has no YaRN without latent attention; 0.19 has (--mcore 0.19)")
    if model.mla and model.q_lora_rank is None and model.qk_layernorm and mcore == "0.19":
        text = (
            "has a second norm before the queries of latent attention that have no q_lora_rank"  # mla_qk_norm_config.py
        )
        out.append(f"{version} {text}; 0.16 has not (--mcore 0.16)")
    if (unbuilt := no_predictions(model, mcore)) is not None:
        out.append(unbuilt)
    if base is not None and not base.is_integer():
        out.append(f"{version} takes a whole number as --rotary-base, not {base}")
    if model.activation == "gelu_tanh" and not model.add_bias_linear:
        out.append(f"{version} computes the tanh form of GELU only where the projections have biases")
    return out + without_argument(model)


def no_predictions(model: ModelArgs, mcore: str) -> str | None:
    """Why a version does not build the multi-token prediction layers of a model, as a sentence; None if it does."""
    if model.mtp_num_layers and model.layer_pattern and mcore == "0.16":
        return "Megatron-LM 0.16 has no prediction layers in a hybrid; 0.19 has (--mcore 0.19)"
    # mtp_block_spec of training/models/gpt.py, core_v0.19.0; gpt_builders.py, which no longer builds, could
    if model.mtp_num_layers and any(model.linear_layers or ()) and mcore == "0.19":
        return "Megatron-LM 0.19 has no prediction layers beside gated delta nets; 0.16 has (--mcore 0.16)"
    return None


def model_arguments(model: ModelArgs, mcore: str = "0.16") -> dict[str, Any]:
    """Megatron-LM's arguments for a model that is to be trained, in the order of `megatron_arguments`."""
    values = megatron_arguments(model, {})
    if model.moe_layers is not None and all(model.moe_layers):
        values["moe_layer_freq"] = 1  # a list makes Megatron keep each layer under keys of its own
    if model.num_experts:
        values["moe_grouped_gemm"] = True
        if model.add_bias_linear:
            values["bias_dropout_fusion"] = False  # or TEGroupedMLP refuses to be built (moe/experts.py)
        if model.moe_expert_bias or model.mla:  # as these models' own code computes their routing
            values["moe_router_dtype"] = "fp32"
    if model.mla and (model.hidden_size or 0) % (model.num_attention_heads or 1):
        values["kv_channels"] = model.v_head_dim  # read nowhere, but else worked out from these two
    if ENCODED in model.extras:  # its parser wants both, whatever follows from others
        values |= {"group_query_attention": True, "use_rotary_position_embeddings": True}
    return {"transformer_impl": "transformer_engine", **values, **_hybrid_arguments(model, mcore)}


def _hybrid_arguments(model: ModelArgs, mcore: str) -> dict[str, Any]:
    """Of a stack of single layers (mamba_builders.py, core_v0.16.1; hybrid_builders.py, core_v0.19.0)."""
    if model.layer_pattern is None:
        return {}
    if mcore == "0.19":
        module = "megatron.core.models.hybrid.hybrid_layer_specs"
        depths = model.mtp_num_layers or 0 if model.prediction_pattern else 0
        pattern = LayerPattern(model.layer_pattern, prediction=model.prediction_pattern or "", depths=depths)
        return {"hybrid_layer_pattern": pattern.written(), "spec": [module, "hybrid_stack_spec"]}
    module = "megatron.core.models.mamba.mamba_layer_specs"
    return {
        "hybrid_override_pattern": model.layer_pattern,
        "is_hybrid_model": True,
        "spec": [module, "mamba_stack_spec"],
    }


def lost_facts(model: ModelArgs, arguments: Mapping[str, Any], label: str = "args") -> list[str]:
    """Facts that reading the arguments back would not give again, as sentences.

    Args:
        label: "args", or "config" for the section of a provider of Megatron-Bridge.
    """
    facts = Facts()
    read_options(facts, label, arguments)
    read_back = facts.values
    out = []
    for name, value in vars(model).items():
        if value is None or name in ("extras", "notes", "source", "dtype", "padded_vocab_size") or value is False:
            continue
        if name in read_back and read_back[name] != value:
            out.append(f"{name} is {value}, its arguments say {read_back[name]}")
    for name in sorted({*model.extras, *facts.extras} - HYBRID):
        value_of_model, stated = model.extras.get(name), facts.extras.get(name)
        if value_of_model != stated:
            out.append(f"{name} is {value_of_model!r:.80}, its arguments say {stated!r:.80}")
    return out


def command_line(arguments: Mapping[str, Any]) -> list[str]:
    """The words that set these arguments, as a shell would hand them over."""
    words: list[str] = []
    for name, value in arguments.items():
        option = f"--{_YARN.get(name, name).replace('_', '-')}"
        if name in _UNSAID or value is None:
            continue
        if value is False:
            words += [_UNLESS[name]] if _UNLESS.get(name) else []
        elif value is True:
            words += [] if name in ("add_bias_linear", "bias_gelu_fusion") else [option]
        elif name == "spec":
            words += [option, *value]
        elif name == "num_query_groups" and not arguments.get("group_query_attention"):
            continue
        else:
            words += [option, _spelled(value)]
    return words


def _spelled(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({','.join(map(str, value))})"
    if isinstance(value, list):
        return _pattern(value)
    return str(value)


def _pattern(layers: Sequence[int]) -> str:
    """`([0]*3+[1]*58)` for a list of so many zeros and ones."""
    counted = [(value, len(list(same))) for value, same in itertools.groupby(layers)]
    return f"({'+'.join(f'[{value}]*{count}' for value, count in counted)})"
