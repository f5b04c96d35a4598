"""What a device behind a stream is made of: pinned memory, streams, events. `Cuda` is one, `Simulated` another for tests."""

from __future__ import annotations

import contextlib
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

from converters.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

__all__ = ["Cuda", "Simulated", "free_memory", "memory_for"]


class Cuda:
    """A GPU's runtime.

    Args:
        index: Number of the device, as `CUDA_VISIBLE_DEVICES` leaves it.
    """

    def __init__(self, index: int) -> None:
        import torch

        self.name, self._device = f"cuda:{index}", torch.device("cuda", index)

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Host memory from which a copy does not wait."""
        import torch

        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def memory(self, nbytes: int) -> torch.Tensor:
        """Bytes on the device."""
        return memory_for("uint8", (nbytes,), self._device)

    def stream(self) -> Any:
        """A queue of work that does not wait for others."""
        import torch

        cuda: Any = torch.cuda
        return cuda.Stream(self._device)

    def event(self) -> Any:
        """A point in a stream; the thread that waits for it does not spin."""
        import torch

        cuda: Any = torch.cuda
        with cuda.device(self._device):
            return cuda.Event(blocking=True)

    def mark(self) -> Any:
        """Where the stream stands on which this thread allocates memory and computes."""
        import torch

        cuda: Any = torch.cuda
        event = cuda.Event()
        event.record(self.current())
        return event

    def current(self) -> Any:
        """The stream on which this thread allocates memory and computes."""
        import torch

        return torch.cuda.current_stream(self._device)

    def follow(self, stream: Any, mark: Any) -> None:
        """What the stream is given from now on begins when the mark has come."""
        stream.wait_event(mark)

    def submit(self, stream: Any, work: Callable[[], None], event: Any) -> None:
        """Enqueues what `work` asks of the device, and the event behind it."""
        import torch

        with torch.cuda.stream(stream):
            work()
            event.record(stream)

    def wait(self) -> None:
        """See `Device`."""
        import torch

        torch.cuda.current_stream(self._device).synchronize()

    def room(self) -> int:
        """What the driver has, and what torch's allocator holds without using it."""
        import torch

        free, _ = torch.cuda.mem_get_info(self._device)
        return int(free + torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device))

    def serial(self) -> str:
        """See `Device`."""
        import torch

        return str(torch.cuda.get_device_properties(self._device).uuid)


class Simulated:
    """A device whose memory is the host's, for a staged lane without a GPU.

    As on a real one, what a stream is given is done later: when an event behind it is waited for. So a slot that is used
    again too early, or a tensor that is handed out before it is finished, has wrong bytes here, too.
    """

    name = "cpu"

    def pinned(self, nbytes: int) -> torch.Tensor:
        """See `Cuda`."""
        return self.memory(nbytes)

    def memory(self, nbytes: int) -> torch.Tensor:
        """See `Cuda`."""
        return memory_for("uint8", (nbytes,), "cpu")

    def stream(self) -> Any:
        """See `Cuda`."""
        work: deque[Callable[[], None]] = deque()
        return work

    def event(self) -> Any:
        """See `Cuda`."""
        return _LateEvent()

    def mark(self) -> Any:
        """See `Cuda`."""
        return None

    def current(self) -> Any:
        """See `Cuda`."""

    def follow(self, stream: Any, mark: Any) -> None:
        """See `Cuda`."""

    def submit(self, stream: Any, work: Callable[[], None], event: Any) -> None:
        """See `Cuda`."""
        stream.append(work)
        event.stream, event.left = stream, stream[-1]

    def wait(self) -> None:
        """See `Device`."""

    def room(self) -> int:
        """See `Device`."""
        return free_memory()

    def serial(self) -> str:
        """See `Device`."""
        return "simulated"


class _LateEvent:
    """Comes when the last work before it is done, which whoever waits for it does."""

    stream: deque[Callable[[], None]]
    left: Callable[[], None] | None = None

    def synchronize(self) -> None:
        while self.left is not None and self.left in self.stream:
            self.stream.popleft()()


def memory_for(dtype: str, shape: Sequence[int], device: Any) -> torch.Tensor:
    """Memory for a tensor, not filled.

    Raises:
        RequestError: There is none left.
    """
    import torch

    try:
        return torch.empty(tuple(shape), dtype=getattr(torch, dtype), device=device)
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not isinstance(error, torch.OutOfMemoryError | MemoryError) and "alloc" not in str(error):
            raise
        raise RequestError(f"{device} is out of memory: {tuple(shape)} elements of {dtype} do not fit") from error


def free_memory() -> int:
    """What the kernel can still give this process: of the machine, and of its control group if that has a limit."""
    free = 1 << 62
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = 1024 * int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1])
    with contextlib.suppress(OSError, ValueError, IndexError, StopIteration):
        own = Path("/proc/self/cgroup").read_text().splitlines()[0].rpartition("::/")[2]
        folder = Path("/sys/fs/cgroup") / own
        limit = int((folder / "memory.max").read_text())  # "max" is no number: no limit
        cached = next(line for line in (folder / "memory.stat").read_text().splitlines() if line.startswith("file "))
        free = min(free, limit - int((folder / "memory.current").read_text()) + int(cached.split()[1]))
    return free
