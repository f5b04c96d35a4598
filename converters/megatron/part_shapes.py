"""Which tensors of a model do not fit the others: sizes that several tensors have in common, in each part of a model.

    vision_model.decoder.layers.0.mlp.linear_fc2.weight  (1024, 4096)     (hidden, ffn)
    vision_model.decoder.layers.0.mlp.linear_fc1.weight  (4096, 1024)     (ffn or twice that, hidden)

The arguments describe the language model alone; here every size is compared with the same size of other tensors, and
that of most of them counts. Which sizes a tensor has stands in `tensor_axes`.

Facts: Megatron-Core 0.16.1, models/vision/clip_vit_model.py, models/multimodal/llava_model.py, models/T5/t5_model.py,
models/bert/bert_model.py, transformer/attention.py, transformer/mlp.py; Megatron-Bridge 067f987d, peft/utils.py.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any, TypeAlias

from converters.megatron.bridge_families import WIDE_NORMS
from converters.megatron.tensor_axes import LAYER, OUTER, TOWER
from converters.model_parts import LANGUAGE, REPLICATED, language_name, split_part

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from converters.catalog import TensorInfo

Extents: TypeAlias = "dict[tuple[str, str], Counter[int]]"

_LAYER = re.compile(r"((?:decoder|encoder)\.layers|mtp\.layers)\.(\d{1,5})\.(?:transformer_layer\.)?(.*)", re.DOTALL)
_EXPERT = re.compile(r"mlp\.experts\.\d{1,5}\.")


def odd_shapes(weights: Mapping[str, TensorInfo], options: Mapping[str, Any]) -> list[str]:
    """Sentences on tensors whose shapes do not fit those of the others.

    Args:
        weights: The weights of a model, by canonical name.
        options: The training arguments, or the model's configuration.
    """
    radio = "vision_model.embedder.weight" in weights  # RADIO's modules are others than CLIP's
    uneven = any(name.startswith("heterogeneous_") and options[name] for name in options)
    wide = options.get("bridge_family") in WIDE_NORMS
    terms: list[tuple[TensorInfo, list[tuple[str, str]]]] = []
    extents_of: Extents = defaultdict(Counter)
    for name, tensor in weights.items():
        sizes = _sizes_of(name, uneven=uneven, wide=wide)
        if sizes is None or (radio and name.startswith("vision_model.")):
            continue
        terms.append((tensor, sizes))
        for size, extent in zip(sizes, tensor.shape, strict=False):
            extents_of[size][extent] += 1
    most = {size: extents.most_common(1)[0][0] for size, extents in extents_of.items()}
    out = []
    for tensor, sizes in terms:
        expected = tuple(int(size) if size.isdigit() else most.get((scope, size), 0) for scope, size in sizes)
        if tensor.shape != expected:
            out.append(f"{tensor.name} is {tensor.shape}, the other tensors imply {expected}")
    gate = options.get("attention_output_gate")
    widths = (1, 2) if gate is None else (1 + bool(gate),)  # of a query, with its gate
    return [*out, *_ratios(most, widths), *_vision(most, weights, options), *_adapters(weights)]


def gated_by_shape(shapes: Mapping[str, Sequence[int]]) -> bool | None:
    """Whether a first projection has twice the rows that the second has columns, or their adapters have.

    Args:
        shapes: Canonical name -> shape.

    Returns:
        None if there are first projections, but none with its second.
    """
    alone = False
    for name, shape in shapes.items():
        for leaf, counterpart in (("weight", "weight"), ("adapter.linear_out.weight", "adapter.linear_in.weight")):
            if name.endswith(f".linear_fc1.{leaf}"):
                second = shapes.get(f"{name.removesuffix(f'1.{leaf}')}2.{counterpart}")
                if second is not None:
                    return shape[0] == 2 * second[-1]
                alone = True
    return None if alone else False


def _sizes_of(name: str, *, uneven: bool, wide: bool) -> list[tuple[str, str]] | None:
    """`(what it belongs to, size)` of each axis of a tensor; None for one that is not compared here."""
    part, inner = split_part(name)
    if part in REPLICATED or part == "vision_projection." or ".adapter." in name:
        return None
    scope, table = part, OUTER if language_name(name) is not None else TOWER
    if (match := _LAYER.fullmatch(inner)) is not None:
        stack, number, inner = match.groups()
        scope = f"{part}{stack}.{number}" if uneven else f"{part}{stack}"
        table = LAYER
    if (axes := table.get(inner)) is None:
        return None
    hidden = "" if part == LANGUAGE else part
    # norms over all heads: those of queries are wider than those of keys
    sizes = (inner,) if wide and axes.sizes == ("head",) else axes.sizes
    return [(hidden if size == "H" else scope, size) for size in sizes]


# sizes of mixers that are one or another size: D_has_hdim of Mamba; decay and time steps of gdn2, for each key head
_EITHER = {
    "skip": ("mamba_heads", "inner"),
    "decay": ("delta_heads",),
    "time_step": ("delta_heads", "key"),
}


def _ratios(most: Mapping[tuple[str, str], int], widths: tuple[int, ...]) -> Iterator[str]:
    """Sizes that are multiples of others, stack by stack."""
    for scope in dict.fromkeys(scope for scope, _ in most):
        fc1, ffn, qkv, heads = (most.get((scope, size), 0) for size in ("fc1", "ffn", "qkv", "heads"))
        for size, choices in _EITHER.items():
            rows = most.get((scope, size), 0)
            if rows and rows not in (fitting := [most.get((scope, choice), 0) for choice in choices]) and any(fitting):
                yield f"{scope}: {size} of its mixers are {rows}, which is none of {fitting}"
        if fc1 and ffn and fc1 not in (ffn, 2 * ffn):
            yield f"{scope}: linear_fc1 has {fc1} rows, linear_fc2 {ffn} columns: neither as many nor half of them"
        if qkv and heads and not any(_groups(heads, qkv - width * heads) for width in widths):
            yield f"{scope}: linear_qkv has {qkv} rows, which do not fit the {heads} columns of linear_proj"
        cross, pairs = (most.get((scope, size), 0) for size in ("cross", "cross_kv"))
        if cross and pairs and not _groups(cross, pairs):
            yield f"{scope}: linear_kv has {pairs} rows, which do not fit the {cross} rows of linear_q"


def _groups(heads: int, rows: int) -> bool:
    """Whether `rows` are keys and values of query groups of `heads` elements of queries."""
    return rows > 0 and rows % 2 == 0 and heads % (rows // 2) == 0


def _vision(
    most: Mapping[tuple[str, str], int], weights: Mapping[str, TensorInfo], options: Mapping[str, Any]
) -> Iterator[str]:
    """A tower's positions are those of a square image and its class tokens; the projection joins two hidden sizes."""
    tower, language = most.get(("vision_model.", "H"), 0), most.get(("", "H"), 0)
    positions, tokens = (most.get(("vision_model.", size), 0) for size in ("positions", "tokens"))
    square = options.get("img_h") == options.get("img_w")
    if positions and square and "vision_model.ln_post.weight" not in weights:
        patches = positions - tokens
        if patches < 1 or math.isqrt(patches) ** 2 != patches:
            behind = f"and {tokens} of class_token" if tokens else "and no class_token"
            yield f"vision_model has {positions} positions {behind}, which are of no square image"
    first, second = (weights.get(f"vision_projection.encoder.linear_fc{n}.weight") for n in (1, 2))
    if first is None or second is None or len(first.shape) != 2 or len(second.shape) != 2:
        return
    if tower and first.shape[1] not in (tower, 4 * tower):  # four patches as one, with pixel shuffle
        yield f"{first.name} is {first.shape}, the vision tower's hidden size is {tower}"
    if language and second.shape[0] != language:
        yield f"{second.name} is {second.shape}, the language model's hidden size is {language}"
    if first.shape[0] not in (second.shape[1], 2 * second.shape[1]):
        yield f"{first.name} is {first.shape}, but {second.name} {second.shape}"
    for linear in (first, second):
        bias = weights.get(f"{linear.name.removesuffix('weight')}bias")
        if bias is not None and bias.shape != linear.shape[:1]:
            yield f"{bias.name} is {bias.shape}, but {linear.name} {linear.shape}"


def _adapters(weights: Mapping[str, TensorInfo]) -> Iterator[str]:
    """Both matrices of an adapter share their rank, and fit the weight that they change."""
    for name, inward in weights.items():
        stem, adapter, _ = name.partition(".adapter.linear_in.weight")
        outward = weights.get(f"{stem}.adapter.linear_out.weight")
        if not adapter or outward is None or _EXPERT.search(name):
            continue
        base = weights.get(f"{stem}.weight")
        shapes = inward.shape, outward.shape
        rank = inward.shape[0] if inward.shape else 0
        expected = ((rank, base.shape[1]), (base.shape[0], rank)) if base is not None and len(base.shape) == 2 else None
        if shapes[0][:1] != shapes[1][1:] or (expected is not None and shapes != expected):
            counterpart = f"{base.name} {base.shape}" if base is not None else "each other"
            yield f"{stem}.adapter is of {shapes[0]} and {shapes[1]}, which do not fit {counterpart}"
