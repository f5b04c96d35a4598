"""One load of one rank, alone or with the other ranks of its job: prepared, read, checked.

prepared = PreparedLoad(make, options, rank, in_job=True)   # all that can fail before a byte is read fails here
for name, tensor in prepared.tensors():                     # reads, exchanges, checks
    ...
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from converters.errors import DistckptError, RequestError
from converters.events import Note, PlanReady
from converters.io.memory import default_threads, workers_and_memory
from converters.loading.moving import Loading
from converters.loading.record_checks import check_jointly, check_whole
from converters.remote.address import RemotePath

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping

    from converters.formats.base import Reader
    from converters.io.device import Device
    from converters.loading.exchange import Exchange
    from converters.loading.job_ranks import JobRanks
    from converters.loading.plan import LoadOptions, LoadPlan

MIB = 1 << 20
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


class PreparedLoad:
    """A load that is ready to read. Either `tensors` is taken to its end, or `close` is called.

    Args:
        make: Opens and plans, given the ranks of the job; may fail.
        options: The options of the load.
        rank: Whose tensors they are.
        in_job: With the other ranks of the job: where one fails, all do.

    Attributes:
        report: What the load has done so far.

    Raises:
        DistckptError: It cannot be done, here or on another rank.
    """

    def __init__(
        self,
        make: Callable[[JobRanks | None], LoadRequest],
        options: LoadOptions,
        rank: int = 0,
        *,
        in_job: bool = False,
    ) -> None:
        self._begin, self._finished = time.monotonic(), True
        self._measured_bytes = self._jointly_checked = 0
        self._options, self._rank, self.report = options, rank, LoadReport(rank)
        self._ranks: JobRanks | None = None
        with contextlib.ExitStack() as stack:
            if in_job:
                from converters.loading.job_ranks import join_job, refuse_differences

                self._ranks = stack.enter_context(join_job(options.timeout, options.stop))
            request = self._run_on_all(lambda: make(self._ranks))
            self._reader, self._plan, self._device = request.reader, request.plan, request.device
            self.report.nbytes, self.report.bytes_needed = self._plan.nbytes, self._plan.bytes_needed
            self.report.notes = list(self._plan.notes)
            if self._ranks is not None:
                refuse_differences(self._ranks.all_gather(request.alike))
            self._exchange = self._choose_exchange()
            self._loading = self._run_on_all(self._make_loading)
            self._announce()
            self._leave_job = stack.pop_all()
        self._finished = False

    def _run_on_all(self, step: Callable[[], _Answer]) -> _Answer:
        """Does something that may fail, in a job on all ranks; if one fails, all do."""
        return step() if self._ranks is None else self._ranks.run_on_all(step)

    # ------------------------------------------------------------------ before anything is read

    def _choose_exchange(self) -> Exchange | None:
        """Decides whether what ranks share is exchanged."""
        options, report, ranks = self._options, self.report, self._ranks
        if ranks is None:
            report.reason = "this process loads alone"
            return None
        if not any(ranks.all_gather(bool(self._plan.groups))):
            report.reason = "no two ranks need the same bytes"
            return None
        report.exchange = "read by every rank"
        if options.broadcast is False:
            report.reason = "broadcast=False"
            return None
        from converters.loading.exchange import Exchange

        exchange = Exchange(ranks, self._plan, self._device)
        report.reason = "broadcast=True"
        if options.broadcast == "auto":
            choice = exchange.measure(self._plan, self._reader)
            report.reason = choice.reason
            self._measured_bytes = choice.bytes_read
            if not choice.exchange:
                return None
        report.exchange = exchange.backend
        return exchange

    @property
    def _budget(self) -> int:
        """Bytes of host memory for buffers."""
        return self._device.budget if self._options.max_memory is None else self._options.max_memory

    def _threads_that_fit(self) -> int:
        """How many threads read, after making sure that everything fits.

        Raises:
            RequestError: It does not, on the device or within `max_memory`.
        """
        plan, device, options, exchange = self._plan, self._device, self._options, self._exchange
        tile, source = plan.largest, self._reader.catalog.path
        each = device.slots * device.buffer(tile) + tile  # the slots, and a scratch that the gatherer may need
        fit = self._budget // each
        if not fit:
            raise RequestError(f"max_memory of {self._budget:,} bytes is too small: a thread needs {each:,} bytes")
        # all ranks of a machine look at the same cores and, without a GPU, at the same memory
        on_machine = 1 if self._ranks is None else self._ranks.neighbours
        neighbours = max(on_machine, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        usual = default_threads(device.threads, 1 if device.unified else neighbours)
        if isinstance(source, RemotePath):
            usual = workers_and_memory(None, None, source)[0]
        threads = max(1, min(options.threads or usual, fit))
        on_device = plan.nbytes
        if exchange is not None and (device.unified or exchange.on_device):
            on_device += exchange.memory
        if options.ahead is not None:
            largest = max((piece.nbytes for piece in plan.pieces.values()), default=0)
            on_device -= plan.nbytes - min(plan.nbytes, max(largest, options.ahead))
        on_device += threads * each if device.unified else threads * tile * device.slots
        room = device.room()
        if device.unified and self._ranks is not None:
            room //= neighbours
        if on_device > room:
            hint = "a larger tp or pp makes each rank's part smaller"
            if any(name.startswith("optimizer.") for name in plan.pieces):
                hint += ", optimizer=False leaves masters and moments out"
            raise RequestError(
                f"{device.name} has {room / MIB:,.0f} MiB free, rank {self._rank} needs {on_device / MIB:,.0f} MiB",
                details=[f"{plan.nbytes:,} bytes of tensors, {on_device - plan.nbytes:,} bytes of buffers"],
                hint=hint,
            )
        return threads

    def _make_loading(self) -> Loading:
        """The threads, not begun yet; the buffers of the exchange exist, too, before anything is read."""
        threads, exchange, options = self._threads_that_fit(), self._exchange, self._options
        if exchange is not None:
            exchange.allocate()
        summed_here = self._keys_summed_here()
        return Loading(
            self._plan,
            self._reader,
            self._device,
            threads=threads,
            exchange=exchange,
            joint=lambda item: item.key in summed_here,
            ahead=options.ahead,
            keep_cache=self._ranks is not None and exchange is None,
            listener=options.listener,
            stop=options.stop,
        )

    def _keys_summed_here(self) -> set[Any]:
        """Keys of the items whose checksums this rank contributes when the job's checksums are put together."""
        plan = self._plan
        shared = {item.key: members for members, items in plan.groups.items() for item in items}
        unshared = {item.key for item in plan.read_items if item.key not in shared}
        if self._exchange is not None:
            return unshared | self._exchange.owned()
        return unshared | {key for key, members in shared.items() if members[0] == self._rank}

    def _announce(self) -> None:
        listener, report = self._options.listener, self.report
        if listener is None:
            return
        listener(PlanReady("load", 0, report.bytes_needed, report.bytes_needed, self._budget))
        for note in report.notes:
            listener(Note(note))
        if self._ranks is not None:
            text = f"what ranks share is {report.exchange}: {report.reason}"
            listener(Note(text if report.exchange != "none" else report.reason))

    # ------------------------------------------------------------------ reading

    @property
    def names(self) -> list[str]:
        """Keys of the state dict, in order."""
        return [*self._plan.pieces, *self._plan.empty]

    def tensors(self) -> Generator[tuple[str, Any]]:
        """Every tensor, once. Whatever happens, no thread is left and the other ranks know of it."""
        failure: BaseException | None = None
        try:
            with self._loading:
                yield from self._loading.tensors()
            for name in self._plan.empty:
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

    def _finish(self, failure: BaseException | None) -> None:
        """Makes a failure everybody's, or checks what no rank has read whole; leaves the job."""
        self._finished = True
        with self._leave_job:
            self._update_report()
            if self._exchange is not None:
                if failure is not None:
                    with contextlib.suppress(DistckptError):  # others may be gone
                        self._exchange.abandon()
                self._exchange.close()
            self._settle(failure)
            self._update_report()

    def _update_report(self) -> None:
        report, sources = self.report, self._loading.sources
        report.bytes_read = self._measured_bytes + sources.bytes_read
        report.records_checked = sources.records_checked + self._jointly_checked
        report.bytes_received = 0 if self._exchange is None else self._exchange.bytes_received
        report.seconds = time.monotonic() - self._begin

    def _settle(self, failure: BaseException | None) -> None:
        ranks, loading, check_all = self._ranks, self._loading, self._options.verify == "all"
        if ranks is None:
            if failure is not None:
                raise failure
            left = loading.sums.partial
        else:
            left_early = isinstance(failure, GeneratorExit)
            try:
                ranks.raise_any(
                    DistckptError("its caller stopped before all tensors were taken") if left_early else failure
                )
            except DistckptError:
                if left_early and failure is not None:
                    raise failure from None
                raise
            self._jointly_checked, left = check_jointly(loading, ranks)
            if check_all:
                left = ranks.broadcast(left)[ranks.rank :: ranks.world]
        if check_all:
            self._run_on_all(lambda: check_whole(loading, left))
            left = []
        self.report.records_unchecked = len(left)
