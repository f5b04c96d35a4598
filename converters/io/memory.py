"""Available memory and cores, and the errors when memory runs out."""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from converters.errors import RequestError
from converters.remote.address import RemotePath

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

MIB = 1 << 20
_REQUESTS_AT_ONCE = 32


def memory_for(dtype: str, shape: Sequence[int], device: Any, *, pin_memory: bool = False) -> torch.Tensor:
    """Memory for a tensor, not filled.

    Raises:
        RequestError: There is none left.
    """
    import torch

    request = f"{tuple(shape)} elements of {dtype} do not fit"
    with memory_errors("there is no more pinned memory" if pin_memory else str(device), request):
        return torch.empty(tuple(shape), dtype=getattr(torch, dtype), device=device, pin_memory=pin_memory)


@contextlib.contextmanager
def memory_errors(where: str, request: str = "") -> Iterator[None]:
    """Says in our words that memory has run out. torch has a type for a GPU's, and only texts for the host's."""
    import torch

    try:
        yield
    except (MemoryError, RuntimeError) as error:
        typed = isinstance(error, torch.OutOfMemoryError | MemoryError)
        if not typed and not any(text in str(error) for text in ("out of memory", "allocate memory")):
            raise
        text = where if " " in where else f"{where} is out of memory"
        text += f": {request or str(error).partition(chr(10))[0]}" if request or str(error) else ""
        raise RequestError(text, hint="fewer threads or a smaller max_memory need less") from error


def default_threads(most: int = 8, ranks: int = 1) -> int:
    """How many threads read and write: one for each core, at least 4. One that waits for a disk needs no core.

    Args:
        most: Not more than these.
        ranks: Processes that share the cores.
    """
    return min(most, max(4, cores() // ranks))


def workers_and_memory(threads: int | None, max_memory: int | None, *sources: Path) -> tuple[int, int]:
    """How many threads read and write, and bytes of their buffers, where a person did not say so.

    From disks one for each core, 4 to 8, and 64 MiB: one that waits for a disk needs no core. From an object store as many
    as keep a fast link busy whose answers begin after 100 ms: 32 requests, and 512 MiB for what they bring.
    """
    distant = any(isinstance(source, RemotePath) for source in sources)
    usual = _REQUESTS_AT_ONCE if distant else default_threads()
    return (usual if threads is None else threads, (512 if distant else 64) * MIB if max_memory is None else max_memory)


def cores() -> int:
    """How many cores this process may keep busy: of the machine, by its affinity, and by its control group's quota."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        quota, period = (_control_group() / "cpu.max").read_text().split()
        count = min(count, max(1, math.ceil(int(quota) / int(period))))  # "max" is no number: no limit
    return count


def free_memory() -> int:
    """What the kernel can still give this process: of the machine, and of its control group if that has a limit."""
    free = 1 << 62
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = 1024 * int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1])
    with contextlib.suppress(OSError, ValueError, IndexError, StopIteration):
        folder = _control_group()
        limit = int((folder / "memory.max").read_text())  # "max" is no number: no limit
        cached = next(line for line in (folder / "memory.stat").read_text().splitlines() if line.startswith("file "))
        free = min(free, limit - int((folder / "memory.current").read_text()) + int(cached.split()[1]))
    return free


def _control_group() -> Path:
    """Where the kernel shows this process's limits (control groups, version 2)."""
    return Path("/sys/fs/cgroup") / Path("/proc/self/cgroup").read_text().splitlines()[0].rpartition("::/")[2]
