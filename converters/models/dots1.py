"""dots.llm1: DeepSeek-V3's experts behind Qwen3's attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from converters.models import config
from converters.models.deepseek_v2 import DEEPSEEK_EXPERTS
from converters.models.deepseek_v3 import ROUTER_BIAS, routed_misfits
from converters.models.glm4_moe import SIGMOID_ROUTER, routed_settings
from converters.models.llama import LlamaModel
from converters.models.ministral import window_facts
from converters.models.model import SET, UNSET
from converters.models.qwen3 import QWEN3_ATTENTION

if TYPE_CHECKING:
    from converters.megatron.model_args import ModelArgs


def _settings(args: ModelArgs) -> dict[str, Any]:
    return {
        **config.llama(args),
        **routed_settings(args),
        "rms_norm_eps": args.norm_epsilon,
        "attention_bias": False,
        "first_k_dense_replace": len(config.dense_layers(args)),
        "sliding_window": args.window_size,
        "layer_types": config.window_layer_types(args),
    }


MODEL = LlamaModel(
    name="dots1",
    architecture="Dots1ForCausalLM",
    needs={
        **config.LLAMA,
        **config.NO_BIAS,
        **SIGMOID_ROUTER,
        "qk_layernorm": (True,),
        "window_size": (SET, UNSET),
        "window_attn_skip_freq": (SET, UNSET),
    },
    settings=_settings,
    layer=QWEN3_ATTENTION,
    moe=(*DEEPSEEK_EXPERTS, ROUTER_BIAS),
    misfits=routed_misfits,
    facts=window_facts,
)
