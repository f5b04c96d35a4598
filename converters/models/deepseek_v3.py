"""DeepSeek-V3 and R1, Kimi-K2, Moonlight: V2 with a sigmoid router, a router bias, and multi-token prediction."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from converters.models import deepseek_v2
from converters.models.deepseek_v2 import DEEPSEEK_EXPERTS, DEEPSEEK_NEEDS, deepseek_misfits, deepseek_settings
from converters.models.rules import Rename

if TYPE_CHECKING:
    from converters.megatron.model_args import ModelArgs

# both sides feed (embedding, hidden) to eh_proj in this order: multi_token_prediction.py, transformers MtpLayer
PREDICTION_INPUT = (
    Rename("enorm.weight", ("enorm.weight",), norm=True),
    Rename("hnorm.weight", ("hnorm.weight",), norm=True),
    Rename("eh_proj.weight", ("eh_proj.weight",)),
)
PREDICTION = (
    *PREDICTION_INPUT,
    Rename("shared_head.norm.weight", ("final_layernorm.weight",), norm=True),
)
ROUTER_BIAS = Rename("mlp.gate.e_score_correction_bias", ("mlp.router.expert_bias",), fp32=True)


def _settings(args: ModelArgs) -> dict[str, Any]:
    return {
        **deepseek_settings(args),
        "topk_method": "noaux_tc",
        "n_group": args.moe_num_groups if args.moe_group_topk else 1,
        "topk_group": args.moe_group_topk or 1,
        # moe_utils.py, topk_routing_with_score_function: a single expert keeps its score
        "norm_topk_prob": (args.moe_topk or 0) > 1,
        "rope_interleave": True,
        "num_nextn_predict_layers": args.mtp_num_layers or 0,
    }


def routed_misfits(args: ModelArgs) -> list[str]:
    """What V3's routing and its order of layers cannot express."""
    return deepseek_misfits(args, best_of_group=2)


MODEL = replace(
    deepseek_v2.MODEL,
    name="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    needs={**DEEPSEEK_NEEDS, "moe_score_function": ("sigmoid",), "moe_expert_bias": (True,)},
    settings=_settings,
    moe=(*DEEPSEEK_EXPERTS, ROUTER_BIAS),
    mtp=PREDICTION,
    misfits=routed_misfits,
    aliases=("kimi_k2",),
)
