"""Tensors in the pickles of torch.save: which storage they lie in, and which of its elements are theirs."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from converters.box import strides
from converters.dtypes import dtype, from_storage
from converters.errors import FormatError, UnsupportedError
from converters.names import printable
from converters.pickles.nodes import Global, Obj, PersId, entries

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from converters.dtypes import DType
    from converters.pickles.nodes import Node

DEEPEST = 64  # dictionaries and lists in one another
_MOST_REPETITIONS = 1 << 18  # entries of dictionaries and lists that stand in several places
_MOST_AXES = 32  # of numpy 1, and of every tensor there is


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor as a pickle describes it: which storage, and which of its elements.

    Attributes:
        storage: Key of the storage (`0` for member `data/0`).
        storage_numel: Elements in the storage.
        offset: First element.
        strides: Distance between neighbours along each axis, in elements.
    """

    storage: str
    dtype: DType
    storage_numel: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def storage_nbytes(self) -> int:
        """Bytes of the storage."""
        return self.storage_numel * self.dtype.itemsize

    @property
    def contiguous(self) -> bool:
        """Whether the elements lie in C order without gaps."""
        if 0 in self.shape:  # an empty shard of a column-wise division keeps the strides of the others
            return True
        expected = zip(self.shape, self.strides, strides(self.shape), strict=True)
        return all(n == 1 or stride == c_stride for n, stride, c_stride in expected)


# of torch._utils, torch._tensor: sparse, quantized, nested, meta, subclasses; TransformerEngine's FP8 tensors
_OTHER_TENSOR = re.compile(r"_rebuild_\w+|_make_\w+_in_reduce_ex")


def tensor_ref(node: Any, label: str) -> TensorRef | None:
    """The tensor that an inert node stands for, or None if it is something else.

    Raises:
        FormatError: It is invalid, or is a tensor whose values are not those of its storage: sparse, quantized, FP8
            with a scale, without data, or marked as conjugate or negative.
    """
    if not isinstance(node, Obj):
        return None
    func, args = f"{node.func.module}.{node.func.name}", node.args
    if func in ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state") and args:
        return tensor_ref(args[0], label)
    if func == "torch._tensor._rebuild_from_type_v2" and len(args) == 4 and isinstance(args[0], Global):
        # a tensor with Python attributes: (rebuild function, type, its arguments, the attributes)
        return tensor_ref(Obj(args[0], args[2]), label) if isinstance(args[2], tuple) else None
    if func not in ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3"):
        if not _OTHER_TENSOR.match(node.func.name):
            return None
        raise UnsupportedError(
            f"{label} is a tensor of a kind that cannot be read ({printable(func)})",
            hint="save it once more as a plain, dense tensor, or without it",
        )
    marks = args[7 if func.endswith("3") else 6 :]
    if marks and isinstance(marks[0], dict) and (marks[0].get("conj") or marks[0].get("neg")):
        raise UnsupportedError(
            f"{label} is a view that is marked as the conjugate or the negative of what is stored",
            hint="save it once more as tensor.resolve_conj().resolve_neg()",
        )
    try:
        storage, offset, shape, strides = args[0], args[1], _sizes(args[2]), _sizes(args[3])
        tag, kind, key, location, numel = storage.value if isinstance(storage, PersId) else (None,) * 5
    except (TypeError, ValueError, IndexError) as error:
        raise FormatError(f"{label} describes an invalid tensor") from error
    if tag != "storage" or not isinstance(kind, Global) or not isinstance(key, str) or location == "meta":
        raise FormatError(f"{label} describes a tensor without data")
    kind_type = from_storage(kind.name)
    if kind_type is None and len(args) > 6 and isinstance(args[6], Global):  # untyped storage: v3 carries the type
        kind_type = dtype(args[6].name)
        numel = numel // kind_type.itemsize if isinstance(numel, int) else numel
    if kind_type is None or not isinstance(numel, int):
        raise UnsupportedError(f"{label} describes a tensor of unknown type {kind.module}.{kind.name}")
    numbers = (numel, offset, *shape, *strides)
    if not len(shape) == len(strides) <= _MOST_AXES or not all(type(n) is int and 0 <= n < 1 << 62 for n in numbers):
        raise FormatError(f"{label} describes a tensor with impossible sizes {shape!s:.200}, strides {strides!s:.200}")
    last = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if math.prod(shape) else offset - 1
    if last >= numel:
        raise FormatError(f"{label} describes a tensor of {list(shape)} beyond its storage of {numel} elements")
    return TensorRef(key, kind_type, numel, offset, shape, strides)


def tensors_in(tree: Node, label: str) -> Iterator[tuple[tuple[Node, ...], TensorRef]]:
    """Every tensor in a tree of dictionaries and lists, with the keys on the way to it.

    Args:
        label: How to name the tree in an error.

    Raises:
        FormatError: An invalid tensor; or nested too deep, or without an end: a list may stand for 10^40 values.
    """
    left: list[tuple[tuple[Node, ...], Node]] = [((), tree)]
    visited, repetitions = set[int](), 0
    while left:
        path, node = left.pop()
        ref = tensor_ref(node, f"{label}: {printable(path_name(path))}") if isinstance(node, Obj) else None
        if ref is not None:
            yield path, ref
        elif inner := entries(node):
            repetitions += len(inner) if id(node) in visited else 0
            if len(path) > DEEPEST or repetitions > _MOST_REPETITIONS:
                raise FormatError(
                    f"{label}: dictionaries and lists are nested more than {DEEPEST} deep, or hold too much"
                )
            visited.add(id(node))
            left += [((*path, key), value) for key, value in reversed(inner)]


def path_name(path: Sequence[Node]) -> str:
    """The keys on the way to a tensor as its name."""
    return ".".join(str(key) if isinstance(key, str | int) else "?" for key in path)


def _sizes(node: Any) -> tuple[int, ...]:
    if isinstance(node, Obj):  # torch.Size((2, 3))
        node = node.args[0]
    return tuple(node)
