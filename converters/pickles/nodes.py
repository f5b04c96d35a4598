"""What a pickle holds, as data: the inert nodes and the errors about them.

Plain values (None, bool, int, float, str, bytes, list, dict, tuple, set, frozenset, bytearray) are plain
Python. Everything that a real unpickler would import or call is one of three nodes, which nothing here
ever imports, calls or evaluates. Nodes are equal only to themselves, so hashing one costs nothing whatever
it contains, and a node may be a dict key (`MetadataIndex` in torch's `.metadata`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from converters.errors import FormatError, RequestError

if TYPE_CHECKING:
    from collections.abc import Iterator

Node: TypeAlias = Any
"""A plain Python value, `Global`, `Obj` or `PersId`."""

Kind: TypeAlias = Literal["reduce", "newobj", "newobj_ex"]


class PickleFormatError(FormatError):
    """The bytes are not a pickle that we read: damaged, of an odd dialect, or larger than the limits."""


class UnsafePickle(PickleFormatError):
    """The pickle names something that has no business in a checkpoint, or plays a trick on its reader."""


@dataclass(slots=True, eq=False, repr=False)
class Global:
    """The name of something in a Python module; never imported.

    Args:
        module: As written in the file; under protocol 2 the Python 2 spelling (`__builtin__`).
        name: May be dotted (`Outer.Inner`).
        offset: Where the opcode stood in the pickle, in bytes; -1 for one that we made.
    """

    module: str
    name: str
    offset: int = -1

    @property
    def path(self) -> str:
        """`module.name`."""
        return f"{self.module}.{self.name}"

    def __repr__(self) -> str:
        return f"<global {self.path}>"


@dataclass(slots=True, eq=False, repr=False)
class Obj:
    """A call or a construction that was never made.

    Args:
        func: What would have been called.
        args: Its positional arguments.
        kwargs: Its keyword arguments (`newobj_ex` only).
        kind: Which opcode asked for it.
        state: What would have gone to `__setstate__` or `__dict__`; None if nothing.

    Attributes:
        items: Elements of a list subclass; None if nothing was appended.
        pairs: Entries of a dict subclass (`OrderedDict`), in order; None if nothing was set.
    """

    func: Global
    args: tuple[Node, ...] = ()
    kwargs: dict[str, Node] | None = None
    kind: Kind = "reduce"
    state: Node = None
    items: list[Node] | None = field(default=None, init=False)
    pairs: list[tuple[Node, Node]] | None = field(default=None, init=False)

    def __repr__(self) -> str:
        return _described(self)


@dataclass(slots=True, eq=False, repr=False)
class PersId:
    """A reference to something stored outside the pickle (torch: a storage).

    Args:
        value: The reference, for torch `("storage", <global torch.FloatStorage>, "0", "cpu", numel)`.
    """

    value: Node

    def __repr__(self) -> str:
        return _described(self)


def _described(node: Obj | PersId) -> str:
    from converters.pickles.describe import describe

    return f"<{describe(node, max_depth=2, max_nodes=16)}>"


@dataclass(slots=True, eq=False)
class Slot:
    """In the tree of a repeated item: the place of a value that differs from item to item (see `columns`).

    Args:
        index: Which column.
        kind: "integer"; "reference" for a memo index; "string" for that of a string that the item itself writes.
    """

    index: int
    kind: str

    @property
    def is_ref(self) -> bool:
        """Whether the column holds memo indexes instead of integers."""
        return self.kind != "integer"


@dataclass(slots=True, eq=False)
class Run:
    """In a list or a dict: stands for many items that were read as columns (see `columns`).

    Args:
        number: Counts the runs of one pickle.
        count: Items it stands for; 0 if it is the value of the key that does.
    """

    number: int
    count: int


def _state_dicts(obj: Obj) -> list[dict[Node, Node]]:
    """The dicts that hold attributes: `state`, or both halves of `(__dict__, slots)`."""
    state = obj.state
    if isinstance(state, dict):
        return [state]
    if isinstance(state, tuple) and len(state) == 2 and all(half is None or isinstance(half, dict) for half in state):
        return [half for half in state if half is not None]
    return []


def fields(obj: Obj) -> dict[str, Node]:
    """The attributes of an inert object, for reading: `args.tensor_model_parallel_size` and so on.

    Args:
        obj: An object whose state is a dict, or `(dict, dict)` for a class with slots. An object with any
            other state, or none, has no fields.

    Returns:
        A new dict; changing it does not change the object, see `set_field`.
    """
    merged: dict[str, Node] = {}
    for half in _state_dicts(obj):
        merged.update((name, value) for name, value in half.items() if isinstance(name, str))
    return merged


def set_field(obj: Obj, name: str, value: Node) -> None:
    """Set one attribute of an inert object; it is written by the next `dumps`.

    Args:
        obj: The object.
        name: An existing attribute or a new one.
        value: Plain data or a node.

    Raises:
        RequestError: The object does not keep its attributes in a dict.
    """
    halves = _state_dicts(obj)
    if not halves:
        if obj.state is not None:
            raise RequestError(f"{obj.func.path} keeps no named attributes, so {name} cannot be set")
        obj.state = {name: value}
        return
    target = next((half for half in halves if name in half), halves[0])
    target[name] = value


def pairs(node: Node) -> list[tuple[Node, Node]]:
    """The entries of a dict, or of an inert dict subclass such as `OrderedDict`, in order.

    Raises:
        PickleFormatError: The node is neither.
    """
    if isinstance(node, dict):
        return list(node.items())
    if isinstance(node, Obj) and (node.pairs is not None or (not node.items and node.func.name.endswith("Dict"))):
        return node.pairs or []
    raise PickleFormatError(f"expected a dictionary, found {type(node).__name__} {node!r:.200}")


def entries(node: Node) -> list[tuple[Node, Node]]:
    """Keys and values of a dictionary, of whatever kind, or positions and items of a list; none of anything else."""
    if isinstance(node, list | tuple):
        return list(enumerate(node))
    if isinstance(node, Obj) and node.items:
        return list(enumerate(node.items))
    try:
        return pairs(node)
    except PickleFormatError:
        return []


def nodes_in(tree: Node) -> Iterator[Node]:
    """Every node and container in a tree, each once, in no particular order."""
    left, visited = [tree], set[int]()
    while left:
        node = left.pop()
        if id(node) in visited:
            continue
        if isinstance(node, dict):
            inner = [*node, *node.values()]
        elif isinstance(node, list | tuple | set | frozenset):
            inner = list(node)
        elif isinstance(node, Obj):
            inner = [
                node.args,
                node.kwargs,
                node.state,
                node.items,
                *(part for pair in node.pairs or () for part in pair),
            ]
        elif isinstance(node, PersId):
            inner = [node.value]
        else:
            continue
        visited.add(id(node))
        yield node
        left += inner


def references(tree: Node) -> list[PersId]:
    """Every reference to something outside a tree, each once, in no particular order."""
    return [node for node in nodes_in(tree) if isinstance(node, PersId)]
