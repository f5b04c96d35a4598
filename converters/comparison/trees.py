"""Compares two inert pickle trees, without building their objects.

Tensors in a tree are compared by type, shape and elements, wherever their storages lie in the two archives. Lists and
tuples count as the same, as do modules that were renamed: versions pickle one thing in several ways.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

from converters.errors import FormatError
from converters.pickles.describe import describe
from converters.pickles.nodes import Global, Obj, PersId, pairs
from converters.pickles.nodes import fields as attributes
from converters.torchzip.tensor_refs import tensor_ref

if TYPE_CHECKING:
    from collections.abc import Iterator

    from converters.formats.common_state import Archive
    from converters.torchzip.tensor_refs import TensorRef


class _Absent:
    def __repr__(self) -> str:
        return "-"


ABSENT = _Absent()
"""Stands for a value that one side does not have."""

Leaf = tuple[str, Any, Any]
"""A place in two trees, with the values in A and in B as plain data."""
_DEPTH = 64
_MOST = 256  # differences that are listed of one tree
_MOVED = (("numpy._core", "numpy.core"),)


def described(value: Any) -> Any:
    """A value as plain data; `ABSENT` as itself."""
    return value if value is ABSENT else describe(value)


def differences(a: Any, b: Any, path: str, in_a: Archive | None, in_b: Archive | None) -> Iterator[Leaf]:
    """Where two inert trees are not the same: `(path, value in A, value in B)`, values as plain data; the first of many.

    Either may be `ABSENT`, which is another value than all others.
    Tensors are compared by type, shape and elements, wherever their storages lie in the two archives.
    """
    return islice(_walk(a, b, path, in_a, in_b, set(), 0), _MOST)


def _walk(
    a: Any, b: Any, path: str, in_a: Archive | None, in_b: Archive | None, compared: set[tuple[int, int]], depth: int
) -> Iterator[Leaf]:
    if a is b or (id(a), id(b)) in compared:  # a small pickle may share its parts 2^60 times
        return
    if depth > _DEPTH:
        yield path, "too deep to compare", "too deep to compare"
        return
    refs = tensor_in(a), tensor_in(b)
    if refs[0] is not None and refs[1] is not None:
        yield from _compare_tensors(refs[0], refs[1], path, in_a, in_b)
        return
    below = _children(a), _children(b)
    if below[0] is None or below[1] is None:
        if not _same(a, b):
            yield path, described(a), described(b)
        return
    if below[0][0] != below[1][0]:
        yield path, below[0][0], below[1][0]
        return
    compared.add((id(a), id(b)))
    parts_a, parts_b = below[0][1], below[1][1]
    for key in dict.fromkeys((*parts_a, *parts_b)):
        inner = f"{path}.{key}" if path else str(key)
        x, y = parts_a.get(key, ABSENT), parts_b.get(key, ABSENT)
        yield from _walk(x, y, inner, in_a, in_b, compared, depth + 1)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b):
        return True
    if isinstance(a, Global) and isinstance(b, Global):
        return _spelling(a) == _spelling(b)
    numbers = isinstance(a, int | float) and isinstance(b, int | float)
    return bool(a == b) and (numbers or type(a) is type(b)) and isinstance(a, bool) == isinstance(b, bool)


def _spelling(node: Global) -> str:
    for old, new in _MOVED:
        if node.path.startswith(old):
            return new + node.path[len(old) :]
    return node.path


def _children(node: Any) -> tuple[str, dict[Any, Any]] | None:
    """The kind of container that a node is, and its parts; None for a value without parts."""
    if isinstance(node, Mapping):
        return "dictionary", {k if isinstance(k, str | int) else repr(k): v for k, v in node.items()}
    if isinstance(node, list | tuple):  # versions pickle the same thing as one or the other
        return "list", dict(enumerate(node))
    if isinstance(node, PersId):
        return "reference", {"value": node.value}
    if not isinstance(node, Obj):
        return None
    if node.pairs is not None and node.state is None:
        return "dictionary", {k if isinstance(k, str | int) else repr(k): v for k, v in pairs(node)}
    parts: dict[Any, Any] = dict(enumerate(node.args))
    attrs = attributes(node)
    parts |= attrs if attrs or node.state is None else {"state": node.state}
    parts |= {f"item {n}": item for n, item in enumerate(node.items or ())}
    return _spelling(node.func), parts


def tensor_in(node: Any) -> TensorRef | None:
    """The tensor that a node stands for; None if it is something else."""
    try:
        return tensor_ref(node, "an object")
    except FormatError:  # of a kind that is not read: its parts are compared
        return None


def _compare_tensors(
    a: TensorRef, b: TensorRef, path: str, in_a: Archive | None, in_b: Archive | None
) -> Iterator[Leaf]:
    shown = [f"{ref.dtype.name} {list(ref.shape)}" for ref in (a, b)]
    if shown[0] != shown[1]:
        yield path, shown[0], shown[1]
    elif in_a is not None and in_b is not None:
        try:
            bytes_a, bytes_b = in_a.elements(a), in_b.elements(b)
        except FormatError as error:
            yield path, error.message, error.message
            return
        if bytes_a != bytes_b:
            at = next(n for n, (x, y) in enumerate(zip(bytes_a, bytes_b, strict=True)) if x != y)
            where = f"{shown[0]}, from element {at // a.dtype.itemsize}"
            yield path, where, where
