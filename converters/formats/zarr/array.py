"""One zarr array as Megatron wrote it: what `.zarray` says, and which chunk files lie beside it.

    decoder.layers.mlp.linear_fc1.weight/
        .zarray     {"shape": [2, 96, 32], "chunks": [1, 24, 32], "dtype": "bfloat16", ...}
        0.0.0       elements [0:1, 0:24, 0:32], raw, C order, little-endian
        0.1.0       elements [0:1, 24:48, 0:32]

A chunk file is the elements and nothing else, because Megatron compresses nothing: it is streamed like any other record.
At the upper edge of an array a chunk keeps its full size; what lies outside the array means nothing.

Sources: zarr v2 specification; megatron/core/dist_checkpointing/strategies/zarr.py (tags core_v0.4.0 to core_v0.15.0).
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from converters.catalog import StoredArray
from converters.dtypes import DType, dtype
from converters.errors import FormatError
from converters.formats.folder import scan
from converters.formats.plain_json import parse_json
from converters.names import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from converters.formats.folder import Entry

__all__ = ["ArraySpec", "ChunkFiles", "parse_zarray", "scan_chunks"]

# zarr's spelling -> ours; Megatron writes "bfloat16" over the "<V2" that zarr makes of a type it does not know
_DTYPES = {
    **dict.fromkeys(("bfloat16", "<V2", "|V2"), "bfloat16"),
    **{f"<{kind}{n}": f"{name}{8 * n}" for kind, name in (("i", "int"), ("u", "uint")) for n in (2, 4, 8)},
    **{f"<f{n}": f"float{8 * n}" for n in (2, 4, 8)},
    **{f"<c{n}": f"complex{8 * n}" for n in (8, 16)},
    "|i1": "int8",
    "|u1": "uint8",
    "|b1": "bool",
}
_NEEDED = {"zarr_format", "shape", "chunks", "dtype", "compressor", "fill_value", "order", "filters"}
_LIMIT = 1 << 62


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """What a `.zarray` says.

    Attributes:
        chunks: Elements of a chunk along each axis.
        separator: What stands between the numbers in the name of a chunk file: "." or "/".
    """

    dtype: DType
    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    separator: str

    @property
    def grid(self) -> tuple[int, ...]:
        """Number of chunks along each axis."""
        return tuple(-(-n // chunk) for n, chunk in zip(self.shape, self.chunks, strict=True))

    @property
    def chunk_nbytes(self) -> int:
        """Bytes of every chunk file."""
        return math.prod(self.chunks) * self.dtype.itemsize

    def name(self, index: tuple[int, ...]) -> str:
        """Name of the file of a chunk, relative to the array's folder."""
        return self.separator.join(map(str, index)) or "0"


def parse_zarray(raw: bytes, key: str) -> ArraySpec:
    """Reads a `.zarray` that Megatron can have written.

    Raises:
        FormatError: Not JSON of zarr v2, or of a kind that Megatron never writes: compressed, filtered, not numeric.
    """
    what = f"{printable(key)}/.zarray"
    document = parse_json(raw, what)
    if not isinstance(document, dict) or not document.keys() >= _NEEDED:
        missing = ", ".join(sorted(_NEEDED - document.keys())) if isinstance(document, dict) else "everything"
        raise FormatError(f"{what} does not describe a zarr array: {missing} is missing")
    unknown = sorted(document.keys() - _NEEDED - {"dimension_separator"})
    if unknown:
        raise FormatError(f"{what} has a member {printable(unknown[0])!r}, which zarr v2 does not know")
    if document["zarr_format"] != 2 or document["order"] != "C":
        found = f"zarr_format {document['zarr_format']!r}, order {document['order']!r}"
        raise FormatError(f"{what} has {printable(found)}; Megatron writes zarr_format 2, order 'C'")
    for name in ("compressor", "filters"):
        if document[name] is not None:
            raise FormatError(
                f"{what} has {name} {printable(json.dumps(document[name]))[:100]}; Megatron stores chunks as they are",
                hint="this array was not written by Megatron: rewrite it uncompressed",
            )
    separator = document.get("dimension_separator", ".")
    if separator not in (".", "/"):
        raise FormatError(f"{what} has the dimension_separator {printable(repr(separator))}, not '.' or '/'")
    spelt = document["dtype"]
    if not isinstance(spelt, str) or spelt not in _DTYPES:
        raise FormatError(
            f"{what} has elements of type {printable(repr(spelt))[:100]}", details=[f"known: {', '.join(_DTYPES)}"]
        )
    shape, chunks = _sizes(document["shape"], 0), _sizes(document["chunks"], 1)
    kind = dtype(_DTYPES[spelt])
    if shape is None or chunks is None or len(shape) != len(chunks) or len(shape) > 32:
        raise FormatError(f"{what} has impossible sizes: shape {document['shape']}, chunks {document['chunks']}"[:300])
    if max(math.prod(shape), math.prod(chunks)) * kind.itemsize >= _LIMIT or max(shape, default=0) >= _LIMIT:
        raise FormatError(f"{what} has impossible sizes: shape {list(shape)}, chunks {list(chunks)}"[:300])
    return ArraySpec(kind, shape, chunks, separator)


def _sizes(value: Any, least: int) -> tuple[int, ...] | None:
    if not isinstance(value, list) or not all(type(n) is int and n >= least for n in value):
        return None
    return tuple(value)


@dataclass(frozen=True, slots=True)
class ChunkFiles:
    """The chunk files of an array.

    Attributes:
        spec: What `.zarray` says.
        cells: Sorted numbers, in C order of the grid, of the chunks whose file can be read.
        bad: For a chunk whose file cannot be used, what is wrong with it.
        stray: Files that belong to no chunk.
    """

    spec: ArraySpec
    cells: NDArray[np.int64]
    bad: dict[int, str] = field(default_factory=dict)
    stray: list[str] = field(default_factory=list)

    def stored(self, key: str, first: int) -> StoredArray:
        """The chunks as the catalog keeps them; their records are numbered from `first` on."""
        spec, ndim = self.spec, len(self.spec.shape)
        index = np.zeros((len(self.cells), ndim), np.int64)
        if ndim and len(self.cells):
            index = np.stack(np.unravel_index(self.cells, spec.grid), axis=1).astype(np.int64)
        chunks = np.asarray(spec.chunks, np.int64)
        starts = index * chunks
        sizes = np.minimum(chunks, np.asarray(spec.shape, np.int64) - starts)
        whole = all(n % chunk == 0 for n, chunk in zip(spec.shape, spec.chunks, strict=True))
        records = np.arange(first, first + len(self.cells), dtype=np.int64)
        return StoredArray(key, spec.shape, starts, sizes, records, None if whole else spec.chunks)

    def file_name(self, position: int) -> str:
        """Name of the file of the chunk at a position in `cells`."""
        return self._name(int(self.cells[position]))

    def _name(self, cell: int) -> str:
        index = []
        for n in reversed(self.spec.grid):
            cell, at = divmod(cell, n)
            index.append(at)
        return self.spec.name(tuple(reversed(index)))

    def trouble(self) -> tuple[str, str] | None:
        """What is wrong, in words, with the file it is about; None if every chunk has its file."""
        absent = math.prod(self.spec.grid) - len(self.cells)
        if not absent:
            return None
        more = f", and {absent - 1:,} more are missing or damaged" if absent > 1 else ""
        if self.bad:
            cell = min(self.bad)
            return self._name(cell), f"{self.bad[cell]}{more}"
        gaps = np.flatnonzero(self.cells != np.arange(len(self.cells)))
        name = self._name(int(gaps[0]) if len(gaps) else len(self.cells))
        return name, f"is missing{more}"

    def incomplete(self, depth: int) -> Iterator[tuple[int, ...]]:
        """Indices along the first `depth` axes of the sub-arrays that lack a chunk."""
        spec, lead = self.spec, self.spec.grid[:depth]
        each = math.prod(spec.grid[depth:])
        counts = np.bincount(self.cells // max(each, 1), minlength=math.prod(lead))
        for cell in np.flatnonzero(counts < each).tolist():
            at = np.unravel_index(cell, lead) if depth else ()
            begin = [int(i) * n for i, n in zip(at, spec.chunks, strict=False)]
            extent = [min(n, m - b) for b, n, m in zip(begin, spec.chunks, spec.shape, strict=False)]
            yield from (tuple(b + i for b, i in zip(begin, inner, strict=True)) for inner in np.ndindex(*extent))


def scan_chunks(folder: Path, entries: Iterable[Entry], spec: ArraySpec) -> ChunkFiles:
    """Finds the chunk files of an array and compares their sizes.

    Returns:
        The files by number; a link, a folder or a device in the place of a chunk is not followed: that chunk is damaged.
    """
    depth = max(len(spec.shape), 1)
    grid = spec.grid or (1,)
    shape = re.compile(re.escape(spec.separator).join([r"(0|[1-9]\d{0,18})"] * depth))
    cells: list[int] = []
    bad: dict[int, str] = {}
    stray: list[str] = []
    for name, entry in _entries(folder, entries, depth if spec.separator == "/" else 1):
        found = shape.fullmatch(name)
        index = [int(text) for text in found.groups()] if found else []
        if not found or any(i >= n for i, n in zip(index, grid, strict=True)):
            if name not in (".zarray", ".zattrs") and not re.fullmatch(r"shard_.*\.pt", name, re.DOTALL):
                stray.append(name)
            continue
        cell = 0
        for i, n in zip(index, grid, strict=True):
            cell = cell * n + i
        if not entry.is_file(follow_symlinks=False):
            bad[cell] = "is not a regular file"
        elif (size := entry.stat(follow_symlinks=False).st_size) != spec.chunk_nbytes:
            bad[cell] = f"is {size:,} bytes, .zarray needs {spec.chunk_nbytes:,}"
        else:
            cells.append(cell)
    return ChunkFiles(spec, np.sort(np.asarray(cells, np.int64)), bad, sorted(stray))


def _entries(folder: Path, entries: Iterable[Entry], depth: int, prefix: str = "") -> Iterator[tuple[str, Entry]]:
    """What lies in a folder; with "/" between the numbers, in the folders of each axis."""
    for entry in entries:
        name = prefix + entry.name
        if depth > 1 and entry.is_dir(follow_symlinks=False):
            with scan(folder / entry.name) as inner:
                yield from _entries(folder / entry.name, inner, depth - 1, f"{name}/")
        else:
            yield name, entry
