"""Pieces: arrays to be written, filled by copies of boxes of source tensors; the proof that all are covered."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from converters.box import Box, find_overlap, run_starts, runs, uncovered
from converters.errors import RequestError
from converters.names import fold, listed_lines
from converters.words import counted

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from converters.catalog import TensorInfo
    from converters.dtypes import DType

SCALE_BLOCK = 128
"""Rows and columns of a quantized matrix that share a scale."""


class Op(Enum):
    """What may happen to elements on the way. A cast follows from the two element types."""

    COPY = "copy"
    TRANSPOSE = "transpose"  # of a matrix: target[i, j] = source[j, i]
    ADD_ONE = "add one"  # a zero-centred norm weight (gamma - 1) becomes an ordinary one
    SUBTRACT_ONE = "subtract one"
    QUANTIZE = "quantize"  # whole blocks of a matrix, each divided by its scale (io/quantize.py)
    SCALES = "scales"  # one number for each of these blocks

    @property
    def inverse(self) -> Op:
        """The op that undoes this one; of those that quantize there is none."""
        assert self not in (Op.QUANTIZE, Op.SCALES)
        return {Op.ADD_ONE: Op.SUBTRACT_ONE, Op.SUBTRACT_ONE: Op.ADD_ONE}.get(self, self)


@dataclass(frozen=True, slots=True)
class Copy:
    """`target[target_box] = op(source[source_box])`.

    Attributes:
        source: Canonical name of the source tensor.
        source_box: In its coordinates.
        target: Name of the piece.
        target_box: In its coordinates. Both boxes hold the same number of elements, in the same C order (after the op);
            of scales, one for each block of the source's, which begins and ends with a block.
        op: What happens on the way.
    """

    source: str
    source_box: Box
    target: str
    target_box: Box
    op: Op = Op.COPY


@dataclass(frozen=True, slots=True)
class Drop:
    """Source elements that are left out on purpose.

    Attributes:
        source: Canonical name of the source tensor.
        box: The elements; None for the whole tensor.
        reason: Why, as a person would say it: "padding rows of the vocabulary".
    """

    source: str
    box: Box | None
    reason: str


@dataclass(frozen=True, slots=True)
class Target:
    """Name, element type and shape of a tensor of the result.

    Attributes:
        matrix: The shape that copies refer to, if it is not `shape`; the elements lie in C order of both.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    matrix: tuple[int, ...] | None = None

    @property
    def laid(self) -> tuple[int, ...]:
        """The shape that copies refer to."""
        return self.shape if self.matrix is None else self.matrix

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return Box.whole(self.shape).volume * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Piece(Target):
    """An array to be written or loaded, in C order, and what fills it.

    Attributes:
        copies: Boxes of source tensors that fill it.
        fills: Boxes that no source fills: they are zero.
    """

    copies: Sequence[Copy] = ()
    fills: Sequence[Box] = ()

    @classmethod
    def stored(cls, name: str, dtype: DType, shape: tuple[int, ...]) -> Piece:
        """A source tensor as it is, all of it, under its own name."""
        box = Box.whole(shape)
        return cls(name, dtype, shape, copies=(Copy(name, box, name, box),) if box.volume else ())

    @property
    def sources(self) -> list[str]:
        """Names of the tensors that fill it."""
        return list(dict.fromkeys(copy.source for copy in self.copies))

    def zero_bytes(self) -> Iterator[tuple[int, int]]:
        """`(first byte, bytes)` of what no source fills."""
        size = self.dtype.itemsize
        for box in self.fills:
            if box.volume:
                first, length, outer = runs(box, self.laid)
                yield from ((start * size, length * size) for start in run_starts(first, outer))


def end_to_end(pieces: Iterable[tuple[int, Piece]], dtype: DType, numel: int) -> list[Piece]:
    """Pieces that lie one behind the other in a flat array, with the gaps between them.

    Args:
        pieces: Each with its first element in the array, ascending.
        dtype: Element type of the array.
        numel: Elements of the array.

    Raises:
        RequestError: Two overlap, or one reaches beyond the end.
    """
    out: list[Piece] = []
    end = 0
    for first, piece in pieces:
        if first < end:
            raise RequestError(
                f"{piece.name} begins at element {first}, where others reach to {end}", tensor=piece.name
            )
        if first > end:
            out.append(_gap(dtype, first - end))
        out.append(piece)
        end = first + math.prod(piece.shape)
    if end > numel:
        raise RequestError(f"{out[-1].name} ends at element {end} of {numel}", tensor=out[-1].name)
    return [*out, _gap(dtype, numel - end)] if end < numel else out


def _gap(dtype: DType, numel: int) -> Piece:
    return Piece("a gap", dtype, (numel,), fills=(Box((0,), (numel,)),))


def pieces_of(targets: Mapping[str, Target], copies: Iterable[Copy]) -> dict[str, Piece]:
    """The pieces that copies make of targets, in the order of these.

    Raises:
        RequestError: A copy goes to none of them.
    """
    of_target: dict[str, list[Copy]] = {name: [] for name in targets}
    for copy in copies:
        if copy.target not in of_target:
            raise RequestError(f"{copy.source} would go to {copy.target}, which is not a tensor of the target")
        of_target[copy.target].append(copy)
    return {name: Piece(name, t.dtype, t.shape, t.matrix, of_target[name]) for name, t in targets.items()}


def reversed_copy(copy: Copy) -> Copy:
    """The copy that moves the same elements back."""
    return Copy(copy.target, copy.target_box, copy.source, copy.source_box, copy.op.inverse)


def prove(pieces: Collection[Piece], sources: Mapping[str, Sequence[int]], drops: Iterable[Drop] | None = ()) -> None:
    """Checks that every element of the pieces is written once, and that every element of the sources goes somewhere.

    Args:
        pieces: What is to be written.
        sources: Shape of every source tensor.
        drops: What of the sources is left out, and why; None if the pieces are a part of the work, what one rank of a job
            has in memory for example, and others have the rest.

    Raises:
        RequestError: A gap, an overlap, an unknown name or a box outside its tensor; the tensors are named, folded.
    """
    used: dict[str, dict[Box, None]] = defaultdict(dict)
    for piece in pieces:
        for copy in piece.copies:
            _check_copy(copy, piece, sources)
            used[copy.source][copy.source_box] = None
    _prove_written(pieces)
    if drops is None:
        return
    for drop in drops:
        shape = sources.get(drop.source)
        if shape is None:
            raise RequestError(f"cannot drop {drop.source}: the checkpoint has no such tensor")
        used[drop.source][Box.whole(shape) if drop.box is None else drop.box] = None
    gaps = {name: uncovered(shape, list(used[name])) for name, shape in sources.items()}
    lost = [name for name, gap in gaps.items() if gap is not None]
    if lost:
        partly = [f"{name}: elements {gaps[name]} go nowhere" for name in lost if used[name]]
        raise _lost(lost, _listed([name for name in lost if not used[name]]) + partly[:8])


def _check_copy(copy: Copy, piece: Piece, sources: Mapping[str, Sequence[int]]) -> None:
    shape = sources.get(copy.source)
    if shape is None:
        raise RequestError(f"the checkpoint has no tensor {copy.source}, needed for {piece.name}", tensor=copy.source)
    for name, box, limit in ((copy.source, copy.source_box, shape), (piece.name, copy.target_box, piece.laid)):
        if not box.inside(limit):
            raise _outside(name, box, limit)
    if not _same_elements(copy):
        raise RequestError(
            f"{copy.source} {copy.source_box} does not fit {piece.name} {copy.target_box}", tensor=copy.source
        )


def _prove_written(pieces: Iterable[Piece]) -> None:
    missing = [piece.name for piece in pieces if not piece.copies and not piece.fills and piece.nbytes]
    if missing:
        raise RequestError(
            f"nothing in the checkpoint fills {counted(len(missing), 'target tensor')}",
            details=_listed(missing),
            tensor=missing[0],
        )
    for piece in pieces:
        name, matrix = piece.name, piece.laid
        boxes = [*(copy.target_box for copy in piece.copies), *piece.fills]
        if len(boxes) == 1 and boxes[0] == Box.whole(matrix):
            continue
        outside = next((box for box in piece.fills if not box.inside(matrix)), None)
        if outside is not None:
            raise _outside(name, outside, matrix)
        twice = find_overlap(boxes)
        if twice is not None:
            raise RequestError(f"{name} would be written twice at {boxes[twice[0]]} and {boxes[twice[1]]}", tensor=name)
        gap = uncovered(matrix, boxes)
        if gap is not None:
            raise RequestError(f"nothing fills {name} {gap} of shape {list(matrix)}", tensor=name)


def account(stored: Mapping[str, TensorInfo], used: Mapping[str, TensorInfo], dropped: Iterable[str]) -> None:
    """Checks that each stored tensor is used, under its own name or another, or left out for a stated reason.

    `prove` does so for the elements of tensors that are used; this is for tensors that no rule mentions.

    Args:
        stored: What a checkpoint holds.
        used: What is read of it. A flat bucket is used if a parameter in it is, or lies in another one, too.
        dropped: Names of what is left out.

    Raises:
        RequestError: A tensor is neither; the tensors are named, folded.
    """
    left = stored.keys() - used.keys()
    left -= set(dropped) if left else set()
    keys = {key for info in used.values() for key in (*info.keys, *info.replicas)} if left else set()
    # a tensor without elements has none to lose: no copy names it
    lost = [n for n, info in stored.items() if n in left and info.numel and keys.isdisjoint(info.keys)]
    if lost:
        raise _lost(lost, _listed(lost))


def _lost(names: Sequence[str], details: list[str]) -> RequestError:
    return RequestError(
        f"{counted(len(names), 'source tensor')} would be lost without a reason",
        details=details,
        hint="no rule knows it; convert --to safetensors keeps the weights as they are, --optimizer none their state out",
        tensor=names[0],
    )


def _same_elements(copy: Copy) -> bool:
    if copy.op is Op.SCALES:
        edges = (*copy.source_box.start, *copy.source_box.shape)
        target_edges = (*copy.target_box.start, *copy.target_box.shape)
        return tuple(SCALE_BLOCK * n for n in target_edges) == edges
    if copy.op is not Op.TRANSPOSE and copy.source_box.shape == copy.target_box.shape:
        return True
    squeezed = [tuple(n for n in box.shape if n != 1) for box in (copy.source_box, copy.target_box)]
    if copy.op is Op.TRANSPOSE:
        return min(len(copy.source_box.shape), len(copy.target_box.shape)) == 2 and squeezed[0] == squeezed[1][::-1]
    return squeezed[0] == squeezed[1]


def _outside(name: str, box: Box, shape: Sequence[int]) -> RequestError:
    return RequestError(f"{box} lies outside {name} of shape {list(shape)}", tensor=name)


def _listed(names: Iterable[str]) -> list[str]:
    return listed_lines([text for text, _ in fold(names)], 8)
