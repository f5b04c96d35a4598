"""Reports as small pieces of HTML for notebooks; text from files is escaped."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from converters.names import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def lines_as_html(lines: Sequence[str], *, good: bool) -> str:
    """A headline, green or red, and lines below it."""
    head, *lines_below = lines or [""]
    colour = "#1a7f37" if good else "#cf222e"
    items = "".join(f"<li><code>{escape(printable(line))}</code></li>" for line in lines_below)
    return f'<div><b style="color:{colour}">{escape(printable(head))}</b>{f"<ul>{items}</ul>" if items else ""}</div>'


def pairs_as_html(title: str, pairs: Iterable[tuple[str, str]]) -> str:
    """A title over a table of labels and texts."""
    rows = "".join(
        f'<tr><th style="text-align:left">{escape(printable(label))}</th>'
        f'<td style="text-align:left">{escape(printable(text))}</td></tr>'
        for label, text in pairs
    )
    return f"<div><b>{escape(printable(title))}</b><table>{rows}</table></div>"
