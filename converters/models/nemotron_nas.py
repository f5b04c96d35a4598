"""Llama-Nemotron Super and Ultra: Llama with layers that an architecture search cut down, each in its own way.

A layer may have fewer keys or a narrower MLP than others, one matrix in place of its attention or its MLP, or none of it.
Megatron-LM builds such layers only with the rotary embedding of Llama 3.1, scaled by 8.

Source: the code beside nvidia/Llama-3_3-Nemotron-Super-49B-v1 (DeciLM); Megatron-LM, training/arguments.py
(validate_model_config_args_from_heterogeneous_config), core_v0.16.1 and core_v0.19.0.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from converters.errors import RequestError
from converters.megatron.heterogeneous import ENCODED, first_sizes, parse_blocks, read_blocks
from converters.models import config, llama
from converters.models.llama import LlamaModel
from converters.models.model import SET, UNSET
from converters.models.rules import QKV, Rename

if TYPE_CHECKING:
    from collections.abc import Mapping

    from converters.megatron.heterogeneous import Block
    from converters.megatron.model_args import ModelArgs
    from converters.models.rules import Rule

_LINEAR_ATTENTION: tuple[Rule, ...] = (
    Rename("input_layernorm.weight", ("self_attention.layer_norm_weight", "input_layernorm.weight"), norm=True),
    Rename("self_attn.linear_attn.weight", ("self_attention.weight",)),
)
_LINEAR_MLP: tuple[Rule, ...] = (
    Rename("post_attention_layernorm.weight", ("mlp.layer_norm_weight", "pre_mlp_layernorm.weight"), norm=True),
    Rename("mlp.linear_mlp.weight", ("mlp.weight",)),
)


def _blocks(args: ModelArgs) -> tuple[Block, ...]:
    """Raises ValueError for what is not understood."""
    return read_blocks(str(args.extras.get(ENCODED)), args.num_attention_heads or 0, args.hidden_size or 0)


def _rules(args: ModelArgs) -> list[tuple[Rule, ...]]:
    return [(*_attention_rules(block), *_mlp_rules(block)) for block in _blocks(args)]


def _attention_rules(block: Block) -> tuple[Rule, ...]:
    if block.attention == "full":
        return llama.INPUT_NORM, QKV(groups=block.query_groups), llama.OUTPUT
    return _LINEAR_ATTENTION if block.attention == "linear" else ()


def _mlp_rules(block: Block) -> tuple[Rule, ...]:
    if block.mlp == "full":
        return llama.MLP_NORM, *llama.LLAMA_MLP
    return _LINEAR_MLP if block.mlp == "linear" else ()


def _settings(args: ModelArgs) -> dict[str, Any]:
    out = {**llama.llama_settings(args), "block_configs": _block_configs(args)}
    del out["num_key_value_heads"], out["intermediate_size"]  # each layer has its own
    return out


def _block_configs(args: ModelArgs) -> list[dict[str, Any]]:
    """As config.json has them, where every attention says its heads in a group and every MLP its multiplier."""
    text, out = args.extras.get(ENCODED), []
    for block in json.loads(text)["block_configs"] if text else ():
        attention, ffn = dict(block["attention"]), dict(block.get("ffn") or block["mlp"])
        groups, width = attention.pop("num_query_groups", None), ffn.pop("ffn_hidden_size", None)
        if groups is not None:
            attention["n_heads_in_group"] = (args.num_attention_heads or 0) // groups
        if width is not None:
            ffn["ffn_mult"] = _multiplier(width, args.hidden_size or 0)
        out.append(
            {**{name: value for name, value in block.items() if name != "mlp"}, "attention": attention, "ffn": ffn}
        )
    return out


def _multiplier(width: int, hidden: int) -> float:
    """That of an MLP of this width; half of a unit is taken off, lest rounding makes it the next multiple of 256."""
    return 3 * (width - 0.5) / (2 * hidden)


def _facts(settings: Mapping[str, Any]) -> dict[str, Any]:
    configs, heads, hidden = (settings.get(name) for name in ("block_configs", "num_attention_heads", "hidden_size"))
    if type(heads) is not int or type(hidden) is not int or heads < 1 or hidden < 1:
        return {}  # `described` says what is wrong with them
    try:
        blocks = parse_blocks(configs, heads, hidden)
    except ValueError as error:
        raise RequestError(
            f"config.json {error}", hint="Megatron-LM builds layers of different sizes from block_configs alone"
        ) from None
    if len(blocks) != settings.get("num_hidden_layers"):
        raise RequestError(
            f"config.json says num_hidden_layers {settings.get('num_hidden_layers')!r:.80}, block_configs {len(blocks)}"
        )
    groups, width = first_sizes(blocks)
    return {"num_query_groups": groups, "ffn_hidden_size": width, ENCODED: _encoded(settings)}


def _encoded(settings: Mapping[str, Any]) -> str:
    """The text that Megatron-LM reads.

    Its parser wants one n_heads_in_group for all layers; its builder takes a layer's own num_query_groups as well.
    """
    heads, section = settings["num_attention_heads"], settings.get("rope_parameters") or settings.get("rope_scaling")
    rope = section if isinstance(section, dict) else {}
    first, blocks = None, []
    for block in settings["block_configs"]:
        attention = dict(block["attention"])
        per_group = attention.get("n_heads_in_group")
        first = first or per_group
        if per_group != first and per_group is not None:
            attention |= {"n_heads_in_group": None, "num_query_groups": heads // per_group}
        blocks.append({**block, "attention": {"n_heads_in_group": None, **attention}})
    return json.dumps(
        {
            "hidden_act": settings.get("hidden_act"),
            "num_hidden_layers": len(blocks),
            "hidden_size": settings["hidden_size"],
            "num_attention_heads": heads,
            "tie_word_embeddings": bool(settings.get("tie_word_embeddings")),
            "rope_theta": rope.get("rope_theta", settings.get("rope_theta")),
            "rope_scaling": {"factor": rope.get("factor")},
            "block_configs": blocks,
        }
    )


def _misfits(args: ModelArgs) -> list[str]:
    out = list(llama.uneven_heads(args))
    if not out and args.head_dim != (args.hidden_size or 0) // (args.num_attention_heads or 1):
        out.append(f"head_dim is {args.head_dim}, its heads are hidden_size / num_attention_heads wide")
    if args.rope_scaling != "llama3":
        out.append("Megatron-LM builds layers of different sizes with the rotary embedding of Llama 3.1 only")
    try:
        blocks = _blocks(args)
    except ValueError as error:
        return [*out, f"{ENCODED} {error}"]
    if len(blocks) != args.num_layers:
        out.append(f"{ENCODED} describes {len(blocks)} layers of {args.num_layers}")
    odd = [b.ffn_hidden_size for b in blocks if b.ffn_hidden_size and b.ffn_hidden_size % 256]
    if odd:
        out.append(f"an MLP is {odd[0]} wide, which is no multiple of 256, as every ffn_mult gives")
    return out


MODEL = LlamaModel(
    name="nemotron-nas",
    architecture="DeciLMForCausalLM",
    needs={
        **config.LLAMA,
        **config.NO_BIAS,
        "num_experts": (UNSET,),
        "rope_scaling": (UNSET, "linear", "llama3", "yarn"),
        ENCODED: (SET,),
    },
    settings=_settings,
    uneven=_rules,
    misfits=_misfits,
    facts=_facts,
    aliases=("deci", "nemotron_nas"),
)
