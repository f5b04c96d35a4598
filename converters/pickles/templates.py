"""Templates of repeated items in a pickle: a regular expression of one item, and the values of many. See `columns`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from converters.pickles.machine import Machine
from converters.pickles.nodes import Global, Node, Slot, nodes_in

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from converters.pickles.stack import Stack

Ints = np.ndarray[Any, np.dtype[np.signedinteger[Any]]]
MARGIN: Final = 8
"""Bytes that must follow an item: so many are read at once from the beginning of an integer."""
_LEAF: Final = 0x7F000000
"""Memo indexes from here on stand for slots, in the item that a template's tree is made from."""
_MOST_STRINGS: Final = 8
"""Strings in one item: each makes its regular expression longer by 256 alternatives."""
_LONG: Final = 0x8A
_MEMOIZE: Final = b"\x94"


def _sized(sizes: range) -> bytes:
    """The length of what follows, in one byte, and so many bytes."""
    return b"(?:%s)" % b"|".join(re.escape(bytes([size])) + b".{%d}" % size for size in sizes)


_PATTERNS: Final = {
    "integer": b"(?:K.|M..|J.{4}|\x8a%s)" % _sized(range(1, 9)),
    "reference": b"(?:h.|j.{4})",
    "string": b"\x8c%s\x94" % _sized(range(256)),
}
"""The kinds of slots."""
_TOKEN: Final = re.compile(
    rb"[N\x88\x89)\x85\x86\x87t(}usR\x81b\x94]|(?P<integer>%b)|(?P<reference>%b)|(?P<string>%b)"
    % tuple(_PATTERNS.values()),
    re.DOTALL,
)
"""An opcode that may stand in a template. Those without argument can do no harm below the item: a template is tried on an
empty stack first."""


@dataclass(eq=False)
class Template:
    """One shape of item.

    Args:
        parts: Constant bytes, and slots, in order.
        tree: The item, or its (key, value), with a `Slot` where items differ.
        memo: What each memo entry that an item writes holds: a 1-tuple with the part of the tree, or the number of the slot
            of a string.
        match: Matches an item, as that of a regular expression.
    """

    parts: list[bytes | Slot]
    tree: Node
    memo: list[int | tuple[Node]]
    match: Callable[[bytes, int, int], re.Match[bytes] | None]

    def values(self, data: bytes, starts: Ints) -> list[Ints]:
        """What the slots of items hold, by slot.

        Args:
            data: The pickle.
            starts: (n,) first bytes of items that match.

        Returns:
            (n,) integers, or memo indexes of references; of strings (n, 2), first byte and length.
        """
        raw = np.frombuffer(data, np.uint8)
        words = np.ndarray(len(data) - MARGIN + 1, "<i8", data, strides=(1,))  # eight bytes from each place on
        out, at = list[Ints](), starts
        for part in self.parts:
            if isinstance(part, bytes):
                at = at + len(part)
                continue
            opcode, sizes = raw[at], raw[at + 1].astype(np.int64)
            if part.kind == "string":
                out.append(narrowed(np.stack([at + 2, sizes], axis=1)))
                at = at + sizes + 3
                continue
            is_long = opcode == _LONG
            width = np.where(is_long, sizes, _WIDTHS[opcode])
            at = at + 1 + is_long
            shift = 64 - 8 * width
            value = (words[at] << shift) >> shift  # drops the bytes behind it, and extends the sign
            is_signed = is_long | (opcode == ord("J"))
            out.append(narrowed(np.where(is_signed, value, value & ~(-1 << (8 * width)))))
            at = at + width
        return out


_WIDTHS: Final = np.zeros(256, np.int64)
_WIDTHS[list(b"KhMJj")] = [1, 1, 2, 4, 4]


def narrowed(numbers: Ints) -> Ints:
    """In 32 bits, if all fit: most offsets and memo indexes do, and there are millions of them."""
    fits = not numbers.size or (numbers.min() >= -(1 << 31) and numbers.max() < 1 << 31)
    return numbers.astype(np.int32) if fits else numbers


class _Overlay:
    """The memo as seen by an item that is tried on its own: slots, the real memo, its own entries."""

    def __init__(self, memo: Sequence[Node], slots: Sequence[Node]) -> None:
        self.memo = memo
        self.slots = slots
        self.entries: list[Node] = []

    def __len__(self) -> int:
        return len(self.memo) + len(self.entries)

    def __getitem__(self, index: int) -> Node:
        if index >= _LEAF:
            return self.slots[index - _LEAF]
        return self.memo[index] if index < len(self.memo) else self.entries[index - len(self.memo)]

    def append(self, value: Node) -> None:
        self.entries.append(value)


def make_template(machine: Stack, start: int, stop: int, count: int) -> Template | None:
    """Generalize an item that the machine has just made.

    Args:
        machine: It stands right after the item.
        start: The item's first byte.
        stop: The byte after it.
        count: Values that it must leave on the stack: 1 in a list, 2 in a dict.

    Returns:
        The template; None if the item does not stand on its own.
    """
    tokens = list(_TOKEN.finditer(machine.data, start, stop))
    strings = sum(token.lastgroup == "string" for token in tokens)
    if sum(len(token[0]) for token in tokens) < stop - start or strings > _MOST_STRINGS:
        return None
    # References to classes belong to the shape, and so do dict keys, which show in the first attempt.
    references = (token for token in tokens if token.lastgroup == "reference")
    fixed = {token.start() for token in references if type(machine.memo[_memo_index(token[0])]) is Global}
    for _ in range(2):
        template, keys = _attempt(machine, tokens, count, fixed)
        if template is None or not keys:
            return template
        if any(token.start() in keys and token.lastgroup == "string" for token in tokens):
            return None
        fixed |= keys
    return None


def _memo_index(reference: bytes) -> int:
    return int.from_bytes(reference[1:], "little")


def _attempt(
    machine: Stack, tokens: list[re.Match[bytes]], count: int, fixed: set[int]
) -> tuple[Template | None, set[int]]:
    """A template, and the positions of references among its slots that are dict keys."""
    parts: list[bytes | Slot] = []
    slots: list[Slot] = []
    positions: list[int] = []
    written: list[int | None] = []
    raw = bytearray()
    for token in tokens:
        kind, piece = token.lastgroup, token[0]
        if kind is None or token.start() in fixed:
            if piece == _MEMOIZE:
                written.append(None)
            raw += piece
            if parts and isinstance(last := parts[-1], bytes):
                parts[-1] = last + piece
            else:
                parts.append(piece)
            continue
        if kind == "string":
            written.append(len(slots))
        raw += b"j" + (_LEAF + len(slots)).to_bytes(4, "little")
        slots.append(Slot(len(slots), kind))
        parts.append(slots[-1])
        positions.append(token.start())
    overlay = _Overlay(machine.memo, slots)
    values = Machine(bytes(raw) + b".", machine.limits, machine.label).run_item(overlay)
    if values is None or len(values) != count:
        return None, set()
    entries = iter(overlay.entries)
    memo = [number if number is not None else (next(entries),) for number in written]
    tree = values[0] if count == 1 else tuple(values)
    dicts = (node for node in nodes_in(values) if isinstance(node, dict))
    keys = {positions[key.index] for node in dicts for key in node if isinstance(key, Slot) and key.is_ref}
    pattern = b"".join(re.escape(part) if isinstance(part, bytes) else _PATTERNS[part.kind] for part in parts)
    return Template(parts, tree, memo, re.compile(pattern, re.DOTALL).match), keys
