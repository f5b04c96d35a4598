"""Storage formats: one file each, declared in `registry`, found by `open_checkpoint`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from converters.errors import FormatError, RequestError
from converters.formats.broken import refuse_empty
from converters.formats.folder import is_folder, listing
from converters.formats.registry import REGISTRY, backend_of, detect
from converters.formats.resolve import resolve
from converters.names import printable

if TYPE_CHECKING:
    from converters.formats.base import Reader
    from converters.formats.registry import Format

__all__ = ["REGISTRY", "open_checkpoint"]


def open_checkpoint(path: str | Path, name: str | None = None) -> Reader:
    """Opens the checkpoint that a path means: a training root, an iteration, NeMo's folder, or a file inside.

    Args:
        name: Name of the format to read it as; by default it is recognised.

    Raises:
        FormatError: Nothing there, unfinished, unsafe, or in a format we do not know.
        RequestError: There is no format of that name.
    """
    try:
        place = resolve(path)
        found = _named(name) if name is not None else detect(place)
        if found is None:
            raise _unreadable(place)
        try:
            opened = found.load().open(place)
        except FormatError as error:
            refuse_empty(place, error)
            raise
        given = Path(path).expanduser()
        outer = is_folder(given) and not given.name.startswith("mp_rank_")
        opened.catalog = replace(opened.catalog, opened=given if outer else place)
        return opened
    except OSError as error:  # a failing disk, a folder that may not be listed
        what = printable(str(error.filename or path))
        raise FormatError(f"reading {what} failed: {error.strerror or error}") from error


def _named(name: str) -> Format:
    for found in REGISTRY:
        if found.name == name:
            return found
    known = ", ".join(found.name for found in REGISTRY)
    raise RequestError(f"there is no format {printable(name)!r}", hint=f"known: {known}")


def _unreadable(place: Path) -> FormatError:
    names = listing(place)
    shown = printable(str(place))
    backend = backend_of(place)
    if backend is not None:
        return FormatError(f"{shown} is in the format '{printable(backend)}', which this version does not read")
    return FormatError(f"{shown} is not a checkpoint that distckpt knows", details=[f"found: {', '.join(names[:6])}"])
