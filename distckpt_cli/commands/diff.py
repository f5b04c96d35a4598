"""`distckpt diff`: whether two checkpoints hold the same, and where they do not."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import typer

from converters.names import quoted
from distckpt_cli.choices import ARCHITECTURES
from distckpt_cli.console import UsageProblem
from distckpt_cli.exits import ExitCode
from distckpt_cli.options import (
    Looking,
    MaxMemory,
    buffer_bytes,
    flag,
    options_set,
    output,
    panel,
    resolve_word,
    spread,
    value,
)

_panel = panel("What to compare")


@dataclass(frozen=True)
class Comparison:
    """What is compared, and how."""

    tensors: list[str] | None = value(_panel, "GLOB", "Compare only tensors that match; may be repeated.")
    ignore: list[str] | None = value(
        _panel, "GLOB", "Leave out tensors, or args.NAME, iteration, rng_state, opt_param_scheduler; may be repeated."
    )
    rtol: float | None = value(_panel, "X", "Values may differ by X times the larger one.", min=0)
    atol: float | None = value(_panel, "X", "Values may differ by X.", min=0)
    quick: bool = flag(_panel, "Compare no values: only names, shapes, types, arguments, state.", "--quick")
    args: str | None = value(_panel, "[GLOB]", "Compare the training arguments only.")
    arch: str | None = value(
        _panel, "NAME", "Architecture of the Hugging Face folder, if it is ambiguous.", ARCHITECTURES
    )
    vocab_size: int | None = value(_panel, "N", "Rows of the vocabulary without padding.", min=1)
    flat: bool = flag(output, "One row per tensor.", "--flat")
    max_memory: MaxMemory = None


@spread
def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A checkpoint, in any format and layout.")],
    b: Annotated[
        str, typer.Argument(metavar="B", help="Another checkpoint, or a Hugging Face folder of the same model.")
    ],
    comparison: Comparison,
    looking: Looking,
) -> int:
    """Compare two checkpoints: tensors, arguments, state, then every value. Exit code 0: the same, 1: different.

    Formats and layouts may differ: tensors are compared in the model's own shapes, those of a Hugging Face folder
    through the architecture's table. Without --rtol and --atol, bits and types must be equal; with either, values must
    lie within atol + rtol * max(|a|, |b|) of each other. Parallel layout and paths of the jobs are shown, but do not
    count.

        $ distckpt diff ckpt/iter_0050000 out/iter_0050000
        $ distckpt diff ckpt llama-hf --rtol 1e-2
        $ distckpt diff a b --tensors 'decoder.layers.{0..3}.*' --ignore '*.bias'
        $ distckpt diff a b --args
        $ distckpt diff a b --json | jq '.tensors[] | [.name, .max_abs]'
    """
    if comparison.args and (
        comparison.tensors
        or comparison.quick
        or comparison.arch
        or not (comparison.rtol is comparison.atol is comparison.vocab_size is None)
    ):
        hint = "leave out --tensors, --quick, --rtol, --atol, --arch and --vocab-size"
        raise UsageProblem("--args compares arguments only", hint=hint)
    if not math.isfinite((comparison.rtol or 0) + (comparison.atol or 0)):
        raise UsageProblem("--rtol and --atol are numbers", hint="an infinite tolerance accepts every difference")
    if comparison.quick and (comparison.rtol is not None or comparison.atol is not None):
        raise UsageProblem("--quick compares no values, so a tolerance has no effect")
    console = looking.console
    from converters.comparison.compare import DiffOptions, plan_diff, run_diff
    from converters.formats import open_checkpoint
    from converters.models import by_name
    from distckpt_cli import differences

    resolve_word(by_name, comparison.arch)
    chosen = {name: value for name, value in options_set(comparison).items() if name not in ("args", "flat")}
    chosen |= {"max_memory": buffer_bytes(comparison.max_memory), "threads": looking.threads}
    options = DiffOptions(**chosen)
    names = quoted(a), quoted(b)
    follow = looking.follow_links
    readers = open_checkpoint(a, follow_links=follow), open_checkpoint(b, follow_links=follow)
    foreign = sum(not reader.catalog.megatron for reader in readers)
    if comparison.arch is not None and foreign != 1:
        raise UsageProblem("--arch is for a Megatron checkpoint beside a Hugging Face folder", hint="leave out --arch")
    if comparison.vocab_size is not None and foreign == 2:
        raise UsageProblem(
            "--vocab-size is for Megatron checkpoints, whose rows are padded", hint="leave out --vocab-size"
        )
    if comparison.args:
        return differences.show_arguments(console, *readers, comparison.args, options.ignore, flat=comparison.flat)
    plan = plan_diff(*readers, options)
    with looking.watched(console) as watched:
        report = run_diff(plan, **watched)
    if looking.as_json:
        console.document("distckpt.diff/1", report.document(every=comparison.flat))
    else:
        differences.show(console, report, names, flat=comparison.flat)
    return ExitCode.OK if report.identical else ExitCode.NO
