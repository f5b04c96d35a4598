"""The available devices: the host, and the GPUs of torch's CUDA runtime."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from converters.errors import RequestError
from converters.io.device import Device, Staged
from converters.io.memory import memory_errors, memory_for

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
_HOST = "use the cpu: --device cpu, or device='cpu'"
_DRIVERS = ("nvidia[0-9]*", "dxg", "nvhost*", "kfd")  # of Linux, WSL, Jetson, AMD


class Cuda(Staged):
    """A GPU's runtime. What a stream is given to do is called at once and done by the GPU in the order of the stream.

    Args:
        index: Number of the device, as `CUDA_VISIBLE_DEVICES` leaves it.
    """

    def __init__(self, index: int) -> None:
        import torch

        self.name, self._device = f"cuda:{index}", torch.device("cuda", index)
        self._cuda: Any = torch.cuda
        self._home = self._cuda.current_stream(self._device)
        self.room()  # the driver's word on whether this process can use it

    def enter(self) -> None:
        """Called in each thread of the library: new ones stand at device 0, and would take memory on it."""
        self._cuda.set_stream(self._home)

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Host memory from which a copy does not wait; torch's allocator keeps it for the next load.

        Raises:
            RequestError: There is none left.
        """
        return memory_for("uint8", (nbytes,), "cpu", pin_memory=True)

    def empty(self, dtype: str, shape: Sequence[int]) -> torch.Tensor:
        """Memory on the device, of the home stream.

        Raises:
            RequestError: There is none left.
        """
        with self._cuda.stream(self._home):
            return memory_for(dtype, shape, self._device)

    def stream(self) -> Any:
        """A queue of work that does not wait for others."""
        return self._cuda.Stream(self._device)

    def event(self) -> Any:
        """A point in a stream; the thread that waits for it does not spin."""
        return self._cuda.Event(blocking=True)

    def do(self, work: Callable[[], None]) -> None:
        """Has the home stream do something."""
        with self._cuda.stream(self._home), memory_errors(self.name):
            work()

    def mark(self) -> Any:
        """Where the home stream stands."""
        event = self._cuda.Event()
        event.record(self._home)
        return event

    def submit(self, stream: Any, work: Callable[[], None], event: Any, after: Sequence[Any] = ()) -> None:
        """Has a stream do something when marks have come, and the event come behind it."""
        for mark in after:
            stream.wait_event(mark)
        with self._cuda.stream(stream), memory_errors(self.name):
            work()
            event.record(stream)

    def wait(self) -> None:
        """Returns when the home stream has done everything."""
        self._home.synchronize()

    def room(self) -> int:
        """What the driver has, and what torch's allocator holds without using it."""
        free, _ = self._cuda.mem_get_info(self._device)
        return int(free + self._cuda.memory_reserved(self._device) - self._cuda.memory_allocated(self._device))

    def serial(self) -> str:
        """What tells it from other devices of its machine: its place on the bus, which NCCL compares, too.

        Empty for a slice of a GPU (MIG): NCCL takes two slices of one for the same GPU, and refuses.
        """
        return serial_of(self._cuda.get_device_properties(self._device))


def serial_of(properties: Any) -> str:
    """See `Cuda.serial`.

    Args:
        properties: torch's of a GPU: `name`, `uuid`, and since 2.8 `pci_domain_id`, `pci_bus_id` and `pci_device_id`.
    """
    if " MIG " in properties.name:
        return ""
    address = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    return str(properties.uuid) if None in address else ":".join(map(str, address))


def gpu_of(local_rank: int) -> str | None:
    """The GPU for a process of this number on its machine, if there is one that can be used.

    Where there is none, torch is not imported.
    """
    if not any(next(Path("/dev").glob(pattern), None) for pattern in _DRIVERS):
        return None
    try:
        import torch

        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return find_device(f"cuda:{_own_gpu(local_rank) % count}").name if count else None
    except (RequestError, RuntimeError, ImportError, OSError):  # a driver and a torch that do not fit each other
        return None


def _own_gpu(local_rank: int) -> int:
    """The GPU that this process took with `torch.cuda.set_device`, else the one of its number on its machine."""
    import torch

    cuda: Any = torch.cuda
    current: int = cuda.current_device() if cuda.is_initialized() else 0
    return current or local_rank


def find_device(name: str, local_rank: int = 0) -> Device:
    """The device of a name: `cpu`, `cuda:1`, or `cuda`, which is the one of this process.

    That is the one it took with `torch.cuda.set_device`, else the one of its number on its machine.

    Raises:
        RequestError: There is no such device here, what there is, is named; or it cannot be used.
    """
    if name == "cpu":
        return Device()
    kind, colon, number = name.partition(":")
    if kind != "cuda" or (colon and not (number.isascii() and number.isdecimal())):
        raise RequestError(f"unknown device {name!r}", hint="cpu, cuda or cuda:N")
    import torch

    if not torch.cuda.is_available():
        built = "torch was built without CUDA" if torch.version.cuda is None else "torch finds no usable GPU or driver"
        raise RequestError(f"there is no device {name}: {built}", hint=_HOST)
    count = torch.cuda.device_count()
    # a launcher that shows each process its own GPU alone calls all of them 0
    index = int(number) if number else _own_gpu(local_rank) if count > 1 else 0
    if index >= count:
        raise RequestError(
            f"there is no device cuda:{index}: this machine has {count}",
            hint="start one process for each GPU, or name a device" if not number else f"cuda:0 to cuda:{count - 1}",
        )
    try:
        return Cuda(index)
    except RuntimeError as error:
        why = (str(error).splitlines() or [""])[0]
        raise RequestError(f"cuda:{index} cannot be used: {why}", hint=_HOST) from error
