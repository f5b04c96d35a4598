"""Work that is shared by the threads of a process and by the ranks of a job: the one owner of both, for every command.

Tasks are numbered and have a size. Every rank makes the same list, does its share, and rank 0 gets all results:

    with Crew("verify", fingerprint, threads=4, ranks=ranks, listener=listener, stop=stop) as crew:
        results = crew.map(tasks, make_worker)           # on rank 0: task number -> what the worker returned
        if crew.leads:
            good = judge(results)
        good = crew.agree(good)                          # on every rank: what rank 0 says

A command that writes proves with one `map` and writes with a second: its ranks meet once, beside the destination. One
that only reads has them meet in a scratch folder. Results travel as JSON, so workers return plain data.
"""

from __future__ import annotations

import hashlib
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypedDict, TypeVar

from converters.events import ignore
from converters.execute.rank_sync import Team
from converters.execute.ranks import Numbered, Ranks, on_one_machine
from converters.execute.threads import Pool, Worker
from converters.remote.address import named_path

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from converters.events import Event, Listener, StopFlag

_KEPT = ("finished work is kept", "run the same command again")

A = TypeVar("A")
T = TypeVar("T", bound=Numbered)


def scratch_folder(folder: str | None, env: Mapping[str, str] | None = None) -> Path:
    """Where ranks meet: what was asked for; for a job on one machine its temporary folder, else the working directory.

    Args:
        folder: A folder that all machines of the job share, or None.
        env: The environment.
    """
    if folder:
        return named_path(folder).absolute()
    return Path(tempfile.gettempdir()) if on_one_machine(env) else Path.cwd()


class Sharing(TypedDict, total=False):
    """Arguments of `Crew` that a command passes on: who is told, who may stop it, and who shares the work."""

    listener: Listener | None
    stop: StopFlag | None
    ranks: Ranks | None
    scratch: Path | None


class Crew:
    """The threads and ranks that do a list of tasks. A context manager around all of it.

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
        ranks: This process among those that do it together.
        leads: Whether this is the rank that gets the results.
        listener: Told about progress; on other ranks nobody is.
        handed_over: What `hand_over` of the last `map` returned, on rank 0 that of all ranks, its own first.
        folder: Where the ranks meet; None for one alone.
        progress: What this rank says about its work beside what `moved` is told, as plain data: `bytes` that are done, bytes
            `moved` at all, numbers of the `files` completed.
        on_files: Called on rank 0 with output files that another rank has finished its share of.
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
        self.ranks = ranks = ranks or Ranks()
        self.leads = ranks.rank == 0
        self.folder: Path | None = None
        self.progress: Callable[[], dict[str, Any]] = dict
        self.on_files: Callable[[Sequence[int]], None] = ignore
        self.handed_over: list[Any] = []
        self.listener: Listener = listener if listener is not None and self.leads else ignore
        self._lock = threading.Lock()
        self._done, self._dealt = 0, False
        self._team: Team | None = None
        if ranks.world > 1:
            # the folder's name is this job's; what it is about need not be known before the ranks have met
            name = hashlib.sha256(f"{command} {ranks.launch}".encode()).hexdigest()[:12]
            meeting = destination or (scratch or scratch_folder(None)) / f"{command}-{name}"
            self._team = Team(ranks, meeting, fingerprint, self.listener, stop)
            self.folder = self._team.folder
            self._team.progress = self._all_progress
            self._team.on_files = self._take_files
        unfinished = ("there is no answer: not everything was looked at", None) if destination is None else _KEPT
        self._pool = Pool(threads, stop, self._team, unfinished)

    def __enter__(self) -> Self:
        if self._team is not None:
            self._team.__enter__()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if self._team is not None:
            self._team.__exit__(kind, error, trace)

    def assemble(self) -> None:
        """Rank 0: waits until all are here and plan the same; `map` does that, too."""
        if self._team is not None and self.leads:
            self._team.assemble()

    def await_share(self) -> None:
        """Others: waits until rank 0 has dealt out the work of the next `map`, and has prepared what that needs."""
        if self._team is not None and not self.leads and not self._dealt:
            self._team.await_share()
            self._dealt = True

    def end(self, error: BaseException) -> None:
        """Has all other ranks stop before this one goes on: see `Team.end`."""
        if self._team is not None:
            self._team.end(error)

    def map(
        self,
        tasks: Sequence[T],
        make_worker: Callable[[], Worker[T]],
        hand_over: Callable[[], Any] | None = None,
        *,
        todo: Sequence[T] | None = None,
        on_shares: Callable[[Sequence[Sequence[T]]], None] | None = None,
        meanwhile: Callable[[], None] = lambda: None,
        settle: Callable[[], None] = lambda: None,
        last: bool = True,
    ) -> dict[int, Any]:
        """Does all tasks, on this rank those that are its share.

        Args:
            tasks: In the order of their numbers, which count from 0; the same on every rank.
            make_worker: Makes what a thread does tasks with.
            hand_over: Called on every rank when its share is done; what it returns is in `handed_over` of rank 0.
            todo: Those of them that are not done yet, where rank 0 knows that some are.
            on_shares: Called before the work begins with the shares of all ranks on rank 0, elsewhere with the own one.
            meanwhile: Called all the time, by the thread that called this.
            settle: Called by it when the threads have ended, also where one has failed or all were stopped.
            last: There is no other `map` behind this one.

        Returns:
            Results by the numbers of the tasks: all of them on rank 0, those of this rank elsewhere.

        Raises:
            Interrupted: Asked to stop, or another rank is lost.
            DistckptError: What a worker raised, here or on another rank.
        """
        team = self._team
        shares: Sequence[Sequence[T]] = [tasks if todo is None else todo]
        if team is not None and team.leads:
            team.assemble()
            shares = team.deal(shares[0])
        elif team is not None:
            self.await_share()
            self._dealt = False
            shares = [[task for first, end in team.share for task in tasks[first:end]]]
        if on_shares is not None:
            on_shares(shares)
        results = self._pool.work_off(shares[0], make_worker, meanwhile)
        settle()
        self._pool.check()
        self.handed_over = [] if hand_over is None else [hand_over()]
        if team is not None and not team.leads:
            by_text = {str(number): result for number, result in results.items()}
            team.hand_over({"results": by_text, "handed_over": self.handed_over}, last=last)
        elif team is not None:
            for outcome in team.collect():
                results |= {int(number): result for number, result in outcome["results"].items()}
                self.handed_over += outcome["handed_over"]
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
        """Notes what a worker has done, and tells the listener."""
        with self._lock:
            self._done += nbytes
        self.listener(event)

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

    def _take_files(self, files: Sequence[int]) -> None:
        self.on_files(files)

    def _all_progress(self) -> dict[str, Any]:
        more = self.progress()
        return more | {name: self._done + more.get(name, 0) for name in ("bytes", "moved")}
