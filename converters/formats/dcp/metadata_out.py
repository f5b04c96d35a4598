"""Writing torch DCP's `.metadata`: a pickle of torch's own classes, made from arrays without making the objects.

A million chunks are two million rows of bytes: one row differs from the next in a few integers, so the rows of a key are a
matrix whose columns numpy fills. Only the first row of a kind is spelled out, to introduce its classes and names to the
pickle's memo; the others refer to them.

Sources: torch/distributed/checkpoint/metadata.py and filesystem.py (2.13), CPython's Lib/pickletools.py.
"""

from __future__ import annotations

import contextlib
import struct
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray

    from converters.formats.dcp.stored import StoredTensor

    _Number: TypeAlias = int | NDArray[np.int64]

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
            _chunk(out, table.starts[0].tolist(), table.sizes[0].tolist())
            out.raw(b"e")
            rows = _Rows(out, wide=max(int(table.starts.max(initial=0)), int(table.sizes.max(initial=0))) >= _LIMIT)
            _chunk(rows, [*table.starts[1:].T], [*table.sizes[1:].T])
            out.batches(rows.matrix(count - 1), b"e")


def _storage_entries(out: _Pickle, table: StoredTensor, files: Sequence[str]) -> None:
    # rows that name a file for the first time are spelled out, the others refer to it
    _, first = np.unique(table.file, return_index=True)
    spelled = [row for row in first.tolist() if files[int(table.file[row])] not in out.memo] or first[:1].tolist()
    for row in spelled:
        _index(out, table.key, table.starts[row].tolist())
        _info(out, files[int(table.file[row])], int(table.offset[row]), int(table.length[row]))
    others = np.ones(len(table.file), bool)
    others[spelled] = False
    if not others.any():
        return
    rows = _Rows(out, wide=int(table.starts.max(initial=0)) >= _LIMIT)
    _index(rows, table.key, [*table.starts[others].T])
    rows.wide = True
    memo = np.array([out.memo.get(name, 0) for name in files], np.int64)
    _info(rows, memo[table.file[others]], table.offset[others], table.length[others])
    out.batches(rows.matrix(int(others.sum())), b"u")


def _chunk(out: _Pickle, offsets: Sequence[_Number], sizes: Sequence[_Number]) -> None:
    with out.instance(_DCP, "ChunkStorageMetadata"):
        out.name("offsets")
        out.size(offsets)
        out.name("sizes")
        out.size(sizes)


def _index(out: _Pickle, key: str, offset: Sequence[_Number] | None) -> None:
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


def _info(out: _Pickle, file: str | NDArray[np.int64], start: _Number, length: _Number) -> None:
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
        self._bytes = bytearray(b"\x80\x04")
        self.memo: dict[str | tuple[str, str], int] = {}

    def raw(self, data: bytes) -> None:
        self._bytes += data

    def finish(self) -> bytes:
        return bytes(self._bytes + b".")

    def name(self, text: Any) -> None:
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
        """A class or function by its module and name."""
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

    def integer(self, value: Any) -> None:
        self.raw(b"J" + struct.pack("<i", value) if value < _LIMIT else b"\x8a\x08" + struct.pack("<q", value))

    def size(self, values: Sequence[_Number]) -> None:
        """A torch.Size."""
        self.named("torch", "Size")
        count = len(values)
        before, behind = (b"", [b")", b"\x85", b"\x86", b"\x87"][count]) if count < 4 else (b"(", b"t")
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


class _Rows(_Pickle):
    """Many items that differ in numbers only, written as one; every name in them is memoized already.

    In the place of a number is a column, which has that of each item; in the place of a name may be one of memo numbers.

    Args:
        out: The pickle that they are for.
        wide: Numbers have eight bytes, not four.
    """

    def __init__(self, out: _Pickle, *, wide: bool) -> None:
        self._bytes, self.memo, self.wide = bytearray(), out.memo, wide
        self._columns: list[tuple[int, NDArray[np.uint8]]] = []

    def name(self, text: Any) -> None:
        if isinstance(text, str):
            super().name(text)
        else:
            self._column(b"j", text, "<u4")

    def integer(self, value: Any) -> None:
        self._column(*((b"\x8a\x08", value, "<i8") if self.wide else (b"J", value, "<i4")))

    def _column(self, opcode: bytes, numbers: NDArray[np.int64], kind: str) -> None:
        self.raw(opcode)
        width = np.dtype(kind).itemsize
        self._columns.append((len(self._bytes), numbers.astype(kind).view(np.uint8).reshape(len(numbers), width)))
        self.raw(bytes(width))

    def matrix(self, count: int) -> NDArray[np.uint8]:
        """The items, a row of bytes for each."""
        rows = np.tile(np.frombuffer(bytes(self._bytes), np.uint8), (count, 1))
        for at, data in self._columns:
            rows[:, at : at + data.shape[1]] = data
        return rows
