"""Megatron's tensors: what the axes of each are, and which axis is divided over tensor parallelism.

    "self_attention.linear_proj.weight": "H |heads"      (hidden size, elements of all heads); `|`: the columns are divided

Whoever asks how a tensor is divided, which shape it has by a model's sizes, or whether it fits the others, reads these
tables. A number is a size itself; of the other sizes, H is the hidden size, V the rows of the padded vocabulary.

Facts: the `sharded_state_dict` methods of Megatron-Core 0.16.1 (tensor_parallel/layers.py, transformer/attention.py,
transformer/multi_latent_attention.py, transformer/mlp.py, transformer/moe/experts.py, ssm/mamba_mixer.py,
ssm/gated_delta_net.py, extensions/transformer_engine.py), compared with the tags core_v0.9.0 to core_v0.19.0;
ssm/gated_delta_net/gdn.py and gdn2.py (2026-08); models/T5/t5_model.py, models/bert/bert_model.py,
models/vision/clip_vit_model.py (0.16.1); Megatron-Bridge 067f987d, falcon_h1/modeling_falconh1.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Axes:
    """What the axes of a tensor are.

    Attributes:
        sizes: The name of each axis's size.
        divided: The axis that is divided over tensor parallelism; None if every rank holds all of it.
    """

    sizes: tuple[str, ...]
    divided: int | None


def _expanded(*tables: dict[str, str]) -> dict[str, Axes]:
    """The tables with each `{}` in a name as weight and bias; a bias has the first axis of its weight."""
    out = {}
    for name, text in (item for table in tables for item in table.items()):
        axes = text.split()
        for leaf, leaf_axes in (("weight", axes), ("bias", axes[:1])) if "{}" in name else (("", axes),):
            divided = next((number for number, axis in enumerate(leaf_axes) if axis.startswith("|")), None)
            out[name.format(leaf)] = Axes(tuple(axis.removeprefix("|") for axis in leaf_axes), divided)
    return out


_ATTENTION = {
    "self_attention.linear_qkv.{}": "|qkv H",
    "self_attention.linear_qkv.layer_norm_{}": "H",
    "self_attention.linear_proj.{}": "H |heads",
    "self_attention.q_layernorm.{}": "head",
    "self_attention.k_layernorm.{}": "head",
    "self_attention.core_attention.softmax_offset": "|sinks",
    "cross_attention.linear_q.{}": "|cross H",
    "cross_attention.linear_kv.{}": "|cross_kv H",
    "cross_attention.linear_proj.{}": "H |cross",
    "cross_attention.core_attention.softmax_offset": "|cross_sinks",
    # multi-latent; its down projections may be divided, too: Outline.mla_down_split
    "self_attention.linear_q_proj.{}": "|q_up H",
    "self_attention.linear_q_down_proj.weight": "q_rank H",
    "self_attention.linear_q_up_proj.{}": "|q_up q_rank",
    "self_attention.linear_q_up_proj.layer_norm_{}": "q_rank",
    "self_attention.linear_kv_down_proj.weight": "kv_down H",
    "self_attention.linear_kv_up_proj.{}": "|kv_up kv_rank",
    "self_attention.linear_kv_up_proj.layer_norm_{}": "kv_rank",
    # one matrix in the place of all (heterogeneous/linear_replacements.py)
    "self_attention.{}": "|H H",
}
_MLP = {
    "mlp.linear_fc1.{}": "|fc1 H",
    "mlp.linear_fc1.layer_norm_{}": "H",
    "mlp.linear_fc2.{}": "H |ffn",
    "mlp.shared_experts.linear_fc1.{}": "|shared_fc1 H",
    "mlp.shared_experts.linear_fc2.{}": "H |shared_ffn",
    "mlp.shared_experts.gate_weight": "1 H",
    # of each expert, without its number
    "mlp.experts.linear_fc1.{}": "|expert_fc1 expert_H",
    "mlp.experts.linear_fc2.{}": "expert_H |expert_ffn",
    "mlp.router.{}": "experts H",
    "mlp.router.expert_bias": "experts",
    "mlp.fc1_latent_proj.{}": "latent H",
    "mlp.fc2_latent_proj.{}": "H latent",
    "mlp.{}": "|H H",
}
_NORMS = {
    **dict.fromkeys(("input_layernorm.{}", "pre_mlp_layernorm.{}", "pre_cross_attn_layernorm.{}"), "H"),
    "norm.{}": "H",  # of a Mamba mixer and attention beside it
}
_PREDICTION = {
    "eh_proj.{}": "|H eh",
    **dict.fromkeys(("enorm.{}", "hnorm.{}", "final_layernorm.{}", "final_norm.{}"), "H"),
}


def _mixer(prefix: str, rows: dict[str, str], convolved: tuple[str, ...], kernel: str) -> dict[str, str]:
    """The projection of a mixer's input and its convolution: stored part by part, each part divided alone.

        mixer.in_proj.weight         z | x | B | C | dt        self_attention.in_proj.weight    query | key | value | z | ..
        mixer.conv1d.weight, .bias       x | B | C             self_attention.conv1d.weight     query | key | value

    Args:
        rows: Part -> its rows.
        convolved: The parts that the convolution has, too.
        kernel: Its width.
    """
    return {
        **{f"{prefix}in_proj.weight.{part}": f"|{size} H" for part, size in rows.items()},
        **{f"{prefix}conv1d.weight.{part}": f"|{rows[part]} 1 {kernel}" for part in convolved},
        **{f"{prefix}conv1d.bias.{part}": f"|{rows[part]}" for part in convolved},
        f"{prefix}in_proj.layer_norm_{{}}": "H",
    }


def _mamba(prefix: str) -> dict[str, str]:
    rows = {"z": "inner", "x": "inner", "B": "states", "C": "states", "dt": "mamba_heads"}
    return {
        **_mixer(prefix, rows, ("x", "B", "C"), "mamba_kernel"),
        **{f"{prefix}{name}": "|mamba_heads" for name in ("A_log", "dt_bias")},
        f"{prefix}D": "|skip",
        f"{prefix}norm.weight": "|inner",
        f"{prefix}out_proj.{{}}": "H |inner",
    }


_DELTA_NET = {
    **_mixer(
        "self_attention.",
        {
            "query": "key",
            "key": "key",
            "value": "value",
            "z": "value",
            "beta": "delta_heads",
            "alpha": "delta_heads",
            "f": "key",
            "b": "key",
            "w": "value",  # gdn2's in place of the two before
        },
        ("query", "key", "value"),
        "delta_kernel",
    ),
    "self_attention.A_log": "|decay",
    "self_attention.dt_bias": "|time_step",
    "self_attention.out_norm.weight": "value_head",
    "self_attention.out_proj.{}": "H |value",
}
# a mixer beside attention (Falcon-H1) is called `mamba_mixer`
MAMBA = {prefix: _expanded(_mamba(prefix)) for prefix in ("mixer.", "mamba_mixer.")}
"""Prefix of a Mamba mixer's names -> its tensors."""
DELTA_NET = _expanded(_DELTA_NET)
"""The tensors of a gated delta net, of both generations."""
LAYER = _expanded(_ATTENTION, _MLP, _NORMS, _PREDICTION) | MAMBA["mixer."] | MAMBA["mamba_mixer."] | DELTA_NET
"""The tensors of a layer, by their names behind `layers.N.`."""
_STACKS = ("decoder", "encoder")
OUTER = _expanded(
    {
        "embedding.word_embeddings.weight": "|V H",
        **dict.fromkeys(("output_layer.{}", "lm_head.output_layer.{}"), "|V H"),  # T5 has two names for it
        **dict.fromkeys(("embedding.position_embeddings.weight", "position_embeddings.weight"), "positions H"),
        "embedding.tokentype_embeddings.weight": "2 H",  # sentence A and B
        **dict.fromkeys(("lm_head.dense.{}", "pooler.dense.{}"), "H H"),
        "lm_head.layer_norm.{}": "H",
        "binary_head.{}": "2 H",
        **{f"{stack}.{norm}.{{}}": "H" for stack in _STACKS for norm in ("final_layernorm", "final_norm")},
        **{f"{stack}_relative_pos_emb.relative_attention_bias.weight": "buckets bias_heads" for stack in _STACKS},
    }
)
"""The tensors around the layers of a language model."""
VOCABULARY = frozenset(name for name, axes in OUTER.items() if axes.sizes[0] == "V")
"""Those whose rows are the padded vocabulary."""
# CLIPViTModel; RADIO's and InternViT's have other modules, which are not known
TOWER = _expanded(
    {
        "class_token": "1 tokens H",
        "conv1.weight": "H 3 patch patch",
        "conv1.bias": "H",
        "position_embeddings.weight": "positions H",
        **dict.fromkeys(("ln_pre.{}", "ln_post.{}", "decoder.final_layernorm.{}", "decoder.final_norm.{}"), "H"),
    }
)
"""Those around the layers of a vision tower."""
