"""Storage formats: one file each, found by `open_checkpoint`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from converters.errors import FormatError
from converters.formats.canonical import backend_of
from converters.formats.folder import resolve_folder
from converters.formats.legacy import LegacyReader
from converters.formats.torch_dist import TorchDistReader
from converters.formats.zarr import ZarrReader
from converters.names import printable

if TYPE_CHECKING:
    from converters.formats.base import Reader

__all__ = ["REGISTRY", "open_checkpoint"]

REGISTRY: tuple[type[Reader], ...] = (TorchDistReader, ZarrReader, LegacyReader)
"""Every format we read, in the order they are tried."""


def open_checkpoint(path: str | Path) -> Reader:
    """Opens the checkpoint that a path means: a training root, an iteration, NeMo's folder, or a file inside.

    Raises:
        FormatError: Nothing there, unfinished, unsafe, or in a format we do not know.
    """
    try:
        folder = resolve_folder(path)
        for reader in REGISTRY:
            if reader.detect(folder):
                opened = reader.open(folder)
                given = Path(path).expanduser()
                outer = given.is_dir() and not given.name.startswith("mp_rank_")
                opened.catalog = replace(opened.catalog, opened=given if outer else folder)
                return opened
        raise _unreadable(folder)
    except OSError as error:  # a failing disk, a folder that may not be listed
        what = printable(str(error.filename or path))
        raise FormatError(f"reading {what} failed: {error.strerror or error}") from error


def _unreadable(folder: Path) -> FormatError:
    names = sorted(entry.name for entry in folder.iterdir())
    shown = printable(str(folder))
    backend = backend_of(folder)
    if backend is not None:
        return FormatError(f"{shown} is in the format '{printable(backend)}', which this version does not read")
    return FormatError(f"{shown} is not a checkpoint that distckpt knows", details=[f"found: {', '.join(names[:6])}"])
