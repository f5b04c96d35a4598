"""The state of the inert pickle machine: stack, marks, memo; plain values; refusals."""

from __future__ import annotations

import pickletools
from struct import Struct
from typing import TYPE_CHECKING, Final, NoReturn

from converters.pickles.nodes import Node, PickleFormatError, UnsafePickle

if TYPE_CHECKING:
    from converters.pickles.columns import Columns
    from converters.pickles.limits import Limits

_U32: Final = Struct("<I").unpack_from
_U64: Final = Struct("<Q").unpack_from
_F64: Final = Struct(">d").unpack_from

WIDTHS: Final = {
    ord(op.code): {-1: 0, -2: 1, -3: 4, -4: 4, -5: 8}.get(op.arg.n, op.arg.n) for op in pickletools.opcodes if op.arg
}
"""Bytes of each opcode's argument, or of the length that its argument begins with."""
_NAMES: Final = {ord(op.code): op.name for op in pickletools.opcodes}
_DROPPABLE: Final = frozenset({str, bytes, type(None), bool, int, float, list, dict, tuple, set, frozenset, bytearray})
MISSING: Final = object()
"""Fills the memo where there is no value: below the first index of a pickler that does not count from 0 (Python 2
counts from 1), and where `Columns` read items without making them."""


class Stack:
    """The state of one run over one pickle, and the opcodes that touch nothing but plain values.

    A method `_op_name` executes the opcode at `pos` and returns where the next one is, or -1 to stop.

    Args:
        data: The bytes; other bytes may follow the pickle.
        limits: What to refuse.
        label: Names the bytes in errors: "common.pt: data.pkl".
        stop_key: Stop when this key of the top-level object's state is reached, as if the state ended there.
        columns: Reads runs of like items much faster, into arrays; None to make every item.
    """

    def __init__(
        self,
        data: bytes,
        limits: Limits,
        label: str,
        *,
        stop_key: str | None = None,
        columns: Columns | None = None,
    ) -> None:
        self.data = data
        self.limits = limits
        self.label = label
        self.pos = 0
        self.stop_key = stop_key
        self.columns = columns
        self.stopped_at: int | None = None
        self.stack: list[Node] = []
        self.meta: list[list[Node]] = []
        self.memo: list[Node] = []
        self.chars: set[str] = set()
        self.room = limits.memory(len(data))
        self.max_ops = limits.ops(len(data))
        self.number_keys = limits.number_keys
        self.tuple_keys = limits.tuple_keys

    # -- errors ----------------------------------------------------------------------------------------

    def fail(self, pos: int, why: str) -> NoReturn:
        """Refuse the pickle because of the opcode at `pos`."""
        raise PickleFormatError(f"{self.label} is not a pickle that can be read: {why}", details=[self.where(pos)])

    def unsafe(self, pos: int, why: str) -> NoReturn:
        """Refuse the pickle because the opcode at `pos` plays a trick on its reader."""
        raise UnsafePickle(
            f"{self.label}: {why} at byte {pos}",
            details=[self.where(pos)],
            hint="no training framework writes this; do not load the file with anything else",
        )

    def where(self, pos: int) -> str:
        """`pos` and its opcode in words."""
        if not 0 <= pos < len(self.data):
            return f"at byte {pos}, the end"
        code = self.data[pos]
        return f"at byte {pos}, opcode 0x{code:02x} {_NAMES.get(code, 'unknown')}"

    def refused(self, pos: int) -> NoReturn:
        """An opcode that no CPython pickler of protocol 2 or later emits."""
        code = self.data[pos]
        self.fail(pos, f"opcode {_NAMES.get(code, hex(code))} is not one that Python writes for this protocol")

    def missing(self, pos: int) -> Node:
        """A GET of a memo entry that has no value (yet)."""
        if self.columns is not None:
            index = self.data[pos + 1] if self.data[pos] == 0x68 else _U32(self.data, pos + 1)[0]
            return self.columns.make(self, index)
        return self.fail(pos, "it uses a memo entry that was not written")

    def out_of_room(self, pos: int) -> NoReturn:
        """The objects, or the memo, exceed what a pickle of this size may cost."""
        self.unsafe(pos, "a pickle that expands beyond all measure")

    # -- memo, stack -----------------------------------------------------------------------------------

    def put(self, index: int, value: Node, pos: int) -> None:
        """Store a memo entry under an explicit index (protocols 2 and 3)."""
        memo = self.memo
        if self.columns is not None:
            self.columns.give_up()
        if index == len(memo) + 1 and not memo:
            memo.append(MISSING)
        if index != len(memo):
            self.unsafe(pos, f"memo entry {index} written out of sequence")
        memo.append(value)

    def _op_binput_long(self, pos: int) -> int:
        self.put(_U32(self.data, pos + 1)[0], self.stack[-1], pos)
        return pos + 5

    def _op_mark(self, pos: int) -> int:
        self.meta.append(self.stack)
        if len(self.meta) > self.limits.marks:
            self.unsafe(pos, f"nesting deeper than {self.limits.marks}")
        self.stack = []
        self.room -= 64
        return pos + 1 if self.columns is None else self.columns.after_mark(self, pos + 1)

    def pop_mark(self) -> list[Node]:
        """Everything above the last MARK, which is removed."""
        items = self.stack
        self.stack = self.meta.pop()
        return items

    def _op_pop(self, pos: int) -> int:
        self._drop(self.stack.pop(), pos)
        return pos + 1

    def _op_pop_to_mark(self, pos: int) -> int:
        for value in self.pop_mark():
            self._drop(value, pos)
        return pos + 1

    def _drop(self, value: Node, pos: int) -> None:
        # CPython drops values only around a tuple that contains itself; a dropped call is a hidden one.
        if type(value) not in _DROPPABLE:
            self.unsafe(pos, f"a value that is built and thrown away ({type(value).__name__})")

    # -- plain values ----------------------------------------------------------------------------------

    def _take(self, start: int, size: int) -> bytes:
        end = start + size
        if end > len(self.data):
            self.fail(self.pos, f"a value of {size} bytes does not fit in the {len(self.data) - start} that remain")
        self.room -= 56
        return self.data[start:end]

    def _sized(self, pos: int) -> tuple[int, int]:
        """First byte and length of a value whose length stands before it."""
        start = pos + 1 + WIDTHS[self.data[pos]]
        if start > len(self.data):
            self.fail(pos, "it ends before STOP")
        return start, int.from_bytes(self.data[pos + 1 : start], "little")

    def _op_bytes(self, pos: int) -> int:
        start, size = self._sized(pos)
        raw = self._take(start, size)
        # As in _distinct: slicing one byte gives a shared object, copying a bytearray never does.
        self.stack.append(raw if size != 1 else bytes(bytearray(raw)))
        return start + size

    def _op_bytearray(self, pos: int) -> int:
        start, size = self._sized(pos)
        self.stack.append(bytearray(self._take(start, size)))
        return start + size

    def _op_long(self, pos: int) -> int:
        start, size = self._sized(pos)
        if size > self.limits.int_bytes:
            self.unsafe(pos, f"an integer of {size} bytes")
        self.stack.append(int.from_bytes(self._take(start, size), "little", signed=True))
        return start + size

    def _op_float64(self, pos: int) -> int:
        self.stack.append(_F64(self.data, pos + 1)[0])
        return pos + 9

    def _op_bool(self, pos: int) -> int:
        self.stack.append(self.data[pos] == 0x88)
        return pos + 1

    def _op_frame(self, pos: int) -> int:
        if _U64(self.data, pos + 1)[0] > len(self.data) - pos - 9:
            self.fail(pos, "a frame is longer than the rest of the file")
        return pos + 9
