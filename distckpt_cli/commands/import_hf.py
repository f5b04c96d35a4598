"""`distckpt import-hf`: a Hugging Face folder as a checkpoint that a Megatron-LM job starts from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from distckpt_cli.choices import DTYPES, MCORE_VERSIONS, choice, choice_of
from distckpt_cli.options import options_set, panel, resolve_word, spread, value
from distckpt_cli.targets import TargetLayout  # noqa: TC001
from distckpt_cli.writing import Target, Writing, carry_out

_job = panel("The job")


@dataclass(frozen=True)
class ImportRequest:
    """What may be asked of an import; None is what the library does by default."""

    to: str | None = value(
        _job,
        "FORMAT",
        "torch_dist (the default), legacy, or megatron-bridge (the default for families that only Megatron-Bridge builds).",
        choice("torch_dist", "legacy", "megatron-bridge"),
    )
    mcore: str | None = value(
        _job, "V", "Version of Megatron-LM that starts from it: 0.16 (the default) or 0.19.", MCORE_VERSIONS
    )
    dtype: str | None = value(_job, "TYPE", "bf16, fp16 or fp32; by default as stored.", DTYPES)
    iteration: int | None = value(_job, "N", "Store it as iteration N; by default as a release.", min=0)
    mtp: str | None = value(
        _job, "WHAT", "Multi-token prediction layers: keep, drop or auto (the default).", choice_of("mtp")
    )
    part: str | None = value(
        _job, "WHAT", "text: import the language model of a model of text and images.", choice_of("part")
    )
    pad: str | None = value(
        _job,
        "WHAT",
        "Rows that pad the vocabulary: zero (the default) or mean (of the other rows).",
        choice_of("pad"),
    )
    make_vocab_size_divisible_by: int | None = value(
        _job, "N", "Rows of the padded vocabulary are a multiple of N times --tp, 128 by default.", min=1
    )

    @property
    def options(self) -> dict[str, Any]:
        """What the library calls them."""
        from converters.dtypes import from_option

        options = options_set(self)
        if self.dtype is not None:
            options["dtype"] = resolve_word(from_option, self.dtype)
        if "make_vocab_size_divisible_by" in options:
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

        $ distckpt import-hf Qwen3-8B start --tp 2 --pp 2
        $ distckpt import-hf Mixtral-8x7B start --ep 8 --mcore 0.19
        $ distckpt import-hf llama-hf start --to legacy --dtype bf16
        $ distckpt import-hf Qwen3-8B start --dry-run --json | jq -r .arguments
    """
    from converters.transformers_config import start

    start()
    return carry_out("distckpt.import-hf/1", src, dst, writing, request.options, layout=options_set(target))
