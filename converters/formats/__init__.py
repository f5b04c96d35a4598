"""Storage formats: one file each, declared in `registry`, found by `open_checkpoint`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from converters.errors import FormatError, RequestError, UnfinishedError, UnsupportedError
from converters.formats.broken import refuse_empty
from converters.formats.folder import is_folder, listing
from converters.formats.registry import REGISTRY, backend_of, detect
from converters.formats.resolve import resolve
from converters.formats.source_file import read_failure
from converters.names import printable
from converters.remote.address import named_path

if TYPE_CHECKING:
    from pathlib import Path

    from converters.formats.base import Reader
    from converters.formats.registry import Format

__all__ = ["REGISTRY", "open_checkpoint"]


def open_checkpoint(path: str | Path, name: str | None = None, *, follow_links: bool = False) -> Reader:
    """Opens the checkpoint that a path means: a training root, an iteration, NeMo's folder, or a file inside.

    Args:
        name: Name of the format to read it as; by default it is recognised.
        follow_links: Its files may be links out of it, to regular files anywhere but in `/proc`, `/sys` and `/dev`.

    Raises:
        FormatError: Nothing there, unfinished, unsafe, or in a format we do not know.
        RequestError: There is no format of that name.
    """
    try:
        folder = resolve(path, follow_links=follow_links)
        _refuse_partial(folder)
        declared = _named(name) if name is not None else detect(folder)
        if declared is None:
            raise _unreadable(folder)
        try:
            opened = declared.load().open(folder)
        except FormatError as error:
            refuse_empty(folder, error)
            raise
        path_named = named_path(path)
        outer = is_folder(path_named) and not path_named.name.startswith("mp_rank_")
        opened.catalog = replace(opened.catalog, opened=path_named if outer else folder)
        return opened
    except OSError as error:  # a failing disk, a folder that may not be listed
        raise read_failure(error.filename or path, error) from error


def _refuse_partial(folder: Path) -> None:
    """A folder that an interrupted run of distckpt left looks like a result, of which some elements are not written."""
    left = next((part for part in folder.parts if part.startswith(".") and part.endswith(".distckpt-partial")), None)
    if left is not None:
        raise UnfinishedError(
            f"{printable(left)} is the unfinished result of an interrupted run of distckpt",
            hint="run the same command again, which completes it",
        )


def _named(name: str) -> Format:
    by_name = {entry.name: entry for entry in REGISTRY}
    if name not in by_name:
        raise RequestError(f"there is no format {printable(name)!r}", hint=f"known: {', '.join(by_name)}")
    return by_name[name]


def _unreadable(folder: Path) -> FormatError:
    names = listing(folder)
    shown = printable(str(folder))
    backend = backend_of(folder)
    if backend is not None:
        return UnsupportedError(f"{shown} is in the format '{printable(backend)}', which this version does not read")
    return FormatError(f"{shown} is not a checkpoint that distckpt knows", details=[f"found: {', '.join(names[:6])}"])
