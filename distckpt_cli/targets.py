"""Options of the target job that several commands share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from distckpt_cli.choices import MCORE_VERSIONS, OPTIMIZERS, choice_of
from distckpt_cli.console import UsageProblem
from distckpt_cli.options import panel

_layout, content = panel("Target layout"), panel("What to carry over")


@dataclass(frozen=True)
class TargetLayout:
    """The layout of the job that will load the result; None keeps the size that the source was saved with."""

    tp: Annotated[int | None, _layout(metavar="T", help="Tensor-parallel size.")] = None
    pp: Annotated[int | None, _layout(metavar="P", help="Pipeline stages.")] = None
    vpp: Annotated[int | None, _layout(metavar="V", help="Model chunks of each pipeline rank.")] = None
    ep: Annotated[int | None, _layout(metavar="E", help="Expert-parallel size.")] = None
    etp: Annotated[
        int | None, _layout(metavar="X", help="Tensor-parallel size of experts; follows --tp where it was the same.")
    ] = None
    cp: Annotated[int | None, _layout(metavar="C", help="Context-parallel size.")] = None
    dp: Annotated[
        int | None,
        _layout(metavar="D", help="Data-parallel size; by default the source's, or the smallest that fits --ep."),
    ] = None
    first_layers: Annotated[int | None, _layout(metavar="N", help="Layers of the first pipeline stage.")] = None
    last_layers: Annotated[int | None, _layout(metavar="N", help="Layers of the last pipeline stage.")] = None
    pp_layout: Annotated[str | None, _layout(metavar="STR", help="Megatron's pipeline layout: 'Ettt|(tt|)*3,m|L'.")] = (
        None
    )

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "vpp", "ep", "etp", "cp", "dp"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageProblem(f"--{name} is {value}; it must be 1 or more")


@dataclass(frozen=True)
class Carried:
    """What of a training job's state goes along, and in which form; None is what the library does by default."""

    optimizer: Annotated[
        str | None,
        content(
            metavar="FORM",
            help="Form of the optimizer's state: plain (for a job without --use-distributed-optimizer), fully_reshardable, "
            "dp_reshardable, keep (the source's, as one of these), none (leave it out), auto (plain if the source is, else "
            "fully_reshardable; the default).",
            autocompletion=OPTIMIZERS.complete,
        ),
    ] = None
    masters: Annotated[
        str | None,
        content(
            metavar="KIND",
            help="Master weights that a precision-aware optimizer stored as remainders: fp32 (the default; for a job "
            "without one), or remainders (for a job with one, of Megatron-Core 0.17 or later; with dp_reshardable).",
            autocompletion=choice_of("masters").complete,
        ),
    ] = None
    layers: Annotated[
        str | None,
        content(
            metavar="STYLE",
            help="Keys of layers: stacked, per-layer or keep (the default).",
            autocompletion=choice_of("layers").complete,
        ),
    ] = None
    rng: Annotated[
        str | None,
        content(
            metavar="WHAT",
            help="Random states: keep, drop or auto (keep if the grid of ranks is the same; the default).",
            autocompletion=choice_of("rng").complete,
        ),
    ] = None
    extra_state: Annotated[
        str | None,
        content(
            metavar="WHAT",
            help="_extra_state objects: keep, drop or fill (keep, add missing ones; the default).",
            autocompletion=choice_of("extra_state").complete,
        ),
    ] = None
    vocab_size: Annotated[int | None, content(metavar="N", help="Rows of the vocabulary without padding.")] = None
    fully_parallel: Annotated[
        bool, content("--fully-parallel", help="Spread the files over data-parallel ranks, as a fully parallel save.")
    ] = False
    mcore: Annotated[
        str | None,
        content(
            metavar="V",
            help="Megatron-Core that loads it: 0.16 (common.pt, which every version reads; the default) or 0.19 (embedded).",
            autocompletion=MCORE_VERSIONS.complete,
        ),
    ] = None

    def __post_init__(self) -> None:
        if self.optimizer == "none" and self.masters is not None:
            hint = "leave out --masters, or keep the optimizer"
            raise UsageProblem("--masters is about optimizer state, and --optimizer none leaves that out", hint=hint)
