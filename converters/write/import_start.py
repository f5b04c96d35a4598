"""The arguments (Megatron-LM) or configuration (Megatron-Bridge) of a job that starts from an imported model."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from converters.megatron.bridge_section import provider_section
from converters.megatron.heterogeneous import ENCODED
from converters.megatron.layout import Layout
from converters.megatron.megatron_flags import command_line, model_arguments
from converters.megatron.split import padded_vocab
from converters.names import quoted
from converters.pickles.nodes import Global
from converters.write.bridge_files import bridge_files
from converters.write.job_arguments import job_flags, layout_values
from converters.write.write_plan import WriteOptions

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from converters.catalog import Catalog
    from converters.dtypes import DType
    from converters.megatron.model_args import ModelArgs


FLAGS, TOKENIZER, BRIDGE = "megatron_args.txt", "tokenizer", "megatron-bridge"
FORMATS = ("torch_dist", "legacy", BRIDGE)
"""What a model is imported to."""


@dataclass(frozen=True, slots=True)
class ImportOptions(WriteOptions):
    """What a person may ask of an import.

    Attributes:
        to: Format: one of `FORMATS`. A family that only Megatron-Bridge builds becomes "megatron-bridge" by itself.
        mcore: Version of Megatron-LM that will start from it, one of `VERSIONS`.
        dtype: Element type of the weights; None keeps what is stored.
        iteration: That of the checkpoint; None makes it a release, which a job starts from at iteration 0.
        mtp: "keep", "drop" or "auto" (keep where the folder holds them) for multi-token prediction layers.
        follow_links: Files of the folder may be links out of it.
        divisible: The vocabulary is padded to a multiple of this times the tensor-parallel size; None is 128, and 1 for
            Megatron-Bridge, which pads nothing.
        part: "text" takes the language model of a model of text and images; None is for models of text.
        pad: What the rows are that pad it: "zero", or the "mean" of the others, in fp32, rounded once.
    """

    CHOICES: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "mtp": ("keep", "drop", "auto"),
        "part": ("text",),
        "pad": ("zero", "mean"),
    }

    to: str = "torch_dist"
    mcore: str = "0.16"
    dtype: DType | None = None
    iteration: int | None = None
    mtp: str = "auto"
    follow_links: bool = False
    divisible: int | None = None
    part: str | None = None
    pad: str = "zero"


@dataclass(frozen=True, slots=True)
class Start:
    """What a job is told of a model.

    Attributes:
        job: Which program's it is.
        advice: How it is started.
        facts: What a program is told of it.
        namespace: Arguments in the checkpoint; empty for Megatron-Bridge.
        rows: Of its padded vocabulary.
        section: What Megatron-Bridge's configuration says of the model; None for Megatron-LM.
        files: Small files by name within the result.
        notes: Sentences a person should read.
    """

    job: str
    advice: str
    facts: Mapping[str, Any]
    namespace: Mapping[str, Any]
    rows: int
    section: Mapping[str, Any] | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def for_megatron_lm(
    args: ModelArgs, catalog: Catalog, destination: Path, layout: Layout, options: ImportOptions, tokenized: bool
) -> Start:
    """A job of Megatron-LM: arguments in the checkpoint, and as words.

    Args:
        args: Facts of the model.
        catalog: The Hugging Face folder.
        tokenized: It holds a tokenizer.
    """
    del catalog  # what `for_bridge` takes, too
    arguments = {
        **model_arguments(args, options.mcore),
        **_vocabulary(args, layout, options.divisible or 128),
        **(_tokenizer_arguments(destination) if tokenized else {}),
    }
    if ENCODED in args.extras:  # without a path, which nothing reads beside the text, layers are all alike
        arguments["heterogeneous_layers_config_path"] = str(destination.absolute() / TOKENIZER / "config.json")
    text = shlex.join(command_line(arguments))
    return Start(
        job=f"Megatron-LM {options.mcore}",
        advice=_advice(destination, layout, options, hybrid=bool(args.layer_pattern)),
        facts={"mcore": options.mcore, "arguments": text},
        namespace={**_job_arguments(args.dtype or "float32"), **arguments},
        rows=arguments["padded_vocab_size"],
        files={FLAGS: text.encode() + b"\n"},
    )


def for_bridge(
    args: ModelArgs, catalog: Catalog, destination: Path, layout: Layout, options: ImportOptions, tokenized: bool
) -> Start:
    """A job of Megatron-Bridge: its run_config.yaml. The arguments are those of `for_megatron_lm`."""
    folder, rows = iteration_folder(options.iteration), args.vocab_size or 0
    divisible = options.divisible or 1
    section = provider_section(args) | {
        "hf_model_id": str(catalog.root),
        "make_vocab_size_divisible_by": divisible,
        "should_pad_vocab": rows % (divisible * layout.tp) != 0,
    }
    tokenizer_path = destination.absolute() / folder / TOKENIZER
    only = "" if args.extras.get("bridge_family") is None else ": Megatron-LM's arguments cannot express it"
    return Start(
        job="Megatron-Bridge",
        advice="load it in Megatron-Bridge as checkpoint.pretrained_checkpoint, at any layout that it divides into",
        facts={"provider": section["_target_"]},
        namespace={},
        rows=padded_vocab(rows, divisible, layout.tp),
        section=section,
        files=bridge_files(
            section, layout, folder, options.iteration or 0, tokenizer=str(tokenizer_path) if tokenized else None
        ),
        notes=(f"written as Megatron-Bridge stores it, with {folder}/run_config.yaml{only}",),
    )


def iteration_folder(iteration: int | None) -> str:
    """Where Megatron-Bridge keeps an iteration."""
    return f"iter_{iteration or 0:07d}"


def _vocabulary(args: ModelArgs, layout: Layout, divisible: int) -> dict[str, Any]:
    rows = args.vocab_size or 0
    return {
        "vocab_size": rows,
        "padded_vocab_size": padded_vocab(rows, divisible, layout.tp),
        "make_vocab_size_divisible_by": divisible,
    }


def _tokenizer_arguments(destination: Path) -> dict[str, Any]:
    return {
        "tokenizer_type": "HuggingFaceTokenizer",
        "tokenizer_model": str(destination.absolute() / TOKENIZER),
    }


# of a job that has begun only
_NOT_STARTED = ("transformer_pipeline_model_parallel_size", "num_layers_per_virtual_pipeline_stage")


def _job_arguments(dtype: str) -> dict[str, Any]:
    """What a Namespace says of the job: one that has not begun, on one rank. The writer changes the layout."""
    return {
        "params_dtype": Global("torch", dtype),
        "ckpt_format": "torch_dist",
        "use_dist_ckpt": True,
        "iteration": 0,
        "consumed_train_samples": 0,
        "consumed_valid_samples": 0,
        "use_distributed_optimizer": False,
        "add_position_embedding": True,
        **{name: size for name, size in layout_values(Layout()).items() if name not in _NOT_STARTED},
    }


def _advice(destination: Path, layout: Layout, options: ImportOptions, *, hybrid: bool) -> str:
    words = [] if options.iteration is None else ["--no-load-optim", "--no-load-rng"]
    words += ["--ckpt-format torch"] if options.to == "legacy" else []
    job = "job of pretrain_mamba.py" if hybrid else "job"
    flags = job_flags(destination, layout, *words)
    return f"start the {job} with the words of {quoted(destination / FLAGS)} and {flags}"
