"""What a pickle holds, as data: the inert nodes and the errors about them.

Plain values (None, bool, int, float, str, bytes, list, dict, tuple, set, frozenset, bytearray) are plain
Python. Everything that a real unpickler would import or call is one of three nodes, which nothing here
ever imports, calls or evaluates. Nodes are equal only to themselves, so hashing one costs nothing whatever
it contains, and a node may be a dict key (`MetadataIndex` in torch's `.metadata`).
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from converters.errors import FormatError, RequestError

Node: TypeAlias = Any
"""A plain Python value, `Global`, `Obj` or `PersId`."""

Kind: TypeAlias = Literal["reduce", "newobj", "newobj_ex"]


class PickleFormatError(FormatError):
    """The bytes are not a pickle that we read: damaged, of an odd dialect, or larger than the limits."""


class UnsafePickle(PickleFormatError):
    """The pickle names something that has no business in a checkpoint, or plays a trick on its reader."""


class Global:
    """The name of something in a Python module; never imported.

    Args:
        module: As written in the file; under protocol 2 the Python 2 spelling (`__builtin__`).
        name: May be dotted (`Outer.Inner`).
        offset: Where the opcode stood in the pickle, in bytes; -1 for one that we made.
    """

    __slots__ = ("module", "name", "offset")

    def __init__(self, module: str, name: str, offset: int = -1) -> None:
        self.module = module
        self.name = name
        self.offset = offset

    @property
    def path(self) -> str:
        """`module.name`."""
        return f"{self.module}.{self.name}"

    def __repr__(self) -> str:
        return f"<global {self.path}>"


class Obj:
    """A call or a construction that was never made.

    Args:
        func: What would have been called.
        args: Its positional arguments.
        kwargs: Its keyword arguments (`newobj_ex` only).
        kind: Which opcode asked for it.
    """

    __slots__ = ("args", "func", "items", "kind", "kwargs", "pairs", "state")

    def __init__(
        self,
        func: Global,
        args: tuple[Node, ...] = (),
        kwargs: dict[str, Node] | None = None,
        kind: Kind = "reduce",
        state: Node = None,
    ) -> None:
        self.func = func
        self.args = args
        self.kwargs = kwargs
        self.kind: Kind = kind
        self.state = state
        """What would have gone to `__setstate__` or `__dict__`; None if nothing."""
        self.items: list[Node] | None = None
        """Elements of a list subclass; None if nothing was appended."""
        self.pairs: list[tuple[Node, Node]] | None = None
        """Entries of a dict subclass (`OrderedDict`), in order; None if nothing was set."""

    def __repr__(self) -> str:
        from converters.pickles.describe import describe

        return f"<{describe(self, max_depth=2, max_nodes=16)}>"


class PersId:
    """A reference to something stored outside the pickle (torch: a storage).

    Args:
        value: The reference, for torch `("storage", <global torch.FloatStorage>, "0", "cpu", numel)`.
    """

    __slots__ = ("value",)

    def __init__(self, value: Node) -> None:
        self.value = value

    def __repr__(self) -> str:
        from converters.pickles.describe import describe

        return f"<{describe(self, max_depth=2, max_nodes=16)}>"


class Slot:
    """In the tree of a repeated item: the place of a value that differs from item to item (see `columns`).

    Args:
        index: Which column.
        is_ref: Whether the column holds memo indexes instead of integers.
    """

    __slots__ = ("index", "is_ref")

    def __init__(self, index: int, is_ref: bool) -> None:
        self.index = index
        self.is_ref = is_ref


class Run:
    """In a list or a dict: stands for many items that were read as columns (see `columns`).

    Args:
        number: Counts the runs of one pickle.
        count: Items it stands for; 0 if it is the value of the key that does.
    """

    __slots__ = ("count", "number")

    def __init__(self, number: int, count: int) -> None:
        self.number = number
        self.count = count


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


def references(node: Node) -> list[PersId]:
    """Every reference to something outside a tree, each once, in no particular order."""
    storages: dict[PersId, None] = {}
    seen: set[int] = set()
    left = [node]
    while left:
        current = left.pop()
        if id(current) in seen:
            continue
        if isinstance(current, PersId):
            storages[current] = None
        elif isinstance(current, dict):
            seen.add(id(current))
            left += [*current, *current.values()]
        elif isinstance(current, list | tuple | set | frozenset):
            seen.add(id(current))
            left += current
        elif isinstance(current, Obj):
            seen.add(id(current))
            left += [current.args, current.kwargs, current.state, current.items]
            left += [] if current.pairs is None else [part for pair in current.pairs for part in pair]
    return list(storages)
