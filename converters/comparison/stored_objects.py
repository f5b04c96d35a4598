"""The contents of a checkpoint's objects, unpacked: extra states of modules, random states."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from converters.comparison.trees import tensor_in
from converters.errors import FormatError
from converters.formats.common_state import Archive
from converters.pickles.machine import parse
from converters.pickles.nodes import Obj

if TYPE_CHECKING:
    from converters.catalog import ObjectInfo
    from converters.formats.base import Reader


def unwrapped(tree: Any) -> Any:
    """The contents of lists of one: formats wrap objects in none, one or two of them."""
    while isinstance(tree, list) and len(tree) == 1:
        tree = tree[0]
    return tree


def is_empty(reader: Reader, info: ObjectInfo) -> bool:
    """Whether a module stored no extra state; False if that cannot be read."""
    try:
        return extra_state(reader, info)[0] is None
    except FormatError:
        return False


def contents(reader: Reader, info: ObjectInfo) -> tuple[Any, Archive]:
    """The contents of an object, and the archive that tensors in it lie in.

    Raises:
        FormatError: It cannot be read.
    """
    archive = reader.stored_object(info.key)
    return unwrapped(archive.tree), archive


def extra_state(reader: Reader, info: ObjectInfo) -> tuple[Any, Archive | None]:
    """The extra state of a module, unpacked, and the archive that tensors in it lie in; None if it is empty.

    TransformerEngine and Megatron pack an extra state with `torch.save` or `pickle` into a tensor of bytes or a buffer.
    """
    archive = reader.stored_object(info.key)
    tree = unwrapped(archive.tree)
    ref = tensor_in(tree)
    if ref is not None and ref.dtype.name == "uint8":
        raw = archive.elements(ref)
    elif isinstance(tree, Obj) and tree.func.name == "BytesIO":
        arguments = tree.state if isinstance(tree.state, tuple) else tree.args
        packed = arguments[0] if arguments else b""
        if isinstance(packed, Obj) and packed.args:  # _codecs.encode(text, "latin1"), as protocol 2 writes bytes
            packed = str(packed.args[0]).encode("latin1", "replace")
        raw = packed if isinstance(packed, bytes) else b""
    else:
        return tree, archive
    if not raw:
        return None, None
    try:
        if raw[:2] == b"PK":
            inner = Archive.parse(raw, info.key)
            return inner.tree, inner
        return parse(raw, label=info.key), None
    except FormatError:
        return raw, None
