"""`distckpt cache`: what runs keep on disks, and what unfinished ones left there."""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from converters.names import quoted
from converters.remote.address import named_path
from converters.words import counted, format_size
from distckpt_cli.commands.ls import format_age
from distckpt_cli.console import Console, UsageProblem
from distckpt_cli.exits import ExitCode
from distckpt_cli.options import Speaking, output, spread

if TYPE_CHECKING:
    from converters.execute.leftovers import Leftover

_STYLES = {"running": "ok", "unfinished": "warning", "unknown": "warning"}


@spread
def cache(
    folders: Annotated[
        list[str] | None,
        typer.Argument(metavar="[DIR]...", help="Where to search; by default the working and the scratch directory."),
    ] = None,
    *,
    clear: Annotated[bool, output("--clear", help="Remove unfinished work below DIR, and list it.")] = False,
    speaking: Speaking,
) -> int:
    """List what runs keep on disks until they end: unfinished results, results that wait for an upload, files of ranks.

    The command shown with an interrupted run continues it. --clear removes what such runs left if it has a journal of
    distckpt and no process uses it; it keeps everything else and says why. distckpt has no cache of metadata.

        $ distckpt cache
        $ distckpt cache runs --json
        $ distckpt cache runs /scratch --clear
    """
    if clear and not folders:
        raise UsageProblem("--clear removes what is below DIR, and none was named", hint="distckpt cache . --clear")
    items = _find(folders)
    removed: list[Leftover] = []
    console = speaking.console
    if clear:
        from converters.execute.leftovers import clear_leftover

        for item in items:
            if not item.reason:
                answer = clear_leftover(item)
                removed.append(item)
                if answer:
                    console.note(answer)
    if console.json_requested:
        console.document("distckpt.cache/1", {"kept": [_document(item, removed) for item in items]})
    elif clear:
        _show_removed(console, items, removed)
    else:
        _show(console, items)
    return ExitCode.OK


def _find(folders: list[str] | None) -> list[Leftover]:
    from converters.execute.leftovers import leftovers, scratch_leftovers

    if folders:
        items = [item for folder in folders for item in leftovers(named_path(folder))]
    else:
        scratch = os.environ.get("DISTCKPT_SCRATCH")
        shared = {Path(tempfile.gettempdir()), *([named_path(scratch)] if scratch else [])}
        items = [*leftovers(Path()), *(item for folder in sorted(shared) for item in scratch_leftovers(folder))]
    return list({str(item.path.resolve()): item for item in reversed(items)}.values())[::-1]


def _show(console: Console, items: list[Leftover]) -> None:
    if not items:
        console.out("no unfinished runs")
        return
    now = time.time()
    rows = [
        (item.state, item.kind, format_size(item.nbytes), format_age(now, item.modified), str(item.path))
        for item in items
    ]
    console.table(["STATE", "KIND", ">SIZE", ">AGE", "PATH"], rows)
    for item in items:
        if item.state == "running":
            continue
        purpose = (
            f"makes {item.destination}" if item.destination else "where the processes of a run met, which have ended"
        )
        console.fact(f"{item.path}  ", item.reason or purpose, style=_STYLES[item.state])
        if item.command:
            console.fact("", f"continue: {item.command}")
    unfinished = [str(item.path) for item in items if not item.reason]
    console.out(f"{counted(len(items), 'folder')}, {format_size(sum(item.nbytes for item in items))}")
    if unfinished:
        console.next_step(f"distckpt cache {' '.join(map(quoted, unfinished[:3]))} --clear")


def _show_removed(console: Console, items: list[Leftover], removed: list[Leftover]) -> None:
    for item in removed:
        console.fact("removed", f"{item.path}  {format_size(item.nbytes)}")
    for item in items:
        if item.reason:
            console.fact("kept", f"{item.path}: {item.reason}", style=_STYLES[item.state])
    freed = format_size(sum(item.nbytes for item in removed))
    console.out(f"{counted(len(removed), 'folder')} removed, {freed} freed")


def _document(item: Leftover, removed: list[Leftover]) -> dict[str, Any]:
    return {**asdict(item), "reason": item.reason or None, "removed": item in removed}
