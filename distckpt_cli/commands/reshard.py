"""`distckpt reshard`: a checkpoint as a job at another layout would have written it, optimizer state included."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from distckpt_cli.console import Console, UsageProblem, format_size, named, parse_size
from distckpt_cli.exits import ExitCode
from distckpt_cli.options import (  # noqa: TC001 - Typer reads the annotations
    Ckpt,
    Json,
    NoPlanCache,
    PlanCacheDir,
    ProgressMode,
    Quiet,
    RankTimeout,
    Verbose,
)

if TYPE_CHECKING:
    from converters.engine import Stats
    from converters.layout import Layout
    from converters.reshard import ReshardPlan

_LAYOUT = "Target layout"
_CONTENT = "What to carry over"
_OUTPUT = "Output"
_RESOURCES = "Resources"


def reshard(
    src: Ckpt,
    dst: Annotated[str, typer.Argument(metavar="DST", help="The training root to make; absent or empty.")],
    tp: Annotated[
        int, typer.Option(metavar="T", help="Tensor-parallel size, 1 by default.", rich_help_panel=_LAYOUT)
    ] = 1,
    pp: Annotated[int, typer.Option(metavar="P", help="Pipeline stages, 1 by default.", rich_help_panel=_LAYOUT)] = 1,
    vpp: Annotated[
        int | None, typer.Option(metavar="V", help="Model chunks of each pipeline rank.", rich_help_panel=_LAYOUT)
    ] = None,
    ep: Annotated[
        int, typer.Option(metavar="E", help="Expert-parallel size, 1 by default.", rich_help_panel=_LAYOUT)
    ] = 1,
    etp: Annotated[
        int | None,
        typer.Option(
            metavar="X", help="Tensor-parallel size of experts; by default that of --tp.", rich_help_panel=_LAYOUT
        ),
    ] = None,
    cp: Annotated[
        int, typer.Option(metavar="C", help="Context-parallel size, 1 by default.", rich_help_panel=_LAYOUT)
    ] = 1,
    dp: Annotated[
        int | None,
        typer.Option(metavar="D", help="Data-parallel size; by default the least that fits.", rich_help_panel=_LAYOUT),
    ] = None,
    first_layers: Annotated[
        int | None, typer.Option(metavar="N", help="Layers of the first pipeline stage.", rich_help_panel=_LAYOUT)
    ] = None,
    last_layers: Annotated[
        int | None, typer.Option(metavar="N", help="Layers of the last pipeline stage.", rich_help_panel=_LAYOUT)
    ] = None,
    pp_layout: Annotated[
        str | None,
        typer.Option(metavar="STR", help="Megatron's pipeline layout: 'Ettt|(tt|)*3,m|L'.", rich_help_panel=_LAYOUT),
    ] = None,
    optimizer: Annotated[
        str,
        typer.Option(metavar="WHAT", help="fully_reshardable, dp_reshardable, keep or none.", rich_help_panel=_CONTENT),
    ] = "fully_reshardable",
    layers: Annotated[
        str, typer.Option(metavar="STYLE", help="Keys: stacked, per-layer or keep.", rich_help_panel=_CONTENT)
    ] = "keep",
    rng: Annotated[
        str,
        typer.Option(
            metavar="WHAT", help="keep, drop or auto (keep if the grid is the same).", rich_help_panel=_CONTENT
        ),
    ] = "auto",
    extra_state: Annotated[
        str,
        typer.Option(metavar="WHAT", help="keep, drop or fill (keep, make missing ones).", rich_help_panel=_CONTENT),
    ] = "fill",
    vocab_size: Annotated[
        int | None, typer.Option(metavar="N", help="True rows of the vocabulary.", rich_help_panel=_CONTENT)
    ] = None,
    fully_parallel: Annotated[
        bool,
        typer.Option("--fully-parallel", help="Spread replicas over data-parallel ranks.", rich_help_panel=_CONTENT),
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace DST after success.", rich_help_panel=_OUTPUT)
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("-n", "--dry-run", help="Print the plan, write nothing.", rich_help_panel=_OUTPUT)
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
    progress: ProgressMode = "auto",
    max_memory: Annotated[
        str, typer.Option(metavar="SIZE", help="Buffers of all workers, 64MiB by default.", rich_help_panel=_RESOURCES)
    ] = "64MiB",
    threads: Annotated[
        int | None, typer.Option(metavar="N", help="Workers; by default 2 to 4.", rich_help_panel=_RESOURCES)
    ] = None,
    plan_cache: PlanCacheDir = None,
    no_plan_cache: NoPlanCache = False,
    rank_timeout: RankTimeout = 60.0,
) -> int:
    """Write a checkpoint for another layout: weights, optimizer, scheduler, arguments.

    The result is a training root that Megatron-Core loads at the given layout: no GPU, no Megatron and no launch script
    needed. An interrupted run continues when the same command is given again; DST appears only when it is complete.
    """
    from distckpt_cli.progress import Progress, choose_mode
    from distckpt_cli.signals import stop_on_signals

    mode = choose_mode(progress, quiet=quiet)
    sizes = {
        "--tp": tp,
        "--pp": pp,
        "--vpp": vpp,
        "--ep": ep,
        "--etp": etp,
        "--cp": cp,
        "--dp": dp,
        "--threads": threads,
    }
    for option, value in sizes.items():
        if value is not None and value < 1:
            raise UsageProblem(f"{option} is {value}; it must be 1 or more")
    _check("--optimizer", optimizer, ("fully_reshardable", "dp_reshardable", "keep", "none"))
    _check("--layers", layers, ("stacked", "per-layer", "keep"))
    _check("--rng", rng, ("keep", "drop", "auto"))
    _check("--extra-state", extra_state, ("keep", "drop", "fill"))
    console = Console(json_asked=as_json, quiet=quiet, verbose=verbose)
    from converters.formats import open_checkpoint
    from converters.layout import Layout
    from converters.plan_cache import PlanCache
    from converters.ranks import Ranks
    from converters.reshard import ReshardOptions, plan_reshard, run_reshard

    layout = Layout(
        tp=tp,
        pp=pp,
        vpp=vpp,
        cp=cp,
        ep=ep,
        etp=etp,
        dp=dp or Layout.least_dp(tp, cp, ep, etp),
        first_layers=first_layers,
        last_layers=last_layers,
        pp_layout=pp_layout,
    )
    options = ReshardOptions(
        optimizer=optimizer,
        layers=layers,
        rng=rng,
        extra_state=extra_state,
        vocab_size=vocab_size,
        fully_parallel=fully_parallel,
        max_memory=parse_size(max_memory, "--max-memory"),
        threads=threads or min(4, max(2, os.cpu_count() or 2)),
        overwrite=overwrite,
    )
    cache = None if no_plan_cache else PlanCache.default(plan_cache)
    plan = plan_reshard(open_checkpoint(src), named(dst), layout, options, cache=cache)
    for text in cache.said if cache and verbose else ():
        console.note(text)
    if dry_run:
        _show_plan(console, plan)
        return ExitCode.OK
    ranks = Ranks.from_environment(timeout=rank_timeout)
    with stop_on_signals() as stop, Progress(console, mode) as listener:
        stats = run_reshard(plan, listener=listener, stop=stop, ranks=ranks)
    _show_result(console, plan, stats, dst)
    return ExitCode.OK


def _check(option: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UsageProblem(
            f"{option} {value!r} is not a choice", hint=f"choose {', '.join(choices[:-1])} or {choices[-1]}"
        )


def _layout_text(layout: Layout) -> str:
    parts = [f"tp {layout.tp}", f"pp {layout.pp}"]
    for name in ("vpp", "cp", "ep"):
        value = getattr(layout, name)
        if value is not None and value > 1:
            parts.append(f"{name} {value}")
    if layout.ep > 1 or layout.expert_tp != layout.tp:
        parts.append(f"etp {layout.expert_tp}")
    return (
        "  ".join([*parts, f"dp {layout.dp}"]) + f"  ({layout.world_size} rank{'s' if layout.world_size > 1 else ''})"
    )


def _document(plan: ReshardPlan) -> dict[str, Any]:
    job, state = plan.job, plan.state
    return {
        "source": {"path": plan.reader.catalog.path.name, "iteration": plan.reader.catalog.iteration},
        "layout": {
            name: getattr(plan.layout, name)
            for name in ("tp", "pp", "vpp", "cp", "ep", "expert_tp", "dp", "world_size")
        },
        "optimizer": plan.options.optimizer,
        "tensors": len(job.sources),
        "objects": len(state.objects),
        "changed_args": {name: {"from": old, "to": new} for name, (old, new) in state.changed.items()},
        "dropped": [{"what": what, "reason": reason} for what, reason in plan.dropped],
        "notes": list(plan.notes),
        "files": [{"name": f.name, "bytes": f.size} for f in job.files],
        "peak_memory": job.peak_memory,
        "threads": job.threads,
    }


def _card(console: Console, plan: ReshardPlan) -> None:
    from converters.layout import Layout
    from converters.names import fold

    console.fact("from", _layout_text(Layout.saved(plan.reader.catalog)))
    console.fact("to", f"{_layout_text(plan.layout)}, optimizer: {plan.options.optimizer}")
    changed = [f"{name} {old} -> {new}" for name, (old, new) in plan.state.changed.items()]
    for number, line in enumerate(changed):
        console.fact("args" if not number else "", line)
    reasons: dict[str, list[str]] = {}
    for what, reason in plan.dropped:
        reasons.setdefault(reason, []).append(what)
    for number, (reason, names) in enumerate(reasons.items()):
        shown = [text for text, _ in fold(names)]
        more = f" and {len(shown) - 2} more" if len(shown) > 2 else ""
        console.fact("left out" if not number else "", f"{reason} ({', '.join(shown[:2])}{more})")


def _show_plan(console: Console, plan: ReshardPlan) -> None:
    from converters.publish import beside, free_bytes

    job, free = plan.job, free_bytes(beside(plan.destination, "partial").parent)
    if console.json_asked:
        body = {**_document(plan), "dry_run": True, "bytes_read": job.bytes_read, "bytes_written": job.bytes_written}
        console.document("distckpt.reshard/1", {**body, "free_bytes": free})
        return
    _card(console, plan)
    console.fact("read", f"{format_size(job.bytes_read)} from {len(plan.reader.files)} files")
    size = f"{format_size(job.bytes_written)} to {len(job.files)} files in {plan.destination}/{plan.folder}"
    console.fact("write", f"{size}  (free: {format_size(free)})")
    console.fact("workers", f"{job.threads}, {format_size(job.peak_memory)} of buffers")
    for text in plan.notes:
        console.note(text)
    console.out("nothing written (--dry-run)")


def _show_result(console: Console, plan: ReshardPlan, stats: Stats, dst: str) -> None:
    job = plan.job
    if console.json_asked:
        body = {
            **_document(plan),
            "dry_run": False,
            "bytes_read": stats.bytes_read,
            "bytes_written": stats.bytes_written,
            "bytes_kept": stats.bytes_kept,
            "records_checked": stats.records_checked,
            "seconds": round(stats.seconds, 3),
        }
        console.document("distckpt.reshard/1", body)
        return
    _card(console, plan)
    rate = format_size(stats.bytes_written / stats.seconds) if stats.seconds > 0 else "-"
    kept = f" ({format_size(stats.bytes_kept)} kept from before)" if stats.bytes_kept else ""
    files = f"{len(job.files)} file{'s' if len(job.files) != 1 else ''}"
    size = f"{format_size(job.bytes_written)} in {files}{kept}, {stats.seconds:.1f} s, {rate}/s"
    console.fact("wrote", f"{dst}/{plan.folder}  {size}")
    console.fact("checked", f"{stats.records_checked} source records against their checksums")
    console.note(f"start the job with {_flags(plan, dst)}")
    console.next_step(f"distckpt inspect {dst}")


def _flags(plan: ReshardPlan, dst: str) -> str:
    """What Megatron-LM has to be told to load the result."""
    layout, optimizer = plan.layout, plan.options.optimizer
    words = [
        f"--load {dst}",
        f"--tensor-model-parallel-size {layout.tp}",
        f"--pipeline-model-parallel-size {layout.pp}",
    ]
    if layout.ep > 1:
        words.append(f"--expert-model-parallel-size {layout.ep}")
    if optimizer == "none":
        words.append("--no-load-optim")
    else:
        words.append("--use-distributed-optimizer")
        words += ["--dist-ckpt-optim-fully-reshardable"] if optimizer == "fully_reshardable" else []
    return " ".join(words)
