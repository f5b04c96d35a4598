"""From any readable checkpoint to a plain container of whole tensors: one file of torch.save, or safetensors.

plan = plan_torch(open_checkpoint("ckpt"), Path("model.pt"), TorchOptions(names="hf"))
run_conversion(plan)
torch.load("model.pt", weights_only=True, mmap=True)

Names are those that a model without tensor and pipeline parallelism has, Megatron's own or Hugging Face's. A torch file with
Hugging Face's is a flat state dict, as `pytorch_model.bin` is; one with Megatron's is a dictionary as Megatron-LM's own
files are, of plain data, so that `weights_only` takes it:

    model           {name: tensor}, for `load_state_dict`
    optimizer       {"state": {"param" | "exp_avg" | "exp_avg_sq": {name: tensor}}, "param_groups": [...]}, and with fp16 the
                    state of its loss scaler under "grad_scaler"
    args            training arguments as a plain dictionary; enumerations and other objects are left out
    iteration, checkpoint_version, opt_param_scheduler, ...
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from converters.box import Box
from converters.conversion import Conversion, WriteOptions
from converters.damage import refuse_contradictions, refuse_damage
from converters.errors import RequestError
from converters.export import ExportOptions, choose_mapping, plan_export
from converters.formats.archive_out import ArchiveFile, ArchiveOutput, Region
from converters.formats.safetensors import DEFAULT_SHARD_BYTES, plan_shards
from converters.job import CopyRoutes, Job
from converters.layout import Layout
from converters.local import LocalModel, LocalTensor
from converters.model_args import ModelArgs
from converters.optim import Masters, OptimizerState, optimizer_state
from converters.optim_groups import read_param_groups
from converters.pickles import Global
from converters.plan import Copy, Drop, Target, prove
from converters.publish import check_destination
from converters.records_out import tensor_node
from converters.target_state import layout_arguments
from converters.vocabulary import VOCABULARY

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from converters.catalog import Catalog, TensorInfo
    from converters.formats.base import Reader
    from converters.pickles import Node

__all__ = ["SafetensorsOptions", "TorchOptions", "plan_safetensors", "plan_torch"]

SIDECAR = "distckpt.json"
"""Beside safetensors with Megatron's names: what a `model.pt` says of the job, so that the way back is open."""


@dataclass(frozen=True, slots=True)
class TorchOptions(WriteOptions):
    """What a person may ask of a torch file.

    Attributes:
        names: "megatron" or "hf"; None is Megatron's, and for a source with other names those.
        weights_only: No optimizer state.
        vocab_size: True rows of the vocabulary; None takes the checkpoint's word.
    """

    names: str | None = None
    weights_only: bool = False
    vocab_size: int | None = None


@dataclass(frozen=True, slots=True)
class SafetensorsOptions(WriteOptions):
    """What a person may ask of safetensors.

    Attributes:
        names: "megatron" or "hf"; None is Megatron's, and for a source with other names those.
        weights_only: As it always is: safetensors hold the model.
        vocab_size: True rows of the vocabulary; None takes the checkpoint's word.
        max_shard_bytes: Largest shard.
    """

    names: str | None = None
    weights_only: bool = False
    vocab_size: int | None = None
    max_shard_bytes: int = DEFAULT_SHARD_BYTES


@dataclass(frozen=True)
class _Content:
    """What goes into a container.

    Attributes:
        names: Whose names they are: "megatron", "hf", or "own" for a source that has others.
        tensors: The model's.
        sources: The tensors of the source that they come from.
        drops: What of those is left out, and why.
        notes: Sentences a person should read.
    """

    names: str
    tensors: Sequence[LocalTensor]
    sources: Mapping[str, TensorInfo]
    drops: Sequence[Drop] = ()
    notes: tuple[str, ...] = field(default=())


def plan_torch(reader: Reader, destination: Path, options: TorchOptions | None = None) -> Conversion:
    """Decides everything about one torch.save file of whole tensors and proves it complete; writes nothing.

    Args:
        reader: The source.
        destination: The file.
        options: What is asked.

    Raises:
        RequestError: The names cannot be made, or a tensor has no place.
        IntegrityError: Needed data is missing in the source.
        DestinationError: The file cannot be written.
    """
    options = options or TorchOptions()
    catalog = reader.catalog
    check_destination(catalog.root, destination, overwrite=options.overwrite, file=True)
    content = _content(reader, options.names, options.vocab_size)
    file = ArchiveFile(destination.name)
    sources = dict(content.sources)
    model = {tensor.name: _archived(file, tensor) for tensor in content.tensors}
    dropped = _dropped(catalog, content)
    state = OptimizerState({})
    if content.names != "megatron":
        file.tree = model
        dropped += _left(catalog, f"a state dict with {_WHOSE[content.names]} names has no place for it")
    else:
        state = state if options.weights_only else _optimizer(reader)
        file.tree = {"model": model}
        if state.tensors:
            used = _state_tensors(content, state.tensors)
            sources |= {copy.source: state.tensors[copy.source] for t in used.values() for s in t for copy in s.copies}
            groups = read_param_groups(reader)
            file.tree["optimizer"] = {
                "state": {kind: {t.name: _archived(file, t) for t in tensors} for kind, tensors in used.items()},
                "param_groups": [_plain(group) for group in groups.merged()],
            }
            if groups.scaler is not None:
                file.tree["optimizer"]["grad_scaler"] = file.adopt(groups.scaler, groups.storages)
        else:
            dropped += _left(catalog, "optimizer state is not wanted")
        known, strange = _state_of_job(catalog, content)
        file.tree |= known
        dropped += strange
    refuse_damage(catalog, set(sources))
    output = ArchiveOutput([file])
    job = Job.build(
        sources,
        output.routes,
        output.files,
        source_fingerprint=reader.fingerprint(),
        max_memory=options.max_memory,
        threads=options.threads,
        seals=output,
    )
    where = json.dumps(str(destination))
    hint = "transformers wants it as pytorch_model.bin with a config.json beside it; export-hf makes a whole folder"
    return Conversion(
        command="convert",
        reader=reader,
        destination=destination,
        job=job,
        dropped=tuple(dropped),
        notes=content.notes,
        summary=(("model", _summary(content)),),
        facts=_facts(content),
        advice=(hint,) if content.names == "hf" else (),
        next_step=f"python -c 'import torch; print(torch.load({where}, weights_only=True, mmap=True).keys())'",
        overwrite=options.overwrite,
        device=options.device,
        single=True,
        proof=Masters.needed(reader, state.tensors if state.doubt else {}),
    )


def plan_safetensors(reader: Reader, destination: Path, options: SafetensorsOptions | None = None) -> Conversion:
    """Decides everything about a safetensors folder of whole tensors and proves it complete; writes nothing.

    Hugging Face's names make it what `export-hf` makes, `config.json` and all.

    Args:
        reader: The source.
        destination: The folder.
        options: What is asked.

    Raises:
        RequestError: The names cannot be made, or a tensor has no place.
        IntegrityError: Needed data is missing in the source.
        DestinationError: The folder cannot be written.
    """
    options = options or SafetensorsOptions()
    catalog = reader.catalog
    if options.names == "hf" and catalog.megatron:
        shared = {
            name: getattr(options, name) for name in ("max_memory", "threads", "overwrite", "device", "vocab_size")
        }
        return plan_export(reader, destination, ExportOptions(**shared, max_shard_bytes=options.max_shard_bytes))
    check_destination(catalog.root, destination, overwrite=options.overwrite)
    content = _content(reader, options.names, options.vocab_size)
    refuse_damage(catalog, set(content.sources))
    targets = {t.name: Target(t.name, t.dtype, t.shape) for t in content.tensors}
    layout = plan_shards(targets, options.max_shard_bytes)
    boxed = {t.name: Target(t.name, t.dtype, t.matrix) for t in content.tensors}
    job = Job.build(
        content.sources,
        CopyRoutes.of([copy for t in content.tensors for copy in t.copies], boxed, layout.places),
        layout.files,
        source_fingerprint=reader.fingerprint(),
        max_memory=options.max_memory,
        threads=options.threads,
    )
    extra = {"model.safetensors.index.json": layout.index} if layout.index is not None else {}
    strange: list[tuple[str, str]] = []
    if content.names == "megatron":
        known, strange = _state_of_job(catalog, content)
        extra[SIDECAR] = json.dumps({"schema": "distckpt.container/1", **known}, indent=2).encode() + b"\n"
    return Conversion(
        command="convert",
        reader=reader,
        destination=destination,
        job=job,
        extra_files=extra,
        dropped=(
            *_dropped(catalog, content),
            *_left(catalog, "safetensors hold the model, not the state of training"),
            *strange,
        ),
        notes=content.notes,
        summary=(("model", _summary(content)),),
        facts=_facts(content),
        next_step=f"distckpt inspect {destination}",
        overwrite=options.overwrite,
        device=options.device,
    )


_WHOSE = {"hf": "Hugging Face's", "own": "the source's own", "megatron": "Megatron's"}


def _facts(content: _Content) -> dict[str, Any]:
    return {"names": content.names, "target_tensors": len(content.tensors), "parameters": _parameters(content)}


def _summary(content: _Content) -> str:
    return f"{_parameters(content):,} parameters, {len(content.tensors)} tensors under {_WHOSE[content.names]} names"


def _parameters(content: _Content) -> int:
    return sum(Box.whole(tensor.shape).volume for tensor in content.tensors)


def _content(reader: Reader, names: str | None, vocab_size: int | None) -> _Content:
    """The model's tensors under the names that were asked for; every element of the source is used or dropped."""
    catalog = reader.catalog
    if not catalog.megatron:
        made = _own_names(catalog, names, vocab_size)
    elif names == "hf":
        made = _hf_names(catalog, vocab_size)
    else:
        made = _megatron_names(catalog, vocab_size)
    prove(
        {name: t.shape for name, t in made.sources.items()},
        {t.name: Target(t.name, t.dtype, t.matrix) for t in made.tensors},
        [copy for t in made.tensors for copy in t.copies],
        made.drops,
        {t.name: t.fills for t in made.tensors},
    )
    used = {copy.source for tensor in made.tensors for copy in tensor.copies}
    return replace(made, sources={name: t for name, t in made.sources.items() if name in used})


def _own_names(catalog: Catalog, names: str | None, vocab_size: int | None) -> _Content:
    hugging = catalog.flavour == "Hugging Face"
    if names == "megatron" or (names == "hf" and not hugging) or vocab_size is not None:
        whose = "Hugging Face's names" if hugging else "names that are neither Megatron's nor Hugging Face's"
        what = (
            "--vocab-size needs a Megatron model" if vocab_size is not None else f"there is no way to --names {names}"
        )
        raise RequestError(
            f"the checkpoint has {whose}: {what}",
            details=[f"for example {name}" for name in list(catalog.tensors)[:2]],
            hint="leave the option out to keep the names",
        )
    sources = dict(catalog.weights) or {name: t for name, t in catalog.tensors.items() if t.kind != "optimizer"}
    tensors = [_same(name, Target(name, t.dtype, t.shape)) for name, t in sources.items()]
    return _Content("hf" if hugging else "own", tensors, sources)


def _same(name: str, target: Target) -> LocalTensor:
    box = Box.whole(target.shape)
    copies = (Copy(name, box, name, box),) if box.volume else ()
    return LocalTensor(name, target.dtype, target.shape, target.shape, copies, (), trained=True, expert=False)


def _hf_names(catalog: Catalog, vocab_size: int | None) -> _Content:
    _, mapping, sources = choose_mapping(catalog, ExportOptions(vocab_size=vocab_size))
    copies: dict[str, list[Copy]] = {name: [] for name in mapping.targets}
    for copy in mapping.copies:
        copies[copy.target].append(copy)
    tensors = [
        LocalTensor(name, t.dtype, t.shape, t.shape, tuple(copies[name]), (), trained=True, expert=False)
        for name, t in mapping.targets.items()
    ]
    return _Content("hf", tensors, sources, mapping.drops, tuple(mapping.notes))


def _megatron_names(catalog: Catalog, vocab_size: int | None) -> _Content:
    refuse_contradictions(ModelArgs.from_catalog(catalog), catalog)
    tensors = LocalModel.of(catalog, Layout(), vocab_size=vocab_size).chunk()
    drops = []
    for copy in (copy for tensor in tensors for copy in tensor.copies):
        shape = catalog.weights[copy.source].shape
        rows = copy.source_box.stop[0] if shape else 0
        if copy.source in VOCABULARY and rows < shape[0]:
            rest = Box((rows, *(0,) * (len(shape) - 1)), (shape[0] - rows, *shape[1:]))
            drops.append(Drop(copy.source, rest, "padding rows of the vocabulary"))
    return _Content("megatron", tensors, catalog.weights, drops)


def _archived(file: ArchiveFile, tensor: LocalTensor) -> Node:
    region = Region(tensor.matrix, tensor.copies, tensor.fills, name=tensor.name)
    storage = file.storage(tensor.dtype, Box.whole(tensor.shape).volume, [region])
    return tensor_node(storage, tensor.dtype, tensor.shape)


# ---------------------------------------------------------------------- the state of training


def _optimizer(reader: Reader) -> OptimizerState:
    """The optimizer's tensors by the parameters' names."""
    catalog = reader.catalog
    if not any(t.kind == "optimizer" for t in catalog.tensors.values()):
        return OptimizerState({})
    return optimizer_state(reader)


def _state_tensors(content: _Content, state: Mapping[str, TensorInfo]) -> dict[str, list[LocalTensor]]:
    """The optimizer's tensors, cut and put together as their parameters are; every element is used or dropped."""
    kinds = dict.fromkeys(name.split(".")[2] for name in state)
    out: dict[str, list[LocalTensor]] = {}
    for kind in kinds:
        prefix = f"optimizer.state.{kind}."
        for tensor in content.tensors:
            held = [state.get(prefix + copy.source) for copy in tensor.copies]
            found = [info for info in held if info is not None]
            if not found:
                continue
            if len(found) < len(held):
                raise RequestError(f"only a part of {tensor.name} has optimizer state {kind}", tensor=tensor.name)
            copies = tuple(replace(copy, source=prefix + copy.source) for copy in tensor.copies)
            out.setdefault(kind, []).append(replace(tensor, dtype=found[0].dtype, copies=copies))
        prefixed = (replace(drop, source=prefix + drop.source) for drop in content.drops)
        mine = out.get(kind, [])
        prove(
            {name: t.shape for name, t in state.items() if name.startswith(prefix)},
            {t.name: Target(t.name, t.dtype, t.matrix) for t in mine},
            [copy for t in mine for copy in t.copies],
            [drop for drop in prefixed if drop.source in state],
            {t.name: t.fills for t in mine},
        )
    return out


_NOT_COMMON = ("args", "optimizer", "content_metadata", "rerun_state_machine", "rng_state", "iteration")


def _state_of_job(catalog: Catalog, content: _Content) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """What is known of the job that saved, as plain data, with the sizes of a job without parallelism; and what is none."""
    rows = next((tensor.shape[0] for tensor in content.tensors if tensor.name == VOCABULARY[0]), None)
    out: dict[str, Any] = {"checkpoint_version": 3.0}
    strange = []
    if catalog.iteration is not None:
        out["iteration"] = catalog.iteration
    if catalog.args:
        args = _plain(dict(catalog.args))
        out["args"] = args | layout_arguments(args, Layout(), rows)
        strange += [f"args.{name}" for name in catalog.args if name not in args]
    common = catalog.common if isinstance(catalog.common, Mapping) else {}
    for name, value in common.items():
        if not isinstance(name, str) or name in _NOT_COMMON:
            continue
        plain = _plain(value)
        if plain is _OBJECT:
            strange.append(name)
        else:
            out.setdefault(name, plain)
    return out, [(name, "no plain data") for name in strange]


_OBJECT = object()


def _plain(value: Any) -> Any:
    """The value as plain data, element types by their names; `_OBJECT` for one that is none, left out of dictionaries."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Global) and value.module == "torch":
        return value.path
    if isinstance(value, Mapping):
        made = {key: _plain(item) for key, item in value.items() if isinstance(key, str | int)}
        return {key: item for key, item in made.items() if item is not _OBJECT}
    if isinstance(value, list | tuple):
        items = [_plain(item) for item in value]
        return _OBJECT if any(item is _OBJECT for item in items) else items
    return _OBJECT


def _dropped(catalog: Catalog, content: _Content) -> list[tuple[str, str]]:
    dropped = [(drop.source, drop.reason) for drop in content.drops]
    others = (name for name, t in catalog.tensors.items() if t.kind == "other")
    dropped += [(name, "no part of the model") for name in others if name not in content.sources]
    kinds: Iterable[str] = sorted({o.name.rpartition(".")[2] for o in catalog.objects.values()})
    return [*dropped, *((kind, f"{len(catalog.objects)} stored objects") for kind in kinds)]


def _left(catalog: Catalog, reason: str) -> list[tuple[str, str]]:
    return [(name, reason) for name, t in catalog.tensors.items() if t.kind == "optimizer"]
