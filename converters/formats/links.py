"""Links in checkpoints: a link that leads out is followed only if the user allows it."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import TYPE_CHECKING

from converters.errors import FormatError
from converters.names import printable
from converters.remote.address import RemotePath

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


_enclosed: dict[str, str] = {}  # folders and files as they were named, and where they really are
_followed: set[str] = set()  # those of them whose links may lead out
_VIRTUAL = ("/proc/", "/sys/", "/dev/")


def enclose(root: Path, *, follow_links: bool = False) -> None:
    """From now on nothing below a folder is read through a link that leads out of it; the folder itself may be a link.

    Args:
        root: A checkpoint as it was named: a folder, or a file together with what lies beside it.
        follow_links: Links may lead out of it, but not to what the kernel makes up (`/proc`, `/sys`, `/dev`).
    """
    if isinstance(root, RemotePath):
        return  # there are no links
    for path in (str(root),) if root.is_dir() else (str(root), str(root.parent)):
        _enclosed[path] = os.path.realpath(path)
        (_followed.add if follow_links else _followed.discard)(path)


def follows_links(path: Path) -> bool:
    """Whether a link at or below a path may lead out of the checkpoint that it is in."""
    return bool(_followed) and _checkpoint_of(path) in _followed


def _upwards(path: Path) -> Iterator[str]:
    """A path and the folders around it, innermost first, without the objects that `Path.parents` makes for each file."""
    folder = str(path)
    yield folder
    while (parent := os.path.dirname(folder) or ".") != folder:  # noqa: PTH120
        yield parent
        folder = parent


def _checkpoint_of(path: Path) -> str | None:
    """The innermost enclosed folder or file at or around a path."""
    return next((folder for folder in _upwards(path) if folder in _enclosed), None)


def followed_links(paths: Iterable[Path]) -> Iterator[str]:
    """For each path that a followed link leads out of its checkpoint: where it is, and what changes if that is replaced.

    Raises:
        OSError: A file cannot be asked for its size and time.
    """
    for path in paths if _followed else ():
        root = _checkpoint_of(path)
        if root is None or root not in _followed:
            continue
        real = path.resolve()
        if real != Path(_enclosed[root]) / path.relative_to(root):
            file_stat = real.stat()
            yield f"{real}:{file_stat.st_dev}:{file_stat.st_ino}:{file_stat.st_size}:{file_stat.st_mtime_ns};"


def escape(path: Path) -> str | None:
    """Where links on the way to a path lead to, if that is outside of the checkpoint; None if it is in it.

    A folder in Hugging Face's cache is all links into `blobs` beside its `snapshots`: those are its own.
    """
    root = _checkpoint_of(path)
    if root is None:
        return None
    try:
        if not any(
            Path(inner).is_symlink() for inner in itertools.takewhile(lambda inner: inner != root, _upwards(path))
        ):
            return None
    except OSError as error:
        raise FormatError(f"cannot read {printable(str(path))}: {error.strerror}") from error
    real, home = os.path.realpath(path), _enclosed[root]
    cache, snapshots, _ = home.rpartition("/snapshots/")
    if root in _followed:
        return real if real.startswith(_VIRTUAL) else None
    return None if real.startswith((f"{home}/", f"{cache}/blobs/" if snapshots else f"{home}/")) else real


def refuse_escape(path: Path) -> None:
    """Refuses a path that a link leads out of its checkpoint.

    Raises:
        FormatError: It does.
    """
    target = escape(path)
    if target is not None:
        raise FormatError(
            f"{printable(str(path))} is a link to {printable(target)}, outside of the checkpoint",
            hint="--follow-links (follow_links=True) reads it, if you trust where it leads",
        )
