"""Help text and lazy loading: plain sections, examples, and no command's module imported before it is needed."""

from __future__ import annotations

import functools
import importlib
import itertools
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from distckpt_cli.choices import nearest
from distckpt_cli.commands import COMMANDS
from distckpt_cli.console import UsageProblem
from distckpt_cli.exits import EPILOG

if TYPE_CHECKING:
    from collections.abc import Sequence

CONTEXT: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": 110}
_SYNONYMS = {"info": "inspect", "list": "ls", "cat": "show", "compare": "diff", "check": "verify", "help": "--help"}
_ENVIRONMENT = [
    ("DISTCKPT_PROGRESS", "auto, bar, log or off; default of --progress"),
    ("DISTCKPT_SCRATCH", "default of --scratch"),
    ("DISTCKPT_RETRY_FOR", "default of --retry-for, in seconds"),
    ("DISTCKPT_RANK_TIMEOUT", "default of --rank-timeout, in seconds"),
    ("DISTCKPT_DEBUG", "1 shows the traceback of an internal error"),
    ("NO_COLOR, FORCE_COLOR", "no colours; always colours"),
]


def _record(param: Any) -> tuple[str, str] | None:
    # param.get_help_record differs from one Typer release to the next; help is part of what we promise
    if getattr(param, "hidden", False):
        return None
    if param.param_type_name == "argument":
        return str(param.metavar or param.name).upper(), param.help or ""
    flag = param.is_flag or param.count
    names = ", ".join(sorted([*param.opts, *param.secondary_opts], key=len))
    text = param.help or ""
    if param.envvar:
        text += f"  [env: {param.envvar}]"
    return names if flag else f"{names} {param.metavar or 'TEXT'}", text


def _sections(params: Sequence[Any]) -> dict[str, list[tuple[str, str]]]:
    sections: dict[str, list[tuple[str, str]]] = {}
    for param in params:
        record = _record(param)
        if record is None:
            continue
        default = "Arguments" if param.param_type_name == "argument" else "Options"
        sections.setdefault(getattr(param, "rich_help_panel", None) or default, []).append(record)
    return sections


def _format_help(command: Any, ctx: Any, formatter: Any, sections: dict[str, list[tuple[str, str]]]) -> None:
    """Writes a whole help text: usage, what the command does, the examples at the end of its docstring, sections."""
    text, *examples = re.split(r"\n *\$ ", (command.help or "").strip())
    command.format_usage(ctx, formatter)
    formatter.write_paragraph()
    with formatter.indentation():
        formatter.write_text(text.strip())
    formatter.write("\n" + "".join(f"  $ {line}\n" for line in examples))
    width = max((len(name) for rows in sections.values() for name, _ in rows), default=0)
    for title, rows in sections.items():
        with formatter.section(title):
            formatter.write_dl([(name.ljust(width), text) for name, text in rows], col_max=width)


class _Plain:
    """Reads words, whole numbers and values that are no words, and leaves everything else to Typer.

    Typer 0.29 reads even words with pydantic, whose import takes a quarter of the time of `inspect`.
    """

    def __init__(self, param: Any, kind: Any) -> None:
        self._param, self._kind = param, kind

    def coerce(self, value: Any, **options: Any) -> Any:
        if self._kind == list[str] and isinstance(value, (list, tuple)):
            return list(value)
        if self._kind is str or not isinstance(value, str):
            return value
        if self._kind is int and re.fullmatch(r"-?[0-9]{1,18}", value) and self._is_in_range(int(value)):
            return int(value)
        return type(self._param).get_runtime_param(self._param).coerce(value, **options)

    def _is_in_range(self, number: int) -> bool:
        info = self._param.type_descriptor.parameter_info
        return (info.min is None or number >= info.min) and (info.max is None or number <= info.max)


def _plainly(param: Any) -> Any:
    kind = getattr(getattr(param, "type_descriptor", None), "annotation", None)
    if kind in (str, int, float, bool, list[str]):
        param.get_runtime_param = functools.partial(_Plain, param, kind)
    return param


class PlainCommand(TyperCommand):
    """A command whose help shows examples first and groups its options."""

    def get_params(self, ctx: Any) -> list[Any]:
        """The parameters, `--help` included."""
        return [_plainly(param) for param in super().get_params(ctx)]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parses, after giving `--tensors` and its like the glob `*` where no glob follows."""
        globs = {name for param in self.get_params(ctx) if param.metavar == "[GLOB]" for name in param.opts}
        filled: list[str] = []
        for word, following in itertools.zip_longest(args, args[1:], fillvalue=None):
            filled.append(word or "")
            # `--args CKPT`: what exists as a path is the checkpoint, not a glob
            if word in globs and (following is None or following.startswith("-") or Path(following).exists()):
                filled.append("*")
        return super().parse_args(ctx, filled)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The words after the command in the usage line."""
        arguments = [p for p in self.get_params(ctx) if p.param_type_name == "argument"]
        return ["[OPTIONS]", *(str(p.metavar or p.name).upper() for p in arguments)]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Writes the whole help text."""
        _format_help(self, ctx, formatter, _sections(self.get_params(ctx)))


class LazyGroup(TyperGroup):
    """The root: knows the names and summaries of all commands, imports the one that is called."""

    def get_params(self, ctx: Any) -> list[Any]:
        """The parameters, `--help` included."""
        return [_plainly(param) for param in super().get_params(ctx)]

    def list_commands(self, ctx: Any) -> list[str]:
        """All commands, in the order of the help text."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Builds a command from its module; None if there is no such command."""
        if cmd_name not in COMMANDS:
            return None
        name = cmd_name.replace("-", "_")
        app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
        callback = getattr(importlib.import_module(f"distckpt_cli.commands.{name}"), name)
        app.command(cmd_name, cls=PlainCommand, context_settings=CONTEXT)(callback)
        return get_command(app)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command a word means; an unknown word is answered with the nearest one."""
        word = args[0]
        if word not in COMMANDS and not word.startswith("-") and not ctx.resilient_parsing:
            near = nearest(_SYNONYMS.get(word, word), COMMANDS)
            hint = f"did you mean {near}? All commands: distckpt --help" if near else "all commands: distckpt --help"
            raise UsageProblem(f"no such command {word!r}", hint=hint)
        return super().resolve_command(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Writes the whole help text."""
        panels: dict[str, list[tuple[str, str]]] = {}
        for name, entry in COMMANDS.items():
            panels.setdefault(entry.panel, []).append((name, entry.summary))
        panels |= _sections(self.get_params(ctx)) | {"Environment": _ENVIRONMENT, "Exit codes": EPILOG}
        _format_help(self, ctx, formatter, panels)
