"""Output that is complete or absent: a staging folder, a journal for resuming, fsync, one rename.

    parent/
        .NAME.distckpt-partial/    what is being written; locked by the writing process
            model-00001-of-00002.safetensors ...
            .journal               one JSON line per safe point: which tasks are on disk, for good
            .journal-2             the same of rank 2, if several processes write
        .NAME.distckpt-old/        for a moment, what is replaced, where two folders cannot be exchanged in one step
        NAME/                      appears by one rename, when everything in it has been synced

A destination that is one file is staged in such a folder, too, and appears by one link or rename of that file.
Running the same command again reads the journals and goes on, with any number of ranks.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from converters.errors import DestinationError, FormatError
from converters.execute import journal
from converters.execute.destination import beside, is_empty, is_full, resolved
from converters.execute.disk import (
    exchange,
    lock_folder,
    make_folders,
    opened,
    os_trouble,
    raise_error,
    reserve,
    sync_folder,
    trouble_with,
    write_all,
    write_at,
    write_synced,
)
from converters.execute.journal import JOURNAL, Journal
from converters.execute.rank_folder import end_earlier_runs
from converters.formats.folder import open_source
from converters.names import printable
from converters.torchzip.records import check_archive

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from converters.planning.job import OutputFile, Slice


class Staging:
    """The folder being written, held under a lock.

    Args:
        destination: Where the result will appear.
        fingerprint: Digest of the job; an interrupted run with another one is not continued.
        files: What will be written.
        overwrite: Whether an existing destination is replaced, after success.
        meeting: Where the ranks of this run meet, if there are several.
        single: The destination is a file: the only one of `files`.
        about: What the journal says of the run to a person: see `converters.execute.leftovers`.

    Attributes:
        journal: The journal of rank 0, with the lines of all interrupted runs, whatever number of ranks they had.
        notes: Sentences a person should read.

    Raises:
        DestinationError: Another process is writing the same destination, or the folder cannot be made.
    """

    def __init__(
        self,
        destination: Path,
        fingerprint: str,
        files: Sequence[OutputFile],
        *,
        overwrite: bool = False,
        meeting: Path | None = None,
        single: bool = False,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        self._about = about
        self._single = files[0].name if single else None
        self.destination = resolved(destination)
        self.folder, self._old = beside(destination, "partial"), beside(destination, "old")
        self._overwrite = overwrite
        self._created_folders: list[Path] = []
        self._open_files = contextlib.ExitStack()  # the lock and the journal, while they are open
        self.notes: list[str] = []
        try:
            with trouble_with(self.folder, "creating"):
                self._created_folders = make_folders(self.folder)[1:]
                fd, has_locks = lock_folder(self.folder, destination)
                self._open_files.callback(os.close, fd)
            if not has_locks:  # the final rename still lets only one win
                self.notes.append("this file system has no locks: make sure that only one distckpt writes here")
            with trouble_with(self.folder, "preparing"):
                self._prepare(meeting)
                self.journal = self._resume(fingerprint, files) or self._start(fingerprint, files)
                self._open_files.callback(self.journal.close)
        except BaseException:  # also when an object that is copied turns out to be damaged
            self.close()
            raise

    def _prepare(self, meeting: Path | None) -> None:
        """Tidies up after earlier runs, and makes sure that the result is still wanted."""
        self._put_back()
        if not self._overwrite and (self.destination.exists() if self._single else is_full(self.destination)):
            self._refuse_late()
        earlier = beside(self.destination, "ranks-")
        end_earlier_runs(p for p in earlier.parent.iterdir() if p.name.startswith(earlier.name) and p != meeting)

    def _put_back(self) -> None:
        """Ends an exchange of folders that a kill has cut short."""
        if not self._old.exists():
            return
        if self.destination.exists():
            shutil.rmtree(self._old)
        else:
            self._old.rename(self.destination)

    def _refuse_late(self) -> None:
        """The destination was filled after `check_destination` looked: say so now, not after the work."""
        with contextlib.suppress(OSError):
            self.folder.rmdir()  # only if nothing is in it
        raise DestinationError(
            f"{printable(str(self.destination))} was changed by another program meanwhile",
            hint="choose another directory",
        )

    def _resume(self, fingerprint: str, files: Sequence[OutputFile]) -> Journal | None:
        """The journal of an earlier run, with the lines of all its ranks; None if there is nothing to continue."""
        path = self.folder / JOURNAL
        lines, good = journal.read(path, fingerprint)
        if not good:
            if path.exists():
                self.notes.append("unfinished work that this command cannot continue is discarded")
            return None
        others = journal.merged(self.folder, fingerprint, lines)
        if not (lines or others) or not all(_is_there(self.folder / file.name, file.size) for file in files):
            return None
        continued = Journal(path, fingerprint)
        continued.append(*others)
        continued.lines += others
        self._clear(keep={JOURNAL, *(output.name for output in files)})
        return continued

    def _clear(self, keep: Collection[str] = ()) -> None:
        """Removes what an earlier run left and this one does not write."""
        for folder, folders, names in os.walk(self.folder, topdown=False, onerror=raise_error):
            for path in (Path(folder, name) for name in names):
                if str(path.relative_to(self.folder)) not in keep:
                    path.unlink()
            for path in (Path(folder, name) for name in folders):
                if path.is_symlink():
                    path.unlink()
                elif is_empty(path):
                    path.rmdir()

    def _start(self, fingerprint: str, files: Sequence[OutputFile]) -> Journal:
        """Makes the files, and a new journal."""
        if self._take_journals():
            sync_folder(self.folder)  # lest after a power cut they speak of the files made next
        self._clear()
        for output in files:
            path = self.folder / output.name
            path.parent.mkdir(parents=True, exist_ok=True)
            with opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as fd:
                reserve(fd, output.size)
                write_all(fd, output.literal)
                for piece in output.slices:
                    _write_slice(fd, piece)
                os.fsync(fd)
        begun = Journal(self.folder / JOURNAL, fingerprint, self._about)
        self._sync_folders()  # what the journal will speak of has to be found after a power cut
        return begun

    def _sync_folders(self) -> None:
        for folder, _, _ in os.walk(self.folder, onerror=raise_error):
            sync_folder(Path(folder))

    def add(self, name: str, data: bytes) -> None:
        """Writes a small file of the result and syncs it."""
        path = self.folder / name
        with trouble_with(path, "writing"):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_synced(path, data)

    def publish(self) -> None:
        """Makes the result appear at the destination: complete, synced, in one rename.

        Raises:
            DestinationError: The destination is not empty any more, or the file system failed.
        """
        published = False
        journals: dict[Path, bytes] = {}
        try:
            self.journal.close()
            journals = self._take_journals()
            self._sync_folders()
            replaced = self._single is not None or (self._overwrite and is_full(self.destination))
            if self._single is not None:
                self._publish_file(self.folder / self._single)
            elif not replaced:
                self.folder.rename(self.destination)  # onto nothing or an empty folder; never onto a full one
            elif not exchange(self.folder, self.destination):
                self._swap()
            published = True
            sync_folder(self.destination.parent)
            if replaced:
                shutil.rmtree(self.folder)  # now the old contents, or what is left of the folder around a single file
        except OSError as error:
            shown = printable(str(self.destination))
            if not published:
                with contextlib.suppress(OSError, DestinationError):  # so that the same command need not begin again
                    for path, content in journals.items():
                        self.add(path.name, content)
            if published:
                raise DestinationError(
                    f"{shown} is complete, but tidying up after it failed: {error.strerror or error}",
                    hint="check the disk; until its folder is synced, a power failure may undo it",
                ) from error
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                raise DestinationError(
                    f"{shown} was changed by another program meanwhile",
                    details=[f"the complete result is in {printable(str(self.folder))}"],
                ) from error
            raise os_trouble(error, self.destination, "publishing") from error
        finally:
            self.close()

    def _publish_file(self, file: Path) -> None:
        """Gives a file its place: over an earlier one only if that was asked for."""
        if self._overwrite:
            file.replace(self.destination)
            return
        try:
            self.destination.hardlink_to(file)  # unlike a rename, never onto a file that came meanwhile
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.ENOSYS):
                raise
            if self.destination.exists():  # a file system without hard links
                raise FileExistsError(errno.EEXIST, "filled by someone else") from error
            file.rename(self.destination)

    def _swap(self) -> None:
        """Exchanges the result and an existing destination where the file system cannot do it in one step."""
        self.destination.rename(self._old)
        try:
            self.folder.rename(self.destination)
        except OSError:
            self._old.rename(self.destination)
            raise
        self._old.rename(self.folder)

    def discard(self) -> None:
        """Removes all that was written: it can never become a good result."""
        with contextlib.suppress(OSError):
            self.journal.close()
            self._take_journals()  # first: what is left after a crash shall not be continued
            shutil.rmtree(self.folder)
        self.close()

    def _take_journals(self) -> dict[Path, bytes]:
        """Removes the journals, which are no part of the result, and returns what was in them."""
        journals = {path: path.read_bytes() for path in self.folder.iterdir() if path.name.startswith(JOURNAL)}
        for path in journals:
            path.unlink()
        return journals

    def close(self) -> None:
        """Releases the lock; what was written stays for the next run, and folders made for nothing do not."""
        with contextlib.suppress(OSError):  # the first that holds something, as a result, ends it
            while self._created_folders:
                self._created_folders.pop(0).rmdir()
        with contextlib.suppress(OSError):
            self._open_files.close()


def _is_there(file: Path, size: int) -> bool:
    return not file.is_symlink() and file.is_file() and file.stat().st_size == size


def _write_slice(fd: int, piece: Slice) -> None:
    if isinstance(piece.content, bytes):
        write_at(fd, piece.content, piece.at)
        return
    path, offset, length = piece.content
    source, at = open_source(path), piece.at
    try:
        label = f"{printable(path.name)} at {offset}"
        if piece.plain < 0:
            check_archive(source.read, offset, length, label)
        while length:
            data = source.read(offset, min(length, 1 << 20))
            if not data:
                raise FormatError(f"{printable(path.name)} ends early: {length} bytes are missing at {offset}")
            write_at(fd, data, at)
            offset, at, length = offset + len(data), at + len(data), length - len(data)
    finally:
        source.close()
