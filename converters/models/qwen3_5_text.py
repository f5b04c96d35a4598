"""Qwen3.5, the text model without experts: Qwen3-Next's layers, each part of whose input projection is a tensor."""

from __future__ import annotations

from converters.models import config
from converters.models.llama import LlamaModel
from converters.models.qwen3 import QWEN3_ATTENTION
from converters.models.qwen3_next import (
    DELTA_NET_NEEDS,
    PREDICTION,
    PREDICTIONS,
    delta_net,
    delta_net_facts,
    delta_net_settings,
    joined,
)

MODEL = LlamaModel(
    name="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    needs={**DELTA_NET_NEEDS, **config.DENSE},
    settings=delta_net_settings,
    layer=QWEN3_ATTENTION,
    linear=delta_net(
        joined("in_proj_qkv", "query", "key", "value"),
        joined("in_proj_z", "z"),
        joined("in_proj_b", "beta"),
        joined("in_proj_a", "alpha"),
    ),
    zero_centered=True,
    facts=delta_net_facts,
    mtp=PREDICTION,
    predictions=PREDICTIONS,
)
