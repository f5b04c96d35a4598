"""A plan made concrete: which tile of which source goes to which range of which output file.

A tile is a box of one source tensor, contiguous in C order, small enough to be held in memory. Reading a tile gathers it
from the stored chunks; writing it scatters it to all places its elements go to. Both sides are long contiguous ranges in
nearly every conversion, whichever axis the checkpoint was split along:

    chunks in the source files          tile = rows a..b             places in the output files
    +---------+---------+               +-----------------+          q_proj  [#####............]
    | tp 0    | tp 1    |   gather ->   | rows a..b, full |  ->      k_proj  [##...............]
    |#########|#########|               | width           | scatter  v_proj  [##...............]
    +---------+---------+               +-----------------+
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from converters.errors import IntegrityError, UsageError
from converters.names import printable
from converters.planning.plan import Op
from converters.planning.tasks import Tasks
from converters.words import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from converters.catalog import TensorInfo
    from converters.planning.plan import Drop
    from converters.planning.routes import Routes

MIB = 1 << 20
_TILE = 8 * MIB
_SMALLEST_TILE = 64 << 10
_LEAST_REQUEST = MIB  # of an object store: shorter ones wait longer than they last
_FEWEST_REQUESTS = 16


@dataclass(frozen=True, slots=True)
class Slice:
    """Bytes at an offset of an output file.

    Attributes:
        at: The offset.
        content: The bytes, or `(file, offset, length)` of the source: a `torch.save` archive whose checksums are compared.
        plain: It is no such archive, but any file, last changed at this time in ns; -1 for an archive.
    """

    at: int
    content: bytes | tuple[Path, int, int]
    plain: int = -1


@dataclass(frozen=True, slots=True)
class OutputFile:
    """A file to be written.

    Attributes:
        name: Name within the destination folder.
        size: Bytes, known before anything is written.
        literal: Bytes known in advance, at the file's beginning (a header, or the whole file).
        slices: Further bytes known in advance, or copied as they are from a source file.
    """

    name: str
    size: int
    literal: bytes = b""
    slices: tuple[Slice, ...] = ()


class Seals(Protocol):
    """Output records that end with their own checksum (torch.save archives).

    Attributes:
        apart: The worker that fills a record seals it at once; otherwise all are sealed at the end.
    """

    @property
    def apart(self) -> bool:
        """See above."""

    def fills(self) -> Iterable[tuple[int, int, int]]:
        """`(record, first byte, bytes)` of payload that no source fills: it stays zero."""

    def nbytes(self, record: int) -> int:
        """Payload bytes of a record."""

    def rereads(self) -> Iterable[tuple[int, int, int]]:
        """`(record, file, first byte)` of payloads whose sums are not taken on the way, but from the file at the end."""

    def seal(self, record: int, crc: int) -> tuple[int, list[tuple[int, bytes]]]:
        """The file of a record and what stands around its payload as `(offset, bytes)`, given the payload's CRC-32."""

    def end(self) -> Iterable[tuple[int, list[tuple[int, bytes]]]]:
        """What ends the files, as `seal` gives it, when all records are sealed.

        Raises:
            DistckptError: One was not.
        """


@dataclass(frozen=True)
class Job:
    """Everything the engine needs, and everything `--dry-run` prints.

    Attributes:
        sources: The source tensors that are read, in the order in which they are read.
        routes: Where their elements go.
        files: The output files.
        fingerprint: Digest of the source, the routes and the layout of the output; what a resume must agree with.
        tile_bytes: Size of a tile.
        peak_memory: Bytes of buffers that all workers hold together.
        computes: Some elements change their type or value on the way.
        seals: The output records that end with a checksum of their own, if the format has such.
        source_fingerprint: Digest of the source as it was when the job was made; it must be the same while it is read.
    """

    sources: Mapping[str, TensorInfo]
    routes: Routes
    files: Sequence[OutputFile]
    fingerprint: str
    tile_bytes: int
    threads: int
    peak_memory: int
    computes: bool = False
    seals: Seals | None = None
    source_fingerprint: str = ""

    @classmethod
    def build(
        cls,
        sources: Mapping[str, TensorInfo],
        routes: Routes,
        files: Sequence[OutputFile],
        *,
        source_fingerprint: str,
        max_memory: int = 64 * MIB,
        threads: int = 2,
        seals: Seals | None = None,
        drops: Iterable[Drop] = (),
        distant: bool = False,
    ) -> Job:
        """Proves the work complete, orders it by output file, and cuts it into tiles that fit in `max_memory` bytes.

        Args:
            drops: Elements of the sources that go nowhere, and why.
            distant: The source is in an object store: what a request brings is held beside the tile that it is put into, and
                many tiles are read at once, if need be smaller ones.

        Raises:
            RequestError: Something is not written, written twice or lost (`planning.plan.prove`), or `max_memory` is too
                small to hold a tile for one worker.
            IntegrityError: A tensor is needed that the checkpoint lacks, though it has its like: one moment of two.
        """
        absent = next((name for name in routes.sources() if name not in sources), None)
        if absent is not None:
            raise IntegrityError(
                f"{printable(absent)} is missing",
                hint="distckpt verify says what else is; --optimizer none keeps the weights",
                tensor=absent,
            )
        used = {name: sources[name] for name in routes.sources()}
        routes.prove({name: info.shape for name, info in used.items()}, [drop for drop in drops if drop.source in used])
        kinds = routes.kinds(used)
        # the tile, and a scratch that holds it in its widest form
        widths = (-(-new.itemsize // old.itemsize) for old, new, op in kinds if op is not Op.SCALES)
        buffers = 1 + distant + max(widths, default=1)
        tile, threads = _tile_size(buffers, max_memory, threads, _FEWEST_REQUESTS if distant else 1)
        digest = hashlib.sha256(f"1:{source_fingerprint}:{tile}:{routes.digest()}".encode())
        for output in files:
            digest.update(f"{output.name}:{output.size}:".encode())
            digest.update(hashlib.sha256(output.literal).digest())
            for part in output.slices:
                content = part.content if isinstance(part.content, bytes) else str(part.content).encode()
                content += str(part.plain).encode() if part.plain >= 0 else b""
                digest.update(f"{part.at}:".encode() + hashlib.sha256(content).digest())
        peak = threads * tile * buffers
        kinds = {kind for kind in kinds if kind[2] not in (Op.QUANTIZE, Op.SCALES)}  # these on the host
        computes = any(old != new or op in (Op.ADD_ONE, Op.SUBTRACT_ONE) for old, new, op in kinds)
        computes = computes or any(info.shift for info in used.values())
        return cls(used, routes, files, digest.hexdigest(), tile, threads, peak, computes, seals, source_fingerprint)

    @cached_property
    def tasks(self) -> Tasks:
        """The work in units, in order; the same list on every machine and for every number of workers."""
        return Tasks(self.sources, self.routes, self.tile_bytes)

    @property
    def bytes_read(self) -> int:
        """Bytes of tensor data that will be read."""
        return sum(source.nbytes for source in self.sources.values())

    @property
    def bytes_written(self) -> int:
        """Bytes of all output files."""
        return sum(output.size for output in self.files)


def _tile_size(buffers: int, max_memory: int, threads: int, at_once: int) -> tuple[int, int]:
    # the tile does not depend on the number of workers, so that a run may be continued with another number
    most = max_memory // buffers
    tile = min(_TILE, max(most // at_once, min(most, _LEAST_REQUEST)) // 4096 * 4096)
    if tile < _SMALLEST_TILE:
        need = buffers * _SMALLEST_TILE
        raise UsageError(
            f"--max-memory of {counted(max_memory, 'byte')} is too small: one worker needs {need:,} bytes",
            hint=f"give at least {-(-need // 1024)}KiB; 64MiB is the default",
        )
    return tile, max(1, min(threads, max_memory // (buffers * tile)))
