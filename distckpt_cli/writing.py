"""What all commands that write have in common: their options, the plan they print, the result they print."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from distckpt_cli.console import format_size, parse_size
from distckpt_cli.exits import ExitCode
from distckpt_cli.options import MaxMemory, Running, check_device, output, resources, workers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from converters.engine.run import Stats
    from converters.targets.conversion import Conversion
    from distckpt_cli.console import Console

__all__ = ["Target", "Writing", "carry_out"]

Target = Annotated[str, typer.Argument(metavar="DST", help="The folder to make; absent or empty.")]


@dataclass(frozen=True)
class Writing(Running):
    """The options of every command that writes."""

    overwrite: Annotated[bool, output("--overwrite", help="Replace DST after success.")] = False
    dry_run: Annotated[bool, output("-n", "--dry-run", help="Print the plan, write nothing.")] = False
    max_memory: MaxMemory = "64MiB"
    device: Annotated[
        str,
        resources(
            metavar="WHERE",
            help="Where types are changed: cpu, cuda, cuda:N or auto (a GPU, if there is one).",
        ),
    ] = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_device(self.device)

    @property
    def options(self) -> dict[str, Any]:
        """What the library's `WriteOptions` take."""
        return {
            "max_memory": parse_size(self.max_memory, "--max-memory"),
            "threads": workers(self.threads, 4),
            "overwrite": self.overwrite,
            "device": self.device,
        }


def carry_out(schema: str, writing: Writing, plan: Callable[[Console], Conversion]) -> int:
    """Plans, then prints the plan or carries it out and prints what was done.

    Args:
        plan: Makes the plan; told where remarks go.

    Returns:
        The exit code.
    """
    from converters.targets.conversion import run_conversion

    console = writing.console
    made = plan(console)
    if writing.dry_run:
        _show_plan(console, schema, made)
        return ExitCode.OK
    with writing.watched(console) as watched:
        stats = run_conversion(made, **watched)
    _show_result(console, schema, made, stats)
    return ExitCode.OK


def _document(plan: Conversion) -> dict[str, Any]:
    catalog, job = plan.reader.catalog, plan.job
    return {
        "source": {"path": catalog.path.name, "format": catalog.format, "iteration": catalog.iteration},
        "tensors": len(job.sources),
        "dropped": [{"what": what, "reason": reason} for what, reason in plan.dropped],
        "notes": list(plan.notes),
        **plan.facts,
        "files": [{"name": f.name, "bytes": f.size} for f in job.files],
        "peak_memory": job.peak_memory,
        "threads": job.threads,
    }


def _card(console: Console, plan: Conversion) -> None:
    for label, text in plan.summary:
        console.fact(label, text)
    for number, line in enumerate(_left_out(plan)):
        console.fact("" if number else "left out", line)


def _left_out(plan: Conversion) -> Iterator[str]:
    """One line for each reason; names only where there are few."""
    from converters.names import fold

    catalog = plan.reader.catalog
    reasons: dict[str, list[str]] = {}
    for what, reason in plan.dropped:
        reasons.setdefault(reason, []).append(what)
    for reason, names in reasons.items():
        shown = [text for text, _ in fold(names)]
        if len(shown) > 2 and all(name in catalog.tensors for name in names):
            size = format_size(sum(catalog.tensors[name].nbytes for name in names))
            yield f"{reason} ({len(names)} tensors, {size})"
        else:
            yield f"{reason} ({', '.join(shown[:2])}{f' and {len(shown) - 2} more' if len(shown) > 2 else ''})"


def _place(plan: Conversion) -> str:
    return str(plan.destination / plan.folder)


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def _show_plan(console: Console, schema: str, plan: Conversion) -> None:
    from converters.engine.destination import beside, free_bytes
    from converters.reading.cast import choose_device

    # what the real run would refuse
    choose_device(plan.options.device, computes=plan.job.computes, buffers=plan.job.peak_memory)
    job, free = plan.job, free_bytes(beside(plan.destination, "partial").parent)
    notes = list(plan.remarks)
    if plan.proof is not None:
        size = format_size(plan.proof.nbytes)
        notes.append(f"not checked with --dry-run: {plan.proof.claim} ({size} are read for it)")
    if console.json_asked:
        moved = {"bytes_read": job.bytes_read, "bytes_written": job.bytes_written, "free_bytes": free}
        console.document(schema, {**_document(plan), "notes": notes, "dry_run": True, **moved})
        return
    _card(console, plan)
    console.fact("read", f"{format_size(job.bytes_read)} from {_count(len(plan.reader.files), 'file')}")
    size = f"{format_size(job.bytes_written)} to {_count(len(job.files), 'file')} in {_place(plan)}"
    console.fact("write", f"{size}  (free: {format_size(free)})")
    console.fact("workers", f"{job.threads}, {format_size(job.peak_memory)} of buffers")
    for text in notes:
        console.note(text)
    console.out("nothing written (--dry-run)")


def _show_result(console: Console, schema: str, plan: Conversion, stats: Stats) -> None:
    job = plan.job
    if console.json_asked:
        moved = {
            name: getattr(stats, name) for name in ("bytes_read", "bytes_written", "bytes_kept", "records_checked")
        }
        seconds = round(stats.seconds, 3)
        console.document(schema, {**_document(plan), "dry_run": False, **moved, "seconds": seconds})
        return
    _card(console, plan)
    rate = format_size(stats.bytes_written / stats.seconds) if stats.seconds > 0 else "-"
    kept = f" ({format_size(stats.bytes_kept)} kept from before)" if stats.bytes_kept else ""
    size = f"{format_size(job.bytes_written)} in {_count(len(job.files), 'file')}{kept}"
    console.fact("wrote", f"{_place(plan)}  {size}, {stats.seconds:.1f} s, {rate}/s")
    report = f"; report in {plan.report_file}" if plan.report_file else ""
    checked = f"{stats.records_checked} source records against their checksums"
    console.fact("checked", f"{checked if stats.records_checked else 'nothing: the source has no checksums'}{report}")
    for text in plan.advice:
        console.note(text)
    if plan.next_step:
        console.next_step(plan.next_step)
