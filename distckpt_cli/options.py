"""Options that several commands share, spelled once."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from converters.errors import RequestError
from converters.remote.patience import RETRY_SECONDS, retry_for
from distckpt_cli.choices import Words, choice
from distckpt_cli.console import Console, UsageProblem, parse_size

_KEYWORD = inspect.Parameter.KEYWORD_ONLY
_Value = TypeVar("_Value")
_Command = TypeVar("_Command", bound=Callable[..., Any])


def panel(title: str) -> Callable[..., Any]:
    """`typer.Option` for options that stand under one heading of the help text."""
    return functools.partial(typer.Option, rich_help_panel=title)


output, resources = panel("Output"), panel("Resources")

Ckpt = Annotated[
    str, typer.Argument(metavar="CKPT", help="A checkpoint: its folder, the training run's folder, or a file inside.")
]
FollowLinks = Annotated[
    bool, typer.Option("--follow-links", help="Read files that are links out of the checkpoint's folder.")
]
MaxMemory = Annotated[
    str | None,
    resources(metavar="SIZE", help="Buffers of all workers; by default 64MiB, where an object store is read 512MiB."),
]


def value(
    option: Callable[..., Any],
    metavar: str | None,
    help: str,
    words: Words | None = None,
    *names: str,
    default: Any = None,
    **settings: Any,
) -> Any:
    """A field of a group of options (see `spread`) for an option with a value.

    Args:
        option: `typer.Option`, or that of a `panel`.
        words: What it takes: completed by the shell, other words are refused.
        names: If they are not the field's.
        settings: Further arguments of `typer.Option`.
    """
    if words is not None:
        settings |= {"autocompletion": words.complete, "callback": words.check}
    return field(default=default, metadata={"option": option(*names, metavar=metavar, help=help, **settings)})


def flag(option: Callable[..., Any], help: str, *names: str) -> Any:
    """As `value`, for an option that is given or not."""
    return field(default=False, metadata={"option": option(*names, help=help)})


@dataclass(frozen=True)
class Speaking:
    """The options that every command has: its output, and how long requests to a store are retried."""

    as_json: bool = flag(output, "Print one JSON document.", "--json")
    quiet: bool = flag(output, "Answer and errors only: no progress, notes or next steps.", "-q", "--quiet")
    silent: bool = flag(output, "Errors only; the exit code is the answer.", "--silent")
    verbose: int = value(output, None, "Print more; twice: tracebacks.", None, "-v", "--verbose", default=0, count=True)
    retry_for: float = value(
        resources,
        "SEC",
        "Object stores: how long a failing request is retried.",
        default=RETRY_SECONDS,
        envvar="DISTCKPT_RETRY_FOR",
        min=0,
    )

    def __post_init__(self) -> None:
        retry_for(self.retry_for)
        if self.silent and self.as_json:
            raise UsageProblem("--silent prints nothing, --json a document", hint="choose one")
        if self.quiet and self.verbose:
            raise UsageProblem("--quiet prints less, --verbose more", hint="choose one")

    @property
    def console(self) -> Console:
        """Where the answer goes."""
        return Console(json_requested=self.as_json, quiet=self.quiet, silent=self.silent, verbose=self.verbose)


@dataclass(frozen=True)
class Running(Speaking):
    """The options of every command that takes its time."""

    progress: str = value(
        output,
        "MODE",
        "auto, bar, log (a line every 30 s) or off.",
        choice("auto", "bar", "log", "off"),
        default="auto",
        envvar="DISTCKPT_PROGRESS",
    )
    threads: int | None = value(
        resources,
        "N",
        "Workers; by default one for each core, 4 to 8; where an object store is read, 32.",
        min=1,
    )
    rank_timeout: float = value(
        resources,
        "SECONDS",
        "With several ranks: one that is silent for this time counts as lost; at the start, five times as long.",
        default=60.0,
        envvar="DISTCKPT_RANK_TIMEOUT",
        min=0.1,
    )
    follow_links: FollowLinks = False

    @contextmanager
    def watched(self, console: Console) -> Iterator[dict[str, Any]]:
        """The library's arguments `listener`, `stop` and `ranks`, while a command runs."""
        from converters.execute.ranks import Ranks
        from distckpt_cli.progress import Progress, choose_mode
        from distckpt_cli.signals import stop_on_signals

        with stop_on_signals() as stop, Progress(console, choose_mode(self.progress, quiet=console.quiet)) as listener:
            yield {"listener": listener, "stop": stop, "ranks": Ranks.from_environment(timeout=self.rank_timeout)}


@dataclass(frozen=True)
class Looking(Running):
    """The options of a command that reads everything and writes nothing."""

    scratch: str | None = value(
        resources,
        "DIR",
        "Under torchrun or srun: where ranks meet, shared by all machines; by default the temporary folder, on several "
        "machines the working directory.",
        envvar="DISTCKPT_SCRATCH",
    )

    @contextmanager
    def watched(self, console: Console) -> Iterator[dict[str, Any]]:
        """See `Running`; and where the ranks meet."""
        from converters.execute.work_sharing import scratch_folder

        with super().watched(console) as run_options:
            yield {**run_options, "scratch": scratch_folder(self.scratch)}


def spread(command: _Command) -> _Command:
    """Lets a command take a group of options as one parameter: a dataclass.

    Typer sees its fields as parameters of the command; the command sees the dataclass. A field says which option it is by
    `value` or `flag`, or by an annotation as a parameter has it.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    parameters = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name not in groups:
            parameters.append(parameter.replace(annotation=hints[name]))
            continue
        types = get_type_hints(groups[name], include_extras=True)
        inherited = {f.name for f in fields(groups[name])} - vars(groups[name])["__annotations__"].keys()
        for f in sorted(fields(groups[name]), key=lambda f: f.name in inherited):
            option = f.metadata.get("option")
            annotation = types[f.name] if option is None else Annotated[types[f.name], option]
            default = inspect.Parameter.empty if f.default is MISSING else f.default
            parameters.append(inspect.Parameter(f.name, _KEYWORD, default=default, annotation=annotation))

    @functools.wraps(command)
    def run(**values: Any) -> Any:
        options = {name: kind(**{f.name: values.pop(f.name) for f in fields(kind)}) for name, kind in groups.items()}
        return command(**values, **options)

    run.__signature__ = inspect.Signature(parameters, return_annotation=hints.get("return"))  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run  # type: ignore[return-value]


def resolve_word(find: Callable[[str], _Value], word: str | None) -> _Value | None:
    """The library's object for a word, such as an architecture for its name; None for an option that was left out.

    Raises:
        UsageProblem: It knows no such thing.
    """
    try:
        return None if word is None else find(word)
    except RequestError as error:
        raise UsageProblem(error.message, hint=error.hint) from None


def shard_bytes(text: str) -> int:
    """The bytes of `--max-shard-size`.

    Raises:
        UsageProblem: Not a size, or none.
    """
    size = parse_size(text, "--max-shard-size")
    if size < 1:
        raise UsageProblem("--max-shard-size 0 leaves no room for a tensor", hint="5GB is the default")
    return size


def buffer_bytes(text: str | None) -> int | None:
    """The bytes of `--max-memory`; None if it was left out.

    Raises:
        UsageProblem: Not a size.
    """
    return None if text is None else parse_size(text, "--max-memory")


def options_set(group: Any) -> dict[str, Any]:
    """The options of a group that differ from their defaults."""
    return {f.name: value for f in fields(group) if (value := getattr(group, f.name)) != f.default}
