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

from converters.errors import RequestError
from converters.io.gather import Gatherer
from converters.io.sources import Sources
from converters.megatron.layout import Layout
from converters.megatron.optimizer_chain import adam_chain, is_expert
from converters.megatron.rank_state_dict import LocalModel, likely_order
from converters.names import MASTER, StateName, printable, quoted
from converters.optimizer.buckets import flat_pieces

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from converters.catalog import Catalog, TensorInfo
    from converters.formats.base import Reader
    from converters.megatron.rank_state_dict import LocalTensor

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
    padded: str | None = None
    with contextlib.closing(Gatherer(Sources(reader, stored, checked=False))) as gatherer:
        for tensor, padding in _padded_buffers(catalog):
            padded = padded or tensor.parts[0]
            length = min(padding, tensor.numel)
            for _, piece in flat_pieces(tensor, tensor.numel - length, length):
                for copy in piece.copies:
                    for key in (str(StateName(state, copy.source)) for state in _STATES):
                        if key in stored and gatherer.gather(key, copy.source_box).any():
                            return
    if padded is not None:
        raise RequestError(
            "the optimizer state may have been saved shifted by the padding of its buckets, as Megatron-Core 0.15.0 to "
            "0.19.0 do, and its master weights are remainders, which do not show whether it was",
            details=[f"the state behind a padded bucket ends with zeros, as shifted state does: {printable(padded)}"],
            hint=f"--optimizer none leaves the state out; distckpt convert {quoted(catalog.root)} OUT --to safetensors "
            "keeps the weights",
            tensor=padded,
        )


def _padded_buffers(catalog: Catalog) -> Iterator[tuple[LocalTensor, int]]:
    """Of each buffer of the job that saved whose buckets but the last have padding: its last parameter, and how much."""
    layout = Layout.saved(catalog)
    model = LocalModel.trained(catalog, layout, likely_order(catalog))
    experts_apart = layout.ep > 1 and any(map(is_expert, model.tensors))
    for member in adam_chain(range(2) if experts_apart else [0], layout.chunks, "the job", experts_apart=experts_apart):
        for _, _, buffers in model.data_parallel_buffers(member, catalog.job_options):
            for buckets in (buffer.buckets() for buffer in buffers):
                padding = sum(bucket.numel - bucket.numel_unpadded for bucket in buckets[:-1])
                if padding:
                    yield buckets[-1].members[-1][0], padding
