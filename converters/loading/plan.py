"""What is read in one go, and where it goes: the plan of a load. No I/O, no torch.

A `ReadItem` is a box of a stored tensor, with a `Copy` of it for each piece it goes to. Ranks that need the same elements of
a tensor have the same items, because what they are follows from the layout alone: data-parallel replicas share nearly all of
theirs, tensor-parallel ranks the norms. What a rank of a job reads is decided in `rank_plan`, how a group deals its items
out in `rounds`.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from converters.box import Box, contiguous_tiles, find_overlap
from converters.megatron.damage import refuse_damage
from converters.planning.plan import prove
from converters.planning.routes import target_box_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import torch

    from converters.catalog import Catalog, TensorInfo
    from converters.events import Listener, StopFlag
    from converters.param_order import Order
    from converters.planning.plan import Copy, Drop, Piece

TILE = 8 << 20
"""The largest item, in bytes."""


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """What is loaded, and how: see `converters.loading.loader.load`.

    Attributes:
        ahead: Bytes of tensors made ahead of what the caller took; None: it takes all of them in the end.
    """

    device: str | torch.device = "cpu"
    names: Literal["megatron", "hf"] = "megatron"
    optimizer: bool = False
    broadcast: bool | Literal["auto"] = "auto"
    verify: Literal["read", "all"] = "read"
    dtype: str | torch.dtype | None = None
    modules: Order | None = None
    vocab_size: int | None = None
    arch: str | None = None
    follow_links: bool = False
    max_memory: int | None = None
    threads: int | None = None
    timeout: float = 1800.0
    listener: Listener | None = None
    stop: StopFlag | None = None
    ahead: int | None = None


@dataclass(frozen=True, slots=True)
class ReadItem:
    """A box of a stored tensor, read in one go.

    Attributes:
        source: Name of the stored tensor.
        box: In its coordinates.
        nbytes: Size.
        copies: Of all of its box, into pieces; none if it is read for the checksum of its record alone.
        again: Another item of this rank reads some of the same elements, so its checksum does not count.
    """

    source: str
    box: Box
    nbytes: int
    copies: tuple[Copy, ...]
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
        pieces: What the caller gets, by key, in the order of the state dict.
        read_items: What is read, in that order.
        groups: For each set of two ranks or more that have the same items, this one among them, those items.
        empty: Keys of modules' extra states, which hold no tensors: None in the state dict.
        tile_bytes: The largest that an item of any rank may be.
        notes: Sentences a person should read.
    """

    sources: Mapping[str, TensorInfo]
    pieces: Mapping[str, Piece]
    read_items: Sequence[ReadItem]
    tile_bytes: int
    groups: Mapping[tuple[int, ...], Sequence[ReadItem]] = field(default_factory=dict)
    empty: Sequence[str] = ()
    notes: Sequence[str] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of what the caller gets."""
        return sum(piece.nbytes for piece in self.pieces.values())

    @cached_property
    def largest(self) -> int:
        """Bytes of the largest item."""
        return max((item.nbytes for item in self.read_items), default=1)

    @property
    def bytes_needed(self) -> int:
        """Bytes of stored elements that this rank needs."""
        return sum(item.nbytes for item in self.read_items if item.copies)


def plan_pieces(
    tensors: Mapping[str, TensorInfo],
    pieces: Mapping[str, Piece],
    tile_bytes: int,
    catalog: Catalog,
    *,
    drops: Iterable[Drop] | None = None,
    beside: Mapping[str, Iterable[Copy]] | None = None,
    peers: Mapping[tuple[str, Box], Sequence[int]] | None = None,
) -> LoadPlan:
    """The plan of some pieces, proved: copies of the same elements together, cut into boxes that are contiguous in what
    is read.

    Args:
        tensors: What is stored.
        pieces: What the caller gets, by key, in the order of the state dict.
        tile_bytes: The largest item.
        catalog: The checkpoint's.
        drops: What of the tensors is left out; None if other ranks may have what this one lacks.
        beside: What is read with a piece for checksums alone; it goes nowhere.
        peers: The ranks of the job that make a copy of a source box, this one among them; none by default.

    Raises:
        RequestError: An element of a piece would be filled twice or by nothing, or one of the tensors lost.
        IntegrityError: Something that is needed is damaged.
    """
    prove(pieces.values(), {name: info.shape for name, info in tensors.items()}, drops)
    copies = (c for name, piece in pieces.items() for c in (*piece.copies, *(beside or {}).get(name, ())))
    together: dict[tuple[str, Box], list[Copy]] = {}
    boxes: dict[str, list[Box]] = defaultdict(list)
    for copy in copies:
        if copy.source_box.volume:
            together.setdefault((copy.source, copy.source_box), []).append(copy)
    refuse_damage(catalog, {source for source, _ in together})
    read_items: list[ReadItem] = []
    groups: dict[tuple[int, ...], list[ReadItem]] = defaultdict(list)
    for (source, box), same_box in together.items():
        size = tensors[source].dtype.itemsize
        again = find_overlap([*boxes[source], box]) is not None if boxes[source] else False
        boxes[source].append(box)
        tiles = [box] if box.volume * size <= tile_bytes else contiguous_tiles(box, tile_bytes // size)
        items = [
            ReadItem(
                source,
                tile,
                tile.volume * size,
                tuple(
                    replace(copy, source_box=tile, target_box=target_box_of(copy, tile)) if tile is not box else copy
                    for copy in same_box
                    if copy.target
                ),
                again,
            )
            for tile in tiles
        ]
        read_items += items
        ranks = () if peers is None else tuple(sorted(peers[source, box]))
        if len(ranks) > 1:
            groups[ranks] += items
    sources = {name: tensors[name] for name in boxes}
    return LoadPlan(sources, pieces, read_items, tile_bytes, dict(sorted(groups.items())))
