"""Moves the bytes of a load: threads read items onto a device, tensors come out as they are complete.

    with Loading(plan, reader, device, threads=4) as loading:
        for name, tensor in loading.tensors():
            ...

An item goes straight into its tensor where its elements lie there in one piece and nothing happens to them; otherwise
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
    from collections.abc import Callable, Iterator, Sequence

    import torch
    from numpy.typing import NDArray

    from converters.events import Listener, StopFlag
    from converters.formats.base import Reader
    from converters.io.device import Device, Lane
    from converters.loading.exchange import Buffer, Exchange
    from converters.loading.plan import LoadPlan, ReadItem
    from converters.planning.plan import Copy

    Action = Callable[[Gatherer, Lane], None]


@dataclass
class _Allocated:
    """A tensor with memory, in the shape that a `Copy` refers to.

    Attributes:
        tensor: The memory.
        mark: When it may be written to.
        missing: Items that have yet to be copied into it.
    """

    tensor: torch.Tensor
    mark: Any
    missing: int


class Loading:
    """The threads of one load, and what they share. A context manager: none of them outlives it.

    Args:
        plan: What is read and where it goes.
        reader: The checkpoint.
        device: Where tensors go.
        threads: Number of threads.
        exchange: Reads the items that ranks share together with the others; None: these threads read all of them.
        joint: Whether the checksum of an item counts for the whole job.
        ahead: Bytes of tensors begun and not yet taken, above which no thread begins another while there is one to be
            taken; None for no limit.
        keep_cache: Leave what is read in the page cache.
        listener: Told about progress.
        stop: Polled between items.

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
        exchange: Exchange | None = None,
        joint: Callable[[ReadItem], bool] = lambda item: True,
        ahead: int | None = None,
        keep_cache: bool = False,
        listener: Listener | None = None,
        stop: StopFlag | None = None,
    ) -> None:
        self.plan, self.device, self._exchange = plan, device, exchange
        self._on_device = exchange is not None and exchange.on_device  # whether its buffers are
        self.sums = JointSums()
        self.sources = Sources(reader, plan.sources, sums=self.sums, drop=not keep_cache)
        self.failure: BaseException | None = None
        self._joint, self._ahead, self._listener, self._stop = joint, ahead, listener, stop
        self._missing = Counter(copy.target for item in plan.read_items for copy in item.copies)
        self._allocated: dict[str, _Allocated] = {}
        # what nothing stored fills is ready from the beginning
        self._ready: deque[str] = deque(name for name in plan.pieces if name not in self._missing)
        self._untaken_bytes, self._taken = 0, 0
        shared = {item.key for item in exchange.shared()} if exchange else ()
        self._unshared_items = deque(item for item in plan.read_items if item.key not in shared)
        self._urgent: deque[Action] = deque()
        self._for_checksums = {item.key for item in self._unshared_items if not item.copies}  # no tensor waits for them
        self._lock = threading.Condition()
        self._closed = False
        self._lane: Lane | None = None  # of the caller's thread
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

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor, as soon as it is complete.

        Raises:
            BaseException: What went wrong in a thread.
        """
        exchange = self._exchange
        if exchange is not None:
            wait = self._read_shared(exchange.own_reads(0))
            for number in range(len(exchange)):
                wait_next = self._read_shared(exchange.own_reads(number + 1))
                wait()
                self._scatter(exchange.gather())
                yield from self._complete()
                wait = wait_next
        while self._unfinished():
            self._wait(lambda: bool(self._ready) or not self._unfinished())
            yield from self._complete()

    def _wait(self, come: Callable[[], bool]) -> None:
        """Waits for something that threads do; raises what went wrong in one."""
        with self._lock:
            while self.failure is None and not come():
                if self._stop is not None and self._stop.is_set():
                    raise Interrupted(self._stop.signum or 2, "stopped before everything was loaded")
                self._lock.wait(0.5)
        if self.failure is not None:
            raise self.failure

    def _complete(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that are complete by now and were not given yet."""
        while True:
            with self._lock:
                if not self._ready:
                    return
                name = self._ready.popleft()
            allocated = self._allocate(name)
            with self._lock:
                del self._allocated[name]
                self._untaken_bytes -= self.plan.pieces[name].nbytes
                self._taken += 1
                self._lock.notify_all()
            tensor = allocated.tensor.view(self.plan.pieces[name].shape)
            del allocated
            yield name, tensor
            del tensor

    def _read_shared(self, buffers: Sequence[Buffer]) -> Callable[[], None]:
        """Has threads fill buffers before they go on with their own items.

        Returns:
            Waits until all are filled, and raises what went wrong in a thread.
        """
        unread, mark = {buffer.item.key for buffer in buffers}, self.device.mark()

        def fill_action(buffer: Buffer) -> Action:
            item, memory = buffer

            def filled() -> None:
                with self._lock:
                    unread.discard(item.key)
                    self._lock.notify_all()

            def fill(gatherer: Gatherer, lane: Lane) -> None:
                read = self._reading(gatherer, item)
                if self._on_device:
                    lane.run(read, item.nbytes, into=memory, done=filled, after=[mark])
                else:
                    read(memory.numpy())
                    filled()

            return fill

        with self._lock:
            self._urgent += [fill_action(buffer) for buffer in buffers]
            self._lock.notify_all()
        return lambda: self._wait(lambda: not unread)

    def _scatter(self, buffers: Sequence[Buffer]) -> None:
        """Takes the bytes of filled buffers to the tensors that they are for; returns when all of it is done."""
        if self._on_device or self.device.unified:
            for item, memory in buffers:
                tensors = [self._allocate(copy.target).tensor for copy in item.copies]
                self.device.do(functools.partial(self._scatter_item, item, memory, tensors))
            self.device.wait()
            for item, _ in buffers:
                self._arrived(item)
            return
        if self._lane is None:
            self._lane = self.device.lane(self.plan.largest)
        for item, memory in buffers:
            self._move_item(self._lane, item, functools.partial(np.copyto, src=memory.numpy()))
        self._lane.flush()

    # ------------------------------------------------------------------ from bytes to tensors

    def _arrived(self, item: ReadItem) -> None:
        """Notes that an item is where it goes."""
        with self._lock:
            for copy in item.copies:
                allocated = self._allocated[copy.target]
                allocated.missing -= 1
                if not allocated.missing:
                    self._ready.append(copy.target)
            self._for_checksums.discard(item.key)
            self._lock.notify_all()
        if self._listener is not None:
            self._listener(Moved(item.nbytes))

    def _reading(self, gatherer: Gatherer, item: ReadItem) -> Callable[[NDArray[np.uint8]], None]:
        """What fills host memory with the bytes of an item, for `Lane.run`."""

        def read(into: NDArray[np.uint8]) -> None:
            self.sums.count(alone=not item.again, joint=not item.again and self._joint(item))
            gatherer.gather(item.source, item.box, into)

        return read

    def _move_item(self, lane: Lane, item: ReadItem, read: Callable[[NDArray[np.uint8]], None]) -> None:
        """Takes the bytes of an item from `read` to where they go."""
        allocated = [self._allocate(copy.target) for copy in item.copies]
        marks = [target.mark for target in allocated if target.mark is not None]
        memory, done = self._direct_memory(item), functools.partial(self._arrived, item)
        if memory is not None:
            lane.run(read, item.nbytes, into=memory, done=done, after=marks)
            return
        tensors = [target.tensor for target in allocated]
        put = functools.partial(self._scatter_item, item, tensors=tensors)
        lane.run(read, item.nbytes, put=put, done=done, after=marks)

    def _fail(self, error: BaseException) -> None:
        """Notes that something went wrong; threads end after their item."""
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
                while (action := self._next_action(lane)) is not None:
                    action(gatherer, lane)
                lane.flush()
            finally:
                lane.close()
                gatherer.close()
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
            self._fail(error)

    def _next_action(self, lane: Lane) -> Action | None:
        """The next thing to do; waits while there may be one. None: there will be none."""
        for patient in (False, True):
            with self._lock:
                while True:
                    if self._closed or self.failure is not None:
                        return None
                    if self._urgent:
                        return self._urgent.popleft()
                    if self._unshared_items and self._may_begin(self._unshared_items[0]):
                        item = self._unshared_items.popleft()
                        for copy in item.copies:  # now, so that the next thread sees how much is allocated
                            self._allocate(copy.target)
                        return lambda gatherer, lane: self._move_item(lane, item, self._reading(gatherer, item))
                    if not patient:
                        break
                    self._lock.wait(0.5)
            lane.flush()  # what is under way may be what others wait for
        return None

    def _may_begin(self, item: ReadItem) -> bool:
        if self._ahead is None or not self._ready:  # no tensor can be taken: go on in any order of items
            return True
        fresh = sum(self.plan.pieces[x.target].nbytes for x in item.copies if x.target not in self._allocated)
        return not fresh or self._untaken_bytes + fresh <= self._ahead

    def _unfinished(self) -> bool:
        return self._taken < len(self.plan.pieces) or bool(self._for_checksums)

    def _allocate(self, name: str) -> _Allocated:
        """The memory of a tensor; the first that asks allocates it."""
        with self._lock:
            allocated = self._allocated.get(name)
            if allocated is None:
                piece = self.plan.pieces[name]
                tensor = self.device.empty(piece.dtype.name, piece.laid)
                fills = piece.fills if name in self._missing else [Box.whole(piece.laid)]
                if fills:
                    self.device.do(lambda: _zero(tensor, fills))
                allocated = self._allocated[name] = _Allocated(tensor, self.device.mark(), self._missing[name])
                self._untaken_bytes += piece.nbytes
            return allocated

    def _direct_memory(self, item: ReadItem) -> torch.Tensor | None:
        """The bytes of the tensor that an item fills, if it fills them as they are read."""
        import torch

        if len(item.copies) != 1:
            return None
        (copy,) = item.copies
        piece = self.plan.pieces[copy.target]
        if copy.op is not Op.COPY or piece.dtype != self.plan.sources[item.source].dtype:
            return None
        first, length, outer = runs(copy.target_box, piece.laid)
        if outer:
            return None
        flat = self._allocated[copy.target].tensor.reshape(-1)[first : first + length]
        return flat.view(torch.uint8)

    def _scatter_item(self, item: ReadItem, memory: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        """Casts, transposes and scatters the bytes of an item into a tensor for each copy, on the device they are on."""
        import torch

        dtype = getattr(torch, self.plan.sources[item.source].dtype.name)
        values = memory[: item.nbytes].view(dtype).view(item.box.shape)
        for copy, tensor in zip(item.copies, tensors, strict=True):
            _copy_into(values, copy, tensor)


def _zero(tensor: torch.Tensor, boxes: Sequence[Box]) -> None:
    for box in boxes:
        tensor[box.slices].zero_()


def _copy_into(values: torch.Tensor, copy: Copy, tensor: torch.Tensor) -> None:
    """`tensor[target_box] = op(values)`, as the engine that writes files does it."""
    if copy.op is Op.TRANSPOSE:
        values = values.T
    out = tensor[copy.target_box.slices]
    apply(values.reshape(out.shape), out, copy.op)
