"""Matrices quantized in square blocks: FP8 (E4M3), each block with the scale that makes its largest element 448.

scale   = 448 / largest |w| of the block           1 for a block of zeros
code    = e4m3(w * scale)                          to nearest even
stored  = code, 1 / scale                          "weight_scale_inv": what a reader multiplies by

All in fp32, as transformers has it (integrations/finegrained_fp8.py, `Fp8Quantize`), to the last bit. Where 448 / largest is
more than fp32 holds (a block of numbers below 1.4e-36) its factor is 0; here the largest number of fp32 is the scale.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from converters.errors import RequestError
from converters.planning.plan import SCALE_BLOCK

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from converters.dtypes import DType

_LARGEST = 448.0  # of E4M3
_STRIP = 8  # blocks that are looked at together: a mebibyte of fp64, in the processor's cache


@dataclass(frozen=True, slots=True)
class Loss:
    """What quantizing a tensor, or some of its blocks, has changed; exact, so that it does not depend on an order.

    Attributes:
        largest: The largest |reader's number - weight|, both in fp32.
        error: Sum of the squares of these differences.
        norm: Sum of the squares of the weights.
    """

    largest: float = 0.0
    error: Fraction = Fraction(0)
    norm: Fraction = Fraction(0)

    def __add__(self, other: Loss) -> Loss:
        """Of both."""
        return Loss(max(self.largest, other.largest), self.error + other.error, self.norm + other.norm)

    @property
    def relative(self) -> float:
        """Length of the differences, by that of the weights."""
        return math.sqrt(self.error / self.norm) if self.norm else 0.0

    def to_json(self) -> list[Any]:
        """As a journal has it."""
        return [self.largest, str(self.error), str(self.norm)]

    @classmethod
    def from_json(cls, numbers: list[Any]) -> Loss:
        """What `to_json` gave."""
        largest, error, norm = numbers
        return cls(float(largest), Fraction(error), Fraction(norm))


def quantized(bits: NDArray[Any], kind: DType, name: str, codes: NDArray[np.uint8]) -> tuple[NDArray[np.uint32], Loss]:
    """Quantizes whole blocks of a matrix.

    Args:
        bits: (rows, columns) its elements, as integers; both are multiples of 128.
        kind: Their type: bf16, fp16 or fp32.
        name: The tensor, for errors.
        codes: (rows, columns) is filled with the bits of the result.

    Returns:
        (rows / 128, columns / 128) bits of the fp32 factors, and what was lost.

    Raises:
        RequestError: An element is infinite or not a number.
    """
    import torch

    signed = bits.view(np.dtype(f"i{bits.itemsize}"))
    values = torch.from_numpy(signed).view(getattr(torch, kind.name))
    result = torch.from_numpy(codes)
    rows, columns = (size // SCALE_BLOCK for size in bits.shape)
    factors = torch.empty((rows, columns), dtype=torch.float32)
    loss = Loss()
    for row in range(rows):
        for column in range(0, columns, _STRIP):
            count = min(_STRIP, columns - column)
            inside = (
                slice(row * SCALE_BLOCK, (row + 1) * SCALE_BLOCK),
                slice(column * SCALE_BLOCK, (column + count) * SCALE_BLOCK),
            )
            blocks = _blocks_of(values[inside], count).float()
            largest = blocks.abs().amax(1)
            if not bool(torch.isfinite(largest).all()):
                raise RequestError(
                    f"{name} has infinite or NaN elements: blocks of FP8 cannot hold them",
                    hint="export it without --quantize; distckpt verify --values says where they are",
                    tensor=name,
                )
            scale = torch.where(largest > 0, _LARGEST / torch.where(largest > 0, largest, 1.0), 1.0)
            scale.clamp_(max=torch.finfo(torch.float32).max)
            inverse = 1.0 / scale
            small = (blocks * scale[:, None]).clamp_(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)
            result[inside].view(SCALE_BLOCK, count, SCALE_BLOCK).copy_(
                small.view(torch.uint8).view(count, SCALE_BLOCK, SCALE_BLOCK).transpose(0, 1)
            )
            factors[row, column : column + count] = inverse
            loss += _loss(blocks, small.float().mul_(inverse[:, None]))
    return factors.numpy().view(np.uint32), loss


def _blocks_of(strip: torch.Tensor, count: int) -> torch.Tensor:
    """A row of blocks as (blocks, elements of a block)."""
    return strip.view(SCALE_BLOCK, count, SCALE_BLOCK).transpose(0, 1).reshape(count, SCALE_BLOCK**2)


def _loss(weights: torch.Tensor, read: torch.Tensor) -> Loss:
    """Of some blocks: the sum of a block is a tree, those of blocks are added as what they are."""
    gaps = read.sub_(weights)
    return Loss(float(gaps.abs().max()), _squares(gaps), _squares(weights))


def _squares(blocks: torch.Tensor) -> Fraction:
    sums = blocks.double().square_()
    while (half := sums.shape[1] // 2) > 0:
        sums = sums[:, :half] + sums[:, half:]
    return sum((Fraction(value) for value in sums[:, 0].tolist()), Fraction(0))
