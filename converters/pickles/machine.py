"""An interpreter of pickle bytes that can only build data.

It accepts the binary opcodes that CPython's picklers emit for protocols 2 to 5 and refuses the others, so
there is no opcode here that imports, calls or sets an attribute. What a real unpickler would have executed
is kept as `Global`, `Obj` and `PersId`.

Honest picklers write in one fixed order, which the machine enforces, because every freedom is a way to show
one thing to this reader and another to the real one: a memo entry is written once and in sequence, only a
`Global` is called, state is set once and last, nothing but plain data is thrown away, nothing follows STOP.
"""

from __future__ import annotations

import pickletools
import re
from itertools import repeat
from struct import Struct
from struct import error as StructError
from typing import TYPE_CHECKING, Any, Final, NoReturn

from converters.pickles.nodes import Global, Node, Obj, PersId, PickleFormatError, Run, Slot, UnsafePickle
from converters.pickles.policy import hostile

if TYPE_CHECKING:
    from collections.abc import Callable

    from converters.pickles.columns import Columns
    from converters.pickles.limits import Limits

__all__ = ["Machine"]

_U32: Final = Struct("<I").unpack_from
_I32: Final = Struct("<i").unpack_from
_U16: Final = Struct("<H").unpack_from
_U64: Final = Struct("<Q").unpack_from
_F64: Final = Struct(">d").unpack_from

_NAMES: Final = {ord(op.code): op.name for op in pickletools.opcodes}
_WIDTHS: Final = {
    ord(op.code): {-1: 0, -2: 1, -3: 4, -4: 4, -5: 8}.get(op.arg.n, op.arg.n) for op in pickletools.opcodes if op.arg
}
"""Bytes of each opcode's argument, or of the length that its argument begins with."""
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*)*\Z", re.ASCII)
_SCALARS: Final = frozenset({str, bytes, type(None), bool, Global, Obj, PersId, Run, Slot})
_KEYS: Final = _SCALARS | {int, float, tuple, frozenset}
_DROPPABLE: Final = frozenset({str, bytes, type(None), bool, int, float, list, dict, tuple, set, frozenset, bytearray})
_TRICKS: Final = frozenset({
    "__builtins__", "__class__", "__code__", "__del__", "__getattr__", "__getattribute__", "__globals__", "__reduce__",
    "__reduce_ex__", "__setstate__", "__subclasshook__",
})  # fmt: skip
"""Attributes that would turn an object into something else; pydantic's `__dict__` is not among them."""
MISSING: Final = object()
"""Fills the memo where there is no value: below the first index of a pickler that does not count from 0 (Python 2
counts from 1), and where `Columns` read items without making them."""


class _Char(str):
    """Copying an instance of a subclass makes a new plain string, also of one character."""

    __slots__ = ()


class Machine:
    """One run over one pickle.

    Args:
        data: The bytes; the pickle may be followed by others.
        limits: What to refuse.
        what: Names the bytes in errors: "common.pt: data.pkl".
        start: Where the pickle begins.
        stop_key: Stop when this key of the top-level object's state is reached, as if the state ended there.
        columns: Reads runs of like items much faster, into arrays; None to make every item.
    """

    def __init__(
        self,
        data: bytes,
        limits: Limits,
        what: str,
        *,
        start: int = 0,
        stop_key: str | None = None,
        columns: Columns | None = None,
    ) -> None:
        self.data = data
        self.limits = limits
        self.what = what
        self.pos = start
        self.stop_key = stop_key
        self.columns = columns
        self.stopped_at: int | None = None
        self.stack: list[Node] = []
        self.meta: list[list[Node]] = []
        self.memo: list[Node] = []
        self.chars: set[str] = set()
        size = len(data) - start
        self.room = limits.memory(size)
        self.max_ops = limits.ops(size)
        self.number_keys = limits.number_keys
        self.tuple_keys = limits.tuple_keys
        self.rare: dict[int, Callable[[int], int]] = {
            code: getattr(self, f"_op_{name}") for code, name in _HANDLERS.items()
        }

    # -- running ---------------------------------------------------------------------------------------

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
        width = _WIDTHS.get(code[0], 0) if code else 0
        if not code or self.pos + 1 + width > len(self.data):
            return "it ends before STOP"
        return "it uses a value that is not there"

    def _loop(self) -> None:
        """The opcodes that make up nearly all of a pickle, inline: one call per opcode would halve the speed.

        `self.pos` is the opcode being executed whenever something else than this loop can look at it.
        """
        data, memo, stack, rare = self.data, self.memo, self.stack, self.rare
        pos = self.pos
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
                    if self.room < 0 or len(memo) > self.limits.memo:
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
                    if self.room < 0 or len(memo) > self.limits.memo:
                        self.out_of_room(pos)
            self.fail(pos, f"it has more than {self.max_ops} opcodes")
        except (IndexError, StructError):
            self.pos = pos
            raise

    # -- errors ----------------------------------------------------------------------------------------

    def fail(self, pos: int, why: str) -> NoReturn:
        """Refuse the pickle because of the opcode at `pos`."""
        raise PickleFormatError(f"{self.what} is not a pickle that can be read: {why}", details=[self.where(pos)])

    def unsafe(self, pos: int, why: str) -> NoReturn:
        """Refuse the pickle because the opcode at `pos` plays a trick on its reader."""
        raise UnsafePickle(
            f"{self.what}: {why} at byte {pos}",
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

    def _text(self, start: int, size: int) -> int:
        text = self._take(start, size).decode("utf-8", "surrogatepass")
        if text == self.stop_key and self._in_top_state():
            self.stopped_at = self.pos
            self._op_setitems(self.pos)
            self._op_build(self.pos)
            return -1
        if size == 1:
            text = self._distinct(text)
        self.stack.append(text)
        return start + size

    def _distinct(self, text: str) -> str:
        """A one-character string as an object of its own.

        Sharing goes by identity, and Python keeps one object per character where the writer may have had two
        (`str(0)` is new each time): `dumps` would then refer back instead of writing it again.
        """
        if text in self.chars:
            return str(_Char(text))
        self.chars.add(text)
        return text

    def _in_top_state(self) -> bool:
        """Whether a string read now is a key of the state of the outermost object."""
        if len(self.meta) != 1 or len(self.stack) % 2:
            return False
        below = self.meta[0]
        return len(below) == 2 and type(below[0]) is Obj and type(below[1]) is dict

    def _op_text8(self, pos: int) -> int:
        return self._text(pos + 2, self.data[pos + 1])

    def _op_text32(self, pos: int) -> int:
        return self._text(pos + 5, _U32(self.data, pos + 1)[0])

    def _op_text64(self, pos: int) -> int:
        return self._text(pos + 9, _U64(self.data, pos + 1)[0])

    def _bytes(self, start: int, size: int) -> int:
        raw = self._take(start, size)
        # As in _distinct: slicing one byte gives a shared object, copying a bytearray never does.
        self.stack.append(raw if size != 1 else bytes(bytearray(raw)))
        return start + size

    def _op_bytes8(self, pos: int) -> int:
        return self._bytes(pos + 2, self.data[pos + 1])

    def _op_bytes32(self, pos: int) -> int:
        return self._bytes(pos + 5, _U32(self.data, pos + 1)[0])

    def _op_bytes64(self, pos: int) -> int:
        return self._bytes(pos + 9, _U64(self.data, pos + 1)[0])

    def _op_bytearray64(self, pos: int) -> int:
        size: int = _U64(self.data, pos + 1)[0]
        self.stack.append(bytearray(self._take(pos + 9, size)))
        return pos + 9 + size

    def _int(self, start: int, size: int) -> int:
        if not 0 <= size <= self.limits.int_bytes:
            self.unsafe(self.pos, f"an integer of {size} bytes")
        self.stack.append(int.from_bytes(self._take(start, size), "little", signed=True))
        return start + size

    def _op_long8(self, pos: int) -> int:
        return self._int(pos + 2, self.data[pos + 1])

    def _op_long32(self, pos: int) -> int:
        return self._int(pos + 5, _I32(self.data, pos + 1)[0])

    def _op_float64(self, pos: int) -> int:
        self.stack.append(_F64(self.data, pos + 1)[0])
        return pos + 9

    def _op_true(self, pos: int) -> int:
        self.stack.append(True)
        return pos + 1

    def _op_false(self, pos: int) -> int:
        self.stack.append(False)
        return pos + 1

    def _op_frame(self, pos: int) -> int:
        if _U64(self.data, pos + 1)[0] > len(self.data) - pos - 9:
            self.fail(pos, "a frame is longer than the rest of the file")
        return pos + 9

    # -- containers ------------------------------------------------------------------------------------

    def _op_empty_list(self, pos: int) -> int:
        self.stack.append([])
        self.room -= 64
        return pos + 1

    def _op_empty_dict(self, pos: int) -> int:
        self.stack.append({})
        self.room -= 80
        return pos + 1

    def _op_empty_set(self, pos: int) -> int:
        self.stack.append(set())
        self.room -= 224
        return pos + 1

    def _op_tuple3(self, pos: int) -> int:
        stack = self.stack
        last, middle = stack.pop(), stack.pop()
        stack[-1] = (stack[-1], middle, last)
        self.room -= 80
        return pos + 1

    def _op_tuple_marked(self, pos: int) -> int:
        items = self.pop_mark()
        self.stack.append(tuple(items))
        self.room -= 56 + 8 * len(items)
        return pos + 1

    def _op_append(self, pos: int) -> int:
        value = self.stack.pop()
        self._extend(self.stack[-1], [value], pos)
        return pos + 1

    def _op_appends(self, pos: int) -> int:
        items = self.pop_mark()
        self._extend(self.stack[-1], items, pos)
        return pos + 1

    def _extend(self, target: Node, items: list[Node], pos: int) -> None:
        if type(target) is list:
            target.extend(items)
        elif type(target) is Obj and target.state is None and target.pairs is None:
            if target.items is None:
                target.items = []
            target.items.extend(items)
        else:
            self.unsafe(pos, f"elements appended to a {type(target).__name__}")
        self.room -= 9 * len(items)

    def _op_setitem(self, pos: int) -> int:
        value, key = self.stack.pop(), self.stack.pop()
        self._update(self.stack[-1], [key, value], pos)
        return pos + 1

    def _op_setitems(self, pos: int) -> int:
        items = self.pop_mark()
        self._update(self.stack[-1], items, pos)
        return pos + 1

    def _update(self, target: Node, items: list[Node], pos: int) -> None:
        if len(items) % 2:
            self.fail(pos, "a dictionary key has no value")
        if type(target) is dict:
            for key, value in zip(items[::2], items[1::2], strict=True):
                if type(key) not in _SCALARS:
                    self.check_key(key, pos)
                target[key] = value
        elif type(target) is Obj and target.state is None:
            if target.pairs is None:
                target.pairs = []
            target.pairs.extend(zip(items[::2], items[1::2], strict=True))
        else:
            self.unsafe(pos, f"entries set on a {type(target).__name__}")
        self.room -= 52 * len(items)

    def _op_additems(self, pos: int) -> int:
        items = self.pop_mark()
        target = self.stack[-1]
        if type(target) is not set:
            self.unsafe(pos, f"elements added to a {type(target).__name__}")
        for item in items:
            self.check_key(item, pos)
        target.update(items)
        self.room -= 64 * len(items)
        return pos + 1

    def _op_frozenset_marked(self, pos: int) -> int:
        items = self.pop_mark()
        for item in items:
            self.check_key(item, pos)
        self.stack.append(frozenset(items))
        self.room -= 224 + 64 * len(items)
        return pos + 1

    def check_key(self, key: Node, pos: int) -> None:
        """Refuse a dict key whose hash is expensive, or can be made to collide at will."""
        kind = type(key)
        if kind in _SCALARS:
            return
        if kind in (int, float):
            # Within 64 bits at most nine integers share a hash; beyond, any number of them.
            if kind is int and not -(1 << 63) <= key < 1 << 63:
                self.unsafe(pos, "a dictionary key of more than 64 bits")
            self.number_keys -= 1
        elif kind in (tuple, frozenset):
            self.tuple_keys -= 1
            if not self._small(key):
                self.unsafe(pos, "a dictionary key that is a deep or long tuple, or cannot be one")
        else:
            self.fail(pos, f"a {kind.__name__} cannot be a dictionary key")
        if self.number_keys < 0 or self.tuple_keys < 0:
            self.unsafe(pos, "too many dictionary keys that are numbers or tuples")

    def _small(self, key: Node) -> bool:
        level, leaves = [key], 0
        for _ in range(self.limits.key_depth + 1):
            inner = [item for item in level if type(item) in (tuple, frozenset)]
            leaves += len(level)
            if leaves + sum(len(item) for item in inner) > self.limits.key_leaves:
                return False
            if any(type(item) not in _KEYS for item in level):
                return False
            if not inner:
                return True
            level = [item for group in inner for item in group]
        return False

    # -- what a real unpickler would execute ------------------------------------------------------------

    def _global(self, module: Node, name: Node, pos: int) -> None:
        for part in (module, name):
            if type(part) is not str or len(part) > self.limits.name_chars or not _NAME.match(part):
                self.unsafe(pos, f"a global whose name is not one ({part!r:.80})")
        found = Global(module, name, pos)
        if hostile(found):
            raise UnsafePickle(
                f"{self.what}: hostile global {found.path} at byte {pos}",
                details=[self.where(pos), "loading this file with pickle or torch.load could run code"],
                hint="do not load the file with anything else; ask whoever wrote it",
            )
        self.stack.append(found)
        self.room -= 216

    def _op_global_text(self, pos: int) -> int:
        middle = self.data.find(b"\n", pos + 1, pos + 2 + 4 * self.limits.name_chars)
        end = self.data.find(b"\n", middle + 1, middle + 2 + 4 * self.limits.name_chars)
        if middle < 0 or end < 0:
            self.fail(pos, "a global's name does not end")
        self._global(self.data[pos + 1 : middle].decode(), self.data[middle + 1 : end].decode(), pos)
        return end + 1

    def _op_stack_global(self, pos: int) -> int:
        name, module = self.stack.pop(), self.stack.pop()
        self._global(module, name, pos)
        return pos + 1

    def _callee(self, func: Node, pos: int) -> Global:
        if type(func) is not Global:
            self.unsafe(pos, f"a call of something that is not a plain name ({type(func).__name__})")
        return func

    def _arguments(self, args: Node, pos: int) -> tuple[Node, ...]:
        if type(args) is not tuple:
            self.fail(pos, f"a call whose arguments are a {type(args).__name__}")
        return args

    def _op_reduce(self, pos: int) -> int:
        args = self._arguments(self.stack.pop(), pos)
        self.stack[-1] = Obj(self._callee(self.stack[-1], pos), args)
        self.room -= 104
        return pos + 1

    def _op_newobj(self, pos: int) -> int:
        args = self._arguments(self.stack.pop(), pos)
        self.stack[-1] = Obj(self._callee(self.stack[-1], pos), args, None, "newobj")
        self.room -= 104
        return pos + 1

    def _op_newobj_ex(self, pos: int) -> int:
        kwargs = self.stack.pop()
        args = self._arguments(self.stack.pop(), pos)
        if type(kwargs) is not dict:
            self.fail(pos, f"a call whose keyword arguments are a {type(kwargs).__name__}")
        self.stack[-1] = Obj(self._callee(self.stack[-1], pos), args, kwargs, "newobj_ex")
        self.room -= 104
        return pos + 1

    def _op_build(self, pos: int) -> int:
        state = self.stack.pop()
        target = self.stack[-1]
        # On a class instead of an instance this would change the class for the rest of the process.
        if type(target) is not Obj:
            self.unsafe(pos, f"attributes set on a {type(target).__name__}")
        if target.state is not None:
            self.unsafe(pos, "attributes set twice on one object")
        for half in state if type(state) is tuple else (state,):
            if type(half) is dict and not _TRICKS.isdisjoint(half):
                self.unsafe(pos, f"an object that replaces its own {min(_TRICKS & half.keys())}")
        target.state = state
        return pos + 1 if self.columns is None else self.columns.after_build(self, pos + 1)

    def _op_persid(self, pos: int) -> int:
        self.stack[-1] = PersId(self.stack[-1])
        self.room -= 56
        return pos + 1


_HANDLERS: Final = {
    0x72: "binput_long", 0x28: "mark", 0x30: "pop", 0x31: "pop_to_mark", 0x8C: "text8", 0x58: "text32",
    0x8D: "text64", 0x43: "bytes8", 0x42: "bytes32", 0x8E: "bytes64", 0x96: "bytearray64", 0x8A: "long8",
    0x8B: "long32", 0x47: "float64", 0x88: "true", 0x89: "false", 0x95: "frame", 0x5D: "empty_list",
    0x7D: "empty_dict", 0x8F: "empty_set", 0x87: "tuple3", 0x74: "tuple_marked", 0x61: "append",
    0x65: "appends", 0x73: "setitem", 0x75: "setitems", 0x90: "additems", 0x91: "frozenset_marked",
    0x63: "global_text", 0x93: "stack_global", 0x52: "reduce", 0x81: "newobj", 0x92: "newobj_ex",
    0x62: "build", 0x51: "persid",
}  # fmt: skip
