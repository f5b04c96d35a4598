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

import re
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from converters import __version__
from converters.dtypes import dtype
from converters.errors import FormatError, RequestError
from converters.formats import open_checkpoint
from converters.formats.folder import is_folder, listing
from converters.formats.side_files import side_files
from converters.megatron.bridge_section import beyond_provider, provider_section
from converters.megatron.damage import refuse_damage
from converters.megatron.megatron_flags import VERSIONS, inexpressible, lost_facts, model_arguments, no_predictions
from converters.models import ARCHITECTURES, of_config
from converters.models.config_check import find_departures
from converters.models.importing import map_from_hf
from converters.models.left_out import LEFT_OUT
from converters.models.predictions import with_predictions
from converters.models.stated import stated
from converters.models.text_part import has_text_part
from converters.names import printable, quoted
from converters.remote.address import named_path
from converters.transformers_config import CODE_KEYS, completed
from converters.write.accounting import Accounting
from converters.write.companion_files import hf_companions, json_bytes
from converters.write.export import REPORT
from converters.write.import_start import (
    BRIDGE,
    FLAGS,
    FORMATS,
    TOKENIZER,
    ImportOptions,
    for_bridge,
    for_megatron_lm,
    iteration_folder,
)
from converters.write.imported import ImportedReader, dequantized_folder, text_folder
from converters.write.legacy import LegacyOptions, plan_legacy
from converters.write.reshard import plan_reshard
from converters.write.reshard_state import ReshardOptions
from converters.write.tied_head import TiedHead

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable
    from pathlib import Path

    from converters.catalog import Catalog
    from converters.dtypes import DType
    from converters.formats.base import Reader
    from converters.megatron.layout import Layout
    from converters.megatron.model_args import ModelArgs
    from converters.models.importing import MegatronMapping
    from converters.models.model import Model
    from converters.planning.plan import Copy
    from converters.write.write_plan import Conversion, ExtraFile

_ANOTHER_MODEL = "a checkpoint without this would compute something else"
_OTHER_PART = "not of the language model (--part text)"
_TOKENIZER_FILES = re.compile(
    r".*token.*\.json|vocab\.(?:json|txt)|merges\.txt|.*\.(?:model|tiktoken|jinja)|special_tokens_map\.json|"
    r"chat_template\.json|generation_config\.json"
)
_TOKENIZERS = re.compile(r"tokenizer\.json|tokenizer_config\.json|vocab\.(?:json|txt)|.*\.(?:model|tiktoken)")


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
        RequestError: The model is not known, Megatron-LM cannot build it, or a tensor has no place.
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
    options = _with_format(model, options)
    reader, quantized = dequantized_folder(reader)
    catalog = reader.catalog
    config = completed(model.name, catalog.config)
    args = stated(model, config, biased=any(name.endswith("proj.bias") for name in catalog.weights))
    args = with_predictions(model, args, catalog.weights)
    _refuse([*find_departures(model, args, config), *model.unexpressible(args)], options, _ANOTHER_MODEL)
    unbuilt = no_predictions(args, options.mcore) if options.to != BRIDGE else None
    mtp = "drop" if unbuilt and options.mtp == "auto" else options.mtp
    mapping = map_from_hf(model, args, catalog.weights, mtp=mtp)
    refuse_damage(catalog, {copy.source for copy in mapping.copies})
    _refuse_unbuilt(mapping.args, options)
    notes = [p.message for p in catalog.problems if not catalog.unread.keys().isdisjoint(p.tensors)]
    notes += [unbuilt] if unbuilt else []
    tokenizer = _tokenizer_files(catalog, options, notes)
    dtype = options.dtype or _common_type(mapping)
    begin = for_bridge if options.to == BRIDGE else for_megatron_lm
    start = begin(replace(mapping.args, dtype=dtype.name), catalog, destination, layout, options, len(tokenizer) > 1)
    view = ImportedReader(
        reader,
        mapping,
        start.namespace,
        section=start.section,
        cast=options.dtype,
        iteration=options.iteration,
        rows=start.rows if options.pad == "mean" else None,
    )
    plan = _planned(view, destination, layout, options)
    report = _report(catalog, model, mapping, view.catalog)
    if quantized is not None:
        report["dropped"] += [{"tensor": name, "reason": reason} for name, reason in quantized.used.items()]
        notes.append(
            f"the weights are quantized ({quantized.method}): each is multiplied by its scale, and rounded once"
        )
    report["dropped"] += [{"tensor": name, "elements": "all", "reason": _OTHER_PART} for name in others]
    return replace(
        plan,
        command="import-hf",
        proof=TiedHead.needed(reader, mapping),
        extra_files={**tokenizer, **start.files, REPORT: json_bytes(report), **plan.extra_files},
        dropped=(
            *((drop["tensor"], drop["reason"]) for drop in report["dropped"]),
            *_files_left_out(catalog, tokenizer),
        ),
        notes=(*dict.fromkeys((*mapping.notes, *notes, *start.notes, *plan.notes, *model.remarks(mapping.args))),),
        summary=(
            ("model", f"{model.name} ({model.architecture}), {report['parameters']:,} parameters"),
            ("to", f"{layout}, {start.job}" + (f", {options.to}" if options.to != BRIDGE else "")),
        ),
        facts={**report, "to": options.to, **start.facts, "layout": plan.facts["layout"]},
        advice=(start.advice,),
        report_file=REPORT,
        options=options,
        next_step=f"distckpt diff {quoted(catalog.root)} {quoted(destination)}",
    )


def _with_format(model: Model, options: ImportOptions) -> ImportOptions:
    """The options with the format that the model is written in."""
    if model.bridge_only and options.to == "legacy":
        raise RequestError(
            f"a {model.name} is imported for Megatron-Bridge only, which has no legacy checkpoints",
            hint=f"--to {BRIDGE}, or leave --to out",
        )
    to = BRIDGE if model.bridge_only and options.to == "torch_dist" else options.to
    if to not in FORMATS:
        raise RequestError(f"a model is not imported to {printable(to)}", hint=f"--to takes {', '.join(FORMATS)}")
    # a job of Bridge starts from an iteration; it knows no releases
    return replace(options, to=to, iteration=0 if to == BRIDGE and options.iteration is None else options.iteration)


def _planned(view: ImportedReader, destination: Path, layout: Layout, options: ImportOptions) -> Conversion:
    if options.to == "legacy":
        return plan_legacy(view, destination, layout, LegacyOptions(**options.resources, weights_only=True))
    mcore, framework = "0.19" if options.mcore == "0.19" else None, "keep" if options.to == BRIDGE else "megatron-lm"
    chosen = ReshardOptions(**options.resources, weights_only=True, mcore=mcore, framework=framework)
    return plan_reshard(view, destination, layout, chosen)


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
        if several and of_config(config) is None:
            raise RequestError(
                f"a {printable(str(config.get('model_type')))[:80]} is a model of text and images",
                hint="--part text imports its language model, and leaves out the rest",
            )
        return reader, []
    if not several:
        raise RequestError("config.json describes no model of text and images", hint="leave out --part")
    view, part = text_folder(reader)
    return view, part.other_parts


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
    architecture, kind = of_config(config), config.get("model_type")
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


def _refuse_unbuilt(model: ModelArgs, options: ImportOptions) -> None:
    """The job must be able to build the model from its arguments, or from Megatron-Bridge's configuration."""
    reasons = in_bridge = [*beyond_provider(model), *lost_facts(model, provider_section(model), "config")]
    if options.to != BRIDGE:
        reasons = [*inexpressible(model, options.mcore), *lost_facts(model, model_arguments(model, options.mcore))]
    _refuse(reasons, options, _ANOTHER_MODEL if in_bridge else f"Megatron-Bridge can: --to {BRIDGE}")


def _refuse(reasons: Iterable[str], options: ImportOptions, hint: str) -> None:
    if texts := [printable(text) for text in reasons]:
        job = "Megatron-Bridge" if options.to == BRIDGE else f"Megatron-LM {options.mcore}"
        raise RequestError(
            f"{job} cannot build what this config.json describes: {texts[0]}", details=texts[1:8], hint=hint
        )


def _files_left_out(catalog: Catalog, tokenizer: Collection[str]) -> list[tuple[str, str]]:
    """Files of the folder that do not go along; a folder stands for all that is in it."""
    carried = {name.partition(f"{TOKENIZER}/")[2] for name in tokenizer}
    names = (file.name for file in side_files(catalog) if file.name not in carried)
    tops = dict.fromkeys(top + inner for top, inner, _ in (name.partition("/") for name in names))
    return [(name, "no Megatron job reads it") for name in tops]


def _tokenizer_files(catalog: Catalog, options: ImportOptions, notes: list[str]) -> dict[str, ExtraFile]:
    config = dict(catalog.config)
    files = hf_companions(catalog.path, False, config, notes, of="the folder")
    kept = {name: content for name, content in files.items() if _TOKENIZER_FILES.fullmatch(name)}
    bridge = options.to == BRIDGE
    if not any(_TOKENIZERS.fullmatch(name) for name in kept):
        notes.append(f"the folder holds no tokenizer, so {'run_config.yaml' if bridge else FLAGS} names none")
        kept = {}
    plain = {key: value for key, value in config.items() if key not in CODE_KEYS}
    into = f"{iteration_folder(options.iteration)}/{TOKENIZER}" if bridge else TOKENIZER
    return {f"{into}/{name}": content for name, content in {**kept, "config.json": json_bytes(plain)}.items()}


# ---------------------------------------------------------------------- arguments


def _common_type(mapping: MegatronMapping) -> DType:
    """The type of most elements: what the job computes in."""
    sizes: dict[str, int] = defaultdict(int)
    for target in mapping.targets.values():
        sizes[target.dtype.name] += target.nbytes // target.dtype.itemsize
    return dtype(max(sizes, key=sizes.__getitem__))


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
