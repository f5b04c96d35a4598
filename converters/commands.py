"""The commands that write, as functions: `distckpt reshard` on the command line, `converters.reshard` in a program.

Both take their options and defaults from here: the layout's are fields of `Layout`, the others those of the option classes
in `write`, the words that an option takes are in `CHOICES`.

    report = converters.reshard("ckpt/iter_0050000", "out", tp=2, pp=2)
    report.path, report.to_json()
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import MISSING, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

from converters.dtypes import from_option
from converters.errors import RequestError, UsageError
from converters.formats import open_checkpoint
from converters.keywords import keyword, with_keywords
from converters.megatron.identity import identify
from converters.megatron.layout import Layout
from converters.remote.address import named_path
from converters.write.container import TorchOptions
from converters.write.convert import WRITERS, plan_convert
from converters.write.edit_args import EditOptions, plan_edit
from converters.write.export import ExportOptions, plan_export
from converters.write.import_hf import plan_import
from converters.write.import_start import ImportOptions
from converters.write.legacy import LegacyOptions
from converters.write.reshard import plan_reshard
from converters.write.reshard_state import ReshardOptions
from converters.write.write_plan import WriteOptions, run_conversion
from converters.write.written import WriteReport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from converters.catalog import Catalog
    from converters.formats.base import Reader
    from converters.write.write_plan import Conversion

LAYOUT_OPTIONS = ("tp", "pp", "vpp", "ep", "etp", "cp", "dp", "first_layers", "last_layers", "pp_layout")
"""Fields of `Layout` that may be asked for; what is not keeps the value that the source was saved with."""

CHOICES: dict[str, tuple[str, ...]] = {
    "dtype": ("bf16", "fp16", "fp32"),
    **{
        name: words
        for options in (ReshardOptions, LegacyOptions, TorchOptions, ExportOptions, ImportOptions)
        for name, words in options.CHOICES.items()
        if name != "optimizer"  # what it takes is a matter of the format
    },
}
"""The words that options of several commands take."""

_RUN = ("listener", "stop", "ranks")
_Function = TypeVar("_Function", bound="Callable[..., WriteReport]")


def target_layout(catalog: Catalog, sizes: Mapping[str, Any]) -> Layout:
    """The target layout: the sizes given, and for all others those that the source was saved with.

    Args:
        catalog: Of the source; sizes of one that no Megatron job saved are 1.
        sizes: Some of `LAYOUT_OPTIONS`.

    Raises:
        RequestError: The sizes make no grid.
    """
    return _saved_layout(catalog).changed(**sizes)


def _saved_layout(catalog: Catalog) -> Layout:
    if not catalog.megatron:
        return Layout()
    saved, identified = Layout.saved(catalog), identify(catalog).layout
    # where no argument says it, the random states or the pieces of the tensors do
    observed = {name: size for name in ("tp", "pp", "dp") if (size := getattr(identified, name)) is not None}
    return saved.changed(**{name: size for name, size in observed.items() if size != getattr(saved, name)})


@contextmanager
def _kept_sizes_named(saved: Layout, sizes: Mapping[str, Any]) -> Iterator[None]:
    """Adds to a refusal which of its options are the source's, as they were not given."""
    try:
        yield
    except RequestError as error:
        text = " ".join([error.message, error.hint or "", *error.details]) + " "
        for name in LAYOUT_OPTIONS:
            option, size = f"--{name.replace('_', '-')}", getattr(saved, name)
            if sizes.get(name) is None and size is not None and (f"{option} " in text or f"{option}:" in text):
                error.details.append(f"{option} {size} is the source's value, as {option} was not given")
        raise


def plan_command(
    command: str,
    source: str | Path,
    destination: str | Path,
    options: Mapping[str, Any],
    *,
    layout: Mapping[str, Any] | None = None,
    format: str | None = None,
    follow_links: bool = False,
) -> Conversion:
    """Plans one of the commands of this module; writes nothing.

    Args:
        command: "reshard", "strip", "edit-args", "convert", "export-hf" or "import-hf".
        options: By the names of the option class; of `convert` also `to`.
        layout: Some of `LAYOUT_OPTIONS`.
        format: Name of the source's format; None recognises it.
        follow_links: Files of the source may be links out of its folder.
    """
    sizes, into = {k: v for k, v in (layout or {}).items() if v is not None}, named_path(destination)
    if command == "import-hf":
        import_options = {"follow_links": follow_links} | dict(options)
        return plan_import(source, into, Layout().changed(**sizes), ImportOptions(**import_options))
    reader = open_checkpoint(source, format, follow_links=follow_links)
    catalog = reader.catalog
    if command == "export-hf":
        return plan_export(reader, into, ExportOptions(**options))
    if command == "convert":
        writer_options = dict(options)
        to = writer_options.pop("to")
        if to not in WRITERS or not WRITERS[to].layout:
            return plan_convert(reader, into, to, options=writer_options)
        with _kept_sizes_named(_saved_layout(catalog), sizes):
            return plan_convert(reader, into, to, layout=target_layout(catalog, sizes), options=writer_options)
    if command == "edit-args":
        return plan_edit(reader, into, EditOptions(**options))
    if command == "strip":
        return _plan_strip(reader, into, options)
    resources = {f.name for f in fields(WriteOptions)}
    changes = [f.name for f in fields(ReshardOptions) if f.name not in resources]
    if not sizes and not any(options.get(name) is not None for name in changes):
        of_convert = ("framework", "weights_only")
        names = [name.replace("_", "-") for name in (*LAYOUT_OPTIONS, *changes) if name not in of_convert]
        raise UsageError(
            "reshard needs at least one change",
            hint=f"give at least one of --{', --'.join(names)}; what is not given stays as it is. "
            "`distckpt inspect CKPT` shows what it is",
        )
    with _kept_sizes_named(_saved_layout(catalog), sizes):
        return plan_reshard(reader, into, target_layout(catalog, sizes), ReshardOptions(**options))


def _plan_strip(reader: Reader, into: Path, options: Mapping[str, Any]) -> Conversion:
    """The weights and their extra states alone, in the format and layout that they have, written like any reshard."""
    catalog = reader.catalog
    layout, kept_state = _saved_layout(catalog), {"optimizer": "none", "rng": "drop", "extra_state": "keep", **options}
    if catalog.format == "torch_dist":
        return replace(plan_reshard(reader, into, layout, ReshardOptions(**kept_state)), command="strip")
    if catalog.format == "legacy":
        return replace(plan_convert(reader, into, "legacy", layout=layout, options=kept_state), command="strip")
    raise RequestError(
        f"strip keeps the format, and distckpt does not write {catalog.format}",
        hint="distckpt convert CKPT DST --to safetensors keeps the weights",
    )


def _carry_out(command: str, source: str | Path, destination: str | Path, options: dict[str, Any]) -> WriteReport:
    watched = {name: options.pop(name) for name in _RUN if name in options}
    dry = options.pop("dry_run", False)
    opening = {name: options.pop(name) for name in ("format", "follow_links") if name in options}
    layout = {name: options.pop(name) for name in LAYOUT_OPTIONS if name in options}
    for name, value in options.items():
        if name == "dtype" and isinstance(value, str):
            options[name] = from_option(value)
        elif name in ("hf_config", "scratch") and isinstance(value, str):
            options[name] = named_path(value)
    plan = plan_command(command, source, destination, options, layout=layout, **opening)
    return WriteReport(plan, None if dry else run_conversion(plan, **watched))


def _takes(options: type[WriteOptions], *names: str, layout: bool = False) -> Callable[[_Function], _Function]:
    """The options of a command, as keywords in the signature of its function."""
    declared: dict[str, Any] = dict.fromkeys(LAYOUT_OPTIONS if layout else ())
    for field in fields(options):
        declared[field.name] = field.default if field.default_factory is MISSING else field.default_factory()
    declared |= {"dry_run": False} | dict.fromkeys((*names, *_RUN))
    declared.setdefault("follow_links", False)
    return with_keywords(keyword(name, default) for name, default in declared.items())


@_takes(ReshardOptions, "format", layout=True)
def reshard(src: str | Path, dst: str | Path, **options: Any) -> WriteReport:
    """Writes a checkpoint for another layout: weights, optimizer, scheduler, arguments.

    Args:
        src: A checkpoint of any format with Megatron's names: a training root, an iteration, a file inside.
        dst: The training root to make: absent or empty, unless `overwrite`.
        options: Sizes of the target layout (`tp`, `pp`, `vpp`, `ep`, `etp`, `cp`, `dp`, `first_layers`, `last_layers`,
            `pp_layout`): what is None stays as the source was saved. What goes along, and in which form: see
            `converters.write.reshard.ReshardOptions`. `dry_run=True` plans only. `listener`, `stop`, `ranks`: see
            `converters.write.write_plan.run_conversion`.

    Returns:
        What was done; `path` is the new checkpoint.

    Raises:
        RequestError: No size was given, or the model cannot be laid out so.
        FormatError: The source cannot be read.
        IntegrityError: It is damaged.
        DestinationError: The destination cannot be written.
    """
    return _carry_out("reshard", src, dst, options)


def convert(src: str | Path, dst: str | Path, *, to: str, **options: Any) -> WriteReport:
    """Writes a checkpoint in another storage format.

    Args:
        src: A checkpoint of any format.
        dst: The folder, or for "torch" the file, to make.
        to: "torch_dist" or "legacy", for a job of the layout that is asked for (`tp`, `pp`, ...; see `reshard`); "torch",
            one file of `torch.save`; "safetensors", a folder.
        options: Those of the format: fields of `TorchDistOptions`, `LegacyOptions`, `TorchOptions` or `SafetensorsOptions`
            in `converters.write`. `dry_run`, `format`, `follow_links`, `listener`, `stop`, `ranks` as of `reshard`.

    Returns:
        What was done; `path` is the new checkpoint.

    Raises:
        RequestError: The format is not written, does not take an option, or the source does not fit it.
        FormatError: The source cannot be read.
        IntegrityError: It is damaged.
        DestinationError: The destination cannot be written.
    """
    return _carry_out("convert", src, dst, {"to": to, **options})


@_takes(ExportOptions, "format")
def export_hf(src: str | Path, dst: str | Path, **options: Any) -> WriteReport:
    """Writes a checkpoint's weights as a Hugging Face folder: safetensors, index, config.json.

    Args:
        src: A checkpoint of any format with Megatron's names.
        dst: The folder to make.
        options: See `converters.write.export.ExportOptions`; `dtype` also as "bf16", "fp16", "fp32". `dry_run`, `format`,
            `follow_links`, `listener`, `stop`, `ranks` as of `reshard`.

    Returns:
        What was done; `path` is the new folder.

    Raises:
        RequestError: No known architecture expresses the model, or it lacks a tensor's counterpart.
        FormatError: The source cannot be read.
        IntegrityError: It is damaged.
        DestinationError: The destination cannot be written.
    """
    return _carry_out("export-hf", src, dst, options)


@_takes(WriteOptions, "format")
def strip(src: str | Path, dst: str | Path, **options: Any) -> WriteReport:
    """Writes a checkpoint without optimizer, random states and rerun state; format, layout and every weight stay.

    Args:
        src: A checkpoint in torch_dist or legacy format.
        dst: The training root to make.
        options: `dry_run`, `format`, `follow_links`, `listener`, `stop`, `ranks` as of `reshard`.

    Returns:
        What was done; `path` is the new checkpoint.

    Raises:
        RequestError: distckpt does not write this format.
        FormatError: The source cannot be read.
        IntegrityError: It is damaged.
        DestinationError: The destination cannot be written.
    """
    return _carry_out("strip", src, dst, options)


@_takes(EditOptions, "format")
def edit_args(src: str | Path, dst: str | Path, **options: Any) -> WriteReport:
    """Writes a copy of a checkpoint with other training arguments; every other byte stays.

    Args:
        src: A checkpoint in torch_dist, zarr or legacy format.
        dst: The training root to make.
        options: `values={"lr": 1e-5, "params_dtype": "bfloat16"}` sets arguments, `unset=("save",)` removes them, `new=True`
            allows to set what the checkpoint does not have: see `converters.write.edit_args.EditOptions`. `dry_run`,
            `format`, `follow_links`, `listener`, `stop`, `ranks` as of `reshard`.

    Returns:
        What was done; `path` is the new checkpoint.

    Raises:
        RequestError: Nothing would change, an argument is unknown, or a value contradicts what is stored.
        FormatError: The source cannot be read.
        IntegrityError: It is damaged.
        DestinationError: The destination cannot be written.
    """
    return _carry_out("edit-args", src, dst, options)


@_takes(ImportOptions, layout=True)
def import_hf(src: str | Path, dst: str | Path, **options: Any) -> WriteReport:
    """Writes a Hugging Face model as a checkpoint that a Megatron-LM job starts from.

    Args:
        src: A folder with config.json and weights.
        dst: The training root to make.
        options: Sizes of the target layout (`tp`, `pp`, ...), 1 where none is given; the rest: see
            `converters.write.import_start.ImportOptions`. `dry_run`, `listener`, `stop`, `ranks` as of `reshard`.

    Returns:
        What was done; `path` is the new checkpoint.

    Raises:
        RequestError: A key of config.json that changes what the model computes cannot be expressed.
        FormatError: The source cannot be read.
        DestinationError: The destination cannot be written.
    """
    return _carry_out("import-hf", src, dst, options)
