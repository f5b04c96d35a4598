"""Qwen3: Llama with a norm on every query and key head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from converters.models import config, llama
from converters.models.llama import LlamaModel
from converters.models.qwen2 import qwen_settings
from converters.models.rules import Rename

if TYPE_CHECKING:
    from converters.megatron.model_args import ModelArgs

QWEN3_ATTENTION = (
    *llama.LLAMA_ATTENTION,
    Rename("self_attn.q_norm.weight", ("self_attention.q_layernorm.weight",), norm=True),
    Rename("self_attn.k_norm.weight", ("self_attention.k_layernorm.weight",), norm=True),
)


def _settings(args: ModelArgs) -> dict[str, Any]:
    return {**qwen_settings(args), "attention_bias": False}


MODEL = LlamaModel(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    needs={
        **config.LLAMA,
        **config.DENSE,
        **config.NO_BIAS,
        "qk_layernorm": (True,),
    },
    settings=_settings,
    layer=QWEN3_ATTENTION,
)
