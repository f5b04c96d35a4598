"""One zarr array: what `.zarray` (or `zarr.json` of version 3) says, and which chunk files lie beside it.

    decoder.layers.mlp.linear_fc1.weight/
        .zarray     {"shape": [2, 96, 32], "chunks": [1, 24, 32], "dtype": "bfloat16", ...}
        0.0.0       elements [0:1, 0:24, 0:32], raw, C order, little-endian
        0.1.0       elements [0:1, 24:48, 0:32]

A chunk file is the elements and nothing else, because Megatron compresses nothing: it is streamed like any other record.
Chunks that another program encoded are decoded by `codecs`. At the upper edge of an array a chunk keeps its full size; what
lies outside the array means nothing.

Sources: specifications of zarr v2, v3; megatron/core/dist_checkpointing/strategies/zarr.py (core_v0.4.0 to core_v0.15.0).
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from converters.chunks import StoredArray
from converters.dtypes import TYPES, DType, dtype
from converters.errors import FormatError, UnsupportedError
from converters.formats.folder import scan
from converters.formats.links import follows_links
from converters.formats.plain_json import parse_json
from converters.formats.zarr.codecs import Codec
from converters.names import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from converters.formats.folder import Entry

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
_NEEDED_3 = {
    "zarr_format",
    "node_type",
    "shape",
    "data_type",
    "chunk_grid",
    "chunk_key_encoding",
    "fill_value",
    "codecs",
}
_ALLOWED_3 = _NEEDED_3 | {"attributes", "dimension_names", "storage_transformers"}
# codecs that leave all as it is
_RAW_3 = ([{"name": "bytes"}], [{"name": "bytes", "configuration": {"endian": "little"}}])
_LIMIT = 1 << 62
_NUMPY = re.compile(r"[<>|=](?:[biufcmMSUV]\d+|O)")  # types that numpy spells


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """What a `.zarray` says.

    Attributes:
        chunks: Elements of a chunk along each axis.
        separator: What stands between the numbers in the name of a chunk file: "." or "/".
        prefix: What stands before the first number: "c" and the separator in zarr 3.
        codec: How chunks are encoded; None: a chunk file is its elements.
    """

    dtype: DType
    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    separator: str
    prefix: str = ""
    codec: Codec | None = None

    @property
    def grid(self) -> tuple[int, ...]:
        """Number of chunks along each axis."""
        return tuple(-(-n // chunk) for n, chunk in zip(self.shape, self.chunks, strict=True))

    @property
    def chunk_nbytes(self) -> int:
        """Bytes of the elements of every chunk."""
        return math.prod(self.chunks) * self.dtype.itemsize

    def name(self, index: tuple[int, ...]) -> str:
        """Name of the file of a chunk, relative to the array's folder."""
        return self.prefix + self.separator.join(map(str, index)) or "0"

    def encoded(self, driver: str, document: dict[str, Any], text: str) -> ArraySpec:
        """The same array with encoded chunks; see `Codec`."""
        first = self.name((0,) * len(self.chunks))
        codec = Codec(driver, document | {"shape": list(self.chunks)}, first, self.chunk_nbytes, text)
        return replace(self, codec=codec)


def parse_zarray(raw: bytes, key: str) -> ArraySpec:
    """Reads a `.zarray`.

    Raises:
        FormatError: Not JSON of zarr v2.
        UnsupportedError: A filter, or elements that are not numbers.
    """
    label = f"{printable(key)}/.zarray"
    document = _document(raw, label, 2, _NEEDED, _NEEDED | {"dimension_separator"})
    if document["order"] not in ("C", "F"):
        raise FormatError(f"{label} has the order {printable(repr(document['order']))[:80]}, not 'C' or 'F'")
    compressor = document["compressor"]
    for name, container in (("compressor", dict), ("filters", list)):
        if not (document[name] is None or isinstance(document[name], container)):
            raise FormatError(f"{label} has {name} {printable(json.dumps(document[name]))[:100]}")
    if document["filters"]:
        raise UnsupportedError(
            f"{label} has filters {printable(json.dumps(document['filters']))[:100]}",
            hint="rewrite this array without filters; compressed ones are read",
        )
    separator = _separator(document.get("dimension_separator", "."), f"{label}: dimension_separator")
    kind, shape, chunks = _elements(document["dtype"], document["shape"], document["chunks"], _DTYPES, label)
    spec = ArraySpec(kind, shape, chunks, separator)
    order = "C" if len(shape) < 2 else document["order"]
    if compressor is None and order == "C":
        return spec
    single = {name: document[name] for name in _NEEDED}
    single |= {"dimension_separator": separator, "order": order, "fill_value": None, "filters": None}
    if kind.name == "bfloat16":
        single["dtype"] = kind.name
    how = f"compressor {printable(str(compressor.get('id')))[:40]}" if compressor else "Fortran's order"
    return spec.encoded("zarr", single, f"zarr 2, {how}")


def parse_zarr_json(raw: bytes, key: str) -> ArraySpec:
    """Reads the `zarr.json` of an array of version 3.

    Raises:
        FormatError: Not JSON of a zarr v3 array.
        UnsupportedError: Chunks of several sizes, or elements that are not numbers.
    """
    label = f"{printable(key)}/zarr.json"
    document = _document(raw, label, 3, _NEEDED_3, _ALLOWED_3)
    grid, encoding = (_named(document[name], label, name) for name in ("chunk_grid", "chunk_key_encoding"))
    if grid[0] != "regular" or encoding[0] not in ("default", "v2") or document.get("storage_transformers"):
        names = f"chunk_grid {grid[0]}, chunk_key_encoding {encoding[0]}"
        raise UnsupportedError(f"{label} has {printable(names)[:100]}; read are regular grids, named as by default")
    default = encoding[0] == "default"
    separator = _separator(encoding[1].get("separator", "/" if default else "."), f"{label}: separator")
    kinds = {kind.name: kind.name for kind in TYPES}
    sizes = grid[1].get("chunk_shape")
    kind, shape, chunks = _elements(document["data_type"], document["shape"], sizes, kinds, label)
    spec = ArraySpec(kind, shape, chunks, separator, f"c{separator if shape else ''}" if default else "")
    codecs = document["codecs"]
    if codecs in _RAW_3:
        return spec
    single = {name: document[name] for name in _NEEDED_3}
    steps = [_named(step, label, "codecs")[0] for step in codecs] if isinstance(codecs, list) else ["?"]
    text = f"zarr 3, {printable(', '.join(steps))[:80]}"
    if "sharding_indexed" in steps:  # a shard lacks chunks that hold nothing but the fill value: none could be missed
        raise UnsupportedError(f"{label} divides its chunks into further ones (sharding_indexed)")
    return spec.encoded("zarr3", single, text)


def _document(raw: bytes, label: str, version: int, needed: set[str], optional: set[str]) -> dict[str, Any]:
    document = parse_json(raw, label)
    if not isinstance(document, dict) or not document.keys() >= needed:
        missing = ", ".join(sorted(needed - document.keys())) if isinstance(document, dict) else "everything"
        raise FormatError(f"{label} does not describe a zarr array: {missing} is missing")
    unknown = sorted(document.keys() - optional)
    if unknown:
        raise FormatError(f"{label} has a member {printable(unknown[0])!r}, which zarr v{version} does not know")
    if document["zarr_format"] != version:
        stated = printable(repr(document["zarr_format"]))[:80]
        refusal = UnsupportedError if document["zarr_format"] in (1, 2, 3) else FormatError
        raise refusal(f"{label} has zarr_format {stated}, not {version}")
    return document


def _named(value: Any, label: str, member: str) -> tuple[str, dict[str, Any]]:
    """Name and configuration of an extension point of zarr v3, which may be a name alone."""
    name = value.get("name") if isinstance(value, dict) else value
    configuration = value.get("configuration", {}) if isinstance(value, dict) else {}
    if not isinstance(name, str) or not isinstance(configuration, dict):
        raise FormatError(f"{label} has {member} {printable(json.dumps(value))[:100]}")
    return name, configuration


def _separator(value: Any, label: str) -> str:
    if value not in (".", "/"):
        raise FormatError(f"{label} is {printable(repr(value))[:80]}, not '.' or '/'")
    return str(value)


def _elements(
    spelt: Any, shape: Any, chunks: Any, kinds: dict[str, str], label: str
) -> tuple[DType, tuple[int, ...], tuple[int, ...]]:
    """Element type, shape and chunk sizes of an array."""
    if not isinstance(spelt, str) or spelt not in kinds:
        raise (UnsupportedError if isinstance(spelt, str) and _NUMPY.fullmatch(spelt) else FormatError)(
            f"{label} has elements of type {printable(repr(spelt))[:100]}", details=[f"known: {', '.join(kinds)}"]
        )
    sizes, pieces = _sizes(shape, 0), _sizes(chunks, 1)
    kind = dtype(kinds[spelt])
    if sizes is None or pieces is None or len(sizes) != len(pieces) or len(sizes) > 32:
        raise FormatError(f"{label} has impossible sizes: shape {shape}, chunks {chunks}"[:300])
    if max(math.prod(sizes), math.prod(pieces)) * kind.itemsize >= _LIMIT or max(sizes, default=0) >= _LIMIT:
        raise FormatError(f"{label} has impossible sizes: shape {list(sizes)}, chunks {list(pieces)}"[:300])
    return kind, sizes, pieces


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
        all_full = all(n % chunk == 0 for n, chunk in zip(spec.shape, spec.chunks, strict=True))
        records = np.arange(first, first + len(self.cells), dtype=np.int64)
        return StoredArray(key, spec.shape, starts, sizes, records, None if all_full else spec.chunks)

    def file_name(self, position: int) -> str:
        """Name of the file of the chunk at a position in `cells`."""
        return self._name(int(self.cells[position]))

    def _name(self, cell: int) -> str:
        index = []
        for n in reversed(self.spec.grid):
            cell, at = divmod(cell, n)
            index.append(at)
        return self.spec.name(tuple(reversed(index)))

    def fault(self) -> tuple[str, str] | None:
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
    numbers = len(spec.shape) if spec.prefix else max(len(spec.shape), 1)
    grid = spec.grid if spec.prefix else spec.grid or (1,)
    depth = spec.name((0,) * numbers).count("/") + 1
    shape = re.compile(re.escape(spec.prefix) + re.escape(spec.separator).join([r"(0|[1-9]\d{0,18})"] * numbers))
    cells: list[int] = []
    bad: dict[int, str] = {}
    stray: list[str] = []
    follow = follows_links(folder)
    for name, entry in _entries(folder, entries, depth):
        match = shape.fullmatch(name)
        index = [int(text) for text in match.groups()] if match else []
        if not match or any(i >= n for i, n in zip(index, grid, strict=True)):
            if name not in (".zarray", ".zattrs", "zarr.json") and not re.fullmatch(r"shard_.*\.pt", name, re.DOTALL):
                stray.append(name)
            continue
        cell = 0
        for i, n in zip(index, grid, strict=True):
            cell = cell * n + i
        if not entry.is_file(follow_symlinks=follow):
            bad[cell] = "is not a regular file"
        elif (size := entry.stat(follow_symlinks=follow).st_size) != spec.chunk_nbytes and spec.codec is None:
            bad[cell] = f"is {size:,} bytes, .zarray needs {spec.chunk_nbytes:,}"
        else:
            cells.append(cell)
    return ChunkFiles(spec, np.sort(np.asarray(cells, np.int64)), bad, sorted(stray))


def _entries(folder: Path, entries: Iterable[Entry], depth: int, prefix: str = "") -> Iterator[tuple[str, Entry]]:
    """What lies in a folder; with "/" between the numbers, in the folders of each axis."""
    for entry in entries:
        name = prefix + entry.name
        if depth > 1 and entry.is_dir(follow_symlinks=follows_links(folder)):
            with scan(folder / entry.name) as inner:
                yield from _entries(folder / entry.name, inner, depth - 1, f"{name}/")
        else:
            yield name, entry
