"""Options that several commands share, spelled once."""

from __future__ import annotations

import functools
import inspect
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from converters.errors import RequestError
from distckpt_cli.console import Console, UsageProblem, parse_size

__all__ = [
    "Ckpt",
    "Json",
    "Looking",
    "MaxMemory",
    "Running",
    "Verbose",
    "check_choice",
    "check_device",
    "given",
    "known",
    "output",
    "panel",
    "resources",
    "shard_bytes",
    "spread",
    "workers",
]

_KEYWORD = inspect.Parameter.KEYWORD_ONLY
_Found = TypeVar("_Found")
_Command = TypeVar("_Command", bound=Callable[..., Any])


def panel(title: str) -> Callable[..., Any]:
    """`typer.Option` for options that stand under one heading of the help text."""
    return functools.partial(typer.Option, rich_help_panel=title)


output, resources = panel("Output"), panel("Resources")

Ckpt = Annotated[
    str, typer.Argument(metavar="CKPT", help="A checkpoint: its folder, the training run's folder, or a file inside.")
]
Json = Annotated[bool, output("--json", help="Print one JSON document.")]
Quiet = Annotated[bool, output("-q", "--quiet", help="No progress, notes or next steps.")]
Verbose = Annotated[int, output("-v", "--verbose", count=True, help="Say more; twice: tracebacks.")]
ProgressMode = Annotated[
    str,
    output(metavar="MODE", envvar="DISTCKPT_PROGRESS", help="auto, bar, log (a line every 30 s) or off."),
]
MaxMemory = Annotated[str, resources(metavar="SIZE", help="Buffers of all workers, 64MiB by default.")]
Threads = Annotated[int | None, resources(metavar="N", help="Workers; by default one for each core.")]
RankTimeout = Annotated[
    float,
    resources(
        metavar="SECONDS",
        envvar="DISTCKPT_RANK_TIMEOUT",
        min=0.1,
        help="Of several ranks one that is silent for so long is lost; at the start, for five times as long.",
    ),
]


@dataclass(frozen=True)
class Running:
    """The options of every command that takes its time."""

    as_json: Json = False
    quiet: Quiet = False
    verbose: Verbose = 0
    progress: ProgressMode = "auto"
    threads: Threads = None
    rank_timeout: RankTimeout = 60.0

    def __post_init__(self) -> None:
        from distckpt_cli.progress import choose_mode

        choose_mode(self.progress)

    @property
    def console(self) -> Console:
        """Where the answer goes."""
        return Console(json_asked=self.as_json, quiet=self.quiet, verbose=self.verbose)

    @contextmanager
    def watched(self, console: Console) -> Iterator[dict[str, Any]]:
        """What the library takes while it works: who listens, what stops it, and the ranks that were started together."""
        from converters.engine.ranks import Ranks
        from distckpt_cli.progress import Progress, choose_mode
        from distckpt_cli.signals import stop_on_signals

        with stop_on_signals() as stop, Progress(console, choose_mode(self.progress, quiet=self.quiet)) as listener:
            yield {"listener": listener, "stop": stop, "ranks": Ranks.from_environment(timeout=self.rank_timeout)}


@dataclass(frozen=True)
class Looking(Running):
    """The options of a command that reads everything and writes nothing."""

    scratch: Annotated[
        str | None,
        resources(
            metavar="DIR",
            envvar="DISTCKPT_SCRATCH",
            help="Under torchrun or srun: where ranks meet, shared by all machines; by default the temporary folder, on "
            "several machines the working directory.",
        ),
    ] = None
    device: Annotated[
        str,
        resources(
            metavar="WHERE",
            help="Where values are looked at: cpu, cuda, cuda:N or auto (a GPU, if there is one and it pays).",
        ),
    ] = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_device(self.device)

    @contextmanager
    def watched(self, console: Console) -> Iterator[dict[str, Any]]:
        """See `Running`; and where the ranks meet."""
        from converters.engine.crew import scratch_folder

        with super().watched(console) as given:
            yield {**given, "scratch": scratch_folder(self.scratch)}


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
        inherited = {f.name for f in fields(groups[name])} - vars(groups[name])["__annotations__"].keys()
        parameters += [
            inspect.Parameter(f.name, _KEYWORD, default=_default(f), annotation=own[f.name])
            for f in sorted(fields(groups[name]), key=lambda f: f.name in inherited)
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


def check_device(device: str) -> None:
    """Refuses what no machine has.

    Raises:
        UsageProblem: It is no name of a device.
    """
    if not re.fullmatch("auto|cpu|cuda(:[0-9]+)?", device):
        raise UsageProblem(f"--device {device!r} is not a choice", hint="choose auto, cpu, cuda or cuda:N")


def known(find: Callable[[str], _Found], word: str | None) -> _Found | None:
    """What the library calls something that is chosen by a word; None for an option that was not given.

    Raises:
        UsageProblem: It knows no such thing.
    """
    try:
        return None if word is None else find(word)
    except RequestError as error:
        raise UsageProblem(error.message, hint=error.hint) from None


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
