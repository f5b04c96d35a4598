"""`distckpt export-hf`: a Megatron checkpoint as a folder that transformers loads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from converters.remote.address import named_path
from distckpt_cli.choices import ARCHITECTURES, DTYPES, choice_of
from distckpt_cli.console import UsageProblem
from distckpt_cli.options import Ckpt, flag, options_set, output, panel, resolve_word, shard_bytes, spread, value
from distckpt_cli.writing import Target, Writing, carry_out

_model = panel("The model")


@dataclass(frozen=True)
class ExportRequest:
    """What may be asked of an export; None is what the library does by default."""

    arch: str | None = value(_model, "NAME", "Architecture, if the inferred one is wrong.", ARCHITECTURES)
    hf_config: str | None = value(
        _model, "DIR", "Take config.json and tokenizer from this Hugging Face folder, after a cross-check."
    )
    copy_code: bool = flag(
        _model, "Copy its code, too: .py files, auto_map. It runs only with trust_remote_code.", "--copy-code"
    )
    dtype: str | None = value(
        _model,
        "TYPE",
        "bf16, fp16 or fp32; by default as stored; of fp32 masters without weights, the job's compute type.",
        DTYPES,
    )
    vocab_size: int | None = value(_model, "N", "Rows of the vocabulary to keep; the rest is padding.")
    mtp: str | None = value(
        _model, "WHAT", "Multi-token prediction layers: keep, drop or auto (the default).", choice_of("mtp")
    )
    check: bool = flag(
        _model, "First compare names and shapes with the model that transformers builds; takes seconds.", "--check"
    )
    peft: bool = flag(_model, "Write the model's adapters (LoRA) alone, as a folder that peft loads.", "--peft")
    merge_adapter: str | None = value(
        _model, "CKPT", "Merge this checkpoint's adapters into the weights, in fp32; it may be CKPT itself."
    )
    lora_alpha: float | None = value(_model, "X", "Alpha of the adapters, if their checkpoint does not state it.")
    quantize: str | None = value(
        _model,
        "HOW",
        "fp8-block: attention, MLP and experts as FP8 with a scale for each block of 128 x 128, as DeepSeek-V3.",
        choice_of("quantize"),
    )
    push: bool = flag(
        output, "DST is a repository of the Hugging Face hub, org/name: upload it, with a model card.", "--push"
    )
    max_shard_size: str | None = value(output, "SIZE", "Size of the largest file, 5GB by default.")

    @property
    def options(self) -> dict[str, Any]:
        """What the library calls them."""
        from converters.dtypes import from_option
        from converters.models import by_name

        if self.copy_code and not self.hf_config:
            raise UsageProblem("--copy-code copies from --hf-config, which was not given", hint="add --hf-config DIR")
        resolve_word(by_name, self.arch)
        options = options_set(self)
        if self.dtype is not None:
            options["dtype"] = resolve_word(from_option, self.dtype)
        for name in {"hf_config", "merge_adapter"} & options.keys():
            options[name] = named_path(options[name])
        if "max_shard_size" in options:
            options["max_shard_bytes"] = shard_bytes(options.pop("max_shard_size"))
        return options


@spread
def export_hf(src: Ckpt, dst: Target, request: ExportRequest, writing: Writing) -> int:
    """Write a checkpoint's weights as a Hugging Face folder: safetensors, index, config.json.

    Needs nothing but the checkpoint. Every source tensor is accounted for; a tensor that the architecture lacks is an
    error. An interrupted run continues when the same command is given again; DST appears only when it is complete.

        $ distckpt export-hf ckpt/iter_0050000 llama-hf
        $ distckpt export-hf ckpt llama-hf --hf-config /models/Llama-3.1-8B
        $ distckpt export-hf ckpt llama-hf --dtype fp16 --max-shard-size 2GB
        $ distckpt export-hf ckpt llama-hf --dry-run --json | jq .dropped
    """
    to = f"hf://{dst}" if request.push and "://" not in dst else dst
    return carry_out("distckpt.export-hf/1", src, to, writing, request.options)
