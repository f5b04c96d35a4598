"""An interpreter of pickle bytes that can only build data.

It accepts the binary opcodes that CPython's picklers emit for protocols 2 to 5 and refuses the others, so
there is no opcode here that imports, calls or sets an attribute. What a real unpickler would have executed
is kept as `Global`, `Obj` and `PersId`.

Honest picklers write in one fixed order, which the machine enforces, because every freedom is a way to show
one thing to this reader and another to the real one: a memo entry is written once and in sequence, only a
`Global` is called, state is set once and last, nothing but plain data is thrown away, nothing follows STOP.
"""

from __future__ import annotations

from itertools import repeat
from struct import Struct
from struct import error as StructError
from typing import TYPE_CHECKING, Any, Final

from converters.pickles.limits import Limits
from converters.pickles.nodes import Node, PickleFormatError, UnsafePickle
from converters.pickles.opcodes import HANDLERS, Opcodes
from converters.pickles.stack import MISSING, WIDTHS

if TYPE_CHECKING:
    from collections.abc import Callable

_U16: Final = Struct("<H").unpack_from
_U32: Final = Struct("<I").unpack_from
_I32: Final = Struct("<i").unpack_from


def parse(data: bytes, *, label: str = "pickle") -> Node:
    """Read one pickle that takes up all of `data`.

    Args:
        data: The bytes, protocol 2 to 5.
        label: Names the bytes in errors: `"common.pt: data.pkl"`.

    Returns:
        Plain data and inert nodes.

    Raises:
        PickleFormatError: Damaged, of a dialect that Python does not write, or beyond the limits.
        UnsafePickle: It names something hostile or plays a trick.
    """
    machine = Machine(data, Limits(), label)
    node = machine.run()
    machine.refuse_more()
    return node


class Machine(Opcodes):
    """One run over one pickle; see `Stack` for the arguments."""

    def _handlers(self) -> dict[int, Callable[[int], int]]:
        return {code: getattr(self, f"_op_{name}") for code, name in HANDLERS.items()}

    def run(self) -> Node:
        """Execute up to STOP.

        Returns:
            The value; `pos` is then the byte after STOP.

        Raises:
            PickleFormatError: Not a pickle that we read.
            UnsafePickle: A hostile name, or a trick.
        """
        if len(self.data) - self.pos > self.limits.data_bytes:
            self.fail(self.pos, f"it is larger than {self.limits.data_bytes} bytes")
        if self.data[self.pos : self.pos + 1] != b"\x80":
            self.fail(self.pos, "it does not begin with the PROTO opcode of a binary pickle")
        if not 2 <= int.from_bytes(self.data[self.pos + 1 : self.pos + 2], "little") <= 5:
            self.fail(self.pos, "its protocol is not 2, 3, 4 or 5")
        self.pos += 2
        try:
            self._loop()
        except (IndexError, StructError):
            self.fail(self.pos, self._what_ran_out())
        except UnicodeDecodeError:
            self.fail(self.pos, "a string is not UTF-8")
        if self.meta or len(self.stack) != 1:
            self.fail(self.pos - 1, "it stops with values left over or missing")
        return self.stack[0]

    def refuse_more(self) -> None:
        """Refuses bytes behind the pickle.

        Raises:
            UnsafePickle: There are some.
        """
        count = len(self.data) - self.pos
        if count:
            raise UnsafePickle(f"{self.label}: {count} bytes follow the end of the pickle at byte {self.pos}")

    def run_item(self, memo: Any) -> list[Node] | None:
        """Execute opcodes without PROTO, with a memo that may be any sequence with `append`.

        Returns:
            The values they leave, None if they do not stand on their own.
        """
        self.memo = memo
        self.pos = 0
        try:
            self._loop()
        except (PickleFormatError, IndexError, StructError):
            return None
        return None if self.meta else self.stack

    def _what_ran_out(self) -> str:
        code = self.data[self.pos : self.pos + 1]
        width = WIDTHS.get(code[0], 0) if code else 0
        if not code or self.pos + 1 + width > len(self.data):
            return "it ends before STOP"
        return "it uses a value that is not there"

    def _loop(self) -> None:
        """The opcodes that make up nearly all of a pickle, inline: one call per opcode would halve the speed.

        `self.pos` is the opcode being executed whenever something else than this loop can look at it.
        """
        data, memo, stack, rare = self.data, self.memo, self.stack, self._handlers()
        pos, most = self.pos, self.limits.memo
        try:
            for _ in repeat(None, self.max_ops):
                op = data[pos]
                if op == 0x94:  # MEMOIZE
                    memo.append(stack[-1])
                    pos += 1
                elif op == 0x6A:  # LONG_BINGET
                    value = memo[_U32(data, pos + 1)[0]]
                    stack.append(value if value is not MISSING else self.missing(pos))
                    pos += 5
                elif op == 0x68:  # BINGET
                    value = memo[data[pos + 1]]
                    stack.append(value if value is not MISSING else self.missing(pos))
                    pos += 2
                elif op == 0x4B:  # BININT1
                    stack.append(data[pos + 1])
                    pos += 2
                elif op == 0x4D:  # BININT2
                    stack.append(_U16(data, pos + 1)[0])
                    pos += 3
                elif op == 0x4A:  # BININT
                    stack.append(_I32(data, pos + 1)[0])
                    pos += 5
                elif op == 0x85:  # TUPLE1
                    stack[-1] = (stack[-1],)
                    self.room -= 64
                    pos += 1
                elif op == 0x86:  # TUPLE2
                    last = stack.pop()
                    stack[-1] = (stack[-1], last)
                    self.room -= 72
                    pos += 1
                elif op == 0x29:  # EMPTY_TUPLE
                    stack.append(())
                    pos += 1
                elif op == 0x4E:  # NONE
                    stack.append(None)
                    pos += 1
                elif op == 0x71:  # BINPUT
                    self.put(data[pos + 1], stack[-1], pos)
                    pos += 2
                elif op == 0x2E:  # STOP
                    self.pos = pos + 1
                    if self.room < 0 or len(memo) > most:
                        self.out_of_room(pos)
                    return
                else:
                    self.pos = pos
                    handler = rare.get(op)
                    if handler is None:
                        self.refused(pos)
                    pos = handler(pos)
                    if pos < 0:
                        return
                    stack = self.stack
                    if self.room < 0 or len(memo) > most:
                        self.out_of_room(pos)
            self.fail(pos, f"it has more than {self.max_ops} opcodes")
        except (IndexError, StructError):
            self.pos = pos
            raise
