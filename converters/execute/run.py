"""Moves the bytes of a job: threads, reused buffers, sums checked on the way, a journal to resume from.

No tensor is ever whole in memory: a worker holds one tile, a scratch of the same size, and nothing that grows with the
model. The page cache is dropped behind both ends, which also starts the write-back early, so the final sync is short.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from converters.crc import RecordSums
from converters.errors import IntegrityError
from converters.events import FileDone, Moved, Phase, Resumed
from converters.execute.checksums import seal
from converters.execute.disk import opened, trouble_with
from converters.execute.work_sharing import WorkSharing
from converters.execute.worker import Outcome, TileWriter, add_losses
from converters.formats.base import fingerprint_of
from converters.io.gather import Gatherer
from converters.io.quantize import Loss
from converters.io.sources import Sources

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from converters.execute.journal import Journal
    from converters.execute.worker import Losses
    from converters.formats.base import Reader
    from converters.planning.job import Job
    from converters.planning.tasks import Task

_SAFE_POINT_SECONDS = 5.0
_SAFE_POINT_BYTES = 1 << 30


class Stats:
    """What a run did.

    Attributes:
        bytes_read: Bytes of records read, including what was read only to complete a checksum.
        bytes_written: Bytes of tensor data written.
        bytes_kept: Bytes of tensor data kept from an interrupted run.
        records_checked: Records whose checksum was compared.
        underflowed: Elements that were not zero in the source and are in the result, as fp16 has no smaller number.
        seconds: Wall time.
        losses: For each tensor that was quantized: `max_abs`, the largest difference of what a reader computes and what was
            stored, and `relative`, the length of all differences by that of the tensor.
    """

    def __init__(self) -> None:
        self.bytes_read = self.bytes_written = self.bytes_kept = self.records_checked = self.underflowed = 0
        self.seconds = 0.0
        self.losses: dict[str, dict[str, float]] = {}


def _losses_json(losses: Losses) -> list[list[Any]]:
    return [[name, *loss.to_json()] for name, loss in losses.items()]


class Run:
    """One run of a job: does what of it is not done yet, all of it on disk and checked at the end; publishes nothing.

    With several ranks, every one runs it and does its share; rank 0 finishes the job, and only there all is done at the end.

    Args:
        job: The work.
        reader: The source.
        folder: Where to write.
        journal: Says what an earlier run has done there.
        sharing: The threads and ranks that do the job; by default those of this process.
        device: Where elements are cast: `cpu` or `cuda:N`.

    Attributes:
        sources: What is read.
        written: Checksums of what was written into sealed records.
        unsure: A file could not be closed: what was written may be lost, and no later sync says so again.
    """

    def __init__(
        self,
        job: Job,
        reader: Reader,
        folder: Path,
        journal: Journal,
        *,
        sharing: WorkSharing | None = None,
        device: str = "cpu",
    ) -> None:
        self.job, self.reader, self.folder, self.journal = job, reader, folder, journal
        self.sharing = sharing or WorkSharing("write", job.fingerprint, threads=job.threads, destination=folder)
        self.device, self.unsure = device, False
        self.stats = Stats()
        self.sources, self.written = Sources(reader, job.sources), RecordSums()
        self.losses: Losses = {}
        self._lock = threading.Lock()
        self._last, self._mark = (
            time.monotonic(),
            0,
        )  # when the last safe point was, and how many bytes were written then
        self._fresh = Outcome()  # since then
        self._remaining: Counter[int] = Counter()  # how much is still to do for each file: see `_count_remaining`

    def run(self) -> Stats:
        """Does the tasks that remain, and completes the checksums.

        Raises:
            Interrupted: The sharing was stopped, or another rank is lost; what is done is in the journal.
            IntegrityError: A record does not match its own checksum, or the source changed.
            FormatError: A record cannot be read.
            DestinationError: Writing failed.
        """
        begin = time.monotonic()
        self._check_source()
        todo = self._resume()
        self.sharing.on_files = self._count_files
        try:
            self.sharing.map(
                self.job.tasks,
                lambda: TileWriter(self),
                todo=todo,
                on_shares=self._count_remaining,
                meanwhile=self._safe_point_if_due,
            )
        finally:
            self._safe_point()
        documents = self.sharing.gather(self._partial_results())
        if self.sharing.leads:
            self._take_over(documents[1:])
            self.sharing.listener(Phase("checking"))
            self._complete_sums()
            seal(self.job, self.folder, self.written)
            self._check_source()
            self.stats.losses = {
                name: {"max_abs": self.losses[name].largest, "relative": self.losses[name].relative}
                for name in self.job.sources
                if name in self.losses
            }
        self.stats.seconds = time.monotonic() - begin
        return self.stats

    def _count_remaining(self, shares: Sequence[Sequence[Task]]) -> None:
        """Notes how much is still to do for each file: this rank's tasks, and one share of each other rank that has some."""
        own_share, *other_shares = shares
        self._remaining.update(itertools.chain.from_iterable(task.files for task in own_share))
        for share in other_shares:
            self._remaining.update(set(itertools.chain.from_iterable(task.files for task in share)))

    def _partial_results(self) -> dict[str, Any]:
        """For rank 0, when the share is done: checksums of records that this rank has not read or written all of."""
        self._check_source()
        if self.sharing.leads:
            return {}
        seal(self.job, self.folder, self.written, whole_only=True)
        self._count_reading()
        sums, written = self.sources.sums.listed(), self.written.listed()
        return {"sums": sums, "written": written, "losses": _losses_json(self.losses), "stats": vars(self.stats)}

    def _take_over(self, documents: Iterable[Mapping[str, Any]]) -> None:
        """Goes on with what the other ranks have begun."""
        for document in documents:
            self._take_over_line(document)
            for name in ("bytes_read", "bytes_written", "records_checked", "underflowed"):
                setattr(self.stats, name, getattr(self.stats, name) + document["stats"][name])

    def _take_over_line(self, document: Mapping[str, Any]) -> None:
        """Takes over checksums and losses from a line of a journal, or from another rank."""
        add_losses(self.losses, {name: Loss.from_json(numbers) for name, *numbers in document["losses"]})
        for sums, name in ((self.sources.sums, "sums"), (self.written, "written")):
            for record, *segment in document[name]:
                sums.add(record, tuple(segment))

    def _check_source(self) -> None:
        if fingerprint_of(self.reader) != self.job.source_fingerprint:
            raise IntegrityError(
                "the source changed after it was opened; nothing was published",
                hint="wait until nobody writes to it, then run the same command again",
            )

    def _resume(self) -> list[Task]:
        """Takes over what the journal says; returns the tasks that remain."""
        done: set[int] = set()
        for line in self.journal.lines:
            done.update(line["tasks"])
            self._take_over_line(line)
            self.stats.underflowed += line.get("underflowed", 0)
        todo = [task for task in self.job.tasks if task.number not in done]
        earlier = [task for task in self.job.tasks if task.number in done]
        if earlier:
            incomplete = set(itertools.chain.from_iterable(task.files for task in todo))
            self.stats.bytes_kept = sum(task.nbytes for task in earlier)
            complete = len(self.job.files) - len(incomplete)
            self.sharing.listener(Resumed(self.stats.bytes_kept, complete))
        return todo

    def _safe_point_if_due(self) -> None:
        late = time.monotonic() - self._last > _SAFE_POINT_SECONDS
        if late or self.stats.bytes_written - self._mark > _SAFE_POINT_BYTES:
            self._safe_point()
            self._last, self._mark = time.monotonic(), self.stats.bytes_written

    def _safe_point(self) -> None:
        """Syncs what finished tasks wrote, then says so in the journal."""
        with self._lock:
            fresh, self._fresh = self._fresh, Outcome()
        if not fresh.tasks or self.unsure:
            return
        for number in sorted(set(itertools.chain.from_iterable(task.files for task in fresh.tasks))):
            path = self.folder / self.job.files[number].name
            with trouble_with(path, "syncing"), opened(path, os.O_RDWR) as fd:
                os.fsync(fd)
        line = {"tasks": [task.number for task in fresh.tasks], "sums": fresh.sums, "written": fresh.written}
        underflowed = {"underflowed": fresh.underflowed} if fresh.underflowed else {}
        self.journal.append({**line, "losses": _losses_json(fresh.losses), **underflowed})

    def done(self, task: Task, outcome: Outcome) -> None:
        """Notes a finished task."""
        with self._lock:
            self._fresh.add(outcome)
            add_losses(self.losses, outcome.losses)
            self.stats.bytes_written += task.nbytes
            self.stats.underflowed += outcome.underflowed
        self.sharing.report(Moved(task.nbytes))
        self._count_files(task.files)

    def _count_files(self, numbers: Iterable[int]) -> None:
        """Notes that something that remained to be done for these files is done."""
        with self._lock:
            for number in numbers:
                self._remaining[number] -= 1
            complete = [number for number in numbers if not self._remaining[number]]
            self.sharing.files_done += complete
        for number in complete:
            self.sharing.report(FileDone(self.job.files[number].name, self.job.files[number].size))

    def _complete_sums(self) -> None:
        with contextlib.closing(Gatherer(self.sources)) as gatherer:
            self.sources.complete(gatherer)
        self._count_reading()

    def _count_reading(self) -> None:
        self.stats.bytes_read += self.sources.bytes_read
        self.stats.records_checked += self.sources.records_checked
