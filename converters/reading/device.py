"""Where loaded tensors go, and the way there: a read into host memory, a copy to the device, what is done to it there.

A `Lane` belongs to one thread that reads. The host's reads straight into the tensor where its elements lie in one piece:

    host     pread ------------------------------------------------> tensor      (or: pread -> buffer -> op -> tensor)
    staged   pread -> pinned slot 0 --copy on the lane's stream--> device slot 0 --op, same stream--> tensor
             pread -> pinned slot 1 ...    while slot 0 is on its way; a slot is used again when its event has come

Nothing here knows what a tensor is for. Memory of a lane is `slots * tile` on the host and as much on the device. The
staged lane is the same code on every platform, so all but the CUDA calls is exercised without a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from converters.errors import RequestError
from converters.reading.platforms import Cuda, free_memory, memory_for

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    import torch
    from numpy.typing import NDArray

    from converters.reading.platforms import Simulated

    Platform = Cuda | Simulated
    Read = Callable[[NDArray[np.uint8]], None]
    Put = Callable[[torch.Tensor], None]
    Done = Callable[[], None]

__all__ = ["Device", "Host", "Lane", "Staged", "find_device", "gpu_of"]

_DRIVERS = ("nvidia[0-9]*", "dxg", "nvhost*", "kfd")  # of Linux, WSL, Jetson, AMD
_SLOTS = 3  # one is read into, one is on its way, one is worked on


class Lane(Protocol):
    """The way of one thread's bytes onto a device."""

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
        ...

    def flush(self) -> None:
        """Waits until everything is finished, and calls what is to be called then."""
        ...

    def close(self) -> None:
        """Waits until nothing is under way any more; calls nothing."""
        ...


class Device(Protocol):
    """Where tensors go.

    Attributes:
        name: As torch spells it: `cpu`, `cuda:0`.
        slots: Tiles of host memory that a lane holds.
        unified: Host memory is the device's: bytes need not be taken there.
    """

    name: str
    slots: int
    unified: bool

    def lane(self, tile_bytes: int) -> Lane:
        """A lane for tiles of at most so many bytes; called in the thread that will use it."""
        ...

    def empty(self, dtype: str, shape: Sequence[int]) -> torch.Tensor:
        """Memory for a tensor, in C order, not filled.

        Raises:
            RequestError: There is none left.
        """
        ...

    def mark(self) -> Any:
        """A point in what the calling thread has asked of the device, for `Lane.run(after=...)`."""
        ...

    def follow(self, mark: Any) -> None:
        """What the calling thread asks of the device from now on begins when a mark has come."""
        ...

    def wait(self) -> None:
        """Returns when the device has done what the calling thread asked of it."""
        ...

    def room(self) -> int:
        """Bytes that can still be allocated, about."""
        ...

    def serial(self) -> str:
        """What tells it from other devices of its machine, however processes number them; empty for the host."""
        ...


class Host:
    """This machine's memory. See `Device`."""

    name = "cpu"
    slots = 1
    unified = True

    def lane(self, tile_bytes: int) -> Lane:
        """See `Device`."""
        return _HostLane()

    def empty(self, dtype: str, shape: Sequence[int]) -> torch.Tensor:
        """See `Device`."""
        return memory_for(dtype, shape, "cpu")

    def mark(self) -> Any:
        """See `Device`."""
        return None

    def follow(self, mark: Any) -> None:
        """See `Device`."""

    def wait(self) -> None:
        """See `Device`."""

    def room(self) -> int:
        """See `Device`."""
        return free_memory()

    def serial(self) -> str:
        """See `Device`."""
        return ""


class _HostLane:
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
        pass

    def close(self) -> None:
        self._buffer = None


@dataclass
class _Slot:
    """A tile on its way. `done` is what is left to call when `event` has come; None: the slot is free."""

    pinned: torch.Tensor
    memory: torch.Tensor | None
    event: Any
    done: Done | None = None


class Staged:
    """A device that is reached through pinned memory. See `Device`.

    Args:
        platform: Its runtime.
    """

    slots = _SLOTS
    unified = False

    def __init__(self, platform: Platform) -> None:
        self.name, self._platform = platform.name, platform

    def lane(self, tile_bytes: int) -> Lane:
        """See `Device`."""
        return _StagedLane(self._platform, tile_bytes)

    def empty(self, dtype: str, shape: Sequence[int]) -> torch.Tensor:
        """See `Device`."""
        return memory_for(dtype, shape, self._platform.memory(0).device)

    def mark(self) -> Any:
        """See `Device`."""
        return self._platform.mark()

    def follow(self, mark: Any) -> None:
        """See `Device`."""
        if mark is not None:
            self._platform.follow(self._platform.current(), mark)

    def wait(self) -> None:
        """See `Device`."""
        self._platform.wait()

    def room(self) -> int:
        """See `Device`."""
        return self._platform.room()

    def serial(self) -> str:
        """See `Device`."""
        return self._platform.serial()


class _StagedLane:
    """A ring of slots on one stream. Work on a slot follows the order of the stream, the host waits for its event only
    before it reads into the slot again."""

    def __init__(self, platform: Platform, tile_bytes: int) -> None:
        self._platform, self._tile = platform, tile_bytes
        self._stream = platform.stream()
        self._slots: list[_Slot] = []
        self._next = 0

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
        if nbytes > self._tile:
            raise ValueError(f"{nbytes} bytes do not fit a slot of {self._tile}")
        slot = self._slot()
        if into is None:
            if slot.memory is None:
                slot.memory = self._platform.memory(self._tile)
                # it may have been another's, and the stream that it comes from has yet to finish with it
                after = [*after, self._platform.mark()]
            into = slot.memory[:nbytes]
        there = into
        read(slot.pinned[:nbytes].numpy())
        for mark in after:
            self._platform.follow(self._stream, mark)

        def work() -> None:
            there.copy_(slot.pinned[:nbytes], non_blocking=True)
            if put is not None:
                put(there)

        self._platform.submit(self._stream, work, slot.event)
        slot.done = done

    def _slot(self) -> _Slot:
        if len(self._slots) < _SLOTS:  # as they are needed: a small load takes no more pinned memory than it uses
            made = _Slot(self._platform.pinned(self._tile), None, self._platform.event())
            self._slots.append(made)
            return made
        slot = self._slots[self._next]
        self._next = (self._next + 1) % _SLOTS
        self._retire(slot)
        return slot

    def _retire(self, slot: _Slot) -> None:
        if slot.done is not None:
            slot.event.synchronize()
            done, slot.done = slot.done, None
            done()

    def flush(self) -> None:
        for slot in self._slots[self._next :] + self._slots[: self._next]:
            self._retire(slot)

    def close(self) -> None:
        for slot in self._slots:
            if slot.done is not None:
                slot.event.synchronize()
        self._slots = []


def gpu_of(local_rank: int) -> str | None:
    """The GPU for a process of this number on its machine, if there is any; torch is not imported where there is none."""
    if not any(next(Path("/dev").glob(pattern), None) for pattern in _DRIVERS):
        return None
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return f"cuda:{local_rank % count}" if count else None


def find_device(name: str, local_rank: int = 0) -> Device:
    """The device of a name: `cpu`, `cuda:1`, or `cuda`, which is the one of this process's number on its machine.

    Raises:
        RequestError: There is no such device here; what there is, is named.
    """
    if name == "cpu":
        return Host()
    kind, _, number = name.partition(":")
    if kind != "cuda" or (number and not number.isdigit()):
        raise RequestError(f"unknown device {name!r}", hint="cpu, cuda or cuda:N")
    import torch

    if not torch.cuda.is_available():
        built = "torch was built without CUDA" if torch.version.cuda is None else "torch finds no usable GPU or driver"
        raise RequestError(f"there is no device {name}: {built}", hint="use the cpu: --device cpu, or device='cpu'")
    count = torch.cuda.device_count()
    # a launcher that shows each process its own GPU alone calls all of them 0
    index = int(number) if number else local_rank if count > 1 else 0
    if index >= count:
        raise RequestError(
            f"there is no device cuda:{index}: this machine has {count}",
            hint="start one process for each GPU, or name a device" if not number else f"cuda:0 to cuda:{count - 1}",
        )
    return Staged(Cuda(index))
