"""Sizes of a checkpoint by module: the tree that dots in the names of tensors make, layers and experts folded.

weights                                      14.96 GiB
  decoder                                    12.99 GiB
    layers.{0..31}                           12.99 GiB
      mlp                                    10.50 GiB
optimizer state                              89.75 GiB
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from converters.names import fold

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from converters.catalog import TensorInfo

KINDS = {"weight": "weights", "other": "other tensors", "optimizer": "optimizer state"}
"""Titles of the kinds of tensors (`TensorInfo.kind`), in the order in which they are shown."""


@dataclass
class Module:
    """A module with everything below it.

    Attributes:
        name: As the tree shows it: `mlp`, `layers.{0..31}`; of the outermost, one of `KINDS`.
        nbytes: Bytes of its tensors.
        parameters: Their elements.
        tensors: How many they are.
        children: The modules and tensors in it, by name.
    """

    name: str
    nbytes: int = 0
    parameters: int = 0
    tensors: int = 0
    children: dict[str, Module] = field(default_factory=dict)

    def walk(self, depth: int, *, by_size: bool = False, level: int = 0) -> Iterator[tuple[int, Module]]:
        """`(level, module)` of this module and of those below it, at most `depth` levels down."""
        yield level, self
        if level < depth:
            children = list(self.children.values())
            for child in sorted(children, key=lambda m: -m.nbytes) if by_size else children:
                yield from child.walk(depth, by_size=by_size, level=level + 1)


def module_tree(tensors: Iterable[TensorInfo], *, folded: bool = True) -> list[Module]:
    """The trees of weights, of other tensors and of optimizer state, those that there are.

    Args:
        tensors: The tensors.
        folded: Layers and experts that differ only in their numbers are one module.
    """
    roots: dict[str, Module] = {}
    by_kind: dict[str, dict[str, TensorInfo]] = defaultdict(dict)
    for tensor in tensors:
        by_kind[tensor.kind][tensor.name] = tensor
    for kind in sorted(by_kind, key=list(KINDS).index):
        members = by_kind[kind]
        rows = fold(members) if folded else [(name, [name]) for name in members]
        roots[kind] = Module(KINDS[kind])
        for text, names in rows:
            _add(roots[kind], _segments(text), [members[name] for name in names])
    return list(roots.values())


def _segments(name: str) -> list[str]:
    """The parts of a name; a number, or a folded one, belongs to the part before it: `layers.{0..31}`."""
    out: list[str] = []
    for part in name.replace("..", "\0").split("."):
        word = part.replace("\0", "..")
        if out and (word.isdigit() or word.startswith("{")):
            out[-1] += f".{word}"
        else:
            out.append(word)
    return out


def _add(root: Module, segments: list[str], tensors: list[TensorInfo]) -> None:
    nbytes, elements = sum(t.nbytes for t in tensors), sum(t.numel for t in tensors)
    module = root
    for segment in [None, *segments]:
        if segment is not None:
            module = module.children.setdefault(segment, Module(segment))
        module.nbytes += nbytes
        module.parameters += elements
        module.tensors += len(tensors)
