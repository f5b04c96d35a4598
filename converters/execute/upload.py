"""A result that goes into an object store: made whole on a disk, then uploaded, what makes it loadable last.

    SCRATCH/distckpt-NAME-0123456789abcdef/
        NAME/                       the result, made as on any disk, with its journal and all
        .uploaded                   one JSON line for each object that is there

    s3://bucket/parent/
        .NAME.distckpt-upload       while the upload is not complete: of which job, and what it will write
        NAME/...

A store has no rename, so what is loadable appears last: the files of tensors first, then those that describe them, then the
training run's tracker. A run that dies is continued by the same command: what is uploaded is not uploaded again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING, Any

from converters.errors import DestinationError, Interrupted, RequestError
from converters.events import FileDone, Moved, Note, Phase, PlanReady
from converters.execute import journal
from converters.execute.destination import os_trouble
from converters.execute.disk import trouble_with
from converters.formats.folder import exists, read_small, refresh, walk
from converters.names import printable
from converters.remote.writing import StoreWriter

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from converters.events import Listener, StopFlag
    from converters.execute.ranks import Ranks
    from converters.remote.address import RemotePath

__all__ = ["Upload"]

_DESCRIBE = ("config.json", "common.pt", "metadata.json", ".metadata", "run_config.yaml")
_TRACKER = "latest_checkpointed_iteration.txt"
_FILES_AT_ONCE = 4


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
                hint="--scratch DIR names one; the result is made there, then uploaded",
            )
        digest = hashlib.sha256(str(destination).encode()).hexdigest()[:16]
        folder = (scratch or Path(tempfile.gettempdir())) / f"distckpt-{destination.name}-{digest}"
        self.destination, self.folder, self.staged = destination, folder, folder / destination.name
        self._marker = destination.with_name(f".{destination.name}.distckpt-upload")
        self._fingerprint, self._overwrite, self._about = fingerprint, overwrite, about
        self._lock = -1
        self._journal = folder / ".uploaded"
        self._writer: StoreWriter | None = None

    @property
    def is_staged(self) -> bool:
        """Whether the whole result was made by an earlier run of the same command: it appears by a rename."""
        return journal.read(self._journal, self._fingerprint)[1] > 0 and self.staged.exists()

    def begin(self) -> None:
        """Sees to it that the store can be written to, before any work is done, and discards what other jobs left.

        Raises:
            DestinationError: It cannot be, or another job's upload lies there.
        """
        try:
            self._writer = StoreWriter(self.destination)
            refresh(self._marker.parent)
            earlier = self._earlier()
            mine = earlier.get("fingerprint") == self._fingerprint
            if earlier and earlier.get("uploading") and not mine and not self._overwrite:
                raise DestinationError(
                    f"{printable(str(self.destination))} is the unfinished upload of another command",
                    hint="run that command again, or add --overwrite to discard what it uploaded",
                )
            if not (earlier and mine):
                self._mark(uploading=bool(earlier.get("uploading")), replace=bool(earlier.get("uploading")))
        except OSError as error:
            raise os_trouble(error, self.destination, "writing to") from error
        with trouble_with(self.folder, "preparing"):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._take_lock()
            if not journal.read(self._journal, self._fingerprint)[1]:
                _remove(self.staged)  # of another job, or of this one before its source or its options changed
                self._journal.write_text(json.dumps(journal.header(self._fingerprint, self._about)) + "\n")

    def _take_lock(self) -> None:
        """Holds the folder for this process, so that no other process clears it or uploads beside this one."""
        fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise DestinationError(
                f"another distckpt is writing {printable(str(self.destination))} right now", hint="wait for it"
            ) from None
        except OSError:  # some NFS and Lustre mounts have no locks
            pass
        self._lock = fd

    def close(self) -> None:
        """Lets go of the folder; what is in it stays for the next run."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def run(self, tell: Listener, stop: StopFlag | None) -> None:
        """Uploads the result that was made, and removes it from the disk.

        Raises:
            Interrupted: `stop` was set; the same command continues.
            DestinationError: The store cannot be written to any more.
        """
        try:
            self._run(tell, stop)
        except OSError as error:
            what = error.strerror or str(error)
            raise DestinationError(
                f"uploading to {printable(str(error.filename or self.destination))} failed: {what}",
                details=[f"the complete result is in {printable(str(self.staged))}"],
                hint="run the same command again: what is uploaded is not uploaded again",
            ) from error

    def _run(self, tell: Listener, stop: StopFlag | None) -> None:
        assert self._writer is not None
        files = self._files()
        earlier = self._earlier()
        replace = self._overwrite or bool(earlier.get("replace"))
        tell(Phase("uploading"))
        tell(PlanReady("upload", len(files), 0, sum(path.stat().st_size for path in files.values()), 0))
        self._mark(uploading=True, replace=replace)
        there = self._there()
        done = self._done(there)
        if len(done):
            tell(Note(f"{len(done)} of {len(files)} files were uploaded before"))
        if replace:  # from here on it is neither the old nor the new
            stale = [name for name in there if name not in done and _when(name) > 0]
            self._writer.delete(self._object(name) for name in stale)
        for when in sorted({_when(name) for name in files}):
            self._upload([name for name in files if _when(name) == when and name not in done], files, tell, stop)
        self._check(files)
        if replace:
            self._writer.delete(self._object(name) for name in there if name not in files)
        self._writer.delete([self._marker])
        refresh(self._marker.parent)
        _remove(self.folder)

    def _upload(self, names: list[str], files: dict[str, Path], tell: Listener, stop: StopFlag | None) -> None:
        writer = self._writer
        assert writer is not None

        def put(name: str) -> tuple[str, int, str]:
            if stop is not None and stop.signum:
                raise Interrupted(
                    stop.signum, "the upload was stopped", hint="run the same command again: it continues"
                )
            size = files[name].stat().st_size
            return name, size, writer.put_file(files[name], self._object(name))

        os.truncate(
            self._journal, journal.read(self._journal, self._fingerprint)[1]
        )  # a kill may have cut the last line
        with self._journal.open("a") as lines, ThreadPoolExecutor(_FILES_AT_ONCE) as pool:
            try:
                for future in as_completed([pool.submit(put, name) for name in names]):
                    name, size, tag = future.result()
                    lines.write(json.dumps({"name": name, "size": size, "tag": tag}) + "\n")
                    lines.flush()
                    tell(Moved(size))
                    tell(FileDone(name, size))
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise

    def _files(self) -> dict[str, Path]:
        """The files of the result by name within the destination; the destination itself is named by nothing."""
        if self.staged.is_file():
            return {"": self.staged}
        return {name: self.staged / name for name, _ in walk(self.staged)}

    def _object(self, name: str) -> RemotePath:
        return self.destination / name if name else self.destination

    def _there(self) -> dict[str, tuple[int, str]]:
        """Size and ETag of every object at the destination."""
        refresh(self._marker.parent)
        if not exists(self.destination):
            return {}
        return dict(_objects(self.destination, ""))

    def _done(self, there: dict[str, tuple[int, str]]) -> set[str]:
        """What an earlier run has uploaded and what is unchanged since."""
        lines = journal.read(self._journal, self._fingerprint)[0]
        return {line["name"] for line in lines if there.get(line["name"]) == (line["size"], line["tag"])}

    def _check(self, files: dict[str, Path]) -> None:
        there, done = self._there(), {}
        for line in journal.read(self._journal, self._fingerprint)[0]:
            done[line["name"]] = (line["size"], line["tag"])
        wrong = [name for name in files if there.get(name) != done.get(name)]
        if wrong:
            shown = printable(str(self._object(wrong[0])))
            raise DestinationError(
                f"{shown} is not what was uploaded: somebody else writes there, or the store's listing is late",
                hint="run the same command again",
            )

    def _earlier(self) -> dict[str, Any]:
        """What the marker says that lies beside the destination; nothing if there is none."""
        if not exists(self._marker):
            return {}
        try:
            document = json.loads(read_small(self._marker, 1 << 20))
        except ValueError:
            return {}
        return document if isinstance(document, dict) else {}

    def _mark(self, *, uploading: bool, replace: bool) -> None:
        assert self._writer is not None
        document: dict[str, Any] = {"fingerprint": self._fingerprint, "uploading": uploading, "replace": replace}
        document |= {"about": dict(self._about)} if self._about else {}
        self._writer.put_bytes(json.dumps(document).encode() + b"\n", self._marker)
        refresh(self._marker.parent)


def _objects(path: RemotePath, name: str) -> Iterator[tuple[str, tuple[int, str]]]:
    properties = path.properties()
    if properties is not None:
        yield name, (properties.size, properties.tag)
        return
    for inner in path.entries():
        yield from _objects(path / inner, f"{name}/{inner}" if name else inner)


def _when(name: str) -> int:
    """0: contents; 1: what describes them, without which nothing is loaded; 2: what says that there is a checkpoint."""
    last = name.rpartition("/")[2]
    if last == _TRACKER:
        return 2
    return int(last in _DESCRIBE or last.endswith(".index.json"))


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
