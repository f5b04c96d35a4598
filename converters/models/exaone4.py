"""EXAONE 4 without windows: Llama with query-key norms, whose other norms lie behind attention and MLP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from converters.models import config, llama
from converters.models.gemma import SANDWICH_ATTENTION
from converters.models.llama import LlamaModel
from converters.models.model import UNSET
from converters.models.qwen3 import QWEN3_ATTENTION
from converters.models.rules import QKV

if TYPE_CHECKING:
    from converters.megatron.model_args import ModelArgs


def _settings(args: ModelArgs) -> dict[str, Any]:
    return {
        **config.llama(args),
        "rms_norm_eps": args.norm_epsilon,
        # where some layers have a window, those without do not rotate, for which Megatron-Bridge has no layers
        "sliding_window": None,
        "layer_types": ["full_attention"] * (args.num_layers or 0),
    }


MODEL = LlamaModel(
    name="exaone4",
    architecture="Exaone4ForCausalLM",
    needs={
        **config.LLAMA,
        **config.DENSE,
        **config.NO_BIAS,
        "bridge_family": ("exaone4",),
        "qk_layernorm": (True,),
        "rope_scaling": (UNSET, "llama3"),
        "tied_embeddings": (True,),  # exaone4_bridge.py has no output layer of its own
    },
    settings=_settings,
    layer=(QKV(), llama.OUTPUT, SANDWICH_ATTENTION[-3], SANDWICH_ATTENTION[-1], *QWEN3_ATTENTION[-2:]),
)
