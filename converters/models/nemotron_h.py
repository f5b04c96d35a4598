"""Nemotron-H, Nemotron Nano 2 and 3: a stack of single layers, each Mamba, attention, MLP or a mixture of experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from converters.megatron.megatron_flags import HYBRID
from converters.models import config
from converters.models.deepseek_v3 import PREDICTION_INPUT
from converters.models.glm4_moe import routed_settings
from converters.models.model import SET, UNSET, Model
from converters.models.rules import QKV, Experts, Joined, Rename, Vocab

if TYPE_CHECKING:
    from collections.abc import Mapping

    from converters.megatron.model_args import ModelArgs
    from converters.models.rules import Rule

_KINDS = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}
_OLDER_KINDS = {"mamba": "M", "attention": "*"}


def mamba(target: str, source: str = "mixer.", normed: str | None = None) -> tuple[Rule, ...]:
    """A Mamba mixer behind its norm; rows z, x, B, C, dt as one (Megatron stores them part by part).

    Args:
        target: Prefix of Hugging Face's names within a layer.
        source: Prefix of Megatron's.
        normed: Field that says whether it has a norm of its own; None: it has.
    """

    def joined(name: str, parts: str | tuple[str, ...]) -> Joined:
        return Joined(f"{target}{name}", tuple(f"{source}{name}.{part}" for part in parts))

    return (
        joined("in_proj.weight", ("z", "x", "B", "C", "dt")),
        joined("conv1d.weight", "xBC"),
        joined("conv1d.bias", "xBC"),
        *(Rename(f"{target}{name}", (f"{source}{name}",)) for name in ("A_log", "D", "dt_bias")),
        Rename(f"{target}norm.weight", (f"{source}norm.weight",), norm=True, when=normed),
        Rename(f"{target}out_proj.weight", (f"{source}out_proj.weight",)),
    )


def _norm(*sources: str) -> Rename:
    return Rename("norm.weight", sources, norm=True)


def _pair(target: str, source: str) -> tuple[Rename, Rename]:
    """The two projections of an MLP without gate."""
    up = Rename(f"{target}up_proj.weight", (f"{source}linear_fc1.weight",))
    return up, Rename(f"{target}down_proj.weight", (f"{source}linear_fc2.weight",))


MAMBA_NEEDS: dict[str, tuple[Any, ...]] = {
    **config.DECODER,
    **config.GROUPED_ATTENTION,
    **config.RMS,
    **config.NO_BIAS,
    "layer_pattern": (SET,),
    **dict.fromkeys(HYBRID, (SET, UNSET, True)),
    **config.required("mamba_num_heads", "mamba_head_dim", "mamba_num_groups", "mamba_state_dim"),
}


def _settings(args: ModelArgs) -> dict[str, Any]:
    kinds = {symbol: kind for kind, symbol in _KINDS.items()}
    pattern = args.layer_pattern or ""
    sizes = {**config.decoder(args), **config.attention(args)}
    sizes["mlp_hidden_act"] = sizes.pop("hidden_act")
    return {
        **sizes,
        "num_hidden_layers": len(pattern),
        "layers_block_type": [kinds.get(symbol) for symbol in pattern],
        "hybrid_override_pattern": pattern,
        "intermediate_size": args.ffn_hidden_size,
        "layer_norm_epsilon": args.norm_epsilon,
        "attention_bias": False,
        "mlp_bias": False,
        "use_bias": False,
        "mamba_proj_bias": False,
        "mamba_hidden_act": "silu",
        **config.keys_of(args, "mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size"),
        "conv_kernel": 4,
        "use_conv_bias": True,
        "chunk_size": 128,
        "time_step_min": 0.001,
        "residual_in_fp32": False,
        "sliding_window": None,
        "num_nextn_predict_layers": args.mtp_num_layers or 0,
        "mtp_layers_block_type": [kinds.get(symbol) for symbol in args.prediction_pattern or "*E"],  # its default
        **_expert_settings(args),
    }


def _expert_settings(args: ModelArgs) -> dict[str, Any]:
    """Those of a model with experts; of one without, the class has values that nothing reads."""
    if "E" not in (args.layer_pattern or "E"):
        return {}
    return {
        **routed_settings(args),
        "n_shared_experts": 1,
        "moe_shared_expert_intermediate_size": args.moe_shared_expert_size,
        "moe_latent_size": args.extras.get("moe_latent_size"),
    }


def _symbols(kinds: list[Any]) -> str:
    return "".join({**_KINDS, **_OLDER_KINDS}.get(kind, "?") for kind in kinds)


def _facts(settings: Mapping[str, Any]) -> dict[str, Any]:
    kinds = settings.get("layers_block_type") or settings.get("layer_types")
    pattern = settings.get("hybrid_override_pattern") or ""
    if isinstance(kinds, list):
        pattern = _symbols(kinds)
    mixed, depths = "E" in pattern, settings.get("num_nextn_predict_layers")
    predicting = settings.get("mtp_layers_block_type") if depths else None
    return {
        "layer_pattern": pattern,
        "num_layers": len(pattern),
        "prediction_pattern": _symbols(predicting) if isinstance(predicting, list) else None,
        "position_embedding_type": "none",
        "moe_score_function": "sigmoid" if mixed else None,
        "moe_expert_bias": True if mixed else None,
        "moe_shared_expert_gate": False if mixed else None,
        "moe_latent_size": settings.get("moe_latent_size") if mixed else None,
    }


def mamba_misfits(args: ModelArgs) -> list[str]:
    """The norm of Megatron's mixer has an epsilon of its own (ssm/mamba_mixer.py, core_v0.16.1 and core_v0.19.0)."""
    if args.norm_epsilon == 1e-5 or not {"M", "P"} & {*(args.layer_pattern or "")}:
        return []
    return [f"the epsilon of Megatron's Mamba norms is 1e-05, that of this model's norms {args.norm_epsilon:g}"]


def _misfits(args: ModelArgs) -> list[str]:
    out = mamba_misfits(args)
    if "E" not in (args.layer_pattern or ""):
        return out
    wanted = (("moe_score_function", "sigmoid"), ("moe_expert_bias", True), ("moe_shared_expert_gate", False))
    out += [f"{name} is {args.fact(name)}, but it takes {value}" for name, value in wanted if args.fact(name) != value]
    if not args.moe_shared_expert_size:
        out.append("there is no shared expert")
    if args.moe_group_topk and args.moe_topk and args.moe_topk // args.moe_group_topk != 2:
        out.append(
            f"groups are ranked by their best {args.moe_topk // args.moe_group_topk} experts, in transformers by 2"
        )
    return out


def _remarks(args: ModelArgs) -> list[str]:
    return [
        "transformers lets no time step of a Mamba layer fall below time_step_min, 0.001; Megatron has no such limit"
    ]


MODEL = Model(
    name="nemotron_h",
    architecture="NemotronHForCausalLM",
    needs={
        **MAMBA_NEEDS,
        "gated": (False,),
        "activation": ("relu2",),
        "position_embedding_type": ("none", "learned_absolute"),  # the default, which such a model does not look at
        "moe_latent_size": (SET, UNSET),
    },
    settings=_settings,
    before=(Vocab("backbone.embeddings.weight", "embedding.word_embeddings.weight"),),
    hybrid={
        "M": (_norm("mixer.in_proj.layer_norm_weight"), *mamba("mixer.")),
        "*": (
            _norm("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
            QKV(("mixer.q_proj", "mixer.k_proj", "mixer.v_proj")),
            Rename("mixer.o_proj.weight", ("self_attention.linear_proj.weight",)),
        ),
        "-": (_norm("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"), *_pair("mixer.", "mlp.")),
        "E": (
            _norm("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
            Rename("mixer.gate.weight", ("mlp.router.weight",)),
            Rename("mixer.gate.e_score_correction_bias", ("mlp.router.expert_bias",), fp32=True),
            Rename("mixer.fc1_latent_proj.weight", ("mlp.fc1_latent_proj.weight",), when="moe_latent_size"),
            Rename("mixer.fc2_latent_proj.weight", ("mlp.fc2_latent_proj.weight",), when="moe_latent_size"),
            Experts("mixer.experts.{}.", _pair("", "")),
            *_pair("mixer.shared_experts.", "mlp.shared_experts."),
        ),
    },
    after=(
        Rename("backbone.norm_f.weight", ("decoder.final_norm.weight", "decoder.final_layernorm.weight"), norm=True),
        Vocab("lm_head.weight", "output_layer.weight", untied=True),
    ),
    layers="backbone.layers.{}.",
    misfits=_misfits,
    remarks=_remarks,
    facts=_facts,
    predictions=("mtp.layers.{}.", "mtp.layers.{}."),
    mtp=PREDICTION_INPUT,
    mtp_last=(Rename("final_layernorm.weight", ("final_layernorm.weight",), norm=True),),
)
