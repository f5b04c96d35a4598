"""Qwen3: Llama with a norm on every query and key head."""

from __future__ import annotations

from converters.models import config, llama
from converters.models.llama import LlamaModel
from converters.models.qwen2 import qwen_settings
from converters.models.rules import Rename

QWEN3_ATTENTION = (
    *llama.LLAMA_ATTENTION,
    Rename("self_attn.q_norm.weight", ("self_attention.q_layernorm.weight",), norm=True),
    Rename("self_attn.k_norm.weight", ("self_attention.k_layernorm.weight",), norm=True),
)


MODEL = LlamaModel(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    needs={**config.LLAMA, **config.DENSE, **config.NO_BIAS, "qk_layernorm": (True,)},
    settings=lambda args: {**qwen_settings(args), "attention_bias": False},
    layer=QWEN3_ATTENTION,
)
