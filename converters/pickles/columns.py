"""Reading millions of like items out of a pickle as arrays, without making them.

A `.metadata` of 1 M chunks has 70 M opcodes, of which all but a few thousand belong to items of the same few
shapes: `ChunkStorageMetadata` in lists, `MetadataIndex: _StorageInfo` in a dict. The machine makes the first
item of a shape. Its opcodes become a template, in which integers, strings and references are slots:

    j <class> ) 81 94 } 94 ( j <"offsets"> j <Size> K 0 K 1 86 94 85 94 R 94 ...        the item
    [ constant bytes                              ] [0] [1] [ constant ...    ]        the template

numpy then compares the template with every place of the next 16 MB where its first constant occurs, all places
at once, and so knows where each such item would end and what its slots hold. These are only candidates: bytes
inside a string may look like an item. An item is taken when the machine itself stands at its first byte, and
the following ones as long as each begins where the one before ends. Whatever does not fit (a frame header
amid an item, the end of a batch) the machine executes as ever, so the templates never need to be complete.

Nothing is assumed about the classes. What is taken is what the machine would have executed: the opcodes of a
template have no other effects than to push one item, and to write memo entries, which are counted and made when
something refers to them. Where that reasoning would not hold, `Bail` is raised, and the caller reads the pickle
again without columns.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from itertools import repeat
from typing import TYPE_CHECKING, Final

import numpy as np

from converters.pickles.nodes import Node, Obj, Run, Slot
from converters.pickles.stack import MISSING, Stack
from converters.pickles.templates import Ints, Template, find, make_template, narrowed, tokenize

if TYPE_CHECKING:
    from collections.abc import Iterator

_WINDOW: Final = 16 << 20
_ITEM: Final = 600
"""Bytes of the longest item that becomes a template."""
_TEMPLATES: Final = 24
"""Templates per kind; each costs one pass over the candidates."""
_SCANS: Final = 4000
"""Items looked at in vain before we stop looking for templates."""


class Bail(Exception):
    """The pickle does something that columns cannot follow; read it without."""


@dataclass(eq=False)
class _Index:
    """All candidates of one kind in one window, by position. Its arrays are replaced, never changed."""

    stop: int = 0
    starts: list[int] = field(default_factory=list)
    ends: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    template: Ints = field(default_factory=lambda: np.zeros(0, np.int8))
    row: Ints = field(default_factory=lambda: np.zeros(0, np.int32))
    memos: Ints = field(default_factory=lambda: np.zeros(0, np.int32))
    breaks: list[int] = field(default_factory=list)
    """Candidates that no other one begins right after."""


@dataclass(eq=False)
class _Taken:
    """A run of items that were taken: which rows of which templates, and the first memo index they write."""

    kind: int
    template: Ints
    row: Ints
    memos: Ints
    first: int


@dataclass(eq=False)
class Batch:
    """The n items of one shape, in the order of the file.

    Args:
        tree: The item (in a list) or (key, value) (in a dict), with a `Slot` where items differ.
        run: (n,) the number of the `Run` that each item belongs to.
        base: (n,) the first memo index that each item writes.
        values: By slot, (n,): integers, or memo indexes (also of a string that the item itself wrote).
        parts: Parts of the tree that other items may refer to, with (n,) the memo index of each.
    """

    tree: Node
    run: Ints
    base: Ints
    values: list[Ints]
    parts: list[tuple[Node, Ints]]


class Columns:
    """Takes runs of like items for a `Machine`, and hands them out as `Batch`es when it is done.

    Args:
        data: The pickle.
    """

    LIST: Final = 0
    PAIR: Final = 1

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.raw = np.frombuffer(data, np.uint8)
        self.templates: tuple[list[Template], list[Template]] = ([], [])
        self.index = [_Index(), _Index()]
        self.runs_taken: list[_Taken] = []
        self.strings: list[str] = []
        self._shapes_seen: set[str] = set()
        self._begins: dict[int, int] = {}
        self._bases: list[int] = []
        self._scans = _SCANS
        self._codes: dict[bytes, int] = {}
        self._written: list[tuple[Ints, Ints]] = []
        self._sorted: tuple[Ints, Ints, list[str]] | None = None

    # -- called by the machine --------------------------------------------------------------------------

    def give_up(self) -> None:
        """The memo is written with explicit indexes, so items that were not made cannot be counted in it."""
        raise Bail

    def after_mark(self, machine: Stack, pos: int) -> int:
        """A batch or a tuple begins at `pos`. Returns where the machine goes on."""
        self._begins[len(machine.meta)] = pos
        below = machine.meta[-1]
        # A long dict meets the end of a batch once in 1000 entries; that one may be made.
        if len(machine.meta) > 1 and below and type(below[-1]) is list:
            return self._take(machine, self.LIST, pos)
        return pos

    def after_build(self, machine: Stack, pos: int) -> int:
        """An object is complete at `pos`: if it is an item of a batch, learn from it, and take what follows."""
        meta, stack = machine.meta, machine.stack
        # In the top-level state every key must be looked at, see `stop_key`.
        if len(meta) < 2 or not meta[-1]:
            return pos
        container = type(meta[-1][-1])
        if container is list:
            kind = self.LIST
        elif container is dict and len(stack) % 2 == 0 and type(stack[-2]) is Obj:
            kind = self.PAIR
        else:
            return pos
        start = self._begins.get(len(meta), pos)
        if self._scans > 0 and 0 < pos - start <= _ITEM and len(self.templates[kind]) < _TEMPLATES:
            self._learn(machine, kind, start, pos)
        pos = self._take(machine, kind, pos)
        self._begins[len(meta)] = pos
        return pos

    def make(self, machine: Stack, index: int) -> Node:
        """The value of a memo entry that was written by an item that was taken."""
        number = bisect_right(self._bases, index) - 1
        run = self.runs_taken[number] if number >= 0 else None
        if run is None or index >= run.first + int(run.memos.sum()):
            raise Bail
        ends = run.first + np.cumsum(run.memos)
        at = int(np.searchsorted(ends, index, side="right"))
        template = self.templates[run.kind][int(run.template[at])]
        left = index - int(ends[at] - run.memos[at])
        row = int(run.row[at])
        for block in template.blocks:
            if row < block.count:
                break
            row -= block.count
        for event in template.events:
            writes = isinstance(event, tuple) or block.values[event][row] < 0
            if writes and left == 0:
                break
            left -= writes
        if isinstance(event, tuple):
            value = _fill(event[0], [int(column[row]) for column in block.values])
        else:
            pos, size = block.texts[event][row].tolist()
            value = self.data[pos : pos + size].decode("utf-8", "surrogatepass")
        machine.memo[index] = value
        return value

    # -- taking ----------------------------------------------------------------------------------------

    def _take(self, machine: Stack, kind: int, pos: int) -> int:
        if not self.templates[kind]:
            return pos
        if pos >= self.index[kind].stop:
            self._advance(kind, pos)
        index = self.index[kind]
        first = bisect_left(index.starts, pos)
        if first == len(index.starts) or index.starts[first] != pos:
            return pos
        last = index.breaks[bisect_left(index.breaks, first)] + 1
        memos = index.memos[first:last]
        self.runs_taken.append(
            _Taken(kind, index.template[first:last], index.row[first:last], memos, len(machine.memo))
        )
        self._bases.append(len(machine.memo))
        machine.memo.extend(repeat(MISSING, int(memos.sum())))
        machine.stack.append(Run(len(self.runs_taken) - 1, last - first))
        if kind == self.PAIR:
            machine.stack.append(Run(len(self.runs_taken) - 1, 0))
        return int(index.ends[last - 1])

    def _advance(self, kind: int, pos: int) -> None:
        """Go on to the window that begins at `pos`."""
        self.index[kind] = _Index(pos + _WINDOW)
        for number in range(len(self.templates[kind])):
            self._add(kind, number, pos)

    def _add(self, kind: int, number: int, pos: int) -> None:
        """Add one template's candidates to the window, from `pos` on."""
        index, template = self.index[kind], self.templates[kind][number]
        block = find(self.raw, template, pos, index.stop)
        rows = np.arange(template.rows, template.rows + len(block.starts), dtype=np.int32)
        template.blocks.append(block)
        template.rows += len(rows)
        every = np.concatenate([np.array(index.starts, np.int64), block.starts])
        order = np.argsort(every, kind="stable")
        starts = every[order]
        first = np.ones(len(starts), bool)
        first[1:] = starts[1:] != starts[:-1]  # should two templates fit one place, either is right
        order, starts = order[first], starts[first]
        index.starts = starts.tolist()
        index.ends = np.concatenate([index.ends, block.ends])[order]
        index.template = np.concatenate([index.template, np.full(len(rows), number, np.int8)])[order]
        index.row = np.concatenate([index.row, rows])[order]
        index.memos = np.concatenate([index.memos, block.memos])[order]
        block.drop_positions()
        last = np.ones(len(starts), bool)
        last[:-1] = index.ends[:-1] != starts[1:]
        index.breaks = np.flatnonzero(last).tolist()

    def _learn(self, machine: Stack, kind: int, start: int, stop: int) -> None:
        """Make a template of the item that the machine has just made, unless there is one."""
        self._scans -= 1
        tokens = tokenize(self.data, start, stop)
        template = make_template(machine, tokens, 1 + kind) if tokens else None
        if template is None:
            return
        shape = f"{kind} {template.parts!r}"
        if shape in self._shapes_seen:
            return
        self._shapes_seen.add(shape)
        self._scans = _SCANS
        self.templates[kind].append(template)
        if stop < self.index[kind].stop:
            self._add(kind, len(self.templates[kind]) - 1, stop)

    # -- handing out -----------------------------------------------------------------------------------

    def batches(self, kind: int) -> list[Batch]:
        """Everything that was taken of one kind, by shape."""
        numbers = [number for number, run in enumerate(self.runs_taken) if run.kind == kind]
        if not numbers:
            return []
        runs = [self.runs_taken[number] for number in numbers]
        template = np.concatenate([run.template for run in runs])
        row = np.concatenate([run.row for run in runs])
        memos = np.concatenate([run.memos for run in runs])
        sizes = np.array([len(run.row) for run in runs])
        before = np.cumsum(memos) - memos
        shift = np.array([run.first for run in runs]) - before[np.cumsum(sizes) - sizes]
        base = narrowed(before + np.repeat(shift, sizes))
        run_of = narrowed(np.repeat(np.array(numbers), sizes))
        batches = []
        for number, shape in enumerate(self.templates[kind]):
            rows_of_shape = np.flatnonzero(template == number)
            if len(rows_of_shape):
                batches.append(self._batch(shape, row[rows_of_shape], run_of[rows_of_shape], base[rows_of_shape]))
        return batches

    def _batch(self, template: Template, rows: Ints, run: Ints, base: Ints) -> Batch:
        values = [
            np.concatenate(column)[rows] for column in zip(*(block.values for block in template.blocks), strict=True)
        ]
        parts: list[tuple[Node, Ints]] = []
        at = base
        for event in template.events:
            if isinstance(event, tuple):
                if isinstance(event[0], (tuple, Obj)):
                    parts.append((event[0], at))
                at = at + 1
                continue
            # A reference to what the item itself wrote would be another one in each item.
            if bool(np.any(values[event] >= base)):
                raise Bail
            new = values[event] < 0
            if new.any():
                texts = np.concatenate([block.texts[event] for block in template.blocks if block.count])[rows[new]]
                self._write(at[new], texts)
                values[event] = np.where(new, at, values[event])
                at = at + new
        template.blocks.clear()
        return Batch(template.tree, run, base, values, parts)

    def _write(self, indexes: Ints, texts: Ints) -> None:
        """Note the strings that items wrote to the memo."""
        data, codes = self.data, self._codes
        numbers = [codes.setdefault(data[pos : pos + size], len(codes)) for pos, size in texts.tolist()]
        self._written.append((indexes, np.array(numbers, np.int32)))

    def texts(self, machine: Stack, indexes: Ints) -> tuple[Ints, list[str]]:
        """The strings that memo indexes refer to.

        Args:
            machine: The one that was run.
            indexes: (n,), once all `batches` were handed out.

        Returns:
            (n,) positions in a list, and the list of different strings.

        Raises:
            Bail: One of them is not a string.
        """
        keys, codes, strings = self._sorted_texts()
        unique, inverse = np.unique(indexes, return_inverse=True)
        positions = np.full(len(unique), -1, np.int64)
        if len(keys):
            nearest = np.minimum(np.searchsorted(keys, unique), len(keys) - 1)
            positions = np.where(keys[nearest] == unique, codes[nearest], -1)
        for position in np.flatnonzero(positions < 0).tolist():
            value = machine.memo[int(unique[position])]
            if type(value) is not str:
                raise Bail
            positions[position] = len(strings)
            strings.append(value)
        return positions[inverse], strings

    def _sorted_texts(self) -> tuple[Ints, Ints, list[str]]:
        """Memo indexes of the strings that items wrote, in order; which string each is; the different strings."""
        if self._sorted is None:
            try:
                strings = [raw.decode("utf-8", "surrogatepass") for raw in self._codes]
            except UnicodeDecodeError:
                raise Bail from None
            keys, codes = (
                np.concatenate([np.zeros(0, np.int32), *(pair[n] for pair in self._written)]) for n in (0, 1)
            )
            order = np.argsort(keys)
            self._sorted = keys[order], codes[order], strings
            self._codes, self._written = {}, []
        return self._sorted

    @staticmethod
    def referred(batches: list[Batch], indexes: Ints) -> Iterator[tuple[Batch, Node, Ints, Ints]]:
        """Parts of items that memo indexes refer to.

        Args:
            batches: Where to look.
            indexes: (n,).

        Yields:
            A batch and a part of its tree; which of its items; and which of `indexes` refer to these.
        """
        for batch in batches:
            for tree, memo_indexes in batch.parts:
                item = np.minimum(np.searchsorted(memo_indexes, indexes), len(memo_indexes) - 1)
                hit = np.flatnonzero(memo_indexes[item] == indexes)
                if len(hit):
                    yield batch, tree, item[hit], hit


def _fill(node: Node, values: list[int]) -> Node:
    """One item's own copy of a part of the tree, if nothing can change it afterwards."""
    if type(node) is tuple:
        return tuple(_fill(item, values) for item in node)
    if type(node) is Obj and node.kind == "reduce" and node.state is None and node.items is None and node.pairs is None:
        return Obj(node.func, _fill(node.args, values))
    if type(node) is Slot and not node.is_ref:
        return values[node.index]
    if node is None or type(node) in (str, int, bool):
        return node
    raise Bail
