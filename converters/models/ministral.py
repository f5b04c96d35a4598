"""Ministral: Mistral, some of whose layers see everything."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from converters.models import config, mistral
from converters.models.model import SET, UNSET

if TYPE_CHECKING:
    from collections.abc import Mapping

    from converters.megatron.model_args import ModelArgs


def _settings(args: ModelArgs) -> dict[str, Any]:
    return {**mistral.MODEL.settings(args), "layer_types": config.window_layer_types(args)}


def window_facts(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Which layers have a window, where not all have."""
    kinds = settings.get("layer_types") or []
    flags = [int(kind == "sliding_attention") for kind in kinds]
    mixed = settings.get("sliding_window") is not None and not all(flags)
    return {"window_attn_skip_freq": flags if mixed else None}


MODEL = replace(
    mistral.MODEL,
    name="ministral",
    architecture="MinistralForCausalLM",
    needs={**mistral.MODEL.needs, "window_attn_skip_freq": (SET, UNSET)},
    settings=_settings,
    facts=window_facts,
)
