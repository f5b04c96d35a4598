"""Which weights of a model become FP8 with a scale for each block of 128 x 128, and how config.json says so.

    model.layers.0.mlp.up_proj.weight             bfloat16 (384, 256)   ->  float8_e4m3fn (384, 256)
    model.layers.0.mlp.up_proj.weight_scale_inv                             float32       (3, 2)

As DeepSeek-V3 is published: the projections of attention, MLP and experts; neither embeddings, norms, biases and routers,
nor the output layer, nor what mixes states (Mamba, gated delta nets). `modules_to_not_convert` names every other matrix, as
transformers (quantizers/quantizer_finegrained_fp8.py) and vLLM (`is_layer_skipped`) read it.

A matrix of which a side is no multiple of 128 stays as it is: transformers 5 derives the size of a block from the shapes of
weight and scales (`Fp8Dequantize`), which is another one where the last block is smaller. So do the matrices that vLLM and
SGLang put together with it, for their parts must be of one type; and so do all experts of a layer with one of them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from converters.dtypes import dtype
from converters.errors import RequestError
from converters.planning.plan import SCALE_BLOCK, Target

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("q_a_proj", "kv_a_proj_with_mqa"))
"""Matrices with the same input, which servers multiply at once."""
_ALONE = ("o_proj", "down_proj", "q_b_proj", "kv_b_proj", "qkv_proj", "gate_up_proj", "c_fc", "c_proj")
_LEAVES = "|".join((*(leaf for group in _FUSED for leaf in group), *_ALONE))
_EXPERT = re.compile(r"(?P<module>.*\.experts)\.\d+\.(?:gate_proj|up_proj|down_proj|w[123])\.weight")
_LINEAR = re.compile(rf"(?P<prefix>.*\.layers\.\d+\..*)\.(?P<leaf>{_LEAVES})\.weight")
_STORED = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class Quantization:
    """What is quantized.

    Attributes:
        targets: All tensors of the result; scales stand behind their weights.
        scales: The name of the scales of each weight that is quantized.
        config: `quantization_config` of config.json.
        unquantized: Matrices of the kinds that are quantized, but with sides that are no multiples of 128, or beside such.
    """

    targets: dict[str, Target]
    scales: dict[str, str]
    config: dict[str, Any]
    unquantized: list[str]


def quantization(architecture: str, targets: Mapping[str, Target]) -> Quantization:
    """Decides which tensors of a model are quantized.

    Args:
        architecture: Its `model_type`, for errors.
        targets: Its tensors, in the order of the files.

    Raises:
        RequestError: Its experts are stacked in one tensor, which no server reads in FP8; or nothing can be quantized.
    """
    stacked = next((n for n, t in targets.items() if len(t.shape) > 2 and "conv1d" not in n), None)
    if stacked is not None:
        raise RequestError(
            f"a {architecture} keeps its experts in one tensor ({stacked}), which --quantize fp8-block cannot express",
            hint="export it without --quantize",
            tensor=stacked,
        )
    candidates = {name: group for name, target in targets.items() if (group := _group(name, target))}
    uneven = {group for name, group in candidates.items() if any(n % SCALE_BLOCK for n in targets[name].shape)}
    scales = {
        name: name.removesuffix("weight") + "weight_scale_inv"
        for name, group in candidates.items()
        if group not in uneven
    }
    unquantized = [name for name in candidates if name not in scales]
    if not scales:
        raise RequestError(
            f"no weight of this {architecture} can be quantized in blocks of {SCALE_BLOCK} x {SCALE_BLOCK}",
            details=[f"{name} is {list(targets[name].shape)}" for name in unquantized[:4]],
            hint="export it without --quantize",
        )
    config = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [SCALE_BLOCK, SCALE_BLOCK],
        "modules_to_not_convert": list(dict.fromkeys(["lm_head", *_unconverted(targets, scales)])),
    }
    return Quantization(dict(_quantized(targets, scales)), scales, config, unquantized)


def _group(name: str, target: Target) -> str:
    """What has to be quantized as a whole or not at all; empty for what is never quantized."""
    if len(target.shape) != 2 or target.dtype.name not in _STORED:
        return ""
    if (expert := _EXPERT.fullmatch(name)) is not None:
        return expert["module"]
    if (linear := _LINEAR.fullmatch(name)) is None:
        return ""
    fused = next((group for group in _FUSED if linear["leaf"] in group), (linear["leaf"],))
    return f"{linear['prefix']}.{'|'.join(fused)}"


def _unconverted(targets: Mapping[str, Target], scales: Mapping[str, str]) -> Iterator[str]:
    """Modules with a matrix that is not quantized; experts by what holds all of them."""
    for name, target in targets.items():
        if name not in scales and name.endswith(".weight") and len(target.shape) > 1:
            expert = _EXPERT.fullmatch(name)
            yield name.removesuffix(".weight") if expert is None else expert["module"]


def _quantized(targets: Mapping[str, Target], scales: Mapping[str, str]) -> Iterator[tuple[str, Target]]:
    for name, target in targets.items():
        if name not in scales:
            yield name, target
            continue
        grid = tuple(size // SCALE_BLOCK for size in target.shape)
        yield name, Target(name, dtype("float8_e4m3fn"), target.shape)
        yield scales[name], Target(scales[name], dtype("float32"), grid)
