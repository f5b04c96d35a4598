"""Options of the target job that several commands share."""

from __future__ import annotations

from dataclasses import dataclass

from distckpt_cli.choices import MCORE_VERSIONS, OPTIMIZERS, choice_of
from distckpt_cli.console import UsageProblem
from distckpt_cli.options import flag, panel, value

_layout, content = panel("Target layout"), panel("What to carry over")


@dataclass(frozen=True)
class TargetLayout:
    """The layout of the job that will load the result; None keeps the size that the source was saved with."""

    tp: int | None = value(_layout, "T", "Tensor-parallel size.", min=1)
    pp: int | None = value(_layout, "P", "Pipeline stages.", min=1)
    vpp: int | None = value(_layout, "V", "Model chunks of each pipeline rank.", min=1)
    ep: int | None = value(_layout, "E", "Expert-parallel size.", min=1)
    etp: int | None = value(_layout, "X", "Tensor-parallel size of experts; follows --tp where it was the same.", min=1)
    cp: int | None = value(_layout, "C", "Context-parallel size.", min=1)
    dp: int | None = value(
        _layout, "D", "Data-parallel size; by default the source's, or the smallest that fits --ep.", min=1
    )
    first_layers: int | None = value(_layout, "N", "Layers of the first pipeline stage.")
    last_layers: int | None = value(_layout, "N", "Layers of the last pipeline stage.")
    pp_layout: str | None = value(_layout, "STR", "Megatron's pipeline layout: 'Ettt|(tt|)*3,m|L'.")


@dataclass(frozen=True)
class Carried:
    """Which state of a training job is carried over, and in which form; None is the library's default."""

    optimizer: str | None = value(
        content,
        "FORM",
        "Form of the optimizer's state: plain (for a job without --use-distributed-optimizer), fully_reshardable, "
        "dp_reshardable, keep (the source's, as one of these), none (leave it out), auto (plain if the source is, else "
        "fully_reshardable; the default).",
        OPTIMIZERS,
    )
    masters: str | None = value(
        content,
        "KIND",
        "Master weights that a precision-aware optimizer stored as remainders: fp32 (the default; for a job without one), "
        "or remainders (for a job with one, of Megatron-Core 0.17 or later; with dp_reshardable).",
        choice_of("masters"),
    )
    layers: str | None = value(
        content, "STYLE", "Keys of layers: stacked, per-layer or keep (the default).", choice_of("layers")
    )
    rng: str | None = value(
        content,
        "WHAT",
        "Random states: keep, drop or auto (keep if the grid of ranks is the same; the default).",
        choice_of("rng"),
    )
    extra_state: str | None = value(
        content,
        "WHAT",
        "_extra_state objects: keep, drop or fill (keep, add missing ones; the default).",
        choice_of("extra_state"),
    )
    vocab_size: int | None = value(content, "N", "Rows of the vocabulary without padding.")
    fully_parallel: bool = flag(
        content, "Spread the files over data-parallel ranks, as a fully parallel save.", "--fully-parallel"
    )
    mcore: str | None = value(
        content,
        "V",
        "Megatron-Core that loads it: 0.16 (common.pt, which every version reads; the default) or 0.19 (embedded).",
        MCORE_VERSIONS,
    )

    def __post_init__(self) -> None:
        if self.optimizer == "none" and self.masters is not None:
            hint = "leave out --masters, or keep the optimizer"
            raise UsageProblem("--masters is about optimizer state, and --optimizer none leaves that out", hint=hint)
