"""Arcee's AFM: Llama with squared ReLU in place of the gate."""

from __future__ import annotations

from converters.models import config
from converters.models.gpt_neox import linear
from converters.models.llama import LlamaModel, llama_settings

MODEL = LlamaModel(
    name="arcee",
    architecture="ArceeForCausalLM",
    needs={**config.LLAMA, **config.DENSE, **config.NO_BIAS, "gated": (False,), "activation": ("relu2",)},
    settings=llama_settings,
    dense=(*linear("mlp.up_proj", "mlp.linear_fc1"), *linear("mlp.down_proj", "mlp.linear_fc2")),
)
