"""Arcee's AFM: Llama with squared ReLU in place of the gate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from converters.models import config
from converters.models.gpt_neox import linear
from converters.models.llama import LlamaModel

if TYPE_CHECKING:
    from converters.megatron.model_args import ModelArgs


def _settings(args: ModelArgs) -> dict[str, Any]:
    return {
        **config.rms_llama(args),
        "attention_bias": False,
        "mlp_bias": False,
    }


MODEL = LlamaModel(
    name="arcee",
    architecture="ArceeForCausalLM",
    needs={**config.LLAMA, **config.DENSE, **config.NO_BIAS, "gated": (False,), "activation": ("relu2",)},
    settings=_settings,
    dense=(*linear("mlp.up_proj", "mlp.linear_fc1"), *linear("mlp.down_proj", "mlp.linear_fc2")),
)
