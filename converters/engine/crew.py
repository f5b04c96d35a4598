"""Work that reads and writes nothing but an answer, shared by the threads of a process and by the ranks of a job.

Tasks are numbered and have a size. Every rank makes the same list, does its share, and rank 0 gets all results:

    with Crew("verify", fingerprint, threads=4, ranks=ranks, listener=listener, stop=stop) as crew:
        results = crew.map(tasks, make_worker)           # on rank 0: task number -> what the worker returned
        if crew.leads:
            good = judge(results)
        good = crew.agree(good)                          # on every rank: what rank 0 says

There is no destination beside which the ranks could meet: they do so in a scratch folder, which is removed at the end.
Results travel as JSON, so workers return plain data.
"""

from __future__ import annotations

import hashlib
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

from converters.engine.pool import Pool
from converters.engine.ranks import Ranks, on_one_machine
from converters.engine.team import Team

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from converters.events import Event, Listener, StopFlag

__all__ = ["Crew", "Work", "Worker", "scratch_folder"]

A = TypeVar("A")
T = TypeVar("T", bound="Work")
T_contra = TypeVar("T_contra", contravariant=True)


class Work(Protocol):
    """A task."""

    @property
    def number(self) -> int:
        """Its place in the list."""

    @property
    def nbytes(self) -> int:
        """About how many bytes it reads; what is shared out evenly."""


class Worker(Protocol[T_contra]):
    """What one thread does tasks with: its buffers and open files."""

    def do(self, task: T_contra) -> Any:
        """Does a task; the result is plain data."""

    def close(self) -> None:
        """Closes what is open."""


def scratch_folder(asked: str | None, env: Mapping[str, str] | None = None) -> Path:
    """Where ranks meet: what was asked for; for a job on one machine its temporary folder, else the working directory.

    Args:
        asked: A folder that all machines of the job share, or None.
        env: The environment.
    """
    if asked:
        return Path(asked).expanduser().absolute()
    return Path(tempfile.gettempdir()) if on_one_machine(env) else Path.cwd()


class Crew:
    """The threads and ranks that do a list of tasks. A context manager around all of it.

    Args:
        command: The verb; names the scratch folder.
        fingerprint: Digest of what the list was made from; the same on all ranks.
        threads: Workers in this process.
        ranks: This process among those that were started together; by default it is alone.
        scratch: Where ranks meet.
        destination: What is going to be written, where they meet beside that: whoever writes it tidies up after a kill.
        listener: Told about progress of all ranks, on rank 0.
        stop: Polled by whoever asks `should_stop`.

    Attributes:
        leads: Whether this is the rank that gets the results.
        left: What `leave` of `map` returned, on rank 0 that of all ranks.
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
        ranks = ranks or Ranks()
        self.leads = ranks.rank == 0
        self.left: list[Any] = []
        self._listener: Listener = listener if listener is not None and self.leads else _ignore
        self._lock = threading.Lock()
        self._done = 0
        self._team: Team | None = None
        if ranks.world > 1:
            # the folder's name is this job's; what it is about need not be known before the ranks have met
            name = hashlib.sha256(f"{command} {ranks.launch}".encode()).hexdigest()[:12]
            place = destination or (scratch or scratch_folder(None)) / f"{command}-{name}"
            ranks = replace(ranks, launch=f"{command} {ranks.launch}")  # its own folder, also beside a destination
            self._team = Team(ranks, place, fingerprint, self._listener, stop)
            self._team.progress = self._progress
        self._pool = Pool(threads, stop, self._team, ("there is no answer: not everything was looked at", None))

    def __enter__(self) -> Self:
        if self._team is not None:
            self._team.__enter__()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if self._team is not None:
            self._team.__exit__(kind, error, trace)

    def map(
        self, tasks: Sequence[T], make_worker: Callable[[], Worker[T]], leave: Callable[[], Any] | None = None
    ) -> dict[int, Any]:
        """Does all tasks, on this rank those that are its share.

        Args:
            tasks: In the order of their numbers, which count from 0; the same on every rank.
            make_worker: Makes what a thread does tasks with.
            leave: Called on every rank when its share is done; what it returns is in `left` of rank 0.

        Returns:
            Results by the numbers of the tasks: all of them on rank 0, those of this rank elsewhere.

        Raises:
            Interrupted: Asked to stop, or another rank is lost.
            DistckptError: What a worker raised, here or on another rank.
        """
        team, share = self._team, list(tasks)
        if team is not None and team.leads:
            team.assemble()
            share = list(next(iter(team.deal(share))))  # type: ignore[arg-type]
        elif team is not None:
            team.await_share()
            share = [task for first, end in team.share for task in tasks[first:end]]
        results: dict[int, Any] = {}

        def do(worker: Worker[T], task: T) -> None:
            results[task.number] = worker.do(task)

        self._pool.work_off(share, make_worker, do)
        self._pool.check()
        self.left = [leave()] if leave is not None else []
        if team is not None and not team.leads:
            team.hand_over({"results": {str(number): result for number, result in results.items()}, "left": self.left})
        elif team is not None:
            for left in team.collect():
                results |= {int(number): result for number, result in left["results"].items()}
                self.left += left["left"]
        return results

    def agree(self, answer: A) -> A:
        """Rank 0's answer, on every rank; plain data. The others wait for it here."""
        if self._team is None:
            return answer
        if self._team.leads:
            self._team.say(answer=answer)
            return answer
        self._team.await_end()
        heard: A = self._team.heard("answer")
        return heard

    def moved(self, event: Event, nbytes: int) -> None:
        """Notes what a worker has done, and tells whoever watches."""
        with self._lock:
            self._done += nbytes
        self._listener(event)

    def should_stop(self) -> bool:
        """Whether workers should leave their task as it is."""
        return self._pool.should_stop()

    def check(self) -> None:
        """Raises if workers should leave their task as it is.

        Raises:
            Interrupted: The reason, or that there is one.
        """
        if self.should_stop():
            raise self._pool.interrupted()

    def _progress(self) -> dict[str, Any]:
        with self._lock:
            return {"bytes": self._done, "moved": self._done}


def _ignore(event: object) -> None:
    pass
