"""`distckpt convert`: a checkpoint in another storage format."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from converters.names import quoted
from distckpt_cli.choices import FORMATS, OPTIMIZERS, Words, check_choice, choice_of
from distckpt_cli.console import UsageProblem, named
from distckpt_cli.options import Ckpt, options_set, panel, shard_bytes, spread
from distckpt_cli.targets import Carried, TargetLayout, content
from distckpt_cli.writing import Writing, carry_out

if TYPE_CHECKING:
    from collections.abc import Iterable

    from converters.write.write_plan import Conversion
    from distckpt_cli.console import Console

_format = panel("Format")


def _written() -> Iterable[str]:
    from converters.write.convert import WRITERS

    return WRITERS


_WRITTEN = Words(_written, strict=False)
_CONTENT = ("weights_only", "names", "spec", "experts")


@dataclass(frozen=True)
class Format:
    """What is made of what."""

    to: Annotated[
        str,
        _format(metavar="FORMAT", help="torch_dist, legacy, torch or safetensors.", autocompletion=_WRITTEN.complete),
    ]
    source: Annotated[
        str | None,
        _format("--from", metavar="FORMAT", help="Read CKPT as this format.", autocompletion=FORMATS.complete),
    ] = None
    weights_only: Annotated[bool, _format("--weights-only", help="Leave out optimizer and random states.")] = False
    names: Annotated[
        str | None,
        _format(
            metavar="STYLE",
            help="Names of tensors: megatron (the default) or hf.",
            autocompletion=choice_of("names").complete,
        ),
    ] = None
    max_shard_size: Annotated[
        str | None, _format(metavar="SIZE", help="Size of the largest safetensors file, 5GB by default.")
    ] = None
    spec: Annotated[
        str | None,
        _format(
            metavar="LAYERS",
            help="Layers of a legacy job: te or local; by default as its arguments say.",
            autocompletion=choice_of("spec").complete,
        ),
    ] = None
    experts: Annotated[
        str | None,
        _format(
            metavar="HOW",
            help="Experts of a legacy job: grouped, sequential or stacked.",
            autocompletion=choice_of("experts").complete,
        ),
    ] = None

    @property
    def content(self) -> dict[str, Any]:
        """What was asked of the content, by the names of the library's options."""
        options = {name: value for name, value in options_set(self).items() if name in _CONTENT}
        if self.max_shard_size is not None:
            options["max_shard_bytes"] = shard_bytes(self.max_shard_size)
        return options


@dataclass(frozen=True)
class Content(Carried):
    """What goes along, in any format."""

    optimizer: Annotated[
        str | None,
        content(
            metavar="FORM",
            help="Form of the optimizer's state: for torch_dist plain, fully_reshardable or dp_reshardable (by default "
            "plain if the source is, else fully_reshardable); for legacy distributed or plain; keep: what comes nearest to "
            "the source's (torch_dist) or what its training arguments say (legacy, the default); none: leave it out.",
            autocompletion=OPTIMIZERS.complete,
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
) -> int:
    """Write a checkpoint in another storage format.

    Training jobs load torch_dist and legacy, at the given layout; sizes not given stay the source's. torch is one file
    of torch.save, safetensors a folder; both hold whole tensors. Options without effect on a format are refused.
    """
    from converters.commands import plan_command
    from converters.write.convert import WRITERS

    if form.to.lower() in ("hf", "huggingface", "hugging-face", "transformers"):
        raise UsageProblem(
            f"--to {form.to}: a Hugging Face folder is what export-hf writes",
            hint=f"distckpt export-hf {quoted(src)} {quoted(dst)}",
        )
    check_choice("--to", form.to, WRITERS)
    writer = WRITERS[form.to]
    layout, takes = options_set(target), writer.takes()
    content = options_set(carried) | form.content
    for name in (n for n in (*layout, *content) if n not in takes):
        raise UsageProblem(f"{_option(name)} has no effect with --to {form.to}", hint=_instead(name, takes))
    check_choice("--optimizer", carried.optimizer, writer.optimizers())
    if form.weights_only and content.get("optimizer", "none") != "none":
        raise UsageProblem(f"--weights-only and --optimizer {carried.optimizer} contradict each other")

    def plan(_: Console) -> Conversion:
        return plan_command(
            "convert",
            src,
            named(dst),
            {"to": form.to, **content, **writing.options},
            layout=layout,
            format=form.source,
            follow_links=writing.follow_links,
        )

    return carry_out("distckpt.convert/1", writing, plan)


def _option(name: str) -> str:
    return "--max-shard-size" if name == "max_shard_bytes" else f"--{name.replace('_', '-')}"


def _instead(name: str, takes: frozenset[str]) -> str:
    if name in {f.name for f in fields(TargetLayout)}:
        return "whole tensors belong to no rank; a layout is for --to torch_dist or legacy"
    options = [n for n in (*_CONTENT, "max_shard_bytes", *(f.name for f in fields(Carried))) if n in takes]
    return f"it takes {', '.join(map(_option, options))}"
