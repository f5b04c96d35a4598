"""Writing `torch.save` records without holding their elements: what stands before a payload, and what stands behind it.

Everything before the elements is known from type and shape; what follows needs only their CRC-32. So a record of any size
is written by streaming its elements into their place and sealing it at the end. The bytes are those of torch.save (2.13),
alignment, padding and serialization id included; `tests/test_records_out.py` compares them.

Source of the layout: torch/serialization.py, caffe2/serialize/inline_container.cc, and its zip library for archives
beyond 4 GiB.
"""

from __future__ import annotations

import math
import struct
import zlib
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from converters.dtypes import dtype
from converters.pickles import Global, Obj, PersId, dumps

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from converters.dtypes import DType

__all__ = ["RecordLayout", "archive", "empty_object", "object_record"]

_ALIGNMENT = 64
_LIMIT32 = 0xFFFFFFFF
_MASK64 = (1 << 64) - 1
# what c10::hash gives for the names of the members of a record with one tensor, in the order torch keeps them
_NAMES_HASH = 15728199511854643026


class _Member:
    """A member of the archive: name, place, and what the directory says of it."""

    def __init__(self, name: str, header: int, size: int, top: str = "archive") -> None:
        self.name, self.header, self.size, self.crc = f"{top}/{name}".encode(), header, size, 0
        self.flags = 0x808 if size else 0x800
        wide = (size >= _LIMIT32, header >= _LIMIT32)
        numbers = ([size, size] if wide[0] else []) + ([header] if wide[1] else [])
        self.zip64 = struct.pack(f"<HH{len(numbers)}Q", 1, 8 * len(numbers), *numbers) if numbers else b""
        start = header + 30 + len(self.name) + len(self.zip64) + 4
        padding = -start % _ALIGNMENT
        self.extra = self.zip64 + struct.pack("<2sH", b"FB", padding) + b"Z" * padding
        self.data = start + padding

    @property
    def end(self) -> int:
        """First byte after the member, its data descriptor included."""
        return self.data + self.size + len(self.descriptor())

    def local_header(self) -> bytes:
        return struct.pack(
            "<IHHHHHIIIHH", 0x04034B50, 0, self.flags, 0, 0, 0, 0, 0, 0, len(self.name), len(self.extra)
        ) + (self.name + self.extra)

    def descriptor(self) -> bytes:
        if not self.size:  # its header says all there is to say
            return b""
        return struct.pack("<IIQQ" if self.zip64 else "<IIII", 0x08074B50, self.crc, self.size, self.size)

    def central(self) -> bytes:
        size = _LIMIT32 if self.size >= _LIMIT32 else self.size
        header = _LIMIT32 if self.header >= _LIMIT32 else self.header
        fields = (0x02014B50, 0, 0, self.flags, 0, 0, 0, self.crc, size, size, len(self.name), len(self.zip64))
        return struct.pack("<IHHHHHHIIIHHHHHII", *fields, 0, 0, 0, 0, header) + self.name + self.zip64


class RecordLayout:
    """The bytes around the elements of one tensor's record.

    Args:
        dtype: Element type.
        shape: Shape of the tensor; it is stored in C order.

    Attributes:
        prefix: Everything before the elements.
        nbytes: Bytes of the elements.
        length: Bytes of the whole record.
    """

    def __init__(self, dtype: DType, shape: Sequence[int]) -> None:
        self.nbytes = math.prod(shape) * dtype.itemsize
        head: list[tuple[_Member, bytes]] = []
        at = 0
        contents = (
            ("data.pkl", _tensor_pickle(dtype, tuple(shape))),
            (".format_version", b"1"),
            (".storage_alignment", str(_ALIGNMENT).encode()),
            ("byteorder", b"little"),
        )
        for name, data in contents:
            member = _Member(name, at, len(data))
            member.crc = zlib.crc32(data)
            head.append((member, data))
            at = member.end
        self._head = [member for member, _ in head]
        self._data = _Member("data/0", at, self.nbytes)
        self._version = _Member("version", self._data.end, 2)
        self._identity = _Member(".data/serialization_id", self._version.end, 40)
        body = b"".join(member.local_header() + data + member.descriptor() for member, data in head)
        self.prefix = body + self._data.local_header()
        members = [*self._head, self._data, self._version, self._identity]
        self.length = self._identity.end + sum(46 + len(m.name) + len(m.zip64) for m in members) + 56 + 20 + 22

    def suffix(self, crc: int) -> bytes:
        """Everything after the elements, given their CRC-32."""
        self._data.crc = crc
        version = b"3\n"
        self._version.crc = zlib.crc32(version)
        combined = 0
        summed = [member for member in (*self._head, self._data, self._version) if member.size]
        for member in summed:
            combined = (combined ^ (member.crc + 0x9E3779B9 + (combined << 6) + (combined >> 2))) & _MASK64
        identity = f"{_NAMES_HASH:020d}{combined:020d}".encode()
        self._identity.crc = zlib.crc32(identity)
        out = self._data.descriptor()
        for member, data in ((self._version, version), (self._identity, identity)):
            out += member.local_header() + data + member.descriptor()
        return out + _directory([*self._head, self._data, self._version, self._identity])


def archive(top: str, members: Mapping[str, bytes]) -> bytes:
    """A whole small archive as torch.save lays it out.

    Args:
        top: Folder inside it.
        members: Contents by name, in order.
    """
    out, made = bytearray(), []
    for name, data in members.items():
        member = _Member(name, len(out), len(data), top)
        member.crc = zlib.crc32(data)
        out += member.local_header() + data + member.descriptor()
        made.append(member)
    return bytes(out) + _directory(made)


def _directory(members: Sequence[_Member]) -> bytes:
    """The central directory of an archive and what ends it."""
    entries = b"".join(member.central() for member in members)
    at, count = members[-1].end, len(members)
    end = struct.pack("<IQHHIIQQQQ", 0x06064B50, 44, 0x031E, 45, 0, 0, count, count, len(entries), at)
    end += struct.pack("<IIQI", 0x07064B50, 0, at + len(entries), 1)
    short = (min(len(entries), _LIMIT32), min(at, _LIMIT32))
    return entries + end + struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, count, count, *short, 0)


def empty_object() -> bytes:
    """The record of a module's extra state without contents: `[torch.empty(0, dtype=torch.uint8)]`."""
    return object_record([_tensor_node(dtype("uint8"), (0,))], {"data/0": b""})


def object_record(tree: Any, storages: Mapping[str, bytes] | None = None) -> bytes:
    """The record of an object, an inert tree with the storages it refers to."""
    members = {"data.pkl": dumps(tree, protocol=2), ".format_version": b"1", ".storage_alignment": b"64"}
    return archive("archive", {**members, "byteorder": b"little", **(storages or {}), "version": b"3\n"})


@lru_cache(maxsize=4096)
def _tensor_pickle(dtype: DType, shape: tuple[int, ...]) -> bytes:
    """The `data.pkl` of a tensor that owns its storage, as torch.save pickles it."""
    return dumps(_tensor_node(dtype, shape), protocol=2)


def _tensor_node(dtype: DType, shape: tuple[int, ...]) -> Obj:
    strides, stride = [], 1
    for n in reversed(shape):
        strides.append(stride)
        stride *= max(n, 1)
    hooks = Obj(Global("collections", "OrderedDict"), ())
    numel = math.prod(shape)
    if dtype.storage is not None:
        storage = PersId(("storage", Global("torch", dtype.storage), "0", "cpu", numel))
        func, tail = Global("torch._utils", "_rebuild_tensor_v2"), [False, hooks]
    else:
        storage = PersId(("storage", Global("torch.storage", "UntypedStorage"), "0", "cpu", numel * dtype.itemsize))
        func, tail = Global("torch._utils", "_rebuild_tensor_v3"), [False, hooks, Global("torch", dtype.name)]
    return Obj(func, (storage, 0, shape, tuple(reversed(strides)), *tail))
