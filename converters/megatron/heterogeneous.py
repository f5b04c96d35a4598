"""Layers of different sizes, as an architecture search finds them: what attention and MLP of each layer are.

    {"block_configs": [{"attention": {"n_heads_in_group": 8, "no_op": false, "replace_with_linear": false},
                        "ffn": {"ffn_mult": 2.625, "no_op": false, "replace_with_linear": false}}, ...], ...}

Megatron-LM reads this text, the config.json of Llama-Nemotron, from `--heterogeneous-layers-config-path` and keeps it among
its arguments as `heterogeneous_layers_config_encoded_json`.

Source: core/transformer/heterogeneous/heterogeneous_config.py, core_v0.16.1 and core_v0.19.0.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from converters.names import printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from converters.catalog import TensorInfo

ENCODED = "heterogeneous_layers_config_encoded_json"
"""The argument of Megatron-LM that keeps the text."""

# what is understood of a section; all else must be null or false
_SWITCHES = ("no_op", "replace_with_linear")
_SIZES = {"attention": ("n_heads_in_group", "num_query_groups"), "ffn": ("ffn_mult", "ffn_hidden_size")}
_MOST = 1 << 31
_MULTIPLE = 256  # of which every MLP's width is one, if a multiplier states it


@dataclass(frozen=True, slots=True)
class Block:
    """One layer.

    Attributes:
        attention: "full", "linear" (one matrix in its place) or "none".
        mlp: The same of the MLP.
        query_groups: Of the attention; None without one.
        ffn_hidden_size: Width of the MLP; None without one.
    """

    attention: str
    mlp: str
    query_groups: int | None = None
    ffn_hidden_size: int | None = None


@lru_cache(maxsize=8)
def read_blocks(text: str, heads: int, hidden: int) -> tuple[Block, ...]:
    """The layers that the argument `ENCODED` describes.

    Args:
        text: Its value.
        heads: Attention heads of the model.
        hidden: Its hidden size.

    Raises:
        ValueError: It is no such text, or says something of a layer that is not understood.
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("is not JSON") from None
    return parse_blocks(document.get("block_configs") if isinstance(document, dict) else None, heads, hidden)


def parse_blocks(configs: Any, heads: int, hidden: int) -> tuple[Block, ...]:
    """The layers of a list `block_configs`.

    Raises:
        ValueError: It is none, or says something of a layer that is not understood.
    """
    if not isinstance(configs, list) or not configs:
        raise ValueError("has no block_configs, which say what each layer is")
    blocks = tuple(_block(number, config, heads, hidden) for number, config in enumerate(configs))
    if not any(block.attention == "full" for block in blocks):
        raise ValueError("has no layer with attention")
    return blocks


def _block(number: int, config: Any, heads: int, hidden: int) -> Block:
    sections = config if isinstance(config, dict) else {}
    attention, groups = _section(number, "attention", sections.get("attention"))
    mlp, width = _section(number, "ffn", sections.get("ffn") or sections.get("mlp"))
    unknown = sorted(name for name, value in sections.items() if name not in ("attention", "ffn", "mlp") and value)
    if unknown:
        raise ValueError(f"says {printable(unknown[0])[:80]} of layer {number}, which is not understood")
    if attention == mlp == "none":
        raise ValueError(f"says that layer {number} has neither attention nor an MLP, so that it has no tensors")
    per_group = groups["n_heads_in_group"]
    if per_group is not None:
        if heads % per_group:
            raise ValueError(
                f"says n_heads_in_group {per_group} of layer {number}, which {heads} heads do not divide into"
            )
        per_group = heads // per_group
    size = width["ffn_hidden_size"]
    return Block(
        attention,
        mlp,
        groups["num_query_groups"] or per_group,
        size if size is not None or width["ffn_mult"] is None else mlp_width(width["ffn_mult"], hidden),
    )


def _section(number: int, name: str, section: Any) -> tuple[str, dict[str, Any]]:
    """What attention or MLP are, and the numbers that state their size."""
    if not isinstance(section, dict):
        raise ValueError(f"says nothing of {name} of layer {number}")
    sizes = {key: section.get(key) for key in _SIZES[name]}
    for key, value in section.items():
        text = f"says {printable(str(key))[:80]} {printable(repr(value))[:80]} of {name} of layer {number}"
        if key in _SWITCHES:
            wrong = not isinstance(value, bool)
        elif key in sizes:
            number_types = (int, float) if key == "ffn_mult" else (int,)
            wrong = value is not None and (type(value) not in number_types or not 0 < value < _MOST)
        else:
            wrong = value is not None and value is not False
        if wrong:
            raise ValueError(f"{text}, which is not understood")
    kind = "none" if section.get("no_op") else "linear" if section.get("replace_with_linear") else "full"
    stated = [key for key, value in sizes.items() if value is not None]
    if kind == "full" and not stated:
        raise ValueError(f"says neither {' nor '.join(sizes)} of {name} of layer {number}")
    if kind != "full" and stated:  # Megatron-LM refuses it, too
        raise ValueError(f"says {stated[0]} of {name} of layer {number}, which has none")
    return kind, sizes


def mlp_width(multiplier: float, hidden: int) -> int:
    """Width of an MLP that a multiplier states: two thirds of so many hidden sizes, up to a multiple of 256."""
    return -(-int(2 * multiplier * hidden / 3) // _MULTIPLE) * _MULTIPLE


def first_sizes(blocks: tuple[Block, ...]) -> tuple[int | None, int | None]:
    """Query groups and MLP width of the first layers that have them."""
    groups = next((block.query_groups for block in blocks if block.query_groups), None)
    return groups, next((block.ffn_hidden_size for block in blocks if block.ffn_hidden_size), None)


def block_departures(
    blocks: tuple[Block, ...], weights: Mapping[str, TensorInfo], *, heads: int, dim: int, hidden: int
) -> Iterator[str]:
    """Sentences on layers whose tensors are not those of what the arguments say.

    Args:
        blocks: What the arguments say.
        weights: The language model's, by canonical name.
        heads: Attention heads.
        dim: Size of a head.
        hidden: Hidden size.
    """
    for number, block in enumerate(blocks):
        expected = {
            "self_attention.linear_qkv": ((heads + 2 * (block.query_groups or 0)) * dim, hidden),
            "self_attention.linear_proj": (hidden, heads * dim),
            "self_attention": (hidden, hidden),
            "mlp.linear_fc1": (2 * (block.ffn_hidden_size or 0), hidden),
            "mlp.linear_fc2": (hidden, block.ffn_hidden_size or 0),
            "mlp": (hidden, hidden),
        }
        for module, shape in expected.items():
            kind = block.attention if module.startswith("self_attention") else block.mlp
            wanted = shape if kind == ("full" if "." in module else "linear") else None
            tensor = weights.get(f"decoder.layers.{number}.{module}.weight")
            stored = None if tensor is None else tensor.shape
            if stored != wanted:
                name = f"decoder.layers.{number}.{module}.weight"
                is_what = f"is {stored}" if stored else "does not exist"
                yield f"{name} {is_what}, {ENCODED} says {wanted or 'that there is none'}"
