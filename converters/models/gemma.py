"""Gemma: Llama with a gated tanh GELU, norms stored as gamma - 1, and embeddings scaled by the root of hidden_size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from converters.models import config, llama
from converters.models.llama import LlamaModel
from converters.models.model import UNSET
from converters.models.rules import Rename

if TYPE_CHECKING:
    from collections.abc import Mapping

    from converters.megatron.model_args import ModelArgs

# Megatron-Bridge norms behind attention and MLP within the projections that they follow (common/te_layers.py)
SANDWICH_ATTENTION = (
    *llama.LLAMA_ATTENTION[:-2],
    Rename("post_attention_layernorm.weight", ("self_attention.linear_proj.post_layernorm.weight",), norm=True),
    Rename("pre_feedforward_layernorm.weight", ("mlp.linear_fc1.layer_norm_weight",), norm=True),
    Rename("post_feedforward_layernorm.weight", ("mlp.linear_fc2.post_layernorm.weight",), norm=True),
)
GEMMA_NEEDS: dict[str, tuple[Any, ...]] = {
    **config.LLAMA,
    **config.DENSE,
    **config.NO_BIAS,
    "activation": ("gelu_tanh",),
    "zero_centered_norm": (True,),
    "tied_embeddings": (True,),
    "rope_scaling": (UNSET,),
}


def gemma_settings(args: ModelArgs, activation: str) -> dict[str, Any]:
    """The keys that all Gemmas share.

    Args:
        activation: What the generation calls the key of its activation.
    """
    settings = config.llama(args)
    del settings["hidden_act"]
    return {
        **settings,
        activation: "gelu_pytorch_tanh",
        "rms_norm_eps": args.norm_epsilon,
        "attention_bias": False,
        "use_bidirectional_attention": None,
    }


def gemma_facts(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The activation, which every generation names otherwise; transformers reads Gemma 1's "gelu" as its tanh form."""
    name = settings.get("hidden_activation") or settings.get("hidden_act")
    return {"activation": "gelu_tanh" if name == "gelu_pytorch_tanh" else name}


MODEL = LlamaModel(
    name="gemma",
    architecture="GemmaForCausalLM",
    needs={**GEMMA_NEEDS, "bridge_family": ("gemma",)},
    settings=lambda args: gemma_settings(args, "hidden_act"),
    zero_centered=True,
    facts=gemma_facts,
)
