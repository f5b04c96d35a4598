"""What is read in one go, and where it goes: the plan of a load. No I/O, no torch.

A fetch is a box of a stored tensor with the places it goes to. Ranks that hold the same part of a tensor make the same
fetches, because what they are follows from the layout alone: data-parallel replicas share nearly all of theirs,
tensor-parallel ranks the norms. What a rank of a job reads is decided in `rank_plan`, how a group deals its fetches out in
`rounds`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from converters.box import Box, contiguous_tiles, find_overlap
from converters.megatron.damage import refuse_damage
from converters.planning.job import landing
from converters.planning.plan import Copy

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from converters.catalog import Catalog, TensorInfo
    from converters.dtypes import DType
    from converters.formats.base import Reader
    from converters.planning.plan import Op

__all__ = ["CopyTo", "LoadPlan", "OutTensor", "ReadItem", "plan_copies", "plan_whole"]

TILE = 8 << 20
"""The largest fetch, in bytes."""


@dataclass(frozen=True, slots=True)
class OutTensor:
    """A tensor that the caller gets.

    Attributes:
        name: Its key in the state dict.
        dtype: Element type.
        shape: Its shape.
        matrix: The shape that landings refer to; the elements lie in C order of both.
        fills: Boxes that nothing stored fills: zeros.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    matrix: tuple[int, ...]
    fills: tuple[Box, ...] = ()

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class CopyTo:
    """Where the elements of a fetch go: a box of a wanted tensor, in coordinates of its `matrix`."""

    target: str
    box: Box
    op: Op


@dataclass(frozen=True, slots=True)
class ReadItem:
    """A box of a stored tensor, read in one go.

    Attributes:
        source: Name of the stored tensor.
        box: In its coordinates.
        nbytes: Size.
        landings: Where it goes; nowhere if it is read for the checksum of its record alone.
        again: Another fetch of this rank reads some of the same elements, so its checksum does not count.
    """

    source: str
    box: Box
    nbytes: int
    landings: tuple[CopyTo, ...]
    again: bool = False

    @property
    def key(self) -> tuple[str, Box]:
        """What ranks know it by."""
        return self.source, self.box


@dataclass(frozen=True)
class LoadPlan:
    """Everything about the load of one rank, with nothing read yet.

    Attributes:
        sources: The stored tensors it reads.
        wanted: What the caller gets, by key, in the order of the state dict.
        fetches: What is read, in that order.
        groups: For each set of two ranks or more that make the same fetches, this one among them, those fetches.
        empty: Keys of modules' extra states, which hold no tensors: None in the state dict.
        tile_bytes: The largest that a fetch of any rank may be.
        notes: Sentences a person should read.
    """

    sources: Mapping[str, TensorInfo]
    wanted: Mapping[str, OutTensor]
    fetches: Sequence[ReadItem]
    tile_bytes: int
    groups: Mapping[tuple[int, ...], Sequence[ReadItem]] = field(default_factory=dict)
    empty: Sequence[str] = ()
    notes: Sequence[str] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of what the caller gets."""
        return sum(wanted.nbytes for wanted in self.wanted.values())

    @cached_property
    def largest(self) -> int:
        """Bytes of the largest fetch."""
        return max((fetch.nbytes for fetch in self.fetches), default=1)

    @property
    def bytes_needed(self) -> int:
        """Bytes of stored elements that this rank needs."""
        return sum(fetch.nbytes for fetch in self.fetches if fetch.landings)


def plan_whole(reader: Reader, tensors: Mapping[str, TensorInfo], tile_bytes: int = TILE) -> LoadPlan:
    """Stored tensors as they are, whole, under their canonical names."""
    wanted = {name: OutTensor(name, info.dtype, info.shape, info.shape) for name, info in tensors.items()}
    copies = [Copy(n, Box.whole(w.shape), n, Box.whole(w.shape)) for n, w in wanted.items()]
    return plan_copies(tensors, wanted, copies, tile_bytes, reader.catalog)


def plan_copies(
    tensors: Mapping[str, TensorInfo],
    wanted: Mapping[str, OutTensor],
    copies: Iterable[Copy],
    tile_bytes: int,
    catalog: Catalog,
    peers: Mapping[tuple[str, Box], Sequence[int]] | None = None,
) -> LoadPlan:
    """The plan of some copies: those of the same elements together, cut into pieces that are contiguous in what is read.

    Args:
        tensors: What is stored.
        wanted: What the caller gets, in the order of the state dict.
        copies: What fills it; to nowhere (an empty name) what is read for its checksum alone.
        tile_bytes: The largest fetch.
        catalog: The checkpoint's.
        peers: The ranks of the job that make a copy of a source box, this one among them; none by default.

    Raises:
        IntegrityError: Something that is needed is damaged.
    """
    together: dict[tuple[str, Box], list[Copy]] = {}
    boxes: dict[str, list[Box]] = defaultdict(list)
    for copy in copies:
        if copy.source_box.volume:
            together.setdefault((copy.source, copy.source_box), []).append(copy)
    refuse_damage(catalog, {source for source, _ in together})
    fetches: list[ReadItem] = []
    groups: dict[tuple[int, ...], list[ReadItem]] = defaultdict(list)
    for (source, box), mine in together.items():
        size = tensors[source].dtype.itemsize
        again = find_overlap([*boxes[source], box]) is not None if boxes[source] else False
        boxes[source].append(box)
        parts = [box] if box.volume * size <= tile_bytes else contiguous_tiles(box, tile_bytes // size)
        pieces = [
            ReadItem(
                source,
                part,
                part.volume * size,
                tuple(
                    CopyTo(c.target, c.target_box if part is box else landing(c, part), c.op) for c in mine if c.target
                ),
                again,
            )
            for part in parts
        ]
        fetches += pieces
        ranks = () if peers is None else tuple(sorted(peers[source, box]))
        if len(ranks) > 1:
            groups[ranks] += pieces
    sources = {name: tensors[name] for name in boxes}
    return LoadPlan(sources, wanted, fetches, tile_bytes, dict(sorted(groups.items())))
