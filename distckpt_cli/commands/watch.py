"""`distckpt watch`: every complete new iteration of a training run, through another command."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from distckpt_cli.console import UsageProblem, destination_path
from distckpt_cli.exits import ExitCode
from distckpt_cli.options import Speaking, flag, panel, spread, value

if TYPE_CHECKING:
    from pathlib import Path

    from distckpt_cli.watch_record import WatchRecord

_watching = panel("Watching")
_WRITERS = ("export-hf", "reshard", "convert", "strip")
_OF_ONE_ITERATION = (ExitCode.NO, ExitCode.SOURCE)  # what fails with these does not keep the others waiting


@dataclass(frozen=True)
class Watching:
    """When and how the command is started."""

    once: bool = flag(_watching, "Convert what is complete now, then exit; for cron, CI, Slurm.", "--once")
    every: int = value(_watching, "SECONDS", "Seconds between two looks at RUN, 60 by default.", default=60, min=1)
    execute: str | None = value(
        _watching, "CMD", "Shell command after each new iteration; $1 is the path of the result.", None, "--exec"
    )
    run_as: str | None = value(_watching, "WORDS", "How to start distckpt: 'srun distckpt', 'distckpt --workers 4'.")


@spread
def watch(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The training run's folder, with its tracker file.")],
    out: Annotated[str, typer.Argument(metavar="OUT", help="Folder of the results: OUT/iter_N each.")],
    command: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND...", help="export-hf, reshard, convert or strip, with options.")
    ],
    watching: Watching,
    speaking: Speaking,
) -> int:
    """Convert every complete new iteration of a training run, oldest first; then wait for more.

    OUT/iter_N appears complete or not at all. Interrupt and restart it at any time: it continues. An iteration that is
    damaged or cannot be read is tried again later, as is an --exec that fails; any other failure ends it. OUT belongs to
    one run and one command: OUT/.distckpt-watch records them. --json, --silent, -q and -v apply to the command, too.
    Exit code: that of the first failure.

        $ distckpt watch runs/llama hf -- export-hf
        $ distckpt watch runs/llama tp2 --once -- reshard --tp 2 --optimizer none
        $ distckpt watch runs/llama hf --exec 'rclone copy $1 remote:hf' -- export-hf --dtype bf16
    """
    if command[0] not in _WRITERS:
        hint = "distckpt watch RUN OUT --once -- export-hf"
        raise UsageProblem(f"watch runs {', '.join(_WRITERS)}, not {command[0]!r}", hint=hint)
    from converters.errors import FormatError
    from converters.formats.folder import exists, is_file
    from converters.formats.resolve import TRACKER, missing
    from converters.remote.address import named_path
    from distckpt_cli.watch_record import WatchRecord

    console, root, results = speaking.console, named_path(run), destination_path(out)
    if results.resolve() == root.resolve():  # whose own iterations would pass for results
        raise UsageProblem(f"OUT {out} is RUN itself", hint="name another folder")
    if not exists(root):
        if watching.once:
            raise missing(root)
        console.note(f"{run} does not exist yet; waiting for it")
    elif watching.once and not is_file(root / TRACKER):
        raise FormatError(f"{run} has no {TRACKER}", hint="no iteration is complete yet, or it is no training run")
    watcher = _Watcher(speaking, watching, root, results, command, WatchRecord(results, root, command))
    try:
        while True:
            if is_file(root / TRACKER):
                code = watcher.convert_new()
                if code:
                    return code
            if watching.once:
                break
            time.sleep(watching.every)
    finally:
        watcher.summarize(run, out)
    return next(iter({**watcher.failed, **watcher.unexecuted}.values()), ExitCode.OK)


@dataclass
class _Watcher:
    """Converts the iterations of a run, and counts what has become of them.

    Attributes:
        root: The run.
        results: Where the results go.
        command: The command with its options.
        record: Which iterations are written.
        complete: How many the run had finished when it was last looked at.
        written: New ones, by name.
        failed: Exit code by name of those that could not be read or are damaged.
        unexecuted: Exit code by name of those for which the command of --exec failed.
        reports: With --json: what the command said of each.
    """

    speaking: Speaking
    watching: Watching
    root: Path
    results: Path
    command: list[str]
    record: WatchRecord
    complete: int = 0
    written: list[str] = field(default_factory=list)
    failed: dict[str, int] = field(default_factory=dict)
    unexecuted: dict[str, int] = field(default_factory=dict)
    reports: dict[str, Any] = field(default_factory=dict)

    def convert_new(self) -> int:
        """Converts what is new; an exit code if that ends it all."""
        names, states = _finished_iterations(self.root), self.record.states
        self.complete = len(names)
        for name in names:
            if states.get(name) == "started" and _is_written(self.results / name):
                self.record.note(name, "written")  # it was stopped between the two
            if states.get(name) not in ("written", "done"):
                if name in self.failed and not self.watching.once:
                    continue
                code = self._convert(name)
                if code in _OF_ONE_ITERATION:
                    self.failed[name] = code
                    continue
                if code:
                    return code
            if states[name] == "written":
                self._execute(name)
        return ExitCode.OK

    def _convert(self, name: str) -> int:
        speaking, run_as = self.speaking, self.watching.run_as
        speaking.console.label("==", name)
        self.record.note(name, "started")
        start = shlex.split(run_as) if run_as else [sys.executable, "-m", "distckpt_cli"]
        options = ["--json"] * speaking.as_json + ["--silent"] * speaking.silent + ["--quiet"] * speaking.quiet
        paths = [str(self.root / name), str(self.results / name)]
        words = [*start, self.command[0], *paths, *self.command[1:], *options, *["-v"] * speaking.verbose]
        code, text = _run_process(words, stdout=subprocess.PIPE if speaking.as_json else None)
        if speaking.as_json:
            try:
                self.reports[name] = json.loads(text)
            except ValueError:  # killed before it could say anything
                self.reports[name] = None
        if not code:
            self.failed.pop(name, None)
            self.written.append(name)
            self.record.note(name, "done" if self.watching.execute is None else "written")
        return code

    def _execute(self, name: str) -> None:
        """Runs the command of --exec; what it prints is no part of a document."""
        command, code = self.watching.execute, 0
        if command is not None:
            words = ["sh", "-c", command, "sh", str(self.results / name)]
            code, _ = _run_process(words, stdout=2 if self.speaking.as_json else None)
        self.unexecuted.pop(name, None)
        if code:
            self.unexecuted[name] = code
        else:
            self.record.note(name, "done")

    def summarize(self, run: str, out: str) -> None:
        """Prints how many iterations were converted, of a run and into a folder as they were named."""
        from converters.formats.folder import exists
        from converters.formats.resolve import iterations
        from converters.words import counted

        console, total = self.speaking.console, len(iterations(self.results)) if exists(self.results) else 0
        if console.json_requested:
            body = {"written": self.written, "failed": self.failed, "exec_failed": self.unexecuted, "total": total}
            console.document("distckpt.watch/1", {**body, "reports": self.reports})
            return
        complete = counted(self.complete, "complete iteration")
        console.out(f"{len(self.written):,} new of {complete} in {run}; {total:,} in {out}")
        if self.failed:
            console.out(f"failed: {', '.join(self.failed)} (see above; each is tried again the next time)")
        if self.unexecuted:
            console.out(f"--exec failed: {', '.join(self.unexecuted)} (it is run again the next time)")


def _run_process(words: list[str], stdout: int | None = None) -> tuple[int, bytes]:
    process = subprocess.Popen(words, stdout=stdout)
    try:
        text = process.communicate()[0]
    except BaseException:  # a signal: the command stops where it can continue
        process.terminate()
        process.wait()
        raise
    return process.returncode, text or b""


def _finished_iterations(root: Path) -> list[str]:
    """Names of the iterations that the run has finished; its job writes the tracker file last."""
    from converters.formats.folder import read_small
    from converters.formats.resolve import TRACKER, iterations

    text = read_small(root / TRACKER, 4096).decode("ascii", "replace").strip()
    if not text:  # it is being written
        return []
    latest = int(text) if text.isdigit() else None
    names = [name for name in iterations(root) if name != "release"]
    return [name for name in names if latest is None or int(name.removeprefix("iter_")) <= latest]


def _is_written(folder: Path) -> bool:
    from converters.formats.folder import exists, listing

    return exists(folder) and bool(listing(folder))
