"""Shared parts of the commands that write: options, printed plan, printed result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from converters.remote.address import RemotePath, named_path
from converters.words import counted
from distckpt_cli.choices import DEVICES, check_device
from distckpt_cli.console import COMMAND_LINE, UsageProblem
from distckpt_cli.exits import ExitCode
from distckpt_cli.options import MaxMemory, Running, buffer_bytes, output, resources

if TYPE_CHECKING:
    from collections.abc import Callable

    from converters.write.write_plan import Conversion
    from converters.write.written import WriteReport
    from distckpt_cli.console import Console

Target = Annotated[str, typer.Argument(metavar="DST", help="The folder to make; absent or empty.")]


@dataclass(frozen=True)
class Writing(Running):
    """The options of every command that writes."""

    overwrite: Annotated[bool, output("--overwrite", help="Replace DST after success.")] = False
    dry_run: Annotated[bool, output("-n", "--dry-run", help="Print the plan; write nothing.")] = False
    max_memory: MaxMemory = None
    scratch: Annotated[
        str | None,
        resources(
            metavar="DIR",
            envvar="DISTCKPT_SCRATCH",
            help="DST in an object store: a disk on which the result is made before it is uploaded; by default the "
            "temporary folder, for several ranks a folder that all share.",
        ),
    ] = None
    device: Annotated[
        str,
        resources(
            metavar="WHERE",
            help="Where tensors are cast: cpu (the default), cuda, cuda:N or auto (a GPU if there is one).",
            autocompletion=DEVICES.complete,
        ),
    ] = "cpu"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_device(self.device)

    @property
    def options(self) -> dict[str, Any]:
        """What the library's `WriteOptions` take."""
        return {
            "max_memory": buffer_bytes(self.max_memory),
            "threads": self.threads,
            "overwrite": self.overwrite,
            "device": self.device,
            "scratch": named_path(self.scratch).absolute() if self.scratch else None,
        }


def carry_out(schema: str, writing: Writing, plan: Callable[[Console], Conversion]) -> int:
    """Plans, then prints the plan or carries it out and prints what was done.

    Args:
        plan: Makes the plan; told where remarks go.

    Returns:
        The exit code.
    """
    from converters.io.memory import workers_and_memory
    from converters.write.write_plan import run_conversion
    from converters.write.written import WriteReport

    console = writing.console
    conversion = plan(console)
    if not isinstance(conversion.destination, RemotePath) and any(
        word.partition("=")[0] == "--scratch" for word in COMMAND_LINE.get()
    ):
        raise UsageProblem("--scratch is for a DST in an object store; this one is on a disk", hint="leave it out")
    if writing.threads is not None and conversion.job.threads < writing.threads:
        memory = workers_and_memory(None, None, conversion.reader.catalog.path)[1]
        text = f"--max-memory {writing.max_memory or f'{memory >> 20}MiB'} is enough"
        text += f" for {counted(conversion.job.threads, 'worker')}"
        console.note(f"{text}, not for the {writing.threads} of --threads")
    if writing.dry_run:
        report = WriteReport(conversion, None)
    else:
        with writing.watched(console) as watched:
            report = WriteReport(conversion, run_conversion(conversion, typed=COMMAND_LINE.get(), **watched))
    _show(console, schema, report)
    return ExitCode.OK


def _show(console: Console, schema: str, report: WriteReport) -> None:
    lines = list(report.lines())  # also refuses what a real run would
    if console.json_requested:
        console.document(schema, report.document())
        return
    for label, text in lines:
        console.fact(label, text)
    for text in report.notes():
        console.note(text)
    if report.stats is None:
        console.out("nothing written (--dry-run)")
    elif report.plan.next_step:
        console.next_step(report.plan.next_step)
