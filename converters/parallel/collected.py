"""Where the tensors of a model are stored, put together piece by piece from what each rank holds."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from converters.catalog import FlatPart, TensorInfo
from converters.parallel.buffers import Misfit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from converters.box import Box
    from converters.catalog import StoredArray
    from converters.dtypes import DType
    from converters.parallel.buffers import Local

__all__ = ["Collected"]


@dataclass
class Collected:
    """Stored pieces of every tensor that were found so far.

    Attributes:
        pieces: Tensor -> array (by its identity) -> boxes and the elements of the array where they begin.
    """

    pieces: dict[str, dict[int, list[tuple[Box, int]]]] = field(default_factory=lambda: defaultdict(dict))
    arrays: dict[int, StoredArray] = field(default_factory=dict)
    types: dict[str, DType] = field(default_factory=dict)

    def add(self, prefix: str, local: Local, array: StoredArray, kind: DType, at: int) -> None:
        """Notes a parameter that begins at an element of an array, unless it is a replica."""
        if not local.first:
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
        parts = tuple(FlatPart(self.arrays[key], tuple(found)) for key, found in self.pieces[name].items())
        return TensorInfo(name, self.types[name], shape, kind, parts)

    def missing(self, name: str, shape: Sequence[int]) -> int:
        """How many elements nothing was noted for."""
        return math.prod(shape) - sum(box.volume for found in self.pieces.get(name, {}).values() for box, _ in found)
