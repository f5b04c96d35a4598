"""How one tensor is divided among the ranks of a job. No I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from converters.box import Box

if TYPE_CHECKING:
    from collections.abc import Sequence

    from converters.layout import Layout

__all__ = ["Outline", "Shard", "Split", "holders", "local_shape", "padded_vocab", "shards", "split_rule"]


@dataclass(frozen=True, slots=True)
class Split:
    """How a parameter is divided.

    Attributes:
        axis: Axis divided over tensor parallelism; None if every tensor-parallel rank holds all of it.
        gated: First projection of an MLP: when the model is gated, its rows are gate then up, each divided alone.
        vocab: Its rows are the padded vocabulary.
        expert: Number of the expert it belongs to (divided over ep, and over etp in place of tp); None if dense.
    """

    axis: int | None
    gated: bool = False
    vocab: bool = False
    expert: int | None = None


@dataclass(frozen=True, slots=True)
class Shard:
    """Elements of a tensor that the ranks with some model-parallel coordinates hold.

    Attributes:
        box: In the coordinates of the whole tensor.
        local: The same elements in the coordinates of the tensor those ranks have in memory.
        tp: Their tensor-parallel rank, that of the expert grid for an expert; None: every one holds it.
        ep: Their expert-parallel rank; None for what does not belong to an expert (then `tp` is of the dense grid).
    """

    box: Box
    local: Box
    tp: int | None
    ep: int | None = None


@dataclass(frozen=True, slots=True)
class Outline:
    """What of a model decides where its tensors live.

    Attributes:
        num_layers: Decoder layers.
        mtp_layers: Multi-token-prediction layers.
        num_experts: Routed experts of a layer; None for a dense model.
        gated: MLPs have a gate.
        tied: The output layer uses the embedding's weight.
    """

    num_layers: int
    mtp_layers: int = 0
    num_experts: int | None = None
    gated: bool = False
    tied: bool = False


def split_rule(name: str) -> Split:
    """How the parameter of a canonical name (without `optimizer.state.*`) is divided.

    Raises:
        RequestError: The name is not one of Megatron-Core's.
    """
    raise NotImplementedError


def shards(name: str, shape: Sequence[int], layout: Layout, outline: Outline) -> list[Shard]:
    """The boxes that the model-parallel ranks of a job hold; together they tile the tensor exactly.

    A gated projection has two for each rank, gate and up, in this order; what is replicated has one.

    Raises:
        RequestError: It cannot be divided so.
    """
    raise NotImplementedError


def local_shape(name: str, shape: Sequence[int], layout: Layout, outline: Outline) -> tuple[int, ...]:
    """Shape of the part that one rank has in memory."""
    raise NotImplementedError


def holders(name: str, shard: Shard, layout: Layout, outline: Outline) -> list[int]:
    """Every rank that holds a shard; the first is the one that saves it without a fully parallel save."""
    raise NotImplementedError


def padded_vocab(rows: int, make_divisible_by: int, tp: int) -> int:
    """Rows of the embedding: the vocabulary rounded up to a multiple of `make_divisible_by * tp`."""
    multiple = make_divisible_by * tp
    return -(-rows // multiple) * multiple
