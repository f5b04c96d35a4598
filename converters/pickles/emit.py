"""Writes an inert tree as a pickle, byte for byte as CPython's C pickler would have written it.

Python's own pickler writes it, taught the nodes. Where its Python and its C version differ, in the batches of 1000, the C
version's bytes are made. A tree that `parse` made keeps the identities of the file, so unedited it comes out as it went in.

Source: CPython 3.11, Lib/pickle.py (`_Pickler`) and Modules/_pickle.c (`batch_list_exact`, `batch_dict_exact`, `save_set`).
"""

from __future__ import annotations

import codecs
import io
import pickle
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from converters.errors import RequestError
from converters.pickles.nodes import Global, Node, Obj, PersId

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

_BATCH: Final = 1000
_DEPTH: Final = 180
"""Nesting we write: four Python calls per level must fit in the interpreter's recursion limit."""

_PYTHON: Any = pickle._Pickler  # typeshed declares a part of it
_INHERITED = (type(None), bool, int, float, bytes, bytearray, str, tuple, frozenset)
_CALLED = (codecs.encode, bytes, bytearray, set, frozenset)  # what stands for a value that a protocol has no opcode for
_BUILD = {"reduce": pickle.REDUCE, "newobj": pickle.NEWOBJ, "newobj_ex": pickle.NEWOBJ_EX}


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
    out = io.BytesIO()
    _Pickler(out, protocol, refer).dump(node)
    return out.getvalue()


class _Pickler(_PYTHON):  # type: ignore[misc]
    def __init__(self, out: io.BytesIO, protocol: int, refer: Callable[[PersId], Node] | None) -> None:
        super().__init__(out, protocol)
        self.refer, self.depth = refer, 0

    def persistent_id(self, obj: Node) -> Node:
        if type(obj) is not PersId:
            return None
        return obj.value if self.refer is None else self.refer(obj)

    def save(self, obj: Node, save_persistent_id: bool = True) -> None:
        self.depth += 1
        super().save(obj, save_persistent_id)
        self.depth -= 1

    def reducer_override(self, obj: Node) -> Any:
        """Called for every value that is not a repetition, before it is written."""
        if self.depth > _DEPTH + 1:
            raise RequestError(f"a value nested deeper than {_DEPTH} cannot be written as a pickle")
        if type(obj) not in self.dispatch and not any(obj is function for function in _CALLED):
            raise RequestError(f"a {type(obj).__name__} cannot be written into a pickle without running code")
        return NotImplemented

    def _list(self, items: list[Node]) -> None:
        self.write(pickle.EMPTY_LIST)
        self.memoize(items)
        self._exact([(item,) for item in items], pickle.APPEND, pickle.APPENDS)

    def _dict(self, node: dict[Node, Node]) -> None:
        self.write(pickle.EMPTY_DICT)
        self.memoize(node)
        self._exact(list(node.items()), pickle.SETITEM, pickle.SETITEMS, reopens=True)

    def _set(self, items: set[Node]) -> None:
        if self.proto < 4:
            self.save_reduce(set, (list(items),), obj=items)
            return
        self.write(pickle.EMPTY_SET)
        self.memoize(items)
        self._exact([(item,) for item in items], b"", pickle.ADDITEMS, reopens=True)

    def _exact(
        self, groups: Sequence[tuple[Node, ...]], single: bytes, several: bytes, *, reopens: bool = False
    ) -> None:
        """Elements of a list, dict or set itself.

        Args:
            single: Opcode for a single element; empty if there is none.
            reopens: After a full batch another one is opened, even if nothing is left for it.
        """
        if len(groups) == 1 and single:
            self._batches(groups, single, several)
            return
        for at in range(0, len(groups) + (reopens and len(groups) > 0), _BATCH):
            self._marked(groups[at : at + _BATCH], several)

    def _batches(self, groups: Iterable[tuple[Node, ...]], single: bytes, several: bytes) -> None:
        """Elements of a subclass: these come from an iterator, and are batched unlike those of a list or dict."""
        remaining = iter(groups)
        while batch := list(islice(remaining, _BATCH)):
            if len(batch) > 1:
                self._marked(batch, several)
                continue
            for item in batch[0]:
                self.save(item)
            self.write(single)

    def _marked(self, batch: Iterable[tuple[Node, ...]], several: bytes) -> None:
        self.write(pickle.MARK)
        for group in batch:
            for item in group:
                self.save(item)
        self.write(several)

    def _global(self, node: Global) -> None:
        if self.proto >= 4:
            self.save(node.module)
            self.save(node.name)
            self.write(pickle.STACK_GLOBAL)
        else:
            self.write(pickle.GLOBAL + node.module.encode() + b"\n" + node.name.encode() + b"\n")
        self.memoize(node)

    def _obj(self, node: Obj) -> None:
        self.save(node.func)
        self.save(node.args)
        if node.kind == "newobj_ex":
            self.save(node.kwargs if node.kwargs is not None else {})
        self.write(_BUILD[node.kind])
        if id(node) in self.memo:  # an argument contained this object and wrote it
            self.write(pickle.POP + self.get(self.memo[id(node)][0]))
        else:
            self.memoize(node)
        self._batches([(item,) for item in node.items or ()], pickle.APPEND, pickle.APPENDS)
        self._batches(node.pairs or (), pickle.SETITEM, pickle.SETITEMS)
        if node.state is not None:
            self.save(node.state)
            self.write(pickle.BUILD)

    dispatch = {kind: _PYTHON.dispatch[kind] for kind in _INHERITED} | {
        list: _list, dict: _dict, set: _set, Global: _global, Obj: _obj, PersId: None,
    }  # fmt: skip
