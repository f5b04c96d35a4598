"""Tensors of a file that no reader takes: in attributes of pickled objects, or under unknown keys."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from converters.catalog import Problem
from converters.names import listed
from converters.pickles.nodes import Obj, references

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from converters.formats.containers.archive import PtFile
    from converters.pickles.nodes import Node

# what is carried as it is, or read for one rank and is the same on all
_ELSEWHERE = ("step", "param_groups", "grad_scaler")


def unread_tensors(
    files: Sequence[PtFile], read: Iterable[tuple[int, str, str]], carried: Mapping[int, Node] | None = None
) -> list[Problem]:
    """Says which tensors of some files are lost when the checkpoint is converted.

    Args:
        files: Their trees.
        read: Position of the file, key and element type of every storage that tensors are read from.
        carried: By position, a tree whose tensors are carried as they are.
    """
    used: dict[int, set[str]] = defaultdict(set)
    for position, key, _ in read:
        used[position].add(f"data/{key}")
    for position, node in (carried or {}).items():
        used[position] |= storages(node)
    unread: dict[tuple[str, ...], list[tuple[str, int]]] = {}
    for file in files:
        lost: dict[str, set[str]] = defaultdict(set)
        for top, node in _nodes_to_read(file.tree):
            lost[top] |= storages(node) - used[file.position]
        tops = tuple(top for top, keys in lost.items() if keys)
        if tops:
            keys = {key for top in tops for key in lost[top]}
            nbytes = sum(file.members[key].size for key in keys if key in file.members)
            unread.setdefault(tops, []).append((file.name, nbytes))
    out = []
    for tops, file_sizes in unread.items():
        names, nbytes = [name for name, _ in file_sizes], sum(n for _, n in file_sizes)
        text = f"{listed(names, 1)}: {nbytes:,} bytes of tensors under {listed(tops, 4)} are not read"
        out.append(Problem("warning", f"{text}: they are neither a parameter nor a state of one", file=names[0]))
    return out


def storages(node: Node) -> set[str]:
    """Members of the archive that hold tensors of a tree, wherever in it they are: `data/0`."""
    values = [reference.value for reference in references(node)]
    return {f"data/{v[2]}" for v in values if isinstance(v, tuple) and len(v) == 5 and isinstance(v[2], str)}


def _nodes_to_read(tree: Node) -> Iterable[tuple[str, Node]]:
    """The leaves of nested dictionaries whose tensors a reader should read, each with the first key on the way to it."""
    left: list[tuple[str, Node]] = [("", tree)]
    visited: set[int] = set()
    while left:
        top, node = left.pop()
        entries = (
            node.items() if isinstance(node, dict) else node.pairs if isinstance(node, Obj) and node.pairs else None
        )
        if entries is None:
            yield top, node
        elif id(node) not in visited:
            visited.add(id(node))
            for key, value in entries:
                name = key if isinstance(key, str) else ""
                if not (name.endswith("_extra_state") or "rng_" in name or name in _ELSEWHERE):
                    left.append((top or name or "?", value))
