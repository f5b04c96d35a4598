"""Writing torch.save files of many tensors, streamed: a whole model in one `model.pt`, a rank's `model_optim_rng.pt`.

    file = ArchiveFile("model.pt")
    file.tree = {"model": {piece.name: file.tensor(piece) for piece in pieces}, "iteration": 10}
    output = ArchiveOutput([file])
    Job.build(sources, output.routes, output.files, seals=output, ...)

A file is an inert tree, in which tensors stand as nodes, and their storages. What stands between the elements of two
storages is known from types and shapes but for CRC-32 sums, which are taken while the elements go by; so the engine streams
them into place, and the directory at the end of each file is written last. The bytes are those of torch.save (2.13).

    storage   +--------------+---------+------------------+---+-----
    pieces    | weight (r,c) | bias (r)| next weight      |gap| ...     one for a tensor of its own, many for a flat buffer
              +--------------+---------+------------------+---+-----
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from converters.crc import crc32
from converters.errors import DistckptError, RequestError
from converters.pickles.emit import dumps
from converters.pickles.nodes import PersId, references
from converters.planning.job import OutputFile, Slice
from converters.planning.plan import Op
from converters.planning.routes import CopyRoutes, Location
from converters.torchzip.records_out import ArchiveLayout, storage_node, tensor_node
from converters.words import counted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from converters.dtypes import DType
    from converters.pickles.nodes import Node, Obj
    from converters.planning.plan import Piece


@dataclass(frozen=True, slots=True)
class _Storage:
    """A storage of a file: pieces that lie one behind the other, or the given `content`."""

    nbytes: int
    pieces: Sequence[Piece] = ()
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

    def tensor(self, piece: Piece) -> Obj:
        """A tensor with a storage of its own."""
        return tensor_node(self.storage([piece]), piece.dtype, piece.shape)

    def storage(self, pieces: Sequence[Piece]) -> PersId:
        """A storage, for several tensors that share it (`archive.records_out.tensor_node`) or for a flat buffer.

        Args:
            pieces: What is in it, one behind the other, all of one element type.
        """
        nbytes, dtype = sum(piece.nbytes for piece in pieces), pieces[0].dtype
        node = storage_node(dtype, "", nbytes // dtype.itemsize)
        self._storages[node] = _Storage(nbytes, pieces)
        return node

    def literal(self, dtype: DType, shape: tuple[int, ...], content: bytes) -> Obj:
        """A small tensor whose elements are known."""
        if len(content) != math.prod(shape) * dtype.itemsize:
            raise RequestError(f"{len(content)} bytes are not a {dtype} tensor of {list(shape)}")
        node = storage_node(dtype, "", math.prod(shape))
        self._storages[node] = _Storage(len(content), content=content)
        return tensor_node(node, dtype, shape)

    def adopt(self, node: Node, members: Mapping[str, bytes]) -> Node:
        """Takes over a part of another archive's tree, with the small storages it refers to.

        Args:
            node: The part; its references are changed to be this file's.
            members: That archive's storages: `data/0` and so on.

        Raises:
            RequestError: A storage is not among them.
        """
        adopted: dict[Any, str] = {}
        for reference in references(node):
            key = reference.value[2]
            content = members.get(f"data/{key}")
            if content is None:
                raise RequestError(f"the storage {key!r} of a tensor in {self.name} is not there")
            new_key = adopted.setdefault(key, f"{len(self._storages)}:{key}")
            reference.value = (*reference.value[:2], new_key, "cpu", *reference.value[4:])
            self._storages[reference] = _Storage(len(content), content=content)
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
        located: list[tuple[Piece, Location]] = []
        for position, file in enumerate(files):
            pickle, storages = file.pickled()
            layout = ArchiveLayout(pickle, [s.nbytes for s in storages], PurePath(file.name).stem)
            slices = []
            for number, (storage, offset) in enumerate(zip(storages, layout.offsets, strict=True)):
                if storage.content is not None:
                    between = layout.between(number, crc32(storage.content))
                    slices += [Slice(offset, storage.content), Slice(*between)]
                    continue
                # a transposed tile lands in very many short runs, whose sums would be too many to keep
                reread = any(copy.op is Op.TRANSPOSE for piece in storage.pieces for copy in piece.copies)
                record = -1 if reread else len(self._records)
                self._records.append(_Record(position, number, offset, storage, reread))
                inside = 0
                for piece in storage.pieces:
                    located.append((piece, Location(position, offset + inside, record, inside)))
                    inside += piece.nbytes
            self.files.append(OutputFile(file.name, layout.length, layout.prefix, tuple(slices)))
            self._layouts.append(layout)
        self._unsealed = set(range(len(self._records)))
        self.routes = CopyRoutes.of(located)

    def fills(self) -> Iterator[tuple[int, int, int]]:
        """See `Seals`."""
        for number, record in enumerate(self._records):
            if record.reread:
                continue
            if not record.storage.nbytes:
                yield number, 0, 0
            begin = 0
            for piece in record.storage.pieces:
                yield from ((number, begin + first, nbytes) for first, nbytes in piece.zero_bytes())
                begin += piece.nbytes

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
            raise DistckptError(f"{counted(len(self._unsealed), 'storage')} not filled: {', '.join(sorted(names))}")
        yield from ((file, [layout.suffix()]) for file, layout in enumerate(self._layouts))
