"""The folder in which the ranks of a run exchange small files, and the locks that show which ranks are alive."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import time
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from converters.errors import DestinationError
from converters.execute.disk import lock, make_folders, remove_folder, trouble_with

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_PATIENCE = 10.0  # seconds that ranks of an earlier run get to notice that it is over


class NotRead(Enum):
    """Why a file has no document.

    Attributes:
        NO_FILE: There is none.
        NOT_NOW: There may be one, but reading it failed, or gave no document: the next time may do.
    """

    NO_FILE = "no file"
    NOT_NOW = "not now"


class RankFolder:
    """The folder as one rank uses it.

    Args:
        folder: On a file system that all ranks share.
        rank: Whose view it is.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank
        self._lock = -1

    def arrive(self, timeout: float) -> bool:
        """Takes this rank's place, once no process of an earlier run has it any more.

        Returns:
            Whether the file system has locks.

        Raises:
            DestinationError: The place does not become free, or the folder cannot be made.
        """
        deadline = time.monotonic() + timeout
        with trouble_with(self.folder, "preparing"):
            while time.monotonic() < deadline:
                make_folders(self.folder)
                claimed = claim(self.folder / f"lock-{self.rank}")
                if claimed is not None:
                    self._lock, locked = claimed
                    if self.rank == 0:
                        self._remove_earlier_files()
                    return locked
                time.sleep(0.1)
        raise DestinationError(
            f"another process has been rank {self.rank} for {timeout:g} s",
            hint="end what is left of the earlier run, then run the same command again",
        )

    def _remove_earlier_files(self) -> None:
        """Removes what an earlier run left; ranks of this run that came before us publish their status again."""
        for path in self.folder.iterdir():
            rank = path.name.removesuffix(".new").rpartition("-")[2]
            if path.name != "lock-0" and not is_locked(self.folder / f"lock-{rank}"):
                path.unlink(missing_ok=True)

    def write(self, name: str, document: dict[str, Any]) -> None:
        """Replaces a file.

        Raises:
            DestinationError: Writing failed.
        """
        # replaced, never changed, so that no reader sees half of it; closing is what network file systems send it on
        path, data = self.folder / f"{name}.new", json.dumps(document, separators=(",", ":")).encode()
        with trouble_with(path, "writing"):
            try:
                path.write_bytes(data)
                path.replace(self.folder / name)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not (self.folder / name).exists():
                    raise
                with (self.folder / name).open("r+b") as file:  # it has room on the disk already; spaces mean nothing
                    file.write(data.ljust(os.fstat(file.fileno()).st_size))

    def read(self, name: str) -> dict[str, Any] | NotRead:
        """The document in a file, or why it is not known."""
        try:
            document = json.loads((self.folder / name).read_bytes())
        except FileNotFoundError:
            return NotRead.NO_FILE
        except (OSError, ValueError):
            return NotRead.NOT_NOW
        return document if document and isinstance(document, dict) else NotRead.NOT_NOW

    def close(self) -> None:
        """Gives up this rank's place."""
        if self._lock >= 0:
            with contextlib.suppress(OSError):  # the lock is free in any case
                os.close(self._lock)
            self._lock = -1


def machine_id() -> str:
    """Tells machines apart even where two have the same name."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return secrets.token_hex(8)


def claim(path: Path) -> tuple[int, bool] | None:
    """Locks a file until it is closed or the process ends.

    Returns:
        The open file and whether the file system has locks at all; None while another process holds it.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        has_locks = lock(fd)
    except BlockingIOError:
        os.close(fd)
        return None
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(fd), path.stat()):
            return fd, has_locks
    os.close(fd)  # it was tidied away before we had the lock
    return None


def is_locked(path: Path) -> bool:
    """Whether a living process holds the lock that `claim` gives."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    except OSError:
        return True  # passing trouble with a disk is not a death; a rank that is really gone falls silent
    try:
        lock(fd, shared=True)
    except BlockingIOError:
        return True
    finally:
        with contextlib.suppress(OSError):  # nothing was written
            os.close(fd)
    return False


def end_earlier_runs(folders: Iterable[Path]) -> None:
    """Ends what is left of earlier runs: ranks whose rank 0 is gone must not write into files that are begun anew.

    Args:
        folders: Where the ranks of earlier runs met.

    Raises:
        DestinationError: Such a rank does not end.
    """
    for folder in folders:
        (folder / "rank-0").unlink(missing_ok=True)  # a rank that misses it stops
        deadline = time.monotonic() + _PATIENCE
        while living := next(_locked_files(folder), None):
            if time.monotonic() > deadline:
                raise DestinationError(
                    f"{living.name.replace('lock-', 'rank ')} of an earlier run has not ended",
                    hint="end that process (it may be on another machine), then run the same command again",
                )
            time.sleep(0.1)
        remove_folder(folder)


def _locked_files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.glob("lock-*")) if is_locked(path))
