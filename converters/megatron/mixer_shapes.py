"""What the tensors of Mamba mixers and gated delta nets say about a model, and which of them are missing or do not fit.

Such a layer has one projection of its input and one convolution; both are stored part by part, each part divided alone:

    mixer.in_proj.weight         z | x | B | C | dt        self_attention.in_proj.weight    query | key | value | z | ..
    mixer.conv1d.weight, .bias       x | B | C             self_attention.conv1d.weight     query | key | value

A mixer beside attention (Falcon-H1) is called `mamba_mixer`.

Facts: Megatron-Core, ssm/mamba_mixer.py (core_v0.14.0 and later), ssm/gated_delta_net.py (core_v0.16.1),
ssm/gated_delta_net/gdn.py and gdn2.py (2026-08); Megatron-Bridge 067f987d, falcon_h1/modeling_falconh1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from converters.catalog import TensorInfo
    from converters.megatron.model_shapes import Findings, LayerTensors

Shapes: TypeAlias = "dict[str, tuple[int, ...]]"


def measure_mixers(findings: Findings, layers: LayerTensors) -> list[str]:
    """Takes the sizes of Mamba and gated-delta-net layers; returns sentences on what is missing or does not fit."""
    out = []
    for prefix, sizes, expected in (
        ("mixer.", _measure_mamba, _mamba_shapes),
        ("mamba_mixer.", _measure_mamba, _parallel_mamba_shapes),
        ("self_attention.", _measure_delta_net, _delta_net_shapes),
    ):
        marker = f"{prefix}in_proj."
        tensors = {suffix.removeprefix(prefix): t for suffix, t in layers.tensors.items() if suffix.startswith(prefix)}
        numbers = [n for n, suffixes in layers.suffixes.items() if any(s.startswith(marker) for s in suffixes)]
        if numbers:
            sizes(findings, tensors)
            out += _disagreements(expected(tensors), prefix, tensors, {n: layers.suffixes[n] for n in numbers})
    return out


def _disagreements(
    expected: Shapes, prefix: str, tensors: Mapping[str, TensorInfo], layers: Mapping[int, set[str]]
) -> list[str]:
    parts = {suffix for suffix in tensors if suffix.startswith(("in_proj.weight.", "conv1d."))}
    if not expected or parts - expected.keys():
        return []  # a kind of layer that is not known: nothing is concluded
    out = [
        f"{tensors[suffix].name} is {tensors[suffix].shape}, the other tensors of its layer imply {shape}"
        for suffix, shape in expected.items()
        if suffix in tensors and tensors[suffix].shape != shape
    ]
    for number, suffixes in layers.items():
        missing = [suffix for suffix in expected if prefix + suffix not in suffixes]
        out += [f"layer {number} has no {prefix}{suffix}" for suffix in missing[:2]]
    return out[:8]


def _rows(tensors: Mapping[str, TensorInfo], suffix: str, axis: int = 0) -> int:
    shape = tensors[suffix].shape if suffix in tensors else ()
    return shape[axis] if -len(shape) <= axis < len(shape) else 0


def _kernel(tensors: Mapping[str, TensorInfo]) -> int:
    return next((t.shape[-1] for suffix, t in tensors.items() if suffix.startswith("conv1d.weight.") and t.shape), 0)


def _fused_shapes(projection: Mapping[str, int], convolved: Collection[str], hidden: int, kernel: int) -> Shapes:
    """Of the projection and the convolution, part by part, and of the norm before them.

    Args:
        projection: Rows of each part of the projection.
        convolved: Those of the parts that the convolution has, too.
        hidden: Hidden size.
        kernel: Width of the convolution.
    """
    out: Shapes = {f"in_proj.weight.{part}": (rows, hidden) for part, rows in projection.items()}
    out |= {f"conv1d.weight.{part}": (projection[part], 1, kernel) for part in convolved}
    out |= {f"conv1d.bias.{part}": (projection[part],) for part in convolved}
    return out | {"in_proj.layer_norm_weight": (hidden,)}


def mamba_shapes(hidden: int, heads: int, inner: int, states: int, kernel: int) -> Shapes:
    """Shapes of a Mamba mixer's tensors, by their names within it.

    Args:
        hidden: Hidden size.
        heads: Number of heads.
        inner: Elements of all heads.
        states: Elements of the states of all groups.
        kernel: Width of the convolution.
    """
    projection = {"z": inner, "x": inner, "B": states, "C": states, "dt": heads}
    out = _fused_shapes(projection, "xBC", hidden, kernel) | dict.fromkeys(("A_log", "D", "dt_bias"), (heads,))
    return out | {"norm.weight": (inner,), "out_proj.weight": (hidden, inner)}


def delta_net_shapes(hidden: int, heads: int, head_dim: int, key: int, value: int, kernel: int) -> Shapes:
    """Shapes of a gated delta net's tensors, by their names within it.

    Args:
        hidden: Hidden size.
        heads: Number of heads that values have.
        head_dim: Elements of such a head.
        key: Elements of all heads of keys.
        value: Elements of all heads of values.
        kernel: Width of the convolution.
    """
    projection = {"query": key, "key": key, "value": value, "z": value, "beta": heads, "alpha": heads}
    out = _fused_shapes(projection, ("query", "key", "value"), hidden, kernel)
    out |= {"A_log": (heads,), "dt_bias": (heads,)}
    return out | {"out_norm.weight": (head_dim,), "out_proj.weight": (hidden, value)}


def _measure_mamba(findings: Findings, tensors: Mapping[str, TensorInfo]) -> None:
    size: Callable[..., None] = findings.size
    size("mamba_num_heads", tensors.get("A_log"), 0)
    size("mamba_head_dim", tensors.get("in_proj.weight.x"), 0, findings.best("mamba_num_heads") or 0)
    size("mamba_state_dim", tensors.get("in_proj.weight.B"), 0, findings.best("mamba_num_groups") or 0)


def _mamba_shapes(tensors: Mapping[str, TensorInfo]) -> Shapes:
    inner, states, heads = (_rows(tensors, f"in_proj.weight.{part}") for part in ("x", "B", "dt"))
    out = mamba_shapes(_rows(tensors, "out_proj.weight"), heads, inner, states, _kernel(tensors))
    if heads != inner == _rows(tensors, "D"):  # D_has_hdim, which no argument sets
        out["D"] = (inner,)
    return _without_bias(out, tensors)


def _parallel_mamba_shapes(tensors: Mapping[str, TensorInfo]) -> Shapes:
    """Beside attention: the norm before both is the layer's, that behind the scan an option (falconh1_layer.py)."""
    absent = {"in_proj.layer_norm_weight"} | ({"norm.weight"} - tensors.keys())
    return {suffix: shape for suffix, shape in _mamba_shapes(tensors).items() if suffix not in absent}


def _without_bias(shapes: Shapes, tensors: Mapping[str, TensorInfo]) -> Shapes:
    """The shapes without those of a convolution's bias, if no tensor is one: an option turns it off."""
    biased = any(suffix.startswith("conv1d.bias.") for suffix in tensors)
    return {suffix: shape for suffix, shape in shapes.items() if biased or not suffix.startswith("conv1d.bias.")}


def _measure_delta_net(findings: Findings, tensors: Mapping[str, TensorInfo]) -> None:
    size: Callable[..., None] = findings.size
    size("linear_conv_kernel_dim", next((t for s, t in tensors.items() if s.startswith("conv1d.weight.")), None), 2)
    size("linear_value_head_dim", tensors.get("out_norm.weight"), 0)
    size("linear_num_value_heads", tensors.get("in_proj.weight.value"), 0, findings.best("linear_value_head_dim") or 0)
    per_key = "in_proj.weight.f" in tensors
    if per_key:  # gdn2: decay for each key head
        size("linear_num_key_heads", tensors.get("A_log"), 0)
    size("linear_key_head_dim", tensors.get("in_proj.weight.query"), 0, findings.best("linear_num_key_heads") or 0)


def _delta_net_shapes(tensors: Mapping[str, TensorInfo]) -> Shapes:
    key, value, heads = (_rows(tensors, s) for s in ("in_proj.weight.query", "in_proj.weight.value", "A_log"))
    per_key = "in_proj.weight.f" in tensors
    heads = heads if per_key else _rows(tensors, "in_proj.weight.alpha") or heads
    sizes = heads, _rows(tensors, "out_norm.weight"), key, value, _kernel(tensors)
    out = delta_net_shapes(_rows(tensors, "out_proj.weight"), *sizes)
    if per_key:  # gdn2: f, b and w in place of beta and alpha
        hidden = out["out_proj.weight"][0]
        del out["in_proj.weight.beta"], out["in_proj.weight.alpha"]
        out |= {f"in_proj.weight.{part}": (rows, hidden) for part, rows in (("f", key), ("b", key), ("w", value))}
        out["dt_bias"] = (key,)
    return _without_bias(out, tensors)
