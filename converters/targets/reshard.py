"""From any readable checkpoint to a torch_dist checkpoint as a job at another layout would have written it.

plan = plan_reshard(open_checkpoint("ckpt"), Path("out"), Layout(tp=2, pp=2))
run_reshard(plan)
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from converters.engine.destination import check_destination
from converters.facts.damage import refuse_contradictions, refuse_damaged, refuse_foreign_names
from converters.facts.model_args import ModelArgs
from converters.formats.torch_dist.output import TorchDistOutput
from converters.names import quoted
from converters.optimizer.proof import Masters
from converters.parallel.layout_check import check as check_layout
from converters.parallel.split import Outline
from converters.targets.blueprint import Blueprint, LazySources, blueprint_key, keep, recall
from converters.targets.companions import companions, keeps_framework
from converters.targets.conversion import Conversion, run_conversion
from converters.targets.reshard_state import ReshardOptions, State, target_state
from converters.targets.reshard_targets import Targets
from converters.targets.target_state import TRACKER, chosen_optimizer, describe, job_flags, tracker

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from converters.catalog import Catalog, TensorInfo
    from converters.formats.base import Reader
    from converters.formats.torch_dist.parts import FlatOut, ObjectOut
    from converters.optimizer.state import OptimizerState
    from converters.parallel.layout import Layout
    from converters.targets.companions import Companions
    from converters.targets.conversion import ExtraFile
    from converters.targets.plan_cache import PlanCache

__all__ = ["ReshardOptions", "ReshardPlan", "TorchDistOptions", "plan_reshard", "run_reshard"]


@dataclass(frozen=True, slots=True)
class TorchDistOptions(ReshardOptions):
    """As of a reshard, for Megatron-LM whichever framework wrote the source."""

    framework: str = "megatron-lm"


@dataclass(frozen=True, kw_only=True)
class ReshardPlan(Conversion):
    """A reshard, decided and proved, with nothing moved yet; the destination is a training root with one iteration.

    Attributes:
        layout: The target layout.
        options: What was asked.
        output: The data files.
        state: Everything that is not a tensor, at the target layout.
    """

    layout: Layout
    options: ReshardOptions
    output: TorchDistOutput
    state: State


def plan_reshard(
    reader: Reader,
    destination: Path,
    layout: Layout,
    options: ReshardOptions | None = None,
    *,
    cache: PlanCache | None = None,
) -> ReshardPlan:
    """Decides everything about a reshard and proves it complete; writes nothing.

    Args:
        destination: Where the result shall appear: a training root with one iteration and its tracker file.
        layout: The layout of the job that will load it.
        cache: Where plans are kept between runs; None to work everything out.

    Raises:
        RequestError: The model cannot be laid out so; the numbers and the nearest possible ones are named.
        IntegrityError: Needed data is missing in the source.
        DestinationError: The destination cannot be written.
    """
    options = (options or ReshardOptions()).resolved()
    catalog = reader.catalog
    if not keeps_framework(catalog):
        options = replace(options, framework="megatron-lm")
    check_destination(catalog.root, destination, overwrite=options.overwrite)
    refuse_damaged(catalog, "weight", "other", *(["optimizer"] if options.optimizer != "none" else []))
    key = blueprint_key(reader, layout, options) if cache else None
    known = recall(cache, key) if cache and key else None
    draft = _draw(reader, layout, options) if known is None else _Draft(known, LazySources(reader, known.columns))
    made = draft.blueprint
    options = replace(options, optimizer=made.optimizer)
    masters = {n: t for n, t in draft.sources.items() if n.startswith("optimizer.")} if made.doubt else {}
    state = target_state(reader, layout, made.outline, options, stacked=made.stacked, padded_vocab=made.padded_vocab)
    output = TorchDistOutput(made.columns, draft.flats, [*draft.objects, *state.objects])
    around = companions(
        catalog, layout, framework=options.framework, rng=state.rng, optimizer=options.optimizer != "none"
    )
    folder = around.folder
    files = [replace(file, name=f"{folder}/{file.name}") for file in output.files]
    job = options.job(reader, draft.sources, output, files, seals=output, known_tasks=made.tasks_for(output))
    if cache and key and known is None and draft.lasting:
        keep(cache, key, made, job.task_table, output)
    summary, facts = describe(catalog, layout, options.optimizer, state.changed)
    return ReshardPlan(
        command="reshard",
        reader=reader,
        destination=destination,
        job=job,
        folder=folder,
        extra_files=_extra_files(output, state, around, options),
        dropped=(*_unused(catalog, options), *state.dropped, *around.dropped),
        notes=(*made.notes, *state.notes, *around.notes),
        summary=summary,
        facts={**facts, "objects": len(state.objects)},
        advice=(around.advice or f"start the job with {_flags(destination, layout, options)}",),
        next_step=f"distckpt inspect {quoted(destination)}",
        options=options,
        proof=Masters.needed(reader, masters),
        layout=layout,
        output=output,
        state=state,
    )


run_reshard = run_conversion


def _flags(root: Path, layout: Layout, options: ReshardOptions) -> str:
    """What Megatron-LM has to be told to load the result."""
    if options.optimizer == "none":
        return job_flags(root, layout, "--no-load-optim")
    words = ["--use-distributed-optimizer"]
    words += ["--dist-ckpt-optim-fully-reshardable"] if options.optimizer == "fully_reshardable" else []
    return job_flags(root, layout, *words)


@dataclass(frozen=True)
class _Draft:
    """A blueprint with what of this iteration it is filled from.

    Attributes:
        blueprint: The blueprint.
        sources: The source tensors.
        flats: Pieces of flat buckets.
        objects: Objects that belong to them.
        lasting: The blueprint serves other iterations, too.
    """

    blueprint: Blueprint
    sources: Mapping[str, TensorInfo]
    flats: Sequence[FlatOut] = ()
    objects: Sequence[ObjectOut] = ()
    lasting: bool = True


def _draw(reader: Reader, layout: Layout, options: ReshardOptions) -> _Draft:
    """Works everything out from the catalog."""
    catalog = reader.catalog
    args = ModelArgs.from_catalog(catalog)
    refuse_foreign_names(catalog)
    refuse_contradictions(args, catalog)
    shapes = {name: t.shape for name, t in catalog.weights.items()}
    notes = check_layout(args, layout, shapes)
    outline = Outline.of(args, shapes)
    sources = dict(catalog.weights) | {n: t for n, t in catalog.tensors.items() if t.kind == "other"}
    found, options = chosen_optimizer(reader, options, _kept)
    targets = Targets(catalog, layout, outline, options, args)
    targets.make(sources)
    flats: Sequence[FlatOut] = ()
    objects: Sequence[ObjectOut] = ()
    if options.optimizer == "dp_reshardable":
        flats, objects = targets.flatten(found, reader)
        for flat in flats:
            flat.check()
    else:
        targets.make(found.tensors)
    blueprint = Blueprint(
        targets.columns(),
        outline,
        options.optimizer,
        targets.stacked,
        targets.padded_vocab(),
        found.doubt is not None,
        (*notes, *found.notes),
    )
    # the order of parameters in flat buckets is found out from the values, anew for each iteration
    lasting = found.candidate is None and not flats
    return _Draft(blueprint, sources | found.tensors, flats, objects, lasting)


def _extra_files(
    output: TorchDistOutput, state: State, around: Companions, options: ReshardOptions
) -> dict[str, ExtraFile]:
    """What lies beside the data files, in Megatron's order: `metadata.json` comes last, then the tracker."""
    folder = around.folder
    files: dict[str, ExtraFile] = {f"{folder}/.metadata": lambda: output.metadata(folder)}
    if state.common:
        files[f"{folder}/common.pt"] = state.common
    # all versions read the form with four fields; those before 0.19 read no other
    backends: dict[str, Any] = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    if options.mcore != "0.19":
        backends |= {"common_backend": "torch", "common_backend_version": 1}
    files |= {**around.files, f"{folder}/metadata.json": json.dumps(backends).encode()}
    return files | ({TRACKER: tracker(folder)} if around.tracker else {})


def _kept(found: OptimizerState) -> str:
    """The form that "keep" means: flat buckets stay flat buckets."""
    return "fully_reshardable" if found.candidate is None else "dp_reshardable"


def _unused(catalog: Catalog, options: ReshardOptions) -> list[tuple[str, str]]:
    if options.optimizer != "none":
        return []
    return [(name, "optimizer state is not wanted") for name, t in catalog.tensors.items() if t.kind == "optimizer"]
