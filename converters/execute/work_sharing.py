"""Work that is shared by the threads of a process and by the ranks of a job: one owner of both, for every command.

Tasks are numbered and have a size. Every rank makes the same list, does its share, and rank 0 gets all results:

    with WorkSharing("verify", fingerprint, threads=4, ranks=ranks, listener=listener, stop=stop) as sharing:
        results = sharing.map(tasks, make_worker)        # on rank 0: task number -> what the worker returned
        numbers = sharing.gather(number)                 # on rank 0: what each rank gives
        is_good = sharing.finish(sharing.leads and judge(results, numbers))     # on every rank: what rank 0 says

A command that writes proves with one `map` and writes with a second: its ranks meet once, beside the destination. One
that only reads has them meet in a scratch folder. Results travel as JSON, so workers return plain data.
"""

from __future__ import annotations

import hashlib
import tempfile
import threading
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypedDict, TypeVar

from converters.events import Moved, ignore
from converters.execute.destination import beside
from converters.execute.rank_sync import RankSync
from converters.execute.ranks import NumberedTask, Ranks, on_one_machine, shares, spans
from converters.remote.address import named_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from converters.events import Event, Listener, StopFlag

_POLL_SECONDS = 0.05

T = TypeVar("T", bound=NumberedTask)
T_contra = TypeVar("T_contra", contravariant=True)


def scratch_folder(folder: str | None, env: Mapping[str, str] | None = None) -> Path:
    """Where ranks meet: what was asked for; for a job on one machine its temporary folder, else the working directory.

    Args:
        folder: A folder that all machines of the job share, or None.
        env: The environment.
    """
    if folder:
        return named_path(folder).absolute()
    return Path(tempfile.gettempdir()) if on_one_machine(env) else Path.cwd()


class SharingOptions(TypedDict, total=False):
    """Arguments of `WorkSharing` that a command passes on: who is told, who may stop it, and who shares the work."""

    listener: Listener | None
    stop: StopFlag | None
    ranks: Ranks | None
    scratch: Path | None


class Worker(Protocol[T_contra]):
    """What one thread does tasks with: its buffers and open files."""

    def do(self, task: T_contra) -> Any:
        """Does a task; the result is plain data, None if there is nothing to tell of it."""

    def close(self) -> None:
        """Closes what is open."""


@dataclass(frozen=True)
class FunctionWorker:
    """A worker that is a function, and what closes what that has open.

    Attributes:
        do: See `Worker`.
        close: See `Worker`.
    """

    do: Callable[[Any], Any]
    close: Callable[[], None] = lambda: None


class WorkSharing(RankSync):
    """The threads and ranks that do lists of tasks together. A context manager around all of it.

    Args:
        command: The verb; names the scratch folder.
        fingerprint: Digest of what the list was made from; the same on all ranks.
        threads: Workers in this process.
        ranks: This process among those that were started together; by default it is alone.
        scratch: Where ranks meet.
        destination: What is going to be written; the ranks meet beside it, and its writer tidies up after a kill.
        listener: Told about progress of all ranks, on rank 0.
        stop: Polled by `should_stop`.

    Attributes:
        files_done: Numbers of output files that this rank has finished its share of, for rank 0.
        on_files: Called on rank 0 with the numbers of output files that another rank has finished its share of.
    """

    def __init__(
        self,
        command: str,
        fingerprint: str,
        *,
        threads: int = 2,
        ranks: Ranks | None = None,
        scratch: Path | None = None,
        destination: Path | None = None,
        listener: Listener | None = None,
        stop: StopFlag | None = None,
    ) -> None:
        ranks, folder = ranks or Ranks(), None
        if ranks.world > 1:
            # the folder's name is this job's; what it is about need not be known before the ranks have met
            name = hashlib.sha256(f"{command} {ranks.launch}".encode()).hexdigest()[:12]
            meeting = destination or (scratch or scratch_folder(None)) / f"{command}-{name}"
            folder = beside(meeting, f"ranks-{zlib.crc32(ranks.launch.encode()):08x}")
        super().__init__(ranks, folder, fingerprint, listener, stop)
        if destination is None:
            self._unfinished = "there is no answer: not everything was looked at", None
        self.files_done: list[int] = []
        self.on_files: Callable[[Sequence[int]], None] = ignore
        self._thread_count, self._bytes_done = threads, 0
        self._lock = threading.Lock()
        self._thread_failure: BaseException | None = None

    # ------------------------------------------------------------------ tasks

    def map(
        self,
        tasks: Sequence[T],
        make_worker: Callable[[], Worker[T]],
        *,
        todo: Sequence[T] | None = None,
        on_shares: Callable[[Sequence[Sequence[T]]], None] = ignore,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> dict[int, Any]:
        """Does all tasks, on this rank those that are its share.

        Args:
            tasks: In the order of their numbers, which count from 0; the same on every rank.
            make_worker: Makes what a thread does tasks with.
            todo: Those of them that are not done yet, where rank 0 knows that some are.
            on_shares: Called before the work begins with the shares of all ranks on rank 0, elsewhere with the own one.
            meanwhile: Called all the time, by the thread that called this; what it raises ends the work.

        Returns:
            Results by the numbers of the tasks: all of them on rank 0, those of this rank elsewhere.

        Raises:
            Interrupted: Asked to stop, or another rank is lost.
            DistckptError: What a worker raised, here or on another rank.
        """
        parts = shares(tasks if todo is None else todo, self.ranks.world) if self.leads else []
        dealt = self.broadcast([spans(task.number for task in part) for part in parts])
        if not self.leads:
            parts = [[task for first, end in dealt[self.ranks.rank] for task in tasks[first:end]]]
        on_shares(parts)
        self.publish_state("working")
        results = self._run_threads(parts[0], make_worker, meanwhile)
        self.raise_failure()
        for rank_results in self.gather({str(number): result for number, result in results.items()})[1:]:
            results |= {int(number): result for number, result in rank_results.items()}
        return results

    def _run_threads(
        self, tasks: Sequence[T], make_worker: Callable[[], Worker[T]], meanwhile: Callable[[], None]
    ) -> dict[int, Any]:
        """Does tasks until all are done or `should_stop`: what the workers returned that is not None, by task number."""
        queue, results = iter(tasks), dict[int, Any]()
        threads = [
            threading.Thread(target=self._work, args=(queue, make_worker, results), name=f"distckpt-{n}", daemon=True)
            for n in range(min(self._thread_count, max(1, len(tasks))))
        ]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                while thread.is_alive():
                    thread.join(_POLL_SECONDS)
                    meanwhile()
        except BaseException as error:
            self._thread_failure = error  # so that all threads end
            raise
        finally:
            for thread in threads:
                thread.join()
        return results

    def _work(self, queue: Iterator[T], make_worker: Callable[[], Worker[T]], results: dict[int, Any]) -> None:
        """What each thread does: takes the next task when it has finished the last."""
        try:
            worker = make_worker()
            try:
                while not self.should_stop():
                    with self._lock:
                        task = next(queue, None)
                    if task is None:
                        return
                    if (result := worker.do(task)) is not None:
                        results[task.number] = result
            finally:
                worker.close()
        except BaseException as error:  # noqa: BLE001 - `raise_failure` raises it in the caller's thread
            if not self.should_stop():  # else it follows from what has stopped the work
                self._thread_failure = error

    # ------------------------------------------------------------------ stopping

    def should_stop(self) -> bool:
        """Whether workers should leave their task as it is."""
        return self._thread_failure is not None or super().should_stop()

    def check(self) -> None:
        """For workers: raises if they should leave their task as it is.

        Raises:
            Interrupted: They should; `raise_failure` says why in the caller's thread.
        """
        if self.should_stop():
            raise self.interrupted()

    def raise_failure(self) -> None:
        """Raises what has stopped the work: a failure in a thread or of another rank, or a signal."""
        if self._thread_failure is not None:
            raise self._thread_failure
        super().raise_failure()

    # ------------------------------------------------------------------ progress

    def report(self, event: Event) -> None:
        """Tells the listener what a worker has done, and rank 0 how many bytes that are."""
        if isinstance(event, Moved):
            with self._lock:
                self._bytes_done += event.nbytes
        self.listener(event)

    def progress(self) -> dict[str, Any]:
        """See `RankSync`."""
        return {"bytes": self._bytes_done, "files": self.files_done.copy()}

    def take_progress(self, before: dict[str, Any], status: dict[str, Any]) -> None:
        """See `RankSync`."""
        if nbytes := status.get("bytes", 0) - before.get("bytes", 0):
            self.listener(Moved(nbytes))
        if files := status.get("files", [])[len(before.get("files", [])) :]:
            self.on_files(files)
