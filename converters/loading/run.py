"""One load of one rank, alone or with the other ranks of its job: what `converters.loading.loader` is made of.

prepared = prepare(make, options, report, together=True)    # all that can fail before a byte is read fails here
for name, tensor in prepared.tensors():                     # reads, exchanges, checks
    ...
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from converters.errors import DistckptError
from converters.loading.record_checks import check_jointly, check_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping

    from converters.events import Listener, StopFlag
    from converters.formats.base import Reader
    from converters.io.device import Device
    from converters.loading.exchange import Exchange
    from converters.loading.job_ranks import JobRanks
    from converters.loading.moving import Loading
    from converters.loading.plan import LoadPlan

    Broadcast = bool | Literal["auto"]

_Answer = TypeVar("_Answer")


@dataclass
class LoadReport:
    """What a load did on this rank.

    Attributes:
        rank: Whose tensors they are.
        nbytes: Bytes of the tensors.
        bytes_needed: Bytes of stored elements that they are made of.
        bytes_read: Bytes that this rank has read.
        bytes_received: Bytes that other ranks have read for it.
        records_checked: Records whose checksum was compared, here or, for parts put together, on rank 0.
        records_unchecked: Records of which only a part was read; on rank 0 of a job those of all ranks, elsewhere 0.
        exchange: "none" (nothing is shared), "read by every rank", "nccl" or "gloo".
        reason: Why.
        seconds: Wall time, up to now.
        notes: Sentences a person should read.
    """

    rank: int
    nbytes: int = 0
    bytes_needed: int = 0
    bytes_read: int = 0
    bytes_received: int = 0
    records_checked: int = 0
    records_unchecked: int = 0
    exchange: str = "none"
    reason: str = ""
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class LoadOptions:
    """How to load; see `converters.loading.loader.load`.

    Attributes:
        max_memory: Bytes of host memory for buffers; None: what the device needs (`Device.budget`).
        ahead: Bytes of tensors made ahead of what the caller took; None: it takes all of them in the end.
    """

    broadcast: Broadcast = False
    verify: str = "read"
    max_memory: int | None = None
    threads: int | None = None
    timeout: float = 0.0
    listener: Listener | None = None
    stop: StopFlag | None = None
    ahead: int | None = None


@dataclass(frozen=True)
class LoadRequest:
    """What is to be loaded.

    Attributes:
        reader: The checkpoint.
        plan: What this rank reads of it.
        device: Where tensors go.
        alike: What must be the same on all ranks of a job: see `refuse_differences`.
    """

    reader: Reader
    plan: LoadPlan
    device: Device
    alike: Mapping[str, tuple[str, str]] = field(default_factory=dict)


def together(ranks: JobRanks | None, step: Callable[[], _Answer]) -> _Answer:
    """Does something that may fail, in a job on all ranks; if one fails, all do."""
    return step() if ranks is None else ranks.together(step)


@dataclass
class Prepared:
    """A load that is ready to read. Either `tensors` is taken to its end, or `close` is called.

    Attributes:
        request: What is loaded.
        options: The options of the load.
        report: What the load has done so far.
        ranks: The ranks that load together; None for one alone.
        exchange: What they share; None if each reads all of its own.
        loading: The threads, not begun yet.
        begin: When preparation began, by the monotonic clock.
        stack: Leaves the job when it is closed.
    """

    request: LoadRequest
    options: LoadOptions
    report: LoadReport
    ranks: JobRanks | None
    exchange: Exchange | None
    loading: Loading
    begin: float
    stack: contextlib.ExitStack
    _finished: bool = False
    _counted: int = 0
    _joint: int = 0

    @property
    def names(self) -> list[str]:
        """Keys of the state dict, in order."""
        return [*self.request.plan.pieces, *self.request.plan.empty]

    def tensors(self) -> Generator[tuple[str, Any]]:
        """Every tensor, once. Whatever happens, no thread is left and the other ranks know of it."""
        failure: BaseException | None = None
        try:
            with self.loading:
                yield from self._arriving()
            for name in self.request.plan.empty:
                yield name, None
        except BaseException as error:  # noqa: BLE001 - raised below, when the other ranks know
            failure = error
        self._finish(failure)

    def close(self) -> None:
        """Ends a load of which nothing was taken."""
        if not self._finished:
            with contextlib.suppress(GeneratorExit):
                self._finish(GeneratorExit())

    def __del__(self) -> None:
        self.close()

    def _arriving(self) -> Iterator[tuple[str, Any]]:
        loading, exchange = self.loading, self.exchange
        if exchange is not None:
            wait = loading.read(exchange.own_parts(0), on_device=exchange.on_device)
            for number in range(len(exchange)):
                wait_next = loading.read(exchange.own_parts(number + 1), on_device=exchange.on_device)
                wait()
                loading.scatter(exchange.gather(), on_device=exchange.on_device)
                yield from loading.ready()
                wait = wait_next
        yield from loading.complete()

    def _finish(self, failure: BaseException | None) -> None:
        """Makes a failure everybody's, or checks what no rank has read whole; leaves the job."""
        self._finished = True
        with self.stack:
            self._count()
            if self.exchange is not None:
                if failure is not None:
                    with contextlib.suppress(DistckptError):  # others may be gone
                        self.exchange.abandon()
                self.exchange.close()
            self._settle(failure)
            self._count()

    def _count(self) -> None:
        report, sources = self.report, self.loading.sources
        report.bytes_read += sources.bytes_read - self._counted
        self._counted = sources.bytes_read
        report.records_checked = sources.records_checked + self._joint
        report.bytes_received = 0 if self.exchange is None else self.exchange.bytes_received
        report.seconds = time.monotonic() - self.begin

    def _settle(self, failure: BaseException | None) -> None:
        ranks, loading, check_all = self.ranks, self.loading, self.options.verify == "all"
        if ranks is None:
            if failure is not None:
                raise failure
            left = loading.sums.partial
        else:
            left_early = isinstance(failure, GeneratorExit)
            try:
                ranks.agree(
                    DistckptError("its caller stopped before all tensors were taken") if left_early else failure
                )
            except DistckptError:
                if left_early and failure is not None:
                    raise failure from None
                raise
            self._joint, left = check_jointly(loading, ranks)
            if check_all:
                left = ranks.broadcast(left)[ranks.rank :: ranks.world]
        if check_all:
            together(ranks, lambda: check_whole(loading, left))
            left = []
        self.report.records_unchecked = len(left)
