"""Tar files as folders: where each member's bytes lie. Nothing is unpacked, and only a strict subset of the format is read.

    512 bytes   header: name, size, type, checksum; before it maybe another member that holds a long name ('L', 'x')
    size        contents, padded to 512
    ...
    512 zeros   the end

A member that names a place outside, is no plain file or folder, or is there twice makes the whole file unreadable: another
program would see something else in it.

Sources: POSIX.1-2001 pax interchange format; GNU tar manual, "Basic Tar Format".
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from converters.errors import FormatError
from converters.names import printable

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from converters.formats.source_file import SourceFile

_BLOCK: Final = 512
_LONGEST_EXTENSION = 1 << 20  # a long name or a list of pax attributes
_MOST_MEMBERS = 1 << 22
_DEEPEST = 256
_REFUSED = {
    b"1": "a hard link",
    b"2": "a symbolic link",
    b"3": "a character device",
    b"4": "a block device",
    b"6": "a pipe",
    b"S": "a sparse file",
    b"M": "the rest of a file that began on another volume",
    b"V": "a volume label",
    b"D": "a list of files that an incremental dump left out",
}


class Member(NamedTuple):
    """A file in a tar file."""

    offset: int
    size: int


Tree = dict[str, dict[str, Member | None]]
"""Folder ("" is the outermost, `a/b` others) -> name in it -> file, or None for a folder."""


def is_tar(head: bytes) -> bool:
    """Whether a file that begins so is a tar file: POSIX (`ustar`, NUL, 00) or GNU (`ustar`, two blanks, NUL)."""
    return len(head) >= _BLOCK and head[257:265] in (b"ustar\x0000", b"ustar  \x00")


@lru_cache(maxsize=4)
def read_tree(path: Path, identity: tuple[int, ...], open_source: Callable[[Path], SourceFile]) -> Tree | None:
    """The folders and files in a tar file; None if it is something else. The last few are remembered.

    Args:
        path: The tar file, a regular file.
        identity: Device, inode, size and time of the file: another file of the same name is read anew.
        open_source: Opens it.

    Raises:
        FormatError: Cut short, or with members that are refused; the message names the member.
    """
    with open_source(path) as source:
        return _Scan(source, printable(path.name)).tree() if is_tar(source.read(0, _BLOCK)) else None


@dataclass
class _Extension:
    """What the members before a member say of it."""

    name: bytes | None = None
    size: int | None = None


class _Scan:
    """One pass over the headers of a tar file."""

    def __init__(self, source: SourceFile, label: str) -> None:
        self._read, self._size, self._label = source.read, source.size, label
        self._tree: Tree = {"": {}}

    def tree(self) -> Tree:
        at, extension, count = 0, _Extension(), 0
        while True:
            header = self._read(at, _BLOCK)
            if header == bytes(_BLOCK):
                break
            if len(header) < _BLOCK:
                raise FormatError(
                    f"{self._label} ends at byte {self._size:,} without the mark that ends a tar file: it was cut short",
                    hint="copy it again",
                )
            at = self._member(header, at, extension)
            count += 1
            if count > _MOST_MEMBERS:
                raise FormatError(f"{self._label} has more than {_MOST_MEMBERS:,} members")
        if extension != _Extension():
            raise FormatError(f"{self._label}: the last member has a long name and no contents")
        return self._tree

    def _member(self, header: bytes, at: int, extension: _Extension) -> int:
        """Takes one header; returns where the next one lies."""
        where = f"{self._label} at byte {at:,}"
        if not is_tar(header) or _checksum(header) != _number(header[148:156], f"{where}: the checksum"):
            raise FormatError(f"{where}: no header of a member where one must be; the file is damaged")
        kind, name = header[156:157], extension.name if extension.name is not None else _short_name(header)
        shown = printable(name.decode("utf-8", "surrogateescape"))
        size = extension.size
        if size is None:
            size = _number(header[124:136], f"{self._label}: the size of {shown}")
        begin = at + _BLOCK
        if begin + size > self._size:
            raise FormatError(
                f"{self._label} is cut short: {shown} needs bytes up to {begin + size:,}, there are {self._size:,}",
                hint="copy it again",
            )
        if kind in b"LKxg":
            self._extend(kind, begin, size, shown, extension)
        else:
            if kind in _REFUSED or kind not in b"057\x00":
                refused = _REFUSED.get(kind, f"of the unknown type {kind!r}")
                raise FormatError(
                    f"{self._label}: {shown} is {refused}; only plain files and folders are read from a tar file",
                    hint="if you trust it, unpack it and give the folder",
                )
            folder = kind == b"5" or (kind != b"7" and name.endswith(b"/"))
            self._add(name, None if folder else Member(begin, size))
            size = 0 if folder else size
            extension.name = extension.size = None
        return begin + -(-size // _BLOCK) * _BLOCK

    def _extend(self, kind: bytes, begin: int, size: int, shown: str, extension: _Extension) -> None:
        """Long names and sizes: GNU's 'L', and the attributes of pax, of which those that matter here are few."""
        if size > _LONGEST_EXTENSION:
            raise FormatError(f"{self._label}: {shown} has a header of {size:,} bytes")
        data = self._read(begin, size)
        if kind == b"L":
            extension.name = _once(extension.name, data.rstrip(b"\0"), f"{self._label}: {shown}")
        if kind not in b"xg":
            return
        for key, value in _attributes(data, f"{self._label}: {shown}"):
            if key.startswith(b"GNU.sparse."):
                raise FormatError(f"{self._label}: {shown} announces a sparse file, which is not read from a tar file")
            if key not in (b"path", b"size"):
                continue
            if kind == b"g":
                raise FormatError(f"{self._label}: {shown} gives every member the same {key.decode()}")
            if key == b"path":
                extension.name = _once(extension.name, value, f"{self._label}: {shown}")
            else:
                number = int(value) if value.isdigit() and len(value) < 20 else -1
                extension.size = _once(extension.size, number, f"{self._label}: {shown}")
                if number < 0:
                    raise FormatError(f"{self._label}: {shown} gives a member the size {printable(repr(value))[:40]}")

    def _add(self, name: bytes, member: Member | None) -> None:
        text = name.decode("utf-8", "surrogateescape")
        parts = [part for part in text.split("/") if part not in ("", ".")]
        if text.startswith("/") or ".." in parts or "\0" in text:
            raise FormatError(
                f"{self._label}: {printable(text)} would lie outside the folder that it is unpacked into",
                hint="no checkpoint has such a member: do not unpack this file",
            )
        if len(parts) > _DEEPEST:
            raise FormatError(f"{self._label}: {printable(text)[:100]}... lies {len(parts):,} folders deep")
        folder = ""
        for depth, part in enumerate(parts):
            inner = self._tree.setdefault(folder, {})
            last = depth == len(parts) - 1
            entry = inner.get(part, _ABSENT)
            if (entry is not _ABSENT) if last and member is not None else isinstance(entry, Member):
                raise FormatError(f"{self._label}: {printable(text)} occurs twice")
            inner[part] = member if last else None
            folder = f"{folder}/{part}" if folder else part
        if member is None:
            self._tree.setdefault(folder, {})
        elif not parts:
            raise FormatError(f"{self._label}: a file has the name {printable(text)!r}")


_ABSENT: Final = object()
_T = TypeVar("_T")


def _once(stated: _T | None, value: _T, label: str) -> _T:
    if stated is not None and stated != value:
        raise FormatError(f"{label}: what follows is given two names or sizes")
    return value


def _short_name(header: bytes) -> bytes:
    name = header[:100].partition(b"\0")[0]
    prefix = header[345:500].partition(b"\0")[0] if header[257:265] == b"ustar\x0000" else b""
    return prefix + b"/" + name if prefix else name


def _checksum(header: bytes) -> int:
    return sum(header[:148]) + 8 * ord(" ") + sum(header[156:])


def _number(raw: bytes, label: str) -> int:
    """Octal digits, or GNU's binary form for what needs more of them."""
    if raw[0] & 0x80:
        value = int.from_bytes(raw, "big", signed=True) if raw[0] == 0xFF else int.from_bytes(raw[1:], "big")
    else:
        text = raw.strip(b" \0") or b"0"
        if not all(c in b"01234567" for c in text):
            raise FormatError(f"{label} is {printable(repr(raw))}")
        value = int(text, 8)
    if not 0 <= value < 1 << 60:
        raise FormatError(f"{label} is {value}")
    return value


def _attributes(data: bytes, label: str) -> list[tuple[bytes, bytes]]:
    """pax: records `LENGTH KEY=VALUE\\n`, the length of the whole record in decimal."""
    records, at = [], 0
    while at < len(data):
        digits, _, _ = data[at : at + 20].partition(b" ")
        length = int(digits) if digits.isdigit() else 0
        record = data[at : at + length]
        key, equals, value = record[len(digits) + 1 : -1].partition(b"=")
        if length < len(digits) + 3 or not equals or not record.endswith(b"\n") or len(record) != length:
            raise FormatError(f"{label} has attributes that are not those of pax")
        records.append((key, value))
        at += length
    return records
