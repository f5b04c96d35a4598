"""Qwen1.5-MoE and Qwen2-MoE: routed experts beside one shared expert with a gate of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from converters.models import config
from converters.models.llama import LlamaModel
from converters.models.qwen2 import qwen_settings
from converters.models.rules import Experts, GateUp, Rename

if TYPE_CHECKING:
    from converters.megatron.model_args import ModelArgs

QWEN_EXPERTS = (
    Rename("mlp.gate.weight", ("mlp.router.weight",)),
    Experts(
        "mlp.experts.{}.",
        (GateUp("gate_proj", "up_proj", "linear_fc1"), Rename("down_proj.weight", ("linear_fc2.weight",))),
    ),
)
SHARED_EXPERT = (
    GateUp("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj", "mlp.shared_experts.linear_fc1"),
    Rename("mlp.shared_expert.down_proj.weight", ("mlp.shared_experts.linear_fc2.weight",)),
    Rename("mlp.shared_expert_gate.weight", ("mlp.shared_experts.gate_weight",)),
)


def qwen_moe_settings(args: ModelArgs) -> dict[str, Any]:
    """The keys that Qwen's mixtures of experts share."""
    return {
        **qwen_settings(args),
        **config.mixture(args),
        "num_experts": args.num_experts,
        "moe_intermediate_size": args.moe_ffn_hidden_size,
        "decoder_sparse_step": 1,
        "mlp_only_layers": config.dense_layers(args),
        # a softmax over the chosen experts is the normalised softmax over all
        "norm_topk_prob": not args.moe_pre_softmax,
    }


def _settings(args: ModelArgs) -> dict[str, Any]:
    return {
        **qwen_moe_settings(args),
        "shared_expert_intermediate_size": args.moe_shared_expert_size,
        "qkv_bias": bool(args.add_qkv_bias),
    }


MODEL = LlamaModel(
    name="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    needs={
        **config.LLAMA,
        **config.PLAIN_ROUTER,
        "moe_pre_softmax": (True, False),
        **config.GATED_SHARED_EXPERT,
        **config.QKV_BIAS,
    },
    settings=_settings,
    moe=(*QWEN_EXPERTS, *SHARED_EXPERT),
)
