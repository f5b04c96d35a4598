"""`distckpt export-hf`: a Megatron checkpoint as a folder that transformers loads."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from distckpt_cli.console import Console, UsageProblem, format_count, format_size, named, parse_size
from distckpt_cli.exits import ExitCode
from distckpt_cli.options import Ckpt, Json, ProgressMode, Quiet, RankTimeout, Verbose  # noqa: TC001 - Typer reads the annotations

if TYPE_CHECKING:
    from converters.engine import Stats
    from converters.export import ExportOptions, ExportPlan

_MODEL = "The model"
_OUTPUT = "Output"
_RESOURCES = "Resources"


def export_hf(
    src: Ckpt,
    dst: Annotated[str, typer.Argument(metavar="DST", help="The folder to make; absent or empty.")],
    arch: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Architecture, if the inferred one is wrong.", rich_help_panel=_MODEL),
    ] = None,
    hf_config: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Take config.json, tokenizer and code files from this Hugging Face folder, after a cross-check.",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(metavar="TYPE", help="bf16, fp16 or fp32; by default as stored.", rich_help_panel=_MODEL),
    ] = None,
    vocab_size: Annotated[
        int | None,
        typer.Option(metavar="N", help="Rows of the vocabulary to keep; the rest is padding.", rich_help_panel=_MODEL),
    ] = None,
    mtp: Annotated[
        str,
        typer.Option(metavar="WHAT", help="Multi-token prediction layers: keep, drop or auto.", rich_help_panel=_MODEL),
    ] = "auto",
    max_shard_size: Annotated[
        str, typer.Option(metavar="SIZE", help="Largest file, 5GB by default.", rich_help_panel=_OUTPUT)
    ] = "5GB",
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
    rank_timeout: RankTimeout = 60.0,
) -> int:
    """Write a checkpoint's weights as a Hugging Face folder: safetensors, index, config.json.

    Needs nothing but the checkpoint. Every source tensor is accounted for; a tensor without a place is an error. An
    interrupted run continues when the same command is given again; DST appears only when it is complete.
    """
    from distckpt_cli.progress import Progress, choose_mode
    from distckpt_cli.signals import stop_on_signals

    mode = choose_mode(progress, quiet=quiet)
    options = _options(arch, hf_config, dtype, vocab_size, mtp, max_shard_size, overwrite, max_memory, threads)
    console = Console(json_asked=as_json, quiet=quiet, verbose=verbose)
    from converters.export import plan_export, run_export
    from converters.formats import open_checkpoint
    from converters.ranks import Ranks

    plan = plan_export(open_checkpoint(src), named(dst), options)
    if dry_run:
        _show_plan(console, plan)
        return ExitCode.OK
    ranks = Ranks.from_environment(timeout=rank_timeout)
    with stop_on_signals() as stop, Progress(console, mode) as listener:
        stats = run_export(plan, listener=listener, stop=stop, ranks=ranks)
    _show_result(console, plan, stats, dst)
    return ExitCode.OK


def _options(
    arch: str | None,
    hf_config: str | None,
    dtype: str | None,
    vocab_size: int | None,
    mtp: str,
    max_shard_size: str,
    overwrite: bool,
    max_memory: str,
    threads: int | None,
) -> ExportOptions:
    from converters.dtypes import from_option
    from converters.export import ExportOptions

    if mtp not in ("keep", "drop", "auto"):
        raise UsageProblem(f"--mtp {mtp!r} is not a choice", hint="choose keep, drop or auto")
    if threads is not None and threads < 1:
        raise UsageProblem(f"--threads {threads} is not a number of workers", hint="give 1 or more")
    shard = parse_size(max_shard_size, "--max-shard-size")
    if shard < 1:
        raise UsageProblem("--max-shard-size 0 leaves no room for a tensor", hint="5GB is the default")
    return ExportOptions(
        arch=arch,
        dtype=from_option(dtype) if dtype else None,
        vocab_size=vocab_size,
        mtp=mtp,
        hf_config=Path(hf_config).expanduser() if hf_config else None,
        max_shard_bytes=shard,
        max_memory=parse_size(max_memory, "--max-memory"),
        threads=threads or min(4, max(2, os.cpu_count() or 2)),
        overwrite=overwrite,
    )


def _summary(plan: ExportPlan) -> str:
    report = plan.report()
    count = report["source_tensors"]
    parameters = format_count(report["parameters"])
    model = f"{plan.model.name} ({plan.model.architecture})"
    return f"{model}, {parameters} parameters, {count['weights']} tensors accounted for"


def _dropped(plan: ExportPlan) -> list[str]:
    """One line for each reason; names only where there are few, the report has them all."""
    from converters.names import fold

    catalog = plan.reader.catalog
    reasons: dict[str, list[str]] = {}
    for drop in plan.mapping.drops:
        reasons.setdefault(drop.reason, []).append(drop.source)
    lines = []
    for reason, names in reasons.items():
        shown = [text for text, _ in fold(names)]
        lines.append(f"{reason} ({', '.join(shown[:2])}{f' and {len(shown) - 2} more' if len(shown) > 2 else ''})")
    optimizer = [t for t in catalog.tensors.values() if t.kind == "optimizer"]
    if optimizer:
        lines.append(f"optimizer state ({len(optimizer)} tensors, {format_size(sum(t.nbytes for t in optimizer))})")
    if catalog.objects:
        kinds = sorted({o.name.rpartition(".")[2] for o in catalog.objects.values()})
        lines.append(
            f"{len(catalog.objects)} stored objects ({', '.join(kinds[:3])}{', ...' if len(kinds) > 3 else ''})"
        )
    return lines


def _card(console: Console, plan: ExportPlan) -> None:
    console.fact("model", _summary(plan))
    for number, line in enumerate(_dropped(plan)):
        console.fact("left out" if not number else "", line)


def _show_plan(console: Console, plan: ExportPlan) -> None:
    from converters.publish import beside, free_bytes

    job = plan.job
    free = free_bytes(beside(plan.destination, "partial").parent)
    if console.json_asked:
        body: dict[str, Any] = {
            **plan.report(),
            "dry_run": True,
            "files": [{"name": f.name, "bytes": f.size} for f in job.files],
            "bytes_read": job.bytes_read,
            "bytes_written": job.bytes_written,
            "peak_memory": job.peak_memory,
            "threads": job.threads,
            "free_bytes": free,
            "config": plan.mapping.config,
        }
        body.pop("schema")
        console.document("distckpt.export-hf/1", body)
        return
    _card(console, plan)
    console.fact("read", f"{format_size(job.bytes_read)} from {len(plan.reader.files)} files")
    size = f"{format_size(job.bytes_written)} to {len(job.files)} files in {plan.destination}"
    console.fact("write", f"{size}  (free: {format_size(free)})")
    console.fact("workers", f"{job.threads}, {format_size(job.peak_memory)} of buffers")
    for text in plan.notes:
        console.note(text)
    console.out("nothing written (--dry-run)")


def _show_result(console: Console, plan: ExportPlan, stats: Stats, dst: str) -> None:
    job = plan.job
    if console.json_asked:
        body: dict[str, Any] = {
            **plan.report(),
            "dry_run": False,
            "files": [{"name": f.name, "bytes": f.size} for f in job.files],
            "bytes_read": stats.bytes_read,
            "bytes_written": stats.bytes_written,
            "bytes_kept": stats.bytes_kept,
            "records_checked": stats.records_checked,
            "seconds": round(stats.seconds, 3),
        }
        body.pop("schema")
        console.document("distckpt.export-hf/1", body)
        return
    _card(console, plan)
    rate = format_size(stats.bytes_written / stats.seconds) if stats.seconds > 0 else "-"
    kept = f" ({format_size(stats.bytes_kept)} kept from before)" if stats.bytes_kept else ""
    shards = f"{len(job.files)} file{'s' if len(job.files) > 1 else ''}"
    console.fact("wrote", f"{dst}  {format_size(job.bytes_written)} in {shards}{kept}, {stats.seconds:.1f} s, {rate}/s")
    console.fact(
        "checked", f"{stats.records_checked} source records against their checksums; report in distckpt-report.json"
    )
    if plan.options.hf_config is None:
        console.note("a checkpoint holds no tokenizer; --hf-config DIR copies one from a Hugging Face folder")
    path = json.dumps(dst)
    code = f"from transformers import AutoModelForCausalLM as M; M.from_pretrained({path})"
    console.next_step(f"python -c {shlex.quote(code)}")
