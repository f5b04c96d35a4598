"""What ranks of a job want in common is read once and exchanged.

    exchange = Exchange(ranks, plan, device)
    while exchange.step(loading): ...           # a round of every group of replicas, see load_rounds

Tensor data travels as raw bytes in one collective for each round: every member of a group of replicas gives the fetches
that it has read and gets those of all others (`all_gather`, over NCCL or gloo). In front of each part stands whether its
rank is well, so nobody waits for one that has failed: it says so in its next round, and the members of each group that
hears it say so in theirs. Messages of errors travel over gloo when all rounds are over. A rank that dies breaks gloo's
connections at once, which is an error; of NCCL's, torch's watchdog takes notice, which ends the processes that wait.

    round    | ok | fetches of rank 0 ... | ok | fetches of rank 2 ...     rank 0 reads the next round meanwhile
"""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from converters.errors import DistckptError
from converters.loading.job_ranks import Elsewhere, lost
from converters.loading.rounds import rounds
from converters.reading.gather import Gatherer, Sources
from converters.reading.memory import memory_for

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from converters.formats.base import Reader
    from converters.loading.job_ranks import JobRanks
    from converters.loading.moving import Loading
    from converters.loading.plan import Fetch, LoadPlan
    from converters.loading.rounds import Part
    from converters.reading.device import Device, Lane

__all__ = ["Choice", "Exchange"]

MIB = 1 << 20
_HEADER = 64
_WORTH = 64 * MIB  # shared bytes; with less, setting up an exchange takes longer than reading
_SAMPLE = 32 * MIB
_GAIN = 0.8  # an exchange is chosen if it should take less than this part of the time


@dataclass(frozen=True)
class Choice:
    """How what ranks share is read.

    Attributes:
        exchange: Once, and exchanged; otherwise by every rank.
        reason: Why, as a sentence, with what was measured.
        bytes_read: Bytes that the measurement read.
    """

    exchange: bool
    reason: str
    bytes_read: int = 0


@dataclass
class _Group:
    members: tuple[int, ...]
    group: Any
    rounds: list[list[Part]]


@dataclass
class _Step:
    """A round of one group: `length` bytes of each member, its header included."""

    group: _Group
    parts: list[Part]
    length: int


class Exchange:
    """What this rank shares with others, in rounds.

    Args:
        ranks: The job.
        plan: What this rank loads.
        device: Where its tensors go.

    Attributes:
        backend: "nccl" if all ranks have a GPU of their own, else "gloo".
        bytes_received: Bytes that other ranks have read for this one.
    """

    def __init__(self, ranks: JobRanks, plan: LoadPlan, device: Device) -> None:
        import torch
        import torch.distributed as dist

        self._ranks, self._device = ranks, device
        # NCCL refuses two ranks on one GPU ("Duplicate GPU detected"), whatever number each of them knows it by
        places = ranks.gathered((socket.gethostname(), device.serial()))
        own_gpus = all(serial for _, serial in places) and len(set(places)) == len(places)
        self.backend = "nccl" if own_gpus and dist.is_nccl_available() else "gloo"
        self._direct = device.unified or self.backend == "nccl"
        self.bytes_received = 0
        groups: list[_Group] = []
        self._groups = groups
        for members in sorted({members for known in ranks.gathered(list(plan.groups)) for members in known}):
            made = ranks.group(members, self.backend)
            if members in plan.groups:
                schedule = rounds(plan.groups[members], len(members), plan.tile_bytes)
                groups.append(_Group(members, made, schedule))
        self._steps = [_Step(group, parts, _length(parts)) for group in groups for parts in group.rounds]
        self._send: list[torch.Tensor] = []
        self._receive = torch.empty(0)
        self._filled: list[_Latch | None] = [None, None]
        self._at = 0
        self._failed = False
        self._lane: Lane | None = None
        self._largest = plan.largest

    @property
    def memory(self) -> int:
        """Bytes of buffers."""
        return max((step.length * (len(step.group.members) + 2) for step in self._steps), default=0)

    @property
    def on_device(self) -> bool:
        """Whether the buffers are on the device."""
        return self.backend == "nccl"

    def owned(self) -> set[tuple[str, Any]]:
        """Keys of the shared fetches that this rank is to read."""
        return {
            part.fetch.key
            for step in self._steps
            for part in step.parts
            if step.group.members[part.owner] == self._ranks.rank
        }

    def shared(self) -> list[Fetch]:
        """All shared fetches."""
        return [part.fetch for step in self._steps for part in step.parts]

    # ------------------------------------------------------------------ rounds

    def step(self, loading: Loading) -> bool:
        """Does one round; False when none is left, or there was nothing to do.

        A failure of this rank is `loading.failure`, that of another one becomes it.
        """
        if self._at >= len(self._steps):
            return False
        if not self._send:
            self._allocate()
        step, well = self._steps[self._at], loading.failure is None and not self._failed
        if well:
            for number in (self._at, self._at + 1):
                self._fill(loading, number)
            latch = self._filled[self._at % 2]
            well = latch is None or latch.wait(loading)
        if self._gather(step, well=well):
            self._scatter(step, loading)
            self._filled[self._at % 2] = None
            self._at += 1
        else:
            loading.fail(Elsewhere("another rank of the job has failed"))
            self._failed = True
            group = step.group
            while self._at < len(self._steps) and self._steps[self._at].group is group:
                self._at += 1
        return True

    def finish(self, loading: Loading, error: BaseException) -> None:
        """Tells all that wait for this rank that it has failed."""
        loading.fail(error)
        while self.step(loading):
            pass

    def close(self) -> None:
        """Gives up its buffers."""
        if self._lane is not None:
            self._lane.close()
        self._send, self._lane = [], None

    def _buffer(self, nbytes: int) -> torch.Tensor:
        return self._device.empty("uint8", (nbytes,)) if self.on_device else memory_for("uint8", (nbytes,), "cpu")

    def _allocate(self) -> None:
        largest = max(step.length for step in self._steps)
        self._send = [self._buffer(largest) for _ in range(2)]
        gathered = max(step.length * len(step.group.members) for step in self._steps)
        self._receive = self._buffer(gathered)

    def _fill(self, loading: Loading, number: int) -> None:
        """Has threads read this rank's part of a round."""
        if number >= len(self._steps) or self._filled[number % 2] is not None:
            return
        step, send = self._steps[number], self._send[number % 2]
        mine = [part for part in step.parts if step.group.members[part.owner] == self._ranks.rank]
        latch = self._filled[number % 2] = _Latch(len(mine))
        mark = self._device.mark()
        for part in mine:
            begin = _HEADER + part.at
            loading.submit(self._reading(loading, part.fetch, send[begin : begin + part.fetch.nbytes], latch, mark))

    def _reading(
        self, loading: Loading, fetch: Fetch, into: torch.Tensor, latch: _Latch, mark: Any
    ) -> Callable[[Gatherer, Lane], None]:
        def task(gatherer: Gatherer, lane: Lane) -> None:
            read = loading.read_into(gatherer, fetch)
            if self.on_device:
                lane.run(read, fetch.nbytes, into=into, done=latch.down, after=[mark])
            else:
                read(into.numpy())
                latch.down()

        return task

    def _gather(self, step: _Step, *, well: bool) -> bool:
        """Exchanges a round; whether every member is well."""
        send = self._send[self._at % 2][: step.length]
        receive = self._receive[: step.length * len(step.group.members)]
        heard: list[torch.Tensor] = []

        def gather() -> None:
            send[0] = 0 if well else 1
            _all_gather(receive, send, step.group.group)
            heard.append(receive.view(len(step.group.members), step.length)[:, 0].any())

        with lost():
            self._device.do(gather)
            self._device.wait()
            return not heard[0].item()

    def _scatter(self, step: _Step, loading: Loading) -> None:
        if not self._direct and self._lane is None:
            self._lane = self._device.lane(self._largest)
        for part in step.parts:
            begin = part.owner * step.length + _HEADER + part.at
            there = self._receive[begin : begin + part.fetch.nbytes]
            if step.group.members[part.owner] != self._ranks.rank:
                self.bytes_received += part.fetch.nbytes
            if self._lane is None:
                loading.place(part.fetch, there)
            else:
                loading.run(self._lane, part.fetch, _copying(there))
        if self._lane is not None:
            self._lane.flush()
            return
        self._device.wait()
        for part in step.parts:
            loading.landed(part.fetch)

    # ------------------------------------------------------------------ is it worth it?

    def measure(self, plan: LoadPlan, reader: Reader) -> Choice:
        """Whether to exchange, by reading and exchanging a little: the same answer on all ranks."""
        shared = sum(fetch.nbytes for fetches in plan.groups.values() for fetch in fetches)
        most = max(self._ranks.gathered(shared))
        if most < _WORTH:
            return Choice(False, f"ranks share {most / MIB:.1f} MiB at most, too little for an exchange")
        read, nbytes = _reading_rate(plan, reader)
        times = [0.0, 0.0]
        for group in self._groups:
            total = sum(part.fetch.nbytes for parts in group.rounds for part in parts)
            received = self._gathering_rate(group)
            times[0] += total / read
            times[1] += max(total / len(group.members) / read, total / received)
        seen = self._ranks.gathered((*times, read))
        every, once = (max(row[i] for row in seen) for i in (0, 1))
        rates = f"a rank reads {min(row[2] for row in seen) / 1e9:.2f} GB/s beside all others"
        told = f"{rates}: reading everything everywhere takes {every:.1f} s, once with {self.backend} {once:.1f} s"
        return Choice(once < _GAIN * every, told, nbytes)

    def _gathering_rate(self, group: _Group) -> float:
        """Bytes a second that a member of a group gets."""

        members = len(group.members)
        each = max(1, _SAMPLE // members)
        send, receive = self._buffer(each), self._buffer(each * members)
        seconds = 0.0
        for _ in range(2):  # the first time connections are made
            begin = time.monotonic()
            with lost():
                self._device.do(lambda: _all_gather(receive, send, group.group))
                self._device.wait()
            seconds = time.monotonic() - begin
        return receive.numel() / max(seconds, 1e-6)


def _reading_rate(plan: LoadPlan, reader: Reader) -> tuple[float, int]:
    """Bytes a second that this rank reads of what it shares, while all others do the same; and the bytes it has read."""
    fetches = [fetch for shared in plan.groups.values() for fetch in shared]
    wanted = min(_SAMPLE, sum(fetch.nbytes for fetch in fetches) // 100)
    gatherer, nbytes = Gatherer(Sources(reader, plan.sources, drop=False)), 0
    begin = time.monotonic()
    try:
        for fetch in fetches[:: max(1, len(fetches) // 7)]:
            gatherer.gather(fetch.source, fetch.box)
            nbytes += fetch.nbytes
            if nbytes >= wanted:
                break
    except DistckptError:
        pass  # the load itself will meet it, and say so to all ranks; here they wait for an answer
    finally:
        gatherer.close()
    return nbytes / max(time.monotonic() - begin, 1e-6), nbytes


def _length(parts: Sequence[Part]) -> int:
    ends = max(part.at + part.fetch.nbytes for part in parts)
    return int(_HEADER + -(-ends // _HEADER) * _HEADER)


def _copying(there: torch.Tensor) -> Callable[[Any], None]:
    def read(into: Any) -> None:
        into[:] = there.numpy()

    return read


def _all_gather(receive: torch.Tensor, send: torch.Tensor, group: Any) -> None:
    import torch.distributed as dist

    # its name since torch 2.12
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(receive, send, group=group)


class _Latch:
    """Opens when as many things are done as were begun."""

    def __init__(self, count: int) -> None:
        self._left, self._change = count, threading.Condition()

    def down(self) -> None:
        """One is done."""
        with self._change:
            self._left -= 1
            self._change.notify_all()

    def wait(self, loading: Loading) -> bool:
        """Waits for all; False as soon as the load has failed."""
        with self._change:
            while self._left and loading.failure is None:
                self._change.wait(0.1)
            return not self._left and loading.failure is None
