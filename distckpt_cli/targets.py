"""What may be asked of a target job, as options that several commands share."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from distckpt_cli.console import UsageProblem
from distckpt_cli.options import check_choice, panel, resources

if TYPE_CHECKING:
    from collections.abc import Iterator

    from converters.parallel.layout import Layout
    from converters.targets.plan_cache import PlanCache
    from distckpt_cli.console import Console

__all__ = ["Carried", "PlanCaching", "TargetLayout", "content"]

_layout, content = panel("Target layout"), panel("What to carry over")


@dataclass(frozen=True)
class TargetLayout:
    """The layout of the job that will load the result."""

    tp: Annotated[int, _layout(metavar="T", help="Tensor-parallel size, 1 by default.")] = 1
    pp: Annotated[int, _layout(metavar="P", help="Pipeline stages, 1 by default.")] = 1
    vpp: Annotated[int | None, _layout(metavar="V", help="Model chunks of each pipeline rank.")] = None
    ep: Annotated[int, _layout(metavar="E", help="Expert-parallel size, 1 by default.")] = 1
    etp: Annotated[
        int | None, _layout(metavar="X", help="Tensor-parallel size of experts; by default that of --tp.")
    ] = None
    cp: Annotated[int, _layout(metavar="C", help="Context-parallel size, 1 by default.")] = 1
    dp: Annotated[int | None, _layout(metavar="D", help="Data-parallel size; by default the least that fits.")] = None
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

    def layout(self) -> Layout:
        """What the library calls it."""
        from converters.parallel.layout import Layout

        dp = self.dp or Layout.least_dp(self.tp, self.cp, self.ep, self.etp)
        return Layout(**{**vars(self), "dp": dp})


@dataclass(frozen=True)
class Carried:
    """What of a training job's state goes along, and in which form; None is what the library does by default."""

    optimizer: Annotated[
        str | None,
        content(
            metavar="FORM",
            help="Form of the optimizer's state: fully_reshardable (the default), dp_reshardable, keep (flat buckets "
            "become dp_reshardable, any other form fully_reshardable), or none (leave it out).",
        ),
    ] = None
    layers: Annotated[str | None, content(metavar="STYLE", help="Keys: stacked, per-layer or keep (the default).")] = (
        None
    )
    rng: Annotated[
        str | None,
        content(metavar="WHAT", help="keep, drop or auto (keep if the grid is the same; the default)."),
    ] = None
    extra_state: Annotated[
        str | None, content(metavar="WHAT", help="keep, drop or fill (keep, make missing ones; the default).")
    ] = None
    vocab_size: Annotated[int | None, content(metavar="N", help="True rows of the vocabulary.")] = None
    fully_parallel: Annotated[bool, content("--fully-parallel", help="Spread replicas over data-parallel ranks.")] = (
        False
    )
    mcore: Annotated[
        str | None,
        content(
            metavar="V",
            help="Form of the common state: 0.19 (embedded), or 0.18 (common.pt, read by all; the default).",
        ),
    ] = None

    def __post_init__(self) -> None:
        check_choice("--mcore", self.mcore, ("0.18", "0.19"))
        check_choice("--layers", self.layers, ("stacked", "per-layer", "keep"))
        check_choice("--rng", self.rng, ("keep", "drop", "auto"))
        check_choice("--extra-state", self.extra_state, ("keep", "drop", "fill"))


@dataclass(frozen=True)
class PlanCaching:
    """Whether plans are kept for the next iteration."""

    plan_cache: Annotated[
        str | None,
        resources(
            metavar="DIR",
            envvar="DISTCKPT_PLAN_CACHE",
            help="Where plans are kept for the next iteration; by default ~/.cache/distckpt/plans.",
        ),
    ] = None
    no_plan_cache: Annotated[bool, resources("--no-plan-cache", help="Neither use nor keep a plan.")] = False

    @contextlib.contextmanager
    def cache(self, console: Console, *, keeps: bool) -> Iterator[PlanCache | None]:
        """The cache, for the time of planning; says with `-v` what became of it.

        Args:
            keeps: Whether a plan that is made is kept.
        """
        from converters.targets.plan_cache import PlanCache

        cache = None if self.no_plan_cache else PlanCache.default(self.plan_cache, keeps=keeps)
        yield cache
        for text in cache.said if cache and console.verbose else ():
            console.note(text)
