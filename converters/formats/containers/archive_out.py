"""Writing torch.save files of many tensors, streamed: a whole model in one `model.pt`, a rank's `model_optim_rng.pt`.

    file = ArchiveFile("model.pt")
    file.tree = {"model": {name: file.tensor(dtype, shape, copies) for ...}, "iteration": 10}
    output = ArchiveOutput([file])
    Job.build(sources, output.routes, output.files, seals=output, ...)

A file is an inert tree, in which tensors stand as nodes, and their storages. What stands between the elements of two
storages is known from types and shapes but for CRC-32 sums, which are taken while the elements go by; so the engine streams
them into place, and the directory at the end of each file is written last. The bytes are those of torch.save (2.13).

    storage   +--------------+---------+------------------+---+-----
    regions   | weight (r,c) | bias (r)| next weight      |   | ...     one for a tensor of its own, many for a flat buffer
              +--------------+---------+------------------+---+-----
                                                           ^ fills: zero
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from converters.archive.records_out import ArchiveLayout, storage_node, tensor_node
from converters.box import Box, find_overlap, runs, uncovered
from converters.errors import DistckptError, RequestError
from converters.pickles import PersId, dumps, references
from converters.planning.job import CopyRoutes, OutputFile, Place, Slice
from converters.planning.plan import Copy, Op, Target

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from converters.dtypes import DType
    from converters.pickles import Node, Obj

__all__ = ["ArchiveFile", "ArchiveOutput", "Region"]


@dataclass(frozen=True, slots=True)
class Region:
    """An array inside a storage, in C order.

    Attributes:
        shape: Its shape, which target boxes refer to.
        copies: What fills it, from whole source tensors.
        fills: What nothing fills: it is zero.
        first: Its first element in the storage.
        name: How to name it in an error.
    """

    shape: tuple[int, ...]
    copies: Sequence[Copy] = ()
    fills: Sequence[Box] = ()
    first: int = 0
    name: str = "a tensor"

    def check(self) -> None:
        """Checks that copies and fills tile it.

        Raises:
            RequestError: They do not.
        """
        boxes = [*(copy.target_box for copy in self.copies), *self.fills]
        if len(boxes) == 1 and boxes[0] == Box.whole(self.shape):
            return
        outside = next((box for box in boxes if not box.inside(self.shape)), None)
        if outside is not None:
            raise RequestError(f"{outside} lies outside {self.name} of shape {list(self.shape)}", tensor=self.name)
        gap = uncovered(self.shape, boxes)
        if gap is not None or find_overlap(boxes) is not None:
            what = "is written twice" if gap is None else f"is not filled at {gap}"
            raise RequestError(f"{self.name} of shape {list(self.shape)} {what}", tensor=self.name)


@dataclass(frozen=True, slots=True)
class _Storage:
    """A storage of a file: `nbytes` that regions fill, or the given `content`."""

    dtype: DType | None
    nbytes: int
    regions: Sequence[Region] = ()
    content: bytes | None = None


class ArchiveFile:
    """A file to be written.

    Args:
        name: Path within the destination folder.

    Attributes:
        tree: What is saved: plain data, inert nodes, and the tensors that this file made.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.tree: Node = None
        self._storages: dict[PersId, _Storage] = {}

    def tensor(
        self, dtype: DType, shape: tuple[int, ...], copies: Sequence[Copy], fills: Sequence[Box] = (), name: str = ""
    ) -> Obj:
        """A tensor with a storage of its own.

        Args:
            dtype: Element type; elements of sources of another are cast.
            fills: What nothing fills: it is zero.
            name: How to name it in an error; by default as the copies do.

        Raises:
            RequestError: Copies and fills do not tile it.
        """
        name = name or (copies[0].target if copies else "a tensor")
        return tensor_node(
            self.storage(dtype, math.prod(shape), [Region(shape, copies, fills, name=name)]), dtype, shape
        )

    def storage(self, dtype: DType, numel: int, regions: Sequence[Region]) -> PersId:
        """A storage, for several tensors that share it (`archive.records_out.tensor_node`) or for a flat buffer.

        Args:
            regions: What is in it; together they tile it.

        Raises:
            RequestError: They do not, or their copies and fills do not tile them.
        """
        at = 0
        for region in sorted(regions, key=lambda region: region.first):
            if region.first != at:
                raise RequestError(f"{region.name} begins at element {region.first} of a storage, not at {at}")
            region.check()
            at += math.prod(region.shape)
        if at != numel:
            raise RequestError(f"{at} of {numel} elements of a storage are filled")
        node = storage_node(dtype, "", numel)
        self._storages[node] = _Storage(dtype, numel * dtype.itemsize, regions)
        return node

    def literal(self, dtype: DType, shape: tuple[int, ...], content: bytes) -> Obj:
        """A small tensor whose elements are known."""
        if len(content) != math.prod(shape) * dtype.itemsize:
            raise RequestError(f"{len(content)} bytes are not a {dtype} tensor of {list(shape)}")
        node = storage_node(dtype, "", math.prod(shape))
        self._storages[node] = _Storage(dtype, len(content), content=content)
        return tensor_node(node, dtype, shape)

    def adopt(self, node: Node, members: Mapping[str, bytes]) -> Node:
        """Takes over a part of another archive's tree, with the small storages it refers to.

        Args:
            node: The part; its references are changed to be this file's.
            members: That archive's storages: `data/0` and so on.

        Raises:
            RequestError: A storage is not among them.
        """
        taken: dict[Any, str] = {}
        for reference in references(node):
            key = reference.value[2]
            content = members.get(f"data/{key}")
            if content is None:
                raise RequestError(f"the storage {key!r} of a tensor in {self.name} is not there")
            own = taken.setdefault(key, f"{len(self._storages)}:{key}")
            reference.value = (*reference.value[:2], own, "cpu", *reference.value[4:])
            self._storages[reference] = _Storage(None, len(content), content=content)
        return node

    def pickled(self) -> tuple[bytes, list[_Storage]]:
        """The contents of `data.pkl`, and the storages in the order in which it mentions them, as torch numbers them."""
        numbers: dict[Any, str] = {}
        order: list[_Storage] = []

        def refer(node: PersId) -> Node:
            storage = self._storages.get(node)
            if storage is None:
                raise RequestError(f"{self.name} refers to a tensor of another file")
            tag, kind, key, location, numel = node.value
            key = key or id(node)
            if key not in numbers:
                numbers[key] = str(len(numbers))
                order.append(storage)
            return (tag, kind, numbers[key], location, numel)

        return dumps(self.tree, 2, refer), order


@dataclass(frozen=True, slots=True)
class _Record:
    """A storage that is streamed: its archive, its number there, its payload and whether its sum is taken at the end."""

    file: int
    number: int
    offset: int
    storage: _Storage
    reread: bool


class ArchiveOutput:
    """The files, laid out. Implements `Seals` of a job.

    Args:
        files: With their trees; only storages that a tree mentions are written.

    Attributes:
        routes: Where the elements of the source tensors go.
        files: The output files.
        apart: See `Seals`.
    """

    apart = False  # the directory at a file's end needs the sums of all its storages

    def __init__(self, files: Sequence[ArchiveFile]) -> None:
        self.files: list[OutputFile] = []
        self._layouts: list[ArchiveLayout] = []
        self._records: list[_Record] = []
        copies: list[Copy] = []
        targets: dict[str, Target] = {}
        places: dict[str, Place] = {}
        for position, file in enumerate(files):
            pickle, storages = file.pickled()
            layout = ArchiveLayout(pickle, [s.nbytes for s in storages], PurePath(file.name).stem)
            slices = []
            for number, (storage, offset) in enumerate(zip(storages, layout.offsets, strict=True)):
                if storage.content is not None:
                    between = layout.between(number, zlib.crc32(storage.content))
                    slices += [Slice(offset, storage.content), Slice(*between)]
                    continue
                # a transposed tile lands in very many short runs, whose sums would be too many to keep
                reread = any(copy.op is Op.TRANSPOSE for region in storage.regions for copy in region.copies)
                record = -1 if reread else len(self._records)
                self._records.append(_Record(position, number, offset, storage, reread))
                assert storage.dtype is not None
                for region in storage.regions:
                    name = f"{position}:{number}:{region.first}"
                    base = region.first * storage.dtype.itemsize
                    targets[name] = Target(name, storage.dtype, region.shape)
                    places[name] = Place(position, offset + base, record, base)
                    copies += [replace(copy, target=name) for copy in region.copies]
            self.files.append(OutputFile(file.name, layout.length, layout.prefix, tuple(slices)))
            self._layouts.append(layout)
        self._unsealed = set(range(len(self._records)))
        self.routes = CopyRoutes.of(copies, targets, places)

    def fills(self) -> Iterator[tuple[int, int, int]]:
        """See `Seals`."""
        for number, record in enumerate(self._records):
            if record.reread:
                continue
            if not record.storage.nbytes:
                yield number, 0, 0
            assert record.storage.dtype is not None
            size = record.storage.dtype.itemsize
            for region in record.storage.regions:
                for box in region.fills:
                    yield from ((number, at * size, n * size) for at, n in _spans(box, region) if n)

    def nbytes(self, record: int) -> int:
        """See `Seals`."""
        return self._records[record].storage.nbytes

    def rereads(self) -> Iterator[tuple[int, int, int]]:
        """See `Seals`."""
        for number, record in enumerate(self._records):
            if record.reread:
                yield number, record.file, record.offset

    def seal(self, record: int, crc: int) -> tuple[int, list[tuple[int, bytes]]]:
        """See `Seals`."""
        at = self._records[record]
        self._unsealed.discard(record)
        return at.file, [self._layouts[at.file].between(at.number, crc)]

    def end(self) -> Iterator[tuple[int, list[tuple[int, bytes]]]]:
        """See `Seals`."""
        if self._unsealed:
            names = {self.files[self._records[record].file].name for record in self._unsealed}
            raise DistckptError(f"{len(self._unsealed)} storages of {', '.join(sorted(names))} were not filled")
        yield from ((file, [layout.suffix()]) for file, layout in enumerate(self._layouts))


def _spans(box: Box, region: Region) -> Iterator[tuple[int, int]]:
    """`(first element in the storage, elements)` of the runs of a box."""
    if not box.volume:
        return
    first, length, outer = runs(box, region.shape)
    starts = [region.first + first]
    for count, stride in outer:
        starts = [start + index * stride for start in starts for index in range(count)]
    yield from ((start, length) for start in starts)
