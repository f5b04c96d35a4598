"""What ranks of a job want in common is read once and exchanged.

    exchange = Exchange(ranks, plan, device)
    exchange.allocate()
    for number in range(len(exchange)):         # a round of every group of replicas, see `rounds`
        ...                                     # fill the buffers of exchange.own_reads(number)
        for item, memory in exchange.gather():  # those of all members, filled
            ...
    exchange.abandon()                          # where there was an error: the others shall not wait

Tensor data travels as raw bytes in one collective for each round: every member of a group of replicas gives the items
that it has read and gets those of all others (`all_gather`, over NCCL or gloo).

    round    | items of rank 0 ...   | items of rank 2 ...     rank 0 reads the next round meanwhile

Before each round its members tell each other over gloo, in one number, whether they are well: so no rank enters a collective
that another one will not enter. Who is not well says so once to every group that has rounds left, and does none of them.
Messages of errors travel over gloo when all rounds are over. A rank that dies breaks gloo's connections at once, which is
an error; of NCCL's, whoever waits gives up after the timeout, or as soon as NCCL says so.
"""

from __future__ import annotations

import contextlib
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from converters.errors import DistckptError
from converters.io.gather import Gatherer
from converters.io.memory import memory_for
from converters.io.sources import Sources
from converters.loading.job_ranks import OtherRankFailed, naming_lost_ranks
from converters.loading.rounds import rounds

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from converters.formats.base import Reader
    from converters.io.device import Device
    from converters.loading.job_ranks import JobRanks
    from converters.loading.plan import LoadPlan, ReadItem
    from converters.loading.rounds import ScheduledRead

MIB = 1 << 20
_ALIGNMENT = 64
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


class Buffer(NamedTuple):
    """Memory for the bytes of an item."""

    item: ReadItem
    memory: torch.Tensor


@dataclass(frozen=True)
class _Group:
    """Ranks that share items.

    Attributes:
        members: Their numbers.
        data: The process group that tensor data travels in.
        health: The one in which they say whether they are well; gloo.
        rounds: What each of them reads, round by round.
    """

    members: tuple[int, ...]
    data: Any
    health: Any
    rounds: list[list[ScheduledRead]]


@dataclass(frozen=True)
class _Round:
    """A round of one group: `length` bytes of each member."""

    group: _Group
    reads: list[ScheduledRead]
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
        devices = ranks.all_gather((socket.gethostname(), device.serial()))
        own_gpus = all(serial for _, serial in devices) and len(set(devices)) == len(devices)
        self.backend = "nccl" if own_gpus and dist.is_nccl_available() else "gloo"
        self.bytes_received = 0
        self._groups: list[_Group] = []
        for members in sorted({members for shared in ranks.all_gather(list(plan.groups)) for members in shared}):
            if members in plan.groups:
                data = ranks.group(members, self.backend)
                health = ranks.group(members, "gloo") if self.backend == "nccl" else data
                schedule = rounds(plan.groups[members], len(members), plan.tile_bytes)
                self._groups.append(_Group(members, data, health, schedule))
        self._rounds = [_Round(group, reads, _length(reads)) for group in self._groups for reads in group.rounds]
        self._send: list[torch.Tensor] = []
        self._receive = torch.empty(0)
        self._next = 0  # the first round of which nothing was said

    def __len__(self) -> int:
        return len(self._rounds)

    @property
    def memory(self) -> int:
        """Bytes of buffers."""
        return max((scheduled.length * (len(scheduled.group.members) + 2) for scheduled in self._rounds), default=0)

    @property
    def on_device(self) -> bool:
        """Whether the buffers are on the device."""
        return self.backend == "nccl"

    def owned(self) -> set[tuple[str, Any]]:
        """Keys of the shared items that this rank is to read."""
        return {read.item.key for scheduled in self._rounds for read in self._own_reads_of(scheduled)}

    def shared(self) -> list[ReadItem]:
        """All shared items."""
        return [read.item for scheduled in self._rounds for read in scheduled.reads]

    # ------------------------------------------------------------------ rounds

    def allocate(self) -> None:
        """Makes the buffers, before anything is read.

        Raises:
            RequestError: There is too little memory.
        """
        if self._rounds:
            self._send = [self._buffer(max(scheduled.length for scheduled in self._rounds)) for _ in range(2)]
            self._receive = self._buffer(
                max(scheduled.length * len(scheduled.group.members) for scheduled in self._rounds)
            )

    def own_reads(self, number: int) -> list[Buffer]:
        """What this rank is to read for a round, nothing behind the last; the one two before it must have been gathered."""
        if number >= len(self):
            return []
        send = self._send[number % 2]
        reads = self._own_reads_of(self._rounds[number])
        return [Buffer(read.item, send[read.at : read.at + read.item.nbytes]) for read in reads]

    def gather(self) -> list[Buffer]:
        """Exchanges the next round, of which this rank's buffers are filled.

        Returns:
            The buffers of all members, filled; the memory is that of the next round, too.

        Raises:
            OtherRankFailed: Another rank of the group has failed.
            DistckptError: One has ended.
        """
        number, scheduled = self._next, self._rounds[self._next]
        if not self._all_well(scheduled.group, well=True):
            raise OtherRankFailed("another rank of the job has failed")
        receive = self._receive[: scheduled.length * len(scheduled.group.members)]
        self._all_gather(receive, self._send[number % 2][: scheduled.length], scheduled.group)
        own_bytes = sum(read.item.nbytes for read in self._own_reads_of(scheduled))
        self.bytes_received += sum(read.item.nbytes for read in scheduled.reads) - own_bytes
        return [
            Buffer(read.item, receive[begin : begin + read.item.nbytes])
            for read in scheduled.reads
            for begin in (read.owner * scheduled.length + read.at,)
        ]

    def abandon(self) -> None:
        """Tells all that would wait for this rank that it does no more rounds; nothing, if all are done."""
        while self._next < len(self._rounds):
            self._all_well(self._rounds[self._next].group, well=False)

    def close(self) -> None:
        """Gives up its buffers."""
        import torch

        self._send, self._receive = [], torch.empty(0)

    def _all_gather(self, receive: torch.Tensor, send: torch.Tensor, group: _Group) -> None:
        """What every member sends, on every member, one after the other; returns when it is there."""
        with naming_lost_ranks():
            self._device.do(lambda: self._ranks.wait(group.data._allgather_base(receive, send), group.data))
            self._device.wait()

    def _own_reads_of(self, scheduled: _Round) -> list[ScheduledRead]:
        return [read for read in scheduled.reads if scheduled.group.members[read.owner] == self._ranks.rank]

    def _buffer(self, nbytes: int) -> torch.Tensor:
        return self._device.empty("uint8", (nbytes,)) if self.on_device else memory_for("uint8", (nbytes,), "cpu")

    def _all_well(self, group: _Group, *, well: bool) -> bool:
        """Tells the group of the next round how this rank is; without all of them, none of its rounds is done."""
        self._next += 1
        if not self._ranks.all_true(well, group.health):
            while self._next < len(self._rounds) and self._rounds[self._next].group is group:
                self._next += 1
            return False
        return True

    # ------------------------------------------------------------------ is it worth it?

    def measure(self, plan: LoadPlan, reader: Reader) -> Choice:
        """Whether to exchange, by reading and exchanging a little: the same answer on all ranks."""
        shared = sum(item.nbytes for items in plan.groups.values() for item in items)
        most = max(self._ranks.all_gather(shared))
        if most < _WORTH:
            return Choice(False, f"ranks share {most / MIB:.1f} MiB at most, too little for an exchange")
        read_rate, nbytes = _reading_rate(plan, reader)
        times = [0.0, 0.0]
        send, receive = self._ranks.run_on_all(lambda: (self._buffer(_SAMPLE), self._buffer(_SAMPLE)))
        for group in self._groups:
            total = sum(read.item.nbytes for reads in group.rounds for read in reads)
            received = self._gathering_rate(group, send, receive)
            times[0] += total / read_rate
            times[1] += max(total / len(group.members) / read_rate, total / received)
        rows = self._ranks.all_gather((*times, read_rate))
        every, once = (max(row[i] for row in rows) for i in (0, 1))
        rates = f"a rank reads {min(row[2] for row in rows) / 1e9:.2f} GB/s beside all others"
        reason = f"{rates}: reading all on every rank takes {every:.1f} s, once with {self.backend} {once:.1f} s"
        return Choice(once < _GAIN * every, reason, nbytes)

    def _gathering_rate(self, group: _Group, send: torch.Tensor, receive: torch.Tensor) -> float:
        """Bytes a second that a member of a group gets."""
        members = len(group.members)
        send, receive = send[: len(send) // members], receive[: len(receive) // members * members]
        seconds = 0.0
        for _ in range(2):  # the first time connections are made
            begin = time.monotonic()
            self._all_gather(receive, send, group)
            seconds = time.monotonic() - begin
        return receive.numel() / max(seconds, 1e-6)


def _reading_rate(plan: LoadPlan, reader: Reader) -> tuple[float, int]:
    """Bytes a second that this rank reads of what it shares, while all others do the same; and the bytes it has read."""
    items = [item for shared in plan.groups.values() for item in shared]
    wanted = min(_SAMPLE, sum(item.nbytes for item in items) // 100)
    sources, nbytes = Sources(reader, plan.sources, drop=False), 0
    begin = time.monotonic()
    # an error: the load itself will meet it, and say so to all ranks; here they wait for an answer
    with contextlib.suppress(DistckptError), contextlib.closing(Gatherer(sources)) as gatherer:
        for item in items[:: max(1, len(items) // 7)]:
            gatherer.gather(item.source, item.box)
            nbytes += item.nbytes
            if nbytes >= wanted:
                break
    return nbytes / max(time.monotonic() - begin, 1e-6), nbytes


def _length(reads: Sequence[ScheduledRead]) -> int:
    ends = max(read.at + read.item.nbytes for read in reads)
    return int(-(-ends // _ALIGNMENT) * _ALIGNMENT)
