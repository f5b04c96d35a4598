"""Qwen3-Next: three of four layers are gated delta nets; attention has an output gate; all but one norm are zero-centred."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from converters.models import config, llama
from converters.models.gpt_neox import partial_rope
from converters.models.llama import LlamaModel
from converters.models.qwen2_moe import QWEN_EXPERTS, SHARED_EXPERT
from converters.models.qwen3 import QWEN3_ATTENTION
from converters.models.rules import Joined, Rename

if TYPE_CHECKING:
    from collections.abc import Mapping

    from converters.megatron.model_args import ModelArgs
    from converters.models.rules import Rule

_NET = "self_attention."


def delta_net(*projections: Rule) -> tuple[Rule, ...]:
    """A layer with a gated delta net, whose input projections each generation of Qwen stores in another form."""
    return (
        Rename("input_layernorm.weight", ("self_attention.in_proj.layer_norm_weight",), norm=True),
        *projections,
        Joined("linear_attn.conv1d.weight", tuple(f"{_NET}conv1d.weight.{part}" for part in ("query", "key", "value"))),
        Rename("linear_attn.A_log", (f"{_NET}A_log",)),
        Rename("linear_attn.dt_bias", (f"{_NET}dt_bias",)),
        # Bridge's RMSNorm2ZeroCenteredRMSNormMapping: Megatron centres it as it centres all norms
        Rename("linear_attn.norm.weight", (f"{_NET}out_norm.weight",), plain=True),
        Rename("linear_attn.out_proj.weight", (f"{_NET}out_proj.weight",)),
        llama.MLP_NORM,
    )


def joined(target: str, *parts: str, groups: str | None = None) -> Joined:
    """Parts of the input projection as one tensor."""
    return Joined(f"linear_attn.{target}.weight", tuple(f"{_NET}in_proj.weight.{part}" for part in parts), groups)


DELTA_NET_NEEDS: dict[str, tuple[Any, ...]] = {
    **config.LLAMA,
    **config.NO_BIAS,
    "zero_centered_norm": (True,),
    "qk_layernorm": (True,),
    **config.PARTIAL_ROPE,
    "attention_output_gate": (True,),
    "experimental_attention_variant": ("gated_delta_net", "gdn"),
    **config.required("linear_attention_freq", "linear_layers", *config.DELTA_NET_SIZES),
}
PREDICTIONS = ("mtp.", "mtp.layers.{}.")
# Qwen's own code and Megatron feed (embedding, hidden) to it in this order: vLLM, qwen3_next_mtp.py; Bridge moves no halves
PREDICTION = (
    Rename("pre_fc_norm_embedding.weight", ("enorm.weight",), norm=True),
    Rename("pre_fc_norm_hidden.weight", ("hnorm.weight",), norm=True),
    Rename("fc.weight", ("eh_proj.weight",)),
    Rename("norm.weight", ("final_layernorm.weight",), norm=True),
)


def delta_net_settings(args: ModelArgs) -> dict[str, Any]:
    """The keys that all models with gated delta nets share."""
    linear = args.linear_layers or ()
    return {
        **config.llama(args),
        **partial_rope(args),
        "rms_norm_eps": args.norm_epsilon,
        "attention_bias": False,
        "layer_types": ["linear_attention" if flag else "full_attention" for flag in linear],
        **config.keys_of(args, *config.DELTA_NET_SIZES),
    }


def delta_net_facts(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Which layers have linear attention."""
    layers, kinds = settings.get("num_hidden_layers"), settings.get("layer_types")
    if not isinstance(kinds, list):  # written before transformers listed them
        interval = settings.get("full_attention_interval") or 4
        kinds = [("linear_attention", "full_attention")[(n + 1) % interval == 0] for n in range(layers or 0)]
    linear = tuple(kind == "linear_attention" for kind in kinds)
    return {
        "linear_layers": linear,
        "linear_attention_freq": [int(flag) for flag in linear],
        "experimental_attention_variant": "gated_delta_net",
    }


def shared_expert_settings(args: ModelArgs) -> dict[str, Any]:
    """The keys of Qwen's routed experts beside one shared expert."""
    return {
        **config.mixture(args),
        "num_experts": args.num_experts,
        "moe_intermediate_size": args.moe_ffn_hidden_size,
        "shared_expert_intermediate_size": args.moe_shared_expert_size,
    }


def _settings(args: ModelArgs) -> dict[str, Any]:
    return {
        **delta_net_settings(args),
        **shared_expert_settings(args),
        "decoder_sparse_step": 1,
        "mlp_only_layers": config.dense_layers(args),
        "norm_topk_prob": not args.moe_pre_softmax,
    }


MODEL = LlamaModel(
    name="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    needs={**DELTA_NET_NEEDS, **config.PLAIN_ROUTER, "moe_pre_softmax": (True, False), **config.GATED_SHARED_EXPERT},
    settings=_settings,
    layer=QWEN3_ATTENTION,
    linear=delta_net(
        joined("in_proj_qkvz", "query", "key", "value", "z", groups="linear_num_key_heads"),
        joined("in_proj_ba", "beta", "alpha", groups="linear_num_key_heads"),
    ),
    moe=(*QWEN_EXPERTS, *SHARED_EXPERT),
    zero_centered=True,
    facts=delta_net_facts,
    mtp=PREDICTION,
    predictions=PREDICTIONS,
)
