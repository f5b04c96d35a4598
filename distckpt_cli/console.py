"""Output: the result on stdout, everything else on stderr.

Nothing here interprets markup. Text that comes from a file goes through `printable`, so a tensor's name can neither move
the cursor nor colour the line.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import sys
import textwrap
from contextvars import ContextVar
from typing import IO, TYPE_CHECKING, Any

from converters.errors import DestinationError, DistckptError
from converters.execute.ranks import Ranks
from converters.names import printable
from converters.remote.address import named_path
from converters.words import format_size
from distckpt_cli.exits import ExitCode

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

COMMAND_LINE: ContextVar[tuple[str, ...]] = ContextVar("COMMAND_LINE", default=())
"""The words behind `distckpt`, as they were typed."""

_STYLES = {"error": "31;1", "warning": "33;1", "ok": "32", "dim": "2", "bold": "1", "hint": "36"}
_LABEL = 10  # width of the labels of a card: "model     "
_MOST_FACTS = 8
NARROW = 60
"""Columns below which a table row that does not fit puts its name on a line of its own."""
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmgtp])(i)?b|b|bytes)?", re.IGNORECASE)


class UsageProblem(DistckptError):
    """An option's value makes no sense, or two options do not go together."""

    exit_code = ExitCode.USAGE
    kind = "usage"


def parse_size(text: str, option: str = "size") -> int:
    """Bytes that a person means: `8GB` is 8 * 10^9, `8GiB` is 8 * 2^30, a plain number is bytes.

    Args:
        text: What was typed.
        option: Which option it was typed for, for the error.

    Raises:
        UsageProblem: Not a size, or an ambiguous one (`8G`).
    """
    match = _SIZE.fullmatch(text.strip())
    if not match:
        bare = text.strip().rstrip("iI")
        hint = f"write {bare}B (powers of 1000) or {bare}iB (powers of 1024)"
        ambiguous = re.fullmatch(r"\d+(?:\.\d+)?\s*[kmgtpKMGTP]", bare)
        raise UsageProblem(
            f"{option}: {text!r} is not a size", hint=hint if ambiguous else "write 8GB, 8GiB or plain bytes"
        )
    exponent = " kmgtp".index((match[2] or " ").lower())
    return int(float(match[1]) * (1024 if match[3] else 1000) ** exponent) if exponent else int(float(match[1]))


def destination_path(dst: str) -> Path:
    """The path of a destination.

    Raises:
        UsageProblem: An empty one, most likely a shell variable that is not set.
        DestinationError: `~name` without such a user, and there is no folder of that name.
    """
    if not dst:
        raise UsageProblem("no destination was named: the path is empty", hint="is a shell variable unset?")
    path = named_path(dst)
    if dst.startswith("~") and str(path).startswith("~") and not path.exists():
        user = printable(dst.partition("/")[0])
        raise DestinationError(f"{user}: there is no such user", hint=f"a folder of that name is ./{user}")
    return path


def json_value(value: Any) -> Any:
    """The value as JSON can hold it: enums, paths and inert nodes as text, no NaN."""
    if isinstance(value, dict):
        return {str(k): json_value(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [json_value(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, (str, int, float, bool)) else str(value)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int | None = None) -> list[str]:
    """Aligned lines under a header, without boxes.

    Args:
        columns: Titles; one that begins with `>` is aligned to the right. The last column is never padded or cut.
        rows: Cells, already escaped.
        width: Of the terminal; None for no wrapping. Where it is narrow, the last cell moves to its own line.
    """
    right = [title.startswith(">") for title in columns]
    cells = [[title.lstrip(">") for title in columns], *rows]
    last = len(columns) - 1
    widths = [max(len(row[i]) for row in cells) for i in range(last)]
    heads = [
        "  ".join(row[i].rjust(widths[i]) if right[i] else row[i].ljust(widths[i]) for i in range(last))
        for row in cells
    ]
    stacked = (
        width is not None and width < NARROW and any(sum(widths) + 2 * last + len(row[last]) > width for row in cells)
    )
    if stacked:
        return [line for head, row in zip(heads, cells, strict=True) for line in (head.rstrip(), f"  {row[last]}")]
    return [f"{head}  {row[last]}".rstrip() for head, row in zip(heads, cells, strict=True)]


def _colours(stream: IO[str]) -> bool:
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return stream.isatty() and os.environ.get("TERM") != "dumb"


class Console:
    """Where a command writes.

    Args:
        json_requested: The answer is one JSON document; `out` is silent.
        quiet: No notes and no next steps; so it is on all ranks but the leading one.
        silent: Not even the answer; quiet, too.
        verbose: How often `-v` was given.
        width: Columns of the terminal; by default asked from it, and unlimited when stdout is not one.
    """

    def __init__(
        self,
        *,
        json_requested: bool = False,
        quiet: bool = False,
        silent: bool = False,
        verbose: int = 0,
        width: int | None = None,
    ) -> None:
        self.json_requested = json_requested
        self.silent = silent
        self.quiet = quiet or silent or Ranks.from_environment().rank > 0
        self.verbose = verbose
        if width is None and sys.stdout.isatty():
            width = shutil.get_terminal_size().columns
        self.width = width
        self._bright = {"out": _colours(sys.stdout), "err": _colours(sys.stderr)}

    def style(self, text: str, name: str, stream: str = "out") -> str:
        """The text in a colour if that stream shows colours. The word must say it all without."""
        return f"\x1b[{_STYLES[name]}m{text}\x1b[0m" if self._bright[stream] else text

    def out(self, text: str = "") -> None:
        """A line of the answer."""
        if not self.json_requested and not self.silent:
            self._write(text)

    def lines(self, lines: Iterable[str]) -> None:
        """Several lines of the answer."""
        for line in lines:
            self.out(line)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A table as part of the answer; every cell is escaped here."""
        header, *body = table(columns, [[printable(cell) for cell in row] for row in rows], self.width)
        self.out(self.style(header, "bold"))
        self.lines(body)

    def fact(self, label: str, text: str, *, style: str | None = None) -> None:
        """A labelled line of a card, wrapped under its label on a narrow terminal."""
        lines = self._wrap(printable(text), _LABEL)
        head = printable(label).ljust(_LABEL)
        shown = self.style(head, style) if style else head
        if self.width is not None and len(head) > _LABEL and len(head) + len(lines[0]) > self.width:
            self.out(shown.rstrip())  # a path that leaves no room beside it
            lines.insert(0, "")
        else:
            self.out(shown + lines[0])
        self.lines(" " * _LABEL + line for line in lines[1:])

    def facts(self, label: str, texts: Sequence[str], *, style: str | None = None) -> None:
        """Facts under one label: the first few, or all with `-v`."""
        shown = texts if self.verbose else texts[:_MOST_FACTS]
        for text in shown:
            self.fact(label, text, style=style)
            label, style = "", None
        if len(texts) > len(shown):
            self.fact("", f"and {len(texts) - len(shown):,} more (-v)")

    def read_fact(self, sources: str, nbytes: int, seconds: float, remark: str = "") -> None:
        """Prints what was read, the time it took, and the rate."""
        rate = f", {format_size(nbytes / seconds)}/s" if seconds > 0.05 else ""
        self.fact("read", f"{sources}, {seconds:.1f} s{rate}{remark}")

    def document(self, schema: str, body: Mapping[str, Any]) -> None:
        """The answer as one JSON document with its schema's name; ASCII only, so that no name can act on a terminal.

        Raises:
            DestinationError: stdout is closed: a document is for a program, which would wait for it.
        """
        if getattr(sys.stdout, "absent", False):
            raise DestinationError("the answer cannot be written to stdout: it is closed")
        self._write(json.dumps({"schema": schema, **json_value(dict(body))}, indent=2))

    def note(self, text: str) -> None:
        """Something worth knowing, on stderr."""
        self.label("note:", text, "hint")

    def label(self, word: str, text: str, style: str = "bold") -> None:
        """A labelled line on stderr: `resuming  40 of 64 files already done`."""
        if not self.quiet:
            self._err(f"{self.style(word.ljust(5), style, 'err')} {printable(text)}")

    def next_step(self, command: str) -> None:
        """What to type next, on stderr, after success."""
        self.label("next:", command, "hint")

    def error(self, error: DistckptError, *, word: str = "error:", who: str = "") -> None:
        """An error: one sentence, after the name of the process if there are several, the facts, and what to do."""
        self._err_lines(word, "error", who + "\n".join([error.message, *error.details]))
        if error.hint:
            self._err_lines("hint:", "hint", error.hint)

    def _err_lines(self, word: str, style: str, text: str) -> None:
        first, *further_lines = text.splitlines() or [""]
        self._err(f"{self.style(word.ljust(6), style, 'err')} {printable(first)}")
        for line in further_lines:
            self._err(f"       {printable(line)}")

    def _wrap(self, text: str, indent: int) -> list[str]:
        if self.width is None or len(text) + indent <= self.width:
            return [text]
        room = max(self.width - indent, 20)
        return textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False) or [""]

    def _err(self, text: str) -> None:
        print(text, file=sys.stderr)

    def _write(self, text: str) -> None:
        print(text)
