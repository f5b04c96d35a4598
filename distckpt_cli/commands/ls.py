"""`distckpt ls`: which checkpoints there are below a folder."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from converters.names import printable, quoted
from converters.words import counted, format_count, format_size
from distckpt_cli.choices import choice
from distckpt_cli.console import NARROW, Console, UsageProblem
from distckpt_cli.exits import ExitCode
from distckpt_cli.options import FollowLinks, Speaking, flag, output, spread, value

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from converters.overview.runs import CheckpointSummary

Folders = Annotated[
    list[str] | None, typer.Argument(metavar="[PATH]...", help="Folders to search; by default the working directory.")
]
_STYLES = {"complete": "ok", "incomplete": "warning", "unreadable": "error"}
_UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


@dataclass(frozen=True)
class Rows:
    """Which checkpoints are listed, in which order."""

    sort: str = value(
        output,
        "KEY",
        "path, iteration, size or age (newest first).",
        choice("path", "iteration", "size", "age"),
        default="path",
    )
    incomplete: bool = flag(output, "Only checkpoints that are incomplete or cannot be read.", "--incomplete")
    names: bool = flag(output, "Print only paths, one per line.", "--names")


@spread
def ls(paths: Folders = None, *, rows: Rows, speaking: Speaking, follow_links: FollowLinks = False) -> int:
    """List every run and checkpoint below the folders: format, model, iteration, layout, size, age, complete or not.

    Reads names, sizes and metadata, never tensor data. Incomplete is a checkpoint whose save has not ended, or that lacks
    bytes that its metadata needs; `distckpt verify` checks the bytes themselves. `*` marks what the run's tracker names.

        $ distckpt ls runs
        $ distckpt ls runs --incomplete
        $ distckpt ls --sort size
        $ distckpt ls runs --json | jq -r '.checkpoints[].path'
    """
    if rows.names and speaking.as_json:
        raise UsageProblem("--names prints paths and --json a document", hint="choose one")
    from converters.overview.runs import survey

    folders = paths or ["."]
    every = survey(*folders, follow_links=follow_links)
    summaries = sorted((s for s in every if not rows.incomplete or s.status != "complete"), key=_KEYS[rows.sort])
    if rows.names:
        speaking.console.lines(printable(str(summary.path)) for summary in summaries)
    else:
        show_summaries(
            speaking.console, summaries, folders, "incomplete checkpoint" if rows.incomplete else "checkpoint"
        )
    return ExitCode.OK


def show_summaries(
    console: Console, summaries: Sequence[CheckpointSummary], paths: Sequence[str], kind: str = "checkpoint"
) -> None:
    """A row for each checkpoint, and the totals."""
    if console.json_requested:
        documents = [{**asdict(summary), "path": str(summary.path)} for summary in summaries]
        console.document("distckpt.ls/1", {"checkpoints": documents})
        return
    _print_table(console, summaries)
    _print_total(console, summaries, paths, kind)


def _path_key(summary: CheckpointSummary) -> Any:
    from converters.names import natural_key

    return natural_key(str(summary.path))


_KEYS: dict[str, Callable[[CheckpointSummary], Any]] = {
    "path": _path_key,
    "iteration": lambda s: (s.iteration is None, s.iteration or 0, _path_key(s)),
    "size": lambda s: (-(s.nbytes or 0), _path_key(s)),
    "age": lambda s: (-(s.modified or 0.0), _path_key(s)),
}


def _print_table(console: Console, summaries: Sequence[CheckpointSummary]) -> None:
    """A table with one row for each checkpoint, and below it why some are not complete."""
    from converters.overview.card import describe_layout

    now = time.time()
    rows = [
        (
            summary.status,
            summary.format or "-",
            _model(summary),
            "-" if summary.iteration is None else str(summary.iteration),
            describe_layout(summary.layout).partition(" (")[0] if summary.layout else "-",
            summary.optimizer or "-",
            "-" if summary.nbytes is None else format_size(summary.nbytes),
            format_age(now, summary.modified),
            f"{summary.path}{' *' if summary.latest else ''}",
        )
        for summary in summaries
    ]
    if console.width is not None and console.width < NARROW:  # nine columns are no table there
        for *cells, path in rows:
            console.fact(f"{path}  ", ", ".join(cell for cell in cells if cell != "-"))
    elif rows:
        columns = ["STATUS", "FORMAT", "MODEL", ">ITERATION", "LAYOUT", "OPTIMIZER", ">SIZE", ">AGE", "PATH"]
        console.table(columns, rows)
    for summary in summaries:
        if summary.reason:
            console.fact(f"{summary.path}  ", f"{summary.status}: {summary.reason}", style=_STYLES[summary.status])


def _print_total(console: Console, summaries: Sequence[CheckpointSummary], paths: Sequence[str], kind: str) -> None:
    if not summaries:
        console.out(f"no {kind} below {', '.join(paths)}")
        return
    console.out(f"{counted(len(summaries), kind)}, {format_size(sum(s.nbytes or 0 for s in summaries))}")
    worst = next((s for s in summaries if s.status != "complete"), None)
    if worst is not None:
        console.next_step(f"distckpt verify {quoted(worst.path)}")
    else:
        console.next_step(f"distckpt inspect {quoted(summaries[-1].path)}")


def _model(summary: CheckpointSummary) -> str:
    """The model in three words: architecture, parameters, element type."""
    size = format_count(summary.parameters).replace(" ", "") if summary.parameters is not None else None
    return " ".join(word for word in (summary.model, size, summary.dtype) if word) or "-"


def format_age(now: float, modified: float | None) -> str:
    """How long ago something changed: `3 d`."""
    if modified is None:
        return "-"
    seconds = max(0, int(now - modified))
    span, unit = next(((span, unit) for span, unit in _UNITS if seconds >= span), (1, "s"))
    return f"{seconds // span} {unit}"
