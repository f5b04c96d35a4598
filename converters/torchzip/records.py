"""Finding the bytes of a tensor inside a `torch.save` record, without unpickling anything.

A record is a zip archive whose members are stored, not compressed, so a tensor's elements are a plain range of the file:

    record in a .distcp file or a .pt file
    +-----------------+---------------+---------+-----------------------------+-------------------+
    | archive/data.pkl| byteorder ... | header  | archive/data/0: the elements| central directory |
    +-----------------+---------------+---------+-----------------------------+-------------------+
                                                ^ offset, nbytes, and a CRC-32 in the directory

Source of the layout: torch/serialization.py and caffe2/serialize/inline_container.cc (torch 1.6 and later).
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from converters.crc import crc32
from converters.errors import FormatError, IntegrityError, UnsupportedError
from converters.pickles.machine import parse
from converters.torchzip.tensor_refs import TensorRef, tensor_ref

if TYPE_CHECKING:
    from converters.dtypes import DType

Read = Callable[[int, int], bytes]
"""Reads so many bytes (second argument) from an offset (first) of one file; fewer only at the file's end."""

_EOCD = struct.Struct("<IHHHHIIH")
_EOCD64 = struct.Struct("<24xQQQQ")
_LOCATOR64 = struct.Struct("<IIQI")
_CENTRAL = struct.Struct("<I4xHH4xIIIHHHH6xI")
_LOCAL = struct.Struct("<6xHH16xHH")
_TAIL = 2048  # a record with one tensor has a directory of about 700 bytes
_HEAD = 1024  # and its elements begin at byte 704 or before
_MAX_DIRECTORY = 256 << 20


@dataclass(frozen=True, slots=True)
class Member:
    """A file inside a zip archive.

    Attributes:
        name: Name without the archive's own top folder: `data/0`.
        header: Byte of the local header, counted from the start of the archive.
        size: Bytes.
        crc: CRC-32 as the central directory states it.
        room: Bytes from there to what follows it.
    """

    name: str
    header: int
    size: int
    crc: int
    room: int = 1 << 62


@dataclass(frozen=True, slots=True)
class Payload:
    """Where the elements of a stored chunk lie.

    Attributes:
        offset: First byte of the elements in the file.
        nbytes: Bytes of the elements.
        crc: CRC-32 of the member that holds them, None if the format has none or it was saved without.
        crc_offset: First byte of that member in the file; before `offset` when the tensor is a view on a larger storage.
        crc_nbytes: Bytes of that member.
        decode: For elements that are stored encoded, what gives their bytes, `nbytes`, for those of the whole member.
    """

    offset: int
    nbytes: int
    crc: int | None
    crc_offset: int
    crc_nbytes: int
    decode: Callable[[bytes], bytes] | None = None

    @property
    def end(self) -> int:
        """One past its last byte in the file."""
        return max(self.offset + self.nbytes if self.decode is None else 0, self.crc_offset + self.crc_nbytes)


def read_directory(read: Read, start: int, length: int, label: str) -> dict[str, Member]:
    """The members of the zip archive in bytes `start` to `start + length` of a file.

    Args:
        read: Returns `n` bytes at an offset of the file; fewer only at its end.
        start: First byte of the archive.
        length: Bytes of the archive.
        label: How to name it in an error.

    Raises:
        FormatError: Not a zip, compressed, damaged, or built to be read differently by different programs.
    """
    if length < _EOCD.size:
        raise FormatError(f"{label} is {length} bytes, too short for a torch.save record")
    tail_at = max(0, length - _TAIL)
    tail = read(start + tail_at, length - tail_at)
    if len(tail) != length - tail_at:
        raise FormatError(f"{label} ends early: {length - tail_at - len(tail)} bytes are missing")
    at = len(tail) - _EOCD.size
    signature, disk, _, here, total, size, offset, comment = _EOCD.unpack_from(tail, at)
    if signature != 0x06054B50 or comment:
        raise FormatError(f"{label} is not a torch.save record: no zip directory at its end")
    end = tail_at + at
    locator = at - _LOCATOR64.size
    if locator >= 0 and tail[locator : locator + 4] == b"PK\x06\x07":
        _, _, record, _ = _LOCATOR64.unpack_from(tail, locator)
        raw = read(start + record, _EOCD64.size) if record + _EOCD64.size <= length else b""
        if len(raw) != _EOCD64.size or raw[:4] != b"PK\x06\x06" or record + _EOCD64.size != tail_at + locator:
            raise FormatError(f"{label} has a damaged zip64 directory")
        here, total, size, offset = _EOCD64.unpack(raw)
        end = record
    if disk or here != total or offset + size != end or size > _MAX_DIRECTORY or total > size // _CENTRAL.size:
        raise FormatError(f"{label} has a damaged zip directory (at {offset}, {size} bytes, of {length})")
    directory = tail[offset - tail_at : offset - tail_at + size] if offset >= tail_at else read(start + offset, size)
    return _members(directory, total, offset, label)


def _members(directory: bytes, total: int, limit: int, label: str) -> dict[str, Member]:
    at, folder = 0, None
    spans: dict[str, tuple[int, int, str, int, int]] = {}
    for _ in range(total):
        if at + _CENTRAL.size > len(directory):
            raise FormatError(f"{label} has a zip directory that ends early")
        signature, flags, method, crc, packed, size, n_name, n_extra, n_comment, disk, header = _CENTRAL.unpack_from(
            directory, at
        )
        name_at = at + _CENTRAL.size
        raw = directory[name_at : name_at + n_name]
        extra = directory[name_at + n_name : name_at + n_name + n_extra]
        at = name_at + n_name + n_extra + n_comment
        if signature != 0x02014B50 or at > len(directory) or disk or flags & 0x41:
            raise FormatError(f"{label} has a damaged zip directory")
        packed, size, header = _zip64(extra, packed, size, header)
        name = raw.decode("utf-8", "backslashreplace")
        if method != 0 or packed != size:
            raise FormatError(f"{label}: member {name!r} is compressed; torch.save never does that")
        top, _, bare = name.partition("/")
        bare = bare or top
        folder = top if folder is None else folder
        if top != folder:  # torch looks for every member under the first one's folder
            raise FormatError(f"{label}: zip member {name!r} is not in the folder {folder!r} of the others")
        if bare in spans or ".." in name.split("/") or "\0" in name or name.startswith("/"):
            raise FormatError(f"{label}: zip member {name!r} is repeated or tries to leave the archive")
        if header + _LOCAL.size + size > limit:
            raise FormatError(f"{label}: member {name!r} ({size} bytes at {header}) does not fit in {limit} bytes")
        spans[bare] = header, header + _LOCAL.size + n_name + size, bare, size, crc
    members: dict[str, Member] = {}
    for (header, stop, bare, size, crc), (begin, _, second, _, _) in itertools.pairwise(
        [*sorted(spans.values()), (limit, 0, "its directory", 0, 0)]
    ):
        if begin < stop:
            raise FormatError(f"{label}: zip members {bare!r} and {second!r} overlap")
        members[bare] = Member(bare, header, size, crc, begin - header)
    return members


def _zip64(extra: bytes, packed: int, size: int, header: int) -> tuple[int, int, int]:
    """The three numbers, those that do not fit 32 bits taken from the extra field, which has them in another order."""
    at = 0
    while at + 4 <= len(extra):
        tag, n = struct.unpack_from("<HH", extra, at)
        if tag == 1 and at + 4 + n <= len(extra):
            values = iter(struct.unpack_from(f"<{n // 8}Q", extra, at + 4))
            size, packed, header = (next(values, v) if v == 0xFFFFFFFF else v for v in (size, packed, header))
        at += 4 + n
    return packed, size, header


def member_offset(read: Read, start: int, member: Member, label: str) -> int:
    """First byte of a member's contents in the file."""
    raw = read(start + member.header, _LOCAL.size)
    if len(raw) < _LOCAL.size or raw[:4] != b"PK\x03\x04":
        raise FormatError(f"{label}: member {member.name!r} has no header where the zip directory says")
    flags, method, n_name, n_extra = _LOCAL.unpack(raw)
    front: int = _LOCAL.size + n_name + n_extra
    if method or flags & 0x41 or front + member.size > member.room:
        raise FormatError(f"{label}: the header of member {member.name!r} contradicts the zip directory")
    return start + member.header + front


def read_member(read: Read, start: int, member: Member, label: str) -> bytes:
    """A member's contents."""
    return read(member_offset(read, start, member, label), member.size)


def refuse_big_endian(read: Read, start: int, members: Mapping[str, Member], label: str) -> None:
    """Refuses an archive whose elements have their first byte last."""
    order = members.get("byteorder")
    if order is not None and read_member(read, start, order, label) != b"little":
        raise UnsupportedError(f"{label} was written on a big-endian machine, which is not supported")


def storage_payload(read: Read, start: int, members: Mapping[str, Member], storage: str, label: str) -> Payload:
    """Where the elements of a whole storage lie."""
    member = members[f"data/{storage}"]
    begin = member_offset(read, start, member, label)
    # torch.serialization.set_crc32_options(False) writes 0 for every member, data.pkl too
    crc = member.crc if member.crc or members["data.pkl"].crc else None
    return Payload(begin, member.size, crc, begin, member.size)


def check_storage_size(ref: TensorRef, size: int | None, label: str) -> None:
    """Compares the bytes of a storage, None if there is none, with what a tensor in it says.

    Raises:
        FormatError: They differ.
    """
    if size != ref.storage_nbytes:
        have = "no such member" if size is None else f"{size} bytes"
        raise FormatError(f"{label}: data/{ref.storage} should have {ref.storage_nbytes} bytes, found {have}")


def check_archive(read: Read, start: int, length: int, label: str) -> None:
    """Compares every member of an archive that is copied as it is with its checksum; holds a mebibyte at a time.

    Raises:
        IntegrityError: One does not match.
        FormatError: Not an archive, or damaged in its directory.
    """
    members = read_directory(read, start, length, label)
    if not any(member.crc for member in members.values()):
        return  # saved with torch.serialization.set_crc32_options(False)
    for member in members.values():
        at, crc = member_offset(read, start, member, label), 0
        for low in range(at, at + member.size, 1 << 20):
            crc = crc32(read(low, min(1 << 20, at + member.size - low)), crc)
        if crc != member.crc:
            raise IntegrityError(
                f"{label} is damaged: its {member.name} does not match its checksum",
                details=[f"stored CRC-32 {member.crc:08x}, computed {crc:08x}"],
                hint="restore this file from a copy; nothing was published",
            )


def read_pickle(
    read: Read, start: int, length: int, label: str, *, members: dict[str, Member] | None = None, limit: int = 1 << 30
) -> Any:
    """The inert tree of a whole `torch.save` record's `data.pkl`; tensors in it are inert nodes, see `tensor_ref`.

    Args:
        members: The record's directory, if it was read.
    """
    members = members or read_directory(read, start, length, label)
    member = members.get("data.pkl")
    if member is None:
        raise FormatError(f"{label} is a zip archive without data.pkl, not a torch.save record")
    if any(name == "constants.pkl" or name.startswith("code/") for name in members):
        raise FormatError(f"{label} is a TorchScript archive, not a checkpoint")
    if member.size > limit:
        raise FormatError(f"{label}: data.pkl of {member.size} bytes is larger than the limit of {limit}")
    raw = read_member(read, start, member, label)
    if member.crc and len(raw) == member.size and crc32(raw) != member.crc:  # 0: saved without
        raise FormatError(f"{label} is damaged: data.pkl does not match its checksum")
    return parse(raw, label=f"{label}: data.pkl")


def _reading_ahead(read: Read, start: int, nbytes: int) -> Read:
    """Reads a file of which some bytes are read at once, as what is asked for lies among them."""
    head = read(start, nbytes)
    stop = start + len(head)
    return lambda at, n: head[at - start : at - start + n] if start <= at and at + n <= stop else read(at, n)


class TensorLocator:
    """Locates the one tensor of each record, remembering what was learned from equal pickles.

    Most records of a checkpoint have the same `data.pkl` up to a handful of shapes, so what it says is kept by content.
    """

    def __init__(self) -> None:
        self._by_pickle: dict[bytes, TensorRef] = {}

    def locate(
        self, read: Read, start: int, length: int, label: str, *, expect: DType, shape: tuple[int, ...]
    ) -> Payload:
        """Where the elements of the record's tensor lie, after checking that it is the tensor the metadata promises.

        Args:
            expect: Element type according to the metadata.
            shape: Shape of the chunk according to the metadata.

        Raises:
            FormatError: The record is damaged or holds another tensor.
        """
        read = _reading_ahead(read, start, min(length, _HEAD))
        members = read_directory(read, start, length, label)
        pickle = members.get("data.pkl")
        if pickle is None:
            raise FormatError(f"{label} holds no tensor: there is no data.pkl in it")
        raw = read_member(read, start, pickle, label)
        ref = self._by_pickle.get(raw)
        if ref is None:
            ref = tensor_ref(parse(raw, label=f"{label}: data.pkl"), label)
            if ref is None:
                raise FormatError(f"{label} holds an object, the metadata promises a tensor")
            self._by_pickle[raw] = ref
        if ref.dtype != expect or ref.shape != shape:
            raise FormatError(
                f"{label} holds a {ref.dtype} tensor of {list(ref.shape)}",
                details=[f"the metadata promises {expect} of {list(shape)}"],
            )
        return locate_tensor(read, start, length, ref, label, members)


def locate_tensor(
    read: Read, start: int, length: int, ref: TensorRef, label: str, members: dict[str, Member] | None = None
) -> Payload:
    """Where the elements of a tensor in a record lie, one of many or the only one.

    Args:
        members: The record's directory, if it was read.

    Raises:
        FormatError: The record is damaged.
    """
    members = members or read_directory(read, start, length, label)
    if not ref.contiguous:
        raise UnsupportedError(f"{label} holds a tensor with strides {list(ref.strides)}; only C order can be streamed")
    data, itemsize = members.get(f"data/{ref.storage}"), ref.dtype.itemsize
    check_storage_size(ref, None if data is None else data.size, label)
    refuse_big_endian(read, start, members, label)
    storage = storage_payload(read, start, members, ref.storage, label)
    return replace(storage, offset=storage.offset + ref.offset * itemsize, nbytes=math.prod(ref.shape) * itemsize)
