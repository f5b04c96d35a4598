"""`distckpt diff`: whether two checkpoints hold the same, and where they do not."""

from __future__ import annotations

import math
from typing import Annotated

import typer

from converters.names import quoted
from distckpt_cli.choices import ARCHITECTURES
from distckpt_cli.console import UsageProblem
from distckpt_cli.exits import ExitCode
from distckpt_cli.options import Looking, MaxMemory, buffer_bytes, output, panel, resolve_word, spread

_compare_option = panel("What to compare")


@spread
def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A checkpoint, in any format and layout.")],
    b: Annotated[
        str, typer.Argument(metavar="B", help="Another checkpoint, or a Hugging Face folder of the same model.")
    ],
    *,
    tensors: Annotated[
        list[str] | None, _compare_option(metavar="GLOB", help="Compare only tensors that match; may be repeated.")
    ] = None,
    ignore: Annotated[
        list[str] | None,
        _compare_option(
            metavar="GLOB",
            help="Leave out tensors, or args.NAME, iteration, rng_state, opt_param_scheduler; may be repeated.",
        ),
    ] = None,
    rtol: Annotated[
        float | None, _compare_option(metavar="X", min=0, help="Values may differ by X times the larger one.")
    ] = None,
    atol: Annotated[float | None, _compare_option(metavar="X", min=0, help="Values may differ by X.")] = None,
    quick: Annotated[
        bool, _compare_option("--quick", help="Compare no values: only names, shapes, types, arguments, state.")
    ] = False,
    args: Annotated[str | None, _compare_option(metavar="[GLOB]", help="Compare the training arguments only.")] = None,
    arch: Annotated[
        str | None,
        _compare_option(
            metavar="NAME",
            help="Architecture of the Hugging Face folder, if it is ambiguous.",
            autocompletion=ARCHITECTURES.complete,
        ),
    ] = None,
    vocab_size: Annotated[
        int | None, _compare_option(metavar="N", min=1, help="Rows of the vocabulary without padding.")
    ] = None,
    flat: Annotated[bool, output("--flat", help="One row per tensor.")] = False,
    max_memory: MaxMemory = None,
    looking: Looking,
) -> int:
    """Compare two checkpoints: tensors, arguments, state, then every value. Exit code 0: the same, 1: different.

    Formats and layouts may differ: tensors are compared in the model's own shapes, those of a Hugging Face folder
    through the architecture's table. Without --rtol and --atol, bits and types must be equal; with either, values must
    lie within atol + rtol * max(|a|, |b|) of each other. Parallel layout and paths of the jobs are shown, but do not
    count.
    """
    if args and (tensors or quick or arch or not (rtol is atol is vocab_size is None)):
        hint = "leave out --tensors, --quick, --rtol, --atol, --arch and --vocab-size"
        raise UsageProblem("--args compares arguments only", hint=hint)
    if not math.isfinite((rtol or 0) + (atol or 0)):
        raise UsageProblem("--rtol and --atol are numbers", hint="an infinite tolerance accepts every difference")
    if quick and (rtol is not None or atol is not None):
        raise UsageProblem("--quick compares no values, so a tolerance has no effect")
    console = looking.console
    from converters.comparison.compare import DiffOptions, plan_diff, run_diff
    from converters.comparison.values import Tolerance
    from converters.formats import open_checkpoint
    from converters.models import by_name
    from distckpt_cli import differences

    resolve_word(by_name, arch)
    options = DiffOptions(
        tolerance=None if rtol is None and atol is None else Tolerance(rtol or 0.0, atol or 0.0),
        tensors=tuple(tensors or ()),
        ignore=tuple(ignore or ()),
        quick=quick,
        arch=arch,
        vocab_size=vocab_size,
        max_memory=buffer_bytes(max_memory),
        threads=looking.threads,
    )
    names = quoted(a), quoted(b)
    follow = looking.follow_links
    readers = open_checkpoint(a, follow_links=follow), open_checkpoint(b, follow_links=follow)
    foreign = sum(not reader.catalog.megatron for reader in readers)
    if arch is not None and foreign != 1:
        raise UsageProblem("--arch is for a Megatron checkpoint beside a Hugging Face folder", hint="leave out --arch")
    if vocab_size is not None and foreign == 2:
        raise UsageProblem(
            "--vocab-size is for Megatron checkpoints, whose rows are padded", hint="leave out --vocab-size"
        )
    if args:
        return differences.show_arguments(console, *readers, args, options.ignore, flat=flat)
    plan = plan_diff(*readers, options)
    with looking.watched(console) as watched:
        report = run_diff(plan, **watched)
    if looking.as_json:
        console.document("distckpt.diff/1", report.document(every=flat))
    else:
        differences.show(console, report, names, flat=flat)
    return ExitCode.OK if report.identical else ExitCode.NO
