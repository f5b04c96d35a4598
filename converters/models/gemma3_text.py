"""Gemma 3 without its vision tower: Gemma with norms around attention and MLP, query-key norms, and two rotary bases."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from converters.models import config
from converters.models.gemma import GEMMA_NEEDS, SANDWICH_ATTENTION, gemma_facts, gemma_settings
from converters.models.llama import LlamaModel
from converters.models.model import UNSET
from converters.models.qwen3 import QWEN3_ATTENTION

if TYPE_CHECKING:
    from collections.abc import Mapping

    from converters.megatron.model_args import ModelArgs

_KINDS = ("sliding_attention", "full_attention")


def _settings(args: ModelArgs) -> dict[str, Any]:
    settings = gemma_settings(args, "hidden_activation")
    for name in ("rope_theta", "rope_scaling"):
        del settings[name]
    wide: dict[str, Any] = {"rope_type": "default", "rope_theta": args.rotary_base}
    if args.rope_scaling == "linear":
        wide |= {"rope_type": "linear", "factor": args.rope_factor}
    scale = args.extras.get("softmax_scale")
    return {
        **settings,
        "use_bidirectional_attention": False,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": args.extras.get("rotary_base_local")},
            "full_attention": wide,
        },
        "query_pre_attn_scalar": _scalar(scale) if isinstance(scale, float) else None,
        "sliding_window": args.window_size,
        "layer_types": _layer_types(args.extras.get("interleaved_attn_pattern"), args.num_layers or 0),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    }


def _scalar(scale: float) -> float:
    """The number whose inverse root the scale is (gemma3_bridge.py, megatron_to_hf_config)."""
    exact = 1.0 / scale**2
    return round(exact) if math.isclose(exact, round(exact), rel_tol=1e-12) else exact


def _layer_types(pattern: Any, layers: int) -> list[str] | None:
    """A name for each layer, or how many with a window precede how many without (gemma3_provider.py)."""
    if not isinstance(pattern, list) or not pattern:
        return None
    if isinstance(pattern[0], str):
        return pattern[:layers]
    local, wide = pattern
    return [_KINDS[n % (local + wide) >= local] for n in range(layers)]


def _facts(settings: Mapping[str, Any]) -> dict[str, Any]:
    layers, kinds = settings.get("num_hidden_layers") or 0, settings.get("layer_types")
    parameters = settings.get("rope_parameters") or {}
    wide, near = (parameters.get(kind) or {} for kind in reversed(_KINDS))
    kind, scalar, base = wide.get("rope_type", "default"), settings.get("query_pre_attn_scalar"), near.get("rope_theta")
    usual = [5, 1]
    return {
        **gemma_facts(settings),
        "rotary_base": wide.get("rope_theta"),
        "rotary_base_local": float(base) if isinstance(base, int | float) else None,
        "rope_scaling": None if kind == "default" else kind,
        "rope_factor": wide.get("factor"),
        "softmax_scale": 1.0 / math.sqrt(scalar) if isinstance(scalar, int | float) and scalar > 0 else None,
        "window_size": settings.get("sliding_window"),
        "interleaved_attn_pattern": usual if kinds == _layer_types(usual, layers) else kinds,
    }


MODEL = LlamaModel(
    name="gemma3_text",
    architecture="Gemma3ForCausalLM",
    needs={
        **GEMMA_NEEDS,
        "bridge_family": ("gemma3",),
        "qk_layernorm": (True,),
        **config.required("window_size", "softmax_scale", "rotary_base_local", "interleaved_attn_pattern"),
        "rope_scaling": (UNSET, "linear"),
    },
    settings=_settings,
    layer=(*SANDWICH_ATTENTION, *QWEN3_ATTENTION[-2:]),
    zero_centered=True,
    facts=_facts,
)
