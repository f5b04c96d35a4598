"""gpt-oss: sinks in every attention, every other one with a window; biases everywhere; gates clamped and in turn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from converters.models import config, llama
from converters.models.llama import LlamaModel
from converters.models.ministral import window_facts
from converters.models.model import SET, UNSET
from converters.models.rules import InterleavedExperts, Rename, StackedExperts

if TYPE_CHECKING:
    from collections.abc import Mapping

    from converters.megatron.model_args import ModelArgs


def _settings(args: ModelArgs) -> dict[str, Any]:
    return {
        **config.llama(args),
        **config.mixture(args),
        "hidden_act": "silu",  # which nothing reads: the gate is x * sigmoid(swiglu_alpha * x)
        "swiglu_alpha": 1.702,
        "swiglu_limit": args.extras.get("activation_func_clamp_value"),
        "intermediate_size": args.moe_ffn_hidden_size,
        "num_local_experts": args.num_experts,
        "rms_norm_eps": args.norm_epsilon,
        "attention_bias": True,
        "sliding_window": args.window_size,
        "layer_types": config.window_layer_types(args),
    }


def _facts(settings: Mapping[str, Any]) -> dict[str, Any]:
    limit = settings.get("swiglu_limit")
    return {
        **window_facts(settings),
        "activation": "quick_gelu" if settings.get("hidden_act") in ("silu", None) else settings["hidden_act"],
        "activation_func_clamp_value": float(limit) if isinstance(limit, int | float) else None,
        "glu_linear_offset": 1.0,
        "softmax_type": "learnable",
    }


MODEL = LlamaModel(
    name="gpt_oss",
    architecture="GptOssForCausalLM",
    needs={
        **config.LLAMA,
        **config.PLAIN_ROUTER,
        "activation": ("quick_gelu",),
        "activation_func_clamp_value": (SET,),
        "glu_linear_offset": (1.0,),
        "softmax_type": ("learnable",),
        "add_bias_linear": (True,),
        "add_qkv_bias": (True,),
        "window_size": (SET, UNSET),
        "window_attn_skip_freq": (SET, UNSET),
        "rope_scaling": (UNSET, "yarn"),
        "yarn_correction_range_round_to_int": (UNSET, False),
        "moe_pre_softmax": (False,),
        **config.NO_SHARED_EXPERT,
    },
    settings=_settings,
    layer=(*llama.LLAMA_ATTENTION, Rename("self_attn.sinks", ("self_attention.core_attention.softmax_offset",))),
    dense=(),
    moe=(
        Rename("mlp.router.weight", ("mlp.router.weight",)),
        Rename("mlp.router.bias", ("mlp.router.bias",)),
        InterleavedExperts("mlp.experts.gate_up_proj"),
        StackedExperts("mlp.experts.down_proj", "linear_fc2.weight", transpose=True),
        StackedExperts("mlp.experts.down_proj_bias", "linear_fc2.bias"),
    ),
    facts=_facts,
)
