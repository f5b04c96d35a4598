"""Granite MoE with its multipliers at one: routed experts beside a shared expert that has no gate."""

from __future__ import annotations

from dataclasses import replace

from converters.models import config, granitemoe
from converters.models.granitemoe import STACKED, stacked_settings
from converters.models.rules import Rename

MODEL = replace(
    granitemoe.MODEL,
    name="granitemoeshared",
    architecture="GraniteMoeSharedForCausalLM",
    needs={**granitemoe.MODEL.needs, **config.SHARED_EXPERT},
    settings=lambda args: {**stacked_settings(args), "shared_intermediate_size": args.moe_shared_expert_size},
    moe=(
        *STACKED,
        # gate above up, as in Megatron
        Rename("shared_mlp.input_linear.weight", ("mlp.shared_experts.linear_fc1.weight",)),
        Rename("shared_mlp.output_linear.weight", ("mlp.shared_experts.linear_fc2.weight",)),
    ),
)
