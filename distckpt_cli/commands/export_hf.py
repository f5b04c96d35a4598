"""`distckpt export-hf`: a Megatron checkpoint as a folder that transformers loads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from distckpt_cli.console import UsageProblem, named
from distckpt_cli.options import Ckpt, check_choice, known, output, panel, shard_bytes, spread
from distckpt_cli.writing import Target, Writing, carry_out

if TYPE_CHECKING:
    from converters.targets.export import ExportOptions

_model = panel("The model")


@dataclass(frozen=True)
class Asked:
    """What may be asked of an export."""

    arch: Annotated[str | None, _model(metavar="NAME", help="Architecture, if the inferred one is wrong.")] = None
    hf_config: Annotated[
        str | None,
        _model(
            metavar="DIR", help="Take config.json and tokenizer from this Hugging Face folder, after a cross-check."
        ),
    ] = None
    copy_code: Annotated[
        bool,
        _model("--copy-code", help="Take its code, too: .py files, auto_map. It runs only with trust_remote_code."),
    ] = False
    dtype: Annotated[
        str | None,
        _model(
            metavar="TYPE",
            help="bf16, fp16 or fp32; by default as stored, or of fp32 masters alone what the job computed in.",
        ),
    ] = None
    vocab_size: Annotated[
        int | None, _model(metavar="N", help="Rows of the vocabulary to keep; the rest is padding.")
    ] = None
    mtp: Annotated[str, _model(metavar="WHAT", help="Multi-token prediction layers: keep, drop or auto.")] = "auto"
    max_shard_size: Annotated[str, output(metavar="SIZE", help="Largest file, 5GB by default.")] = "5GB"

    def options(self, writing: Writing) -> ExportOptions:
        """What the library calls them."""
        from converters.dtypes import from_option
        from converters.models import by_name
        from converters.targets.export import ExportOptions

        if self.copy_code and not self.hf_config:
            raise UsageProblem("--copy-code copies from --hf-config, which was not given", hint="add --hf-config DIR")
        check_choice("--mtp", self.mtp, ("keep", "drop", "auto"))
        known(by_name, self.arch)
        return ExportOptions(
            arch=self.arch,
            dtype=known(from_option, self.dtype),
            vocab_size=self.vocab_size,
            mtp=self.mtp,
            hf_config=Path(self.hf_config).expanduser() if self.hf_config else None,
            copy_code=self.copy_code,
            max_shard_bytes=shard_bytes(self.max_shard_size),
            **writing.options,
        )


@spread
def export_hf(src: Ckpt, dst: Target, asked: Asked, writing: Writing) -> int:
    """Write a checkpoint's weights as a Hugging Face folder: safetensors, index, config.json.

    Needs nothing but the checkpoint. Every source tensor is accounted for; a tensor without a place is an error. An
    interrupted run continues when the same command is given again; DST appears only when it is complete.
    """
    from converters.formats import open_checkpoint
    from converters.targets.export import plan_export

    options = asked.options(writing)
    return carry_out("distckpt.export-hf/1", writing, lambda _: plan_export(open_checkpoint(src), named(dst), options))
