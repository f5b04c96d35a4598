"""GPT-NeoX, with its parallel residual off: rotary embedding over part of each head, LayerNorm, GELU, biases."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from converters.models import config
from converters.models.gpt2 import layer_norm, one_head_width
from converters.models.model import Model
from converters.models.rules import Rename, Vocab

if TYPE_CHECKING:
    from converters.megatron.model_args import ModelArgs
    from converters.models.rules import Rule


def linear(target: str, source: str) -> tuple[Rule, Rule]:
    """A projection with a bias wherever the model has biases."""
    weight = Rename(f"{target}.weight", (f"{source}.weight",))
    return weight, Rename(f"{target}.bias", (f"{source}.bias",), when="add_bias_linear")


def gelu_name(args: ModelArgs) -> str:
    """Megatron's fused GELU, its default, is the tanh form."""
    return "gelu_pytorch_tanh" if args.activation == "gelu_tanh" else "gelu"


def partial_rope(args: ModelArgs) -> dict[str, Any]:
    """Rotary embedding over the first part of every head."""
    settings = config.rope(args)
    settings["rope_parameters"]["partial_rotary_factor"] = args.rotary_percent
    return {**settings, "partial_rotary_factor": args.rotary_percent}


def _settings(args: ModelArgs) -> dict[str, Any]:
    return {
        **config.decoder(args),
        **partial_rope(args),
        "hidden_act": gelu_name(args),
        "rotary_pct": args.rotary_percent,
        "rotary_emb_base": args.rotary_base,
        "layer_norm_eps": args.norm_epsilon,
        "attention_bias": True,
        "hidden_dropout": args.hidden_dropout or 0.0,
        "use_parallel_residual": False,
    }


MODEL = Model(
    name="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    needs={
        **config.LAYER_NORM,
        **config.PARTIAL_ROPE,
        "activation": ("gelu", "gelu_tanh"),
        "add_bias_linear": (True,),
    },
    settings=_settings,
    before=(Vocab("gpt_neox.embed_in.weight", "embedding.word_embeddings.weight"),),
    layer=(
        *layer_norm("input_layernorm", "self_attention.linear_qkv.layer_norm_", "input_layernorm."),
        # without grouping, both keep q, k and v of a head together
        *linear("attention.query_key_value", "self_attention.linear_qkv"),
        *linear("attention.dense", "self_attention.linear_proj"),
        *layer_norm("post_attention_layernorm", "mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
    ),
    dense=(*linear("mlp.dense_h_to_4h", "mlp.linear_fc1"), *linear("mlp.dense_4h_to_h", "mlp.linear_fc2")),
    after=(
        *layer_norm("gpt_neox.final_layer_norm", "decoder.final_layernorm."),
        Vocab("embed_out.weight", "output_layer.weight", untied=True),
    ),
    layers="gpt_neox.layers.{}.",
    misfits=one_head_width,
)
