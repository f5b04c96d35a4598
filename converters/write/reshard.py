"""From any readable checkpoint to a torch_dist checkpoint as a job at another layout would have written it.

plan = plan_reshard(open_checkpoint("ckpt"), Path("out"), Layout(tp=2, pp=2))
run_conversion(plan)
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from converters.formats.resolve import TRACKER
from converters.formats.torch_dist.output import TorchDistOutput
from converters.megatron.vocabulary import end_of_documents
from converters.names import MASTER, quoted, state_names
from converters.optimizer.proof import Masters
from converters.optimizer.read_groups import read_param_groups
from converters.optimizer.storage import as_remainders, keeps_remainders
from converters.write.framework_files import companions, keeps_framework
from converters.write.job_arguments import job_flags, optimizer_flags
from converters.write.reshard_state import ReshardOptions, TargetState
from converters.write.reshard_targets import Targets
from converters.write.side_files import files_beside
from converters.write.target_state import check_request, chosen_optimizer, describe, tracker, unwanted_state
from converters.write.write_plan import Conversion

if TYPE_CHECKING:
    from pathlib import Path

    from converters.formats.base import Reader
    from converters.megatron.layout import Layout
    from converters.optimizer.groups import ParamGroups
    from converters.optimizer.state import OptimizerState
    from converters.write.framework_files import Companions
    from converters.write.write_plan import ExtraFile


@dataclass(frozen=True, slots=True)
class TorchDistOptions(ReshardOptions):
    """As of a reshard, for Megatron-LM whichever framework wrote the source."""

    framework: str = "megatron-lm"


def plan_reshard(
    reader: Reader,
    destination: Path,
    layout: Layout,
    options: ReshardOptions | None = None,
) -> Conversion:
    """Decides everything about a reshard and proves it complete; writes nothing.

    Args:
        destination: Where the result shall appear: a training root with one iteration and its tracker file.
        layout: The layout of the job that will load it.

    Raises:
        RequestError: The model cannot be laid out so; the numbers and the nearest possible ones are named.
        IntegrityError: Needed data is missing in the source.
        DestinationError: The destination cannot be written.
    """
    options = (options or ReshardOptions()).resolved()
    catalog = reader.catalog
    if not keeps_framework(catalog):
        options = replace(options, framework="megatron-lm")
    args, notes = check_request(catalog, destination, layout, options)
    optimizer, options = _chosen_optimizer(reader, options)
    groups = None if options.optimizer == "none" else read_param_groups(reader).stored_as(options.optimizer)
    targets = Targets(catalog, layout, options, args, optimizer, groups)
    masters = {n: targets.sources[n] for n, parts in state_names(targets.sources) if parts.state == MASTER}
    completed = keeps_remainders(masters)
    state = TargetState(reader, targets, completed=completed)
    output = TorchDistOutput(targets.columns(), targets.buckets, [*targets.objects, *state.objects])
    around = companions(
        catalog,
        layout,
        framework=options.framework,
        rng=state.keep_rng,
        optimizer=options.optimizer != "none",
        completed=completed,
    )
    folder = around.folder
    files = [replace(file, name=f"{folder}/{file.name}") for file in output.files]
    extra = _extra_files(output, state, around, options)
    beside = files_beside(catalog, "torch_dist", folder, layout, written={*extra, *(file.name for file in files)})
    files += beside.files
    drops = list(targets.drops())
    job = options.job(reader, targets.sources, output, files, seals=output, drops=drops)
    summary, facts = describe(catalog, layout, options.optimizer, state.changed)
    flags = optimizer_flags(catalog.args, groups, options.optimizer)
    return Conversion(
        command="reshard",
        reader=reader,
        destination=destination,
        job=job,
        folder=folder,
        extra_files=extra,
        dropped=(
            *(unwanted_state(catalog) if options.optimizer == "none" else []),
            *state.dropped,
            *around.dropped,
            *beside.dropped,
        ),
        notes=(
            *notes,
            *optimizer.notes,
            *end_of_documents(drops, catalog.args),
            *_loader_notes(groups),
            *state.notes,
            *around.notes,
        ),
        summary=(*summary, *beside.summary),
        facts={**facts, "objects": len(state.objects)},
        advice=(around.advice or f"start the job with {job_flags(destination, layout, *flags)}",),
        next_step=f"distckpt inspect {quoted(destination)}",
        options=options,
        proof=Masters.needed(reader, masters),
    )


def _loader_notes(groups: ParamGroups | None) -> list[str]:
    """What a person should know of Megatron's own loader."""
    algorithms = {} if groups is None else {part.part.algorithm: part.part.distributed for part in groups.parts}
    if "Lion" in algorithms and algorithms.get("Adam"):
        # DistributedOptimizer.optimizer_state_keys is ("exp_avg",) of all parameters when --optimizer lion is given
        return [
            "Megatron-LM with --optimizer lion does not load exp_avg_sq of the parameters that Adam trains, not even "
            "from its own checkpoints: these second moments, which are written, start from zero"
        ]
    if any(name.startswith("SGD") for name in algorithms):
        return [
            "Megatron-LM 0.16.1 cannot load an SGD optimizer, not even its own (TypeError: 'NoneType' object is not "
            "callable, in init_state_fn): start such a job with --no-load-optim"
        ]
    return []


_REMAINDERS = (
    "master weights stay remainders: for a job with --use-precision-aware-optimizer of Megatron-Core 0.17 or later "
    "(0.16.1 ends with \"'bool' object has no attribute 'dtype'\" on its own files of this kind)"
)


def _chosen_optimizer(reader: Reader, options: ReshardOptions) -> tuple[OptimizerState, ReshardOptions]:
    """The optimizer's tensors as they will be stored, and the options with "keep" and "there is none" resolved."""
    state, options = chosen_optimizer(reader, options, _default_form)
    if options.masters == "remainders" and state.tensors:
        tensors = as_remainders(reader.catalog, state.tensors, options.optimizer)
        state = replace(state, tensors=tensors, notes=(_REMAINDERS, *state.notes))
    return state, options


def _extra_files(
    output: TorchDistOutput, state: TargetState, around: Companions, options: ReshardOptions
) -> dict[str, ExtraFile]:
    """What lies beside the data files, in Megatron's order: `metadata.json` comes last, then the tracker."""
    folder = around.folder
    files: dict[str, ExtraFile] = {f"{folder}/.metadata": lambda _: output.metadata(folder)}
    if state.common:
        files[f"{folder}/common.pt"] = state.common
    # all versions read the form with four fields; those before 0.19 read no other
    backends: dict[str, Any] = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    if options.mcore != "0.19":
        backends |= {"common_backend": "torch", "common_backend_version": 1}
    files |= {**around.files, f"{folder}/metadata.json": json.dumps(backends).encode()}
    return files | ({TRACKER: tracker(folder)} if around.tracker else {})


def _default_form(state: OptimizerState, form: str) -> str:
    """The form that "keep" means (flat buckets stay flat buckets), or "auto"."""
    if not any(part.distributed for part in state.recognised.parts):
        return "plain"
    return "fully_reshardable" if state.candidate is None or form == "auto" else "dp_reshardable"
