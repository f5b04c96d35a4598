"""Synchronizes the ranks of a run through small files in a shared folder; no network, no collectives of a library.

    parent/
        .NAME.distckpt-partial/         the result, and every rank's journal
        .NAME.distckpt-ranks-0f3a/      gone when the run is over; the number tells launches apart
            rank-R              status of rank R: who it is, how far it is, how it ended; written anew every second
            lock-R              locked by rank R while it lives
            document-3-R        what rank R has published in the third step: a value for all, or one for rank 0

    rank 0    status ... all are here, plans agree ... broadcast ... own work ... gather .............. over
    rank R    status ................................. broadcast ... own work ... gather ... finish ... gone

All ranks call `broadcast` and `gather` in the same order, so that a step has the same number on all of them.

Files of an earlier run are recognised: every process draws a random number (nonce), rank 0 repeats the numbers it has read,
and a rank believes rank 0 only if its own number is among them. Whoever misses that later on stops: another run has taken
over.
"""

from __future__ import annotations

import contextlib
import secrets
import signal
import socket
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from converters.errors import DestinationError, DistckptError, Interrupted, RequestError
from converters.events import Note, ignore
from converters.execute.disk import remove_folder
from converters.execute.error_json import AGAIN, Stopped, pack_error, unpack_error
from converters.execute.rank_folder import NotRead, RankFolder, is_locked, machine_id
from converters.execute.ranks import listed, on_one_machine

if TYPE_CHECKING:
    from collections.abc import Callable

    from converters.events import Listener, StopFlag
    from converters.execute.ranks import Ranks

T = TypeVar("T")

_INTERVAL = 1.0
_GRACE = 10.0  # seconds that rank 0 waits at the end for the others to go, and they for it; torchrun kills after 30
_ARRIVAL = 5  # times the timeout: ranks plan at different speeds
_STANDSTILL = 10  # times the timeout: alive, but nothing moves; a sync of a gigabyte may take its time


@dataclass
class _Peer:
    """Another rank.

    Attributes:
        status: The last status that was read of it.
        changed_at: When that was new, by our clock.
        moved_at: When it had last moved bytes.
    """

    status: dict[str, Any] = field(default_factory=dict)
    changed_at: float = 0.0
    moved_at: float = 0.0


class RankSync:
    """The ranks of one run, as one of them sees them. A context manager around everything that they do together.

    One process alone is a run of one rank: it needs no folder, and waits for nobody.

    Args:
        ranks: This process among them.
        folder: Where they meet, on a file system that all of them share; None for one process alone.
        fingerprint: Digest of this rank's job; the same on all ranks.
        listener: Told about waiting (rank 0).
        stop: Polled while waiting.
        unfinished: What to say when the work was stopped: a sentence and a hint.

    Attributes:
        leads: Whether this is rank 0, which deals out the work and gets the results.
        failure: Why all have to stop, once another rank has failed or is lost.
    """

    def __init__(
        self,
        ranks: Ranks,
        folder: Path | None,
        fingerprint: str,
        listener: Listener | None = None,
        stop: StopFlag | None = None,
        unfinished: tuple[str, str | None] = ("finished work is kept", "run the same command again"),
    ) -> None:
        self.ranks, self.folder, self.leads = ranks, folder, ranks.rank == 0
        self.failure: DistckptError | None = None
        self.listener: Listener = listener if listener is not None and self.leads else ignore
        self._fingerprint, self._stop, self._unfinished = fingerprint, stop, unfinished
        self._is_alone = folder is None
        self._files = RankFolder(folder or Path(), ranks.rank)
        self._peers = {r: _Peer() for r in (range(1, ranks.world) if self.leads else (0,))}
        self._interval = min(_INTERVAL, ranks.timeout / 10)
        self._read_at = time.monotonic()
        self._reading, self._publishing = threading.Lock(), threading.Lock()
        self._status: dict[str, Any] = {}
        self._step = 0  # how often ranks have called `broadcast` and `gather`
        self._has_ended = self._missed_others = self._assembled = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run_heartbeat, name="distckpt-ranks", daemon=True)

    # ------------------------------------------------------------------ coming and going

    def __enter__(self) -> Self:
        if self._is_alone:
            return self
        try:
            locked = self._files.arrive(self.ranks.timeout)
            self._status = {
                "nonce": secrets.token_hex(8),
                "fingerprint": self._fingerprint,
                "host": socket.gethostname(),
                "machine": machine_id(),
                "locked": locked,
                "beat": 0,
                "step": 0,
                "state": "here",
                "error": None,
            }
            self.publish_status()
        except DestinationError as error:
            self._files.close()
            error.shown_here = True  # no other rank will read of it
            raise
        self._thread.start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if self._is_alone:
            return
        try:
            self.end(error)
        finally:
            self._closing.set()
            self._thread.join()
            self._files.close()

    def end(self, error: BaseException | None) -> None:
        """Publishes how this rank ended; rank 0 waits until the others have stopped. Does nothing the second time.

        Sets `shown_here` of the error: whether this process is the one to show it.
        """
        if self._is_alone or self._has_ended:
            return
        self._has_ended = True
        if self.leads:
            self._publish_last_status(state="over" if error is None else "failed", error=pack_error(error))
            # who is still planning shall read it, too, unless all were told to stop, or have been waited for already
            all_came = self._missed_others or self._is_stopped()
            self._wait_briefly(_GRACE, lambda: all(self._is_gone(r, p, all_came) for r, p in self._peers.items()))
            self._closing.set()
            self._thread.join()
            remove_folder(self._files.folder)
            return
        if error is not None:
            self._publish_last_status(state="failed", error=pack_error(error))
            if not self._missed_others:
                # to a rank 0 that comes later, the status of a process that has ended would be of an earlier run
                with contextlib.suppress(DestinationError):  # the folder is gone, and with it rank 0
                    self._wait_briefly(_GRACE, self._is_known_to_leader)
            leader = self._peers[0].status
            is_lost = self._missed_others or (error is self.failure and not leader.get("error"))
            # what rank 0 knows, rank 0 shows; if it is lost, one of the others has to
            shown: Any = error  # also one that is not ours
            shown.shown_here = self.ranks.rank == 1 if is_lost else (False if leader else None)
            if error is not self.failure and leader:
                # let rank 0 learn of it before a launcher sees this process end and stops all
                self._wait_briefly(3.0, lambda: bool(self.failure or self._peers[0].status.get("state") == "over"))
        self._publish_last_status(state="gone")

    def _publish_last_status(self, **changes: Any) -> None:
        """Publishes a status, for which there will be no other heartbeat if a disk is in passing trouble."""
        for wait in (self._interval, self._interval, 0.0):
            with contextlib.suppress(DestinationError):
                self.publish_status(**changes)
                return
            time.sleep(wait)

    def _wait_briefly(self, seconds: float, ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + seconds
        while not ready() and time.monotonic() < deadline:
            time.sleep(0.05)
            self.read_statuses()

    def _is_known_to_leader(self) -> bool:
        """Whether rank 0 has read this rank's status; publishes again what rank 0 took for something old when it came."""
        is_known = bool(self._peers[0].status)
        if not is_known and isinstance(self._files.read(f"rank-{self.ranks.rank}"), NotRead):
            self.publish_status()
        return is_known

    def _is_gone(self, rank: int, peer: _Peer, all_came: bool) -> bool:
        """Whether nothing more will come of a rank: it is gone, silent, or has ended; or not here when all have come."""
        if not peer.status:
            return all_came
        is_silent = time.monotonic() - peer.changed_at > self.ranks.timeout
        return is_silent or peer.status["state"] == "gone" or self._process_ended(rank, peer)

    # ------------------------------------------------------------------ statuses

    def _run_heartbeat(self) -> None:
        while not self._closing.wait(self._interval):
            with contextlib.suppress(DestinationError):  # if it is no passing trouble, this rank falls silent
                self.read_statuses()
                if self.leads or not self._has_ended:
                    self.publish_status()

    def progress(self) -> dict[str, Any]:
        """What this rank publishes about its work: `bytes` that are done. More by a subclass."""
        return {}

    def take_progress(self, before: dict[str, Any], status: dict[str, Any]) -> None:
        """Rank 0: called with the last and the new status of another rank, for a subclass."""

    def publish_status(self, **changes: Any) -> None:
        """Writes this rank's status anew."""
        if self._is_alone:
            return
        with self._publishing:
            self._status |= {**self.progress(), **changes, "beat": self._status["beat"] + 1}
            if self.leads:
                self._status["nonces"] = {str(rank): peer.status.get("nonce") for rank, peer in self._peers.items()}
            self._files.write(f"rank-{self.ranks.rank}", self._status)

    def read_statuses(self) -> None:
        """Reads the statuses of the others and concludes whether all have to stop."""
        if self._is_alone:
            return
        with self._reading:
            now = time.monotonic()
            asleep = now - self._read_at - 5 * self._interval  # we were suspended; that time says nothing of others
            self._read_at = now
            for rank, peer in self._peers.items():
                if asleep > 0:
                    peer.changed_at, peer.moved_at = peer.changed_at + asleep, peer.moved_at + asleep
                failure = self._read_status(rank, peer, now) or self._failure_of(rank, peer, now)
                # that a launcher stops some follows from something; the cause may be seen a little later
                if self.failure is None or (failure is not None and isinstance(self.failure, Stopped)):
                    self.failure = failure

    def _read_status(self, rank: int, peer: _Peer, now: float) -> DistckptError | None:
        """Reads another rank's status; a failure if it is another process than before."""
        status, nonce = self._files.read(f"rank-{rank}"), peer.status.get("nonce")
        over = Interrupted(signal.SIGTERM, "the run ended or restarted without this process", hint=AGAIN)
        if status is NotRead.NOT_NOW or status == peer.status:
            return None  # silence; `_failure_of` sees to it
        if status is NotRead.NO_FILE:  # rank 0 removes files, so to it that is silence, too
            return None if self.leads or nonce is None else over
        is_believed = self.leads or status.get("nonces", {}).get(str(self.ranks.rank)) == self._status["nonce"]
        if nonce is not None and (not is_believed or status["nonce"] != nonce):
            return over
        if not is_believed:
            return None
        before = peer.status
        if status.get("bytes") != before.get("bytes") or status["state"] != before.get("state"):
            peer.moved_at = now
        peer.status, peer.changed_at = status, now
        if self.leads:
            self.take_progress(before, status)
        return None

    def _failure_of(self, rank: int, peer: _Peer, now: float) -> DistckptError | None:
        """Why all have to stop, from what is known of another rank."""
        status, limit = peer.status, self.ranks.timeout
        if not status:
            return None
        who = f"rank {rank} on {status['host']}"
        if status["error"] is not None:
            return unpack_error(status["error"], who if self.leads else None)
        if self.leads and status["fingerprint"] != self._fingerprint:
            return RequestError(
                f"{who} made another plan: do all ranks see the same files?",
                details=[
                    f"fingerprints {self._fingerprint[:16]} on rank {self.ranks.rank}, {status['fingerprint'][:16]}"
                ],
                hint="look for a stale mount or another version of distckpt there",
            )
        if status["state"] in ("done", "gone", "over"):
            return None
        if self._process_ended(rank, peer):
            return Interrupted(signal.SIGTERM, f"{who} ended without an error message: was it killed?", hint=AGAIN)
        if now - peer.changed_at > limit:
            return Interrupted(signal.SIGTERM, f"{who} has not responded for {limit:g} s", hint=AGAIN)
        if status["state"] == "working" and now - peer.moved_at > _STANDSTILL * limit:
            return Interrupted(signal.SIGTERM, f"{who} has made no progress for {_STANDSTILL * limit:g} s", hint=AGAIN)
        return None

    def _process_ended(self, rank: int, peer: _Peer) -> bool:
        """Whether its process has certainly ended; nothing can be said of other machines."""
        same_machine = peer.status["machine"] == self._status["machine"] and peer.status["locked"]
        return same_machine and not is_locked(self._files.folder / f"lock-{rank}")

    # ------------------------------------------------------------------ stopping

    def _is_stopped(self) -> bool:
        return self._stop is not None and self._stop.is_set()

    def should_stop(self) -> bool:
        """Whether to leave what is not done yet."""
        if time.monotonic() - self._read_at > 5 * self._interval:
            self.read_statuses()  # we were suspended: perhaps the run went on, or ended, without us
        return self.failure is not None or self._is_stopped()

    def interrupted(self) -> Interrupted:
        """What to raise in work that is left unfinished."""
        text, hint = self._unfinished
        return Interrupted((self._stop and self._stop.signum) or 2, text, hint=hint)

    def raise_failure(self) -> None:
        """Raises what stops this rank: a failure elsewhere, or a signal of its own."""
        is_stopped = self._is_stopped()
        if is_stopped:
            self.read_statuses()  # a launcher stops everyone when one fails: say which one, if that can be known
        if self.failure is not None and not (is_stopped and isinstance(self.failure, Stopped)):
            raise self.failure
        if is_stopped:
            raise self.interrupted()

    # ------------------------------------------------------------------ the steps of a run

    def _wait_for(self, ready: Callable[[], bool]) -> None:
        begin = time.monotonic()
        self.read_statuses()
        while not ready():
            self.raise_failure()
            time.sleep(min(0.2, 0.01 + (time.monotonic() - begin) / 20))
            self.read_statuses()
        self.raise_failure()

    def assemble(self) -> None:
        """Waits until rank 0 and this rank, and for rank 0 all others, are here and plan the same."""
        if self._is_alone or self._assembled:
            return
        begin, limit = time.monotonic(), _ARRIVAL * self.ranks.timeout
        announced = False

        def all_here() -> bool:
            nonlocal announced
            missing = [rank for rank, peer in self._peers.items() if not peer.status]
            if not self.leads:
                self._is_known_to_leader()
            waited = time.monotonic() - begin
            if missing and waited > 10 and not announced:
                announced = True
                self.listener(Note(f"waiting for {listed(missing)} of {self.ranks.world}"))
            if missing and waited > limit:
                self._missed_others = True
                raise Interrupted(
                    signal.SIGTERM,
                    f"{listed(missing)} did not start within {limit:g} s",
                    hint=AGAIN if on_one_machine() else "is the destination on a file system that all machines share?",
                )
            return not missing

        self._wait_for(all_here)
        self._assembled = True
        if self.leads:
            self.publish_status()  # so that they miss it from now on, should it be killed

    def broadcast(self, value: T) -> T:
        """Rank 0's value, on every rank; plain data. The others wait for it."""
        self._step += 1
        self.assemble()
        if self.leads:
            self._publish_document(value)
            return value
        received: T = self._receive(0)
        return received

    def gather(self, value: T) -> list[T]:
        """The values of all ranks in their order, on rank 0, which waits for them; nothing elsewhere. Plain data."""
        self._step += 1
        if not self.leads:
            self._publish_document(value, state="here")
            return []
        self.publish_state("here")
        return [value, *(self._receive(rank) for rank in self._peers)]

    def finish(self, answer: Any) -> Any:
        """Rank 0's answer, on every rank: plain data. The others wait for it until rank 0 has left the `with` block.

        Rank 0 can do without them from here on. The answer is part of its last status, for which a full disk has room.
        """
        if self.leads:
            with self._publishing:
                self._status["answer"] = answer
            return answer
        self.publish_state("done")
        self.assemble()
        self._wait_for(lambda: self._peers[0].status["state"] == "over")
        return self._peers[0].status.get("answer")

    def publish_state(self, state: str) -> None:
        """Publishes what this rank does now.

        Args:
            state: "working" while bytes are expected to move, "done" when rank 0 can do without this rank, else "here".
        """
        self._publish(state=state)

    def _publish_document(self, value: Any, **changes: Any) -> None:
        """Publishes a value in this step, for others to receive."""
        name = f"document-{self._step}-{self.ranks.rank}"
        self._publish((name, {"nonce": self._status.get("nonce"), "value": value}), step=self._step, **changes)

    def _publish(self, *documents: tuple[str, dict[str, Any]], **changes: Any) -> None:
        if self._is_alone:
            return
        try:
            for name, document in documents:
                self._files.write(name, document)
            self.publish_status(**changes)
        except DestinationError:
            self.read_statuses()
            self.raise_failure()  # the folder is gone because the run is over: that is what to say
            raise

    def _receive(self, rank: int) -> Any:
        """Waits for the document that another rank publishes in this step."""
        peer, documents, deadline = self._peers[rank], list[dict[str, Any]](), 0.0

        def is_published() -> bool:
            nonlocal deadline
            if peer.status.get("step", 0) < self._step:
                return False
            deadline = deadline or time.monotonic() + self.ranks.timeout
            document = self._files.read(f"document-{self._step}-{rank}")
            if not isinstance(document, NotRead) and document["nonce"] == peer.status["nonce"]:
                documents.append(document)
            elif time.monotonic() > deadline:  # it is seen later than the status, or cannot be read
                raise DestinationError(f"what rank {rank} has published cannot be read", hint=AGAIN)
            return bool(documents)

        self._wait_for(is_published)
        return documents[0]["value"]
