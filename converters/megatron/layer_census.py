"""Which tensors a model must have because of those that it has: a layer of a kind without one of its tensors is damaged.

    mlp.experts.3.linear_fc1.weight     asks for mlp.experts.3.linear_fc2.weight, mlp.router.weight and a norm
    X.adapter.linear_in.weight          asks for X.adapter.linear_out.weight

It is looked at layer by layer, so that the only layer of its kind is seen, too, in every stack of every part of a model.
What an option turns off is asked for only where something else shows that it is on.

Facts: Megatron-Core 0.16.1 and main (2026-08), models/gpt/gpt_layer_specs.py, models/T5/t5_spec.py,
models/bert/bert_model.py, models/vision/clip_vit_model.py, transformer/multi_latent_attention.py, moe/moe_layer.py,
transformer/multi_token_prediction.py; Megatron-Bridge 067f987d, peft/utils.py.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from converters.megatron.tensor_axes import DELTA_NET, LAYER, MAMBA
from converters.model_parts import REPLICATED, language_name, split_part

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

# the last `layers.N` counts: a prediction layer of a hybrid has layers of its own
_LAYER = re.compile(
    r"(?P<layer>(?:(?:decoder|encoder)\.layers|mtp\.layers)\.\d{1,5}"
    r"(?:\.(?:mtp_model_layer\.layers\.\d{1,5}|mtp_model_layer|transformer_layer))?)\.(?P<rest>.*)",
    re.DOTALL,
)
_PREDICTION = re.compile(r"(mtp\.layers\.\d+)\.")
_EXPERT = re.compile(r"mlp\.experts\.(\d{1,5})\.(.*)", re.DOTALL)
_LATENT = re.compile(r"self_attention\.linear_(?:q|k|v|kv|qkv)_(?:down|up)_proj\.")
_ATTENTION = "self_attention."
_BIASED = re.compile(r"(.*\.(?:linear_\w+|\w*layernorm|router|dense|eh_proj)\.|.*\.layer_norm_)bias", re.DOTALL)

# what a name begins with, and what its layer then has; "a|b": one of them
_Needs: TypeAlias = "tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]"


def _both_ways(name: str, counterpart: str) -> _Needs:
    """Two tensors that come together."""
    return ((name,), (counterpart,)), ((counterpart,), (name,))


_LAYER_NEEDS: _Needs = (
    *_both_ways("self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight"),
    (
        ("cross_attention.", "pre_cross_attn_layernorm."),
        (*(f"cross_attention.linear_{x}.weight" for x in ("q", "kv", "proj")), "pre_cross_attn_layernorm.weight"),
    ),
    (("cross_attention.linear_proj.bias",), ("cross_attention.linear_q.bias", "cross_attention.linear_kv.bias")),
    *_both_ways("cross_attention.linear_q.bias", "cross_attention.linear_kv.bias"),
    (("mlp.linear_fc",), ("mlp.linear_fc1.weight", "mlp.linear_fc2.weight")),
    *_both_ways("mlp.linear_fc1.bias", "mlp.linear_fc2.bias"),
    (("self_attention.linear_proj.bias",), ("self_attention.linear_qkv.bias|self_attention.linear_kv_up_proj.bias",)),
    (("mlp.router.", "mlp.experts."), ("mlp.router.weight", "mlp.experts.*")),
    (("mlp.shared_experts.linear_fc",), tuple(f"mlp.shared_experts.linear_fc{n}.weight" for n in (1, 2))),
    (("mamba_mixer.",), ("norm.weight",)),
    *_both_ways("mlp.fc1_latent_proj.weight", "mlp.fc2_latent_proj.weight"),
)
_PLAIN_NEEDS = ("self_attention.linear_qkv.weight", "self_attention.linear_proj.weight")
_LATENT_NEEDS = (
    "self_attention.linear_kv_down_proj.weight|self_attention.linear_qkv_down_proj.weight",
    "self_attention.linear_kv_up_proj.weight|self_attention.linear_k_up_proj.weight",
    "self_attention.linear_q_up_proj.weight|self_attention.linear_q_proj.weight",
    "self_attention.linear_proj.weight",
)
_LATENT_QUERY = "self_attention.linear_q_down_proj.weight|self_attention.linear_qkv_down_proj.weight"
# both norms of a latent attention, if it has one of them
_LATENT_NORMS = tuple(
    (
        f"self_attention.linear_{x}_up_proj.layer_norm_weight|self_attention.{x}_layernorm.weight",
        f"self_attention.linear_{x}_up_proj.weight",
    )
    for x in ("q", "kv")
)
_NORM_BEFORE = (  # of attention and MLP; a model may have it behind them instead
    (
        "self_attention.linear_qkv.",
        "self_attention.linear_qkv.layer_norm_weight|input_layernorm.weight|norm.weight",  # the last: Falcon-H1's
    ),
    ("self_attention.linear_kv_", "input_layernorm.weight|self_attention.linear_qkv_down_proj.layer_norm_weight"),
    ("self_attention.weight", "self_attention.layer_norm_weight|input_layernorm.weight"),
    ("mlp.weight", "mlp.layer_norm_weight|pre_mlp_layernorm.weight"),
    ("mlp.linear_fc", "mlp.linear_fc1.layer_norm_weight|pre_mlp_layernorm.weight"),
    ("mlp.experts.", "pre_mlp_layernorm.weight"),
)
_NORMS = (
    *("self_attention.linear_qkv.layer_norm_", "mlp.linear_fc1.layer_norm_", "input_layernorm."),
    *("pre_mlp_layernorm.", "pre_cross_attn_layernorm."),
)
# of what is around the layers
_OUTER_NEEDS: _Needs = (
    (
        ("lm_head.dense.", "lm_head.layer_norm."),
        (*(f"lm_head.{m}.{leaf}" for m in ("dense", "layer_norm") for leaf in ("weight", "bias")), "output_layer.bias"),
    ),
    (
        ("pooler.", "binary_head."),
        (*(f"{m}.{leaf}" for m in ("pooler.dense", "binary_head") for leaf in ("weight", "bias")),),
    ),
    (("binary_head.",), ("embedding.tokentype_embeddings.weight",)),
    (("lm_head.output_layer.bias",), ("output_layer.bias",)),
    (("vision_model.conv1.",), ("vision_model.conv1.weight", "vision_model.position_embeddings.weight")),
    (("vision_model.class_token",), ("vision_model.conv1.weight", "vision_model.ln_pre.weight")),
    (("vision_model.position_embeddings.",), ("vision_model.conv1.weight",)),
    (("vision_projection.encoder.linear_fc",), tuple(f"vision_projection.encoder.linear_fc{n}.weight" for n in (1, 2))),
    *_both_ways("vision_projection.encoder.linear_fc1.bias", "vision_projection.encoder.linear_fc2.bias"),
)
_SHARED = (  # an option of all layers: what shows it, and what else a layer that has it then has
    ("mlp.router.weight", "mlp.router.expert_bias"),
    ("mlp.shared_experts.linear_fc1.weight", "mlp.shared_experts.gate_weight"),
    ("mamba_mixer.A_log", "mamba_mixer.norm.weight"),
    *((name, name.replace(".weight.", ".bias.")) for name in LAYER if "conv1d.weight." in name),
)
_T5_NEEDS: _Needs = (
    *_both_ways("embedding.position_embeddings.weight", "position_embeddings.weight"),
    *_both_ways("lm_head.output_layer.bias", "output_layer.bias"),
)
# tensors of a mixer that an option turns off, of all layers; what a mixer beside attention does not have
_MIXER_OPTIONS = re.compile(
    r".*(?:layer_norm_bias|conv1d\.bias\.\w+|out_proj\.bias)|mamba_mixer\.(?:norm|in_proj\.layer_).*"
)
# parts that only one generation of gated delta nets has
_GENERATIONS = tuple(
    frozenset(f"{_ATTENTION}in_proj.weight.{part}" for part in parts) for parts in (("f", "b", "w"), ("beta", "alpha"))
)
_PREDICTION_NEEDS = ("eh_proj.weight", "enorm.weight", "hnorm.weight", "final_layernorm.weight|final_norm.weight")


@dataclass
class _Layer:
    """The names of a layer's tensors behind its own, those of experts apart, by the expert's number."""

    names: set[str] = field(default_factory=set)
    experts: dict[int, set[str]] = field(default_factory=lambda: defaultdict(set))


def missing_tensors(names: Collection[str]) -> list[str]:
    """What a model lacks, as sentences; empty if it is whole, or of a kind that is not known.

    Args:
        names: Canonical names of its weights.
    """
    layers: dict[str, _Layer] = defaultdict(_Layer)
    outer: set[str] = set()
    for name in names:
        if ".adapter." in name:
            continue
        part, inner = split_part(name)
        match = None if part in REPLICATED else _LAYER.fullmatch(inner)
        if match is None:
            outer.add(name)
            continue
        layer = layers[part + match["layer"]]
        expert = _EXPERT.fullmatch(match["rest"])
        if expert is None:
            layer.names.add(match["rest"])
        else:
            layer.names.add("mlp.experts.*")
            layer.experts[int(expert[1])].add(expert[2])
    out = [f"{where} has no {name_lacking}" for where, layer in layers.items() for name_lacking in _layer_lacks(layer)]
    for sign, optional in _SHARED:
        if any(optional in layer.names for layer in layers.values()):
            bare = [where for where, layer in layers.items() if sign in layer.names and optional not in layer.names]
            out += [f"{where} has no {optional}" for where in bare]
    out += [f"the model has no {name_lacking}" for name_lacking in _outer_lacks(layers, outer)]
    out += [f"{where} has no {name_lacking}" for where, name_lacking in _predictions(layers, outer)]
    return [*out, *_adapters_alone(names)]


def _lacking(present: Collection[str], needed: Iterable[str]) -> Iterator[str]:
    for text in needed:
        choices = text.split("|")
        if present and not any(choice in present for choice in choices):
            yield choices[0]


def _required(present: Collection[str], needs: Iterable[tuple[tuple[str, ...], tuple[str, ...]]]) -> Iterator[str]:
    for starts, needed in needs:
        if any(name.startswith(starts) for name in present):
            yield from needed


def _layer_lacks(layer: _Layer) -> list[str]:
    names = layer.names
    needed = [*_required(names, _LAYER_NEEDS), *_mixers(names), *_attention(names), *_biases(names)]
    if not any("post_" in name for name in names):  # a layer normed behind its parts needs no norm before them
        needed += [norm for start, norm in _NORM_BEFORE if any(name.startswith(start) for name in names)]
    out = list(dict.fromkeys(_lacking(names, needed)))
    leaves = {"linear_fc1.weight", "linear_fc2.weight"}.union(*layer.experts.values())
    for number, expert_leaves in layer.experts.items():
        out += [f"mlp.experts.{number}.{leaf}" for leaf in sorted(leaves - expert_leaves)]
    return out


def _mixers(names: set[str]) -> Iterator[str]:
    """What a Mamba mixer or a gated delta net needs: its projection and its convolution are stored part by part."""
    for prefix, table in {**MAMBA, _ATTENTION: DELTA_NET}.items():
        parts = {name for name in names if name.startswith((f"{prefix}in_proj.", f"{prefix}conv1d."))}
        if parts and parts <= table.keys():  # else it is of a kind that is not known
            other_kind = next((parts for parts in _GENERATIONS if not parts & names), frozenset())
            yield from (name for name in table if name not in other_kind and not _MIXER_OPTIONS.fullmatch(name))


def _attention(names: set[str]) -> Iterator[str]:
    """What self attention needs: latent if a projection is, none for a gated delta net."""
    if any(name.startswith(f"{_ATTENTION}in_proj.") for name in names):
        return
    if any(_LATENT.match(name) for name in names):
        yield from _LATENT_NEEDS
        if f"{_ATTENTION}linear_q_up_proj.weight" in names:
            yield _LATENT_QUERY
        if f"{_ATTENTION}linear_q_down_proj.weight" in names:
            yield f"{_ATTENTION}linear_q_up_proj.weight"
        norms = [norm for norm, linear in _LATENT_NORMS if linear in names]
        if any(choice in names for norm in norms for choice in norm.split("|")):
            yield from norms
    elif any(name.startswith((f"{_ATTENTION}linear_qkv.", f"{_ATTENTION}linear_proj.")) for name in names):
        yield from _PLAIN_NEEDS


def _biases(names: set[str]) -> Iterator[str]:
    """A bias has its weight; if one norm has a bias, or one linear layer of those that share the option, all have it."""
    for name in names:
        if (match := _BIASED.fullmatch(name)) is not None:
            yield f"{match[1]}weight"
    if any(f"{norm}bias" in names for norm in _NORMS):
        yield from (f"{norm}bias" for norm in _NORMS if f"{norm}weight" in names)
    linear = [f"{m}.linear_proj" for m in ("self_attention", "cross_attention")] + ["mlp.linear_fc1", "mlp.linear_fc2"]
    if any(f"{module}.bias" in names for module in linear):
        yield from (f"{module}.bias" for module in linear if f"{module}.weight" in names)


def _outer_lacks(layers: dict[str, _Layer], outer: set[str]) -> list[str]:
    radio = "vision_model.embedder.weight" in outer  # has modules of other names than CLIP's
    needed = list(_required({name for name in outer if not (radio and name.startswith("vision_model."))}, _OUTER_NEEDS))
    if "vision_model.conv1.weight" in outer and "vision_model.conv1.bias" not in outer:  # CLIP, not SigLIP or InternViT
        needed.append("vision_model.ln_pre.weight|vision_model.ln_post.weight")
    if any("cross_attention.linear_q.weight" in layer.names for layer in layers.values()):  # T5 has two names of these
        needed += _required(outer, _T5_NEEDS)
    for stack in dict.fromkeys(where.rpartition(".layers.")[0] for where in layers):
        part, inner = split_part(stack)
        if language_name(stack) is None or inner not in ("decoder", "encoder"):
            continue
        norms = [f"{stack}.{norm}" for norm in ("final_layernorm", "final_norm")]
        embedding = f"{part}embedding.word_embeddings.weight"
        if embedding in outer:  # without it, the tensors are a piece of a model
            needed.append("|".join(f"{norm}.weight" for norm in norms))
        if any(f"{norm}.weight" in outer for norm in norms):
            needed.append(embedding)
        stack_names = [layer.names for where, layer in layers.items() if where.startswith(f"{stack}.layers.")]
        biased = any(f"{norm}bias" in names for names in stack_names for norm in _NORMS)
        needed += [f"{norm}.bias" for norm in norms if biased and f"{norm}.weight" in outer]
        needed += [f"{norm}.weight" for norm in norms if f"{norm}.bias" in outer]
    return list(dict.fromkeys(_lacking(outer, needed)))


def _predictions(layers: dict[str, _Layer], outer: set[str]) -> Iterator[tuple[str, str]]:
    """What multi-token-prediction layers have around the layer that they hold."""
    depths: dict[str, set[str]] = defaultdict(set)
    for where, layer in layers.items():
        if (match := _PREDICTION.match(f"{split_part(where)[1]}.")) is not None:
            depth_names = depths[split_part(where)[0] + match[1]]
            if where.endswith(match[1]):
                depth_names |= layer.names
    for where, names in depths.items():
        yield from ((where, name_lacking) for name_lacking in _lacking(names or outer, _PREDICTION_NEEDS))


def _adapters_alone(names: Collection[str]) -> Iterator[str]:
    """Adapters of which one of the two matrices is there."""
    for name in names:
        stem, adapter, leaf = name.partition(".adapter.")
        for matrix, counterpart in (("linear_in.", "linear_out."), ("linear_out.", "linear_in.")):
            if adapter and matrix in leaf and stem + adapter + leaf.replace(matrix, counterpart) not in names:
                yield f"{stem} has no {adapter[1:]}{leaf.replace(matrix, counterpart)}"
