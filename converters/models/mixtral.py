"""Mixtral: Llama's attention, experts in every layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from converters.models import config
from converters.models.llama import LlamaModel
from converters.models.model import SET, UNSET
from converters.models.rules import Experts, GateUp, Rename

if TYPE_CHECKING:
    from converters.megatron.model_args import ModelArgs

MIXTRAL_EXPERTS = (
    Rename("block_sparse_moe.gate.weight", ("mlp.router.weight",)),
    Experts(
        "block_sparse_moe.experts.{}.", (GateUp("w1", "w3", "linear_fc1"), Rename("w2.weight", ("linear_fc2.weight",)))
    ),
)


def _settings(args: ModelArgs) -> dict[str, Any]:
    return {
        **config.llama(args),
        **config.mixture(args),
        "intermediate_size": args.moe_ffn_hidden_size,
        "num_local_experts": args.num_experts,
        "rms_norm_eps": args.norm_epsilon,
        "sliding_window": args.window_size,
    }


MODEL = LlamaModel(
    name="mixtral",
    architecture="MixtralForCausalLM",
    needs={
        **config.LLAMA,
        **config.PLAIN_ROUTER,
        **config.NO_BIAS,
        "window_size": (SET, UNSET),
        "moe_pre_softmax": (False,),
        **config.NO_SHARED_EXPERT,
    },
    settings=_settings,
    dense=(),
    moe=MIXTRAL_EXPERTS,
)
