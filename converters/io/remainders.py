"""fp32 master weights of which an optimizer stores only what the bf16 weight lacks.

TransformerEngine's FusedAdam with `store_param_remainders` keeps the lower 16 bits of each master weight, as int16; the
weight is the upper 16 bits, rounded to nearest with ties up (transformer_engine/common/multi_tensor/adam.cu, 2.1 and later):

    master     | hhhhhhhhhhhhhhhh | 0lllllllllllllll |      remainder l >= 0:  weight = h
               | hhhhhhhhhhhhhhhh | 1lllllllllllllll |      remainder l <  0:  weight = h + 1, wrapping around

so master = ((weight - (remainder < 0)) << 16) | (remainder & 0xffff). Every pattern of bits is a possible remainder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from converters.errors import IntegrityError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_LEAST, _LARGEST = -(1 << 15), (1 << 15) - 1


def join_masters(weight: NDArray[Any], remainder: NDArray[Any] | None, into: NDArray[Any], name: str) -> None:
    """Puts master weights together.

    Args:
        weight: Bits of bf16 weights, uint16.
        remainder: Bits of int16 remainders, of the same shape, contiguous; None if `into` holds them as fp32 integers.
        into: Where the bits of the fp32 master weights go, uint32 and contiguous.
        name: The tensor, for the error.

    Raises:
        IntegrityError: What `into` holds are not all remainders.
    """
    if remainder is None:
        remainder = narrowed(into, name)
    halves = into.reshape(-1).view(np.uint16).reshape(*into.shape, 2)  # little-endian, as everything that is stored
    np.right_shift(remainder, 15, out=halves[..., 1])
    np.subtract(weight, halves[..., 1], out=halves[..., 1])
    halves[..., 0] = remainder


def narrowed(bits: NDArray[Any], name: str) -> NDArray[Any]:
    """Remainders that are stored as fp32.

    Args:
        bits: Of fp32 numbers, uint32.
        name: The tensor, for the error.

    Returns:
        The bits of int16, uint16.

    Raises:
        IntegrityError: They are not all remainders.
    """
    values = bits.view(np.float32)
    if not are_remainders(values):
        raise IntegrityError(
            f"{name} holds values that are no remainders, though its optimizer stores remainders of master weights",
            details=[f"remainders are whole numbers from {_LEAST:,} to {_LARGEST:,}"],
            tensor=name,
        )
    return values.astype(np.int16).view(np.uint16)


def are_remainders(values: NDArray[Any]) -> bool:
    """Whether all elements of an fp32 array are whole numbers that an int16 can be."""
    return bool(((values >= _LEAST) & (values <= _LARGEST) & (np.trunc(values) == values)).all())
