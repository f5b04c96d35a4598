"""Everything about a load that happens before the first tensor is read, alone or with the other ranks of the job.

prepared = prepare(make, options, rank, in_job=True)    # all that can fail before a byte is read fails here
for name, tensor in prepared.tensors():                 # reads, exchanges, checks
    ...
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING, Any

from converters.errors import RequestError
from converters.events import Note, PlanReady
from converters.io.memory import default_threads, workers_and_memory
from converters.loading.moving import Loading
from converters.loading.run import LoadReport, Prepared, together
from converters.remote.address import RemotePath

if TYPE_CHECKING:
    from collections.abc import Callable

    from converters.io.device import Device
    from converters.loading.exchange import Exchange
    from converters.loading.job_ranks import JobRanks
    from converters.loading.plan import LoadPlan
    from converters.loading.run import LoadOptions, LoadRequest

MIB = 1 << 20


def prepare(
    make: Callable[[JobRanks | None], LoadRequest], options: LoadOptions, rank: int = 0, *, in_job: bool = False
) -> Prepared:
    """Everything before the first tensor is read.

    Args:
        make: Opens and plans, given the ranks of the job; may fail.
        options: The options of the load.
        rank: Whose tensors they are.
        in_job: With the other ranks of the job: where one fails, all do.

    Raises:
        DistckptError: It cannot be done, here or on another rank.
    """
    begin, report = time.monotonic(), LoadReport(rank)
    with contextlib.ExitStack() as stack:
        ranks = None
        if in_job:
            from converters.loading.job_ranks import job, refuse_differences

            ranks = stack.enter_context(job(options.timeout, options.stop))
        request = together(ranks, lambda: make(ranks))
        plan = request.plan
        report.nbytes, report.bytes_needed, report.notes = plan.nbytes, plan.bytes_needed, list(plan.notes)
        if ranks is not None:
            refuse_differences(ranks.gathered(request.alike))
        exchange = _choose_exchange(request, options, report, ranks)
        loading = together(ranks, lambda: _make_loading(request, options, rank, ranks, exchange))
        _announce(plan, options, report, _budget(options, request.device), in_job=in_job)
        return Prepared(request, options, report, ranks, exchange, loading, begin, stack.pop_all())


def _choose_exchange(
    request: LoadRequest, options: LoadOptions, report: LoadReport, ranks: JobRanks | None
) -> Exchange | None:
    """Decides whether what ranks share is exchanged."""
    if ranks is None:
        report.reason = "this process loads alone"
        return None
    if not any(ranks.gathered(bool(request.plan.groups))):
        report.reason = "no two ranks need the same bytes"
        return None
    report.exchange = "read by every rank"
    if options.broadcast is False:
        report.reason = "broadcast=False"
        return None
    from converters.loading.exchange import Exchange

    exchange = Exchange(ranks, request.plan, request.device)
    report.reason = "broadcast=True"
    if options.broadcast == "auto":
        choice = exchange.measure(request.plan, request.reader)
        report.reason = choice.reason
        report.bytes_read += choice.bytes_read
        if not choice.exchange:
            return None
    report.exchange = exchange.backend
    return exchange


def _budget(options: LoadOptions, device: Device) -> int:
    """Bytes of host memory for buffers."""
    return device.budget if options.max_memory is None else options.max_memory


def _count_threads(
    request: LoadRequest, options: LoadOptions, rank: int, ranks: JobRanks | None, exchange: Exchange | None
) -> int:
    """How many threads read, after making sure that everything fits.

    Raises:
        RequestError: It does not, on the device or within `max_memory`.
    """
    plan, device, source = request.plan, request.device, request.reader.catalog.path
    tile, budget = plan.largest, _budget(options, device)
    each = device.slots * device.buffer(tile) + tile  # the slots, and a scratch that the gatherer may need
    fit = budget // each
    if not fit:
        raise RequestError(f"max_memory of {budget:,} bytes is too small: a thread needs {each:,} bytes")
    # all ranks of a machine look at the same cores and, without a GPU, at the same memory
    neighbours = max(1 if ranks is None else ranks.neighbours, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
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
    if device.unified and ranks is not None:
        room //= neighbours
    if on_device > room:
        hint = "a larger tp or pp makes each rank's part smaller"
        if any(name.startswith("optimizer.") for name in plan.pieces):
            hint += ", optimizer=False leaves masters and moments out"
        raise RequestError(
            f"{device.name} has {room / MIB:,.0f} MiB free, rank {rank} needs {on_device / MIB:,.0f} MiB",
            details=[f"{plan.nbytes:,} bytes of tensors, {on_device - plan.nbytes:,} bytes of buffers"],
            hint=hint,
        )
    return threads


def _make_loading(
    request: LoadRequest, options: LoadOptions, rank: int, ranks: JobRanks | None, exchange: Exchange | None
) -> Loading:
    """The threads, not begun yet; the buffers of the exchange exist, too, before anything is read."""
    plan, device = request.plan, request.device
    threads = _count_threads(request, options, rank, ranks, exchange)
    if exchange is not None:
        exchange.allocate()
    owned = _owned_fetches(plan, rank, exchange)
    return Loading(
        plan,
        request.reader,
        device,
        threads=threads,
        shared=exchange.shared() if exchange is not None else (),
        joint=lambda fetch: fetch.key in owned,
        ahead=options.ahead,
        keep_cache=ranks is not None and exchange is None,
        listener=options.listener,
        stop=options.stop,
    )


def _owned_fetches(plan: LoadPlan, rank: int, exchange: Exchange | None) -> set[Any]:
    """Keys of the fetches that count for this rank when the job's checksums are put together."""
    shared = {fetch.key: members for members, fetches in plan.groups.items() for fetch in fetches}
    own = {fetch.key for fetch in plan.fetches if fetch.key not in shared}
    if exchange is not None:
        return own | exchange.owned()
    return own | {key for key, members in shared.items() if members[0] == rank}


def _announce(plan: LoadPlan, options: LoadOptions, report: LoadReport, budget: int, *, in_job: bool) -> None:
    if options.listener is None:
        return
    options.listener(PlanReady("load", 0, plan.bytes_needed, plan.bytes_needed, budget))
    for note in report.notes:
        options.listener(Note(note))
    if in_job:
        text = f"what ranks share is {report.exchange}: {report.reason}"
        options.listener(Note(text if report.exchange != "none" else report.reason))
