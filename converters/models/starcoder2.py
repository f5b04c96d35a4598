"""StarCoder2: the home of LayerNorm with rotary embedding and query groups; its MLP is not gated."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from converters.models import config, llama
from converters.models.gpt2 import layer_norm
from converters.models.gpt_neox import gelu_name, linear
from converters.models.model import SET, UNSET, Model
from converters.models.rules import QKV, Vocab

if TYPE_CHECKING:
    from converters.megatron.model_args import ModelArgs


def _settings(args: ModelArgs) -> dict[str, Any]:
    return {
        **config.llama(args),
        "hidden_act": gelu_name(args),
        "norm_epsilon": args.norm_epsilon,
        "use_bias": bool(args.add_bias_linear),
        "sliding_window": args.window_size,
        "residual_dropout": args.hidden_dropout or 0.0,
        "embedding_dropout": args.hidden_dropout or 0.0,
    }


def _misfits(args: ModelArgs) -> list[str]:
    """What one switch for all biases cannot express."""
    if args.add_qkv_bias != args.add_bias_linear:
        return ["q, k and v have a bias, but the output projection has none"]
    return []


MODEL = Model(
    name="starcoder2",
    architecture="Starcoder2ForCausalLM",
    needs={
        **config.LAYER_NORM,
        "window_size": (SET, UNSET),
        "activation": ("gelu", "gelu_tanh"),
        "add_bias_linear": (True, False),
        "add_qkv_bias": (True, False),
    },
    settings=_settings,
    before=llama.EMBEDDING,
    layer=(
        *layer_norm("input_layernorm", "self_attention.linear_qkv.layer_norm_", "input_layernorm."),
        QKV(),
        *linear("self_attn.o_proj", "self_attention.linear_proj"),
        *layer_norm("post_attention_layernorm", "mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
    ),
    dense=(*linear("mlp.c_fc", "mlp.linear_fc1"), *linear("mlp.c_proj", "mlp.linear_fc2")),
    after=(
        *layer_norm("model.norm", "decoder.final_layernorm."),
        Vocab("lm_head.weight", "output_layer.weight", untied=True),
    ),
    misfits=_misfits,
)
