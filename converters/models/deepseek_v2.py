"""DeepSeek-V2: multi-head latent attention; a softmax router; shared experts; the first layers dense."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from converters.models import config, llama
from converters.models.llama import LlamaModel
from converters.models.model import UNSET
from converters.models.qwen2_moe import QWEN_EXPERTS
from converters.models.rules import GateUp, Rename

if TYPE_CHECKING:
    from converters.megatron.model_args import ModelArgs

MLA_ATTENTION = (
    llama.INPUT_NORM,
    Rename("self_attn.q_a_proj.weight", ("self_attention.linear_q_down_proj.weight",), when="q_lora_rank"),
    Rename(
        "self_attn.q_a_layernorm.weight",
        ("self_attention.linear_q_up_proj.layer_norm_weight", "self_attention.q_layernorm.weight"),
        norm=True,
        when="q_lora_rank",
    ),
    Rename("self_attn.q_b_proj.weight", ("self_attention.linear_q_up_proj.weight",), when="q_lora_rank"),
    Rename("self_attn.q_proj.weight", ("self_attention.linear_q_proj.weight",), unless="q_lora_rank"),
    Rename("self_attn.kv_a_proj_with_mqa.weight", ("self_attention.linear_kv_down_proj.weight",)),
    Rename(
        "self_attn.kv_a_layernorm.weight",
        ("self_attention.linear_kv_up_proj.layer_norm_weight", "self_attention.kv_layernorm.weight"),
        norm=True,
    ),
    Rename("self_attn.kv_b_proj.weight", ("self_attention.linear_kv_up_proj.weight",)),
    llama.OUTPUT,
    llama.MLP_NORM,
)
DEEPSEEK_EXPERTS = (
    *QWEN_EXPERTS,
    GateUp("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj", "mlp.shared_experts.linear_fc1"),
    Rename("mlp.shared_experts.down_proj.weight", ("mlp.shared_experts.linear_fc2.weight",)),
)
DEEPSEEK_NEEDS: dict[str, tuple[Any, ...]] = {
    **config.DECODER,
    **config.RMS,
    **config.SWIGLU,
    **config.ROPE,
    "position_embedding_type": ("rope", "yarn", "none"),  # MLA has its own embedding, whatever this says
    "rope_scaling": (UNSET, "yarn"),
    "mla": (True,),
    "qk_layernorm": (True,),
    **config.required("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
    "window_size": (UNSET,),
    "add_bias_linear": (False,),
    **config.EXPERTS,
    **config.SHARED_EXPERT,
}


def deepseek_settings(args: ModelArgs) -> dict[str, Any]:
    """The keys that DeepSeek-V2 and V3 share."""
    return {
        **config.decoder(args),
        **config.rope(args),
        **config.mixture(args),
        "num_key_value_heads": args.num_attention_heads,
        "rms_norm_eps": args.norm_epsilon,
        "attention_bias": False,
        **config.keys_of(args, "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
        "n_routed_experts": args.num_experts,
        "n_shared_experts": (args.moe_shared_expert_size or 0) // (args.moe_ffn_hidden_size or 1),
        "moe_intermediate_size": args.moe_ffn_hidden_size,
        "moe_layer_freq": 1,
        "first_k_dense_replace": len(config.dense_layers(args)),
        "routed_scaling_factor": args.moe_scaling_factor or 1.0,
        "scoring_func": args.moe_score_function,
    }


def deepseek_misfits(args: ModelArgs, best_of_group: int) -> list[str]:
    """What DeepSeek's layout of layers and its routing cannot express.

    Args:
        args: Facts of the model.
        best_of_group: How many of a group's experts transformers adds up to rank the group. Megatron adds up
            topk / group_topk of them (moe_utils.py, group_limited_topk), so the two agree only where these are equal.
    """
    out = []
    dense = config.dense_layers(args)
    if args.moe_layers is not None and not any(args.moe_layers):
        out.append("no layer has experts")
    if not args.moe_shared_expert_size:
        out.append("there is no shared expert")
    if dense != list(range(len(dense))):
        out.append(f"layer {dense[-1]} has no experts, but a layer before it has")
    if not args.ffn_hidden_size and dense:
        out.append("ffn_hidden_size is not known")
    shared, routed = args.moe_shared_expert_size or 0, args.moe_ffn_hidden_size or 1
    if shared % routed:
        out.append(f"the shared expert's {shared} columns are not a multiple of an expert's {routed}")
    if args.moe_group_topk and args.moe_topk and args.moe_topk // args.moe_group_topk != best_of_group:
        summed = args.moe_topk // args.moe_group_topk
        out.append(f"groups are ranked by their best {summed} experts, in transformers by the best {best_of_group}")
    return out


def deepseek_remarks(args: ModelArgs) -> list[str]:
    """transformers builds the two low-rank norms with its default epsilon (5.23, DeepseekV3Attention)."""
    if args.norm_epsilon == 1e-6:
        return []
    return [
        f"transformers computes q_a_layernorm and kv_a_layernorm with epsilon 1e-06 whatever config.json says; this "
        f"model was trained with {args.norm_epsilon:g}, so its logits there differ slightly (about 1e-3)"
    ]


def _settings(args: ModelArgs) -> dict[str, Any]:
    return {
        **deepseek_settings(args),
        "topk_method": "group_limited_greedy" if args.moe_group_topk else "greedy",
        "n_group": args.moe_num_groups if args.moe_group_topk else None,
        "topk_group": args.moe_group_topk,
        "norm_topk_prob": False,
    }


MODEL = LlamaModel(
    name="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    needs={
        **DEEPSEEK_NEEDS,
        "moe_score_function": ("softmax",),
        "moe_pre_softmax": (True,),
        "moe_expert_bias": (False,),
    },
    settings=_settings,
    layer=MLA_ATTENTION,
    moe=DEEPSEEK_EXPERTS,
    misfits=lambda args: [*deepseek_misfits(args, best_of_group=1), *llama.uneven_heads(args)],
    remarks=deepseek_remarks,
)
