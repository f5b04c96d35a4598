"""Moves the bytes of a load: threads read fetches onto a device, tensors come out as they are complete.

    loading = Loading(plan, reader, device, threads=4)
    with loading:
        for name, tensor in loading.complete():
            ...

A fetch goes straight into its tensor where its elements lie there in one piece and nothing happens to them; otherwise
through a buffer on the device, where it is cast, transposed and scattered. `ahead` bounds the bytes of tensors that are
begun and not taken yet.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from converters.box import Box, runs
from converters.errors import Interrupted
from converters.events import Moved
from converters.io.cast import apply
from converters.io.gather import Gatherer
from converters.io.joint_sums import JointSums
from converters.io.sources import Sources
from converters.planning.plan import Op

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    import torch
    from numpy.typing import NDArray

    from converters.events import Listener, StopFlag
    from converters.formats.base import Reader
    from converters.io.device import Device, Lane
    from converters.loading.exchange import Buffer
    from converters.loading.plan import CopyTo, LoadPlan, ReadItem

    Task = Callable[[Gatherer, Lane], None]


@dataclass
class _Allocated:
    """A tensor with memory, in the shape that landings refer to.

    Attributes:
        tensor: The memory.
        mark: When it may be written to.
        left: Fetches that have yet to land in it.
    """

    tensor: torch.Tensor
    mark: Any
    left: int


class Loading:
    """The threads of one load, and what they share. A context manager: none of them outlives it.

    Args:
        plan: What is read and where it goes.
        reader: The checkpoint.
        device: Where tensors go.
        threads: Number of threads.
        shared: Fetches that are not these threads' own: they are read as `read` says, and come back to `scatter`.
        joint: Whether the checksum of a fetch counts for the whole job.
        ahead: Bytes of tensors begun and not yet taken, above which no thread begins another while there is one to be
            taken; None for no limit.
        keep_cache: Leave what is read in the page cache.
        listener: Told about progress.
        stop: Polled between fetches.

    Attributes:
        sources: What was read, and which records were checked.
        failure: The first thing that went wrong in a thread.
    """

    def __init__(
        self,
        plan: LoadPlan,
        reader: Reader,
        device: Device,
        *,
        threads: int,
        shared: Collection[ReadItem] = (),
        joint: Callable[[ReadItem], bool] = lambda fetch: True,
        ahead: int | None = None,
        keep_cache: bool = False,
        listener: Listener | None = None,
        stop: StopFlag | None = None,
    ) -> None:
        self.plan, self.device = plan, device
        self.sums = JointSums()
        self.sources = Sources(reader, plan.sources, sums=self.sums, drop=not keep_cache)
        self.failure: BaseException | None = None
        self._joint, self._ahead, self._listener, self._stop = joint, ahead, listener, stop
        self._left = Counter(landing.target for fetch in plan.fetches for landing in fetch.landings)
        self._allocated: dict[str, _Allocated] = {}
        # what nothing stored fills is ready from the beginning
        self._ready: deque[str] = deque(name for name in plan.pieces if name not in self._left)
        self._untaken, self._handed_over = 0, 0
        elsewhere = {fetch.key for fetch in shared}
        self._own = deque(fetch for fetch in plan.fetches if fetch.key not in elsewhere)
        self._urgent: deque[Task] = deque()
        self._silent = {fetch.key for fetch in self._own if not fetch.landings}  # no tensor waits for them
        self._lock = threading.Condition()
        self._closed = False
        self._lane: Lane | None = None  # of the thread that calls `scatter`
        self._threads = [threading.Thread(target=self._work, name=f"load-{n}", daemon=True) for n in range(threads)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._closed = True
            self._lock.notify_all()
        for thread in self._threads:
            thread.join()
        if self._lane is not None:
            self._lane.close()

    # ------------------------------------------------------------------ the caller's thread

    def complete(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor, as soon as it is complete.

        Raises:
            BaseException: What went wrong in a thread.
        """
        while self._unfinished():
            self._wait(lambda: bool(self._ready) or not self._unfinished())
            yield from self.ready()

    def _wait(self, come: Callable[[], bool]) -> None:
        """Waits for something that threads do; raises what went wrong in one."""
        with self._lock:
            while self.failure is None and not come():
                if self._stop is not None and self._stop.is_set():
                    raise Interrupted(self._stop.signum or 2, "stopped before everything was loaded")
                self._lock.wait(0.5)
        if self.failure is not None:
            raise self.failure

    def ready(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that are complete by now and were not given yet."""
        while True:
            with self._lock:
                if not self._ready:
                    return
                name = self._ready.popleft()
            begun = self._allocate(name)
            with self._lock:
                del self._allocated[name]
                self._untaken -= self.plan.pieces[name].nbytes
                self._handed_over += 1
                self._lock.notify_all()
            tensor = begun.tensor.view(self.plan.pieces[name].shape)
            del begun
            yield name, tensor
            del tensor

    def read(self, buffers: Sequence[Buffer], *, on_device: bool) -> Callable[[], None]:
        """Has threads fill buffers before they go on with their own fetches.

        Args:
            on_device: The buffers are the device's memory, not the host's.

        Returns:
            Waits until all are filled, and raises what went wrong in a thread.
        """
        left, mark = {buffer.fetch.key for buffer in buffers}, self.device.mark()

        def task(buffer: Buffer) -> Task:
            fetch, memory = buffer

            def filled() -> None:
                with self._lock:
                    left.discard(fetch.key)
                    self._lock.notify_all()

            def fill(gatherer: Gatherer, lane: Lane) -> None:
                read = self._reading(gatherer, fetch)
                if on_device:
                    lane.run(read, fetch.nbytes, into=memory, done=filled, after=[mark])
                else:
                    read(memory.numpy())
                    filled()

            return fill

        with self._lock:
            self._urgent += [task(buffer) for buffer in buffers]
            self._lock.notify_all()
        return lambda: self._wait(lambda: not left)

    def scatter(self, buffers: Sequence[Buffer], *, on_device: bool) -> None:
        """Takes the bytes of filled buffers to the tensors that they are for; returns when all of it is done."""
        if on_device or self.device.unified:
            for fetch, memory in buffers:
                tensors = [self._allocate(landing.target).tensor for landing in fetch.landings]
                self.device.do(functools.partial(self._scatter_fetch, fetch, memory, tensors))
            self.device.wait()
            for fetch, _ in buffers:
                self._landed(fetch)
            return
        if self._lane is None:
            self._lane = self.device.lane(self.plan.largest)
        for fetch, memory in buffers:
            self._move_fetch(self._lane, fetch, functools.partial(np.copyto, src=memory.numpy()))
        self._lane.flush()

    # ------------------------------------------------------------------ from bytes to tensors

    def _landed(self, fetch: ReadItem) -> None:
        """Notes that a fetch is where it goes."""
        with self._lock:
            for landing in fetch.landings:
                begun = self._allocated[landing.target]
                begun.left -= 1
                if not begun.left:
                    self._ready.append(landing.target)
            self._silent.discard(fetch.key)
            self._lock.notify_all()
        if self._listener is not None:
            self._listener(Moved(fetch.nbytes))

    def _reading(self, gatherer: Gatherer, fetch: ReadItem) -> Callable[[NDArray[np.uint8]], None]:
        """What fills host memory with the bytes of a fetch, for `Lane.run`."""

        def read(into: NDArray[np.uint8]) -> None:
            self.sums.count(alone=not fetch.again, joint=not fetch.again and self._joint(fetch))
            gatherer.gather(fetch.source, fetch.box, into)

        return read

    def _move_fetch(self, lane: Lane, fetch: ReadItem, read: Callable[[NDArray[np.uint8]], None]) -> None:
        """Takes the bytes of a fetch from `read` to where they go."""
        begun = [self._allocate(landing.target) for landing in fetch.landings]
        marks = [one.mark for one in begun if one.mark is not None]
        straight = self._direct_memory(fetch) if fetch.landings else None

        def done() -> None:
            self._landed(fetch)

        if straight is not None:
            lane.run(read, fetch.nbytes, into=straight, done=done, after=marks)
        else:
            tensors = [one.tensor for one in begun]
            lane.run(
                read,
                fetch.nbytes,
                put=lambda memory: self._scatter_fetch(fetch, memory, tensors),
                done=done,
                after=marks,
            )

    def _fail(self, error: BaseException) -> None:
        """Notes that something went wrong; threads end after their fetch."""
        with self._lock:
            if self.failure is None:
                self.failure = error
            self._lock.notify_all()

    # ------------------------------------------------------------------ threads

    def _work(self) -> None:
        try:
            self.device.enter()
            gatherer = Gatherer(self.sources)
            lane = self.device.lane(self.plan.largest)
            try:
                while (task := self._next_task(lane)) is not None:
                    task(gatherer, lane)
                lane.flush()
            finally:
                lane.close()
                gatherer.close()
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
            self._fail(error)

    def _next_task(self, lane: Lane) -> Task | None:
        """The next thing to do; waits while there may be one. None: there will be none."""
        for patient in (False, True):
            with self._lock:
                while True:
                    if self._closed or self.failure is not None:
                        return None
                    if self._urgent:
                        return self._urgent.popleft()
                    if self._own and self._may_begin(self._own[0]):
                        fetch = self._own.popleft()
                        for landing in fetch.landings:  # now, so that the next thread sees how much is begun
                            self._allocate(landing.target)
                        return lambda gatherer, lane: self._move_fetch(lane, fetch, self._reading(gatherer, fetch))
                    if not patient:
                        break
                    self._lock.wait(0.5)
            lane.flush()  # what is under way may be what others wait for
        return None

    def _may_begin(self, fetch: ReadItem) -> bool:
        if self._ahead is None or not self._ready:  # no tensor can be taken: go on in any order of fetches
            return True
        fresh = sum(self.plan.pieces[x.target].nbytes for x in fetch.landings if x.target not in self._allocated)
        return not fresh or self._untaken + fresh <= self._ahead

    def _unfinished(self) -> bool:
        return self._handed_over < len(self.plan.pieces) or bool(self._silent)

    def _allocate(self, name: str) -> _Allocated:
        """The memory of a tensor; the first that asks allocates it."""
        with self._lock:
            begun = self._allocated.get(name)
            if begun is None:
                piece = self.plan.pieces[name]
                tensor = self.device.empty(piece.dtype.name, piece.laid)
                fills = piece.fills if name in self._left else [Box.whole(piece.laid)]
                if fills:
                    self.device.do(lambda: _zero(tensor, fills))
                begun = self._allocated[name] = _Allocated(tensor, self.device.mark(), self._left[name])
                self._untaken += piece.nbytes
            return begun

    def _direct_memory(self, fetch: ReadItem) -> torch.Tensor | None:
        """The bytes of the tensor that a fetch fills, if it fills them as they are read."""
        import torch

        landing, *more = fetch.landings
        piece = self.plan.pieces[landing.target]
        if more or landing.op is not Op.COPY or piece.dtype != self.plan.sources[fetch.source].dtype:
            return None
        first, length, outer = runs(landing.box, piece.laid)
        if outer:
            return None
        flat = self._allocated[landing.target].tensor.reshape(-1)[first : first + length]
        return flat.view(torch.uint8)

    def _scatter_fetch(self, fetch: ReadItem, memory: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        """Casts, transposes and scatters the bytes of a fetch into a tensor for each landing, on the device they are on."""
        import torch

        dtype = getattr(torch, self.plan.sources[fetch.source].dtype.name)
        values = memory[: fetch.nbytes].view(dtype).view(fetch.box.shape)
        for landing, tensor in zip(fetch.landings, tensors, strict=True):
            _land(values, landing, tensor)


def _zero(tensor: torch.Tensor, boxes: Sequence[Box]) -> None:
    for box in boxes:
        tensor[box.slices].zero_()


def _land(values: torch.Tensor, landing: CopyTo, tensor: torch.Tensor) -> None:
    """`tensor[box] = op(values)`, as the engine that writes files does it."""
    if landing.op is Op.TRANSPOSE:
        values = values.T
    out = tensor[landing.box.slices]
    apply(values.reshape(out.shape), out, landing.op)
