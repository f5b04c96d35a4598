"""Granite MoE with its multipliers at one: routed experts beside a shared expert that has no gate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from converters.models import config
from converters.models.granitemoe import STACKED, stacked_settings
from converters.models.llama import LlamaModel
from converters.models.mixtral import every_layer_mixed
from converters.models.model import SET
from converters.models.rules import Rename

if TYPE_CHECKING:
    from converters.megatron.model_args import ModelArgs


def _settings(args: ModelArgs) -> dict[str, Any]:
    return {**stacked_settings(args), "shared_intermediate_size": args.moe_shared_expert_size}


MODEL = LlamaModel(
    name="granitemoeshared",
    architecture="GraniteMoeSharedForCausalLM",
    needs={
        **config.LLAMA,
        **config.PLAIN_ROUTER,
        **config.NO_BIAS,
        "moe_pre_softmax": (False,),
        "moe_shared_expert_size": (SET,),
        "moe_shared_expert_gate": (False,),
    },
    settings=_settings,
    dense=(),
    moe=(
        *STACKED,
        # gate above up, as in Megatron
        Rename("shared_mlp.input_linear.weight", ("mlp.shared_experts.linear_fc1.weight",)),
        Rename("shared_mlp.output_linear.weight", ("mlp.shared_experts.linear_fc2.weight",)),
    ),
    misfits=every_layer_mixed,
)
