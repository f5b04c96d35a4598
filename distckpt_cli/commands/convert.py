"""`distckpt convert`: a checkpoint in another storage format."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated

import typer

from distckpt_cli.console import UsageProblem, named
from distckpt_cli.options import Ckpt, check_choice, given, spread
from distckpt_cli.targets import Carried, PlanCaching, TargetLayout
from distckpt_cli.writing import Target, Writing, carry_out

if TYPE_CHECKING:
    from converters.conversion import Conversion
    from distckpt_cli.console import Console

_FORMAT = "Format"


@dataclass(frozen=True)
class Format:
    """What is made of what."""

    to: Annotated[
        str,
        typer.Option(metavar="FORMAT", help="What to write: torch_dist.", rich_help_panel=_FORMAT),
    ]
    source: Annotated[
        str | None,
        typer.Option("--from", metavar="FORMAT", help="Read CKPT as this format.", rich_help_panel=_FORMAT),
    ] = None
    weights_only: Annotated[
        bool,
        typer.Option("--weights-only", help="Neither optimizer nor random state.", rich_help_panel=_FORMAT),
    ] = False
    names: Annotated[
        str | None,
        typer.Option(metavar="STYLE", help="Names of tensors: megatron (the default) or hf.", rich_help_panel=_FORMAT),
    ] = None


@spread
def convert(
    src: Ckpt,
    dst: Target,
    form: Format,
    target: TargetLayout,
    carried: Carried,
    writing: Writing,
    caching: PlanCaching,
) -> int:
    """Write a checkpoint in another storage format.

    Options that have no meaning for that format are refused.
    """
    from converters.convert import WRITERS, plan_convert
    from converters.formats import open_checkpoint

    check_choice("--to", form.to, tuple(WRITERS))
    check_choice("--names", form.names or "hf", ("megatron", "hf"))
    writer = WRITERS[form.to]
    layout, takes = given(target), writer.takes()
    content = given(carried) | {n: v for n, v in given(form).items() if n in ("weights_only", "names")}
    caching_asked = [] if writer.cached else [*given(caching)]
    for name in [*(n for n in (*layout, *content) if n not in takes), *caching_asked]:
        raise UsageProblem(f"--{name.replace('_', '-')} has no meaning with --to {form.to}", hint=_instead(name, takes))
    if form.weights_only and content.get("optimizer", "none") != "none":
        raise UsageProblem(f"--weights-only and --optimizer {carried.optimizer} contradict each other")

    def plan(console: Console) -> Conversion:
        reader = open_checkpoint(src, form.source)
        asked = {**content, **writing.options}
        place = target.layout() if writer.layout else None
        if not writer.cached:
            return plan_convert(reader, named(dst), form.to, layout=place, given=asked)
        with caching.cache(console, keeps=not writing.dry_run) as cache:
            return plan_convert(reader, named(dst), form.to, layout=place, given=asked, cache=cache)

    return carry_out("distckpt.convert/1", writing, plan)


def _instead(name: str, takes: frozenset[str]) -> str:
    if name in {f.name for f in fields(TargetLayout)}:
        return "whole tensors belong to no rank: torch_dist and legacy have a layout"
    known = [n for n in ("weights_only", "names", *(f.name for f in fields(Carried))) if n in takes]
    return f"it takes {', '.join('--' + n.replace('_', '-') for n in known)}"
