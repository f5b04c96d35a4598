"""Qwen3-MoE: Qwen3's attention over routed experts."""

from __future__ import annotations

from converters.models import config
from converters.models.llama import LlamaModel
from converters.models.qwen2_moe import QWEN_EXPERTS, qwen_moe_settings
from converters.models.qwen3 import QWEN3_ATTENTION

MODEL = LlamaModel(
    name="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    needs={
        **config.LLAMA,
        **config.PLAIN_ROUTER,
        **config.NO_BIAS,
        "qk_layernorm": (True,),
        "moe_pre_softmax": (True, False),
        **config.NO_SHARED_EXPERT,
    },
    settings=lambda args: {**qwen_moe_settings(args), "attention_bias": False},
    layer=QWEN3_ATTENTION,
    moe=QWEN_EXPERTS,
)
