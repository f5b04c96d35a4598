"""Inert trees shown to people: short, and bounded whatever the file holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from converters.pickles.nodes import Global, Obj, PersId

if TYPE_CHECKING:
    from collections.abc import Callable

    from converters.pickles.nodes import Node

_ELLIPSIS: Final = "..."
_TEXT: Final = 400
"""Characters of one string, bytes of one byte string."""


def describe(node: Node, max_depth: int = 6, max_nodes: int = 2000) -> Any:
    """A value that `json.dumps` accepts and a person can read.

    Args:
        node: What `parse` returned, or a part of it.
        max_depth: Containers inside containers; deeper ones become "...".
        max_nodes: Values shown in all; further ones become "...". A shared value counts each time it is
            met, so neither a graph with 2^60 paths nor a value that contains itself costs more than this.

    Returns:
        Dicts with text keys, lists, text, numbers, bool and None. Inert nodes become text where nothing is
        lost by it ("torch.bfloat16", "AttnBackend(5)", "functools.partial(...)"), and otherwise
        `{"class": ..., fields}`.
    """
    return _Describer(max_depth, max_nodes).value(node, 0)


class _Describer:
    """Recursion is bounded by `max_depth`, which is clamped, and work by `max_nodes`."""

    def __init__(self, max_depth: int, max_nodes: int) -> None:
        self.max_depth = min(max_depth, 60)
        self.left = max_nodes

    def value(self, node: Node, depth: int) -> Any:
        """One value."""
        self.left -= 1
        if node is None or isinstance(node, bool):
            return node
        if isinstance(node, int):
            # Beyond 64 bits JSON readers disagree; beyond 4300 digits Python refuses to print.
            return node if -(1 << 63) <= node < 1 << 63 else hex(node)
        if isinstance(node, float):
            return node if node - node == 0 else str(node)
        if isinstance(node, str):
            return _text(node)
        if isinstance(node, (bytes, bytearray)):
            return f"<{len(node)} bytes>"
        if isinstance(node, Global):
            return _text(node.path)
        if depth >= self.max_depth or self.left <= 0:
            return _ELLIPSIS
        if isinstance(node, dict):
            return self.entries(node.items(), depth)
        if isinstance(node, (list, tuple, set, frozenset)):
            return self.sequence(node, depth)
        if isinstance(node, PersId):
            return {"stored outside": self.value(node.value, depth + 1)}
        return self.obj(node, depth) if isinstance(node, Obj) else f"<{type(node).__name__}>"

    def sequence(self, items: Any, depth: int) -> list[Any]:
        """A list, tuple or set."""
        shown = []
        for item in items:
            if self.left <= 0:
                shown.append(_ELLIPSIS)
                break
            shown.append(self.value(item, depth + 1))
        return shown

    def entries(self, pairs: Any, depth: int) -> dict[str, Any]:
        """The entries of a dict; keys that are not text are shown as text."""
        shown: dict[str, Any] = {}
        for key, value in pairs:
            if self.left <= 0:
                shown[_ELLIPSIS] = _ELLIPSIS
                break
            name = _text(key) if isinstance(key, str) else self.brief(key)
            shown[name] = self.value(value, depth + 1)
        return shown

    def brief(self, node: Node) -> str:
        """One short line, for a key or an argument."""
        inner = _Describer(2, 8)
        shown = inner.value(node, 0)
        self.left -= 8 - inner.left
        return _text(shown if isinstance(shown, str) and not isinstance(node, str) else repr(shown))

    def obj(self, node: Obj, depth: int) -> Any:
        """An object: a call if that says all, otherwise its class and contents."""
        path = _text(node.func.path)
        special = _SPECIAL.get(node.func.name)
        if special is not None and node.state is None:
            shown = special(node)
            if shown is not None:
                return _text(shown)
        short = path if path.startswith("functools.") else path.rpartition(".")[2]
        if node.state is None and node.items is None and node.pairs is None:
            return self.call(node, short)
        if node.pairs is not None and node.state is None and not node.items:
            return self.entries(node.pairs, depth)
        result: dict[str, Any] = {"class": path}
        if node.args and self.left > 0:
            result["args"] = self.sequence(node.args, depth + 1)
        if isinstance(node.state, dict):
            for name, value in self.entries(node.state.items(), depth).items():
                result[name if name not in result else f"{name} (field)"] = value
        elif node.state is not None:
            result["state"] = self.value(node.state, depth + 1)
        if node.items:
            result["items"] = self.sequence(node.items, depth + 1)
        if node.pairs:
            result["entries"] = self.entries(node.pairs, depth + 1)
        return result

    def call(self, node: Obj, short: str) -> str:
        """`AttnBackend(5)`, `functools.partial(...)`: scalars in full, anything larger elided."""
        values = [*node.args, *(node.kwargs or {}).values()]
        if len(values) > 4 or any(isinstance(item, (list, tuple, dict, Obj, PersId, Global)) for item in values):
            return f"{short}(...)"
        self.left -= len(values)
        return f"{short}({', '.join(self.brief(item) for item in values)})"


def _text(text: str) -> str:
    """Cut to size, with lone surrogates (legal in a pickle, not in UTF-8) made visible."""
    if len(text) > _TEXT:
        text = f"{text[:_TEXT]}{_ELLIPSIS}"
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _size(node: Obj) -> str | None:
    args = node.args[0] if len(node.args) == 1 else None
    if not isinstance(args, tuple) or len(args) > 32 or any(type(item) is not int for item in args):
        return None
    return f"torch.Size({list(args)})"


def _path(node: Obj) -> str | None:
    if 0 < len(node.args) <= 64 and all(isinstance(part, str) for part in node.args):
        first, *others = node.args
        return "/".join([first.rstrip("/"), *others]) if first != "/" or others else "/"
    return None


_SPECIAL: Final[dict[str, Callable[[Obj], str | None]]] = {
    "Size": _size,
    "PosixPath": _path,
    "PurePosixPath": _path,
    "Path": _path,
}
