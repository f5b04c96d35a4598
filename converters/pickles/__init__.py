"""Inert pickle reading and writing: nothing from a file is ever imported, called or evaluated.

`parse` turns a pickle into plain Python data and inert nodes, `dumps` writes such a tree back (unedited:
byte for byte), `fields`/`set_field`/`describe` look at and edit it. torch is never imported.
"""

from __future__ import annotations

from converters.pickles.describe import describe
from converters.pickles.emit import dumps
from converters.pickles.limits import Limits
from converters.pickles.machine import Machine
from converters.pickles.nodes import (
    Global,
    Node,
    Obj,
    PersId,
    PickleFormatError,
    UnsafePickle,
    fields,
    pairs,
    references,
    set_field,
)
from converters.pickles.policy import hostile

__all__ = [
    "Global",
    "Limits",
    "Node",
    "Obj",
    "PersId",
    "PickleFormatError",
    "UnsafePickle",
    "describe",
    "dumps",
    "fields",
    "hostile",
    "pairs",
    "parse",
    "parse_stream",
    "references",
    "set_field",
]


def parse(data: bytes, *, limits: Limits | None = None, what: str = "pickle") -> Node:
    """Read one pickle that takes up all of `data`.

    Args:
        data: The bytes, protocol 2 to 5.
        limits: What to refuse; the defaults suit any checkpoint.
        what: Names the bytes in errors: `"common.pt: data.pkl"`.

    Returns:
        Plain data and inert nodes.

    Raises:
        PickleFormatError: Damaged, of a dialect that Python does not write, or beyond the limits.
        UnsafePickle: It names something hostile or plays a trick.
    """
    node, end = parse_stream(data, limits=limits, what=what)
    if end != len(data):
        raise UnsafePickle(f"{what}: {len(data) - end} bytes follow the end of the pickle at byte {end}")
    return node


def parse_stream(
    data: bytes, start: int = 0, *, limits: Limits | None = None, what: str = "pickle"
) -> tuple[Node, int]:
    """Read one pickle out of several that follow each other (a `.pt` file of torch before 1.6).

    Args:
        data: The bytes.
        start: Where the pickle begins.
        limits: What to refuse.
        what: Names the bytes in errors.

    Returns:
        The value, and the offset of the byte after its STOP.

    Raises:
        PickleFormatError: See `parse`.
    """
    machine = Machine(data, limits or Limits(), what, start=start)
    node = machine.run()
    return node, machine.pos
