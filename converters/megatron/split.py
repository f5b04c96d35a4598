"""How one tensor is divided among the ranks of a job. No I/O.

Which axis of which tensor is divided stands in `tensor_axes`.

A gated MLP, tp 2: a rank's rows are [gate; up], but the whole tensor is all gates, then all ups, whatever tp was:

    linear_fc1.weight      rank 0 has      rank 1 has
    0    +-----------+     +-----------+
         | gate      |     | gate 0    |   +-----------+
    F/2  |- - - - - -|     |-----------|   | gate 1    |
         |           |     | up 0      |   |-----------|
    F    |-----------|     +-----------+   | up 1      |
         | up        |                     +-----------+
    3F/2 |- - - - - -|     gate 0 = rows 0 to F/2, up 0 = rows F to 3F/2
         |           |
    2F   +-----------+

Query, key and value lie group by group, so a plain cut of the rows gives each rank whole groups. With fewer groups than
ranks (core 0.16) the rows are still cut into equal parts, through a group, and gathered when the model runs:

    linear_qkv.weight, 2 groups of 2 heads     | q0 q1 k0 v0 | q2 q3 k1 v1 |
    tp 2                                       | rank 0      | rank 1      |
    tp 4                                       | 0    | 1    | 2    | 3    |
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from converters.box import Box
from converters.errors import RequestError
from converters.megatron.layout import DataParallelGroup
from converters.megatron.pipeline import divisors, list_nearest
from converters.megatron.tensor_axes import LAYER, OUTER, TOWER
from converters.model_parts import REPLICATED, language_name, split_part
from converters.names import printable
from converters.words import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from converters.megatron.layout import Layout
    from converters.megatron.outline import Outline
    from converters.megatron.pipeline import Pipeline


@dataclass(frozen=True, slots=True)
class Split:
    """How a parameter is divided.

    Attributes:
        axis: Axis divided over tensor parallelism; None if every tensor-parallel rank holds all of it.
        gated: First projection of an MLP: when the model is gated, its rows are gate then up, each divided alone.
        expert: Number of the expert it belongs to (divided over ep, and over etp in place of tp); None if dense.
    """

    axis: int | None
    gated: bool = False
    expert: int | None = None


@dataclass(frozen=True, slots=True)
class Shard:
    """Elements of a tensor that the ranks with some model-parallel coordinates hold.

    Attributes:
        box: In the coordinates of the whole tensor.
        local: The same elements in the coordinates of the part of this tensor that those ranks have in memory.
        tp: Their tensor-parallel rank, that of the expert grid for an expert; None: every one holds it.
        ep: Their expert-parallel rank; None for what does not belong to an expert (then `tp` is of the dense grid).
    """

    box: Box
    local: Box
    tp: int | None
    ep: int | None = None


# modules that are known, of names that are not, and never divided: behind `layers.N.`
_REPLICATED = re.compile(
    r".*\.layer_norm_(weight|bias)|\w+_attention\.core_attention\.indexer\..*|mlp\.router\..*"
    r"|(.*\.)?\w*_?(linear_proj|linear_fc2|out_proj)\.bias|(.*\.)?(\w*_)?(layernorm|norm)\.(weight|bias)"
)
_PROJECTION = re.compile(r"encoder\.(linear_fc[12]\.\w+)")
_PARALLEL = re.compile(r".*\.linear_(qkv|proj|fc[12]|q|kv)\b")
# ParallelLinearAdapter of Megatron-Bridge, peft/utils.py: linear_in is divided as its base is, linear_out over its rows
_ADAPTER = re.compile(
    r"(?P<base>(?!mlp\.experts\.).*\.(?:linear_\w+|out_proj))\.adapter\.linear_(?P<side>in|out)\.weight"
)
_WITHIN = re.compile(
    r"(?:(?:decoder|encoder)\.layers|mtp\.layers)\.\d+\."
    r"(?:transformer_layer\.|mtp_model_layer\.(?:layers\.\d+\.)?)?"
    r"(?:mlp\.experts\.(?P<expert>\d+)\.)?(?P<tail>.*)",
    re.DOTALL,
)


def _tail_rule(tail: str) -> Split | None:
    if (adapter := _ADAPTER.fullmatch(tail)) is not None:
        base = _tail_rule(f"{adapter['base']}.weight")
        if base is None or base.axis is None:
            return None
        return Split(base.axis) if adapter["side"] == "in" else Split(0, base.gated)
    if (axes := LAYER.get(tail.replace("inter_attention.", "cross_attention.", 1))) is not None:
        return Split(axes.divided, gated=".linear_fc1." in tail and axes.divided == 0)
    return Split(None) if _REPLICATED.fullmatch(tail) else None


def split_rule(name: str) -> Split:
    """How the parameter of a canonical name (without `optimizer.state.*`) is divided.

    Raises:
        RequestError: The name is not one of Megatron-Core's.
    """
    part, inner = split_part(name)
    rule = _part_rule(part, inner) if language_name(part) is None else _stack_rule(inner) or _outer_rule(inner)
    if rule is None:
        raise RequestError(
            f"distckpt does not know how {printable(name)} is divided over tensor parallelism",
            hint="only --tp 1 is safe for a model with parameters that Megatron-Core does not have",
            tensor=name,
        )
    return rule


def _stack_rule(name: str) -> Split | None:
    """Of a parameter in a layer."""
    within = _WITHIN.fullmatch(name)
    if within is None or within["expert"] is None:
        return None if within is None else _tail_rule(within["tail"])
    rule = _tail_rule("mlp.experts." + within["tail"])
    return None if rule is None else Split(rule.axis, rule.gated, expert=int(within["expert"]))


def _outer_rule(name: str) -> Split | None:
    """Of a parameter around the layers."""
    return Split(OUTER[name].divided) if name in OUTER else None


def _part_rule(part: str, name: str) -> Split | None:
    """Of a parameter of a part beside the language model."""
    if part in REPLICATED:  # unless it was built of Megatron's modules
        return None if _PARALLEL.match(name) else Split(None)
    if part == "vision_projection.":
        projection = _PROJECTION.fullmatch(name)
        return None if projection is None else _tail_rule(f"mlp.{projection[1]}")
    return Split(TOWER[name].divided) if name in TOWER else _stack_rule(name)


_HEAD_NORM = re.compile(r".*\.self_attention\.[qk]_layernorm\.weight")
_MLA_DOWN = re.compile(r".*\.self_attention\.linear_(?:q|kv)_down_proj\.weight")


def _rule(name: str, layout: Layout, outline: Outline) -> Split:
    """The rule as far as it matters: with tp 1 an unknown tensor is simply whole."""
    try:
        rule = split_rule(name)
    except RequestError:
        if layout.tp == layout.expert_tp == layout.ep == 1:
            return Split(None)
        raise
    if outline.mla_down_split and rule.axis is None and _MLA_DOWN.fullmatch(name):
        return Split(0)
    return Split(0) if outline.divided_norms and _HEAD_NORM.fullmatch(name) else rule


def shards(name: str, shape: Sequence[int], layout: Layout, outline: Outline) -> list[Shard]:
    """The boxes that the model-parallel ranks of a job hold; together they tile the tensor exactly.

    A gated projection has two for each rank, gate and up, in this order; what is replicated has one.

    Args:
        name: Canonical name, without `optimizer.state.*`.

    Raises:
        RequestError: It cannot be divided so.
    """
    rule = _rule(name, layout, outline)
    ep = None if rule.expert is None else _expert_home(name, rule.expert, layout, outline)
    if rule.axis is None:
        return list(_cut(tuple(shape), None, 1, 1, ep))
    parts = layout.tp if ep is None else layout.expert_tp
    gate_stated = parts > 1 or outline.gated is not None
    halves = 2 if rule.gated and gate_stated and outline.gates(name) else 1
    if rule.axis >= len(shape) or shape[rule.axis] % (parts * halves):
        raise _indivisible(name, shape, rule, parts, halves)
    return list(_cut(tuple(shape), rule.axis, parts, halves, ep))


@lru_cache(maxsize=4096)  # the same for all layers and all experts of a rank
def _cut(shape: tuple[int, ...], axis: int | None, parts: int, halves: int, ep: int | None) -> tuple[Shard, ...]:
    if axis is None:
        every_element = Box.whole(shape)
        return (Shard(every_element, every_element, None, ep),)
    size = shape[axis] // (parts * halves)
    before, behind = (0,) * axis, (0,) * (len(shape) - axis - 1)
    extent = (*shape[:axis], size, *shape[axis + 1 :])

    def box(at: int) -> Box:
        return Box((*before, at * size, *behind), extent)

    return tuple(Shard(box(half * parts + tp), box(half), tp, ep) for tp in range(parts) for half in range(halves))


def _expert_home(name: str, expert: int, layout: Layout, outline: Outline) -> int:
    """The expert-parallel rank of an expert: rank r has experts r * n to (r + 1) * n - 1 (moe/experts.py)."""
    if layout.ep == 1:
        return 0
    count = outline.num_experts or 0
    if count % layout.ep or not expert < count:
        raise RequestError(
            f"{counted(count, 'expert')} cannot be divided among --ep {layout.ep}",
            hint=f"--ep must divide {count}: try {list_nearest(divisors(count), layout.ep)}" if count else None,
            tensor=name,
        )
    return expert // (count // layout.ep)


def _indivisible(name: str, shape: Sequence[int], rule: Split, parts: int, halves: int) -> RequestError:
    option = "tp" if rule.expert is None else "etp"
    if rule.axis is None or rule.axis >= len(shape):
        return RequestError(f"{name} has the shape {tuple(shape)}; that is not a tensor divided over --{option}")
    size = shape[rule.axis] // halves if shape[rule.axis] % halves == 0 else shape[rule.axis]
    return RequestError(
        f"{size} {'rows' if rule.axis == 0 else 'columns'} cannot be split over --{option} {parts}",
        details=[f"{name}  {tuple(shape)}"],
        hint=f"--{option} must divide {size}: try {list_nearest(divisors(size), parts)}",
        tensor=name,
    )


def holders(name: str, shard: Shard, layout: Layout, outline: Outline, pipeline: Pipeline | None = None) -> list[int]:
    """Every rank that holds a shard, ascending for each stage; the first saves it without a fully parallel save.

    Args:
        name: Canonical name, without `optimizer.state.*`.
        pipeline: `layout.pipeline(outline.num_layers, outline.mtp_layers)`, if it is at hand.
    """
    if layout.pp == 1:
        stages = [0]
    else:
        pipeline = pipeline or layout.pipeline(outline.num_layers, outline.mtp_layers)
        stages = list(dict.fromkeys(stage.pp for stage in pipeline.homes(name, tied=outline.tied)))
    every_tp = range(layout.tp if shard.ep is None else layout.expert_tp)
    tps = every_tp if shard.tp is None else (shard.tp,)
    groups = ([DataParallelGroup(pp, tp, shard.ep) for tp in tps] for pp in stages)
    return [rank for stage in groups for rank in sorted(rank for group in stage for rank in layout.group_ranks(group))]


def padded_vocab(rows: int, make_divisible_by: int, tp: int) -> int:
    """Rows of the embedding: the vocabulary rounded up to a multiple of `make_divisible_by * tp`.

    Megatron-LM, training/tokenizer/tokenizer.py (`_vocab_size_with_padding`); from core 0.9 on a padded size that a
    checkpoint states is kept as it is.
    """
    multiple = make_divisible_by * tp
    return -(-rows // multiple) * multiple
