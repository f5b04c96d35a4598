"""Which pipeline stage holds which part of a model. No I/O.

A job with `pp` pipeline ranks and `vpp` model chunks on each has pp * vpp stages, run through in the order chunk-major:
all ranks' chunk 0, then all ranks' chunk 1, ... Layers are dealt out in that order. 8 layers, pp 2, vpp 2:

    stage         0        1        2        3
    pp rank 0   [0 1]             [4 5]                 embedding on stage 0
    pp rank 1            [2 3]             [6 7]        final norm, output layer and MTP on stage 3
    vp chunk      0        0        1        1

Facts: Megatron-Core 0.16.1, transformer/transformer_block.py, transformer/transformer_layer.py,
transformer/transformer_config.py (__post_init__), transformer/pipeline_parallel_layer_layout.py,
models/gpt/gpt_model.py, models/multimodal/llava_model.py, transformer/multi_token_prediction.py.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from converters.errors import RequestError
from converters.megatron.layer_pattern import LayerPattern, read_pattern
from converters.model_parts import LANGUAGE, split_part
from converters.names import printable
from converters.words import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from converters.megatron.layout import Layout


@dataclass(frozen=True, slots=True)
class Stage:
    """One model chunk of one pipeline rank.

    Attributes:
        pp: Pipeline rank.
        vp: Which of its chunks.
        layers: Numbers of its decoder layers in the whole model, consecutive, maybe none.
        has_embedding: It holds the model's embedding (not a copy).
        has_final_norm: It holds the norm behind the last decoder layer.
        has_output: It holds the output layer: its own weight, or a copy of the embedding's if they are tied.
        mtp: Numbers of its multi-token-prediction layers. With any, it has a copy of the embedding if it lacks the own.
    """

    pp: int
    vp: int
    layers: range
    has_embedding: bool
    has_final_norm: bool
    has_output: bool
    mtp: range


@dataclass(frozen=True)
class Pipeline:
    """All stages of a job, in the order in which a batch passes them."""

    stages: tuple[Stage, ...]

    @classmethod
    def of(cls, layout: Layout, num_layers: int, mtp_layers: int = 0) -> Pipeline:
        """Deals the layers out as Megatron-Core does; `Layout.pipeline` is the way to call this."""
        if layout.pp_layout is not None:
            sizes, mtp = _stated(layout, layout.pp_layout, num_layers, mtp_layers)
        else:
            if (layout.vpp or 1) > 1 and layout.pp == 1:
                raise RequestError(
                    f"--vpp {layout.vpp} needs more than one pipeline stage, --pp is 1", hint="leave --vpp out"
                )
            if layout.first_layers is None and layout.last_layers is None:
                sizes = _even(layout, num_layers)
            else:
                sizes = _uneven(layout, num_layers)
            mtp = [0] * (len(sizes) - 1) + [mtp_layers]
        stages, layer, predicted = [], 0, 0
        for i, (size, extra) in enumerate(zip(sizes, mtp, strict=True)):
            last = i == len(sizes) - 1
            # with MTP the final norm moved from the output layer to the last decoder layer (core 0.12)
            final = layer < num_layers == layer + size if mtp_layers else last
            stages.append(
                Stage(
                    pp=i % layout.pp,
                    vp=i // layout.pp,
                    layers=range(layer, layer + size),
                    has_embedding=i == 0,
                    has_final_norm=final,
                    has_output=last,
                    mtp=range(predicted, predicted + extra),
                )
            )
            layer, predicted = layer + size, predicted + extra
        return cls(tuple(stages))

    @staticmethod
    def recognises(name: str) -> bool:
        """Whether the name is one that `homes` knows."""
        part, inner = split_part(name)
        return part not in ("", LANGUAGE) or _STACK_LAYER.match(inner) is not None

    @cached_property
    def _layers(self) -> list[int]:
        return [stage.layers.stop for stage in self.stages]

    @cached_property
    def _mtp(self) -> list[int]:
        return [stage.mtp.stop for stage in self.stages]

    def homes(self, name: str, *, tied: bool = False) -> tuple[Stage, ...]:
        """The stages that hold a parameter, the one that saves it first.

        Args:
            name: Canonical name, without `optimizer.state.*`.
            tied: The output layer uses the embedding's weight.

        Raises:
            RequestError: The name is not one of Megatron-Core's, or there is no such layer.
        """
        part, inner = split_part(name)
        if part not in ("", LANGUAGE):  # llava_model.py: only the first stage has an encoder
            return (self.stages[0],)
        match = _STACK_LAYER.match(inner)
        if match is None:
            raise RequestError(f"no pipeline stage is known to hold {printable(name)}", tensor=name)
        if match["layer"]:
            return (self._at(self._layers, int(match["layer"]), "layers"),)
        if match["mtp"]:
            return (self._at(self._mtp, int(match["mtp"]), "MTP layers"),)
        if match["norm"]:
            return (next(stage for stage in self.stages if stage.has_final_norm),)
        if match["output"]:
            return (self.stages[-1],)
        copies = [s for s in self.stages[1:] if s.mtp or (tied and s.has_output and inner == _WORDS)]
        return (self.stages[0], *copies)

    def _at(self, stops: Sequence[int], number: int, kind: str) -> Stage:
        """The stage of a layer, by where the layers of each stage end: a stranger's name may say that there are 10^9."""
        if not 0 <= number < stops[-1]:
            raise RequestError(f"the model has {stops[-1]} {kind}; there is no number {number}")
        return self.stages[bisect_right(stops, number)]


_WORDS = "embedding.word_embeddings.weight"
_STACK_LAYER = re.compile(
    r"(?:decoder|encoder)\.layers\.(?P<layer>\d+)\."
    r"|mtp\.layers\.(?P<mtp>\d+)\."
    r"|(?P<norm>(?:decoder|encoder)\.final_(?:layer)?norm\.)"
    r"|(?P<output>(?:output_layer|lm_head|pooler|binary_head)\.)"
    r"|(?:embedding|position_embeddings|(?:encoder|decoder)_relative_pos_emb)\."
)


def _even(layout: Layout, num_layers: int) -> list[int]:
    """Layers of each stage when all pipeline ranks get as many, embedding and output layer counted if asked."""
    ends = ["embedding"] * layout.account_for_embedding + ["output layer"] * layout.account_for_loss
    total, chunks = num_layers + len(ends), layout.vpp or 1
    layers = counted(num_layers, "layer") + "".join(f" + 1 for the {end}" for end in ends)
    if total % layout.pp:
        raise RequestError(
            f"{layers} cannot be spread evenly over --pp {layout.pp}",
            hint=f"--pp must divide {total}: try {list_nearest(divisors(total), layout.pp)}; or give the uneven stages with "
            "--first-layers, --last-layers or --pp-layout",
        )
    each = total // layout.pp
    if each % chunks:
        raise RequestError(
            f"{counted(each, 'layer')} a pipeline rank ({layers}, --pp {layout.pp}) cannot be cut into --vpp {chunks} "
            "chunks",
            hint=f"--vpp must divide {each}: try {list_nearest(divisors(each), chunks)}",
        )
    sizes = [each // chunks] * (layout.pp * chunks)
    sizes[0] -= layout.account_for_embedding
    sizes[-1] -= layout.account_for_loss
    if min(sizes) < 0:
        raise RequestError(f"one stage has no room for embedding and output layer ({layers})")
    return sizes


def _uneven(layout: Layout, num_layers: int) -> list[int]:
    """Layers of each stage when the first or last pipeline rank has a number of its own."""
    if layout.account_for_embedding or layout.account_for_loss:
        raise RequestError(
            "Megatron allows --first-layers and --last-layers only without account_for_embedding and account_for_loss"
        )
    stated_sizes = [("--first-layers", layout.first_layers), ("--last-layers", layout.last_layers)]
    options = [(option, n) for option, n in stated_sizes if n is not None]
    words = " ".join(f"{option} {n}" for option, n in options)
    middle, left = layout.pp - len(options), num_layers - sum(n for _, n in options)
    if middle < 0:
        raise RequestError(f"{words} are two pipeline stages, --pp is {layout.pp}")
    if left < 0:
        raise RequestError(
            f"{words}: {counted(num_layers - left, 'layer')}, but the model has {num_layers}",
            hint=f"leave {middle} or more for the other stages" if middle else f"they must add up to {num_layers}",
        )
    if left > 0 and not middle:
        single = f"{words} needs more than one pipeline stage, --pp is 1"
        several = f"{words} are all stages of --pp {layout.pp}, but not all of {num_layers} layers: {left} are left"
        raise RequestError(
            single if layout.pp == 1 else several,
            hint=f"leave {options[0][0]} out"
            if layout.pp == 1
            else f"{options[0][0]} {options[0][1] + left}, or a larger --pp",
        )
    if (left == 0) != (middle == 0) or (middle and left % middle):
        option, n = options[0]
        fits = [k for k in range(1, n + left + 1) if (n + left - k) % max(middle, 1) == 0]
        fits = [k for k in fits if (n + left - k == 0) == (middle == 0)]
        stages = counted(middle, "middle stage")
        raise RequestError(
            f"{words} of {counted(num_layers, 'layer')} leave {left} for {stages} of --pp {layout.pp}",
            hint=f"{option} must leave a multiple of {middle}: try {list_nearest(fits, n)}" if fits else None,
        )
    each, chunks = (left // middle if middle else 0), layout.vpp or 1
    for stage, n in [*options, ("a middle stage", each)]:
        if n % chunks:
            raise RequestError(
                f"{counted(n, 'layer')} of {stage} cannot be cut into --vpp {chunks} chunks",
                hint=f"--vpp must divide {n}: try {list_nearest(divisors(n), chunks)}",
            )
    if chunks > 1 and not middle:
        # get_transformer_layer_offset divides by the number of middle stages, up to core 0.19
        raise RequestError(
            f"Megatron cannot start with {words}, --vpp {chunks} and no stage between",
            hint="leave --last-layers out: it follows from the rest" if layout.pp == 2 else None,
        )
    ranks = [each] * middle
    ranks = ([] if layout.first_layers is None else [layout.first_layers]) + ranks
    ranks += [] if layout.last_layers is None else [layout.last_layers]
    return [n // chunks for _ in range(chunks) for n in ranks]


def _stated(layout: Layout, text: str, num_layers: int, mtp_layers: int) -> tuple[list[int], list[int]]:
    """Decoder and MTP layers of each stage of a layout string, checked as Megatron checks it."""
    if layout.first_layers or layout.last_layers or layout.account_for_embedding or layout.account_for_loss:
        raise RequestError("--pp-layout sets every pipeline stage: leave the other options for stages out")
    stages = parse_pp_layout(text)

    def refuse(fault: str, hint: str | None = None) -> RequestError:
        return RequestError(f"--pp-layout {text!r} {fault}", hint=hint)

    if len(stages) % layout.pp:
        raise refuse(
            f"has {counted(len(stages), 'stage')}, not a multiple of --pp {layout.pp}",
            f"--pp must divide {len(stages)}: try {list_nearest(divisors(len(stages)), layout.pp)}",
        )
    chunks = len(stages) // layout.pp
    if (layout.vpp or 1) != chunks and layout.vpp is not None:
        raise refuse(
            f"has {counted(len(stages), 'stage')}: with --pp {layout.pp} that is --vpp {chunks}, not {layout.vpp}"
        )
    if chunks > 1 and layout.pp == 1:
        raise refuse(f"has {counted(len(stages), 'stage')}, --pp is 1", f"--pp {len(stages)}")
    flat = "".join(stages)
    if flat.count("E") != 1 or not flat.startswith("E"):
        raise refuse("must have one E (embedding), before everything else")
    if flat.count("L") != 1 or not flat.endswith("L"):
        raise refuse("must have one L (loss), behind everything else")
    for letter, stated, kind in (("t", num_layers, "decoder"), ("m", mtp_layers, "MTP")):
        if flat.count(letter) != stated:
            raise refuse(f"has {flat.count(letter)} {letter!r}, the model has {stated} {kind} layers")
    if "m" in flat[: flat.rfind("t")]:
        raise refuse("has an m before a t; MTP layers come behind all decoder layers")
    predicting = [i for i, stage in enumerate(stages) if "m" in stage]
    if len(predicting) > 1:
        raise refuse(f"spreads MTP layers over {len(predicting)} stages; Megatron keeps them on one")
    if predicting and predicting[0] < layout.pp * (chunks - 1):
        raise refuse(f"has MTP on stage {predicting[0]}; it must be in the last chunk of its pipeline rank")
    return [stage.count("t") for stage in stages], [stage.count("m") for stage in stages]


_GROUP = re.compile(r"\(([^)]+)\)\*(\d+)")
_TIMES = re.compile(r"(.)\*(\d+)")
_MOST = 100_000  # letters; the largest models have some hundred layers


@lru_cache(maxsize=64)
def parse_pp_layout(text: str) -> tuple[str, ...]:
    """The stages of a `--pipeline-model-parallel-layout`, each as letters E (embedding), t (decoder), m (MTP), L (loss).

    "Ettt|(tt|)*3,m|L" is Ettt, tt, tt, tt, m, L: commas mean nothing, `(..)*n` repeats a group and `x*n` one letter or
    bar. Groups do not nest.

    Raises:
        RequestError: Something else is in it; the first such character and its position are named.
    """

    def repeat(match: re.Match[str]) -> str:
        if len(match[2]) > 6 or len(match[1]) * int(match[2]) > _MOST:
            raise RequestError(f"--pp-layout repeats {match[0]!r}: that is more than {_MOST} letters")
        return match[1] * int(match[2])

    unrolled = text.replace(",", "")
    for pattern in (_GROUP, _TIMES):
        unrolled = pattern.sub(repeat, unrolled)
        if len(unrolled) > _MOST:
            raise RequestError(f"--pp-layout has more than {_MOST} letters")
    if unrolled.strip("EtmL|"):
        wrong = next((c for c in text if c not in "EtmL|()*,0123456789"), unrolled.strip("EtmL|")[0])
        at = text.index(wrong)
        raise RequestError(
            f"--pp-layout {text!r} has {text[at]!r} at position {at}",
            hint="E (embedding), t (decoder layer), m (MTP layer), L (loss), | between stages, (..)*n, x*n and commas",
        )
    return tuple(unrolled.split("|"))


def hybrid_stages(options: Mapping[str, Any]) -> str | None:
    """The stages that a hybrid's layer pattern bounds (`M*|EM`), as a `--pipeline-model-parallel-layout`; None if none.

    Args:
        options: Option -> value.
    """
    stated = read_pattern(options)
    try:
        pattern = LayerPattern.parse(stated[0]) if stated else LayerPattern("")
    except ValueError:  # not understood: refused before anything depends on it (layout_check.py)
        return None
    if not pattern.stages:
        return None
    predicting = "m" * (1 if pattern.depths and options.get("mtp_use_repeated_layer") is True else pattern.depths)
    return f"E{'|'.join('t' * size for size in pattern.stages)}{predicting}L"


def divisors(n: int) -> list[int]:
    """All divisors, ascending."""
    low = [k for k in range(1, int(n**0.5) + 1) if n % k == 0]
    return sorted({*low, *(n // k for k in low)})


def list_nearest(values: Iterable[int], near: int, most: int = 8) -> str:
    """The values nearest to `near`, ascending, as a person lists them: "1, 2 or 4"."""
    chosen = sorted(sorted(values, key=lambda v: (abs(v - near), v))[:most])
    if len(chosen) < 2:
        return "".join(map(str, chosen))
    return ", ".join(map(str, chosen[:-1])) + f" or {chosen[-1]}"
