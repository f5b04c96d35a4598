"""From any readable checkpoint to a folder that `transformers` loads.

plan = plan_export(open_checkpoint("ckpt"), Path("out"), ExportOptions())
plan.job.bytes_written, plan.facts["targets"]      # what would happen
run_conversion(plan)                               # makes it happen
"""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from converters.errors import FormatError, RequestError
from converters.execute.destination import check_destination
from converters.formats.containers.safetensors_out import DEFAULT_SHARD_BYTES, plan_shards
from converters.megatron.adapters import read_adapters
from converters.megatron.damage import refuse_contradictions, refuse_damage, refuse_foreign_names
from converters.megatron.model_args import ModelArgs
from converters.models import by_name, infer, of_config
from converters.models.adapters import map_adapters
from converters.models.config_check import find_contradictions
from converters.models.export import map_to_hf
from converters.models.quantizing import quantization
from converters.names import printable
from converters.optimizer.proof import Masters
from converters.planning.plan import SCALE_BLOCK, pieces_of, prove
from converters.planning.routes import CopyRoutes
from converters.words import counted
from converters.write.adapters import merge_adapters, wants_peft
from converters.write.companion_files import hf_companions, json_bytes, own_tokenizer, read_reference
from converters.write.export_report import completed_report, export_report
from converters.write.model_card import CARD, loading_line, model_card
from converters.write.reassembled import reassembled
from converters.write.side_files import files_beside
from converters.write.write_plan import Conversion, ExtraFile, WriteOptions

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from converters.catalog import Catalog, TensorInfo
    from converters.dtypes import DType
    from converters.formats.base import Reader
    from converters.formats.containers.safetensors_out import SafetensorsLayout
    from converters.models.export import HfMapping
    from converters.models.model import Model
    from converters.models.quantizing import Quantization

REPORT = "distckpt-report.json"
_QUANTIZED = ("quantization_config", "compression_config")


@dataclass(frozen=True, slots=True)
class ExportOptions(WriteOptions):
    """What a person may ask of an export.

    Attributes:
        arch: Architecture by its Hugging Face `model_type`; None to infer it.
        dtype: Element type of the weights; None keeps what is stored.
        vocab_size: Rows of the vocabulary to keep; None takes it from the checkpoint or `hf_config`.
        mtp: "keep", "drop" or "auto" (keep where the architecture has a place) for multi-token-prediction layers.
        hf_config: A Hugging Face folder whose config.json and tokenizer are taken over, after a cross-check.
        copy_code: Its code, too: `.py` files and what names them (`auto_map`). Else nothing that could run is taken over.
        max_shard_bytes: Largest shard.
        check: Compare names and shapes with those of the model that transformers builds of config.json.
        peft: Write the model's adapters (LoRA) alone, for the library of that name; of a checkpoint that holds nothing
            else, this is what an export is.
        merge_adapter: A checkpoint whose adapters are merged into the weights; it may be the source itself.
        lora_alpha: Alpha of the adapters, where their checkpoint does not say it.
        quantize: "fp8-block" writes the matrices of attention, MLP and experts as FP8 with a scale for each block of
            128 x 128; None quantizes nothing.
        push: The destination is a repository of the hub, `hf://org/name` or `hf://org/name@branch`; it gets a model card.
    """

    CHOICES: ClassVar[Mapping[str, tuple[str, ...]]] = {"mtp": ("keep", "drop", "auto"), "quantize": ("fp8-block",)}

    arch: str | None = None
    dtype: DType | None = None
    vocab_size: int | None = None
    mtp: str = "auto"
    hf_config: Path | None = None
    copy_code: bool = False
    max_shard_bytes: int = DEFAULT_SHARD_BYTES
    check: bool = False
    peft: bool = False
    merge_adapter: str | Path | None = None
    lora_alpha: float | None = None
    quantize: str | None = None
    push: bool = False


def plan_export(reader: Reader, destination: Path, options: ExportOptions | None = None) -> Conversion:
    """Decides everything about an export and proves it complete; writes nothing.

    Raises:
        RequestError: Unknown architecture, a contradiction, a tensor that the architecture lacks.
        IntegrityError: Needed data is missing in the source.
        DestinationError: The destination cannot be written.
    """
    options = options or ExportOptions()
    check_destination(reader.catalog.root, destination, overwrite=options.overwrite, push=options.push)
    reference = read_reference(options.hf_config)
    content = _plan_content(reader, destination, options, reference)
    catalog, mapping, sources = content.reader.catalog, content.mapping, content.sources
    prove(mapping.pieces.values(), {name: t.shape for name, t in sources.items()}, mapping.drops)
    refuse_damage(catalog, {copy.source for copy in mapping.copies})
    form = _plan_quantization(content, options)
    targets, scales = (form.targets, form.scales) if form else (mapping.targets, {})
    layout = plan_shards(targets, sys.maxsize if content.peft else options.max_shard_bytes, content.stem)
    copies, assembled = reassembled(catalog.weights, targets, mapping.copies, scales)
    sources = {**sources, **assembled}
    pieces = pieces_of(targets, copies)
    routes = CopyRoutes.of((piece, layout.locations[name]) for name, piece in pieces.items())
    notes = [*mapping.notes]
    try:
        extra = _extra_files(content, layout, options, reference, notes, form.config if form else None)
        tokenizer_files = {} if options.hf_config else own_tokenizer(catalog, notes)
    except OSError as error:
        unread = printable(str(error.filename or options.hf_config))
        raise FormatError(f"reading {unread} failed: {error.strerror or error}") from error
    extra = {**tokenizer_files, **extra}
    carried = [] if options.hf_config else [name for name in tokenizer_files if name in extra]
    beside = files_beside(catalog, "hf").dropped
    beside = tuple(item for item in beside if item[0] != "tokenizer/" or not carried)
    if options.check and isinstance(config := extra["config.json"], bytes):
        _check_model(json.loads(config), mapping)
    if form and form.unquantized:
        sizes = f"have sides that are no multiples of {SCALE_BLOCK}, or go with one that has"
        notes.append(f"{counted(len(form.unquantized), 'matrix', 'matrices')} stay as they are: they {sizes}")
    report = export_report(content, layout, form, notes)
    narrow = any(target.dtype.name == "float16" for target in targets.values())
    tokenizer = "this checkpoint holds no tokenizer; --hf-config DIR copies one from a Hugging Face folder"
    if options.push:
        extra[CARD] = model_card(report, mapping.config, destination, peft=content.peft)
    return Conversion(
        command="export",
        reader=content.reader,
        destination=destination,
        job=options.job(content.reader, sources, routes, layout.files, drops=mapping.drops),
        extra_files={**extra, REPORT: completed_report(report) if form or narrow else json_bytes(report)},
        dropped=(*_list_dropped(catalog, mapping), *beside),
        notes=tuple(notes),
        summary=(
            ("model", _describe_model(content, report)),
            *((("adapters", merged),) if (merged := content.adapter.get("merged")) else ()),
            *((("quantized", _describe_quantization(form)),) if form else ()),
            *((("tokenizer", ", ".join(carried)),) if carried else ()),
        ),
        facts={**report, "config": mapping.config | ({"quantization_config": form.config} if form else {})},
        advice=() if options.hf_config or carried or content.peft else (tokenizer,),
        next_step=f"python -c {shlex.quote(loading_line(destination, peft=content.peft))}",
        report_file=REPORT,
        options=options,
        proof=Masters.needed(content.reader, {}),
    )


@dataclass(frozen=True)
class Content:
    """What an export is of.

    Attributes:
        reader: Where it is read; its catalog holds all that has to be accounted for.
        model: The architecture.
        mapping: Which element goes where, and what is dropped.
        sources: The tensors that `mapping` accounts for.
        peft: Adapters are written, not the model.
        adapter: What the report says of adapters that are written or merged.
    """

    reader: Reader
    model: Model
    mapping: HfMapping
    sources: dict[str, TensorInfo]
    peft: bool = False
    adapter: Mapping[str, Any] = field(default_factory=dict)

    @property
    def stem(self) -> str:
        """What the names of the files with tensors begin with; peft looks for one, whatever its size."""
        return "adapter_model" if self.peft else "model"


def _plan_content(reader: Reader, destination: Path, options: ExportOptions, reference: Mapping[str, Any]) -> Content:
    """Chooses between the model, the model with adapters merged into it, and the adapters alone."""
    path, catalog = options.merge_adapter, reader.catalog
    if wants_peft(catalog, options.peft, path is not None):
        return _plan_adapters(reader, options, reference)
    if path is None:
        if options.lora_alpha is not None:
            raise RequestError("--lora-alpha needs adapters, and the checkpoint has none", hint="leave it out")
        return Content(reader, *choose_mapping(catalog, options, reference))
    merge = merge_adapters(reader, path, options.lora_alpha)
    check_destination(merge.root, destination, overwrite=options.overwrite, push=options.push)
    model, mapping, sources = choose_mapping(merge.catalog, options, reference)
    sources |= {drop.source: catalog.tensors[drop.source] for drop in merge.drops}
    mapping = replace(mapping, drops=[*mapping.drops, *merge.drops])
    return Content(merge.reader, model, mapping, sources, adapter=merge.facts)


def _plan_adapters(reader: Reader, options: ExportOptions, reference: Mapping[str, Any]) -> Content:
    """The adapters alone."""
    if options.check or options.vocab_size is not None:
        raise RequestError("--check and --vocab-size are of whole models, and only adapters are written here")
    catalog, args = reader.catalog, ModelArgs.from_catalog(reader.catalog)
    refuse_contradictions(args, catalog)
    model = _choose_model(args, catalog, options, reference)
    adapters = read_adapters(catalog, options.lora_alpha)
    mapping = map_adapters(catalog, args, model, adapters, dtype=options.dtype)
    if options.hf_config is not None:
        base_config = model.config(args, vocab_size=reference.get("vocab_size", 0), dtype=args.dtype or "float32")
        _check_reference(reference, replace(mapping, config=base_config), options.hf_config)
        mapping.config["base_model_name_or_path"] = str(options.hf_config)
    facts = {"rank": adapters.rank, "alpha": adapters.alpha, "weights": list(adapters.factors)}
    return Content(reader, model, mapping, _without_optimizer(catalog), True, facts)


def choose_mapping(
    catalog: Catalog, options: ExportOptions, reference: Mapping[str, Any] | None = None
) -> tuple[Model, HfMapping, dict[str, TensorInfo]]:
    """The architecture, which element goes where, and the tensors that are accounted for.

    Args:
        reference: Contents of the `config.json` of `options.hf_config`.

    Raises:
        RequestError: Unknown architecture, a contradiction, a tensor that the architecture lacks.
    """
    reference = reference or {}
    args = ModelArgs.from_catalog(catalog)
    refuse_foreign_names(catalog)
    refuse_contradictions(args, catalog)
    model = _choose_model(args, catalog, options, reference)
    vocab = options.vocab_size if options.vocab_size is not None else reference.get("vocab_size")
    mapping = map_to_hf(catalog, args, model, dtype=options.dtype, vocab_size=vocab, mtp=options.mtp)
    return model, mapping, _without_optimizer(catalog)


def _without_optimizer(catalog: Catalog) -> dict[str, TensorInfo]:
    return {name: t for name, t in catalog.tensors.items() if t.kind != "optimizer"}


def _plan_quantization(content: Content, options: ExportOptions) -> Quantization | None:
    """What is quantized, and how.

    Raises:
        RequestError: It cannot be done, or not together with what else is asked for.
    """
    if options.quantize is None:
        return None
    if content.adapter:
        raise RequestError(
            "adapters are neither quantized nor merged into quantized weights",
            hint="leave out --quantize; or merge them, import-hf the result, and quantize that",
        )
    if options.device not in ("cpu", "auto"):
        raise RequestError("--quantize computes on the cpu", hint="leave out --device")
    return quantization(content.model.name, content.mapping.targets)


def _describe_quantization(form: Quantization) -> str:
    count, total = len(form.scales), len(form.targets) - len(form.scales)
    return (
        f"{count} of {counted(total, 'tensor')} to FP8 (E4M3), a scale for each block of {SCALE_BLOCK} x {SCALE_BLOCK}"
    )


def _check_model(config: Mapping[str, Any], mapping: HfMapping) -> None:
    """Raises if transformers builds another model of `config` than the one that is written."""
    from converters.models.built import unlike_transformers

    unlike = unlike_transformers(config, {name: target.shape for name, target in mapping.targets.items()})
    if unlike:
        raise RequestError(
            f"transformers builds another model of config.json: {counted(len(unlike), 'tensor', verb='differs/differ')}",
            details=unlike[:8],
        )


def _describe_model(content: Content, report: Mapping[str, Any]) -> str:
    parameters, tensors = report["parameters"], report["source_tensors"]["weights"]
    model = content.model
    if content.peft:
        rank, alpha = content.adapter["rank"], content.adapter["alpha"]
        return f"LoRA of rank {rank}, alpha {alpha:g}, for {model.name}, {parameters:,} parameters"
    return f"{model.name} ({model.architecture}), {parameters:,} parameters, {counted(tensors, 'tensor')} accounted for"


def _list_dropped(catalog: Catalog, mapping: HfMapping) -> tuple[tuple[str, str], ...]:
    dropped = [(drop.source, drop.reason) for drop in mapping.drops]
    dropped += [(name, "optimizer state") for name, tensor in catalog.tensors.items() if tensor.kind == "optimizer"]
    kinds = sorted({o.name.rpartition(".")[2] for o in catalog.objects.values()})
    return *dropped, *((kind, counted(len(catalog.objects), "stored object")) for kind in kinds)


def _choose_model(args: ModelArgs, catalog: Catalog, options: ExportOptions, reference: Mapping[str, Any]) -> Model:
    if options.arch:
        return by_name(options.arch)
    kind = reference.get("model_type")
    return of_config(reference) or by_name(kind) if isinstance(kind, str) else infer(args, catalog)


def _extra_files(
    content: Content,
    layout: SafetensorsLayout,
    options: ExportOptions,
    reference: Mapping[str, Any],
    notes: list[str],
    quantized: Mapping[str, Any] | None,
) -> dict[str, ExtraFile]:
    files: dict[str, ExtraFile] = {}
    mapping = content.mapping
    config = dict(mapping.config)
    if content.peft:
        return {"adapter_config.json": json_bytes(config)}
    if options.hf_config is not None:
        _check_reference(reference, mapping, options.hf_config)
        types = {key: config[key] for key in ("dtype", "torch_dtype") if key in reference and key in config}
        config = {key: value for key, value in reference.items() if key not in _QUANTIZED} | types
        if config.keys() != reference.keys() | types.keys():
            notes.append("config.json of --hf-config is of quantized weights; what it says about that is left out")
        files |= hf_companions(options.hf_config, options.copy_code, config, notes)
    if quantized is not None:
        config["quantization_config"] = dict(quantized)
    files["config.json"] = json_bytes(config)
    files.setdefault("generation_config.json", json_bytes(mapping.generation_config))
    if layout.index is not None:
        files["model.safetensors.index.json"] = layout.index
    return files


def _check_reference(reference: Mapping[str, Any], mapping: HfMapping, folder: Path) -> None:
    """Raises if the config.json of a folder does not describe what is exported."""
    contradictions = find_contradictions(reference, mapping)
    if contradictions:
        raise RequestError(
            f"{printable(str(folder / 'config.json'))} does not fit the checkpoint",
            details=[printable(text) for text in contradictions[:8]],
            hint="leave --hf-config out to have a config.json made from the checkpoint",
        )
