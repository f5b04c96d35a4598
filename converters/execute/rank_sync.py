"""Synchronizes the ranks of a run through small files in a shared folder; no network, no collectives.

    parent/
        .NAME.distckpt-partial/         the result, and every rank's journal
        .NAME.distckpt-ranks-0f3a/      gone when the run is over; the number tells launches apart
            rank-R      what rank R says: who it is, how far it is, how it ended; written anew every second
            lock-R      locked by rank R while it lives
            round       rank 0 deals out the work: which tasks each rank does
            result-R    what rank R has found out and cannot finish alone: checksums of records done in part

    rank 0    here .... all are here, plans agree; staging folder, round .. own share .. collects .. publishes .. over
    rank R    here ......................................................... own share .. done .............. gone

Files of an earlier run are recognised: every process draws a random number, rank 0 repeats the numbers it has heard, and a
rank believes rank 0 only if its own number is among them. Whoever misses that later on stops: another run has taken over.
"""

from __future__ import annotations

import contextlib
import secrets
import signal
import socket
import threading
import time
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from converters.errors import DestinationError, DistckptError, Interrupted, RequestError
from converters.events import Moved, Note, ignore
from converters.execute.destination import beside
from converters.execute.disk import remove_folder
from converters.execute.error_json import AGAIN, Stopped, pack_error, unpack_error
from converters.execute.rank_files import Board, NotRead, is_locked, machine
from converters.execute.ranks import listed, on_one_machine, shares, spans

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from converters.events import Listener, StopFlag
    from converters.execute.ranks import Numbered, Ranks

T = TypeVar("T", bound="Numbered")

_INTERVAL = 1.0
_GRACE = 10.0  # seconds that rank 0 waits at the end for the others to go, and they for it; torchrun kills after 30
_ARRIVAL = 5  # times the timeout: ranks plan at different speeds
_STANDSTILL = 10  # times the timeout: alive, but nothing moves; a sync of a gigabyte may take its time


@dataclass
class _Peer:
    """What is known of another rank.

    Attributes:
        status: What it said last.
        changed: When it last said something new, by our clock.
        moved: When it had last moved bytes.
        files: Output files whose share it has finished.
    """

    status: dict[str, Any] = field(default_factory=dict)
    changed: float = 0.0
    moved: float = 0.0
    files: int = 0


class Team:
    """The ranks of one run, as one of them sees them. A context manager around everything that writes.

    Args:
        ranks: This process among them.
        destination: Where the result will appear; on a file system that all ranks share.
        fingerprint: Digest of this rank's job; the same on all ranks.
        listener: Told about the progress of the others (rank 0).
        stop: Polled while waiting.

    Attributes:
        trouble: Why all have to stop, once that is known.
        progress: What this rank says about its work; set by the engine.
        share: `(first, one past the last)` of the tasks that rank 0 has given to this rank.
        on_files: Called on rank 0 with output files that another rank has finished its share of.
    """

    def __init__(
        self,
        ranks: Ranks,
        destination: Path,
        fingerprint: str,
        listener: Listener | None = None,
        stop: StopFlag | None = None,
    ) -> None:
        self.ranks, self.fingerprint = ranks, fingerprint
        self.leads = ranks.rank == 0
        self.folder = beside(destination, f"ranks-{zlib.crc32(ranks.launch.encode()):08x}")
        self._board = Board(self.folder, ranks.rank)
        self.trouble: DistckptError | None = None
        self.share: list[tuple[int, int]] = []
        self.progress: Callable[[], dict[str, Any]] = dict
        self.on_files: Callable[[Sequence[int]], None] = ignore
        self._listener, self._stop = listener or ignore, stop
        self._peers = {r: _Peer() for r in (range(1, ranks.world) if self.leads else (0,))}
        self._interval = min(_INTERVAL, ranks.timeout / 10)
        self._looked = time.monotonic()
        self._looking, self._saying = threading.Lock(), threading.Lock()
        self._status: dict[str, Any] = {}
        self._announced = self._late = self._assembled = False
        self._round = 0  # how often work was dealt out
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="distckpt-team", daemon=True)

    # ------------------------------------------------------------------ coming and going

    def __enter__(self) -> Team:
        try:
            locked = self._board.arrive(self.ranks.timeout)
            self._status = {
                "nonce": secrets.token_hex(8),
                "fingerprint": self.fingerprint,
                "host": socket.gethostname(),
                "machine": machine(),
                "locked": locked,
                "beat": 0,
                "state": "here",
                "error": None,
            }
            self.say()
        except DestinationError as error:
            self._board.close()
            error.shown_here = True  # no other rank will hear of it
            raise
        self._thread.start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            self.end(error)
        finally:
            self._ended.set()
            self._thread.join()
            self._board.close()

    def end(self, error: BaseException | None) -> None:
        """Says how it ended and, as rank 0, waits until the others have stopped. Does nothing the second time.

        Sets `shown_here` of the error: whether this process is the one to show it.
        """
        if self._announced:
            return
        self._announced = True
        if self.leads:
            self._insist(state="over" if error is None else "failed", error=pack_error(error))
            # who is still planning shall hear it, too, unless all were told to stop, or have been waited for already
            all_came = self._late or (self._stop is not None and self._stop.is_set())
            self._wait_quietly(_GRACE, lambda: all(self._is_gone(r, p, all_came) for r, p in self._peers.items()))
            self._ended.set()
            self._thread.join()
            remove_folder(self.folder)
            return
        if error is not None:
            self._insist(state="failed", error=pack_error(error))
            if not self._late:
                # to a rank 0 that comes later, what a rank said whose process has ended would be of an earlier run
                with contextlib.suppress(DestinationError):  # the folder is gone, and with it rank 0
                    self._wait_quietly(_GRACE, self._leader_is_here)
            heard = bool(self._peers[0].status)
            lost = self._late or (error is self.trouble and not self._peers[0].status.get("error"))
            # what rank 0 knows, rank 0 shows; if it is lost, one of the others has to
            shown: Any = error  # also one that is not ours
            shown.shown_here = self.ranks.rank == 1 if lost else (False if heard else None)
            if error is not self.trouble and heard:
                # let rank 0 learn of it before a launcher sees this process end and stops all
                self._wait_quietly(3.0, lambda: bool(self.trouble or self._peers[0].status.get("state") == "over"))
        self._insist(state="gone")

    def _insist(self, **news: Any) -> None:
        """Says something last, for which there will be no other beat if a disk is in passing trouble."""
        for wait in (self._interval, self._interval, 0.0):
            with contextlib.suppress(DestinationError):
                self.say(**news)
                return
            time.sleep(wait)

    def _wait_quietly(self, seconds: float, ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + seconds
        while not ready() and time.monotonic() < deadline:
            time.sleep(0.05)
            self.look()

    def _leader_is_here(self) -> bool:
        """Whether rank 0 has heard this rank; says again what rank 0 took for something old when it came."""
        heard = bool(self._peers[0].status)
        if not heard and isinstance(self._board.read(f"rank-{self.ranks.rank}"), NotRead):
            self.say()
        return heard

    def _is_gone(self, rank: int, peer: _Peer, came: bool) -> bool:
        """Whether nothing more will come of a rank: it said so, is silent, or has ended; `came`: all that will come have."""
        if not peer.status:
            return came
        late = time.monotonic() - peer.changed > self.ranks.timeout
        return late or peer.status["state"] == "gone" or self._process_ended(rank, peer)

    # ------------------------------------------------------------------ saying and hearing

    def _beat(self) -> None:
        while not self._ended.wait(self._interval):
            with contextlib.suppress(DestinationError):  # if it is no passing trouble, the others hear nothing any more
                self.look()
                if self.leads or not self._announced:
                    self.say()

    def say(self, **news: Any) -> None:
        """Writes anew what this rank says."""
        with self._saying:
            self._status |= {**self.progress(), **news, "beat": self._status["beat"] + 1}
            if self.leads:
                self._status["heard"] = {str(rank): peer.status.get("nonce") for rank, peer in self._peers.items()}
            self._board.write(f"rank-{self.ranks.rank}", self._status)

    def look(self) -> None:
        """Reads what the others say and concludes whether all have to stop."""
        with self._looking:
            now = time.monotonic()
            asleep = now - self._looked - 5 * self._interval  # we were suspended; that time says nothing of others
            self._looked = now
            for rank, peer in self._peers.items():
                if asleep > 0:
                    peer.changed, peer.moved = peer.changed + asleep, peer.moved + asleep
                status = self._board.read(f"rank-{rank}")
                trouble = self._hear(peer, status, now) or self._judge(rank, peer, now)
                # that a launcher stops some follows from something; the cause may be seen a little later
                if self.trouble is None or (trouble is not None and isinstance(self.trouble, Stopped)):
                    self.trouble = trouble

    def _hear(self, peer: _Peer, status: dict[str, Any] | NotRead, now: float) -> DistckptError | None:
        """Takes in another rank's word; trouble if it is another process than before."""
        nonce = peer.status.get("nonce")
        over = Interrupted(signal.SIGTERM, "the run ended or restarted without this process", hint=AGAIN)
        if status is NotRead.NOT_NOW or status == peer.status:
            return None  # silence; `_judge` sees to it
        if status is NotRead.NO_FILE:  # rank 0 removes files, so to it that is silence, too
            return None if self.leads or nonce is None else over
        believed = self.leads or status.get("heard", {}).get(str(self.ranks.rank)) == self._status["nonce"]
        if nonce is not None and (not believed or status["nonce"] != nonce):
            return over
        if not believed:
            return None
        if status.get("moved") != peer.status.get("moved") or status["state"] != peer.status.get("state"):
            peer.moved = now
        fresh = status.get("bytes", 0) - peer.status.get("bytes", 0)
        peer.status, peer.changed = status, now
        if self.leads and fresh:
            self._listener(Moved(fresh))
        files = status.get("files", [])
        if len(files) > peer.files:
            self.on_files(files[peer.files :])
            peer.files = len(files)
        return None

    def _judge(self, rank: int, peer: _Peer, now: float) -> DistckptError | None:
        status, limit = peer.status, self.ranks.timeout
        if not status:
            return None
        who = f"rank {rank} on {status['host']}"
        if status["error"] is not None:
            return unpack_error(status["error"], who if self.leads else None)
        if self.leads and status["fingerprint"] != self.fingerprint:
            return RequestError(
                f"{who} made another plan: do all ranks see the same files?",
                details=[
                    f"fingerprints {self.fingerprint[:16]} on rank {self.ranks.rank}, {status['fingerprint'][:16]}"
                ],
                hint="look for a stale mount or another version of distckpt there",
            )
        if status["state"] in ("done", "gone", "over"):
            return None
        if self._process_ended(rank, peer):
            return Interrupted(signal.SIGTERM, f"{who} ended without an error message: was it killed?", hint=AGAIN)
        if now - peer.changed > limit:
            return Interrupted(signal.SIGTERM, f"{who} has not responded for {limit:g} s", hint=AGAIN)
        if status["state"] == "working" and now - peer.moved > _STANDSTILL * limit:
            return Interrupted(signal.SIGTERM, f"{who} has made no progress for {_STANDSTILL * limit:g} s", hint=AGAIN)
        return None

    def _process_ended(self, rank: int, peer: _Peer) -> bool:
        """Whether its process has certainly ended; nothing can be said of other machines."""
        same_machine = peer.status["machine"] == self._status["machine"] and peer.status["locked"]
        return same_machine and not is_locked(self.folder / f"lock-{rank}")

    def should_stop(self) -> bool:
        """Whether this rank must not go on writing."""
        if time.monotonic() - self._looked > 5 * self._interval:
            self.look()  # we were suspended: perhaps the run went on, or ended, without us
        return self.trouble is not None

    def check(self) -> None:
        """Raises what stops this rank: trouble elsewhere, or a signal of its own."""
        stopped = self._stop is not None and self._stop.is_set()
        if stopped:
            self.look()  # a launcher stops everyone when one fails: say which one, if that can be known
        if self.trouble is not None and not (stopped and isinstance(self.trouble, Stopped)):
            raise self.trouble
        if stopped and self._stop is not None:
            raise Interrupted(self._stop.signum or 2, "finished work is kept", hint=AGAIN)

    def _wait(self, ready: Callable[[], bool]) -> None:
        begin = time.monotonic()
        while not ready():
            self.check()
            time.sleep(min(0.2, 0.01 + (time.monotonic() - begin) / 20))
            self.look()
        self.check()

    # ------------------------------------------------------------------ the steps of a run

    def assemble(self) -> None:
        """Rank 0: waits until all are here and plan the same. Does nothing the second time."""
        if self._assembled:
            return
        begin, limit = time.monotonic(), _ARRIVAL * self.ranks.timeout
        announced = False

        def all_here() -> bool:
            nonlocal announced
            missing = [rank for rank, peer in self._peers.items() if not peer.status]
            waited = time.monotonic() - begin
            if missing and waited > 10 and not announced:
                announced = True
                self._listener(Note(f"waiting for {listed(missing)} of {self.ranks.world}"))
            if missing and waited > limit:
                self._late = True
                raise Interrupted(
                    signal.SIGTERM,
                    f"{listed(missing)} did not start within {limit:g} s",
                    hint=AGAIN if on_one_machine() else "is the destination on a file system that all machines share?",
                )
            return not missing

        self.look()
        self._wait(all_here)
        self._assembled = True
        self.say()  # so that they miss it from now on, should it be killed

    def deal(self, todo: Sequence[T]) -> list[Sequence[T]]:
        """Rank 0: deals out what remains to be done; the shares of all ranks, rank 0's first."""
        parts = shares(todo, self.ranks.world)
        self._round += 1
        self.say(state="working")
        document = [spans(task.number for task in part) for part in parts]
        self._board.write("round", {"nonce": self._status["nonce"], "number": self._round, "shares": document})
        return parts

    def await_share(self) -> None:
        """Others: waits until rank 0 has prepared what is needed and dealt out the work."""
        self._round += 1
        begin, limit = time.monotonic(), _ARRIVAL * self.ranks.timeout

        def has_dealt() -> bool:
            leader = self._peers[0].status
            if not self._leader_is_here():
                if time.monotonic() - begin > limit:
                    self._late = True
                    raise Interrupted(signal.SIGTERM, f"rank 0 did not start within {limit:g} s", hint=AGAIN)
                return False
            dealt = self._board.read("round")
            if not isinstance(dealt, NotRead) and (dealt["nonce"], dealt["number"]) == (leader["nonce"], self._round):
                self.share = [(first, end) for first, end in dealt["shares"][self.ranks.rank]]
                return True
            return False

        self.look()
        self._wait(has_dealt)
        self.say(state="working")

    def hand_over(self, result: dict[str, Any], *, last: bool) -> None:
        """Others: the share is done; tells rank 0 what it has to go on with.

        Args:
            result: What that is, as plain data.
            last: Nothing more will be dealt out: rank 0 can do without this rank now.
        """
        try:
            self._board.write(f"result-{self.ranks.rank}", result)
            self.say(done=self._round, state="done" if last else "here")
        except DestinationError:
            self.look()
            self.check()  # the folder is gone because the run is over: that is what to say
            raise

    def collect(self) -> list[dict[str, Any]]:
        """Rank 0: waits until the others are done; what they handed over."""
        self._wait(lambda: all(peer.status.get("done") == self._round for peer in self._peers.values()))
        documents: list[dict[str, Any]] = []
        for rank in self._peers:
            result = self._board.read(f"result-{rank}")
            if isinstance(result, NotRead):
                raise DestinationError(f"the result of rank {rank} cannot be read", hint=AGAIN)
            documents.append(result)
        return documents

    def await_end(self) -> None:
        """Others: waits until rank 0 has published; raises what it raised if it did not."""
        self._wait(lambda: self._peers[0].status.get("state") == "over")

    def heard(self, name: str) -> Any:
        """Others: something that rank 0 said beside the usual."""
        return self._peers[0].status.get(name)
