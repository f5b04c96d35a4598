"""Targets that are put together while they are read, as if each were stored as it is written.

Elements of two halves in turn would each be a write of its own; a block of 128 x 128 that gets one scale may consist of
several stored tensors, q and k and v of one or pieces of many ranks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from converters.box import Box
from converters.planning.plan import SCALE_BLOCK, Copy, Op
from converters.write.imported import imported_tensors

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from converters.catalog import TensorInfo
    from converters.planning.plan import Target


def reassembled(
    stored: Mapping[str, TensorInfo],
    targets: Mapping[str, Target],
    copies: Sequence[Copy],
    scales: Mapping[str, str],
) -> tuple[Sequence[Copy], dict[str, TensorInfo]]:
    """The copies of an export, those into tensors with elements in turn or with scales as one of each such tensor.

    Args:
        stored: The tensors that the copies refer to.
        targets: What is written.
        copies: What fills it; of tensors with scales, what would fill them if they had none.
        scales: For each tensor that is quantized, the one that its scales go to.

    Returns:
        The copies, and the tensors that they refer to beside `stored`.
    """
    turned = {name: target for name, target in targets.items() if target.matrix is not None or name in scales}
    if not turned:
        return copies, {}
    into = [copy for copy in copies if copy.target in turned]
    kinds = {copy.target: stored[copy.source].dtype for copy in into}
    assert not any(stored[copy.source].update for copy in into)  # refused: those of experts, and beside quantization
    assembled = {
        info.name: replace(info, dtype=kinds[info.name], unit=SCALE_BLOCK if info.name in scales else 1)
        for info in imported_tensors(stored, turned, into)
    }
    out = [copy for copy in copies if copy.target not in turned]
    for name, info in assembled.items():
        box = Box.whole(info.shape)
        if name not in scales:
            out.append(Copy(name, box, name, box))
            continue
        grid = Box.whole(targets[scales[name]].shape)
        out += [Copy(name, box, name, box, Op.QUANTIZE), Copy(name, box, scales[name], grid, Op.SCALES)]
    return out, assembled
