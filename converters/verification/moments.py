"""Whether the two moments of Adam belong together: of one parameter, in one order.

The first moment is an average of gradients, the second one of their squares, with other weights. By the inequality of Cauchy
and Schwarz no element of the first can be large where the second is small, whatever the gradients were:

    m = (1 - b1) sum b1^k g_k,  v = (1 - b2) sum b2^k g_k^2   =>   m^2 <= v (1 - b1)^2 / ((1 - b2) (1 - b1^2 / b2))

Moments of another parameter, rank or iteration, or that were shifted, break it in many elements. The bound is doubled, for
rounding and for betas that were changed in the course of a training.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from converters.dtypes import dtype
from converters.names import StateName, printable, state_names

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from converters.box import Box
    from converters.catalog import Catalog, TensorInfo
    from converters.io.arithmetic import Arithmetic
    from converters.verification.report import Check

_FIRST, _SECOND = "exp_avg", "exp_avg_sq"
_FP32 = dtype("float32")
_TINY = 1e-30  # a square below is no number of float32 with all its bits
MARGIN = 2.0


def moment_bound(catalog: Catalog) -> float | None:
    """The largest possible m^2 / v; None if the optimizer is not Adam, or its betas are unknown."""
    args = catalog.args
    b1, b2 = args.get("adam_beta1"), args.get("adam_beta2")
    if args.get("optimizer") != "adam" or not isinstance(b1, float) or not isinstance(b2, float):
        return None
    if not 0 < b1 * b1 < b2 < 1:
        return None
    return MARGIN * (1 - b1) ** 2 / ((1 - b2) * (1 - b1 * b1 / b2))


def moment_pairs(tensors: Mapping[str, TensorInfo]) -> dict[str, str]:
    """First moments in fp32 with the second ones beside them."""
    pairs: dict[str, str] = {}
    for name, (state, parameter) in state_names(tensors):
        second = str(StateName(_SECOND, parameter))
        if state == _FIRST and second in tensors:
            infos = tensors[name], tensors[second]
            if infos[0].shape == infos[1].shape and {info.dtype.name for info in infos} == {"float32"}:
                pairs[name] = second
    return pairs


class PossibleMoments:
    """The check (`Question`) that a first moment is not too large for the second.

    Args:
        bound: What m^2 / v cannot exceed.

    Attributes:
        wrong: How many.
        excess: The largest m^2 / v / bound.
    """

    columns = 2

    def __init__(self, bound: float) -> None:
        self._bound = bound
        self.wrong, self.excess = 0, 0.0

    def __call__(self, on: Arithmetic, *bits: Any) -> Sequence[Any]:
        """See `Question`."""
        first, second = (on.wide(n, on.values(x, _FP32, n)) for n, x in enumerate(bits))
        square = first * first
        wrong = square - _TINY - self._bound * second > 0  # NaN is for the values to say
        if not wrong.any():
            return 0, 0.0
        ratio = square / np.maximum(second, _TINY) / self._bound
        return np.count_nonzero(wrong), np.where(wrong, ratio, 0.0).max()

    def add(self, tile: Box, rows: NDArray[np.float64], arrays: Sequence[NDArray[Any]]) -> None:
        """See `Question`."""
        self.wrong += int(rows[:, 0].sum())
        self.excess = max(self.excess, float(rows[:, 1].max(initial=0.0)))


def judge_moments(check: Check, results: Mapping[str, Mapping[str, Any]], tensors: Mapping[str, TensorInfo]) -> None:
    """Reports moments that do not belong together.

    Args:
        check: Where it is noted.
        results: What `TensorWorker` says of each parameter.
        tensors: The moments.
    """
    for parameter, result in results.items():
        if result["wrong"]:
            first, second = (str(StateName(state, parameter)) for state in (_FIRST, _SECOND))
            share = f"{result['wrong']:,} of {tensors[first].numel:,} elements"
            text = f"{printable(parameter)}: {share} of the first moment are"
            text += f" too large for the second, up to {result['excess'] ** 0.5:,.1f} times what Adam can make them"
            check.error(
                text, tensors=(first, second), needed="m^2 <= bound * v", found=f"{result['wrong']} elements beyond"
            )
