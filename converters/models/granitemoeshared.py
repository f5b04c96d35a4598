"""Granite MoE with its multipliers at one: routed experts beside a shared expert that has no gate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from converters.models import config, llama
from converters.models.mixtral import every_layer_mixed
from converters.models.model import SET, Model
from converters.models.rules import Rename, StackedExperts

if TYPE_CHECKING:
    from converters.facts.model_args import ModelArgs


def _settings(args: ModelArgs) -> dict[str, Any]:
    return {
        **config.llama(args),
        **config.mixture(args),
        "intermediate_size": args.moe_ffn_hidden_size,
        "num_local_experts": args.num_experts,
        "shared_intermediate_size": args.moe_shared_expert_size,
        "rms_norm_eps": args.norm_epsilon,
        "attention_bias": False,
        "attention_multiplier": (args.head_dim or 1) ** -0.5,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "logits_scaling": 1.0,
    }


MODEL = Model(
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
    before=llama.EMBEDDING,
    layer=llama.LLAMA_ATTENTION,
    dense=(),
    moe=(
        Rename("block_sparse_moe.router.layer.weight", ("mlp.router.weight",)),
        StackedExperts("block_sparse_moe.input_linear.weight", "linear_fc1.weight"),
        StackedExperts("block_sparse_moe.output_linear.weight", "linear_fc2.weight"),
        # gate above up, as in Megatron
        Rename("shared_mlp.input_linear.weight", ("mlp.shared_experts.linear_fc1.weight",)),
        Rename("shared_mlp.output_linear.weight", ("mlp.shared_experts.linear_fc2.weight",)),
    ),
    after=llama.FINAL,
    misfits=every_layer_mixed,
)
