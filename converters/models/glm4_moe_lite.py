"""GLM-4.7-Flash: DeepSeek-V3, which says of every layer whether it has experts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from converters.models import config, deepseek_v3
from converters.models.deepseek_v2 import deepseek_settings
from converters.models.deepseek_v3 import routed_misfits
from converters.models.glm4_moe import routed_settings

if TYPE_CHECKING:
    from converters.megatron.model_args import ModelArgs


def _settings(args: ModelArgs) -> dict[str, Any]:
    dense = set(config.dense_layers(args))
    common = {key: value for key, value in deepseek_settings(args).items() if key not in _ABSENT}
    return {
        **common,
        **routed_settings(args),
        "rope_interleave": True,
        "mlp_layer_types": ["dense" if n in dense else "sparse" for n in range(args.num_layers or 0)],
        "num_nextn_predict_layers": args.mtp_num_layers or 0,
    }


_ABSENT = ("first_k_dense_replace", "moe_layer_freq", "scoring_func")  # what the list says, and what never differs

MODEL = replace(
    deepseek_v3.MODEL,
    name="glm4_moe_lite",
    architecture="Glm4MoeLiteForCausalLM",
    settings=_settings,
    misfits=lambda args: [text for text in routed_misfits(args) if "a layer before it" not in text],
    aliases=(),
)
