"""MiMo-7B: Qwen2 with prediction layers, which have names of their own and join what they take in another order."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from converters.models import qwen2
from converters.models.qwen2 import qwen_settings
from converters.models.rules import Rename, SwappedHalves

if TYPE_CHECKING:
    from converters.megatron.model_args import ModelArgs

_LAYERS = "model.mtp_layers.{}."
# MiMo joins (hidden, embedding), Megatron (embedding, hidden): multi_token_prediction.py; mimo_bridge.py
_PREDICTION = (
    Rename("token_layernorm.weight", ("enorm.weight",), norm=True),
    Rename("hidden_layernorm.weight", ("hnorm.weight",), norm=True),
    SwappedHalves("input_proj.weight", "eh_proj.weight"),
    Rename("final_layernorm.weight", ("final_layernorm.weight",), norm=True),
)


def _settings(args: ModelArgs) -> dict[str, Any]:
    return {**qwen_settings(args), "num_nextn_predict_layers": args.mtp_num_layers or 0}


def _remarks(args: ModelArgs) -> list[str]:
    if not args.mtp_num_layers:
        return []
    return ["MiMo's prediction layers take hidden states from before the final norm, Megatron's from behind it"]


MODEL = replace(
    qwen2.MODEL,
    name="mimo",
    architecture="MiMoForCausalLM",
    settings=_settings,
    mtp=_PREDICTION,
    predictions=(_LAYERS, _LAYERS),
    remarks=_remarks,
)
