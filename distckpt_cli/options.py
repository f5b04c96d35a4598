"""Options that several commands share, spelled once."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from distckpt_cli.console import UsageProblem, parse_size

__all__ = [
    "Ckpt",
    "Json",
    "MaxMemory",
    "ProgressMode",
    "Quiet",
    "RankTimeout",
    "Scratch",
    "Threads",
    "Verbose",
    "check_choice",
    "given",
    "shard_bytes",
    "spread",
    "workers",
]

_KEYWORD = inspect.Parameter.KEYWORD_ONLY
_Command = TypeVar("_Command", bound=Callable[..., Any])

Ckpt = Annotated[
    str, typer.Argument(metavar="CKPT", help="A checkpoint: its folder, the training run's folder, or a file inside.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.", rich_help_panel="Output")]
Quiet = Annotated[
    bool, typer.Option("-q", "--quiet", help="No progress, notes or next steps.", rich_help_panel="Output")
]
Verbose = Annotated[
    int,
    typer.Option("-v", "--verbose", count=True, help="Say more; twice: tracebacks.", rich_help_panel="Output"),
]
ProgressMode = Annotated[
    str,
    typer.Option(
        "--progress",
        metavar="MODE",
        envvar="DISTCKPT_PROGRESS",
        help="auto, bar, log (a line every 30 s) or off.",
        rich_help_panel="Output",
    ),
]
MaxMemory = Annotated[
    str, typer.Option(metavar="SIZE", help="Buffers of all workers, 64MiB by default.", rich_help_panel="Resources")
]
Threads = Annotated[
    int | None,
    typer.Option(metavar="N", help="Workers; by default one for each core.", rich_help_panel="Resources"),
]
RankTimeout = Annotated[
    float,
    typer.Option(
        "--rank-timeout",
        metavar="SECONDS",
        envvar="DISTCKPT_RANK_TIMEOUT",
        min=0.1,
        help="Under torchrun or srun: a rank silent for so long is lost.",
        rich_help_panel="Resources",
    ),
]
Scratch = Annotated[
    str | None,
    typer.Option(
        "--scratch",
        metavar="DIR",
        envvar="DISTCKPT_SCRATCH",
        help="Under torchrun or srun: where ranks meet, shared by all machines; by default the temporary folder, on "
        "several machines the working directory.",
        rich_help_panel="Resources",
    ),
]


def spread(command: _Command) -> _Command:
    """Lets a command take a group of options as one parameter: a dataclass whose fields are annotated for Typer.

    Typer sees the fields as parameters of the command; the command sees the dataclass.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    parameters = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name not in groups:
            parameters.append(parameter.replace(annotation=hints[name]))
            continue
        own = get_type_hints(groups[name], include_extras=True)
        parameters += [
            inspect.Parameter(f.name, _KEYWORD, default=_default(f), annotation=own[f.name])
            for f in fields(groups[name])
        ]

    @functools.wraps(command)
    def run(**given: Any) -> Any:
        made = {name: kind(**{f.name: given.pop(f.name) for f in fields(kind)}) for name, kind in groups.items()}
        return command(**given, **made)

    run.__signature__ = inspect.Signature(parameters, return_annotation=hints.get("return"))  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run  # type: ignore[return-value]


def _default(field: Field[Any]) -> Any:
    return inspect.Parameter.empty if field.default is MISSING else field.default


def check_choice(option: str, value: str | None, choices: tuple[str, ...]) -> None:
    """Refuses a word that is none of the choices; None is an option that was not given.

    Raises:
        UsageProblem: It is not.
    """
    if value is not None and value not in choices:
        listed = " or ".join(filter(None, [", ".join(choices[:-1]), choices[-1]]))
        raise UsageProblem(f"{option} {value!r} is not a choice", hint=f"choose {listed}")


def shard_bytes(text: str) -> int:
    """What `--max-shard-size` means, in bytes.

    Raises:
        UsageProblem: Not a size, or none.
    """
    size = parse_size(text, "--max-shard-size")
    if size < 1:
        raise UsageProblem("--max-shard-size 0 leaves no room for a tensor", hint="5GB is the default")
    return size


def workers(threads: int | None, most: int) -> int:
    """What `--threads` means: by default one for each core, at least 2, at most `most`.

    Raises:
        UsageProblem: Less than one.
    """
    if threads is not None and threads < 1:
        raise UsageProblem(f"--threads {threads} is not a number of workers", hint="give 1 or more")
    return threads or min(most, max(2, os.cpu_count() or 2))


def given(group: Any) -> dict[str, Any]:
    """The options of a group that differ from their defaults."""
    return {f.name: value for f in fields(group) if (value := getattr(group, f.name)) != f.default}
