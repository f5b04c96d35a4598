"""Threads that share a list of tasks: each takes the next one when it has finished the last."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from converters.errors import Interrupted
from converters.execute.ranks import Numbered

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from converters.events import StopFlag
    from converters.execute.rank_sync import Team

_POLL_SECONDS = 0.05

T = TypeVar("T", bound=Numbered)
T_contra = TypeVar("T_contra", contravariant=True)


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


class Pool:
    """The threads of a process, and what makes them stop.

    Args:
        threads: At most so many.
        stop: Set when they shall stop.
        team: The ranks that do the work together, if there are several; trouble of one stops all.
        unfinished: What to say when they were stopped: a sentence and a hint.
    """

    def __init__(
        self, threads: int, stop: StopFlag | None, team: Team | None, unfinished: tuple[str, str | None]
    ) -> None:
        self._threads, self._stop, self._team, self._unfinished = threads, stop, team, unfinished
        self._lock = threading.Lock()
        self._failure: BaseException | None = None

    def should_stop(self) -> bool:
        """Whether to leave what is not done yet."""
        if self._failure is not None or (self._stop is not None and self._stop.is_set()):
            return True
        return self._team is not None and self._team.should_stop()

    def check(self) -> None:
        """Raises what has stopped the work: trouble of another rank, a failure in a thread, or a signal."""
        if self._team is not None:
            self._team.check()
        if self._failure is not None:
            raise self._failure
        if self._stop is not None and self._stop.is_set():
            raise self.interrupted()

    def interrupted(self) -> Interrupted:
        """What to raise in a task that is left."""
        text, hint = self._unfinished
        return Interrupted((self._stop and self._stop.signum) or 2, text, hint=hint)

    def work_off(
        self,
        tasks: Sequence[T],
        make_worker: Callable[[], Worker[T]],
        meanwhile: Callable[[], None] = lambda: None,
    ) -> dict[int, Any]:
        """Does tasks until all are done or `should_stop`; `check` says which.

        Args:
            tasks: In the order in which they are begun.
            make_worker: Makes what one thread does tasks with.
            meanwhile: Called by this thread all the time; what it raises ends the work, and is raised here.

        Returns:
            What the workers returned that is not None, by the numbers of the tasks.
        """
        queue, results = iter(tasks), dict[int, Any]()
        threads = [
            threading.Thread(target=self._work, args=(queue, make_worker, results), name=f"distckpt-{n}", daemon=True)
            for n in range(min(self._threads, max(1, len(tasks))))
        ]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                while thread.is_alive():
                    thread.join(_POLL_SECONDS)
                    meanwhile()
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            for thread in threads:
                thread.join()
        return results

    def _work(self, queue: Iterator[T], make_worker: Callable[[], Worker[T]], results: dict[int, Any]) -> None:
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
        except BaseException as error:  # noqa: BLE001 - handed to the caller's thread, which raises it
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Keeps the first failure; the others follow from it."""
        with self._lock:
            if self._failure is None:
                self._failure = error
