"""`distckpt convert`: a checkpoint in another storage format."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from converters.names import quoted
from distckpt_cli.choices import FORMATS, OPTIMIZERS, Words, check_choice, choice_of
from distckpt_cli.console import UsageProblem
from distckpt_cli.options import Ckpt, flag, options_set, panel, shard_bytes, spread, value
from distckpt_cli.targets import Carried, TargetLayout, content
from distckpt_cli.writing import Writing, carry_out

if TYPE_CHECKING:
    from collections.abc import Iterable

_format = panel("Format")


def _written() -> Iterable[str]:
    from converters.write.convert import WRITERS

    return WRITERS


@dataclass(frozen=True)
class Format:
    """What is made of what."""

    to: str = value(
        _format, "FORMAT", "torch_dist, legacy, torch or safetensors.", Words(_written, strict=False), default=MISSING
    )
    source: str | None = value(_format, "FORMAT", "Read CKPT as this format.", FORMATS, "--from")
    weights_only: bool = flag(_format, "Leave out optimizer and random states.", "--weights-only")
    names: str | None = value(_format, "STYLE", "Names of tensors: megatron (the default) or hf.", choice_of("names"))
    max_shard_size: str | None = value(_format, "SIZE", "Size of the largest safetensors file, 5GB by default.")
    spec: str | None = value(
        _format, "LAYERS", "Layers of a legacy job: te or local; by default as its arguments say.", choice_of("spec")
    )
    experts: str | None = value(
        _format, "HOW", "Experts of a legacy job: grouped, sequential or stacked.", choice_of("experts")
    )

    @property
    def content(self) -> dict[str, Any]:
        """The options about the content, by the library's names."""
        options = {name: value for name, value in options_set(self).items() if name not in ("to", "source")}
        if "max_shard_size" in options:
            options["max_shard_bytes"] = shard_bytes(options.pop("max_shard_size"))
        return options


@dataclass(frozen=True)
class Content(Carried):
    """What goes along, in any format."""

    optimizer: str | None = value(
        content,
        "FORM",
        "Form of the optimizer's state: for torch_dist plain, fully_reshardable or dp_reshardable (by default plain if the "
        "source is, else fully_reshardable); for legacy distributed or plain; keep: what comes nearest to the source's "
        "(torch_dist) or what its training arguments say (legacy, the default); none: leave it out.",
        OPTIMIZERS,
    )


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

        $ distckpt convert legacy/iter_0050000 out --to torch_dist --tp 2 --pp 2
        $ distckpt convert ckpt out --to torch_dist --mcore 0.19 --weights-only
        $ distckpt convert ckpt model.pt --to torch
        $ distckpt convert ckpt out --to safetensors --names hf
    """
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

    options = {"to": form.to, **content}
    return carry_out("distckpt.convert/1", src, dst, writing, options, layout=layout, format=form.source)


def _option(name: str) -> str:
    return "--max-shard-size" if name == "max_shard_bytes" else f"--{name.replace('_', '-')}"


def _instead(name: str, takes: frozenset[str]) -> str:
    if name in {f.name for f in fields(TargetLayout)}:
        return "whole tensors belong to no rank; a layout is for --to torch_dist or legacy"
    options = ("weights_only", "names", "spec", "experts", "max_shard_bytes", *(f.name for f in fields(Carried)))
    return f"it takes {', '.join(_option(name) for name in options if name in takes)}"
