"""Bamba: Mamba or attention in each layer, an MLP behind it; to Megatron these are two layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from converters.models import config, llama
from converters.models.gpt2 import hidden_width
from converters.models.gpt_neox import partial_rope
from converters.models.model import UNSET, Model
from converters.models.nemotron_h import MAMBA_NEEDS, mamba, mamba_misfits
from converters.models.rules import QKV, GateUp, Rename, Vocab

if TYPE_CHECKING:
    from collections.abc import Mapping

    from converters.megatron.model_args import ModelArgs


def _settings(args: ModelArgs) -> dict[str, Any]:
    pattern = args.layer_pattern or ""
    return {
        **config.llama(args),
        **partial_rope(args),
        "num_hidden_layers": len(pattern) // 2,
        "attn_layer_indices": [n for n, symbol in enumerate(pattern[::2]) if symbol == "*"],
        "rms_norm_eps": args.norm_epsilon,
        "attention_bias": False,
        "mlp_bias": False,
        **config.keys_of(args, "mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state"),
        "mamba_d_conv": 4,
        "mamba_expand": (args.mamba_num_heads or 0) * (args.mamba_head_dim or 0) // (args.hidden_size or 1),
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
    }


def _facts(settings: Mapping[str, Any]) -> dict[str, Any]:
    attention = settings.get("attn_layer_indices") or ()
    layers = settings.get("num_hidden_layers") or 0
    pattern = "".join("*-" if n in attention else "M-" for n in range(layers))
    return {"layer_pattern": pattern, "num_layers": len(pattern)}


def _misfits(args: ModelArgs) -> list[str]:
    pattern, out = args.layer_pattern or "", [*mamba_misfits(args), *hidden_width(args)]
    if len(pattern) % 2 or {*pattern[1::2]} != {"-"} or "-" in pattern[::2]:
        out.append(f"its layers {pattern[:60]} are not Mamba or attention with an MLP behind each")
    if args.mamba_num_groups != 1:
        out.append(f"its Mamba norms work in {args.mamba_num_groups} groups, in transformers on a whole row")
    if (args.mamba_num_heads or 0) * (args.mamba_head_dim or 0) % (args.hidden_size or 1):
        out.append("its Mamba layers are not a whole number of times as wide as the model")
    return out


FEED_FORWARD = (
    Rename("pre_ff_layernorm.weight", ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"), norm=True),
    GateUp("feed_forward.gate_proj", "feed_forward.up_proj"),
    Rename("feed_forward.down_proj.weight", ("mlp.linear_fc2.weight",)),
)
FINAL = (
    Rename("model.final_layernorm.weight", ("decoder.final_norm.weight", "decoder.final_layernorm.weight"), norm=True),
    Vocab("lm_head.weight", "output_layer.weight", untied=True),
)
_NORM = Rename("input_layernorm.weight", ("mixer.in_proj.layer_norm_weight",), norm=True)

MODEL = Model(
    name="bamba",
    architecture="BambaForCausalLM",
    needs={
        **MAMBA_NEEDS,
        **config.SWIGLU,
        **config.ROPE,
        "position_embedding_type": ("rope",),
        **config.PARTIAL_ROPE,
        "num_experts": (UNSET,),
    },
    settings=_settings,
    before=llama.EMBEDDING,
    hybrid={"M": (_NORM, *mamba("mamba.")), "*": (llama.INPUT_NORM, QKV(), llama.OUTPUT), "-": FEED_FORWARD},
    blocks=2,
    after=FINAL,
    misfits=_misfits,
    facts=_facts,
)
