"""Error messages for damaged or missing metadata files, when a checkpoint cannot be opened."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from converters.errors import DamagedFileError, FormatError, UnsupportedError
from converters.formats.folder import is_file, open_source
from converters.names import printable, quoted
from converters.pickles.nodes import PickleFormatError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_DESCRIBING = (".metadata", "metadata.json", "common.pt")
_ZIP, _ZIP_END = b"PK\x03\x04", b"PK\x05\x06"


def damaged_file(folder: Path, files: dict[str, str], *details: str) -> DamagedFileError:
    """The error for files of a checkpoint that are missing or damaged, with what to type next."""
    hint = f"distckpt verify {quoted(folder)} compares with integrity.json, if there is one; restore it from a copy"
    return DamagedFileError(str(folder), files, details=details, hint=hint)


@contextlib.contextmanager
def damage_in(folder: Path, name: str) -> Iterator[None]:
    """While a file that is a part of a checkpoint is read: that it is missing, cut or no such file is damage.

    Args:
        folder: The checkpoint.
        name: The file.

    Raises:
        DamagedFileError: It is; hostile files, and those that may not be read, keep the error that they have.
    """
    try:
        yield
    except (PickleFormatError, DamagedFileError, UnsupportedError):
        raise
    except FormatError as error:
        if error.hint or isinstance(error.__cause__, PermissionError):
            raise
        raise damaged_file(folder, {name: error.message}, *error.details) from error


def refuse_empty(folder: Path, error: FormatError) -> None:
    """Raises an error that says which file is empty or cut, if one is.

    Args:
        folder: The folder with the data, or the one file.
        error: What opening it ended with.

    Raises:
        DamagedFileError: One is.
    """
    alone = is_file(folder)
    paths = [folder] if alone else [folder / name for name in _DESCRIBING]
    files = {path.name: text for path in paths if (text := _fault(path)) is not None}
    if files:
        raise damaged_file(folder.parent if alone else folder, files, error.message) from error


def _fault(path: Path) -> str | None:
    shown = printable(path.name)
    try:
        if not is_file(path):
            return None
        with open_source(path) as source:
            if not source.size:
                return f"{shown} is empty (0 bytes)"
            head, tail = source.read(0, 4), source.read(max(0, source.size - 22), 22)
    except (OSError, FormatError):
        return None
    cut = f"{shown} is cut short or damaged at its end ({source.size:,} bytes)"
    if path.name == ".metadata":  # a pickle's last byte is its STOP
        return None if tail.endswith(b".") else cut
    if head == _ZIP:
        return None if tail.startswith(_ZIP_END) and tail.endswith(b"\0\0") else cut
    return None
