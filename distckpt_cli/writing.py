"""Shared parts of the commands that write: options, printed plan, printed result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from converters.remote.address import RemotePath, named_path
from converters.words import counted
from distckpt_cli.choices import DEVICES, check_device
from distckpt_cli.console import COMMAND_LINE, UsageProblem, destination_path
from distckpt_cli.exits import ExitCode
from distckpt_cli.options import MaxMemory, Running, buffer_bytes, flag, output, resources, value

if TYPE_CHECKING:
    from collections.abc import Mapping

    from converters.write.written import WriteReport
    from distckpt_cli.console import Console

Target = Annotated[str, typer.Argument(metavar="DST", help="The folder to make; absent or empty.")]


@dataclass(frozen=True)
class Writing(Running):
    """The options of every command that writes."""

    overwrite: bool = flag(output, "Replace DST after success.", "--overwrite")
    dry_run: bool = flag(output, "Print the plan; write nothing.", "-n", "--dry-run")
    max_memory: MaxMemory = None
    scratch: str | None = value(
        resources,
        "DIR",
        "DST in an object store: a disk on which the result is made before it is uploaded; by default the temporary "
        "folder, for several ranks a folder that all share.",
        envvar="DISTCKPT_SCRATCH",
    )
    device: str = value(
        resources,
        "WHERE",
        "Where tensors are cast: cpu (the default), cuda, cuda:N or auto (a GPU if there is one).",
        DEVICES,
        default="cpu",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_device(self.device)

    @property
    def options(self) -> dict[str, Any]:
        """The fields of the library's `WriteOptions`, by name."""
        return {
            "max_memory": buffer_bytes(self.max_memory),
            "threads": self.threads,
            "overwrite": self.overwrite,
            "device": self.device,
            "scratch": named_path(self.scratch).absolute() if self.scratch else None,
        }


def carry_out(
    schema: str,
    src: str,
    dst: str,
    writing: Writing,
    options: Mapping[str, Any],
    *,
    layout: Mapping[str, Any] | None = None,
    format: str | None = None,
) -> int:
    """Plans a command, then prints the plan, or carries it out and prints what was done.

    Args:
        schema: Of its document, `distckpt.COMMAND/1`.
        options: The command's own, by the library's names.
        layout: Sizes of the target layout.
        format: Name of the source's format, if it was given.

    Returns:
        The exit code.
    """
    from converters.commands import plan_command
    from converters.io.memory import workers_and_memory
    from converters.write.write_plan import run_conversion
    from converters.write.written import WriteReport

    console, options = writing.console, {**options, **writing.options}
    command = schema.partition(".")[2].partition("/")[0]
    conversion = plan_command(
        command, src, destination_path(dst), options, layout=layout, format=format, follow_links=writing.follow_links
    )
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
