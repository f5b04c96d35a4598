"""Falcon-H1: in each layer a Mamba mixer beside attention, an MLP behind both, and constants that scale what they do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from converters.megatron.bridge_families import FALCON_H1_SCALES, FALCON_H1_VECTORS
from converters.models import config, llama
from converters.models.bamba import FEED_FORWARD, FINAL
from converters.models.model import UNSET, Model
from converters.models.nemotron_h import MAMBA_NEEDS, mamba, mamba_misfits
from converters.models.rules import QKV, Rename

if TYPE_CHECKING:
    from collections.abc import Mapping

    from converters.megatron.model_args import ModelArgs


def _settings(args: ModelArgs) -> dict[str, Any]:
    return {
        **config.rms_llama(args),
        **{name: args.extras.get(name) for name in (*FALCON_H1_SCALES, *FALCON_H1_VECTORS)},
        "attention_bias": False,
        "mlp_bias": False,
        "projectors_bias": False,
        "mamba_proj_bias": False,
        "mamba_d_ssm": (args.mamba_num_heads or 0) * (args.mamba_head_dim or 0),
        **config.keys_of(args, "mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state"),
        "mamba_d_conv": 4,
        "mamba_conv_bias": True,
        "mamba_norm_before_gate": False,  # mamba_mixer.py asserts it
        "mamba_rms_norm": bool(args.extras.get("mamba_rms_norm")),
    }


def _facts(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **{name: settings.get(name) for name in FALCON_H1_SCALES},
        **{name: _numbers(settings.get(name)) for name in FALCON_H1_VECTORS},
        "mamba_rms_norm": bool(settings.get("mamba_rms_norm")),
        "layer_pattern": "P" * (settings.get("num_hidden_layers") or 0),
    }


def _numbers(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _misfits(args: ModelArgs) -> list[str]:
    out = mamba_misfits(args) if args.extras.get("mamba_rms_norm") else []
    for name, length in FALCON_H1_VECTORS.items():
        value = args.extras.get(name)
        if not isinstance(value, list) or len(value) != length:
            out.append(f"{name} is {value!r:.80}, not {length} numbers")
    hidden, dim = args.hidden_size or 0, args.mamba_head_dim or 1
    if 2 * hidden % dim:  # falconh1_model.py, FalconH1Config.__post_init__, whatever the number of heads
        out.append(f"Megatron-Bridge takes no Mamba heads of {dim}, which do not divide twice the hidden size {hidden}")
    return out


MODEL = Model(
    name="falcon_h1",
    architecture="FalconH1ForCausalLM",
    needs={
        **MAMBA_NEEDS,
        **config.SWIGLU,
        **config.ROPE,
        **config.DENSE,
        "bridge_family": ("falcon_h1",),
        "position_embedding_type": ("rope",),
        "rope_scaling": (UNSET,),
        "zero_centered_norm": (False,),
        "mamba_rms_norm": (True, False),
        **config.required(*FALCON_H1_SCALES, *FALCON_H1_VECTORS),
    },
    settings=_settings,
    before=llama.EMBEDDING,
    hybrid={
        "P": (
            Rename("input_layernorm.weight", ("norm.weight",)),
            *mamba("mamba.", "mamba_mixer.", normed="mamba_rms_norm"),
            QKV(),
            llama.OUTPUT,
            *FEED_FORWARD,
        )
    },
    after=FINAL,
    misfits=_misfits,
    facts=_facts,
)
