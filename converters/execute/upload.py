"""Upload to an object store: the result is written to a disk, then uploaded, the files that make it loadable last.

    SCRATCH/distckpt-NAME-0123456789abcdef/
        NAME/                       the result, made as on any disk, with its journal and all
        .journal                    one JSON line for each object that is there
        .journal-2                  the same of rank 2, if several processes upload

    s3://bucket/parent/
        .NAME.distckpt-upload       while the upload is not complete: of which job, and what it will write
        NAME/...

A store has no rename, so what is loadable appears last: the files of tensors first, then those that describe them, then the
training run's tracker. A run that dies is continued by the same command: what is uploaded is not uploaded again.

A file goes up when all of the result is made: its tiles are written in any order and by several ranks, checksums of records
are put before and behind what they cover, and an object has to be sent from front to back.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from converters.errors import DestinationError, RequestError
from converters.events import FileDone, Moved, Note, Phase, PlanReady
from converters.execute import journal
from converters.execute.destination import hidden, replaced
from converters.execute.disk import lock_folder, trouble_with
from converters.execute.journal import JOURNAL, Journal
from converters.execute.work_sharing import FunctionWorker
from converters.formats.folder import exists, read_small, refresh, walk
from converters.formats.resolve import TRACKER
from converters.names import printable
from converters.remote.unfinished import abort_unfinished
from converters.remote.writing import StoreWriter

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from converters.execute.ranks import Ranks
    from converters.execute.work_sharing import WorkSharing
    from converters.remote.address import RemotePath

_DESCRIBE = ("config.json", "common.pt", "metadata.json", ".metadata", "run_config.yaml")
FILES_AT_ONCE = 4
"""Files that each rank uploads at once."""


@dataclass(frozen=True, slots=True)
class _File:
    """A file to be uploaded: a task of a `WorkSharing`."""

    number: int
    name: str
    nbytes: int


class Upload:
    """A result on its way into a store.

    Args:
        destination: Where it will appear.
        fingerprint: Digest of the job; an interrupted upload of another one is not continued.
        scratch: A folder on a disk with room for the whole result; by default the one for temporary files.
        overwrite: What is at the destination is replaced, after success.
        ranks: The processes that make the result together.
        about: What the journal says of the run to a person: see `converters.execute.leftovers`.

    Attributes:
        folder: What the scratch folder holds of it.
        staged: Where the result is made.

    Raises:
        RequestError: Several ranks, and no scratch folder that they share.
    """

    def __init__(
        self,
        destination: RemotePath,
        fingerprint: str,
        scratch: Path | None,
        *,
        overwrite: bool,
        ranks: Ranks,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        if ranks.world > 1 and scratch is None:
            raise RequestError(
                f"several ranks cannot write to {printable(str(destination))} without a disk that they share",
                hint="--scratch DIR names one; the result is made there, then uploaded by all of them",
            )
        digest = hashlib.sha256(str(destination).encode()).hexdigest()[:16]
        folder = (scratch or Path(tempfile.gettempdir())) / f"distckpt-{destination.name}-{digest}"
        self.destination, self.folder, self.staged = destination, folder, folder / destination.name
        self._marker = mark_of(destination)
        self._fingerprint, self._overwrite, self._about = fingerprint, overwrite, about
        self._journal_path = folder / (f"{JOURNAL}-{ranks.rank}" if ranks.rank else JOURNAL)
        self._open_files = contextlib.ExitStack()  # the lock and the journal, while they are open

    @cached_property
    def _writer(self) -> StoreWriter:
        return StoreWriter(self.destination)

    @property
    def is_staged(self) -> bool:
        """Whether the whole result was made by an earlier run of the same command: it appears by a rename."""
        return journal.read(self.folder / JOURNAL, self._fingerprint)[1] > 0 and self.staged.exists()

    def begin(self) -> list[str]:
        """Rank 0: sees to it that the store can be written to, before any work is done, and discards what other jobs left.

        Returns:
            Sentences for a person: what is going to be deleted, and what was.

        Raises:
            DestinationError: It cannot be, another job's upload lies there, or another process is at it.
        """
        notes = [replaced(self.destination)] if self._overwrite else []
        with trouble_with(self.destination, "writing to"):
            begun = self._prepare_store()
        with trouble_with(self.folder, "preparing"):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._open_files.callback(os.close, lock_folder(self.folder, self.destination)[0])
            if not journal.read(self._journal_path, self._fingerprint)[1]:
                _remove(self.staged)  # of another job, or of this one before its source or its options changed
                for path in self.folder.glob(f"{JOURNAL}-*"):
                    path.unlink()
            self._open_journal()
        if begun:
            notes.append(abort_unfinished(self.destination))
        return [note for note in notes if note]

    def _prepare_store(self) -> bool:
        """Sees to it that the store can be written to.

        Returns:
            Whether an upload to the destination was begun earlier.

        Raises:
            OSError: It cannot be.
            DestinationError: Another job's upload lies there.
        """
        refresh(self._marker.parent)
        earlier = read_mark(self._marker)
        continued, begun = earlier.get("fingerprint") == self._fingerprint, bool(earlier.get("uploading"))
        if begun and not continued and not self._overwrite:
            raise DestinationError(
                f"{printable(str(self.destination))} is the unfinished upload of another command",
                hint="run that command again, or add --overwrite to discard what it uploaded",
            )
        if not (earlier and continued):
            self._write_mark(uploading=begun, replace=begun)
        return begun

    def close(self) -> None:
        """Lets go of the folder; what is in it stays for the next run."""
        self._open_files.close()

    def _open_journal(self) -> None:
        self._journal = Journal(self._journal_path, self._fingerprint, self._about)
        self._open_files.callback(self._journal.close)

    def run(self, sharing: WorkSharing) -> None:
        """Uploads the result that was made, each rank its share.

        Raises:
            Interrupted: The work was stopped; the same command continues.
            DestinationError: The store cannot be written to any more.
        """
        try:
            self._run(sharing)
        except OSError as error:
            raise self._upload_error(error) from error

    def _run(self, sharing: WorkSharing) -> None:
        if not sharing.leads:
            self._open_journal()
        files = self._staged_files()
        done = self._prepare(files, sharing) if sharing.leads else set()
        worker = FunctionWorker(lambda file: self._put_file(file, sharing))
        for stage in sorted(set(map(_stage_of, files))):
            names = [name for name in files if _stage_of(name) == stage]
            tasks = [_File(number, name, files[name].stat().st_size) for number, name in enumerate(names)]
            sharing.map(tasks, lambda: worker, todo=[file for file in tasks if file.name not in done])
        if sharing.leads:
            self._check_uploaded(files)
            if self._overwrite or read_mark(self._marker).get("replace"):
                self._writer.delete(self._object(name) for name in self._list_objects() if name not in files)
            self._writer.delete([self._marker])
            refresh(self._marker.parent)

    def _announce(self, files: dict[str, Path], sharing: WorkSharing) -> None:
        sharing.assemble()
        sharing.listener(Phase("uploading"))
        sharing.listener(PlanReady("upload", len(files), 0, sum(path.stat().st_size for path in files.values()), 0))

    def _prepare(self, files: dict[str, Path], sharing: WorkSharing) -> set[str]:
        """Rank 0: names of the files that an earlier run has uploaded."""
        self._announce(files, sharing)
        replace = self._overwrite or bool(read_mark(self._marker).get("replace"))
        self._write_mark(uploading=True, replace=replace)
        objects = self._list_objects()
        # nobody changed them since
        done = {name for name, state in self._list_uploaded().items() if objects.get(name) == state}
        if done:
            sharing.listener(Note(f"{len(done)} of {len(files)} files were uploaded before"))
        if replace:  # from here on it is neither the old nor the new
            stale = [name for name in objects if name not in done and _stage_of(name) > 0]
            self._writer.delete(self._object(name) for name in stale)
        return done

    def _put_file(self, file: _File, sharing: WorkSharing) -> None:
        """Uploads a file, and notes that.

        Raises:
            Interrupted: The work was stopped.
            OSError: The store cannot be written to any more.
        """

        def moved(nbytes: int) -> None:
            sharing.check()
            sharing.report(Moved(nbytes))

        path = self.staged / file.name if file.name else self.staged
        tag = self._writer.put_file(path, self._object(file.name), moved)
        self._journal.append({"name": file.name, "size": file.nbytes, "tag": tag})
        sharing.report(FileDone(file.name, file.nbytes))

    def tidy_up(self) -> None:
        """Rank 0: removes the result from the disk when it is in the store."""
        self.close()
        _remove(self.folder)

    def _upload_error(self, error: OSError) -> DestinationError:
        reason = error.strerror or str(error)
        return DestinationError(
            f"uploading to {printable(str(error.filename or self.destination))} failed: {reason}",
            details=[f"the complete result is in {printable(str(self.staged))}"],
            hint="run the same command again: what is uploaded is not uploaded again",
        )

    def _staged_files(self) -> dict[str, Path]:
        """The files of the result by name within the destination; the destination itself is named by nothing."""
        if self.staged.is_file():
            return {"": self.staged}
        return {name: self.staged / name for name, _ in walk(self.staged)}

    def _object(self, name: str) -> RemotePath:
        return self.destination / name if name else self.destination

    def _list_objects(self) -> dict[str, tuple[int, str]]:
        """Size and ETag of every object at the destination."""
        refresh(self._marker.parent)
        if not exists(self.destination):
            return {}
        return dict(_objects(self.destination, ""))

    def _list_uploaded(self) -> dict[str, tuple[int, str]]:
        """Size and ETag of what all ranks of this run, and of earlier ones of the same job, have uploaded."""
        paths = self.folder.glob(f"{JOURNAL}*")
        lines = (line for path in paths for line in journal.read(path, self._fingerprint)[0])
        return {line["name"]: (line["size"], line["tag"]) for line in lines}

    def _check_uploaded(self, files: dict[str, Path]) -> None:
        objects, done = self._list_objects(), self._list_uploaded()
        wrong = [name for name in files if objects.get(name) != done.get(name)]
        if wrong:
            shown = printable(str(self._object(wrong[0])))
            raise DestinationError(
                f"{shown} is not what was uploaded: another program writes there, or the store's listing lags",
                hint="run the same command again",
            )

    def _write_mark(self, *, uploading: bool, replace: bool) -> None:
        document: dict[str, Any] = {"fingerprint": self._fingerprint, "uploading": uploading, "replace": replace}
        document |= {"about": dict(self._about)} if self._about else {}
        self._writer.put_bytes(json.dumps(document).encode() + b"\n", self._marker)
        refresh(self._marker.parent)


def mark_of(destination: RemotePath) -> RemotePath:
    """What lies beside a destination that is not complete."""
    return hidden(destination, "upload")


def read_mark(marker: RemotePath) -> dict[str, Any]:
    """What the marker says; nothing if there is none."""
    if not exists(marker):
        return {}
    try:
        document = json.loads(read_small(marker, 1 << 20))
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def _objects(path: RemotePath, name: str) -> Iterator[tuple[str, tuple[int, str]]]:
    """Size and ETag of an object, or of all in a folder, by their names within the destination."""
    properties = path.properties()
    if properties is not None:
        yield name, (properties.size, properties.tag)
        return
    for inner in path.entries():
        yield from _objects(path / inner, f"{name}/{inner}" if name else inner)


def _stage_of(name: str) -> int:
    """0: contents; 1: what describes them, without which nothing is loaded; 2: what says that there is a checkpoint."""
    last = name.rpartition("/")[2]
    if last == TRACKER:
        return 2
    return int(last in _DESCRIBE or last.endswith(".index.json"))


def _remove(path: Path) -> None:
    """Removes a folder with all in it, or a file; nothing if there is none."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
