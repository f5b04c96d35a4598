"""Qwen3.5, the text model with experts in every layer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from converters.models import config, qwen3_5_text
from converters.models.qwen2_moe import QWEN_EXPERTS, SHARED_EXPERT
from converters.models.qwen3_next import DELTA_NET_NEEDS, delta_net_settings, shared_expert_settings

if TYPE_CHECKING:
    from converters.megatron.model_args import ModelArgs


def _settings(args: ModelArgs) -> dict[str, Any]:
    settings = {**delta_net_settings(args), **shared_expert_settings(args)}
    del settings["intermediate_size"]  # of layers without experts, which there are none of
    return settings


MODEL = replace(
    qwen3_5_text.MODEL,
    name="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    needs={**DELTA_NET_NEEDS, **config.PLAIN_ROUTER, "moe_pre_softmax": (False,), **config.GATED_SHARED_EXPERT},
    settings=_settings,
    dense=(),
    moe=(*QWEN_EXPERTS, *SHARED_EXPERT),
)
