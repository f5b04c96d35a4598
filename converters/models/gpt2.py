"""GPT-2: learned positions, LayerNorm, GELU, biases everywhere; transformers stores its matrices as (in, out)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from converters.models import config
from converters.models.model import Model
from converters.models.rules import FusedQKV, Rename, Vocab

if TYPE_CHECKING:
    from converters.megatron.model_args import ModelArgs


def layer_norm(target: str, *sources: str) -> tuple[Rename, Rename]:
    """A LayerNorm; `sources` end before `weight` and `bias`."""
    weight = Rename(f"{target}.weight", tuple(s + "weight" for s in sources), norm=True)
    return weight, Rename(f"{target}.bias", tuple(s + "bias" for s in sources))


def _conv1d(target: str, source: str) -> tuple[Rename, Rename]:
    weight = Rename(f"{target}.weight", (f"{source}.weight",), transpose=True)
    return weight, Rename(f"{target}.bias", (f"{source}.bias",))


def _settings(args: ModelArgs) -> dict[str, Any]:
    return {
        **config.keys_of(args, "n_embd", "n_inner", "n_layer", "n_head", "n_positions"),
        # Megatron's fused GELU, its default, is the tanh form
        "activation_function": "gelu_new" if args.activation == "gelu_tanh" else "gelu",
        "layer_norm_epsilon": args.norm_epsilon,
        "attn_pdrop": args.attention_dropout or 0.0,
        "embd_pdrop": args.hidden_dropout or 0.0,
        "resid_pdrop": args.hidden_dropout or 0.0,
    }


def one_head_width(args: ModelArgs) -> list[str]:
    """What an attention without query groups and without a head size of its own cannot express."""
    heads, out = args.num_attention_heads or 0, hidden_width(args)
    if args.num_query_groups != heads:
        out.insert(0, f"{heads} heads share {args.num_query_groups} query groups")
    return out


def hidden_width(args: ModelArgs) -> list[str]:
    """What an attention without a head size of its own cannot express."""
    heads, dim = args.num_attention_heads or 0, args.head_dim or 0
    return [] if heads * dim == args.hidden_size else [f"{heads} heads of {dim} are not hidden_size {args.hidden_size}"]


MODEL = Model(
    name="gpt2",
    architecture="GPT2LMHeadModel",
    needs={
        **config.DECODER,
        **config.GROUPED_ATTENTION,
        **config.DENSE,
        "normalization": ("LayerNorm",),
        "position_embedding_type": ("learned_absolute",),
        "gated": (False,),
        "activation": ("gelu", "gelu_tanh"),
        "add_bias_linear": (True,),
    },
    settings=_settings,
    before=(
        Vocab("transformer.wte.weight", "embedding.word_embeddings.weight"),
        Rename("transformer.wpe.weight", ("embedding.position_embeddings.weight",)),
    ),
    layer=(
        *layer_norm("ln_1", "self_attention.linear_qkv.layer_norm_", "input_layernorm."),
        FusedQKV("attn.c_attn", transpose=True),
        *_conv1d("attn.c_proj", "self_attention.linear_proj"),
        *layer_norm("ln_2", "mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
    ),
    dense=(*_conv1d("mlp.c_fc", "mlp.linear_fc1"), *_conv1d("mlp.c_proj", "mlp.linear_fc2")),
    after=(
        *layer_norm("transformer.ln_f", "decoder.final_layernorm."),
        Vocab("lm_head.weight", "output_layer.weight", untied=True),
    ),
    layers="transformer.h.{}.",
    misfits=one_head_width,
)
