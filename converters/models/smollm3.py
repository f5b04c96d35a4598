"""SmolLM3: Llama, some of whose layers do not rotate queries and keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from converters.megatron.layer_pattern import every_nth
from converters.models import config
from converters.models.gpt2 import hidden_width
from converters.models.llama import LlamaModel
from converters.models.model import SET, UNSET

if TYPE_CHECKING:
    from collections.abc import Mapping

    from converters.megatron.model_args import ModelArgs


def _settings(args: ModelArgs) -> dict[str, Any]:
    layers = args.num_layers or 0
    unrotated = every_nth(args.extras.get("no_rope_freq"), layers) or (False,) * layers
    return {
        **config.rms_llama(args),
        "attention_bias": False,
        "mlp_bias": False,
        "no_rope_layers": [int(not skipped) for skipped in unrotated],
        "layer_types": ["full_attention"] * layers,
        "use_sliding_window": False,
        "sliding_window": None,
    }


def _facts(settings: Mapping[str, Any]) -> dict[str, Any]:
    rotated = settings.get("no_rope_layers") or []  # one where it rotates, in spite of the name
    return {"no_rope_freq": [int(not rotates) for rotates in rotated] if not all(rotated) else None}


MODEL = LlamaModel(
    name="smollm3",
    architecture="SmolLM3ForCausalLM",
    needs={**config.LLAMA, **config.DENSE, **config.NO_BIAS, "no_rope_freq": (SET, UNSET)},
    settings=_settings,
    misfits=hidden_width,
    facts=_facts,
)
