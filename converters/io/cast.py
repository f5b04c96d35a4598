"""Casts and shifts of elements, by torch, on the host or on a GPU, with the same bits on both.

The rounding is torch's, which is the one training used; norms are shifted in fp32. A NaN becomes the quiet NaN of its
type: what its bits would be differs between instruction sets, between CPU and GPU, and even with the place in a vector.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from converters.errors import RequestError
from converters.io.arithmetic import UNSIGNED
from converters.io.device import Staged
from converters.io.platforms import find_device, gpu_of
from converters.planning.plan import Op

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch
    from numpy.typing import NDArray

    from converters.dtypes import DType

    Bytes = NDArray[np.uint8]

# what torch takes from numpy without a copy
_SIGNED: dict[int, np.dtype[Any]] = UNSIGNED | {n: np.dtype(f"i{n}") for n in (1, 2, 4, 8)}
_BLOCK = 1 << 16  # elements looked at in one go, so that what is compared needs little memory
_BESIDE = 4  # what a device holds of an element: as it came, in fp32, as it goes, and whether it is a NaN
_MASKS = {"bfloat16": (0x7F80, 0x7FFF), "float32": (0x7F800000, 0x7FFFFFFF)}  # exponent; all but the sign
_QUIET = ("float64", "float32", "float16", "bfloat16")


def apply(values: torch.Tensor, out: torch.Tensor, op: Op = Op.COPY) -> None:
    """`out[...] = op(values)`, both on one device.

    Args:
        values: The elements, transposed already if they are to be.
        out: Of the same shape; its type is that of the result.
        op: What happens beside the cast.
    """
    import torch

    changed = out.dtype != values.dtype or op in (Op.ADD_ONE, Op.SUBTRACT_ONE)
    if not changed and out.dtype.itemsize <= 8:  # integers have kernels for every device, and no NaN
        bits = (torch.uint8, torch.int16, torch.int32, torch.int64)[out.dtype.itemsize.bit_length() - 1]
        values, out = values.view(bits), out.view(bits)
    if op is Op.ADD_ONE:
        values = values.float() + 1
    elif op is Op.SUBTRACT_ONE:
        values = values.float() - 1
    out.copy_(values)
    if changed and str(out.dtype).removeprefix("torch.") in _QUIET:
        _quieten(out)


def _quieten(out: torch.Tensor) -> None:
    at_once = out.is_cuda or not out.is_contiguous()
    flat, block_size = (out, out.numel() or 1) if at_once else (out.view(-1), _BLOCK)
    for at in range(0, flat.shape[0] if flat.dim() else 0, block_size):
        block = flat[at : at + block_size]
        nans = block != block
        if out.is_cuda or nans.any():  # asking a GPU would make this thread wait for it
            block.masked_fill_(nans, float("nan"))


LARGEST = {"float16": "65,504", "bfloat16": "3.39e38"}
"""The largest number of the types that a cast may overflow."""


def lost_in_cast(elements: NDArray[Any], source: DType, result: NDArray[Any], target: DType) -> tuple[int, int]:
    """How many finite numbers have become infinite in fp16 or bf16, and how many have become zero in fp16.

    Args:
        elements: The bits that were cast, of bf16 or fp32; those of other types are not looked at.
        source: Their type.
        result: The bits that they became, in the same shape.
        target: Their type; none but fp16 and bf16 loses anything.
    """
    if source.name not in _MASKS or target.name not in LARGEST or source.name == target.name:
        return 0, 0
    infinity, narrow = _MASKS["bfloat16"][0] if target.name == "bfloat16" else 0x7C00, target.name == "float16"
    too_large, too_small = 0, 0
    exponent, magnitude = _MASKS[source.name]
    for before, after in _blocks(elements, result):
        infinite = (after & 0x7FFF) == infinity
        if infinite.any():
            too_large += int(np.count_nonzero(infinite & ((before & exponent) != exponent)))
        if narrow and (zero := (after & 0x7FFF) == 0).any():
            too_small += int(np.count_nonzero(zero & ((before & magnitude) != 0)))
    return too_large, too_small


def _blocks(*arrays: NDArray[Any]) -> Iterator[tuple[NDArray[Any], ...]]:
    """The same elements of arrays of one shape, so many at a time; not copied unless they are strided."""
    with np.nditer(arrays, ["buffered", "external_loop", "zerosize_ok"], buffersize=_BLOCK) as blocks:
        yield from blocks


class Caster:
    """Changes elements for one thread, which makes it.

    Args:
        device: `cpu` or `cuda:N`.
    """

    def __init__(self, device: str = "cpu") -> None:
        self._device = find_device(device)
        self._device.enter()
        if isinstance(self._device, Staged):  # a stream of its own, so that what threads copy and compute overlaps
            self._stream, self._event = self._device.stream(), self._device.event()

    def cast(self, values: NDArray[Any], source: DType, target: DType, op: Op, result: Bytes) -> NDArray[Any]:
        """Elements as they are at their target.

        Args:
            values: As unsigned integers of their size, strided as they are.
            source: Their type.
            target: The type they get.
            op: What else happens.
            result: Where they go, `values.size * target.itemsize` bytes.

        Returns:
            `result`, as unsigned integers in the shape of `values`.
        """
        import torch

        if values.size:
            elements = torch.from_numpy(values.view(_SIGNED[source.itemsize])).view(getattr(torch, source.name))
            out = torch.frombuffer(result.data, dtype=getattr(torch, target.name)).reshape(values.shape)
            if isinstance(self._device, Staged):
                self._cast_on(self._device, elements, out, op, (source, target))
            else:
                apply(elements, out, op)
        converted: NDArray[Any] = result.view(UNSIGNED[target.itemsize]).reshape(values.shape)
        return converted

    def _cast_on(
        self, device: Staged, elements: torch.Tensor, out: torch.Tensor, op: Op, kinds: tuple[DType, DType]
    ) -> None:
        device_in, device_out = (device.empty(kind.name, elements.shape) for kind in kinds)

        def work() -> None:
            device_in.copy_(elements, non_blocking=True)
            apply(device_in, device_out, op)
            out.copy_(device_out, non_blocking=True)

        device.submit(self._stream, work, self._event, after=[device.mark()])
        self._event.synchronize()


def pinned(device: str) -> Callable[[int], Bytes] | None:
    """What allocates buffers that a device copies without a detour; None where ordinary memory is as good."""
    staged = find_device(device)
    return (lambda nbytes: staged.pinned(nbytes).numpy()) if isinstance(staged, Staged) else None


def choose_device(requested: str, *, computes: bool, local_rank: int = 0, buffers: int = 0) -> tuple[str, str | None]:
    """Where elements are changed, and a sentence about it if a person should know.

    Args:
        requested: `cpu`, `cuda`, `cuda:N`, or `auto`: a GPU if there is one and it has something to do.
        computes: Some elements change their type or value; moving bytes from file to file needs no GPU.
        local_rank: Number of this process on its machine, which has the GPU of that number.
        buffers: Bytes of host memory for what is changed at a time; a device needs a few times as much.

    Raises:
        RequestError: There is no such device, or too little memory on it.
    """
    option = requested
    if requested == "cpu":
        return "cpu", None
    if requested == "auto":
        gpu = gpu_of(local_rank) if computes else None
        if gpu is None:
            return "cpu", None
        requested = gpu
    device = find_device(requested, local_rank)
    if not computes or device.unified:
        return "cpu", f"--device {option} has no effect: no element is cast"
    room, needed = device.room(), _BESIDE * buffers
    if needed > room:
        numbers = f"{device.name} has {room >> 20:,} MiB free, {needed >> 20:,} MiB are needed"
        if option == "auto":
            return "cpu", f"{numbers}: elements are cast on the cpu"
        raise RequestError(numbers, hint="a smaller --max-memory needs less, --device cpu nothing of it")
    return device.name, f"elements are cast on {device.name}"
