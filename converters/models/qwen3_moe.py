"""Qwen3-MoE: Qwen3's attention over routed experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from converters.models import config
from converters.models.llama import LlamaModel
from converters.models.model import UNSET
from converters.models.qwen2_moe import QWEN_EXPERTS, qwen_moe_settings
from converters.models.qwen3 import QWEN3_ATTENTION

if TYPE_CHECKING:
    from converters.megatron.model_args import ModelArgs


def _settings(args: ModelArgs) -> dict[str, Any]:
    return {**qwen_moe_settings(args), "attention_bias": False}


MODEL = LlamaModel(
    name="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    needs={
        **config.LLAMA,
        **config.PLAIN_ROUTER,
        **config.NO_BIAS,
        "qk_layernorm": (True,),
        "moe_pre_softmax": (True, False),
        "moe_shared_expert_size": (UNSET,),
    },
    settings=_settings,
    layer=QWEN3_ATTENTION,
    moe=QWEN_EXPERTS,
)
