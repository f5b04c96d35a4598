"""Granite MoE with its multipliers at one: routed experts, stacked in one tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from converters.models import config
from converters.models.granite import granite_settings
from converters.models.llama import LlamaModel
from converters.models.rules import Rename, StackedExperts

if TYPE_CHECKING:
    from converters.megatron.model_args import ModelArgs

STACKED = (
    Rename("block_sparse_moe.router.layer.weight", ("mlp.router.weight",)),
    StackedExperts("block_sparse_moe.input_linear.weight", "linear_fc1.weight"),
    StackedExperts("block_sparse_moe.output_linear.weight", "linear_fc2.weight"),
)


def stacked_settings(args: ModelArgs) -> dict[str, Any]:
    """The keys that Granite's mixtures of experts share."""
    return {
        **granite_settings(args),
        **config.mixture(args),
        "intermediate_size": args.moe_ffn_hidden_size,
        "num_local_experts": args.num_experts,
    }


MODEL = LlamaModel(
    name="granitemoe",
    architecture="GraniteMoeForCausalLM",
    needs={
        **config.LLAMA,
        **config.PLAIN_ROUTER,
        **config.NO_BIAS,
        "moe_pre_softmax": (False,),
        **config.NO_SHARED_EXPERT,
    },
    settings=stacked_settings,
    dense=(),
    moe=STACKED,
)
