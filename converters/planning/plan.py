"""What to move: region copies, and the proof that nothing is forgotten.

Every operation is a list of copies "box b of target tensor T := box a of source tensor S, through an op". `prove`
shows, before a byte moves, that the copies write every element of every target exactly once, and that every source
element is either read or dropped for a stated reason.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from converters.box import Box, find_overlap, uncovered
from converters.errors import RequestError
from converters.names import fold, printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from converters.dtypes import DType

__all__ = ["Copy", "Drop", "Op", "Target", "prove", "reversed_copy"]


class Op(Enum):
    """What may happen to elements on the way, each with its inverse. A cast follows from the two element types."""

    COPY = "copy"
    TRANSPOSE = "transpose"  # of a matrix: target[i, j] = source[j, i]
    ADD_ONE = "add one"  # a zero-centred norm weight (gamma - 1) becomes an ordinary one
    SUBTRACT_ONE = "subtract one"

    @property
    def inverse(self) -> Op:
        """The op that undoes this one."""
        return {Op.ADD_ONE: Op.SUBTRACT_ONE, Op.SUBTRACT_ONE: Op.ADD_ONE}.get(self, self)


@dataclass(frozen=True, slots=True)
class Copy:
    """`target[target_box] = op(source[source_box])`.

    Attributes:
        source: Canonical name of the source tensor.
        source_box: In its coordinates.
        target: Name of the target tensor.
        target_box: In its coordinates. Both boxes hold the same number of elements, in the same C order (after the op).
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
    """A tensor to be written."""

    name: str
    dtype: DType
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return Box.whole(self.shape).volume * self.dtype.itemsize


def reversed_copy(copy: Copy) -> Copy:
    """The copy that moves the same elements back."""
    return Copy(copy.target, copy.target_box, copy.source, copy.source_box, copy.op.inverse)


def prove(
    sources: Mapping[str, tuple[int, ...]],
    targets: Mapping[str, Target],
    copies: Sequence[Copy],
    drops: Sequence[Drop],
    fills: Mapping[str, Sequence[Box]] | None = None,
) -> None:
    """Checks that the copies write each target element once and account for each source element.

    Args:
        sources: Shape of every source tensor.
        targets: The tensors to be written, by name.
        copies: What moves.
        drops: What is left out, and why.
        fills: What of the targets nothing fills on purpose, by name: it is zero.

    Raises:
        RequestError: A gap, an overlap, an unknown name or a box outside its tensor; the tensors are named, folded.
    """
    written: dict[str, list[Box]] = defaultdict(list)
    used: dict[str, list[Box]] = defaultdict(list)
    for copy in copies:
        shape, target = sources.get(copy.source), targets.get(copy.target)
        if shape is None:
            raise RequestError(
                f"the checkpoint has no tensor {copy.source}, needed for {copy.target}", tensor=copy.source
            )
        if target is None:
            raise RequestError(f"{copy.source} would go to {copy.target}, which is not a tensor of the target")
        if not copy.source_box.inside(shape):
            raise _outside(copy.source, copy.source_box, shape)
        if not copy.target_box.inside(target.shape):
            raise _outside(copy.target, copy.target_box, target.shape)
        if not _same_elements(copy):
            raise RequestError(
                f"{copy.source} {copy.source_box} does not fit {copy.target} {copy.target_box}", tensor=copy.source
            )
        used[copy.source].append(copy.source_box)
        written[copy.target].append(copy.target_box)
    for drop in drops:
        shape = sources.get(drop.source)
        if shape is None:
            raise RequestError(f"cannot drop {drop.source}: the checkpoint has no such tensor")
        used[drop.source].append(Box.whole(shape) if drop.box is None else drop.box)
    for name, boxes in (fills or {}).items():
        if boxes:
            written[name] += boxes
    _prove_targets(targets, written)
    lost = [name for name, shape in sources.items() if uncovered(shape, used[name]) is not None]
    if lost:
        whole = [name for name in lost if not used[name]]
        partly = [f"{name}: elements {uncovered(sources[name], used[name])} go nowhere" for name in lost if used[name]]
        raise RequestError(
            f"{len(lost)} source tensors would be lost without a reason",
            details=_listed(whole) + partly[:8],
            hint="this is a tensor the chosen architecture has no place for; choose another with --arch",
            tensor=lost[0],
        )


def _prove_targets(targets: Mapping[str, Target], written: Mapping[str, list[Box]]) -> None:
    missing = [name for name in targets if name not in written and targets[name].nbytes]
    if missing:
        raise RequestError(
            f"nothing in the checkpoint fills {len(missing)} target tensors",
            details=_listed(missing),
            tensor=missing[0],
        )
    for name, boxes in written.items():
        twice = find_overlap(boxes)
        if twice is not None:
            raise RequestError(f"{name} would be written twice at {boxes[twice[0]]} and {boxes[twice[1]]}", tensor=name)
        gap = uncovered(targets[name].shape, boxes)
        if gap is not None:
            raise RequestError(f"nothing fills {name} {gap} of shape {list(targets[name].shape)}", tensor=name)


def _same_elements(copy: Copy) -> bool:
    if copy.op is Op.TRANSPOSE:
        return len(copy.source_box.shape) == 2 and copy.source_box.shape == copy.target_box.shape[::-1]
    if copy.source_box.shape == copy.target_box.shape:
        return True
    squeezed = [tuple(n for n in box.shape if n != 1) for box in (copy.source_box, copy.target_box)]
    return squeezed[0] == squeezed[1]


def _outside(name: str, box: Box, shape: tuple[int, ...]) -> RequestError:
    return RequestError(f"{box} lies outside {name} of shape {list(shape)}", tensor=name)


def _listed(names: Iterable[str], limit: int = 8) -> list[str]:
    folded = [printable(text) for text, _ in fold(names)]
    return folded[:limit] + ([f"and {len(folded) - limit} more"] if len(folded) > limit else [])
