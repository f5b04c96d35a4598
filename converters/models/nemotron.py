"""Nemotron 3 and 4, Minitron: squared ReLU, and a LayerNorm whose weight is stored as gamma - 1, as Megatron's is."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from converters.models import config, starcoder2
from converters.models.gpt_neox import linear, partial_rope

if TYPE_CHECKING:
    from converters.megatron.model_args import ModelArgs


def _settings(args: ModelArgs) -> dict[str, Any]:
    return {
        **config.decoder(args),
        **config.attention(args),
        **partial_rope(args),
        "norm_eps": args.norm_epsilon,
        "attention_bias": bool(args.add_bias_linear),
        "mlp_bias": bool(args.add_bias_linear),
    }


MODEL = replace(
    starcoder2.MODEL,
    name="nemotron",
    architecture="NemotronForCausalLM",
    needs={
        **config.LAYER_NORM,
        "zero_centered_norm": (True,),
        **config.PARTIAL_ROPE,
        "activation": ("relu2",),
        "add_bias_linear": (True, False),
        "add_qkv_bias": (True, False),
    },
    settings=_settings,
    dense=(*linear("mlp.up_proj", "mlp.linear_fc1"), *linear("mlp.down_proj", "mlp.linear_fc2")),
    zero_centered=True,
)
