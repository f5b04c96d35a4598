"""Phi-3, Phi-3.5 and Phi-4: Llama with q, k and v in one projection, and gate and up in another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from converters.models import config, llama
from converters.models.gpt_neox import partial_rope
from converters.models.llama import LlamaModel
from converters.models.model import SET, UNSET
from converters.models.rules import FusedQKV, Rename

if TYPE_CHECKING:
    from converters.megatron.model_args import ModelArgs

# gate above up, as in Megatron
FUSED_MLP = (
    Rename("mlp.gate_up_proj.weight", ("mlp.linear_fc1.weight",)),
    Rename("mlp.down_proj.weight", ("mlp.linear_fc2.weight",)),
)


def _settings(args: ModelArgs) -> dict[str, Any]:
    return {
        **config.llama(args),
        **partial_rope(args),
        "rms_norm_eps": args.norm_epsilon,
        "sliding_window": args.window_size,
        "original_max_position_embeddings": args.max_position_embeddings,
        "resid_pdrop": args.hidden_dropout or 0.0,
        "embd_pdrop": args.hidden_dropout or 0.0,
    }


MODEL = LlamaModel(
    name="phi3",
    architecture="Phi3ForCausalLM",
    needs={
        **config.LLAMA,
        **config.DENSE,
        **config.NO_BIAS,
        "window_size": (SET, UNSET),
        **config.PARTIAL_ROPE,
    },
    settings=_settings,
    layer=(llama.INPUT_NORM, FusedQKV("self_attn.qkv_proj"), llama.OUTPUT, llama.MLP_NORM),
    dense=FUSED_MLP,
)
