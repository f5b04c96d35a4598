"""`distckpt import-hf`: a Hugging Face folder as a checkpoint that a Megatron-LM job starts from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from distckpt_cli.choices import DTYPES, MCORE_VERSIONS, choice, choice_of
from distckpt_cli.console import UsageProblem, named
from distckpt_cli.options import options_set, panel, resolve_word, spread
from distckpt_cli.targets import TargetLayout  # noqa: TC001
from distckpt_cli.writing import Target, Writing, carry_out

_job = panel("The job")


@dataclass(frozen=True)
class ImportRequest:
    """What may be asked of an import; None is what the library does by default."""

    to: Annotated[
        str | None,
        _job(
            metavar="FORMAT",
            help="torch_dist (the default), legacy, or megatron-bridge (the default for families that only Megatron-Bridge "
            "builds).",
            autocompletion=choice("torch_dist", "legacy", "megatron-bridge").complete,
        ),
    ] = None
    mcore: Annotated[
        str | None,
        _job(
            metavar="V",
            help="Version of Megatron-LM that starts from it: 0.16 (the default) or 0.19.",
            autocompletion=MCORE_VERSIONS.complete,
        ),
    ] = None
    dtype: Annotated[
        str | None,
        _job(metavar="TYPE", help="bf16, fp16 or fp32; by default as stored.", autocompletion=DTYPES.complete),
    ] = None
    iteration: Annotated[
        int | None, _job(metavar="N", min=0, help="Store it as iteration N; by default as a release.")
    ] = None
    mtp: Annotated[
        str | None,
        _job(
            metavar="WHAT",
            help="Multi-token prediction layers: keep, drop or auto (the default).",
            autocompletion=choice_of("mtp").complete,
        ),
    ] = None
    part: Annotated[
        str | None,
        _job(
            metavar="WHAT",
            help="text: import the language model of a model of text and images.",
            autocompletion=choice_of("part").complete,
        ),
    ] = None
    pad: Annotated[
        str | None,
        _job(
            metavar="WHAT",
            help="Rows that pad the vocabulary: zero (the default) or mean (of the other rows).",
            autocompletion=choice_of("pad").complete,
        ),
    ] = None
    make_vocab_size_divisible_by: Annotated[
        int | None,
        _job(metavar="N", help="Rows of the padded vocabulary are a multiple of N times --tp, 128 by default."),
    ] = None

    def options(self, writing: Writing) -> dict[str, Any]:
        """What the library calls them."""
        from converters.dtypes import from_option

        divisible = self.make_vocab_size_divisible_by
        if divisible is not None and divisible < 1:
            raise UsageProblem(f"--make-vocab-size-divisible-by is {divisible}; it must be 1 or more")
        options = options_set(self) | writing.options
        if self.dtype is not None:
            options["dtype"] = resolve_word(from_option, self.dtype)
        if divisible is not None:
            options["divisible"] = options.pop("make_vocab_size_divisible_by")
        return options


@spread
def import_hf(
    src: Annotated[str, typer.Argument(metavar="SRC", help="A Hugging Face folder: config.json and weights.")],
    dst: Target,
    target: TargetLayout,
    request: ImportRequest,
    writing: Writing,
) -> int:
    """Write a Hugging Face model as a checkpoint that a Megatron-LM job starts from.

    The result is a training root with the weights at the given layout (sizes not given are 1), the tokenizer, and
    megatron_args.txt: the flags with which Megatron-LM builds this model. Start the job with these flags:
    --use-checkpoint-args leaves out the norm's epsilon, --qk-layernorm, latent attention and more. Every key of
    config.json that changes what the model computes is carried or refused.
    """
    from converters.commands import plan_command

    options = request.options(writing)
    return carry_out(
        "distckpt.import-hf/1",
        writing,
        lambda _: plan_command(
            "import-hf", src, named(dst), options, layout=options_set(target), follow_links=writing.follow_links
        ),
    )
