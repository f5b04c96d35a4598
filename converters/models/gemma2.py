"""Gemma 2: Gemma with norms before and behind attention and MLP, capped logits, and a window in every other layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from converters.models.gemma import GEMMA_NEEDS, SANDWICH_ATTENTION, gemma_facts, gemma_settings
from converters.models.llama import LlamaModel
from converters.models.model import SET, UNSET

if TYPE_CHECKING:
    from collections.abc import Mapping

    from converters.megatron.model_args import ModelArgs

_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")


def _settings(args: ModelArgs) -> dict[str, Any]:
    return {
        **gemma_settings(args, "hidden_activation"),
        **{name: args.extras.get(name) for name in (*_CAPS, "query_pre_attn_scalar")},
        "sliding_window": args.window_size,
        # gemma2_provider.py, Gemma2DotProductAttention: whatever a configuration says
        "layer_types": [("sliding_attention", "full_attention")[n % 2] for n in range(args.num_layers or 0)],
    }


def _facts(settings: Mapping[str, Any]) -> dict[str, Any]:
    scales = {name: settings.get(name) or None for name in (*_CAPS, "query_pre_attn_scalar")}
    return {**gemma_facts(settings), **scales, "window_size": settings.get("sliding_window")}


MODEL = LlamaModel(
    name="gemma2",
    architecture="Gemma2ForCausalLM",
    needs={
        **GEMMA_NEEDS,
        "bridge_family": ("gemma2",),
        "window_size": (SET,),
        "query_pre_attn_scalar": (SET,),
        "attn_logit_softcapping": (SET, UNSET),
        "final_logit_softcapping": (SET, UNSET),
    },
    settings=_settings,
    layer=SANDWICH_ATTENTION,
    zero_centered=True,
    facts=_facts,
)
