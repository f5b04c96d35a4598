"""Writing torch DCP's `.metadata`: a pickle of torch's own classes, made from arrays without making the objects.

A million chunks are two million rows of bytes: one row differs from the next in a few integers, so the rows of a key are a
matrix whose columns numpy fills. Only the first row of a kind is spelled out, to introduce its classes and names to the
pickle's memo; the others refer to them.

Sources: torch/distributed/checkpoint/metadata.py and filesystem.py (2.13), CPython's Lib/pickletools.py.
"""

from __future__ import annotations

import contextlib
import struct
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray

    from converters.formats.dcp.stored import StoredTensor

_DCP = "torch.distributed.checkpoint.metadata"
_FILES = "torch.distributed.checkpoint.filesystem"
_BATCH = 1000  # items between MARK and APPENDS or SETITEMS, as CPython's pickler
_LIMIT = 1 << 31


def write_metadata(
    tensors: Sequence[StoredTensor],
    objects: Iterable[tuple[str, int, int, int]],
    files: Sequence[str],
    *,
    checkpoint_id: str,
    save_id: str,
) -> bytes:
    """The contents of `.metadata`, as torch DCP and every Megatron-Core read it.

    Args:
        objects: `(key, file, first byte, bytes)` of every stored object.
        checkpoint_id: What torch records as the checkpoint's name.
    """
    out = _Pickle()
    listed = list(objects)
    with out.instance(_DCP, "Metadata"):
        out.name("state_dict_metadata")
        with out.mapping():
            for key, *_ in listed:
                out.name(key)
                out.new(_DCP, "BytesStorageMetadata")
            for tensor in tensors:
                out.name(tensor.key)
                _tensor_entry(out, tensor)
        out.name("planner_data")
        out.raw(b"N")
        out.name("storage_data")
        with out.mapping():
            for key, file, start, length in listed:
                _index(out, key, None)
                _info(out, files[file], start, length)
            for tensor in tensors:
                _storage_entries(out, tensor, files)
        out.name("storage_meta")
        with out.instance(_DCP, "StorageMeta"):
            for text in ("checkpoint_id", checkpoint_id, "save_id", save_id, "load_id"):
                out.name(text)
            out.raw(b"N")
            out.name("modules")
            out.raw(b"]")
        out.name("version")
        out.name("1.0.0")
        out.name("mcore_data")  # readers before Megatron-Core 0.15 look here for flattened tensors; nothing of ours is
        with out.mapping():
            for tensor in tensors:
                out.name(tensor.key)
                out.raw(b"}")
    return out.finish()


def _tensor_entry(out: _Pickle, table: StoredTensor) -> None:
    with out.instance(_DCP, "TensorStorageMetadata"):
        out.name("properties")
        out.new(_DCP, "TensorProperties")
        out.raw(b"(")  # its state is a tuple: dtype, layout, requires_grad, memory format, pin_memory
        out.named("torch", table.dtype)
        out.named("torch.serialization", "_get_layout")
        out.name("torch.strided")
        out.raw(b"\x85R\x89")
        out.named(_DCP, "_MEM_FORMAT_ENCODING")
        out.raw(b"K\x00\x85R\x89tb")
        out.name("size")
        out.size(table.shape)
        out.name("chunks")
        out.raw(b"]")
        count = len(table.starts)
        if count:
            out.raw(b"(")
            with out.instance(_DCP, "ChunkStorageMetadata"):
                out.name("offsets")
                out.size(table.starts[0].tolist())
                out.name("sizes")
                out.size(table.sizes[0].tolist())
            out.raw(b"e")
        row = _Row(out, max(int(table.starts.max(initial=0)), int(table.sizes.max(initial=0))) >= _LIMIT)
        row.open(_DCP, "ChunkStorageMetadata")
        row.attribute("offsets").size(table.starts[1:])
        row.attribute("sizes").size(table.sizes[1:])
        row.close()
        out.batches(row.matrix(count - 1), b"e")


def _storage_entries(out: _Pickle, table: StoredTensor, files: Sequence[str]) -> None:
    # rows that name a file for the first time are spelled out, the others refer to it
    _, first = np.unique(table.file, return_index=True)
    spelled = [row for row in first.tolist() if not out.memoized(files[int(table.file[row])])] or first[:1].tolist()
    for row in spelled:
        _index(out, table.key, table.starts[row].tolist())
        _info(out, files[int(table.file[row])], int(table.offset[row]), int(table.length[row]))
    rest = np.ones(len(table.file), bool)
    rest[spelled] = False
    if not rest.any():
        return
    row_of = _Row(out, int(table.starts.max(initial=0)) >= _LIMIT)
    row_of.open(_DCP, "MetadataIndex")
    row_of.attribute("fqn").reference(table.key)
    row_of.attribute("offset").size(table.starts[rest])
    row_of.attribute("index").constant(b"N")
    row_of.close()
    row_of.open(_FILES, "_StorageInfo")
    memo = np.array([out.memo.get(name, 0) for name in files], np.int64)
    row_of.attribute("relative_path").references(memo[table.file[rest]])
    row_of.attribute("offset").wide(table.offset[rest])
    row_of.attribute("length").wide(table.length[rest])
    row_of.close()
    out.batches(row_of.matrix(int(rest.sum())), b"u")


def _index(out: _Pickle, key: str, offset: Sequence[int] | None) -> None:
    with out.instance(_DCP, "MetadataIndex"):
        out.name("fqn")
        out.name(key)
        out.name("offset")
        if offset is None:
            out.raw(b"N")
        else:
            out.size(offset)
        out.name("index")
        out.raw(b"N")


def _info(out: _Pickle, file: str, start: int, length: int) -> None:
    with out.instance(_FILES, "_StorageInfo"):
        out.name("relative_path")
        out.name(file)
        for attribute, value in (("offset", start), ("length", length)):
            out.name(attribute)
            out.integer(value)


class _Pickle:
    """A protocol 4 pickle being written. Names and classes are memoized, nothing else is.

    Attributes:
        memo: Memo numbers of names, and of classes as `(module, name)`.
    """

    def __init__(self) -> None:
        self._parts: list[bytes] = [b"\x80\x04"]
        self.memo: dict[str | tuple[str, str], int] = {}

    def raw(self, data: bytes) -> None:
        self._parts.append(data)

    def finish(self) -> bytes:
        return b"".join([*self._parts, b"."])

    def memoized(self, name: str) -> bool:
        return name in self.memo

    def name(self, text: str) -> None:
        """A string."""
        number = self.memo.get(text)
        if number is not None:
            self.raw(b"j" + struct.pack("<I", number))
            return
        data = text.encode("utf-8", "surrogatepass")
        self.raw(
            (b"\x8c" + bytes([len(data)]) if len(data) < 256 else b"X" + struct.pack("<I", len(data))) + data + b"\x94"
        )
        self.memo[text] = len(self.memo)

    def named(self, module: str, name: str) -> None:
        """Something in a module."""
        number = self.memo.get((module, name))
        if number is not None:
            self.raw(b"j" + struct.pack("<I", number))
            return
        self.name(module)
        self.name(name)
        self.raw(b"\x93\x94")
        self.memo[module, name] = len(self.memo)

    def new(self, module: str, name: str) -> None:
        """An instance of a class, without attributes yet."""
        self.named(module, name)
        self.raw(b")\x81")

    def integer(self, value: int) -> None:
        self.raw(b"J" + struct.pack("<i", value) if value < _LIMIT else b"\x8a\x08" + struct.pack("<q", value))

    def size(self, values: Sequence[int]) -> None:
        """A torch.Size."""
        self.named("torch", "Size")
        before, behind = _tuple(len(values))
        self.raw(before)
        for value in values:
            self.integer(value)
        self.raw(behind + b"\x85R")

    @contextlib.contextmanager
    def mapping(self, behind: bytes = b"u") -> Iterator[None]:
        """A dict whose entries are written inside the `with`."""
        self.raw(b"}(")
        yield
        self.raw(behind)

    def instance(self, module: str, name: str) -> AbstractContextManager[None]:
        """An instance whose attributes are written inside the `with`."""
        self.new(module, name)
        return self.mapping(b"ub")

    def batches(self, rows: NDArray[np.uint8], end: bytes) -> None:
        """Many items for the list, or entries for the dict, that is being written (a MARK of the latter is open)."""
        if end == b"u":
            self.raw(b"u")
        for low in range(0, len(rows), _BATCH):
            self.raw(b"(" + rows[low : low + _BATCH].tobytes() + end)
        if end == b"u":
            self.raw(b"(")


def _tuple(count: int) -> tuple[bytes, bytes]:
    return (b"", [b")", b"\x85", b"\x86", b"\x87"][count]) if count < 4 else (b"(", b"t")


class _Row:
    """The bytes of one item, with holes that differ from item to item."""

    def __init__(self, out: _Pickle, wide: bool) -> None:
        self._out, self._wide = out, wide
        self._bytes = bytearray()
        self._holes: list[tuple[int, NDArray[np.uint8]]] = []

    def constant(self, data: bytes) -> _Row:
        self._bytes += data
        return self

    def reference(self, what: str | tuple[str, str]) -> _Row:
        return self.constant(b"j" + struct.pack("<I", self._out.memo[what]))

    def open(self, module: str, name: str) -> None:
        self.reference((module, name)).constant(b")\x81}(")

    def close(self) -> None:
        self.constant(b"ub")

    def attribute(self, name: str) -> _Row:
        return self.reference(name)

    def _hole(self, opcode: bytes, values: NDArray[np.int64], kind: str) -> None:
        self._bytes += opcode
        width = np.dtype(kind).itemsize
        self._holes.append((len(self._bytes), values.astype(kind).view(np.uint8).reshape(len(values), width)))
        self._bytes += bytes(width)

    def references(self, numbers: NDArray[np.int64]) -> None:
        self._hole(b"j", numbers, "<u4")

    def wide(self, values: NDArray[np.int64]) -> None:
        self._hole(b"\x8a\x08", values, "<i8")

    def size(self, values: NDArray[np.int64]) -> None:
        self.reference(("torch", "Size"))
        before, behind = _tuple(values.shape[1])
        self.constant(before)
        for column in values.T:
            if self._wide:
                self.wide(column)
            else:
                self._hole(b"J", column, "<i4")
        self.constant(behind + b"\x85R")

    def matrix(self, count: int) -> NDArray[np.uint8]:
        rows = np.tile(np.frombuffer(bytes(self._bytes), np.uint8), (max(count, 0), 1))
        for at, data in self._holes:
            if len(rows):
                rows[:, at : at + data.shape[1]] = data
        return rows
