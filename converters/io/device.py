"""Loads tensors onto a device: read into host memory, copied to the device, cast there.

A lane belongs to one thread that reads. The host's reads straight into the tensor where its elements lie in one piece:

    host     pread ------------------------------------------------> tensor      (or: pread -> buffer -> op -> tensor)
    staged   pread -> pinned slot 0 --copy on the lane's stream--> device slot 0 --op, same stream--> tensor
             pread -> pinned slot 1 ...    while slot 0 is on its way; a slot is used again when its event has come

Nothing here knows what a tensor is for. Memory of a lane is `slots * tile` on the host and as much on the device. The
staged lane is the same code on every platform, so all but the CUDA calls is exercised without a GPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from converters.io.memory import free_memory, memory_for

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    import torch
    from numpy.typing import NDArray

    Read = Callable[[NDArray[np.uint8]], None]
    Put = Callable[[torch.Tensor], None]
    Done = Callable[[], None]

MIB = 1 << 20
_SLOTS = 2  # one is read into while the other is on its way and worked on: reading takes longer


class Lane:
    """The way of one thread's bytes onto a device: here, into this machine's memory."""

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None

    def run(
        self,
        read: Read,
        nbytes: int,
        *,
        into: torch.Tensor | None = None,
        put: Put | None = None,
        done: Done,
        after: Sequence[Any] = (),
    ) -> None:
        """Takes bytes to the device; returns when `read` has been called, the rest may still be under way.

        Args:
            read: Fills as many bytes of host memory.
            nbytes: How many.
            into: Where they go, contiguous bytes on the device; None for memory of the lane.
            put: Called with the bytes on the device, to enqueue what is done to them there.
            done: Called, in this thread, when all of it is finished.
            after: Marks of `Device.mark` that must have come before the device's memory is written to.
        """
        import torch

        if into is None:
            if self._buffer is None or self._buffer.numel() < nbytes:
                self._buffer = torch.empty(nbytes, dtype=torch.uint8)
            into = self._buffer[:nbytes]
        read(into.numpy())
        if put is not None:
            put(into)
        done()

    def flush(self) -> None:
        """Waits until everything is finished, and calls what is to be called then."""

    def close(self) -> None:
        """Waits until nothing is under way any more; calls nothing."""
        self._buffer = None


class Device:
    """Where tensors go: this machine's memory, unless a subclass says otherwise.

    Attributes:
        name: As torch spells it: `cpu`, `cuda:0`.
        slots: Tiles of host memory that a lane holds.
        unified: Host memory is the device's: bytes need not be taken there.
        budget: Bytes of host memory for buffers where nobody says how many.
        threads: So many read at most where nobody says how many.
    """

    name = "cpu"
    slots = 1
    unified = True
    budget = 64 * MIB
    threads = 8

    def enter(self) -> None:
        """Called first in each thread of the library that uses the device."""

    def lane(self, tile_bytes: int) -> Lane:
        """A lane for tiles of at most so many bytes; called in the thread that will use it."""
        return Lane()

    def empty(self, dtype: str, shape: Sequence[int]) -> torch.Tensor:
        """Memory for a tensor, in C order, not filled.

        Raises:
            RequestError: There is none left.
        """
        return memory_for(dtype, shape, "cpu")

    def do(self, work: Callable[[], None]) -> None:
        """Asks the device to do something beside the lanes; it does such things in the order in which they are asked."""
        work()

    def mark(self) -> Any:
        """A point in what was asked with `do`, for `run(after=...)` of a lane."""
        return None

    def wait(self) -> None:
        """Returns when what was asked with `do` is done."""

    def buffer(self, nbytes: int) -> int:
        """Bytes of host memory that a slot of so many bytes takes."""
        return nbytes

    def room(self) -> int:
        """Bytes that can still be allocated, about."""
        return free_memory()

    def serial(self) -> str:
        """What tells it from other devices of its machine, however processes number them; empty for the host."""
        return ""


@dataclass
class _Slot:
    """A tile on its way. `done` is what is left to call when `event` has come; None: the slot is free."""

    pinned: torch.Tensor
    memory: torch.Tensor | None
    event: Any
    done: Done | None = None


class Staged(Device, ABC):
    """A device that is reached through pinned memory, by streams: `converters.io.platforms.Cuda`.

    All that is computed outside of lanes is asked of one stream, the home stream: the one that was the caller's when the
    device was found. So it is in order without waiting, the caller may go on with what it gets, and memory goes back to
    where the allocator took it from. Lanes wait for marks in it, and the host for events in lanes.
    """

    slots = _SLOTS
    unified = False
    budget = 512 * MIB  # 16 threads and more of two slots and a scratch
    threads = 16

    def lane(self, tile_bytes: int) -> Lane:
        """See `Device`."""
        return _StagedLane(self, tile_bytes)

    def buffer(self, nbytes: int) -> int:
        """See `Device`. torch's allocator takes the next power of two of pinned memory."""
        return 1 << max(0, nbytes - 1).bit_length()

    @abstractmethod
    def pinned(self, nbytes: int) -> torch.Tensor:
        """Host memory from which a copy does not wait.

        Raises:
            RequestError: There is none left.
        """

    @abstractmethod
    def stream(self) -> Any:
        """A queue of work that does not wait for others; it has `synchronize()`."""

    @abstractmethod
    def event(self) -> Any:
        """A point in a stream, for `submit`; it has `synchronize()`, and `query()`: whether it has come."""

    @abstractmethod
    def submit(self, stream: Any, work: Callable[[], None], event: Any, after: Sequence[Any] = ()) -> None:
        """Has a stream do something when marks have come, and the event come behind it."""


class _StagedLane(Lane):
    """A ring of slots on one stream. Work on a slot follows the order of the stream, the host waits for its event only
    before it reads into the slot again."""

    def __init__(self, device: Staged, tile_bytes: int) -> None:
        self._device, self._tile = device, tile_bytes
        self._stream = device.stream()
        self._slots: deque[_Slot] = deque()  # in the order of use

    def run(
        self,
        read: Read,
        nbytes: int,
        *,
        into: torch.Tensor | None = None,
        put: Put | None = None,
        done: Done,
        after: Sequence[Any] = (),
    ) -> None:
        """See `Lane`."""
        if nbytes > self._tile:
            raise ValueError(f"{nbytes} bytes do not fit a slot of {self._tile}")
        slot = self._slot()
        if into is None:
            if slot.memory is None:
                slot.memory = self._device.empty("uint8", (self._tile,))
                # it may have been another's, and the stream that it comes from has yet to finish with it
                after = [*after, self._device.mark()]
            into = slot.memory[:nbytes]
        target = into
        read(slot.pinned[:nbytes].numpy())

        def work() -> None:
            target.copy_(slot.pinned[:nbytes], non_blocking=True)
            if put is not None:
                put(target)

        self._device.submit(self._stream, work, slot.event, after)
        slot.done = done

    def _slot(self) -> _Slot:
        """The slot that was used longest ago, free; made as they are needed: a small load pins no more than it uses."""
        for slot in self._slots:  # what has come is told at once, not when its slot is needed
            if slot.done is not None and slot.event.query():
                self._retire(slot)
        if self._slots and (self._slots[0].done is None or len(self._slots) == _SLOTS):
            slot = self._slots.popleft()
            self._retire(slot)
        else:
            slot = _Slot(self._device.pinned(self._tile), None, self._device.event())
        self._slots.append(slot)
        return slot

    def _retire(self, slot: _Slot) -> None:
        if slot.done is not None:
            slot.event.synchronize()
            done, slot.done = slot.done, None
            done()

    def flush(self) -> None:
        """See `Lane`."""
        for slot in self._slots:
            self._retire(slot)

    def close(self) -> None:
        """See `Lane`."""
        self._stream.synchronize()  # and not an event: work that was begun and failed has none
        self._slots.clear()
