"""Sizes, counts and plurals as text, for every message."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def format_size(nbytes: float) -> str:
    """Bytes for people: `104.70 GiB`, `0.31 MiB`, `1.27 KiB`, `12 B`."""
    for unit, power in (("TiB", 40), ("GiB", 30), ("MiB", 20)):
        limit = 10 if unit == "TiB" else 0.1
        if nbytes >= limit * 2**power:
            return f"{nbytes / 2**power:.2f} {unit}"
    return f"{nbytes / 1024:.2f} KiB" if nbytes >= 1024 else f"{nbytes:.0f} B"


def format_count(number: int) -> str:
    """A number of parameters: `8.03 B`, `124.4 M`, `45,312`."""
    if number >= 10**9:
        return f"{number / 1e9:,.2f} B"
    return f"{number / 1e6:.1f} M" if number >= 10**6 else f"{number:,}"


def format_value(value: object) -> str:
    """A value that JSON can hold, such as a training argument: text as it is, all else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def format_shape(shape: Sequence[int]) -> str:
    """A shape for people: `4096 x 1024`, `scalar`."""
    return " x ".join(map(str, shape)) or "scalar"


def counted(number: int, noun: str, plural: str = "", *, verb: str = "") -> str:
    """A number with its noun: `1 file`, `2,400 files`, `0 copies`, `1 file is`, `2 files are`.

    Args:
        number: How many.
        noun: In the singular.
        plural: In the plural, where that is not the singular with an s.
        verb: What follows, in the singular and in the plural: "is/are".
    """
    form = verb.split("/")[number != 1] if verb else ""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'} {form}".rstrip()
