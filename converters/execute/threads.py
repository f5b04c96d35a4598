"""Threads that share a list of tasks: each takes the next one when it has finished the last."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol, TypeVar

from converters.errors import Interrupted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from converters.events import StopFlag
    from converters.execute.rank_sync import Team

_POLL_SECONDS = 0.05


class _Closable(Protocol):
    def close(self) -> None: ...


W = TypeVar("W", bound=_Closable)
T = TypeVar("T")


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
        make_worker: Callable[[], W],
        do: Callable[[W, T], None],
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """Does tasks until all are done or `should_stop`; `check` says which.

        Args:
            tasks: In the order in which they are begun.
            make_worker: Makes what one thread does tasks with.
            do: Does one.
            meanwhile: Called by this thread all the time; what it raises ends the work, and is raised here.
        """
        queue = iter(tasks)
        threads = [
            threading.Thread(target=self._work, args=(queue, make_worker, do), name=f"distckpt-{n}", daemon=True)
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

    def _work(self, queue: Iterator[T], make_worker: Callable[[], W], do: Callable[[W, T], None]) -> None:
        try:
            worker = make_worker()
            try:
                while not self.should_stop():
                    with self._lock:
                        task = next(queue, None)
                    if task is None:
                        return
                    do(worker, task)
            finally:
                worker.close()
        except BaseException as error:  # noqa: BLE001 - handed to the caller's thread, which raises it
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Keeps the first failure; the others follow from it."""
        with self._lock:
            if self._failure is None:
                self._failure = error
