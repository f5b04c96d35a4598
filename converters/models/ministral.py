"""Ministral: Mistral, some of whose layers see everything."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from converters.models import config
from converters.models.llama import LlamaModel
from converters.models.model import SET, UNSET

if TYPE_CHECKING:
    from collections.abc import Mapping

    from converters.megatron.model_args import ModelArgs


def _settings(args: ModelArgs) -> dict[str, Any]:
    return {
        **config.rms_llama(args),
        "sliding_window": args.window_size,
        "layer_types": config.window_layer_types(args),
    }


def window_facts(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Which layers have a window, where not all have."""
    kinds = settings.get("layer_types") or []
    flags = [int(kind == "sliding_attention") for kind in kinds]
    mixed = settings.get("sliding_window") is not None and not all(flags)
    return {"window_attn_skip_freq": flags if mixed else None}


MODEL = LlamaModel(
    name="ministral",
    architecture="MinistralForCausalLM",
    needs={
        **config.LLAMA,
        **config.DENSE,
        **config.NO_BIAS,
        "window_size": (SET, UNSET),
        "window_attn_skip_freq": (SET, UNSET),
    },
    settings=_settings,
    facts=window_facts,
)
