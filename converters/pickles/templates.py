"""Templates of repeated items in a pickle, and finding all places that fit one, with numpy. See `columns`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from converters.pickles.machine import Machine
from converters.pickles.nodes import Global, Node, Obj, PersId, Slot

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from converters.pickles.stack import Stack

Ints = np.ndarray[Any, np.dtype[np.signedinteger[Any]]]
Token = tuple[int, int, int]
"""Opcode, its position, the position after its argument (and after the MEMOIZE of a string)."""

_LEAF: Final = 0x7F000000
"""Memo indexes from here on stand for slots, in the item that a template's tree is made from."""
_TEXT: Final = 4096
"""Bytes of the longest string that a slot takes."""
_MARGIN: Final = 16
"""Bytes that must follow an item: the widest fixed argument is read before its opcode is known."""
_INT_SIZES: Final = {0x4B: 2, 0x4D: 3, 0x4A: 5}
_STRINGS: Final = (0x8C, 0x58)
_GETS: Final = (0x68, 0x6A)
_PLAIN: Final = frozenset(b"N\x88\x89)\x85\x86\x87t(}usR\x81b\x94")
"""Opcodes without argument that may stand in a template. None of them can do harm below the item: a template
is tried on an empty stack first."""


@dataclass(eq=False)
class Template:
    """One shape of item.

    Args:
        parts: Constant bytes, and slots by number, in order.
        tree: The item, or its (key, value), with a `Slot` where items differ.
        events: What writes each memo entry, in order: a 1-tuple with the part of the tree, or a slot by
            number, which writes one only where it holds a new string.
        is_ref: By slot: whether it holds a reference or a string, not an integer.
    """

    parts: list[bytes | int]
    tree: Node
    events: list[int | tuple[Node]]
    is_ref: list[bool]
    blocks: list[Block] = field(default_factory=list)
    rows: int = 0


@dataclass(eq=False)
class Block:
    """n places that fit a template.

    Args:
        starts: (n,) first bytes.
        ends: (n,) the bytes after.
        memos: (n,) how many memo entries each writes.
        values: By slot, (n,): the integer, the memo index, or -1 for a new string.
        texts: By slot, (n, 2): first byte and length of a new string; empty for integers.

    Attributes:
        count: n.
    """

    starts: Ints
    ends: Ints
    memos: Ints
    values: list[Ints]
    texts: list[Ints]
    count: int = 0

    def __post_init__(self) -> None:
        self.count = len(self.starts)

    def drop_positions(self) -> None:
        """Frees the arrays that only the index of the window needs."""
        self.starts = self.ends = self.memos = self.starts[:0].copy()


class _Overlay:
    """The memo as seen by an item that is tried on its own: slots, the real memo, its own entries."""

    def __init__(self, memo: Sequence[Node], slots: Sequence[Node]) -> None:
        self.memo = memo
        self.slots = slots
        self.own: list[Node] = []

    def __len__(self) -> int:
        return len(self.memo) + len(self.own)

    def __getitem__(self, index: int) -> Node:
        if index >= _LEAF:
            return self.slots[index - _LEAF]
        return self.memo[index] if index < len(self.memo) else self.own[index - len(self.memo)]

    def append(self, value: Node) -> None:
        self.own.append(value)


def tokenize(data: bytes, start: int, stop: int) -> list[Token] | None:
    """The opcodes of an item; None if one of them cannot be in a template."""
    pos, tokens = start, []
    while pos < stop:
        op = data[pos]
        if op in _PLAIN:
            end = pos + 1
        elif op in _INT_SIZES:
            end = pos + _INT_SIZES[op]
        elif op == 0x8A and 1 <= data[pos + 1] <= 8:
            end = pos + 2 + data[pos + 1]
        elif op in _GETS:
            end = pos + (2 if op == 0x68 else 5)
        elif op in _STRINGS:
            size = data[pos + 1] + 2 if op == 0x8C else int.from_bytes(data[pos + 1 : pos + 5], "little") + 5
            end = pos + size + 1
            if end > stop or data[end - 1] != 0x94:
                return None
        else:
            return None
        tokens.append((op, pos, end))
        pos = end
    return tokens if pos == stop else None


def make_template(machine: Stack, tokens: list[Token], count: int) -> Template | None:
    """Generalize an item that the machine has just made.

    Args:
        machine: It stands right after the item.
        tokens: The item's.
        count: Values that it must leave on the stack: 1 in a list, 2 in a dict.

    Returns:
        The template; None if the item does not stand on its own.
    """
    # References to classes belong to the shape, and so do dict keys, which show in the first attempt.
    data, memo = machine.data, machine.memo
    fixed = {pos for op, pos, _ in tokens if op in _GETS and type(memo[_get_index(data, op, pos)]) is Global}
    for _ in range(2):
        template, keys = _attempt(machine, tokens, count, fixed)
        if template is None or not keys:
            return template
        if any(data[pos] in _STRINGS for pos in keys):
            return None
        fixed |= keys
    return None


def _get_index(data: bytes, op: int, pos: int) -> int:
    return data[pos + 1] if op == 0x68 else int.from_bytes(data[pos + 1 : pos + 5], "little")


def _attempt(machine: Stack, tokens: list[Token], count: int, fixed: set[int]) -> tuple[Template | None, set[int]]:
    """A template, and the positions of references among its slots that are dict keys."""
    parts: list[bytes | int] = []
    slots: list[Slot] = []
    positions: list[int] = []
    events: list[int | None] = []
    raw = bytearray()
    for op, pos, end in tokens:
        is_ref = op in _STRINGS or (op in _GETS and pos not in fixed)
        if is_ref or op in _INT_SIZES or op == 0x8A:
            if is_ref:
                events.append(len(slots))
            parts.append(len(slots))
            raw += b"j" + (_LEAF + len(slots)).to_bytes(4, "little")
            slots.append(Slot(len(slots), is_ref))
            positions.append(pos)
            continue
        if op == 0x94:
            events.append(None)
        piece = machine.data[pos:end]
        raw += piece
        if parts and isinstance(last := parts[-1], bytes):
            parts[-1] = last + piece
        else:
            parts.append(piece)
    overlay = _Overlay(machine.memo, slots)
    values = Machine(bytes(raw) + b".", machine.limits, machine.what).run_item(overlay)
    if values is None or len(values) != count or not parts or not isinstance(parts[0], bytes) or len(parts[0]) < 4:
        return None, set()
    entries = iter(overlay.own)
    written = [event if event is not None else (next(entries),) for event in events]
    tree = values[0] if count == 1 else tuple(values)
    keys = {positions[slot.index] for slot in _key_slots(values) if slot.is_ref}
    return Template(parts, tree, written, [slot.is_ref for slot in slots]), keys


def _key_slots(values: list[Node]) -> list[Slot]:
    """Slots in the place of a dict key, anywhere in the item."""
    slots: list[Slot] = []
    left = list(values)
    while left:
        node = left.pop()
        if isinstance(node, dict):
            slots += [key for key in node if isinstance(key, Slot)]
            left += [*node.keys(), *node.values()]
        elif isinstance(node, (tuple, list)):
            left += node
        elif isinstance(node, Obj):
            left += [node.args, node.kwargs, node.state, node.items, node.pairs]
        elif isinstance(node, PersId):
            left.append(node.value)
    return slots


def find(raw: NDArray[np.uint8], template: Template, start: int, stop: int) -> Block:
    """All places from `start` to `stop` whose bytes fit a template, whether items begin there or not.

    Args:
        raw: The pickle as an array.
        template: What to look for.
        start: First place.
        stop: After the last place; an item may extend beyond it.
    """
    head = template.parts[0]
    assert isinstance(head, bytes)
    starts = _occurrences(raw[start : stop + len(head) - 1], head) + start
    search = _Search(raw, starts, len(template.is_ref))
    search.at += len(head)
    for part in template.parts[1:]:
        if isinstance(part, bytes):
            search.constant(part)
        elif template.is_ref[part]:
            search.reference(part)
        else:
            search.integer(part)
    static = sum(isinstance(event, tuple) for event in template.events)
    new = sum(((search.values[slot] < 0) for slot in range(len(template.is_ref)) if template.is_ref[slot]), np.int64(0))
    live = search.live
    memos = np.broadcast_to(static + new, starts.shape)[live]
    return Block(
        starts[live],
        search.at,
        memos.astype(np.int32),
        [narrowed(column[live]) for column in search.values],
        [narrowed(text[live]) if len(text) else text for text in search.texts],
    )


def narrowed(numbers: Ints) -> Ints:
    """In 32 bits, if all fit: most offsets and memo indexes do, and there are millions of them."""
    fits = not numbers.size or (numbers.min() >= -(1 << 31) and numbers.max() < 1 << 31)
    return numbers.astype(np.int32) if fits else numbers


def _occurrences(raw: NDArray[np.uint8], head: bytes) -> Ints:
    """Where `head` occurs: at its byte that is rarest here, the others are then compared."""
    counts = np.bincount(raw[: 1 << 16], minlength=256)
    rarest = min(range(len(head)), key=lambda position: counts[head[position]])
    last = len(raw) - len(head) + 1
    starts = np.flatnonzero(raw[rarest : max(rarest, rarest + last)] == head[rarest])
    for shift, byte in enumerate(head):
        if shift != rarest:
            starts = starts[raw[starts + shift] == byte]
    return starts


class _Search:
    """Walks through a template at all candidate places at once; those that do not fit drop out."""

    def __init__(self, raw: NDArray[np.uint8], starts: Ints, slots: int) -> None:
        self.raw = raw
        self.size = len(raw)
        self.live = np.arange(len(starts))
        self.at = starts.copy()
        self.values = [np.zeros(len(starts), np.int64) for _ in range(slots)]
        self.texts = [np.zeros((0, 2), np.int64) for _ in range(slots)]
        self.total = len(starts)

    def keep(self, fits: NDArray[np.bool_]) -> None:
        """Drop the places that do not fit."""
        if not fits.all():
            self.live, self.at = self.live[fits], self.at[fits]

    def constant(self, part: bytes) -> None:
        """Keeps the places where a constant stands next."""
        self.keep(self.at < self.size - len(part) - _MARGIN)
        fits = np.ones(len(self.at), bool)
        for shift, byte in enumerate(part):
            fits &= self.raw[self.at + shift] == byte
        self.keep(fits)
        self.at = self.at + len(part)

    def little(self, at: Ints, width: int) -> Ints:
        """Unsigned integers of `width` bytes."""
        value = np.zeros(len(at), np.int64)
        for byte in range(width):
            value |= self.raw[at + byte].astype(np.int64) << (8 * byte)
        return value

    def integer(self, slot: int) -> None:
        """BININT1, BININT2, BININT, or LONG1 of up to 8 bytes."""
        self.keep(self.at < self.size - _MARGIN)
        op = self.raw[self.at]
        value, width = np.zeros(len(op), np.int64), np.zeros(len(op), np.int64)
        for code, size in _INT_SIZES.items():
            mine = np.flatnonzero(op == code)
            if len(mine):
                number = self.little(self.at[mine] + 1, size - 1)
                value[mine] = number if size < 5 else number.astype(np.int32)
                width[mine] = size
        mine = np.flatnonzero(op == 0x8A)
        if len(mine):
            size_of = self.raw[self.at[mine] + 1].astype(np.int64)
            fits = (size_of >= 1) & (size_of <= 8)
            mine, size_of = mine[fits], size_of[fits]
            # Shifting left, then arithmetically right, drops the bytes after it and extends the sign.
            shift = 64 - 8 * size_of
            value[mine] = (self.little(self.at[mine] + 2, 8) << shift) >> shift
            width[mine] = 2 + size_of
        self.values[slot][self.live] = value
        self.at = self.at + width
        self.keep(width > 0)

    def reference(self, slot: int) -> None:
        """BINGET or LONG_BINGET, or a new string that is memoized."""
        self.keep(self.at < self.size - _MARGIN)
        op = self.raw[self.at]
        value, width = np.full(len(op), -1, np.int64), np.zeros(len(op), np.int64)
        text = np.zeros((len(op), 2), np.int64)
        for code, argument in ((0x68, 1), (0x6A, 4), (0x8C, 1), (0x58, 4)):
            mine = np.flatnonzero(op == code)
            if not len(mine):
                continue
            number = self.little(self.at[mine] + 1, argument)
            if code in _GETS:
                value[mine] = number
                width[mine] = 1 + argument
                continue
            first = self.at[mine] + 1 + argument
            fits = (number <= _TEXT) & (first + number < self.size)
            mine, number, first = mine[fits], number[fits], first[fits]
            fits = self.raw[first + number] == 0x94
            mine, number, first = mine[fits], number[fits], first[fits]
            text[mine, 0], text[mine, 1] = first, number
            width[mine] = 1 + argument + number + 1
        self.values[slot][self.live] = value
        if not len(self.texts[slot]):
            self.texts[slot] = np.zeros((self.total, 2), np.int64)
        self.texts[slot][self.live] = text
        self.at = self.at + width
        self.keep(width > 0)
