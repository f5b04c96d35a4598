"""Looks at tiles of elements, on the host or on a GPU while the next tiles are read.

examiner = Examiner(device, tile_bytes)                # one for each thread
examiner.look([nbytes, ...], gather, examine, done)    # see `converters.io.arithmetic`
examiner.flush()
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from converters.errors import RequestError
from converters.io.arithmetic import BLOCK, OnDevice, OnHost, examined, signed
from converters.io.device import Host
from converters.io.gather import Gatherer
from converters.io.platforms import find_device, gpu_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import torch
    from numpy.typing import NDArray

    from converters.box import Box
    from converters.io.arithmetic import Examine
    from converters.io.device import Device
    from converters.io.questions import Question
    from converters.io.sources import Sources

    Bits = NDArray[Any]
    Bytes = NDArray[np.uint8]
    Gather = Callable[[Sequence[Bytes | None]], Sequence[Bits]]
    Read = Callable[[Gatherer, Bytes | None], Bits]
    Done = Callable[[NDArray[np.float64], Sequence[Bits]], None]

__all__ = ["Examiner", "TileChecker", "looking_device"]

_ALIGNMENT = 64
_FLOATS_BESIDE = 16  # fp64 values that a device keeps for an element while it is looked at
_WORTH = 32 << 30  # bytes for which starting CUDA pays: it takes seconds, in which a few cores look at as much


class Examiner:
    """Looks at tiles for one thread: at once on the host, a few tiles later but in the same order on a device.

    Args:
        device: The device that computes.
        tile_bytes: Of all arrays that are looked at together, at most; each but the last rounded up to 64.
    """

    def __init__(self, device: Device, tile_bytes: int) -> None:
        device.enter()
        self._lane = None if device.unified else device.lane(tile_bytes)
        self._host = OnHost()

    def look(self, sizes: Sequence[int], gather: Gather, examine: Examine, done: Done, *, host: bool = False) -> None:
        """Takes in a tile: elements of one or several arrays, as many of each.

        Args:
            sizes: Bytes of each array.
            gather: Reads them, each into the memory it is given if there is some; gives elements as unsigned integers, in
                C order or not.
            examine: Called with what computes and a part of each array that begins with a block; gives numbers of each
                block.
            done: Called, in this thread, with the rows of all blocks and the arrays; in the order of the tiles.
            host: Do it on the host in any case.
        """
        if self._lane is None or host or not any(sizes):
            self.flush()
            arrays = [np.ascontiguousarray(array) for array in gather([None] * len(sizes))]
            done(examined(self._host, examine, *arrays), arrays)
            return
        begins = np.cumsum([0, *(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes[:-1])]).tolist()
        arrays, rows = [], list[Any]()

        def read(into: Bytes) -> None:
            pieces = [into[at : at + size] for at, size in zip(begins, sizes, strict=False)]
            for piece, bits in zip(pieces, gather(pieces), strict=True):
                array = piece.view(bits.dtype).reshape(bits.shape)
                if not np.may_share_memory(array, bits):
                    np.copyto(array, bits)
                arrays.append(array)

        def put(there: torch.Tensor) -> None:
            flat = [
                there[at : at + size].view(signed(bits.dtype.itemsize))
                for at, size, bits in zip(begins, sizes, arrays, strict=False)
            ]
            whole = flat[0].numel() // BLOCK * BLOCK
            on = OnDevice()
            parts = [[x[:whole].view(-1, BLOCK) for x in flat], [x[whole:].view(1, -1) for x in flat]]
            rows.append(on.xp.cat([_stacked(on, examine(on, *part)) for part in parts if part[0].numel()]))

        self._lane.run(read, begins[-1] + sizes[-1], put=put, done=lambda: done(rows.pop().cpu().numpy(), arrays))

    def flush(self) -> None:
        """Waits until `done` was called for everything."""
        if self._lane is not None:
            self._lane.flush()

    def close(self) -> None:
        """Gives up its memory."""
        if self._lane is not None:
            self._lane.close()


class TileChecker:
    """Asks questions of tensors, one tile after the other: gatherers and examiner of one thread.

    Args:
        sources: What each tensor of a question is read from.
        device: Where elements are looked at; by default the host.
        tile_bytes: Of all arrays of a tile, at most; only a device needs to know.
        moved: Called with the bytes of each tile that was read.
        check: Called before each tile; raises to stop.
    """

    def __init__(
        self,
        sources: Sequence[Sources],
        *,
        device: Device | None = None,
        tile_bytes: int = 0,
        moved: Callable[[int], None] = lambda _: None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._sources, self._moved, self._check = sources, moved, check
        self._gatherers = [Gatherer(each) for each in sources]
        self._examiner = Examiner(device or Host(), tile_bytes)

    def ask(self, question: Question, tiles: Iterable[Box], *names: str) -> None:
        """Asks a question of tensors that have the same coordinates; it is answered after `flush`."""
        kinds = [self._sources[number].tensors[name].dtype for number, name in enumerate(names)]
        for tile in tiles:
            reads = [partial(_gathered, name, tile) for name in names]
            self.ask_tile(question, tile, [tile.volume * kind.itemsize for kind in kinds], reads)

    def ask_tile(self, question: Question, tile: Box, sizes: Sequence[int], reads: Sequence[Read]) -> None:
        """Asks a question of one tile.

        Args:
            question: What is asked.
            tile: Which elements these are.
            sizes: Bytes of each array.
            reads: Reads each with its gatherer, into memory if that is given.
        """
        self._check()

        def gather(into: Sequence[Bytes | None]) -> list[Bits]:
            arrays = [read(g, i) for g, i, read in zip(self._gatherers, into, reads, strict=False)]
            self._moved(sum(array.nbytes for array in arrays))
            return arrays

        self._examiner.look(sizes, gather, question, partial(question.add, tile), host=question.on_host)

    def flush(self) -> None:
        """Waits until all that was asked is answered."""
        self._examiner.flush()

    def close(self) -> None:
        """Closes all files and gives up its memory."""
        self._examiner.close()
        for gatherer in self._gatherers:
            gatherer.close()


def _gathered(name: str, tile: Box, gatherer: Gatherer, into: Bytes | None) -> Bits:
    return gatherer.gather(name, tile, into)


def looking_device(
    requested: str, nbytes: int, *, threads: int, tile_bytes: int, elements: int, local_rank: int = 0
) -> tuple[Device, str | None]:
    """Where elements are looked at, and a sentence about it if a person should know.

    Args:
        requested: `cpu`, `cuda`, `cuda:N`, or `auto`: a GPU if there is one, enough to do, and room on it.
        nbytes: Bytes to look at, of the whole job; 0 if there is nothing to compute.
        threads: Examiners in this process.
        tile_bytes: Of a tile, all arrays together.
        elements: Of one array of a tile, at most.
        local_rank: Number of this process on its machine, which has the GPU of that number.

    Raises:
        RequestError: There is no such device, or too little memory on it; with the numbers.
    """
    name = requested if requested != "auto" else gpu_of(local_rank) if nbytes >= _WORTH else None
    device = find_device(name or "cpu", local_rank)
    if device.unified:
        return device, None
    if not nbytes:
        return Host(), f"--device {requested}: no values are looked at; the device has nothing to do"
    each = device.slots * tile_bytes + _FLOATS_BESIDE * 8 * elements
    room = device.room()
    if threads * each > room:
        numbers = f"{device.name} has {room >> 20:,} MiB free, {threads * each >> 20:,} MiB are needed"
        if requested == "auto":
            return Host(), f"{numbers}: values are looked at on the cpu"
        details = [f"{threads} workers, {each:,} bytes each"]
        raise RequestError(numbers, details=details, hint="fewer --threads need less, --device cpu nothing of it")
    return device, f"values are looked at on {device.name}"


def _stacked(on: OnDevice, numbers: Sequence[Any]) -> Any:
    """Numbers of each block as rows; those that are no tensors are the same for all blocks."""
    torch = on.xp
    like = next(number for number in numbers if isinstance(number, torch.Tensor)).double()
    columns = [n.double() if isinstance(n, torch.Tensor) else torch.full_like(like, float(n)) for n in numbers]
    return torch.stack(columns, dim=1)
