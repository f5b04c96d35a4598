"""What the parameters of one rank of a Megatron-LM legacy checkpoint are: parts of which tensors, in which order.

A rank's file has module names with the numbers of that rank: layers count within the pipeline stage (or model chunk),
experts within the expert-parallel rank. A local tensor is described by its pieces: end to end, in the order in which its
elements lie, they are boxes of whole tensors.

    mlp.linear_fc1.weight of tp rank 1, gated     | gate rows of rank 1 | up rows of rank 1 |      2 boxes of one tensor
    mlp.experts.weight2 (GroupedMLP)              | column 0 | column 1 | ...                      boxes of each expert
    query_key_value.weight, version 0             | q0 q1 .. | k0 k1 .. | v0 v1 .. |               3 boxes for each head

Sources: Megatron-LM, training/checkpointing.py (`fix_query_key_value_ordering`, up to 0.16), megatron/legacy/model
(deleted after 0.16); Megatron-Core, transformer/moe/experts.py (`GroupedMLP`), models/gpt/gpt_layer_specs.py
(`sharded_state_dict_keys_map`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from converters.box import Box
from converters.errors import FormatError
from converters.names import parse_key
from converters.registration import Order

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from converters.parallel.split import Shard

__all__ = ["Piece", "QkvOrder", "layer_number", "local_experts", "module_order", "pieces", "plain_name", "segments"]

_WRAPPERS = re.compile(r"(?:(?:module|model|language_model)\.)+(?=(?:embedding|decoder|encoder|mtp|output_layer)\.)")
_LAYER = re.compile(r"((?:decoder|encoder|mtp)\.layers)\.(\d+)\.")
_GROUPED = re.compile(r"(.*\.mlp\.experts)\.(linear_fc[12])\.(weight|bias)(\d*)")
_SEQUENTIAL = re.compile(r"(.*\.mlp\.experts)\.local_experts\.(\d+)\.(.*)")
_STACKED = re.compile(r"(.*\.mlp\.experts)\.(weight|bias)([12])")
_LOCAL_NORM = re.compile(r"(.*\.layers\.\d+\.)(input_layernorm|pre_mlp_layernorm)\.(weight|bias)")
_NORM_HOME = {"input_layernorm": "self_attention.linear_qkv", "pre_mlp_layernorm": "mlp.linear_fc1"}
# Megatron-LM's own models, before Megatron-Core
_BEFORE_CORE = [
    (re.compile(pattern), name)
    for pattern, name in [
        (r"^word_embeddings_for_head\.weight$", "output_layer.weight"),
        (r"^language_model\.(?=embedding\.|output_layer\.)", ""),
        (r"^(?:language_model\.)?(?:transformer|encoder)\.(?=layers\.\d+\.|final_)", "decoder."),
        (r"\.final_norm\.", ".final_layernorm."),
        (r"(\.layers\.\d+)\.input_(?:layer)?norm\.", r"\1.self_attention.linear_qkv.layer_norm_"),
        (r"(\.layers\.\d+)\.post_attention_(?:layer)?norm\.", r"\1.mlp.linear_fc1.layer_norm_"),
        (r"(\.layers\.\d+)\.(?:self_)?attention\.query_key_value\.", r"\1.self_attention.linear_qkv."),
        (r"(\.layers\.\d+)\.(?:self_)?attention\.dense\.", r"\1.self_attention.linear_proj."),
        (r"\.mlp\.dense_h_to_4h\.", ".mlp.linear_fc1."),
        (r"\.mlp\.dense_4h_to_h\.", ".mlp.linear_fc2."),
    ]
]


@dataclass(frozen=True, slots=True)
class QkvOrder:
    """How rows of a fused query, key and value projection lie before checkpoint_version 2.

    Attributes:
        version: 0: `[3, heads, dim]`; 1: `[heads, dim, 3]`. From 2 on `[heads, 3, dim]`.
        dim: Rows of one head.
    """

    version: int
    dim: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a local tensor that belongs to one whole tensor.

    Attributes:
        name: Canonical name of that tensor.
        transposed: It lies column by column.
    """

    name: str
    shape: tuple[int, ...]
    transposed: bool = False


def plain_name(key: str, *, before_core: bool) -> str:
    """A module name without wrappers and, for models older than Megatron-Core, in the words of Megatron-Core."""
    if before_core:
        for pattern, name in _BEFORE_CORE:
            key = pattern.sub(name, key)
        return key
    found = _WRAPPERS.match(key)
    return key[found.end() :] if found else key


def layer_number(name: str) -> tuple[str, int] | None:
    """`("decoder.layers", 3)` for a parameter of a layer."""
    found = _LAYER.match(name)
    return (found[1], int(found[2])) if found else None


def local_experts(shapes: Mapping[str, Sequence[int]], stated: int | None) -> int:
    """How many experts of a layer a rank has; 0 for a dense model.

    Args:
        shapes: Of the rank's parameters, by name.
        stated: What the arguments say; a matrix of all experts (GroupedMLP) does not show their number.

    Raises:
        FormatError: Nothing tells.
    """
    count = 0
    for name, shape in shapes.items():
        if found := _SEQUENTIAL.fullmatch(name):
            count = max(count, int(found[2]) + 1)
        elif found := _GROUPED.fullmatch(name):
            count = max(count, int(found[4]) + 1 if found[4] else shape[0] if len(shape) == 3 else 0)
        elif _STACKED.fullmatch(name):
            if not stated:
                raise FormatError(
                    f"{name} holds several experts in one matrix (GroupedMLP), and num_experts is not in the arguments",
                    tensor=name,
                )
            count = stated
    return count


def module_order(names: Iterable[str]) -> Order | None:
    """How the modules of a model are made, by the names of its parameters; None if they do not tell."""
    names = list(names)
    fused = any(".layer_norm_" in name for name in names)
    if not fused and not any(".self_attention.linear_qkv." in name for name in names):
        return None  # with multi-latent attention either kind of layers may keep its norms apart
    experts = "grouped"
    if any(_SEQUENTIAL.fullmatch(name) for name in names):
        experts = "sequential"
    elif any(_STACKED.fullmatch(name) for name in names):
        experts = "stacked"
    return Order(fused, experts)


def pieces(
    name: str, shape: tuple[int, ...], names: Iterable[str], *, offset: int, first_expert: int, experts: int
) -> list[Piece]:
    """The tensors that a local parameter is a part of.

    Args:
        name: Its name in the rank's file, from `plain_name`.
        names: All names of the same model chunk: what a norm belongs to depends on them.
        offset: Number of the chunk's first layer in the whole model.
        first_expert: Number of the rank's first expert in the whole model.
        experts: Experts of a layer that the rank has.
    """
    if norm := _LOCAL_NORM.fullmatch(name):
        # Megatron's own layers have norms apart; saved for distribution they are named after the layer behind them
        home = _NORM_HOME[norm[2]]
        plain_attention = f"{norm[1]}self_attention.linear_qkv.weight" in names
        if plain_attention and f"{norm[1]}{home}.weight" in names:
            name = f"{norm[1]}{home}.layer_norm_{norm[3]}"
    name = _LAYER.sub(lambda m: f"{m[1]}.{int(m[2]) + offset}.", name, count=1)
    if found := _SEQUENTIAL.fullmatch(name):
        return [Piece(_whole(f"{found[1]}.{first_expert + int(found[2])}.{found[3]}"), shape)]
    if found := _GROUPED.fullmatch(name):
        if found[4]:
            number = first_expert + int(found[4])
            return [Piece(_whole(f"{found[1]}.{number}.{found[2]}.{found[3]}"), shape)]
        stem = (found[1], f"{found[2]}.{found[3]}")  # one tensor for all, experts along its first axis
        return [Piece(_whole(f"{stem[0]}.{first_expert + i}.{stem[1]}"), shape[1:]) for i in range(shape[0])]
    if found := _STACKED.fullmatch(name):
        return _stacked(found, name, shape, first_expert, experts)
    return [Piece(_whole(name), shape)]


def _stacked(found: re.Match[str], name: str, shape: tuple[int, ...], first_expert: int, experts: int) -> list[Piece]:
    """GroupedMLP: `weight1.view(experts, hidden, -1)`, `weight2.view(experts, -1, hidden)`, each transposed."""
    axis = 1 if found[3] == "1" else 0
    if found[2] != "weight" or len(shape) != 2 or not experts or shape[axis] % experts:
        raise FormatError(f"{name} {list(shape)} cannot be divided among {experts} experts", tensor=name)
    rows, columns = (shape[1] // experts, shape[0]) if axis == 1 else (shape[1], shape[0] // experts)
    stem = (found[1], f"linear_fc{found[3]}.weight")
    return [Piece(f"{stem[0]}.{first_expert + i}.{stem[1]}", (rows, columns), True) for i in range(experts)]


def _whole(name: str) -> str:
    parsed = parse_key(name)
    return name if parsed.axes else parsed.template.format()


def segments(piece: Piece, mine: Sequence[Shard], order: QkvOrder | None) -> list[Box]:
    """Boxes of the whole tensor, in the order in which the piece's elements lie.

    Args:
        piece: From `pieces`.
        mine: The rank's shards of that tensor, from `converters.parallel.split.shards`.
        order: For a fused query, key and value projection of an old checkpoint.

    Raises:
        FormatError: The shape of the piece is not that of the shards.
    """
    mine = sorted(mine, key=lambda shard: shard.local.start)
    extent = tuple(max(shard.local.stop[axis] for shard in mine) for axis in range(len(piece.shape)))
    if extent != piece.shape:
        raise FormatError(f"{piece.name}: a rank has {list(piece.shape)} of it, {list(extent)} were expected")
    if piece.transposed:
        return [_column(shard.box, n) for n in range(piece.shape[1]) for shard in mine]
    if order is not None and ".self_attention.linear_qkv." in piece.name and ".layer_norm_" not in piece.name:
        return _qkv_rows(mine[0].box, order, piece.name)
    return [shard.box for shard in mine]


def _column(box: Box, number: int) -> Box:
    return Box((box.start[0], box.start[1] + number), (box.shape[0], 1))


def _qkv_rows(box: Box, order: QkvOrder, name: str) -> list[Box]:
    heads, left = divmod(box.shape[0], 3 * order.dim)
    if left:
        raise FormatError(f"{name}: {box.shape[0]} rows are not 3 times heads of {order.dim}", tensor=name)
    inner = box.start[1:], box.shape[1:]

    def rows(at: int, count: int) -> Box:
        return Box((box.start[0] + at, *inner[0]), (count, *inner[1]))

    if order.version == 0:
        return [rows((head * 3 + kind) * order.dim, order.dim) for kind in range(3) for head in range(heads)]
    return [
        rows((head * 3 + kind) * order.dim + n, 1)
        for head in range(heads)
        for n in range(order.dim)
        for kind in range(3)
    ]
