"""Quantized Hugging Face folders as what they stand for: each stored number times the scale of its block, rounded once.

    model.layers.0.mlp.up_proj.weight             float8_e4m3fn  | w w w w | w w |      a block of 128 x 128 has one scale;
    model.layers.0.mlp.up_proj.weight_scale_inv   float32        | s       | s   |      the last ones may be smaller

The value is `float32(w) * float32(s)`, rounded to the model's type; the name says inverse, but it is the factor. So do
transformers (integrations/finegrained_fp8.py, `Fp8Dequantize`) and DeepSeek-V3's own kernel (inference/kernel.py,
`weight_dequant`). compressed-tensors names the factor `weight_scale`, one for a tensor, a row or a block.

    ...experts.gate_up_proj_blocks  uint8  (experts, rows, groups, 16)    MXFP4: 32 codes of four bits and one power of two
    ...experts.gate_up_proj_scales  uint8  (experts, rows, groups)        2 ** (scale - 127) for each group of a row

The tensor is their product, each expert's matrix transposed (transformers 5.23, integrations/mxfp4.py,
`convert_moe_packed_tensors`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from converters.box import Box
from converters.chunks import Chunk, FlatPart, Scales, ViewPart
from converters.dtypes import dtype
from converters.errors import FormatError, IntegrityError, RequestError
from converters.names import printable

if TYPE_CHECKING:
    from converters.catalog import TensorInfo

KEY = "quantization_config"
_FP8 = ("float8_e4m3fn", "float8_e5m2")
_GROUP = 32  # codes of MXFP4 that share a scale
_FACTORS = ("float32", "bfloat16", "float16", "float8_e8m0fnu")


@dataclass(frozen=True)
class Dequantized:
    """What a quantized folder stands for.

    Attributes:
        tensors: Its tensors. Quantized weights have the model's type, and arrays that say what to multiply elements by.
        config: Its configuration, without the word that it is quantized.
        used: Tensors that are no weights, and what becomes of each.
        method: How it is quantized, for people.
    """

    tensors: dict[str, TensorInfo]
    config: dict[str, Any]
    used: dict[str, str]
    method: str


@dataclass(frozen=True, slots=True)
class _Method:
    """How weights are quantized: what their factors are called, and how many elements share one along the last two axes.

    A size of None means the whole axis.
    """

    text: str
    factor: str
    block: tuple[int | None, int | None]


def dequantize(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> Dequantized | None:
    """A folder's tensors as they are multiplied out; None if config.json says nothing of quantization.

    Raises:
        RequestError: A method that is not known.
        IntegrityError: A quantized weight has no scales, or not those of its shape.
    """
    stated = config.get(KEY)
    if not stated:
        return None
    packed = isinstance(stated, Mapping) and stated.get("quant_method") == "mxfp4"
    packed = packed and any(name.endswith("_blocks") for name in tensors)
    method = _Method("MXFP4 in groups of 32", "", (None, None)) if packed else _method(stated)
    kind = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    target = dtype(kind)
    if not target.floating or target.itemsize < 2:
        raise FormatError(f"config.json says that the model's type is {printable(kind)}, which no weight can be")
    plain, used = dict(tensors), {}
    for name, info in tensors.items():
        if packed and name.endswith("_blocks"):
            weight = name.removesuffix("_blocks")
            plain[weight] = replace(_packed(info, tensors.get(f"{weight}_scales"), weight), dtype=target)
            plain.pop(name)
            plain.pop(f"{weight}_scales")
            used[f"{weight}_scales"] = "multiplied into the weight that it belongs to"
            continue
        if info.dtype.name not in _FP8:
            continue
        factors = (
            f"{name.removesuffix('weight')}{method.factor}" if name.endswith(".weight") else f"{name}_{method.factor}"
        )
        if factors not in tensors:
            raise IntegrityError(
                f"{printable(name)} is {info.dtype}, but its scales, {printable(factors)}, are not there",
                hint="was a file left out when the folder was copied?",
                tensor=name,
            )
        plain[name] = replace(_scaled(info, tensors[factors], method), dtype=target)
        plain.pop(factors)
        used[factors] = "multiplied into the weight that it belongs to"
    for name in [name for name in plain if name.endswith((".input_scale", ".activation_scale"))]:
        plain.pop(name)
        used[name] = "scales activations of the quantized model, which this one does not quantize"
    return Dequantized(plain, {key: value for key, value in config.items() if key != KEY}, used, method.text)


def _scaled(info: TensorInfo, factors: TensorInfo, method: _Method) -> TensorInfo:
    """A weight whose array says what its elements are multiplied by."""
    shape = info.shape
    part, scales = _single_part(info), _single_part(factors)
    if part is None or scales is None or factors.dtype.name not in _FACTORS or len(shape) < 2:
        raise RequestError(
            f"{printable(info.name)} is {info.dtype} {list(shape)} with scales in {factors.dtype}: not understood",
            hint="name the folder of the model in bf16",
            tensor=info.name,
        )
    block = (*(1,) * (len(shape) - 2), *(size or axis for size, axis in zip(method.block, shape[-2:], strict=True)))
    expected = tuple(-(-axis // size) for axis, size in zip(shape, block, strict=True))
    stored = _without_ones(factors.shape)
    if stored != _without_ones(expected):
        raise IntegrityError(
            f"{printable(factors.name)} is {list(factors.shape)}; the scales of {list(shape)} in blocks of "
            f"{' x '.join(map(str, block))} are {list(expected)}",
            hint="is config.json of another model?",
            tensor=factors.name,
        )
    grid = FlatPart(scales.array, ((Box.whole(expected), scales.pieces[0][1]),))
    marked = replace(part.array, scales=Scales(info.dtype, block, grid, factors.dtype))
    return replace(info, parts=(FlatPart(marked, part.pieces),))


def _packed(info: TensorInfo, factors: TensorInfo | None, name: str) -> TensorInfo:
    """A stack of matrices of which rows of codes are stored."""
    if factors is None:
        raise IntegrityError(
            f"the scales of {printable(info.name)} are not there",
            hint="was a file left out when the folder was copied?",
            tensor=info.name,
        )
    part, scales = _single_part(info), _single_part(factors)
    if (
        part is None
        or scales is None
        or (info.dtype.name, factors.dtype.name) != ("uint8", "uint8")
        or len(info.shape) != 4
        or info.shape[3] != _GROUP // 2
        or factors.shape != info.shape[:3]
        or min(info.shape) < 2
    ):
        raise RequestError(
            f"{printable(info.name)} is {info.dtype} {list(info.shape)} with scales {list(factors.shape)}: not understood",
            details=[f"expected are (experts, rows, groups, {_GROUP // 2}) bytes, and a scale for each group"],
            hint="name the folder of the model in bf16",
            tensor=info.name,
        )
    experts, rows, groups, _ = info.shape
    width = groups * _GROUP
    (chunk,) = part.chunks()
    pieces = tuple(
        Chunk(
            Box((expert, 0, 0), (1, width, rows)),
            chunk.record,
            2 * chunk.base + expert * rows * width,
            ((0, 0), (rows, width)),
            True,
        )
        for expert in range(experts)
    )
    grid = Scales(dtype("float8_e4m3fn"), (_GROUP,), scales, dtype("float8_e8m0fnu"), True)
    array = replace(part.array, scales=grid)
    return replace(info, name=name, shape=(experts, width, rows), parts=(ViewPart(array, pieces),))


def _single_part(info: TensorInfo) -> FlatPart | None:
    """The one piece that a tensor is stored as, if it is."""
    part = info.parts[0]
    unbroken = isinstance(part, FlatPart) and [box for box, _ in part.pieces] == [Box.whole(info.shape)]
    return part if isinstance(part, FlatPart) and unbroken and len(info.parts) == 1 else None


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


# ---------------------------------------------------------------------- config.json


def _method(stated: Any) -> _Method:
    if not isinstance(stated, Mapping):
        raise FormatError(f"config.json: {KEY} is not a dictionary")
    name = stated.get("quant_method")
    if name == "fp8" and stated.get("fmt", "e4m3") == "e4m3":
        return _blocks("FP8", "weight_scale_inv", stated.get("weight_block_size"))
    for beside in ("transform_config", "sparsity_config"):
        section = stated.get(beside)
        if section and not (isinstance(section, Mapping) and section.get("format") == "dense"):
            raise RequestError(
                f"config.json: {KEY} has a {beside}: the stored weights are not those that the model computes with",
                hint="name the folder of the model in bf16",
            )
    if name == "compressed-tensors" and stated.get("format") in ("float-quantized", "naive-quantized"):
        groups = stated.get("config_groups")
        kinds = [group.get("weights") for group in groups.values()] if isinstance(groups, Mapping) else []
        if len(kinds) == 1 and isinstance(kinds[0], Mapping):
            return _compressed(kinds[0])
    words = [str(stated.get(key)) for key in ("quant_method", "format", "quant_algo", "fmt") if stated.get(key)]
    raise RequestError(
        f"the weights are quantized by an unknown method: {printable(', '.join(words) or '?')[:80]}",
        details=["known: fp8 in blocks (weight_scale_inv), compressed-tensors float-quantized (weight_scale), mxfp4"],
        hint="name the folder of the model in bf16",
    )


def _blocks(text: str, factor: str, sizes: Any) -> _Method:
    if sizes is None:
        return _Method(f"{text}, one scale for a tensor", factor, (None, None))
    if not isinstance(sizes, list | tuple) or len(sizes) != 2 or not all(type(n) is int and n > 0 for n in sizes):
        raise FormatError(f"config.json: weight_block_size {printable(str(sizes))[:80]} is not two positive numbers")
    return _Method(f"{text} in blocks of {sizes[0]} x {sizes[1]}", factor, (sizes[0], sizes[1]))


def _compressed(weights: Mapping[str, Any]) -> _Method:
    expected = {"num_bits": 8, "type": "float", "symmetric": True}
    wrong = [
        f"{key} {printable(str(weights.get(key)))[:40]}" for key, value in expected.items() if weights.get(key) != value
    ]
    strategy = printable(str(weights.get("strategy")))[:40]
    if not wrong and strategy == "tensor":
        return _Method("FP8, one scale for a tensor", "weight_scale", (None, None))
    if not wrong and strategy == "channel":
        return _Method("FP8, one scale for a row", "weight_scale", (1, None))
    if not wrong and strategy == "block":
        return _blocks("FP8", "weight_scale", weights.get("block_structure"))
    raise RequestError(
        f"the weights are quantized in an unknown way: {', '.join([*wrong, strategy])}",
        hint="name the folder of the model in bf16",
    )
