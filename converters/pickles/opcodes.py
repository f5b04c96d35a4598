"""The opcodes that build text and containers, and those with which a real unpickler would import and call."""

from __future__ import annotations

import re
from typing import Final

from converters.pickles.nodes import Global, Kind, Node, Obj, PersId, Run, Slot, UnsafePickle
from converters.pickles.policy import hostile
from converters.pickles.stack import Stack

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*)*\Z", re.ASCII)
_SCALARS: Final = frozenset({str, bytes, type(None), bool, Global, Obj, PersId, Run, Slot})
_KEYS: Final = _SCALARS | {int, float, tuple, frozenset}
_EMPTY: Final[dict[int, tuple[type, int]]] = {0x5D: (list, 64), 0x7D: (dict, 80), 0x8F: (set, 224)}
"""What an opcode makes, and the bytes of it."""
_TRICKS: Final = frozenset({
    "__builtins__", "__class__", "__code__", "__del__", "__getattr__", "__getattribute__", "__globals__", "__reduce__",
    "__reduce_ex__", "__setstate__", "__subclasshook__",
})  # fmt: skip
"""Attributes that would turn an object into something else; pydantic's `__dict__` is not among them."""


class _Char(str):
    """Copying an instance of a subclass makes a new plain string, also of one character."""

    __slots__ = ()


class Opcodes(Stack):
    """See `Stack` for what a method `_op_name` is."""

    # -- containers ------------------------------------------------------------------------------------

    def _op_empty(self, pos: int) -> int:
        kind, room = _EMPTY[self.data[pos]]
        self.stack.append(kind())
        self.room -= room
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
        node = Global(module, name, pos)
        if hostile(module, name):
            raise UnsafePickle(
                f"{self.label}: hostile global {node.path} at byte {pos}",
                details=[self.where(pos), "loading this file with pickle or torch.load could run code"],
                hint="do not load the file with anything else; ask whoever wrote it",
            )
        self.stack.append(node)
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

    def _construct(self, pos: int, kind: Kind, kwargs: dict[str, Node] | None = None) -> int:
        args, func = self.stack.pop(), self.stack[-1]
        if type(args) is not tuple:
            self.fail(pos, f"a call whose arguments are a {type(args).__name__}")
        if type(func) is not Global:
            self.unsafe(pos, f"a call of something that is not a plain name ({type(func).__name__})")
        self.stack[-1] = Obj(func, args, kwargs, kind)
        self.room -= 104
        return pos + 1

    def _op_reduce(self, pos: int) -> int:
        return self._construct(pos, "reduce")

    def _op_newobj(self, pos: int) -> int:
        return self._construct(pos, "newobj")

    def _op_newobj_ex(self, pos: int) -> int:
        kwargs = self.stack.pop()
        if type(kwargs) is not dict:
            self.fail(pos, f"a call whose keyword arguments are a {type(kwargs).__name__}")
        return self._construct(pos, "newobj_ex", kwargs)

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

    # -- text -----------------------------------------------------------------------------------------

    def _op_text(self, pos: int) -> int:
        start, size = self._sized(pos)
        text = self._take(start, size).decode("utf-8", "surrogatepass")
        if text == self.stop_key and self._in_top_state():
            self.stopped_at = self.pos
            self._op_setitems(self.pos)  # finishes the outermost object with what its state holds so far
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


HANDLERS: Final = {
    0x72: "binput_long", 0x28: "mark", 0x30: "pop", 0x31: "pop_to_mark", 0x8C: "text", 0x58: "text", 0x8D: "text",
    0x43: "bytes", 0x42: "bytes", 0x8E: "bytes", 0x96: "bytearray", 0x8A: "long", 0x8B: "long", 0x47: "float64",
    0x88: "bool", 0x89: "bool", 0x95: "frame", 0x5D: "empty", 0x7D: "empty", 0x8F: "empty", 0x87: "tuple3",
    0x74: "tuple_marked", 0x61: "append", 0x65: "appends", 0x73: "setitem", 0x75: "setitems", 0x90: "additems",
    0x91: "frozenset_marked", 0x63: "global_text", 0x93: "stack_global", 0x52: "reduce", 0x81: "newobj",
    0x92: "newobj_ex", 0x62: "build", 0x51: "persid",
}  # fmt: skip
