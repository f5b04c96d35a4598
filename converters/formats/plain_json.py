"""JSON from outside, read strictly: a document with equal keys is refused, as readers differ in which they take."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from converters.errors import FormatError
from converters.formats.broken import damaged_file
from converters.formats.folder import read_small
from converters.names import printable

if TYPE_CHECKING:
    from pathlib import Path

_LIMIT = 256 << 20


def read_json(path: Path, limit: int = _LIMIT) -> Any:
    """The document in a file.

    Raises:
        DamagedFileError: Not JSON, or a key twice in one object.
        FormatError: More than `limit` bytes.
    """
    raw = read_small(path, limit)
    try:
        return parse_json(raw, printable(path.name))
    except FormatError as error:
        text = error.message if raw else f"{printable(path.name)} is empty (0 bytes)"
        raise damaged_file(path.parent, {path.name: text}, *error.details) from error


def parse_json(raw: bytes, label: str) -> Any:
    """As `read_json`, of bytes; `label` names them in errors."""
    try:
        return json.loads(raw, object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{label} is not JSON", details=[printable(str(error))[:200]]) from error


def _unique(entries: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(entries)
    if len(unique) != len(entries):
        raise ValueError("a key occurs twice")
    return unique


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")
