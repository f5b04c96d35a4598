"""Llama 2, 3, 3.1 and its kin: RMSNorm, rotary embedding, grouped queries, SwiGLU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from converters.models import config
from converters.models.model import Model
from converters.models.rules import QKV, GateUp, Rename, Rule, Vocab

if TYPE_CHECKING:
    from converters.megatron.model_args import ModelArgs

EMBEDDING = (Vocab("model.embed_tokens.weight", "embedding.word_embeddings.weight"),)
FINAL = (
    Rename("model.norm.weight", ("decoder.final_layernorm.weight",), norm=True),
    Vocab("lm_head.weight", "output_layer.weight", untied=True),
)
# the fused layer spec keeps a norm with the projection behind it, the local one by itself
INPUT_NORM = Rename(
    "input_layernorm.weight", ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"), norm=True
)
# local-spec checkpoints of a mixture of experts store it as if `linear_fc1` were one projection (core 0.16.1)
MLP_NORM = Rename(
    "post_attention_layernorm.weight", ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"), norm=True
)
OUTPUT = Rename("self_attn.o_proj.weight", ("self_attention.linear_proj.weight",))
LLAMA_ATTENTION = (
    INPUT_NORM,
    QKV(),
    OUTPUT,
    Rename("self_attn.o_proj.bias", ("self_attention.linear_proj.bias",), when="add_bias_linear"),
    MLP_NORM,
)
LLAMA_MLP = (
    GateUp(),
    Rename("mlp.down_proj.weight", ("mlp.linear_fc2.weight",)),
    Rename("mlp.down_proj.bias", ("mlp.linear_fc2.bias",), when="add_bias_linear"),
)


@dataclass(frozen=True)
class LlamaModel(Model):
    """An architecture with Llama's tensors, but for the rules that its table gives."""

    before: tuple[Rule, ...] = EMBEDDING
    layer: tuple[Rule, ...] = LLAMA_ATTENTION
    dense: tuple[Rule, ...] = LLAMA_MLP
    after: tuple[Rule, ...] = FINAL


def llama_settings(args: ModelArgs) -> dict[str, Any]:
    """The keys of config.json that Llama has."""
    return {
        **config.rms_llama(args),
        "attention_bias": bool(args.add_bias_linear),
        "mlp_bias": bool(args.add_bias_linear),
    }


def _misfits(args: ModelArgs) -> list[str]:
    out = []
    if args.add_qkv_bias != args.add_bias_linear:
        out.append("q, k and v have a bias, but the output projection has none")
    return [*out, *uneven_heads(args)]


def uneven_heads(args: ModelArgs) -> list[str]:
    """What an attention whose heads divide the hidden size cannot express."""
    if args.hidden_size and args.num_attention_heads and args.hidden_size % args.num_attention_heads:
        return [f"hidden_size {args.hidden_size} is not a multiple of {args.num_attention_heads} heads"]
    return []


MODEL = LlamaModel(
    name="llama",
    architecture="LlamaForCausalLM",
    needs={**config.LLAMA, **config.DENSE, "add_bias_linear": (True, False), "add_qkv_bias": (True, False)},
    settings=llama_settings,
    misfits=_misfits,
)
