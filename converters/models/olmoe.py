"""OLMoE: routed experts in every layer, and one norm over all query heads, one over all key heads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from converters.models import config
from converters.models.gpt2 import hidden_width
from converters.models.llama import LlamaModel
from converters.models.qwen2_moe import QWEN_EXPERTS
from converters.models.qwen3 import QWEN3_ATTENTION

if TYPE_CHECKING:
    from converters.megatron.model_args import ModelArgs


def _settings(args: ModelArgs) -> dict[str, Any]:
    settings = config.llama(args)
    del settings["head_dim"]
    return {
        **settings,
        **config.mixture(args),
        "intermediate_size": args.moe_ffn_hidden_size,
        "num_experts": args.num_experts,
        "norm_topk_prob": not args.moe_pre_softmax,
        "rms_norm_eps": args.norm_epsilon,
        "attention_bias": False,
        "clip_qkv": None,
    }


def _misfits(args: ModelArgs) -> list[str]:
    shared = args.num_query_groups != args.num_attention_heads
    # olmoe_provider.py, OLMoESelfAttention: its norm of keys is as wide as that of queries
    return [*hidden_width(args), *(["keys are shared by several queries"] if shared else [])]


MODEL = LlamaModel(
    name="olmoe",
    architecture="OlmoeForCausalLM",
    needs={
        **config.LLAMA,
        **config.PLAIN_ROUTER,
        **config.NO_BIAS,
        "bridge_family": ("olmoe",),
        "qk_layernorm": (True,),
        "tied_embeddings": (False,),
        "moe_pre_softmax": (True, False),
        **config.NO_SHARED_EXPERT,
    },
    settings=_settings,
    layer=QWEN3_ATTENTION,
    dense=(),
    moe=QWEN_EXPERTS,
    misfits=_misfits,
)
