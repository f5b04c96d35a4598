"""GLM-4-9B: Llama with a rotary embedding of neighbouring elements over half of each head, and a bias on q, k and v."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from converters.models import config
from converters.models.gpt_neox import partial_rope
from converters.models.llama import LlamaModel
from converters.models.phi3 import FUSED_MLP

if TYPE_CHECKING:
    from converters.megatron.model_args import ModelArgs


def _settings(args: ModelArgs) -> dict[str, Any]:
    return {
        **config.llama(args),
        **partial_rope(args),
        "rms_norm_eps": args.norm_epsilon,
        "attention_bias": bool(args.add_qkv_bias),
    }


MODEL = LlamaModel(
    name="glm",
    architecture="GlmForCausalLM",
    needs={
        **config.LLAMA,
        **config.DENSE,
        **config.QKV_BIAS,
        "rotary_interleaved": (True,),
        **config.PARTIAL_ROPE,
    },
    settings=_settings,
    dense=FUSED_MLP,
    qkv_bias="attention_bias",
)
