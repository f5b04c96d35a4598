"""Whether an optimizer's state was saved shifted, where master weights cannot show it.

Megatron-Core 0.15.0 to 0.19.0 save `fully_reshardable` from a tensor that holds all buckets of a buffer without the padding
behind each, but take the parameters from where they lie with it (optimizer/distrib_optimizer.py,
`sharded_param_state_fully_reshardable`): what lies behind a padded bucket is shifted, and the end, which there is nothing
left for, is zero.

    in memory    | bucket 0          |pad| bucket 1                  |
    gathered     | bucket 0          | bucket 1                  |
    saved        | bucket 0          |   | bucket 1, its begin lost |000|

So a state that is not zero there was not saved shifted, nor was any other buffer of that job. Fp32 master weights tell
more: they are not the weights then (`proof`).
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING

from converters.box import Box, flat_range
from converters.errors import RequestError
from converters.io.gather import Gatherer
from converters.io.sources import Sources
from converters.megatron.buffers import Rules, arrange
from converters.megatron.layout import Layout
from converters.megatron.rank_state_dict import LocalModel, likely_order
from converters.names import MASTER, StateName, printable, quoted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from converters.catalog import Catalog, TensorInfo
    from converters.formats.base import Reader
    from converters.megatron.buffers import Local

_STATES = (MASTER, "exp_avg", "exp_avg_sq")


def refuse_shifted(reader: Reader, tensors: Mapping[str, TensorInfo]) -> None:
    """Makes sure that state in `fully_reshardable` was not saved shifted.

    Args:
        reader: The checkpoint.
        tensors: The optimizer's tensors by canonical name.

    Raises:
        RequestError: It may have been, and nothing tells.
    """
    catalog = reader.catalog
    stored = {
        name: replace(info, dtype=info.remainders.dtype, remainders=None) if info.remainders else info
        for name, info in tensors.items()
    }
    padded: Local | None = None
    with contextlib.closing(Gatherer(Sources(reader, stored, checked=False))) as gatherer:
        for local, padding in _padded_buffers(catalog):
            padded = padded or local
            for name, box in _end_of(local, padding):
                for key in (str(StateName(state, name)) for state in _STATES):
                    if key in stored and gatherer.gather(key, box).any():
                        return
    if padded is not None:
        raise RequestError(
            "the optimizer state may have been saved shifted by the padding of its buckets, as Megatron-Core 0.15.0 to "
            "0.19.0 do, and its master weights are remainders, which do not show whether it was",
            details=[
                f"the state behind a padded bucket ends with zeros, as shifted state does: {printable(padded.name)}"
            ],
            hint=f"--optimizer none leaves the state out; distckpt convert {quoted(catalog.root)} OUT --to safetensors "
            "keeps the weights",
            tensor=padded.name,
        )


def _padded_buffers(catalog: Catalog) -> Iterator[tuple[Local, int]]:
    """Of each buffer of the job that saved whose buckets but the last have padding: its last parameter, and how much."""
    layout, args = Layout.saved(catalog), catalog.job_options
    model = LocalModel.trained(catalog, layout, likely_order(catalog))
    apart = layout.ep > 1 and any(".mlp.experts." in name for name in model.tensors)
    for experts in (False, True) if apart else (None,):
        for group in layout.data_parallel_groups(experts=experts is True):
            for buffer in model.buffers(group, range(layout.chunks), experts=experts):
                rules = Rules.of(args, layout, model.numel, group.pp, buffer.chunk, experts=experts)
                buckets = arrange(buffer.parameters, rules)
                padding = sum(bucket.numel - bucket.numel_unpadded for bucket in buckets[:-1])
                if padding:
                    yield buckets[-1].members[-1][0], padding


def _end_of(local: Local, numel: int) -> Iterator[tuple[str, Box]]:
    """Boxes of the tensors that the last elements of a parameter are in."""
    for tensor, box in reversed(local.segments):
        length = min(numel, box.volume)
        for inner in flat_range(box.shape, box.volume - length, length):
            yield tensor, inner.shifted(box.start)
        numel -= length
        if not numel:
            return
