"""Writing `torch.save` records without holding their elements: what stands before a payload, and what stands behind it.

Everything before the elements is known from type and shape; what follows needs only their CRC-32. So a record of any size
is written by streaming its elements into their place and sealing it at the end. The bytes are those of torch.save (2.13),
alignment, padding and serialization id included; `tests/unit/test_records_out.py` compares them.

Source of the layout: torch/serialization.py, caffe2/serialize/inline_container.cc, and its zip library for archives
beyond 4 GiB.
"""

from __future__ import annotations

import math
import struct
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

from converters import box
from converters.crc import crc32
from converters.dtypes import dtype
from converters.pickles.emit import dumps
from converters.pickles.nodes import Global, Obj, PersId
from converters.torchzip.records import member_offset
from converters.torchzip.serialization_id import serialization_id

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from converters.dtypes import DType
    from converters.torchzip.records import Member, Read

_Content = TypeVar("_Content")
_ALIGNMENT = 64
_LIMIT32 = 0xFFFFFFFF
_VERSION = b"3\n"


class _Member:
    """A member of the archive: name, place, and what the directory says of it."""

    __slots__ = ("crc", "data", "extra", "flags", "header", "name", "size", "zip64")

    def __init__(self, name: str, header: int, size: int, top: str, crc: int = 0) -> None:
        self.name, self.header, self.size, self.crc = f"{top}/{name}".encode(), header, size, crc
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
        return self.data + self.size + ((24 if self.zip64 else 16) if self.size else 0)

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


class ArchiveLayout:
    """Where everything lies in an archive that torch.save writes, given its pickle and the sizes of its storages.

    +--------+---------------------+--------+-----------+-----+--------+-----------+---------+----+-----------+
    | header | data.pkl, byteorder | header | storage 0 | gap | header | storage 1 | version | id | directory |
    +--------+---------------------+--------+-----------+-----+--------+-----------+---------+----+-----------+
    |<------------- prefix ---------------->|           |<--- between --->|        |<-------- suffix --------->

    Args:
        pickle: Contents of `data.pkl`.
        sizes: Bytes of each storage, in the order in which the pickle mentions them.
        top: Folder inside the archive: the file's name without its ending, "archive" for a stream.

    Attributes:
        prefix: Everything before the first storage's elements; everything before the suffix if there is no storage.
        offsets: First byte of each storage's elements.
        length: Bytes of the whole archive.
    """

    def __init__(self, pickle: bytes, sizes: Sequence[int], top: str = "archive") -> None:
        self._top = top
        self._head: list[_Member] = []
        body, at = [], 0
        for name, data in _frame(pickle).items():
            member = _Member(name, at, len(data), top, crc32(data))
            body += [member.local_header(), data, member.descriptor()]
            self._head.append(member)
            at = member.end
        self._storages: list[_Member] = []
        for number, size in enumerate(sizes):
            self._storages.append(_Member(f"data/{number}", at, size, top))
            at = self._storages[-1].end
        self.prefix = b"".join(body) + (self._storages[0].local_header() if self._storages else b"")
        self.offsets = [member.data for member in self._storages]
        version = _Member("version", at, len(_VERSION), top, crc32(_VERSION))
        identity = _Member(".data/serialization_id", version.end, 40, top)
        self._tail = (version, identity)
        members = [*self._head, *self._storages, *self._tail]
        self.length = identity.end + sum(46 + len(m.name) + len(m.zip64) for m in members) + 56 + 20 + 22

    def between(self, number: int, crc: int) -> tuple[int, bytes]:
        """What stands between a storage and the next, or the suffix: `(offset, bytes)`, given the storage's CRC-32."""
        member = self._storages[number]
        member.crc = crc
        following = self._storages[number + 1].local_header() if number + 1 < len(self._storages) else b""
        return member.data + member.size, member.descriptor() + following

    def suffix(self) -> tuple[int, bytes]:
        """What ends the archive: `(offset, bytes)`, once `between` was asked for every storage."""
        version, identity = self._tail
        summed = [m.crc for m in (*self._head, *self._storages, version) if m.size]
        data = serialization_id(len(self._storages), summed)
        identity.crc = crc32(data)
        out = version.local_header() + _VERSION + version.descriptor()
        out += identity.local_header() + data + identity.descriptor()
        return version.header, out + _directory([*self._head, *self._storages, *self._tail])


class RecordLayout:
    """The bytes around the elements of one tensor's record.

    Attributes:
        prefix: Everything before the elements.
    """

    def __init__(self, dtype: DType, shape: Sequence[int]) -> None:
        self.nbytes = math.prod(shape) * dtype.itemsize
        self._archive = ArchiveLayout(_tensor_pickle(dtype, tuple(shape)), [self.nbytes])
        self.prefix, self.length = self._archive.prefix, self._archive.length

    def suffix(self, crc: int) -> bytes:
        """Everything after the elements, given their CRC-32."""
        return self._archive.between(0, crc)[1] + self._archive.suffix()[1]


def _frame(pickle: bytes) -> dict[str, bytes]:
    """The members before the storages."""
    alignment = str(_ALIGNMENT).encode()
    return {"data.pkl": pickle, ".format_version": b"1", ".storage_alignment": alignment, "byteorder": b"little"}


def archive(top: str, members: Mapping[str, bytes]) -> bytes:
    """A whole small archive as torch.save lays it out.

    Args:
        top: Folder inside it.
        members: Contents by name, in order.
    """
    contents = ((name, len(data), crc32(data), data) for name, data in members.items())
    return b"".join(data for _, data in _pieces(top, contents))


def _pieces(top: str, contents: Iterable[tuple[str, int, int, _Content]]) -> list[tuple[int, bytes | _Content]]:
    """`(offset, content)` of all that an archive consists of, in order.

    Args:
        contents: Name, bytes, CRC-32 and content of each member.
    """
    pieces: list[tuple[int, bytes | _Content]] = []
    members, at = [], 0
    for name, size, crc, content in contents:
        member = _Member(name, at, size, top, crc)
        pieces.append((at, member.local_header()))
        if size:
            pieces += [(member.data, content), (member.data + size, member.descriptor())]
        members.append(member)
        at = member.end
    return [*pieces, (at, _directory(members))]


def with_pickle(
    read: Read, stored: Mapping[str, Member], pickle: bytes, top: str, label: str
) -> tuple[list[tuple[int, bytes | tuple[int, int]]], int]:
    """An archive with another `data.pkl`, whose other members are copied with the checksums that they have.

    Args:
        read: Returns `n` bytes at an offset of the source file, at whose beginning its archive lies.
        stored: Its directory.
        top: Folder inside the result.
        label: How to name the source in an error.

    Returns:
        `(offset, content)` of all that the result consists of, the content as bytes or as `(offset, bytes)` of the source
        file; and the bytes of the result.
    """
    contents: list[tuple[str, int, int, bytes | tuple[int, int]]] = []
    for name, old in sorted(stored.items(), key=lambda item: item[1].header):
        if name == "data.pkl":
            contents.append((name, len(pickle), crc32(pickle), pickle))
        elif name != ".data/serialization_id":  # a fingerprint of contents that have changed; readers need none
            contents.append((name, old.size, old.crc, (member_offset(read, 0, old, label), old.size)))
    pieces = _pieces(top, contents)
    at, directory = pieces[-1]
    return pieces, at + len(directory)


def _directory(members: Sequence[_Member]) -> bytes:
    """The central directory of an archive and what ends it."""
    entries = b"".join(member.central() for member in members)
    at, count = members[-1].end, len(members)
    end = struct.pack("<IQHHIIQQQQ", 0x06064B50, 44, 0x031E, 45, 0, 0, count, count, len(entries), at)
    end += struct.pack("<IIQI", 0x07064B50, 0, at + len(entries), 1)
    short = (min(count, 0xFFFF), min(count, 0xFFFF), min(len(entries), _LIMIT32), min(at, _LIMIT32))
    return entries + end + struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, *short, 0)


def empty_object() -> bytes:
    """The record of a module's extra state without contents: `[torch.empty(0, dtype=torch.uint8)]`."""
    kind = dtype("uint8")
    return object_record([tensor_node(storage_node(kind, "0", 0), kind, (0,))], {"data/0": b""})


def object_record(tree: Any, storages: Mapping[str, bytes] | None = None) -> bytes:
    """The record of an object, an inert tree with the storages it refers to."""
    return archive("archive", {**_frame(dumps(tree, protocol=2)), **(storages or {}), "version": _VERSION})


@lru_cache(maxsize=4096)
def _tensor_pickle(dtype: DType, shape: tuple[int, ...]) -> bytes:
    """The `data.pkl` of a tensor that owns its storage, as torch.save pickles it."""
    return dumps(tensor_node(storage_node(dtype, "0", math.prod(shape)), dtype, shape), protocol=2)


@lru_cache(maxsize=1024)
def global_node(module: str, name: str) -> Global:
    """A global; always the same node, as a pickle says a second time only that it is the first one again."""
    return Global(module, name)


def storage_node(dtype: DType, key: str, numel: int) -> PersId:
    """A storage of `numel` elements, as torch.save refers to it."""
    if dtype.storage is not None:
        return PersId(("storage", global_node("torch", dtype.storage), key, "cpu", numel))
    return PersId(("storage", global_node("torch.storage", "UntypedStorage"), key, "cpu", numel * dtype.itemsize))


def tensor_node(
    storage: PersId, dtype: DType, shape: tuple[int, ...], offset: int = 0, strides: tuple[int, ...] | None = None
) -> Obj:
    """A tensor, as torch.save pickles it.

    Args:
        offset: Its first element in the storage.
        strides: In elements; None for C order.
    """
    strides = box.strides(shape) if strides is None else strides
    sizes = tuple(iter(shape))  # a tuple of its own: a pickle says of one that it knows that it is the same
    args = (storage, offset, sizes, strides, False, Obj(global_node("collections", "OrderedDict"), ()))
    if dtype.storage is not None:
        return Obj(global_node("torch._utils", "_rebuild_tensor_v2"), args)
    return Obj(global_node("torch._utils", "_rebuild_tensor_v3"), (*args, global_node("torch", dtype.name)))
