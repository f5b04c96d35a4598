"""Ling 2.0: GLM-4.5's attention and experts under other names, with q, k and v in one projection."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from converters.models import config, llama
from converters.models.deepseek_v2 import DEEPSEEK_EXPERTS
from converters.models.deepseek_v3 import PREDICTION_INPUT, routed_misfits
from converters.models.glm4_moe import SIGMOID_ROUTER, routed_settings
from converters.models.gpt_neox import partial_rope
from converters.models.llama import LlamaModel
from converters.models.rules import FusedQKV, Rename, Vocab

if TYPE_CHECKING:
    from collections.abc import Mapping

    from converters.megatron.model_args import ModelArgs


def _settings(args: ModelArgs) -> dict[str, Any]:
    keys = {**config.llama(args), **partial_rope(args), **routed_settings(args)}
    keys |= {"num_experts": keys.pop("n_routed_experts"), "num_shared_experts": keys.pop("n_shared_experts")}
    return {
        **keys,
        "rms_norm_eps": args.norm_epsilon,
        "use_qkv_bias": bool(args.add_qkv_bias),
        "use_bias": False,
        "use_qk_norm": True,
        "use_rmsnorm": True,
        "use_sliding_window": False,
        "norm_head": False,
        "norm_softmax": False,
        "score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "first_k_dense_replace": len(config.dense_layers(args)),
        "num_nextn_predict_layers": args.mtp_num_layers or 0,
    }


def _facts(settings: Mapping[str, Any]) -> dict[str, Any]:
    width, shared = settings.get("moe_intermediate_size"), settings.get("num_shared_experts")
    stated = isinstance(width, int) and isinstance(shared, int)
    return {"moe_shared_expert_size": (width or 0) * (shared or 0) if stated else None}


MODEL = LlamaModel(
    name="bailing_moe_v2",
    architecture="BailingMoeV2ForCausalLM",
    needs={
        **config.LLAMA,
        **SIGMOID_ROUTER,
        "qk_layernorm": (True,),
        **config.PARTIAL_ROPE,
        **config.QKV_BIAS,
    },
    settings=_settings,
    before=(Vocab("model.word_embeddings.weight", "embedding.word_embeddings.weight"),),
    layer=(
        llama.INPUT_NORM,
        FusedQKV("attention.query_key_value"),
        Rename("attention.dense.weight", ("self_attention.linear_proj.weight",)),
        Rename("attention.query_layernorm.weight", ("self_attention.q_layernorm.weight",), norm=True),
        Rename("attention.key_layernorm.weight", ("self_attention.k_layernorm.weight",), norm=True),
        llama.MLP_NORM,
    ),
    moe=(*DEEPSEEK_EXPERTS, Rename("mlp.gate.expert_bias", ("mlp.router.expert_bias",), fp32=True)),
    mtp=(*PREDICTION_INPUT, Rename("final_layernorm.weight", ("final_layernorm.weight",), norm=True)),
    misfits=routed_misfits,
    facts=_facts,
    qkv_bias="use_qkv_bias",
)
