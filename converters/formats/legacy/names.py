"""What the parameters of one rank of a Megatron-LM legacy checkpoint are: parts of which tensors, in which order.

A rank's file has module names with the numbers of that rank: layers count within the pipeline stage (or model chunk),
experts within the expert-parallel rank. A local tensor is described by its pieces: end to end, in the order in which its
elements lie, they are boxes of whole tensors.

    mlp.linear_fc1.weight of tp rank 1, gated     | gate rows of rank 1 | up rows of rank 1 |      2 boxes of one tensor
    mlp.experts.weight2 (GroupedMLP)              | column 0 | column 1 | ...                      boxes of each expert
    mixer.in_proj.weight                          | z | x | B | C | dt |        rows of rank 1 of five tensors
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
from converters.errors import FormatError, RequestError
from converters.megatron.rank_state_dict import column
from converters.names import parse_key, split_wrapper
from converters.param_order import Order

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from converters.megatron.split import Shard

_LAYER = re.compile(r"((?:language_model\.)?(?:decoder|encoder|mtp)\.layers)\.(\d+)\.")
_GROUPED = re.compile(r"(.*\.mlp\.experts)\.(linear_fc[12])\.(weight|bias)(\d*)")
_SEQUENTIAL = re.compile(r"(.*\.mlp\.experts)\.local_experts\.(\d+)\.(.*)")
_STACKED = re.compile(r"(.*\.mlp\.experts)\.(weight|bias)([12])")
_LOCAL_NORM = re.compile(r"(.*\.layers\.\d+\.)(input_layernorm|pre_mlp_layernorm)\.(weight|bias)")
_MIXING = re.compile(
    r"(.*\.layers\.\d+\.(?:(?:mamba_)?mixer|self_attention)\.)(in_proj\.weight|conv1d[._](?:weight|bias))"
)
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
    return split_wrapper(key)[1]


def layer_number(name: str) -> tuple[str, int] | None:
    """`("decoder.layers", 3)` for a parameter of a layer."""
    match = _LAYER.match(name)
    return (match[1], int(match[2])) if match else None


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
        if match := _SEQUENTIAL.fullmatch(name):
            count = max(count, int(match[2]) + 1)
        elif match := _GROUPED.fullmatch(name):
            count = max(count, int(match[4]) + 1 if match[4] else shape[0] if len(shape) == 3 else 0)
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
    direct = any("mixer.conv1d_" in name for name in names)
    return Order(fused, experts, direct, any(".linear_qkv_down_proj." in name for name in names))


def pieces(
    name: str,
    shape: tuple[int, ...],
    shapes: Mapping[str, Sequence[int]],
    *,
    offset: int,
    first_expert: int,
    experts: int,
) -> list[Piece]:
    """The tensors that a local parameter is a part of.

    Args:
        name: Its name in the rank's file, from `plain_name`.
        shapes: Of all parameters of the same model chunk: what a norm belongs to, and where the parts of a mixer's
            projection end, depends on them.
        offset: Number of the chunk's first layer in the whole model.
        first_expert: Number of the rank's first expert in the whole model.
        experts: Experts of a layer that the rank has.
    """
    if norm := _LOCAL_NORM.fullmatch(name):
        # Megatron's own layers have norms apart; saved for distribution they are named after the layer behind them
        home = _NORM_HOME[norm[2]]
        plain_attention = f"{norm[1]}self_attention.linear_qkv.weight" in shapes
        if plain_attention and f"{norm[1]}{home}.weight" in shapes:
            name = f"{norm[1]}{home}.layer_norm_{norm[3]}"
    if ".linear_qkv_down_proj." in name:
        raise RequestError("legacy checkpoints of jobs with --mla-down-proj-fusion are not read", tensor=name)
    parts = _sections(name, shape, shapes)
    if parts:
        return [Piece(_numbered(part, offset), (rows, *shape[1:])) for part, rows in parts]
    name = _numbered(name, offset)
    if match := _SEQUENTIAL.fullmatch(name):
        return [Piece(_canonical(f"{match[1]}.{first_expert + int(match[2])}.{match[3]}"), shape)]
    if match := _GROUPED.fullmatch(name):
        if match[4]:
            number = first_expert + int(match[4])
            return [Piece(_canonical(f"{match[1]}.{number}.{match[2]}.{match[3]}"), shape)]
        stem = (match[1], f"{match[2]}.{match[3]}")  # one tensor for all, experts along its first axis
        return [Piece(_canonical(f"{stem[0]}.{first_expert + i}.{stem[1]}"), shape[1:]) for i in range(shape[0])]
    if match := _STACKED.fullmatch(name):
        return _stacked(match, name, shape, first_expert, experts)
    return [Piece(_canonical(name), shape)]


def _numbered(name: str, offset: int) -> str:
    return _LAYER.sub(lambda m: f"{m[1]}.{int(m[2]) + offset}.", name, count=1)


def _sections(name: str, shape: tuple[int, ...], shapes: Mapping[str, Sequence[int]]) -> list[tuple[str, int]]:
    """Tensors that lie one after the other in a mixer's projection or convolution, and rows of each; usually none.

    The sizes follow from the other parameters of the layer (ssm/mamba_mixer.py, ssm/gated_delta_net.py, sharded_state_dict).
    """
    match = _MIXING.fullmatch(name)
    if match is None or not shape:
        return []
    stem, fused = match[1], match[2].replace("conv1d_", "conv1d.")

    def rows(parameter: str, axis: int = 0) -> int:
        shape_here = shapes.get(stem + parameter, ())
        return shape_here[axis] if axis < len(shape_here) else 0

    inner, heads = rows("out_proj.weight", 1), rows("A_log")
    half = (rows("conv1d.weight") or rows("conv1d_weight")) - inner
    if stem.endswith("mixer."):
        convolution = {"x": inner, "B": half // 2, "C": half // 2}
        projections = [{"z": inner, **convolution, "dt": heads}]
    else:
        convolution = {"query": half // 2, "key": half // 2, "value": inner}
        start, key = {**convolution, "z": inner}, half // 2
        projections = [{**start, "beta": heads, "alpha": heads}, {**start, "f": key, "b": key, "w": inner}]
    possible = projections if fused.startswith("in_proj") else [convolution]
    for sizes in possible:
        if sum(sizes.values()) == shape[0] and min(sizes.values()) > 0:
            return [(f"{stem}{fused}.{part}", size) for part, size in sizes.items()]
    rows_needed = sum(possible[0].values())
    raise FormatError(f"{name} has {shape[0]} rows, other parameters of its layer imply {rows_needed}", tensor=name)


def _stacked(match: re.Match[str], name: str, shape: tuple[int, ...], first_expert: int, experts: int) -> list[Piece]:
    """GroupedMLP: `weight1.view(experts, hidden, -1)`, `weight2.view(experts, -1, hidden)`, each transposed."""
    axis = 1 if match[3] == "1" else 0
    if match[2] != "weight" or len(shape) != 2 or not experts or shape[axis] % experts:
        raise FormatError(f"{name} {list(shape)} cannot be divided among {experts} experts", tensor=name)
    rows, columns = (shape[1] // experts, shape[0]) if axis == 1 else (shape[1], shape[0] // experts)
    stem = (match[1], f"linear_fc{match[3]}.weight")
    return [Piece(f"{stem[0]}.{first_expert + i}.{stem[1]}", (rows, columns), True) for i in range(experts)]


def _canonical(name: str) -> str:
    parsed = parse_key(name)
    return name if parsed.axes else parsed.template.format()


def segments(piece: Piece, shards: Sequence[Shard], order: QkvOrder | None) -> list[Box]:
    """Boxes of the whole tensor, in the order in which the piece's elements lie.

    Args:
        piece: From `pieces`.
        shards: Those of that tensor that the rank has, from `converters.megatron.split.shards`.
        order: For a fused query, key and value projection of an old checkpoint.

    Raises:
        FormatError: The shape of the piece is not that of the shards.
    """
    shards = sorted(shards, key=lambda shard: shard.local.start)
    extent = tuple(max(shard.local.stop[axis] for shard in shards) for axis in range(len(piece.shape)))
    if extent != piece.shape:
        raise FormatError(f"{piece.name}: a rank has {list(piece.shape)} of it, {list(extent)} were expected")
    if piece.transposed:
        return [column(shard.box, n) for n in range(piece.shape[1]) for shard in shards]
    if order is not None and ".self_attention.linear_qkv." in piece.name and ".layer_norm_" not in piece.name:
        return _qkv_rows(shards[0].box, order, piece.name)
    return [shard.box for shard in shards]


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
