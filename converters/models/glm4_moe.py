"""GLM-4.5, 4.6 and 4.7: DeepSeek-V3's experts behind grouped attention, whose rotary embedding covers half of each head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from converters.models import config, llama
from converters.models.deepseek_v2 import DEEPSEEK_EXPERTS
from converters.models.deepseek_v3 import PREDICTION, ROUTER_BIAS, routed_misfits
from converters.models.gpt_neox import partial_rope
from converters.models.llama import LlamaModel
from converters.models.rules import Rename

if TYPE_CHECKING:
    from collections.abc import Mapping

    from converters.megatron.model_args import ModelArgs

SIGMOID_ROUTER: dict[str, tuple[Any, ...]] = {
    **config.EXPERTS,
    **config.SHARED_EXPERT,
    "moe_score_function": ("sigmoid",),
    "moe_expert_bias": (True,),
}


def routed_settings(args: ModelArgs) -> dict[str, Any]:
    """The keys of DeepSeek-V3's routing."""
    return {
        **config.mixture(args),
        "n_routed_experts": args.num_experts,
        "n_shared_experts": (args.moe_shared_expert_size or 0) // (args.moe_ffn_hidden_size or 1),
        "moe_intermediate_size": args.moe_ffn_hidden_size,
        "routed_scaling_factor": args.moe_scaling_factor or 1.0,
        "n_group": args.moe_num_groups if args.moe_group_topk else 1,
        "topk_group": args.moe_group_topk or 1,
        # moe_utils.py, topk_routing_with_score_function: a single expert keeps its score
        "norm_topk_prob": (args.moe_topk or 0) > 1,
    }


def _settings(args: ModelArgs) -> dict[str, Any]:
    return {
        **config.llama(args),
        **partial_rope(args),
        **routed_settings(args),
        "rms_norm_eps": args.norm_epsilon,
        "attention_bias": bool(args.add_qkv_bias),
        "use_qk_norm": bool(args.qk_layernorm),
        "first_k_dense_replace": len(config.dense_layers(args)),
        "num_nextn_predict_layers": args.mtp_num_layers or 0,
    }


def _facts(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {"qk_layernorm": bool(settings.get("use_qk_norm"))}


MODEL = LlamaModel(
    name="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    needs={
        **config.LLAMA,
        **SIGMOID_ROUTER,
        "qk_layernorm": (True, False),
        **config.PARTIAL_ROPE,
        **config.QKV_BIAS,
    },
    settings=_settings,
    layer=(
        *llama.LLAMA_ATTENTION,
        Rename("self_attn.q_norm.weight", ("self_attention.q_layernorm.weight",), norm=True, when="qk_layernorm"),
        Rename("self_attn.k_norm.weight", ("self_attention.k_layernorm.weight",), norm=True, when="qk_layernorm"),
    ),
    moe=(*DEEPSEEK_EXPERTS, ROUTER_BIAS),
    mtp=PREDICTION,
    misfits=routed_misfits,
    facts=_facts,
    qkv_bias="attention_bias",
)
