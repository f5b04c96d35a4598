"""Whether the two moments of Adam belong together: of one parameter, in one order.

The first moment is an average of gradients, the second one of their squares, with other weights. By the inequality of Cauchy
and Schwarz no element of the first can be large where the second is small, whatever the gradients were:

    m = (1 - b1) sum b1^k g_k,  v = (1 - b2) sum b2^k g_k^2   =>   m^2 <= v (1 - b1)^2 / ((1 - b2) (1 - b1^2 / b2))

Moments of another parameter, rank or iteration, or that were shifted, break it in many elements. The bound is doubled, for
rounding and for betas that were changed in the course of a training.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from converters.box import Box, contiguous_tiles
from converters.errors import DistckptError, Interrupted
from converters.events import Moved
from converters.names import printable
from converters.reading.gather import Gatherer, Sources

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from converters.catalog import Catalog, TensorInfo
    from converters.engine.crew import Crew
    from converters.formats.base import Reader
    from converters.verification.report import Check

__all__ = ["MomentTask", "MomentWorker", "judge_moments", "moment_bound", "moment_tasks"]

_FIRST, _SECOND = "optimizer.state.exp_avg.", "optimizer.state.exp_avg_sq."
_TILE = 1 << 18  # elements
_TINY = 1e-30  # a square below is no number of float32 with all its bits
MARGIN = 2.0


@dataclass(frozen=True, slots=True)
class MomentTask:
    """Both moments of a parameter.

    Attributes:
        number: Among all tasks.
        parameter: Its name.
        nbytes: Bytes of both.
    """

    number: int
    parameter: str
    nbytes: int


def moment_bound(catalog: Catalog) -> float | None:
    """What m^2 / v cannot exceed; None if the optimizer is not Adam, or not with constant betas that are known."""
    args = catalog.args
    b1, b2 = args.get("adam_beta1"), args.get("adam_beta2")
    if args.get("optimizer") != "adam" or not isinstance(b1, float) or not isinstance(b2, float):
        return None
    if not 0 < b1 * b1 < b2 < 1:
        return None
    return MARGIN * (1 - b1) ** 2 / ((1 - b2) * (1 - b1 * b1 / b2))


def moment_tasks(tensors: Mapping[str, TensorInfo], first: int) -> Iterator[MomentTask]:
    """A task for each parameter with both moments in fp32; `first` is the number of the first."""
    number = first
    for name, info in tensors.items():
        parameter = name.removeprefix(_FIRST)
        other = tensors.get(_SECOND + parameter) if name.startswith(_FIRST) else None
        if other is not None and info.shape == other.shape and {info.dtype.name, other.dtype.name} == {"float32"}:
            yield MomentTask(number, parameter, info.nbytes + other.nbytes)
            number += 1


class MomentWorker:
    """Looks at moments, those of one parameter at a time."""

    def __init__(self, reader: Reader, tensors: Mapping[str, TensorInfo], crew: Crew, bound: float) -> None:
        self._tensors, self._crew, self._bound = tensors, crew, bound
        self._sources = Sources(reader, tensors, checked=False)
        self._gatherers = (Gatherer(self._sources), Gatherer(self._sources))

    def close(self) -> None:
        """Closes all files."""
        for gatherer in self._gatherers:
            gatherer.close()

    def do(self, task: MomentTask) -> dict[str, Any]:
        """`wrong` elements, and the largest `excess` over the bound; or why it `failed`."""
        out: dict[str, Any] = {"wrong": 0, "excess": 0.0}
        names = (_FIRST + task.parameter, _SECOND + task.parameter)
        try:
            for chunk in self._sources.chunks(names[0]):
                for tile in contiguous_tiles(Box.whole(chunk.box.shape), _TILE):
                    self._crew.check()
                    box = tile.shifted(chunk.box.start)
                    found = [g.gather(name, box) for g, name in zip(self._gatherers, names, strict=True)]
                    first, second = (bits.view(np.float32).astype(np.float64) for bits in found)
                    excess = np.square(first) - _TINY - self._bound * second
                    wrong = excess > 0  # NaN is for the values to say
                    if wrong.any():
                        out["wrong"] += int(np.count_nonzero(wrong))
                        ratio = np.square(first[wrong]) / np.maximum(second[wrong], _TINY) / self._bound
                        out["excess"] = max(out["excess"], float(ratio.max()))
                    nbytes = sum(bits.nbytes for bits in found)
                    self._crew.moved(Moved(nbytes), nbytes)
        except Interrupted:
            raise
        except DistckptError as error:
            out["failed"] = str(error).replace("\n", "; ")
        return out


def judge_moments(check: Check, found: Mapping[str, Mapping[str, Any]], tensors: Mapping[str, TensorInfo]) -> None:
    """Says which moments do not belong together.

    Args:
        check: Where it is noted.
        found: What `MomentWorker` says of each parameter.
        tensors: The moments.
    """
    for parameter, result in found.items():
        if result["wrong"]:
            first, second = _FIRST + parameter, _SECOND + parameter
            share = f"{result['wrong']:,} of {tensors[first].numel:,} elements"
            text = f"{printable(parameter)}: {share} of the first moment are"
            text += f" too large for the second, up to {result['excess'] ** 0.5:,.1f} times what Adam can make them"
            check.error(
                text, tensors=(first, second), needed="m^2 <= bound * v", found=f"{result['wrong']} elements beyond"
            )
