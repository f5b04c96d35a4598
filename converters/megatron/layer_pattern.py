"""Which layer of a hybrid model is what: the pattern in its arguments, and what its tensors show.

    --hybrid-override-pattern M*EM            Mamba, attention, mixture of experts, Mamba: one symbol is one layer
    --hybrid-layer-pattern "M*|EM/M*/M*"      the same on two pipeline stages, and two depths of multi-token prediction,
                                              each a Mamba and an attention layer

A model of transformer layers says with frequencies which of them have experts, and which a gated delta net.

Facts: Megatron-Core, ssm/mamba_hybrid_layer_allocation.py (core_v0.14.0, core_v0.16.1), models/hybrid/
hybrid_layer_allocation.py (core_v0.19.0 and later, which added G, D, +, | and /); Megatron-Bridge 067f987d,
falcon_h1/modeling_falconh1/mamba_hybrid_layer_allocation.py (P, a layer with an MLP of its own).
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

SYMBOLS = {
    "M": "Mamba",
    "G": "gated delta net",
    "*": "attention",
    "+": "latent attention",
    "D": "sparse attention",
    "-": "MLP",
    "E": "MoE",
    "P": "Mamba beside attention",
}
"""What a layer is, by its symbol."""

_SHOWN_LAYERS = 60  # symbols of a pattern that people can still count
MOST_LAYERS = 100_000
"""More layers are no model, but a way to fill the memory."""


@dataclass(frozen=True, slots=True)
class LayerPattern:
    """The layers of a hybrid model.

    Attributes:
        layers: One symbol for each decoder layer.
        stages: Layers of each pipeline stage, in the order in which a batch passes them; empty if no `|` divides them.
        prediction: One symbol for each layer of one depth of multi-token prediction; "" if there is none.
        depths: Depths of multi-token prediction.
    """

    layers: str
    stages: tuple[int, ...] = ()
    prediction: str = ""
    depths: int = 0

    @classmethod
    def parse(cls, text: str) -> LayerPattern:
        """Reads a pattern as Megatron's arguments spell it.

        Raises:
            ValueError: It is not understood; with a symbol and its position, or what else is wrong.
        """
        if len(text) > MOST_LAYERS:
            raise ValueError(f"has more than {MOST_LAYERS} symbols")
        unknown = next((at for at, symbol in enumerate(text) if symbol not in {*SYMBOLS, "|", "/"}), None)
        if unknown is not None:
            raise ValueError(f"has {text[unknown]!r} at position {unknown}")
        main, *depths = text.split("/")
        depths = depths if any(depths) else []
        if len(set(depths)) > 1:
            raise ValueError(f"predicts with {depths[0]!r} and with {next(d for d in depths if d != depths[0])!r}")
        if depths and "|" in depths[0]:
            raise ValueError("has a stage boundary in a prediction layer")
        segments = main.split("|")
        stages = tuple(map(len, segments)) if len(segments) > 1 else ()
        return cls("".join(segments), stages, depths[0] if depths else "", len(depths))

    def written(self, stages: Sequence[int] = ()) -> str:
        """The pattern as an argument.

        Args:
            stages: Layers of each pipeline stage; none for a pattern without boundaries.
        """
        parts, at = [], 0
        for size in stages or (len(self.layers),):
            parts.append(self.layers[at : at + size])
            at += size
        return "/".join(["|".join(parts), *[self.prediction] * self.depths])


def describe_layers(pattern: str | None, linear: Sequence[bool] | None) -> str:
    """For people: `hybrid M*EM: 2 Mamba, 1 attention, 1 MoE`, or `gated delta net in 3 of 4`; "" for a plain transformer.

    Args:
        pattern: One symbol for each layer of a hybrid.
        linear: Which layers of a transformer have linear attention.
    """
    if pattern is not None:
        counts = Counter(pattern)
        kinds = ", ".join(f"{counts[symbol]} {kind}" for symbol, kind in SYMBOLS.items() if counts[symbol])
        return f"hybrid {pattern}: {kinds}" if len(pattern) <= _SHOWN_LAYERS else f"hybrid: {kinds}"
    return f"gated delta net in {sum(linear)} of {len(linear)}" if linear and any(linear) else ""


def read_pattern(options: Mapping[str, Any]) -> tuple[str, str] | None:
    """The pattern that a set of options states, as text, and the option that it follows from; None for no hybrid.

    Args:
        options: Option -> value, of training arguments or of a model's configuration.
    """
    for option in ("hybrid_layer_pattern", "hybrid_override_pattern"):
        text = options.get(option)
        if isinstance(text, str) and text:
            depths, inner = options.get("mtp_num_layers"), options.get("mtp_hybrid_override_pattern")
            if "/" not in text and isinstance(inner, str) and inner and isinstance(depths, int) and 0 < depths < 100:
                text += f"/{inner}" * depths
            return text, option
    ratios = [options.get(name) for name in ("hybrid_attention_ratio", "hybrid_mlp_ratio")]
    attention, mlp = (float(r) if isinstance(r, int | float) and 0 <= r <= 1 else 0.0 for r in ratios)
    layers = options.get("num_layers")
    if not (options.get("is_hybrid_model") is True or attention or mlp) or not isinstance(layers, int):
        return None
    if not 0 < layers <= MOST_LAYERS or attention + mlp > 1:
        return None
    return _allocated(layers, attention, mlp), "hybrid_attention_ratio" if attention or mlp else "is_hybrid_model"


def _allocated(layers: int, attention: float, mlp: float) -> str:
    """Layers by ratios: attention evenly spaced between Mamba layers, then MLPs in place of some of these."""
    out = ["M"] * layers
    count = round(layers * attention)
    mamba = layers - count
    _spread(out, "*", mamba / (count + 1))
    if mlps := round(layers * mlp):
        _spread(out, "-", (mamba - mlps) / mlps)
    return "".join(out)


def _spread(layers: list[str], symbol: str, distance: float) -> None:
    remaining = distance
    for number, kind in enumerate(layers):
        if kind != "M":
            continue
        if remaining < 0.5:
            layers[number] = symbol
            remaining += distance
        else:
            remaining -= 1


# the first that a layer's tensors begin with; a layer of a transformer has an attention and an MLP
_SHOWN = (
    ("mixer.", "M"),
    ("mamba_mixer.", "P"),
    ("self_attention.in_proj.", "G"),
    ("self_attention.core_attention.indexer.", "D"),
    ("self_attention.linear_kv_down_proj.", "+"),
    ("self_attention.linear_qkv_down_proj.", "+"),
    ("self_attention.", "*"),
    ("mlp.experts.", "E"),
    ("mlp.router.", "E"),
    ("mlp.", "-"),
)


def symbol_of(suffixes: Iterable[str]) -> str:
    """What a layer is by its tensors' names behind `layers.N.`; "" for a layer that is several things, or none."""
    mixing, mlp = "", ""
    for suffix in suffixes:
        symbol = next((symbol for start, symbol in _SHOWN if suffix.startswith(start)), "")
        if symbol in ("E", "-"):
            mlp = "E" if "E" in (mlp, symbol) else "-"
        elif symbol in ("D", "P") or (symbol and mixing in ("", "*")):
            mixing = symbol
    if mixing == "P":
        return mixing if mlp == "-" else ""
    return "" if mixing and mlp else mixing or mlp


def moe_layers(freq: Any, layers: int) -> tuple[bool, ...] | None:
    """Which layers have experts: every `freq`-th, or as a list of 0 and 1 (also written `([0]*1+[1]*26)`)."""
    return _layer_flags(freq, layers, lambda number, every: number % every == 0)


def all_but_every_nth(freq: Any, layers: int) -> tuple[bool, ...] | None:
    """Which layers have linear attention, or a window: all but every `freq`-th, or as a list of 0 and 1."""
    return _layer_flags(freq, layers, lambda number, every: (number + 1) % every != 0)


def every_nth(freq: Any, layers: int) -> tuple[bool, ...] | None:
    """Which layers do not rotate queries and keys: every `freq`-th, or as a list of 0 and 1."""
    return _layer_flags(freq, layers, lambda number, every: (number + 1) % every == 0)


def _layer_flags(freq: Any, layers: int, has: Callable[[int, int], bool]) -> tuple[bool, ...] | None:
    """A flag for each layer, of a frequency or a list.

    Args:
        has: Whether a layer of this number has what there is with this frequency.
    """
    if isinstance(freq, int) and freq > 0 and layers <= MOST_LAYERS:
        return tuple(has(number, freq) for number in range(layers))
    if isinstance(freq, str) and re.fullmatch(r"[\[\]()\d,*+ ]+", freq):
        freq = _expand(freq)
    if isinstance(freq, list | tuple) and all(isinstance(n, int) for n in freq):
        return tuple(bool(n) for n in freq)
    return None


def _expand(text: str) -> list[int] | None:
    """`[0]*3+[1]*58` as a list, for the sums of repeated lists that Megatron's command line accepts."""
    out: list[int] = []
    for term in text.replace(" ", "").strip("()").split("+"):
        match = re.fullmatch(r"\[([\d,]*)\](?:\*(\d+))?", term)
        if not match:
            return None
        numbers, times = [n for n in match[1].split(",") if n], match[2] or "1"
        if max(map(len, (times, *numbers))) > 6 or len(out) + len(numbers) * int(times) > MOST_LAYERS:
            return None
        out += [int(n) for n in numbers] * int(times)
    return out
