"""Granite with its multipliers at one: Llama."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from converters.models import config
from converters.models.gpt2 import hidden_width
from converters.models.llama import LlamaModel

if TYPE_CHECKING:
    from converters.megatron.model_args import ModelArgs


def granite_settings(args: ModelArgs) -> dict[str, Any]:
    """The keys that all Granite architectures share; Megatron-LM multiplies by nothing but one."""
    return {
        **config.rms_llama(args),
        "attention_bias": False,
        "attention_multiplier": (args.head_dim or 1) ** -0.5,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "logits_scaling": 1.0,
    }


MODEL = LlamaModel(
    name="granite",
    architecture="GraniteForCausalLM",
    needs={**config.LLAMA, **config.DENSE, **config.NO_BIAS},
    settings=lambda args: {**granite_settings(args), "mlp_bias": False},
    misfits=hidden_width,
)
