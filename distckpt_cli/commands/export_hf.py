"""`distckpt export-hf`: a Megatron checkpoint as a folder that transformers loads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from converters.remote.address import named_path
from distckpt_cli.choices import ARCHITECTURES, DTYPES, choice_of
from distckpt_cli.console import UsageProblem, named
from distckpt_cli.options import Ckpt, options_set, output, panel, resolve_word, shard_bytes, spread
from distckpt_cli.writing import Target, Writing, carry_out

_model = panel("The model")


@dataclass(frozen=True)
class ExportRequest:
    """What may be asked of an export; None is what the library does by default."""

    arch: Annotated[
        str | None,
        _model(
            metavar="NAME", help="Architecture, if the inferred one is wrong.", autocompletion=ARCHITECTURES.complete
        ),
    ] = None
    hf_config: Annotated[
        str | None,
        _model(
            metavar="DIR", help="Take config.json and tokenizer from this Hugging Face folder, after a cross-check."
        ),
    ] = None
    copy_code: Annotated[
        bool,
        _model("--copy-code", help="Copy its code, too: .py files, auto_map. It runs only with trust_remote_code."),
    ] = False
    dtype: Annotated[
        str | None,
        _model(
            metavar="TYPE",
            help="bf16, fp16 or fp32; by default as stored; of fp32 masters without weights, the job's compute type.",
            autocompletion=DTYPES.complete,
        ),
    ] = None
    vocab_size: Annotated[
        int | None, _model(metavar="N", help="Rows of the vocabulary to keep; the rest is padding.")
    ] = None
    mtp: Annotated[
        str | None,
        _model(
            metavar="WHAT",
            help="Multi-token prediction layers: keep, drop or auto (the default).",
            autocompletion=choice_of("mtp").complete,
        ),
    ] = None
    check: Annotated[
        bool,
        _model(
            "--check", help="First compare names and shapes with the model that transformers builds; takes seconds."
        ),
    ] = False
    peft: Annotated[
        bool, _model("--peft", help="Write the model's adapters (LoRA) alone, as a folder that peft loads.")
    ] = False
    merge_adapter: Annotated[
        str | None,
        _model(
            metavar="CKPT", help="Merge this checkpoint's adapters into the weights, in fp32; it may be CKPT itself."
        ),
    ] = None
    lora_alpha: Annotated[
        float | None, _model(metavar="X", help="Alpha of the adapters, if their checkpoint does not state it.")
    ] = None
    quantize: Annotated[
        str | None,
        _model(
            metavar="HOW",
            help="fp8-block: attention, MLP and experts as FP8 with a scale for each block of 128 x 128, as DeepSeek-V3.",
            autocompletion=choice_of("quantize").complete,
        ),
    ] = None
    push: Annotated[
        bool,
        output("--push", help="DST is a repository of the Hugging Face hub, org/name: upload it, with a model card."),
    ] = False
    max_shard_size: Annotated[str | None, output(metavar="SIZE", help="Size of the largest file, 5GB by default.")] = (
        None
    )

    def options(self, writing: Writing) -> dict[str, Any]:
        """What the library calls them."""
        from converters.dtypes import from_option
        from converters.models import by_name

        if self.copy_code and not self.hf_config:
            raise UsageProblem("--copy-code copies from --hf-config, which was not given", hint="add --hf-config DIR")
        resolve_word(by_name, self.arch)
        options = options_set(self) | writing.options
        if self.dtype is not None:
            options["dtype"] = resolve_word(from_option, self.dtype)
        if self.hf_config is not None:
            options["hf_config"] = named_path(self.hf_config)
        if self.merge_adapter is not None:
            options["merge_adapter"] = named_path(self.merge_adapter)
        if "max_shard_size" in options:
            options["max_shard_bytes"] = shard_bytes(options.pop("max_shard_size"))
        return options


@spread
def export_hf(src: Ckpt, dst: Target, request: ExportRequest, writing: Writing) -> int:
    """Write a checkpoint's weights as a Hugging Face folder: safetensors, index, config.json.

    Needs nothing but the checkpoint. Every source tensor is accounted for; a tensor that the architecture lacks is an
    error. An interrupted run continues when the same command is given again; DST appears only when it is complete.
    """
    from converters.commands import plan_command

    options = request.options(writing)
    to = named(f"hf://{dst}" if request.push and "://" not in dst else dst)
    return carry_out(
        "distckpt.export-hf/1",
        writing,
        lambda _: plan_command("export-hf", src, to, options, follow_links=writing.follow_links),
    )
