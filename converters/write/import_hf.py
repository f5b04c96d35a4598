"""From a Hugging Face folder to a checkpoint that a Megatron-LM job starts from, with the command line of its model.

plan = plan_import("Qwen3-8B", Path("start"), Layout(tp=2), ImportOptions())
run_conversion(plan)

    start/  latest_checkpointed_iteration.txt   release
            release/                            as `reshard` or `convert --to legacy` writes it
            tokenizer/                          config.json, tokenizer files
            megatron_args.txt                   one line: the model's arguments, tokenizer included
            distckpt-report.json                what became of every tensor
"""

from __future__ import annotations

import json
import re
import shlex
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from converters import __version__
from converters.dtypes import dtype
from converters.errors import FormatError, RequestError
from converters.formats import open_checkpoint
from converters.formats.folder import is_folder, listing
from converters.formats.side_files import side_files
from converters.megatron.damage import refuse_damage
from converters.megatron.megatron_flags import VERSIONS, command_line, inexpressible, lost_facts, model_arguments
from converters.megatron.split import padded_vocab
from converters.models import ARCHITECTURES, of_type
from converters.models.importing import map_from_hf
from converters.models.left_out import LEFT_OUT
from converters.models.stated import departures, stated
from converters.models.text_part import has_text_part
from converters.models.transformers_config import CODE_KEYS, completed
from converters.names import printable, quoted
from converters.pickles import Global
from converters.remote.address import named_path
from converters.write.accounting import Accounting
from converters.write.companion_files import hf_companions
from converters.write.export import REPORT
from converters.write.imported import ImportedReader, dequantized_folder, text_folder
from converters.write.legacy import LegacyOptions, plan_legacy
from converters.write.reshard import ReshardOptions, plan_reshard
from converters.write.target_state import job_flags
from converters.write.write_plan import WriteOptions

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping
    from pathlib import Path

    from converters.catalog import Catalog
    from converters.dtypes import DType
    from converters.formats.base import Reader
    from converters.megatron.layout import Layout
    from converters.megatron.model_args import ModelArgs
    from converters.models import Model
    from converters.models.importing import MegatronMapping
    from converters.planning.plan import Copy
    from converters.write.write_plan import Conversion, ExtraFile

__all__ = ["ImportOptions", "plan_import"]

PADDINGS = ("zero", "mean")
PARTS = ("text",)
_OTHER_PART = "not of the language model (--part text)"
FLAGS, TOKENIZER = "megatron_args.txt", "tokenizer"
_TOKENIZER_FILES = re.compile(
    r".*token.*\.json|vocab\.(?:json|txt)|merges\.txt|.*\.(?:model|tiktoken|jinja)|special_tokens_map\.json|"
    r"chat_template\.json|generation_config\.json"
)
_TOKENIZERS = re.compile(r"tokenizer\.json|tokenizer_config\.json|vocab\.(?:json|txt)|.*\.(?:model|tiktoken)")


@dataclass(frozen=True, slots=True)
class ImportOptions(WriteOptions):
    """What a person may ask of an import.

    Attributes:
        to: Format: "torch_dist" or "legacy".
        mcore: Version of Megatron-LM that will start from it, one of `VERSIONS`.
        dtype: Element type of the weights; None keeps what is stored.
        iteration: That of the checkpoint; None makes it a release, which a job starts from at iteration 0.
        mtp: "keep", "drop" or "auto" (keep where the folder holds them) for multi-token prediction layers.
        follow_links: Files of the folder may be links out of it.
        divisible: The vocabulary is padded to a multiple of this times the tensor-parallel size.
        part: "text" takes the language model of a model of text and images; None is for models of text.
        pad: What the rows are that pad it: "zero", or the "mean" of the others, in fp32, rounded once.
    """

    to: str = "torch_dist"
    mcore: str = "0.16"
    dtype: DType | None = None
    iteration: int | None = None
    mtp: str = "auto"
    follow_links: bool = False
    divisible: int = 128
    part: str | None = None
    pad: str = "zero"


def plan_import(
    source: str | Path, destination: Path, layout: Layout, options: ImportOptions | None = None
) -> Conversion:
    """Decides everything about an import and proves it complete; writes nothing.

    Args:
        source: The folder.
        destination: Where the result shall appear: a training root.
        layout: The layout of the job that will load it.

    Raises:
        FormatError: The folder cannot be read, or is no Hugging Face model.
        RequestError: The model is not known here, Megatron-LM cannot build it, or a tensor has no place.
        IntegrityError: A tensor that config.json needs is missing.
        DestinationError: The destination cannot be written.
    """
    options = options or ImportOptions()
    if options.mcore not in VERSIONS:
        raise RequestError(f"--mcore {options.mcore} is not known", hint=f"it takes {', '.join(VERSIONS)}")
    _refuse_other_folders(named_path(source))
    reader = open_checkpoint(source, follow_links=options.follow_links)
    reader, others = _part(reader, options)
    model = _model(reader.catalog)
    reader, quantized = dequantized_folder(reader)
    catalog = reader.catalog
    config = completed(model.name, catalog.config)
    args = stated(model, config, biased=any(name.endswith("proj.bias") for name in catalog.weights))
    mapping = map_from_hf(model, args, catalog.weights, mtp=options.mtp)
    refuse_damage(catalog, {copy.source for copy in mapping.copies})
    _refuse_model(model, args, config, options.mcore)
    notes = [p.message for p in catalog.problems if not catalog.unread.keys().isdisjoint(p.tensors)]
    tokenizer = _tokenizer_files(catalog, notes)
    kept = options.dtype or _common_type(mapping)
    arguments = {
        **model_arguments(replace(mapping.args, dtype=kept.name), options.mcore),
        **_vocabulary(mapping.args, layout, options.divisible),
        **_tokenizer_arguments(destination, tokenizer),
    }
    namespace = {**_job_arguments(kept), **arguments}
    if options.pad not in PADDINGS:
        raise RequestError(f"--pad {printable(options.pad)} is not known", hint=f"it takes {', '.join(PADDINGS)}")
    rows = arguments["padded_vocab_size"] if options.pad == "mean" else None
    view = ImportedReader(reader, mapping, namespace, cast=options.dtype, iteration=options.iteration, rows=rows)
    plan = _planned(view, destination, layout, options)
    report = _report(catalog, model, mapping, view.catalog)
    if quantized is not None:
        report["dropped"] += [{"tensor": name, "reason": reason} for name, reason in quantized.used.items()]
        notes.append(
            f"the weights are quantized ({quantized.method}): each is multiplied by its scale, and rounded once"
        )
    report["dropped"] += [{"tensor": name, "elements": "all", "reason": _OTHER_PART} for name in others]
    text = shlex.join(command_line(arguments))
    return replace(
        plan,
        command="import-hf",
        extra_files={**tokenizer, FLAGS: text.encode() + b"\n", REPORT: _json(report), **plan.extra_files},
        dropped=(
            *((drop["tensor"], drop["reason"]) for drop in report["dropped"]),
            *_files_left_out(catalog, tokenizer),
        ),
        notes=(*dict.fromkeys((*mapping.notes, *notes, *plan.notes, *model.remarks(args))),),
        summary=(
            ("model", f"{model.name} ({model.architecture}), {report['parameters']:,} parameters"),
            ("to", f"{layout}, Megatron-LM {options.mcore}, {options.to}"),
        ),
        facts={**report, "to": options.to, "mcore": options.mcore, "arguments": text, "layout": plan.facts["layout"]},
        advice=(_advice(destination, layout, options, hybrid=bool(args.layer_pattern)),),
        report_file=REPORT,
        options=options,
        next_step=f"distckpt diff {quoted(catalog.root)} {quoted(destination)}",
    )


def _planned(view: ImportedReader, destination: Path, layout: Layout, options: ImportOptions) -> Conversion:
    run_options = {name: getattr(options, name) for name in ("max_memory", "threads", "overwrite", "device")}
    if options.to == "torch_dist":
        mcore = "0.19" if options.mcore == "0.19" else None
        chosen = ReshardOptions(**run_options, weights_only=True, mcore=mcore, framework="megatron-lm")
        return plan_reshard(view, destination, layout, chosen)
    if options.to == "legacy":
        return plan_legacy(view, destination, layout, LegacyOptions(**run_options, weights_only=True))
    raise RequestError(f"a model is not imported to {printable(options.to)}", hint="--to torch_dist or legacy")


# ---------------------------------------------------------------------- the folder


def _refuse_other_folders(folder: Path) -> None:
    """What people take for a model's folder."""
    if folder.suffix == ".gguf":
        raise RequestError("a GGUF file holds quantized weights for llama.cpp", hint="name the folder it was made from")
    if not is_folder(folder):
        return
    names = listing(folder)
    if "adapter_config.json" in names and "config.json" not in names:
        raise RequestError(
            f"{printable(str(folder))} holds an adapter, not a model",
            hint="merge it into its base model first (peft: merge_and_unload, save_pretrained)",
        )
    if any(name.endswith(".gguf") for name in names) and not any(n.endswith((".safetensors", ".bin")) for n in names):
        raise RequestError(
            f"{printable(str(folder))} holds GGUF files, quantized weights for llama.cpp",
            hint="name the folder they were made from",
        )


def _part(reader: Reader, options: ImportOptions) -> tuple[Reader, list[str]]:
    """The folder as that of the language model that is asked for, and the tensors that are not of it."""
    config = reader.catalog.config
    several = reader.catalog.framework == "Hugging Face" and has_text_part(config)
    if options.part is None:
        if several and of_type(config.get("model_type")) is None:
            raise RequestError(
                f"a {printable(str(config.get('model_type')))[:80]} is a model of text and images",
                hint="--part text imports its language model, and leaves out the rest",
            )
        return reader, []
    if options.part not in PARTS:
        raise RequestError(f"--part {printable(options.part)} is not known", hint=f"it takes {', '.join(PARTS)}")
    if not several:
        raise RequestError("config.json describes no model of text and images", hint="leave out --part")
    view, part = text_folder(reader)
    return view, part.others


def _model(catalog: Catalog) -> Model:
    config = catalog.config
    if catalog.megatron:
        raise RequestError(
            "this is a checkpoint of Megatron's, not a Hugging Face folder",
            hint=f"distckpt export-hf {quoted(catalog.root)} DST makes one of it; distckpt reshard changes its layout",
        )
    if not config or catalog.framework != "Hugging Face":
        raise FormatError(
            f"{printable(str(catalog.root))} has no config.json: nothing says what its tensors compute",
            hint="name the folder that config.json lies in, with the weights",
        )
    kind = config.get("model_type")
    architecture = of_type(kind)
    if architecture is None:
        if isinstance(kind, str) and kind in LEFT_OUT:
            raise RequestError(
                f"a {kind} is not imported: {LEFT_OUT[kind]}", hint="distckpt models lists those that are"
            )
        coded = " (its code, which auto_map names, is never run)" if "auto_map" in config else ""
        raise RequestError(
            f"config.json says model_type {printable(repr(kind))[:80]}, which is not imported{coded}",
            hint=f"known: {', '.join(model.name for model in ARCHITECTURES)}",
        )
    return architecture


def _refuse_model(model: Model, args: ModelArgs, config: Mapping[str, Any], mcore: str) -> None:
    """Every key of config.json must mean what Megatron-LM's model will compute."""
    reasons = [*departures(model, args, config), *model.unexpressible(args), *inexpressible(args, mcore)]
    reasons += lost_facts(args, model_arguments(args, mcore))
    if reasons:
        raise RequestError(
            f"Megatron-LM {mcore} cannot build what this config.json describes: {printable(reasons[0])}",
            details=[printable(text) for text in reasons[1:8]],
            hint="a checkpoint without this would compute something else",
        )


def _files_left_out(catalog: Catalog, tokenizer: Collection[str]) -> list[tuple[str, str]]:
    """Files of the folder that do not go along; a folder stands for all that is in it."""
    names = (file.name for file in side_files(catalog) if f"{TOKENIZER}/{file.name}" not in tokenizer)
    tops = dict.fromkeys(top + inner for top, inner, _ in (name.partition("/") for name in names))
    return [(name, "no Megatron-LM job reads it") for name in tops]


def _tokenizer_files(catalog: Catalog, notes: list[str]) -> dict[str, ExtraFile]:
    config = dict(catalog.config)
    files = hf_companions(catalog.path, False, config, notes, of="the folder")
    kept = {name: content for name, content in files.items() if _TOKENIZER_FILES.fullmatch(name)}
    if not any(_TOKENIZERS.fullmatch(name) for name in kept):
        notes.append("the folder holds no tokenizer, so megatron_args.txt names none")
        kept = {}
    plain = {key: value for key, value in config.items() if key not in CODE_KEYS}
    return {f"{TOKENIZER}/{name}": content for name, content in {**kept, "config.json": _json(plain)}.items()}


# ---------------------------------------------------------------------- arguments


def _common_type(mapping: MegatronMapping) -> DType:
    """The type of most elements: what the job computes in."""
    sizes: dict[str, int] = defaultdict(int)
    for target in mapping.targets.values():
        sizes[target.dtype.name] += target.nbytes // target.dtype.itemsize
    return dtype(max(sizes, key=sizes.__getitem__))


def _vocabulary(args: ModelArgs, layout: Layout, divisible: int) -> dict[str, Any]:
    rows = args.vocab_size or 0
    return {
        "vocab_size": rows,
        "padded_vocab_size": padded_vocab(rows, divisible, layout.tp),
        "make_vocab_size_divisible_by": divisible,
    }


def _tokenizer_arguments(destination: Path, files: Mapping[str, ExtraFile]) -> dict[str, Any]:
    if len(files) < 2:  # config.json alone
        return {}
    return {
        "tokenizer_type": "HuggingFaceTokenizer",
        "tokenizer_model": str(destination.expanduser().absolute() / TOKENIZER),
    }


def _job_arguments(kept: DType) -> dict[str, Any]:
    """What a Namespace says of the job: one that has not begun, on one rank. The writer changes the layout."""
    return {
        "params_dtype": Global("torch", kept.name),
        "ckpt_format": "torch_dist",
        "use_dist_ckpt": True,
        "iteration": 0,
        "consumed_train_samples": 0,
        "consumed_valid_samples": 0,
        "use_distributed_optimizer": False,
        "add_position_embedding": True,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None,
        "context_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "expert_tensor_parallel_size": 1,
        "data_parallel_size": 1,
        "world_size": 1,
        "decoder_first_pipeline_num_layers": None,
        "decoder_last_pipeline_num_layers": None,
        "pipeline_model_parallel_layout": None,
        "account_for_embedding_in_pipeline_split": False,
        "account_for_loss_in_pipeline_split": False,
        "num_virtual_stages_per_pipeline_rank": None,
    }


def _advice(destination: Path, layout: Layout, options: ImportOptions, *, hybrid: bool) -> str:
    words = [] if options.iteration is None else ["--no-load-optim", "--no-load-rng"]
    words += ["--ckpt-format torch"] if options.to == "legacy" else []
    job = "job of pretrain_mamba.py" if hybrid else "job"
    flags = job_flags(destination, layout, *words)
    return f"start the {job} with the words of {quoted(destination / FLAGS)} and {flags}"


# ---------------------------------------------------------------------- report


def _report(catalog: Catalog, model: Model, mapping: MegatronMapping, seen: Catalog) -> dict[str, Any]:
    """The accounting: every source tensor used or dropped with its reason, every target tensor and its origin."""
    casts = {
        name: seen.trained_type(info) for name, info in seen.weights.items() if info.dtype != seen.trained_type(info)
    }

    def changes(copy: Copy) -> Iterable[str]:
        return (f"cast to {casts[copy.target]}",) if copy.target in casts else ()

    accounts = Accounting(mapping.targets, mapping.copies, mapping.drops, changes)
    return {
        "schema": "distckpt.import-hf/1",
        "distckpt": __version__,
        "source": {"path": catalog.path.name, "format": catalog.format},
        "architecture": model.name,
        "source_tensors": {"weights": len(catalog.weights), "used": len(accounts.used)},
        "target_tensors": len(mapping.targets),
        "parameters": accounts.parameters,
        "dropped": [
            *accounts.dropped,
            *({"tensor": name, "elements": "all", "reason": reason} for name, reason in catalog.unread.items()),
        ],
        "targets": {
            name: {
                "dtype": seen.trained_type(seen.weights[name]).name,
                "shape": list(target.shape),
                **accounts.origin(name),
            }
            for name, target in mapping.targets.items()
        },
    }


def _json(document: Any) -> bytes:
    return json.dumps(document, indent=2).encode() + b"\n"
