"""From any readable checkpoint to a folder that `transformers` loads.

plan = plan_export(open_checkpoint("ckpt"), Path("out"), ExportOptions())
plan.job.bytes_written, plan.report()["targets"]      # what would happen
run_export(plan)                                      # makes it happen
"""

from __future__ import annotations

import json
import shlex
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from converters import __version__
from converters.engine.destination import check_destination
from converters.errors import FormatError, RequestError
from converters.facts.damage import refuse_contradictions, refuse_damage, refuse_foreign_names
from converters.facts.model_args import ModelArgs
from converters.formats.containers.safetensors_out import DEFAULT_SHARD_BYTES, plan_shards
from converters.formats.folder import enclose, escape, read_small
from converters.models import by_name, check_hf_config, infer, map_to_hf
from converters.names import fold, printable
from converters.optimizer.proof import Masters
from converters.planning.job import CopyRoutes
from converters.planning.plan import Op, prove
from converters.targets.conversion import Conversion, ExtraFile, WriteOptions, run_conversion

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from converters.catalog import Catalog, TensorInfo
    from converters.dtypes import DType
    from converters.formats.base import Reader
    from converters.formats.containers.safetensors_out import SafetensorsLayout
    from converters.models import HfMapping, Model

__all__ = ["ExportOptions", "ExportPlan", "choose_mapping", "plan_export", "run_export"]

REPORT = "distckpt-report.json"


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
    """

    arch: str | None = None
    dtype: DType | None = None
    vocab_size: int | None = None
    mtp: str = "auto"
    hf_config: Path | None = None
    copy_code: bool = False
    max_shard_bytes: int = DEFAULT_SHARD_BYTES


@dataclass(frozen=True, kw_only=True)
class ExportPlan(Conversion):
    """An export, proved to be complete, with nothing moved yet.

    Attributes:
        options: What was asked.
        model: The architecture.
        mapping: Which element goes where, and what is dropped.
        layout: The shards.
    """

    options: ExportOptions
    model: Model
    mapping: HfMapping
    layout: SafetensorsLayout

    def report(self) -> dict[str, Any]:
        """The accounting: every source tensor used or dropped with its reason, every target tensor and its origin."""
        catalog, mapping = self.reader.catalog, self.mapping
        origins: dict[str, dict[str, None]] = defaultdict(dict)
        ops: dict[str, set[str]] = defaultdict(set)
        for copy in mapping.copies:
            origins[copy.target][copy.source] = None
            if copy.op is not Op.COPY:
                ops[copy.target].add(copy.op.value)
            if catalog.tensors[copy.source].dtype != mapping.targets[copy.target].dtype:
                ops[copy.target].add(f"cast to {mapping.targets[copy.target].dtype}")
        used = {copy.source for copy in mapping.copies}
        optimizer = [name for name, t in catalog.tensors.items() if t.kind == "optimizer"]
        dropped = [{"tensor": d.source, "elements": str(d.box or "all"), "reason": d.reason} for d in mapping.drops]
        return {
            "schema": "distckpt.export-hf/1",
            "distckpt": __version__,
            "source": {
                "path": str(catalog.path.name),
                "format": catalog.format,
                "written_by": catalog.flavour,
                "iteration": catalog.iteration,
            },
            "architecture": self.model.name,
            "source_tensors": {"weights": len(catalog.weights), "used": len(used), "optimizer": len(optimizer)},
            "target_tensors": len(mapping.targets),
            "parameters": sum(target.nbytes // target.dtype.itemsize for target in mapping.targets.values()),
            "total_size": sum(target.nbytes for target in mapping.targets.values()),
            "dropped": [
                *dropped,
                *({"tensor": text, "elements": "all", "reason": "optimizer state"} for text, _ in fold(optimizer)),
                *({"tensor": text, "elements": "all", "reason": "not a tensor"} for text in _object_names(catalog)),
            ],
            "targets": {
                name: {
                    "file": self.job.files[self.layout.places[name].file].name,
                    "dtype": target.dtype.name,
                    "shape": list(target.shape),
                    "from": list(origins[name]),
                    **({"ops": sorted(ops[name])} if ops[name] else {}),
                }
                for name, target in mapping.targets.items()
            },
            "notes": list(self.notes),
        }


def plan_export(reader: Reader, destination: Path, options: ExportOptions | None = None) -> ExportPlan:
    """Decides everything about an export and proves it complete; writes nothing.

    Raises:
        RequestError: Unknown architecture, a contradiction, a tensor without a place.
        IntegrityError: Needed data is missing in the source.
        DestinationError: The destination cannot be written.
    """
    options = options or ExportOptions()
    catalog = reader.catalog
    check_destination(catalog.root, destination, overwrite=options.overwrite)
    reference = _read_reference(options.hf_config)
    model, mapping, sources = choose_mapping(catalog, options, reference)
    prove({name: t.shape for name, t in sources.items()}, mapping.targets, mapping.copies, mapping.drops)
    used = {copy.source for copy in mapping.copies}
    refuse_damage(catalog, used)
    layout = plan_shards(mapping.targets, options.max_shard_bytes)
    routes = CopyRoutes.of(mapping.copies, mapping.targets, layout.places)
    notes = [*mapping.notes]
    try:
        extra = _extra_files(mapping, layout, options, reference, notes)
    except OSError as error:
        raise FormatError(f"reading {printable(str(options.hf_config))} failed: {error.strerror or error}") from error
    plan = ExportPlan(
        command="export",
        reader=reader,
        destination=destination,
        job=options.job(reader, sources, routes, layout.files),
        dropped=_dropped(catalog, mapping),
        notes=tuple(notes),
        options=options,
        proof=Masters.needed(reader, {}),
        model=model,
        mapping=mapping,
        layout=layout,
    )
    report = plan.report()
    tokenizer = "a checkpoint holds no tokenizer; --hf-config DIR copies one from a Hugging Face folder"
    code = f"from transformers import AutoModelForCausalLM as M; M.from_pretrained({json.dumps(str(destination))})"
    return replace(
        plan,
        extra_files={**extra, REPORT: _json(report)},
        facts={**report, "config": mapping.config},
        report_file=REPORT,
        summary=(("model", _summary(model, report)),),
        advice=() if options.hf_config else (tokenizer,),
        next_step=f"python -c {shlex.quote(code)}",
    )


run_export = run_conversion


def choose_mapping(
    catalog: Catalog, options: ExportOptions, reference: Mapping[str, Any] | None = None
) -> tuple[Model, HfMapping, dict[str, TensorInfo]]:
    """The architecture, which element goes where, and the tensors that are accounted for.

    Args:
        reference: Contents of the `config.json` of `options.hf_config`.

    Raises:
        RequestError: Unknown architecture, a contradiction, a tensor without a place.
    """
    reference = reference or {}
    args = ModelArgs.from_catalog(catalog)
    refuse_foreign_names(catalog)
    refuse_contradictions(args, catalog)
    model = _choose(args, catalog, options, reference)
    vocab = options.vocab_size if options.vocab_size is not None else reference.get("vocab_size")
    mapping = map_to_hf(catalog, args, model, dtype=options.dtype, vocab_size=vocab, mtp=options.mtp)
    return model, mapping, {name: t for name, t in catalog.tensors.items() if t.kind != "optimizer"}


def _summary(model: Model, report: Mapping[str, Any]) -> str:
    parameters, tensors = report["parameters"], report["source_tensors"]["weights"]
    return f"{model.name} ({model.architecture}), {parameters:,} parameters, {tensors} tensors accounted for"


def _dropped(catalog: Catalog, mapping: HfMapping) -> tuple[tuple[str, str], ...]:
    dropped = [(drop.source, drop.reason) for drop in mapping.drops]
    dropped += [(name, "optimizer state") for name, tensor in catalog.tensors.items() if tensor.kind == "optimizer"]
    kinds = sorted({o.name.rpartition(".")[2] for o in catalog.objects.values()})
    return *dropped, *((kind, f"{len(catalog.objects)} stored objects") for kind in kinds)


def _choose(args: ModelArgs, catalog: Catalog, options: ExportOptions, reference: Mapping[str, Any]) -> Model:
    if options.arch:
        return by_name(options.arch)
    kind = reference.get("model_type")
    return by_name(kind) if isinstance(kind, str) else infer(args, catalog)


def _read_reference(folder: Path | None) -> Mapping[str, Any]:
    if folder is None:
        return {}
    try:
        enclose(folder)
        present = (folder / "config.json").is_file()
    except OSError as error:
        raise FormatError(f"reading {printable(str(folder))} failed: {error.strerror}") from error
    if not present:
        raise FormatError(
            f"--hf-config {printable(str(folder))} has no config.json", hint="give a Hugging Face model folder"
        )
    try:
        document = json.loads(read_small(folder / "config.json", 16 << 20))
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{printable(str(folder / 'config.json'))} is not JSON: {printable(str(error))}") from error
    if not isinstance(document, dict):
        raise FormatError(f"{printable(str(folder / 'config.json'))} is not a JSON object")
    if type(document.get("vocab_size", 0)) is not int:
        raise FormatError(f"vocab_size in {printable(str(folder / 'config.json'))} is no whole number")
    return document


# weights in any form, and what describes their files: never taken over from the reference folder
_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".ckpt", ".index.json")
# what Python could run, by itself or with trust_remote_code, and the settings that make transformers look for it
_CODE = (".py", ".pyc", ".so", ".pkl", ".pickle")
_CODE_KEYS = ("auto_map", "trust_remote_code")


def _extra_files(
    mapping: HfMapping,
    layout: SafetensorsLayout,
    options: ExportOptions,
    reference: Mapping[str, Any],
    notes: list[str],
) -> dict[str, ExtraFile]:
    files: dict[str, ExtraFile] = {}
    config = dict(mapping.config)
    if options.hf_config is not None:
        contradictions = check_hf_config(dict(reference), mapping)
        if contradictions:
            raise RequestError(
                f"{printable(str(options.hf_config / 'config.json'))} does not fit the checkpoint",
                details=[printable(text) for text in contradictions[:8]],
                hint="leave --hf-config out to have a config.json made from the checkpoint",
            )
        own = {key: config[key] for key in ("dtype", "torch_dtype") if key in reference and key in config}
        config = dict(reference) | own
        files |= hf_companions(options.hf_config, options.copy_code, config, notes)
    files["config.json"] = _json(config)
    files.setdefault("generation_config.json", _json(mapping.generation_config))
    if layout.index is not None:
        files["model.safetensors.index.json"] = layout.index
    return files


def hf_companions(
    folder: Path, copy_code: bool, config: dict[str, Any], notes: list[str], *, of: str = "--hf-config"
) -> dict[str, ExtraFile]:
    """Tokenizer and other small files beside `config.json`. Code, and what names it, only if it is asked for.

    Args:
        copy_code: Code is taken, too.
        config: Contents of `config.json`; what names code is taken out of it.
        notes: What was left out is added to these.
        of: What the folder is called in notes.
    """
    files: dict[str, ExtraFile] = {}
    code, foreign = [], []
    for path in sorted(folder.iterdir()):
        if path.name == "config.json" or path.name.endswith(_NOT_COPIED) or not path.is_file():
            continue
        if escape(path) is not None:
            foreign.append(path.name)
            continue
        if path.name.endswith(_CODE):
            code.append(path.name)
            if not copy_code:
                continue
        files[path.name] = path
        if path.suffix == ".json" and not copy_code and (plain := _without_code(path)) is not None:
            files[path.name] = plain
            code.append(f"auto_map in {path.name}")
    if any(key in config for key in _CODE_KEYS):
        code.append("auto_map in config.json")
        for key in () if copy_code else _CODE_KEYS:
            config.pop(key, None)
    named = printable(", ".join(code))
    if code and copy_code:
        notes.append(f"code was copied along and runs only with trust_remote_code: {named}")
    elif code:
        notes.append(f"code of {of} was left out: {named}" + ("; --copy-code copies it" if of == "--hf-config" else ""))
    if foreign:
        notes.append(f"links to outside of {of} were left out: {printable(', '.join(foreign))}")
    return files


def _without_code(path: Path) -> bytes | None:
    """A JSON file without what names code; None if it names none."""
    if path.stat().st_size > 64 << 20:  # a tokenizer; what names code is small
        return None
    raw = read_small(path)
    try:
        document = json.loads(raw) if any(key.encode() in raw for key in _CODE_KEYS) else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, dict) or not any(key in document for key in _CODE_KEYS):
        return None
    return _json({key: value for key, value in document.items() if key not in _CODE_KEYS})


def _json(document: Any) -> bytes:
    return json.dumps(document, indent=2).encode() + b"\n"


def _object_names(catalog: Catalog) -> list[str]:
    return [text for text, _ in fold(dict.fromkeys(o.name for o in catalog.objects.values()))]
