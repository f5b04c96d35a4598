"""Seed-OSS: Llama with a bias on q, k and v, and a head size of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from converters.models import config
from converters.models.llama import LlamaModel

if TYPE_CHECKING:
    from converters.megatron.model_args import ModelArgs


def _settings(args: ModelArgs) -> dict[str, Any]:
    return {
        **config.rms_llama(args),
        "attention_bias": bool(args.add_qkv_bias),
        "attention_out_bias": False,
        "mlp_bias": False,
        "residual_dropout": args.hidden_dropout or 0.0,
    }


MODEL = LlamaModel(
    name="seed_oss",
    architecture="SeedOssForCausalLM",
    needs={**config.LLAMA, **config.DENSE, **config.QKV_BIAS},
    settings=_settings,
    qkv_bias="attention_bias",
)
