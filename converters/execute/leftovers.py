"""Unfinished work of interrupted runs: listed, described, removed.

    .NAME.distckpt-partial/     a result that is being made (`publish`)
    .NAME.distckpt-old/         what --overwrite replaces, for a moment
    .NAME.distckpt-ranks-*/     where the ranks of a run meet (`rank_sync`)
    distckpt-NAME-0123.../      under --scratch: a result for an object store, until it is uploaded (`upload`)

    .NAME.distckpt-upload       in a store, beside NAME: an upload that is not complete

Nothing else is kept anywhere: no metadata and no plan is cached between runs. Only folders with a journal of ours in them
are removed, and only while this process holds the lock that a living run has.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from converters.errors import DestinationError, DistckptError, FormatError
from converters.execute import journal
from converters.execute.disk import lock, opened, os_trouble
from converters.execute.journal import JOURNAL, Journal
from converters.execute.rank_folder import is_locked
from converters.execute.upload import mark_of, read_mark
from converters.formats.folder import read_small, status
from converters.names import printable, quoted
from converters.remote.address import RemotePath, named_path
from converters.remote.unfinished import abort_unfinished

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_NAMES = {
    "staging": re.compile(r"\.(.+)\.distckpt-partial"),
    "replaced": re.compile(r"\.(.+)\.distckpt-old"),
    "ranks": re.compile(r"\.(.+)\.distckpt-ranks-.+"),
    "upload": re.compile(r"distckpt-(.+)-[0-9a-f]{16}"),
}
_MARK = re.compile(r"\.(.+)\.distckpt-upload")
_NO_LOCKS = "unknown", "this file system has no locks, so distckpt cannot tell whether its run is still going"
_INSIDE = re.compile(r"iter_\d+|release|global_step_\d+|weights|mp_rank_.*|pp\d+|tp\d+")  # checkpoints: not searched


def about_run(command: str, source: Path, destination: Path, typed: Sequence[str]) -> dict[str, Any]:
    """What a journal says of its run to a person.

    Args:
        command: The verb.
        typed: The words behind `distckpt` on the command line; none if a program called the library.
    """
    about: dict[str, Any] = {"command": command, "source": str(source), "destination": str(destination)}
    return about | ({"typed": list(typed), "folder": str(Path.cwd())} if typed else {})


@dataclass(frozen=True, slots=True)
class Leftover:
    """A folder that a run keeps or has left.

    Attributes:
        kind: "staging", "upload", "ranks" or "replaced": see the module.
        state: "running": a living process has it; "unfinished": its run has ended early, and it may be removed;
            "unknown": it has no journal of ours, belongs to another user, or nothing tells whether its run is still going.
        reason: Why it is not removed; empty if it may be.
        nbytes: Bytes that it takes on the disk.
        modified: When its journal, or itself, last changed, in seconds since 1970.
        destination: What its run makes; None if nothing says so.
        command: What to type to continue its run; None if nothing says so.
    """

    path: Path
    kind: str
    state: str
    reason: str
    nbytes: int
    modified: float
    destination: str | None = None
    command: str | None = None


def leftovers(folder: Path) -> Iterator[Leftover]:
    """What runs left in a folder or below it, or the folder itself, in the order of their paths; not inside of checkpoints.

    Raises:
        FormatError: The folder cannot be listed.
    """
    if _kind(folder.resolve().name) is not None and not folder.is_symlink():
        yield from _describe(folder)
        return
    try:
        paths = sorted(folder.iterdir())
    except OSError as error:
        raise FormatError(f"{printable(str(folder))} cannot be listed: {error.strerror or error}") from error
    yield from _find_marks(paths) if isinstance(folder, RemotePath) else _find_below(paths)


def _find_below(paths: Sequence[Path]) -> Iterator[Leftover]:
    for path in paths:
        if path.is_symlink() or not path.is_dir():
            continue
        if _kind(path.name) is not None:
            yield from _describe(path)
        elif not _INSIDE.fullmatch(path.name):
            inside: list[Path] = []
            with contextlib.suppress(OSError):  # a folder that may not be listed
                inside = sorted(path.iterdir())
            yield from _find_below(inside)


def _find_marks(paths: Sequence[Path]) -> Iterator[Leftover]:
    """Marks of uploads that are not complete, directly in a folder of a store."""
    for path in paths:
        match = _MARK.fullmatch(path.name)
        if match is None:
            continue
        try:
            document, state = json.loads(read_small(path, 1 << 20)), status(path)
        except (OSError, ValueError, FormatError):
            continue
        about = document.get("about") if isinstance(document, dict) else None
        about = about if isinstance(about, dict) else {}
        modified = state.mtime_ns / 1e9 if state else 0.0
        reason = "object stores have no locks: the same command continues it, another one with --overwrite discards it"
        beside = str(path.with_name(match[1]))
        yield Leftover(path, "mark", "unknown", reason, 0, modified, beside, _continuing_command(about))


def scratch_leftovers(scratch: Path) -> Iterator[Leftover]:
    """As `leftovers`, of what lies directly in a folder that other programs use, too."""
    with contextlib.suppress(OSError):
        for path in sorted(scratch.iterdir()):
            if _kind(path.name) is not None and path.is_dir() and not path.is_symlink():
                yield from _describe(path)


def clear_leftover(leftover: Leftover) -> str:
    """Removes what an ended run left, while holding the lock that a living one has; and uploads in parts that it began.

    Returns:
        A sentence for a person about those uploads; empty if there is nothing to say.

    Raises:
        DestinationError: It is in use meanwhile, is not ours to remove, or the disk failed.
    """
    path = leftover.path
    shown, answer = printable(str(path)), ""
    if leftover.reason:
        raise DestinationError(f"{shown} is not removed: {leftover.reason}")
    try:
        with opened(path, os.O_RDONLY | os.O_DIRECTORY) as fd:
            state, reason = _judge_state(path, leftover.kind, fd) if lock(fd) else _NO_LOCKS
            if state != "unfinished" or not os.path.samestat(os.fstat(fd), path.lstat()):
                raise DestinationError(f"{shown} is not removed: {reason or 'it has just been replaced'}")
            if leftover.kind == "upload":
                answer = _abort_uploads(path)
            _remove(path, leftover.kind)
    except BlockingIOError:
        raise DestinationError(f"{shown} is not removed: a run has begun to use it") from None
    except FileNotFoundError:
        return ""  # its run went on and has ended
    except OSError as error:
        raise os_trouble(error, path, "removing") from error
    return answer


def _abort_uploads(path: Path) -> str:
    """Aborts the uploads in parts of a result, if its run is the last one that wrote to its destination."""
    header = journal.first_line(path / JOURNAL) or {}
    destination = named_path(str((header.get("about") or {}).get("destination", "")))
    if not isinstance(destination, RemotePath) or destination.parts[0] == "hf:":  # the hub forgets what no commit shows
        return ""
    shown = printable(str(destination))
    try:
        mark = read_mark(mark_of(destination))
    except (OSError, DistckptError) as error:
        return f"what was uploaded to {shown} stays there: {getattr(error, 'strerror', None) or error}"
    if mark.get("fingerprint") != header["fingerprint"] or not mark.get("uploading"):
        return ""
    stays = f"what was uploaded to {shown} stays there, marked as unfinished"
    return "; ".join(filter(None, (abort_unfinished(destination), stays)))


def _remove(path: Path, kind: str) -> None:
    if kind == "ranks":
        shutil.rmtree(path)
        return
    # first nothing in it can be continued, last it is no longer known to be ours: a kill in between leaves neither wrong
    record = path / JOURNAL
    cleared = path / f"{record.name}.cleared"
    Journal(cleared, "").close()
    cleared.replace(record)
    for entry in sorted(path.iterdir()):
        if entry == record:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    shutil.rmtree(path)


def _kind(name: str) -> str | None:
    return next((kind for kind, pattern in _NAMES.items() if pattern.fullmatch(name)), None)


def _describe(path: Path) -> Iterator[Leftover]:
    kind = _kind(path.resolve().name) or ""
    try:
        state, reason = _probe_state(path, kind)
        record = path / JOURNAL
        modified = (record if record.is_file() else path).lstat().st_mtime
        nbytes = _disk_bytes(path)
    except FileNotFoundError:
        return  # its run has just ended
    except OSError as error:
        yield Leftover(path, kind, "unknown", f"it cannot be read: {error.strerror or error}", 0, 0.0)
        return
    about = (journal.first_line(path / JOURNAL) or {}).get("about")
    about = about if isinstance(about, dict) else {}
    match = _NAMES[kind].fullmatch(path.resolve().name)
    beside = str(path.with_name(match[1])) if match and kind in ("staging", "replaced") else None
    destination = about.get("destination") if isinstance(about.get("destination"), str) else beside
    yield Leftover(path, kind, state, reason, nbytes, modified, destination, _continuing_command(about))


def _continuing_command(about: dict[str, Any]) -> str | None:
    """The command that a journal names, quoted: whatever a journal says, it is words for distckpt."""
    typed, folder = about.get("typed"), about.get("folder")
    if not isinstance(typed, list) or not typed or not all(isinstance(word, str) for word in typed):
        return None
    words = " ".join(map(quoted, ["distckpt", *typed]))
    elsewhere = isinstance(folder, str) and folder != str(Path.cwd())
    return f"cd {quoted(folder)} && {words}" if elsewhere and isinstance(folder, str) else words


def _probe_state(path: Path, kind: str) -> tuple[str, str]:
    """State and reason, by trying the lock."""
    with opened(path, os.O_RDONLY | os.O_DIRECTORY) as fd:
        try:
            if not lock(fd, shared=True):
                return _NO_LOCKS
        except BlockingIOError:
            return "running", "its run is still going"
        fcntl.flock(fd, fcntl.LOCK_UN)  # at once: a run that begins just now shall find it free
        return _judge_state(path, kind, fd)


def _judge_state(path: Path, kind: str, fd: int) -> tuple[str, str]:
    """State and reason of a folder that no other process has locked."""
    if kind == "replaced":
        return (
            "unknown",
            "it is what --overwrite was about to replace; the command that did so puts it back or removes it",
        )
    if os.fstat(fd).st_uid != os.geteuid():
        return "unknown", "it belongs to another user"
    if kind == "ranks":
        locks = list(path.glob("lock-*"))
        if any(map(is_locked, locks)):
            return "running", "its run is still going"
        return ("unfinished", "") if locks else ("unknown", "it has no files of ranks")
    if journal.first_line(path / JOURNAL) is None:
        return "unknown", "it has no journal of distckpt: remove it yourself if you know what it is"
    for meeting in _meetings(path, kind):
        if any(map(is_locked, meeting.glob("lock-*"))):
            return "running", "ranks of its run are still going"
    for inner in path.glob(".*.distckpt-partial") if kind == "upload" else ():
        if _probe_state(inner, "staging")[0] == "running":
            return "running", "its run is still going"
    return "unfinished", ""


def _meetings(path: Path, kind: str) -> Iterator[Path]:
    if kind == "upload":
        return path.glob(".*.distckpt-ranks-*")
    head = f"{path.name.removesuffix('partial')}ranks-"
    return (sibling for sibling in path.parent.iterdir() if sibling.name.startswith(head))


def _disk_bytes(path: Path) -> int:
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += Path(folder, name).lstat().st_blocks * 512
    return total
