"""`distckpt convert`: a checkpoint in another storage format."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from distckpt_cli.console import UsageProblem, named
from distckpt_cli.options import Ckpt, check_choice, given, panel, shard_bytes, spread
from distckpt_cli.targets import Carried, PlanCaching, TargetLayout, content
from distckpt_cli.writing import Writing, carry_out

if TYPE_CHECKING:
    from converters.targets.conversion import Conversion
    from distckpt_cli.console import Console

_format = panel("Format")
_ASKED = ("weights_only", "names", "spec", "experts")


@dataclass(frozen=True)
class Format:
    """What is made of what."""

    to: Annotated[str, _format(metavar="FORMAT", help="torch_dist, legacy, torch or safetensors.")]
    source: Annotated[str | None, _format("--from", metavar="FORMAT", help="Read CKPT as this format.")] = None
    weights_only: Annotated[bool, _format("--weights-only", help="Neither optimizer nor random state.")] = False
    names: Annotated[str | None, _format(metavar="STYLE", help="Names of tensors: megatron (the default) or hf.")] = (
        None
    )
    max_shard_size: Annotated[
        str | None, _format(metavar="SIZE", help="Largest file of safetensors, 5GB by default.")
    ] = None
    spec: Annotated[
        str | None,
        _format(metavar="LAYERS", help="Layers of a legacy job: te or local; by default as its arguments say."),
    ] = None
    experts: Annotated[
        str | None, _format(metavar="HOW", help="Experts of a legacy job: grouped, sequential or stacked.")
    ] = None

    def __post_init__(self) -> None:
        check_choice("--names", self.names, ("megatron", "hf"))
        check_choice("--spec", self.spec, ("te", "local"))
        check_choice("--experts", self.experts, ("grouped", "sequential", "stacked"))

    @property
    def content(self) -> dict[str, Any]:
        """What was asked of the content, by the names of the library's options."""
        asked = {name: value for name, value in given(self).items() if name in _ASKED}
        if self.max_shard_size is not None:
            asked["max_shard_bytes"] = shard_bytes(self.max_shard_size)
        return asked


@dataclass(frozen=True)
class Content(Carried):
    """What goes along, in any format."""

    optimizer: Annotated[
        str | None,
        content(
            metavar="FORM",
            help="Form of the optimizer's state: for torch_dist fully_reshardable (the default) or dp_reshardable; for "
            "legacy distributed or plain; keep: what comes nearest to the source's (torch_dist) or what its training "
            "arguments say (legacy, the default); none: leave it out.",
        ),
    ] = None


@spread
def convert(
    src: Ckpt,
    dst: Annotated[
        str, typer.Argument(metavar="DST", help="The folder to make, or for --to torch the file; absent or empty.")
    ],
    form: Format,
    target: TargetLayout,
    carried: Content,
    writing: Writing,
    caching: PlanCaching,
) -> int:
    """Write a checkpoint in another storage format.

    torch_dist and legacy are what training jobs load, at the layout that is asked for; torch is one file of torch.save,
    safetensors a folder, both of whole tensors. Options that have no meaning for a format are refused.
    """
    from converters.formats import REGISTRY, open_checkpoint
    from converters.targets.convert import WRITERS, plan_convert

    check_choice("--to", form.to, tuple(WRITERS))
    check_choice("--from", form.source, tuple(known.name for known in REGISTRY))
    writer = WRITERS[form.to]
    layout, takes = given(target), writer.takes()
    content = given(carried) | form.content
    caching_asked = [] if writer.cached else list(given(caching))
    if caching.plan_cache == os.environ.get("DISTCKPT_PLAN_CACHE"):  # said for all commands, not for this one
        caching_asked = [name for name in caching_asked if name != "plan_cache"]
    for name in [*(n for n in (*layout, *content) if n not in takes), *caching_asked]:
        raise UsageProblem(f"{_option(name)} has no meaning with --to {form.to}", hint=_instead(name, takes))
    check_choice("--optimizer", carried.optimizer, writer.optimizers())
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


def _option(name: str) -> str:
    return "--max-shard-size" if name == "max_shard_bytes" else f"--{name.replace('_', '-')}"


def _instead(name: str, takes: frozenset[str]) -> str:
    if name in {f.name for f in fields(TargetLayout)}:
        return "whole tensors belong to no rank; a layout is for --to torch_dist or legacy"
    known = [n for n in (*_ASKED, "max_shard_bytes", *(f.name for f in fields(Carried))) if n in takes]
    return f"it takes {', '.join(map(_option, known))}"
