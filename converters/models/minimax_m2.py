"""MiniMax-M2, M2.5 and M2.7: sigmoid routing with a bias, and one norm over all query heads, one over all key heads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from converters.models import config
from converters.models.glm4_moe import SIGMOID_ROUTER
from converters.models.gpt_neox import partial_rope
from converters.models.llama import LlamaModel
from converters.models.mixtral import MIXTRAL_EXPERTS
from converters.models.model import UNSET
from converters.models.qwen3 import QWEN3_ATTENTION
from converters.models.rules import Rename

if TYPE_CHECKING:
    from converters.megatron.model_args import ModelArgs


def _settings(args: ModelArgs) -> dict[str, Any]:
    return {
        **config.llama(args),
        **partial_rope(args),
        **config.mixture(args),
        "intermediate_size": args.moe_ffn_hidden_size,
        "num_local_experts": args.num_experts,
        "rms_norm_eps": args.norm_epsilon,
        "rotary_dim": round((args.head_dim or 0) * (args.rotary_percent or 0.0)),
        "router_jitter_noise": 0.0,
    }


def _misfits(args: ModelArgs) -> list[str]:
    # moe_utils.py, topk_routing_with_score_function: a single expert keeps its score
    return ["one expert for each token, whose weight it norms to one"] if args.moe_topk == 1 else []


MODEL = LlamaModel(
    name="minimax_m2",
    architecture="MiniMaxM2ForCausalLM",
    needs={
        **config.LLAMA,
        **SIGMOID_ROUTER,
        **config.NO_BIAS,
        "bridge_family": ("minimax_m2",),
        "qk_layernorm": (True,),
        **config.PARTIAL_ROPE,
        "moe_pre_softmax": (False,),
        "moe_group_topk": (UNSET,),
        "moe_scaling_factor": (UNSET, 1.0),
        **config.NO_SHARED_EXPERT,
    },
    settings=_settings,
    layer=QWEN3_ATTENTION,
    dense=(),
    moe=(*MIXTRAL_EXPERTS, Rename("block_sparse_moe.e_score_correction_bias", ("mlp.router.expert_bias",), fp32=True)),
    misfits=_misfits,
)
