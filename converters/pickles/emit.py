"""Writes an inert tree as a pickle, byte for byte as CPython's C pickler would have written it.

Everything that decides its bytes is reproduced: which values are memoized and in which order, that sharing
goes by identity, batches of 1000, frames of 64 KiB. A tree that `parse` made keeps the identities of the
file, so unedited it comes out as it went in.
"""

from __future__ import annotations

import struct
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from converters.errors import RequestError
from converters.pickles.nodes import Global, Node, Obj, PersId

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["dumps"]

_BATCH: Final = 1000
_FRAME: Final = 64 * 1024
_DEPTH: Final = 180
"""Nesting we write: three Python calls per level must fit in the interpreter's recursion limit."""


def dumps(node: Node, protocol: int, refer: Callable[[PersId], Node] | None = None) -> bytes:
    """Write a tree.

    Args:
        node: What `parse` returned, edited or not: plain data and nodes only.
        protocol: 2 to 5. Keep the file's own (its second byte): torch's `weights_only` reader knows
            protocol 2 only, and torch DCP writes `.metadata` with 4.
        refer: What to write for a reference when its turn comes, as a pickler's `persistent_id`; by default its value.

    Returns:
        The pickle, identical to the parsed one if nothing was edited and CPython wrote it.

    Raises:
        RequestError: A value that is neither plain data nor a node, or nesting deeper than 180.
    """
    if not 2 <= protocol <= 5:
        raise RequestError(f"pickle protocol {protocol} is not one we write; use 2 to 5")
    emitter = _Emitter(protocol, refer)
    emitter.save(node, 0)
    return emitter.finish()


class _Emitter:
    def __init__(self, protocol: int, refer: Callable[[PersId], Node] | None = None) -> None:
        self.protocol = protocol
        self.refer = refer
        self.done = bytearray(b"\x80" + bytes([protocol]))
        self.frame = bytearray()
        self.memo: dict[int, int] = {}
        self.keep: list[Node] = []
        """Values made here: the memo goes by identity, so they must not be freed and their ids reused."""
        self.savers: dict[type, Callable[[Any, int], None]] = {
            bytes: self._bytes, str: self._str, tuple: self._tuple, list: self._list, dict: self._dict,
            set: self._set, frozenset: self._frozenset, bytearray: self._bytearray, Global: self._global,
            Obj: self._obj,
        }  # fmt: skip

    # -- output ----------------------------------------------------------------------------------------

    def write(self, raw: bytes) -> None:
        self.frame += raw

    def write_large(self, head: bytes, payload: bytes) -> None:
        """Text or bytes: those of a frame's size stand outside of frames."""
        if len(payload) < _FRAME or self.protocol < 4:
            self.frame += head
            self.frame += payload
            return
        self.commit()
        self.done += head
        self.done += payload

    def commit(self) -> None:
        """Close the frame under construction."""
        # The C pickler leaves out the header of a frame shorter than 4 bytes.
        if self.protocol >= 4 and len(self.frame) >= 4:
            self.done += b"\x95" + struct.pack("<Q", len(self.frame))
        self.done += self.frame
        self.frame = bytearray()

    def finish(self) -> bytes:
        self.write(b".")
        self.commit()
        return bytes(self.done)

    def memoize(self, node: Node) -> None:
        index = len(self.memo)
        self.memo[id(node)] = index
        if self.protocol >= 4:
            self.write(b"\x94")
        elif index < 256:
            self.write(b"q" + bytes([index]))
        else:
            self.write(b"r" + struct.pack("<I", index))

    def get(self, index: int) -> None:
        self.write(b"h" + bytes([index]) if index < 256 else b"j" + struct.pack("<I", index))

    # -- values ----------------------------------------------------------------------------------------

    def save(self, node: Node, depth: int) -> None:
        if len(self.frame) >= _FRAME and self.protocol >= 4:
            self.commit()
        kind = type(node)
        if kind is PersId:
            value = node.value
            if self.refer is not None:
                value = self.refer(node)
                self.keep.append(value)
            self.save(value, depth + 1)
            self.write(b"Q")
        elif node is None:
            self.write(b"N")
        elif kind is bool:
            self.write(b"\x88" if node else b"\x89")
        elif kind is int:
            self._int(node)
        elif kind is float:
            self.write(b"G" + struct.pack(">d", node))
        elif id(node) in self.memo:
            self.get(self.memo[id(node)])
        elif depth > _DEPTH:
            raise RequestError(f"a value nested deeper than {_DEPTH} cannot be written as a pickle")
        elif kind in self.savers:
            self.savers[kind](node, depth + 1)
        else:
            raise RequestError(f"a {kind.__name__} cannot be written into a pickle without running code")

    def _int(self, value: int) -> None:
        if 0 <= value < 256:
            self.write(b"K" + bytes([value]))
        elif 0 <= value < 65536:
            self.write(b"M" + struct.pack("<H", value))
        elif -(1 << 31) <= value < 1 << 31:
            self.write(b"J" + struct.pack("<i", value))
        else:
            size = value.bit_length() // 8 + 1
            raw = value.to_bytes(size, "little", signed=True)
            if value < 0 and size > 1 and raw[-1] == 0xFF and raw[-2] & 0x80:
                raw = raw[:-1]
            self.write(b"\x8a" + bytes([len(raw)]) if len(raw) < 256 else b"\x8b" + struct.pack("<i", len(raw)))
            self.write(raw)

    def _str(self, text: str, depth: int) -> None:
        raw = text.encode("utf-8", "surrogatepass")
        if len(raw) < 256 and self.protocol >= 4:
            head = b"\x8c" + bytes([len(raw)])
        elif len(raw) < 1 << 32:
            head = b"X" + struct.pack("<I", len(raw))
        else:
            head = b"\x8d" + struct.pack("<Q", len(raw))
        self.write_large(head, raw)
        self.memoize(text)

    def _bytes(self, raw: bytes, depth: int) -> None:
        if self.protocol < 3:
            # As CPython does: protocol 2 has no bytes, and Python 2 must be able to read it.
            args = (raw.decode("latin-1"), "latin1") if raw else ()
            func = Global("_codecs", "encode") if raw else Global("__builtin__", "bytes")
            self._substitute(raw, Obj(func, args), depth)
            return
        if len(raw) < 256:
            head = b"C" + bytes([len(raw)])
        elif len(raw) < 1 << 32:
            head = b"B" + struct.pack("<I", len(raw))
        else:
            head = b"\x8e" + struct.pack("<Q", len(raw))
        self.write_large(head, raw)
        self.memoize(raw)

    def _bytearray(self, raw: bytearray, depth: int) -> None:
        if self.protocol >= 5:
            self.write_large(b"\x96" + struct.pack("<Q", len(raw)), bytes(raw))
            self.memoize(raw)
        else:
            self._substitute(raw, Obj(self._builtin("bytearray"), (bytes(raw),) if raw else ()), depth)

    def _set(self, items: set[Node], depth: int) -> None:
        if self.protocol < 4:
            self._substitute(items, Obj(self._builtin("set"), (list(items),)), depth)
            return
        self.write(b"\x8f")
        self.memoize(items)
        rest = iter(items)
        while items:
            batch = list(islice(rest, _BATCH))
            self.write(b"(")
            for item in batch:
                self.save(item, depth)
            self.write(b"\x90")
            if len(batch) < _BATCH:  # as for a dict
                return

    def _frozenset(self, items: frozenset[Node], depth: int) -> None:
        if self.protocol < 4:
            self._substitute(items, Obj(self._builtin("frozenset"), (list(items),)), depth)
            return
        self.write(b"(")
        for item in items:
            self.save(item, depth)
        self.write(b"\x91")
        self.memoize(items)

    def _builtin(self, name: str) -> Global:
        return Global("__builtin__" if self.protocol < 3 else "builtins", name)

    def _substitute(self, node: Node, stand_in: Obj, depth: int) -> None:
        """Write a call in place of a value that this protocol has no opcode for."""
        self.keep.append(stand_in)
        self.keep.extend(stand_in.args)
        self.save(stand_in, depth)
        self.memo[id(node)] = self.memo[id(stand_in)]

    def _tuple(self, items: tuple[Node, ...], depth: int) -> None:
        if not items:
            self.write(b")")
            return
        if len(items) > 3:
            self.write(b"(")
        for item in items:
            self.save(item, depth)
        if id(items) in self.memo:
            # An element contained this tuple and wrote it: throw the elements away and take that one.
            self.write(b"1" if len(items) > 3 else b"0" * len(items))
            self.get(self.memo[id(items)])
            return
        self.write(b"t" if len(items) > 3 else (b"\x85", b"\x86", b"\x87")[len(items) - 1])
        self.memoize(items)

    def _list(self, items: list[Node], depth: int) -> None:
        self.write(b"]")
        self.memoize(items)
        if len(items) == 1:
            self.save(items[0], depth)
            self.write(b"a")
            return
        for at in range(0, len(items), _BATCH):
            self.write(b"(")
            for item in items[at : at + _BATCH]:
                self.save(item, depth)
            self.write(b"e")

    def _dict(self, node: dict[Node, Node], depth: int) -> None:
        self.write(b"}")
        self.memoize(node)
        if not node:
            return
        if len(node) == 1:
            for key, value in node.items():
                self.save(key, depth)
                self.save(value, depth)
            self.write(b"s")
            return
        rest = iter(node.items())
        while True:
            batch = list(islice(rest, _BATCH))
            self.write(b"(")
            for key, value in batch:
                self.save(key, depth)
                self.save(value, depth)
            self.write(b"u")
            # After a full batch the C pickler opens another one, even if nothing is left for it.
            if len(batch) < _BATCH:
                return

    # -- nodes -----------------------------------------------------------------------------------------

    def _global(self, node: Global, depth: int) -> None:
        if self.protocol >= 4:
            self.save(node.module, depth)
            self.save(node.name, depth)
            self.write(b"\x93")
        else:
            self.write(b"c" + node.module.encode() + b"\n" + node.name.encode() + b"\n")
        self.memoize(node)

    def _obj(self, node: Obj, depth: int) -> None:
        self.save(node.func, depth)
        self.save(node.args, depth)
        if node.kind == "newobj_ex":
            self.save(node.kwargs if node.kwargs is not None else {}, depth)
        self.write({"reduce": b"R", "newobj": b"\x81", "newobj_ex": b"\x92"}[node.kind])
        if id(node) in self.memo:
            self.write(b"0")
            self.get(self.memo[id(node)])
        else:
            self.memoize(node)
        if node.items:
            self._batches([(item,) for item in node.items], b"a", b"e", depth)
        if node.pairs:
            self._batches(node.pairs, b"s", b"u", depth)
        if node.state is not None:
            self.save(node.state, depth)
            self.write(b"b")

    def _batches(self, groups: Iterable[tuple[Node, ...]], one: bytes, many: bytes, depth: int) -> None:
        """Elements of a subclass: these come from an iterator, and are batched unlike those of a list or dict."""
        rest = iter(groups)
        while batch := list(islice(rest, _BATCH)):
            if len(batch) > 1:
                self.write(b"(")
            for group in batch:
                for item in group:
                    self.save(item, depth)
            self.write(many if len(batch) > 1 else one)
