"""One load of one rank, alone or with the other ranks of its job: what `converters.loading.loader` is made of."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from converters.errors import DistckptError, IntegrityError, RequestError
from converters.events import Note, PlanReady
from converters.loading.moving import Loading
from converters.names import fold, printable
from converters.optimizer.proof import prove_masters
from converters.reading.gather import Gatherer
from converters.reading.joint_sums import joined

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from converters.dtypes import DType
    from converters.events import Listener, StopFlag
    from converters.formats.base import Reader
    from converters.loading.exchange import Exchange
    from converters.loading.job_ranks import JobRanks
    from converters.loading.plan import LoadPlan
    from converters.reading.device import Device

    Broadcast = bool | Literal["auto"]

_Made = TypeVar("_Made")

__all__ = ["LoadOptions", "LoadReport", "LoadRun"]

MIB = 1 << 20


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
    """How to load; see `converters.loading.loader.load`."""

    broadcast: Broadcast
    stream: bool
    verify: str
    max_memory: int
    threads: int | None
    timeout: float
    listener: Listener | None
    stop: StopFlag | None
    ahead: int | None


class LoadRun:
    """One load."""

    def __init__(self, options: LoadOptions, report: LoadReport) -> None:
        self.options, self.report = options, report
        self.names: list[str] = []
        self._begin = time.monotonic()
        self._ranks: JobRanks | None = None
        self._exchange: Exchange | None = None
        self._counted = self._joint = 0

    def tensors(
        self,
        prepare: Callable[[], tuple[Reader, LoadPlan, Device]],
        *,
        together: bool,
        asked: Mapping[str, tuple[str, str]] | None = None,
    ) -> Iterator[tuple[str, Any]]:
        """Nothing, when all is prepared, and all ranks are `asked` for the same; then every tensor."""
        with contextlib.ExitStack() as stack:
            if together:
                from converters.loading.job_ranks import job

                self._ranks = stack.enter_context(job(self.options.timeout))
            reader, plan, device = self._together(prepare, asked)
            self.names = [*plan.wanted, *plan.empty]
            self._choose(plan, reader, device)
            threads = self._together(lambda: self._room(plan, device))
            loading = self._loading(plan, reader, device, threads)
            self._tell(plan)
            yield from self._read(plan, reader, loading)

    def _together(self, step: Callable[[], _Made], asked: Mapping[str, tuple[str, str]] | None = None) -> _Made:
        """Does something that may fail, on all ranks; if one fails, all do."""
        if self._ranks is None:
            return step()
        failure = None
        try:
            made = step()
        except Exception as error:  # noqa: BLE001 - raised again below, here and on all ranks
            failure = error
        self._ranks.agree(failure, asked)
        return made  # where there was a failure, `agree` has raised

    # ------------------------------------------------------------------ before anything is read

    def _choose(self, plan: LoadPlan, reader: Reader, device: Device) -> None:
        """Decides whether what ranks share is exchanged."""
        report, broadcast = self.report, self.options.broadcast
        report.nbytes, report.bytes_needed, report.notes = plan.nbytes, plan.bytes_needed, list(plan.notes)
        if self._ranks is None:
            report.reason = "this process loads alone"
            return
        if not any(self._ranks.gathered(bool(plan.groups))):
            report.reason = "no two ranks need the same bytes"
            return
        report.exchange = "read by every rank"
        if broadcast is False:
            report.reason = "broadcast=False"
            return
        from converters.loading.exchange import Exchange

        exchange = Exchange(self._ranks, plan, device)
        report.reason = "broadcast=True"
        chosen = True
        if broadcast == "auto":
            choice = exchange.measure(plan, reader)
            chosen, report.reason = choice.exchange, choice.reason
            report.bytes_read += choice.bytes_read
        if chosen:
            report.exchange, self._exchange = exchange.backend, exchange

    def _room(self, plan: LoadPlan, device: Device) -> int:
        """How many threads read, after making sure that everything fits.

        Raises:
            RequestError: It does not, on the device or within `max_memory`.
        """
        options = self.options
        tile = plan.largest
        each = device.slots * device.buffer(tile) + tile  # the slots, and a scratch that the gatherer may need
        fit = options.max_memory // each
        if not fit:
            raise RequestError(
                f"max_memory of {options.max_memory:,} bytes is too small: a thread needs {each:,} bytes"
            )
        threads = max(1, min(options.threads or min(8, os.cpu_count() or 1), fit))
        exchange = self._exchange.memory if self._exchange else 0
        on_device = plan.nbytes + (exchange if device.unified or (self._exchange and self._exchange.on_device) else 0)
        if options.stream:
            largest = max((wanted.nbytes for wanted in plan.wanted.values()), default=0)
            on_device -= plan.nbytes - min(plan.nbytes, max(largest, options.ahead or 0))
        on_device += threads * each if device.unified else threads * tile * device.slots
        room = device.room()
        if device.unified and self._ranks is not None:  # all ranks of a machine look at the same memory
            room //= max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        if on_device > room:
            raise RequestError(
                f"{device.name} has {room / MIB:,.0f} MiB free, rank {self.report.rank} needs {on_device / MIB:,.0f} MiB",
                details=[f"{plan.nbytes:,} bytes of tensors, {on_device - plan.nbytes:,} bytes of buffers"],
                hint="a larger tp or pp makes each rank's part smaller"
                + (
                    ", optimizer=False leaves masters and moments out"
                    if any(n.startswith("optimizer.") for n in plan.wanted)
                    else ""
                ),
            )
        return threads

    def _loading(self, plan: LoadPlan, reader: Reader, device: Device, threads: int) -> Loading:
        owned = self._owned(plan)
        return Loading(
            plan,
            reader,
            device,
            threads=threads,
            shared=self._exchange.shared() if self._exchange else (),
            joint=lambda fetch: fetch.key in owned,
            ahead=self.options.ahead,
            keep_cache=self._ranks is not None and self._exchange is None,
            listener=self.options.listener,
            stop=self.options.stop,
        )

    def _owned(self, plan: LoadPlan) -> set[Any]:
        """Keys of the fetches that count for this rank when the job's checksums are put together."""
        shared = {fetch.key: members for members, fetches in plan.groups.items() for fetch in fetches}
        mine = {fetch.key for fetch in plan.fetches if fetch.key not in shared}
        if self._exchange is not None:
            return mine | self._exchange.owned()
        return mine | {key for key, members in shared.items() if members[0] == self.report.rank}

    def _tell(self, plan: LoadPlan) -> None:
        listener, report = self.options.listener, self.report
        if listener is None:
            return
        listener(PlanReady("load", 0, plan.bytes_needed, plan.bytes_needed, self.options.max_memory))
        for note in report.notes:
            listener(Note(note))
        if self._ranks is not None:
            listener(
                Note(
                    f"what ranks share is {report.exchange}: {report.reason}"
                    if report.exchange != "none"
                    else report.reason
                )
            )

    # ------------------------------------------------------------------ reading

    def _read(self, plan: LoadPlan, reader: Reader, loading: Loading) -> Iterator[tuple[str, Any]]:
        """Nothing, once; then every tensor. Whatever happens, no thread is left and the other ranks know of it."""
        failure: BaseException | None = None
        kept: dict[str, Any] = {}  # the caller has them, too
        watched = {name for pair in plan.doubt for name in pair} if not self.options.stream else set()
        try:
            yield "", None
            if self.options.stream and plan.doubt:
                prove_masters(reader, plan.sources)
            with loading:
                for name, tensor in self._arriving(loading):
                    if name in watched:
                        kept[name] = tensor
                    yield name, tensor
            for name in plan.empty:
                yield name, None
            _compare(plan, kept)
        except BaseException as error:  # noqa: BLE001 - raised below, when the other ranks know
            failure = error
        self._count(loading)
        if failure is not None and self._exchange is not None:
            with contextlib.suppress(DistckptError):  # others may be gone
                self._exchange.finish(loading, failure)
        self._settle(loading, failure)
        self._count(loading)

    def _arriving(self, loading: Loading) -> Iterator[tuple[str, Any]]:
        exchange = self._exchange
        while exchange is not None and loading.failure is None and exchange.step(loading):
            yield from loading.ready()
        yield from loading.complete()

    def _count(self, loading: Loading) -> None:
        report = self.report
        report.bytes_read += loading.sources.bytes_read - self._counted
        self._counted = loading.sources.bytes_read
        report.records_checked = loading.sources.records_checked + self._joint
        report.bytes_received = self._exchange.bytes_received if self._exchange else 0
        report.seconds = time.monotonic() - self._begin

    def _settle(self, loading: Loading, failure: BaseException | None) -> None:
        """Checks what no rank has read whole, and makes one failure everybody's."""
        if self._exchange is not None:
            self._exchange.close()
        if self._ranks is None:
            if failure is not None:
                raise failure
            left = loading.sums.partial
        else:
            said: BaseException | None = failure
            if isinstance(failure, GeneratorExit):
                said = DistckptError("its caller stopped before all tensors were taken")
            try:
                self._ranks.agree(said)
            except DistckptError:
                if isinstance(failure, GeneratorExit):
                    raise failure from None
                raise
            left = self._put_together(loading, self._ranks)
        if self.options.verify == "all":
            self._together(lambda: self._check_rest(loading, left))
            left = []
        self.report.records_unchecked = len(left)

    def _put_together(self, loading: Loading, ranks: JobRanks) -> list[int]:
        """Compares the records that the ranks of the job have read together; returns those of which a part is missing,
        on rank 0, or with verify="all" this rank's share of them.

        Raises:
            IntegrityError: A record does not match its checksum; on all ranks.
        """
        gatherer = Gatherer(loading.sources)
        try:
            located = [(record, gatherer.payload(record)) for record in sorted(loading.sums.joint)]
        finally:
            gatherer.close()
        rows = [(r, *loading.sums.joint[r], p.crc_nbytes, p.crc) for r, p in located if p.crc is not None]
        parts = ranks.collected((rows, loading.sums.whole_records))
        found: dict[int, tuple[int, int, int, int | None]] = {}
        for rank_rows, _ in parts:
            for record, nbytes, value, total, crc in rank_rows:
                n, before, _, _ = found.get(record, (0, 0, total, crc))
                found[record] = n + nbytes, before ^ value, total, crc
        for _, whole in parts:  # somebody has read all of it and compared
            for record in whole:
                found.pop(record, None)
        complete = {r: (joined(value, total), crc) for r, (n, value, total, crc) in found.items() if n == total}
        damaged = [record for record, (computed, crc) in complete.items() if computed != crc]
        left = [record for record in found if record not in complete]
        self._joint = len(complete)
        damaged = ranks.told(damaged)
        if damaged:
            raise _damaged(loading, damaged)
        if self.options.verify == "all":
            return ranks.told(left)[ranks.rank :: ranks.world]
        return left

    def _check_rest(self, loading: Loading, records: list[int]) -> None:
        """Reads records from beginning to end for their checksums alone."""
        gatherer = Gatherer(loading.sources)
        try:
            for record in records:
                payload = gatherer.payload(record)
                loading.sums.forget(record)
                loading.sums.count(alone=True, joint=False)
                if payload.crc is not None:
                    gatherer.read_through(record, payload, 0, payload.crc_nbytes)
                    loading.sources.check(record, payload)
        finally:
            gatherer.close()


def _damaged(loading: Loading, records: list[int]) -> IntegrityError:
    """The error for records that do not match their checksums, by the tensors they belong to."""
    reader = loading.sources.reader
    files = sorted({reader.files[reader.file_of(record)].name for record in records})
    names = [
        name
        for name, info in reader.catalog.tensors.items()
        if any(set(part.array.records[part.rows()].tolist()) & set(records) for part in info.parts)
    ]
    return IntegrityError(
        f"{printable(files[0])} is damaged: {len(records)} of the records that the ranks read together "
        f"{'does' if len(records) == 1 else 'do'} not match the checksum stored with it",
        details=[printable(text) for text, _ in fold(names)][:8],
        hint="restore this file from a copy, or use another iteration",
        tensor=names[0] if names else None,
    )


def _compare(plan: LoadPlan, state: Mapping[str, Any]) -> None:
    """Master weights round to the weights, where only that tells whose they are.

    Raises:
        IntegrityError: They do not.
    """
    wrong = []
    for master, weight in plan.doubt:
        if master in state and weight in state and plan.wanted[weight].dtype == _stored(plan, weight):
            have, want = state[master].to(state[weight].dtype), state[weight]
            if not bool(((have == want) | (have.isnan() & want.isnan())).all()):
                wrong.append(weight)
    if wrong:
        raise IntegrityError(
            f"master weights of the optimizer do not round to the weights: {len(wrong)} do not match",
            details=[printable(text) for text, _ in fold(wrong)][:12],
            hint="load without optimizer=True, or start from another iteration",
            tensor=wrong[0],
        )


def _stored(plan: LoadPlan, name: str) -> DType:
    fetch = next(f for f in plan.fetches if any(landing.target == name for landing in f.landings))
    return plan.sources[fetch.source].dtype
