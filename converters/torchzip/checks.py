"""Archives that are copied as they are, compared with their own checksums."""

from __future__ import annotations

from typing import TYPE_CHECKING

from converters.crc import crc32
from converters.errors import IntegrityError
from converters.torchzip.records import member_offset, read_directory

if TYPE_CHECKING:
    from collections.abc import Callable

    Read = Callable[[int, int], bytes]


def check_archive(read: Read, start: int, length: int, what: str) -> None:
    """Compares every member of an archive that is copied as it is with its checksum; holds a mebibyte at a time.

    Raises:
        IntegrityError: One does not match.
        FormatError: Not an archive, or damaged in its directory.
    """
    members = read_directory(read, start, length, what)
    if not any(member.crc for member in members.values()):
        return  # saved with torch.serialization.set_crc32_options(False)
    for member in members.values():
        at, crc = member_offset(read, start, member, what), 0
        for low in range(at, at + member.size, 1 << 20):
            crc = crc32(read(low, min(1 << 20, at + member.size - low)), crc)
        if crc != member.crc:
            raise IntegrityError(
                f"{what} is damaged: its {member.name} does not match its checksum",
                details=[f"stored CRC-32 {member.crc:08x}, computed {crc:08x}"],
                hint="restore this file from a copy; nothing was published",
            )
