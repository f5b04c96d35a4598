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
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from converters.execute.destination import check_destination
from converters.formats.containers.archive_out import ArchiveFile, ArchiveOutput
from converters.formats.containers.safetensors_out import DEFAULT_SHARD_BYTES, plan_shards
from converters.formats.folder import read_small
from converters.megatron.damage import refuse_damage, refuse_damaged
from converters.names import parameter_of, printable, quoted
from converters.optimizer.proof import Masters
from converters.optimizer.read_groups import read_param_groups
from converters.optimizer.state import OptimizerState
from converters.optimizer.storage import keeps_remainders
from converters.planning.routes import CopyRoutes
from converters.write.companion_files import hf_companions, json_bytes
from converters.write.export import ExportOptions, plan_export
from converters.write.side_files import Beside, files_beside
from converters.write.whole_tensors import (
    choose_content,
    left_out,
    named_optimizer,
    plain,
    state_drops,
    state_of_job,
    state_tensors,
)
from converters.write.write_plan import Conversion, WriteOptions

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from converters.formats.base import Reader
    from converters.pickles.nodes import Node
    from converters.planning.plan import Piece
    from converters.write.write_plan import ExtraFile

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

    CHOICES: ClassVar[Mapping[str, tuple[str, ...]]] = {"names": ("megatron", "hf")}

    names: str | None = None
    weights_only: bool = False
    vocab_size: int | None = None


@dataclass(frozen=True, slots=True)
class SafetensorsOptions(TorchOptions):
    """What a person may ask of safetensors, which hold the model in any case.

    Attributes:
        max_shard_bytes: Largest shard.
    """

    max_shard_bytes: int = DEFAULT_SHARD_BYTES


def plan_torch(reader: Reader, destination: Path, options: TorchOptions | None = None) -> Conversion:
    """Decides everything about one torch.save file of whole tensors and proves it complete; writes nothing.

    Raises:
        RequestError: The names cannot be made, or do not cover a tensor.
        IntegrityError: Needed data is missing in the source.
        DestinationError: The file cannot be written.
    """
    options = options or TorchOptions()
    catalog = reader.catalog
    check_destination(catalog.root, destination, overwrite=options.overwrite, file=True)
    refuse_damaged(catalog, "weight", *([] if options.weights_only or options.names == "hf" else ["optimizer"]))
    content = choose_content(catalog, options.names, options.vocab_size)
    file = ArchiveFile(destination.name)
    file.tree = {piece.name: file.tensor(piece) for piece in content.tensors}
    state, strange = OptimizerState({}), list[tuple[str, str]]()
    reason = f"a state dict with {content.whose} names cannot hold it"
    if content.names == "megatron":
        state = state if options.weights_only else named_optimizer(reader)
        job_state, strange = state_of_job(catalog, content, completed=keeps_remainders(state.tensors))
        file.tree = {"model": file.tree, **job_state}
        reason = "" if state.tensors else "optimizer state is left out by option"
    sources, drops = dict(content.sources), list(content.drops)
    if state.tensors:
        used = state_tensors(content, state.tensors)
        sources |= state.tensors
        drops += state_drops(content, state.tensors)
        file.tree["optimizer"] = _archived_optimizer(file, reader, used)
    output = ArchiveOutput([file])
    code = f"import torch; print(torch.load({json.dumps(str(destination))}, weights_only=True, mmap=True).keys())"
    hint = "transformers needs it as pytorch_model.bin with a config.json beside it; export-hf makes a whole folder"
    return Conversion(
        command="convert",
        reader=reader,
        destination=destination,
        job=options.job(reader, sources, output.routes, output.files, seals=output, drops=drops),
        dropped=(*left_out(catalog, content, reason), *strange, *files_beside(catalog, "torch").dropped),
        notes=(*content.notes, *state.notes),
        summary=content.summary,
        facts=content.facts,
        advice=(hint,) if content.names == "hf" else (),
        next_step=f"python -c {shlex.quote(code)}",
        options=options,
        single=True,
        proof=Masters.needed(reader, state.tensors),
    )


def _hf_files(folder: Path, notes: list[str]) -> dict[str, ExtraFile]:
    """`config.json`, tokenizer and the like of a Hugging Face folder."""
    if not (folder / "config.json").is_file():
        return {}
    try:
        config = json.loads(read_small(folder / "config.json", 16 << 20))
        if not isinstance(config, dict):
            raise ValueError("not an object")
        files = hf_companions(folder, False, config, notes, of="the source")
    except (ValueError, RecursionError, OSError) as error:
        notes.append(f"config.json and what lies beside it is not carried over: {printable(str(error))}")
        return {}
    return {**files, "config.json": json_bytes(config)}


def plan_safetensors(reader: Reader, destination: Path, options: SafetensorsOptions | None = None) -> Conversion:
    """Decides everything about a safetensors folder of whole tensors and proves it complete; writes nothing.

    Hugging Face's names make it what `export-hf` makes, `config.json` and all.

    Raises:
        RequestError: The names cannot be made, or do not cover a tensor.
        IntegrityError: Needed data is missing in the source.
        DestinationError: The folder cannot be written.
    """
    options = options or SafetensorsOptions()
    catalog = reader.catalog
    if options.names == "hf" and catalog.megatron:
        export = ExportOptions(
            **options.resources, vocab_size=options.vocab_size, max_shard_bytes=options.max_shard_bytes
        )
        return plan_export(reader, destination, export)
    check_destination(catalog.root, destination, overwrite=options.overwrite)
    content = choose_content(catalog, options.names, options.vocab_size)
    refuse_damage(catalog, set(content.sources))
    layout = plan_shards({piece.name: piece for piece in content.tensors}, options.max_shard_bytes)
    routes = CopyRoutes.of((piece, layout.locations[piece.name]) for piece in content.tensors)
    extra: dict[str, ExtraFile] = {}
    if layout.index is not None:
        extra["model.safetensors.index.json"] = layout.index
    strange: list[tuple[str, str]] = []
    notes = list(content.notes)
    if not catalog.megatron:
        extra |= _hf_files(catalog.path, notes)
    if content.names == "megatron":
        job_state, strange = state_of_job(catalog, content)
        extra[SIDECAR] = json_bytes({"schema": "distckpt.container/1", **job_state})
    written = {*extra, *(file.name for file in layout.files)}
    beside = files_beside(catalog, "safetensors", written=written) if content.names != "hf" else Beside()
    return Conversion(
        command="convert",
        reader=reader,
        destination=destination,
        job=options.job(reader, content.sources, routes, [*layout.files, *beside.files], drops=content.drops),
        extra_files=extra,
        dropped=(
            *left_out(catalog, content, "safetensors hold the model, not the state of training"),
            *strange,
            *beside.dropped,
        ),
        notes=tuple(notes),
        summary=(*content.summary, *beside.summary),
        facts=content.facts,
        next_step=f"distckpt inspect {quoted(destination)}",
        options=options,
    )


def _archived_optimizer(file: ArchiveFile, reader: Reader, used: Mapping[str, Sequence[Piece]]) -> dict[str, Node]:
    groups = read_param_groups(reader)
    scaler = {} if groups.scaler is None else {"grad_scaler": file.adopt(groups.scaler, groups.storages)}
    chain = groups.chain(2 if any(part.experts for part in groups.parts) else 1)
    parts = [part.part for part in groups.parts]
    mixed = len({part.distributed for part in parts}) > 1  # only then their names tell which are in flat buckets
    undistributed = frozenset[str]().union(*(part.names for part in parts if mixed and not part.distributed))
    state: dict[str, dict[str, Node]] = {}
    for kind, tensors in used.items():
        for tensor in tensors:
            spelled = (
                "fp32_param" if kind == "param" and parameter_of(tensor.copies[0].source) in undistributed else kind
            )
            state.setdefault(spelled, {})[tensor.name] = file.tensor(tensor)
    return {
        "state": state,
        "param_groups": [plain(group) for chained in chain for group in chained.groups],
        "chain": [{"groups": len(chained.groups), "distributed": chained.part.distributed} for chained in chain],
        **scaler,
    }
