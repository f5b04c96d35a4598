"""Where the tensors of a model are stored, put together piece by piece from what each rank holds."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from converters.catalog import TensorInfo
from converters.chunks import FlatPart
from converters.megatron.buffers import Misfit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from converters.box import Box
    from converters.chunks import StoredArray
    from converters.dtypes import DType
    from converters.megatron.buffers import Local


@dataclass
class FlatIndex:
    """Stored pieces of every tensor that were found so far.

    Attributes:
        pieces: Tensor -> array (by its identity) -> boxes and the elements of the array where they begin.
        inside: Parameters that begin or end within a stored chunk, not at an edge of one.
        replicas: Tensor -> keys of the arrays in which it lies once more.
    """

    pieces: dict[str, dict[int, list[tuple[Box, int]]]] = field(default_factory=lambda: defaultdict(dict))
    arrays: dict[int, StoredArray] = field(default_factory=dict)
    types: dict[str, DType] = field(default_factory=dict)
    inside: set[str] = field(default_factory=set)
    replicas: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))

    def add(self, prefix: str, local: Local, array: StoredArray, kind: DType, at: int) -> None:
        """Notes a parameter that begins at an element of an array, unless it is a replica."""
        if not _at_edges(array, at, at + local.numel):
            self.inside.add(local.name)
        if not local.first:
            for tensor, _ in local.segments:
                self.replicas[prefix + tensor].add(array.key)
            return
        for tensor, box in local.segments:
            name = prefix + tensor
            if self.types.setdefault(name, kind) != kind:
                raise Misfit(f"{name} is stored as {self.types[name]} and as {kind}", tensor=name)
            self.arrays[id(array)] = array
            self.pieces[name].setdefault(id(array), []).append((box, at))
            at += box.volume

    def tensor(self, name: str, shape: tuple[int, ...], kind: str) -> TensorInfo:
        """The tensor of a name that was noted."""
        parts = tuple(FlatPart(self.arrays[key], tuple(pieces)) for key, pieces in self.pieces[name].items())
        replicas = tuple(sorted(self.replicas.get(name, ())))
        return TensorInfo(name, self.types[name], shape, kind, parts, replicas=replicas)

    def missing(self, name: str, shape: Sequence[int]) -> int:
        """How many elements nothing was noted for."""
        return math.prod(shape) - sum(box.volume for pieces in self.pieces.get(name, {}).values() for box, _ in pieces)


def _at_edges(array: StoredArray, start: int, stop: int) -> bool:
    """Whether chunks of a one-dimensional array end where a range begins and where it ends."""
    starts = array.starts[:, 0]
    first, behind = np.searchsorted(starts, [start, stop]).tolist()
    ends = stop == array.shape[0] or (behind < len(starts) and int(starts[behind]) == stop)
    return ends and first < len(starts) and int(starts[first]) == start
