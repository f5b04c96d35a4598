"""Reading millions of like items out of a pickle as arrays, without making them.

A `.metadata` of 1 M chunks has 70 M opcodes, of which all but a few thousand belong to items of the same few
shapes: `ChunkStorageMetadata` in lists, `MetadataIndex: _StorageInfo` in a dict. The machine makes the first
item of a shape. Its opcodes become a template, in which integers, strings and references are slots:

    j <class> ) 81 94 } 94 ( j <"offsets"> j <Size> K 0 K 1 86 94 85 94 R 94 ...        the item
    [ constant bytes                              ] [0] [1] [ constant ...    ]        the template

A template is also a regular expression. Where the machine stands at the first byte of an item that matches one, that
item and all that follow it are passed over, and where each began is noted. Whatever does not match (a frame header amid
an item, the end of a batch) the machine executes as ever, so the templates never need to be complete. In the end numpy
reads the slots of all items of a shape at once.

Nothing is assumed about the classes. What is taken is what the machine would have executed: the opcodes of a
template have no other effects than to push one item, and to write memo entries, which are counted and made when
something refers to them. Where that reasoning would not hold, `Bail` is raised, and the caller reads the pickle
again without columns.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from typing import Final, NamedTuple

import numpy as np

from converters.pickles.nodes import Node, Obj, Run, Slot
from converters.pickles.stack import MISSING, Stack
from converters.pickles.templates import MARGIN, Ints, Template, make_template, narrowed

_ITEM: Final = 600
"""Bytes of the longest item that becomes a template."""
_TEMPLATES: Final = 24
"""Templates per kind."""
_SCANS: Final = 4000
"""Items looked at in vain before we stop looking for templates."""
_RUN: Final = 1000
"""Items of the longest run, as many as a batch of CPython's pickler."""


class Bail(Exception):
    """The pickle does something that columns cannot follow; read it without."""


class _TakenRun(NamedTuple):
    """Items that were taken, one behind the other.

    Args:
        kind: `LIST` or `PAIR`.
        first: Position of the first one among all items of that kind.
        base: The first memo index that they write.
    """

    kind: int
    first: int
    base: int


@dataclass(eq=False)
class Batch:
    """The n items of one shape, in the order of the file.

    Args:
        tree: The item (in a list) or (key, value) (in a dict), with a `Slot` where items differ.
        run: (n,) the number of the `Run` that each item belongs to.
        values: By slot, (n,): integers, or memo indexes (also of a string that the item itself wrote).
        parts: Parts of the tree that other items may refer to, with (n,) the memo index of each.
    """

    tree: Node
    run: Ints
    values: list[Ints]
    parts: list[tuple[Node, Ints]]


class _Kind:
    """Templates of one kind of item, and what was taken: first byte and template of each item."""

    def __init__(self) -> None:
        self.templates: list[Template] = []
        self.starts = array("q")
        self.shapes = array("b")


class Columns:
    """Takes runs of like items for a `Machine`, and hands them out as `Batch`es when it is done.

    Args:
        data: The pickle.
    """

    LIST: Final = 0
    PAIR: Final = 1

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.runs: list[_TakenRun] = []
        self._kinds = (_Kind(), _Kind())
        self._begins: dict[int, int] = {}
        self._scans = _SCANS
        self._codes: dict[bytes, int] = {}
        self._written: list[tuple[Ints, Ints]] = []

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
        if self._scans > 0 and 0 < pos - start <= _ITEM:
            self._learn(machine, kind, start, pos)
        pos = self._take(machine, kind, pos)
        self._begins[len(meta)] = pos
        return pos

    def make(self, machine: Stack, index: int) -> Node:
        """The value of a memo entry that was written by an item that was taken."""
        number = bisect_right(self.runs, index, key=lambda run: run.base) - 1
        if number < 0:
            raise Bail
        kind, item, base = self.runs[number]
        templates, starts, shapes = self._kinds[kind].templates, self._kinds[kind].starts, self._kinds[kind].shapes
        while item < len(shapes) and index >= base + len(templates[shapes[item]].memo):
            base += len(templates[shapes[item]].memo)
            item += 1
        if item == len(shapes):
            raise Bail
        template = templates[shapes[item]]
        values = [column[0].tolist() for column in template.values(self.data, np.array([starts[item]]))]
        entry = template.memo[index - base]
        if isinstance(entry, tuple):
            value = _fill(entry[0], values)
        else:
            pos, size = values[entry]
            value = self.data[pos : pos + size].decode("utf-8", "surrogatepass")
        machine.memo[index] = value
        return value

    # -- taking ----------------------------------------------------------------------------------------

    def _take(self, machine: Stack, kind: int, pos: int) -> int:
        taken, data, stop = self._kinds[kind], self.data, len(self.data) - MARGIN
        first, base, memos = len(taken.starts), len(machine.memo), 0
        for _ in range(_RUN):
            for shape, template in enumerate(taken.templates):
                match = template.match(data, pos, stop)
                if match is not None:
                    taken.starts.append(pos)
                    taken.shapes.append(shape)
                    memos += len(template.memo)
                    pos = match.end()
                    break
            else:
                break
        count = len(taken.starts) - first
        if count:
            machine.memo.extend(repeat(MISSING, memos))
            machine.stack.append(Run(len(self.runs), count))
            if kind == self.PAIR:
                machine.stack.append(Run(len(self.runs), 0))
            self.runs.append(_TakenRun(kind, first, base))
        return pos

    def _learn(self, machine: Stack, kind: int, start: int, stop: int) -> None:
        """Make a template of the item that the machine has just made, unless there is one."""
        templates = self._kinds[kind].templates
        if len(templates) == _TEMPLATES or any(template.match(self.data, start, stop) for template in templates):
            return
        self._scans -= 1
        template = make_template(machine, start, stop, 1 + kind)
        if template is not None:
            self._scans = _SCANS
            templates.append(template)

    # -- handing out -----------------------------------------------------------------------------------

    def batches(self, kind: int) -> list[Batch]:
        """Everything that was taken of one kind, by shape."""
        taken, numbers = self._kinds[kind], [n for n, run in enumerate(self.runs) if run.kind == kind]
        if not numbers:
            return []
        starts, shapes = np.array(taken.starts), np.array(taken.shapes)
        firsts, bases = np.array([self.runs[number][1:] for number in numbers]).T
        sizes = np.diff(firsts, append=len(starts))
        memos = np.array([len(template.memo) for template in taken.templates])[shapes]
        before = np.cumsum(memos) - memos
        base = narrowed(before + np.repeat(bases - before[firsts], sizes))
        run = narrowed(np.repeat(np.array(numbers), sizes))
        batches = []
        for number, template in enumerate(taken.templates):
            rows = np.flatnonzero(shapes == number)
            if len(rows):
                batches.append(self._batch(template, starts[rows], run[rows], base[rows]))
        taken.templates, taken.starts, taken.shapes = [], array("q"), array("b")
        return batches

    def _batch(self, template: Template, starts: Ints, run: Ints, base: Ints) -> Batch:
        values = template.values(self.data, starts)
        parts: list[tuple[Node, Ints]] = []
        for slot in template.parts:
            # A reference to what the item itself wrote would be another one in each item.
            if isinstance(slot, Slot) and slot.kind == "reference" and bool(np.any(values[slot.index] >= base)):
                raise Bail
        for number, entry in enumerate(template.memo):
            if not isinstance(entry, tuple):
                self._write(base + number, values[entry])
                values[entry] = base + number
            elif isinstance(entry[0], (tuple, Obj)):
                parts.append((entry[0], base + number))
        return Batch(template.tree, run, values, parts)

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
        keys, codes, strings = self._sorted_texts
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

    @cached_property
    def _sorted_texts(self) -> tuple[Ints, Ints, list[str]]:
        """Memo indexes of the strings that items wrote, in order; which string each is; the different strings."""
        try:
            strings = [raw.decode("utf-8", "surrogatepass") for raw in self._codes]
        except UnicodeDecodeError:
            raise Bail from None
        written = [(np.zeros(0, np.int32), np.zeros(0, np.int32)), *self._written]
        keys, codes = (np.concatenate(arrays) for arrays in zip(*written, strict=True))
        order = np.argsort(keys)
        self._codes, self._written = {}, []
        return keys[order], codes[order], strings


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
