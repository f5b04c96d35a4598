"""Optimizer state as `dp_reshardable` buckets of a target job: the inverse of `optimizer.state`.

A bucket is a 1-D tensor for each state; a rank saves parts of it, each filled by boxes of parameters in C order:

    parameter  +-----------+         part of dp rank 0     part of dp rank 1
    rows 0..3  |###########|         ...|############|     |####|~~~|next parameter
    row 4      |####.......|  --->       rows 0..3, a part  the rest  gap
               +-----------+             of row 4           of row 4

Facts: Megatron-Core 0.16.1, optimizer/distrib_optimizer.py (`sharded_param_state_dp_reshardable`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from converters.box import Box, flat_range
from converters.formats.torch_dist.parts import BucketOut, ObjectOut
from converters.megatron.buffers import Bucket, Local, Rules, arrange, dp_chunks
from converters.megatron.rank_state_dict import LocalModel
from converters.names import StateName
from converters.pickles.nodes import Global
from converters.planning.plan import Copy, Piece, end_to_end
from converters.torchzip.records_out import object_record

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from converters.dtypes import DType
    from converters.megatron.layout import Layout
    from converters.megatron.outline import Outline
    from converters.optimizer.groups import ChainedOptimizer
    from converters.param_order import Order
    from converters.pickles.nodes import Node
    from converters.planning.plan import Target

_Filled = tuple[str, Box, int]
"""A parameter, a box of it, and the first element of the stored part that it fills."""


def flatten(
    parameters: Mapping[str, Target],
    layout: Layout,
    outline: Outline,
    order: Order,
    *,
    states: Mapping[str, DType],
    chain: Sequence[ChainedOptimizer],
    scaler: tuple[Node, Mapping[str, bytes]] = (None, {}),
    args: Mapping[str, Any] | None = None,
    available: Mapping[str, Sequence[int]] | None = None,
) -> tuple[list[BucketOut], list[ObjectOut]]:
    """What a job stores of its distributed optimizers under `dp_reshardable`, beside its common state.

    Args:
        parameters: Name, type and shape at the target of every trainable tensor of the model.
        layout: The target job.
        outline: What of the model decides where its tensors live.
        order: How the job registers parameters.
        states: States of the optimizer: "param", "exp_avg", ..., with their element types.
        chain: Its optimizers; those that are not distributed have no buckets.
        scaler: State of the loss scaler, and the tensors in it.
        args: The job's training arguments, as far as they cut buckets (`overlap_grad_reduce`, `ddp_bucket_size`,
            `ddp_num_buckets`, `ddp_pad_buckets_for_high_nccl_busbw`) or name them (`accumulate_allreduce_grads_in_fp32`).
        available: Shapes of the source tensors where they have fewer rows than the target's.

    Returns:
        The stored parts of the buckets, filled from `optimizer.state.STATE.NAME`, and the objects of each data-parallel
        group.

    Raises:
        RequestError: A tensor cannot be divided so, or a data-parallel rank would have nothing of a bucket.
        FormatError: It is not known where a parameter stands in the order.
    """
    parts, objects = list[BucketOut](), list[ObjectOut]()
    model = LocalModel(parameters, layout, outline, order)
    for chained in chain:
        if chained.part.distributed:
            chained_parts, chained_objects = _Flattener(model, chained, scaler, args or {}, available or {}).run(states)
            parts += chained_parts
            objects += chained_objects
    return parts, objects


@dataclass(frozen=True, slots=True)
class _Flattener:
    """One optimizer of the chain; see `flatten`."""

    model: LocalModel
    chained: ChainedOptimizer
    scaler: tuple[Node, Mapping[str, bytes]]
    args: Mapping[str, Any]
    available: Mapping[str, Sequence[int]]

    def run(self, states: Mapping[str, DType]) -> tuple[list[BucketOut], list[ObjectOut]]:
        parts: list[BucketOut] = []
        objects: list[ObjectOut] = []
        layout, experts = self.model.layout, self.chained.experts
        for index, group in enumerate(layout.data_parallel_groups(experts=experts is True)):
            prefix = f"{self.chained.prefix}optimizer.distributed.dp_group_idx_{index}"
            ranks = layout.group_ranks(group)
            numels: list[tuple[Node, list[Bucket]]] = []
            names = self.chained.part.names
            buffers = self.model.buffers(group, range(layout.chunks), experts=experts, names=names)
            for number, buffer in enumerate(buffers):
                in_fp32 = self.args.get("accumulate_allreduce_grads_in_fp32") is not False
                grad = "float32" if in_fp32 else buffer.dtype.name
                types = (Global("torch", buffer.dtype.name), Global("torch", grad))
                job = (self.args, layout, self.model.numel, group.pp, buffer.chunk)
                buckets = arrange(buffer.parameters, Rules.of(*job, experts=experts))
                numels.append((types, buckets))
                key = f"{prefix}.gbuf_idx_{number}.dtype_(torch.{buffer.dtype.name}, torch.{grad})"
                for k, bucket in enumerate(buckets):
                    parts += self._parts(f"{key}.bucket_idx_{k}", bucket, ranks, states)
            objects += self._objects(prefix, ranks[0], numels)
        return parts, objects

    def _objects(self, prefix: str, rank: int, numels: list[tuple[Node, list[Bucket]]]) -> Iterator[ObjectOut]:
        """What a rank stores of its group beside the buckets."""
        values: dict[str, Node] = {
            "optimizer": {"param_groups": [dict(g) for g in self.chained.groups]},
            "per_bucket_numel": [{types: [b.numel for b in buckets]} for types, buckets in numels],
            "per_bucket_numel_unpadded": [{types: [b.numel_unpadded for b in buckets]} for types, buckets in numels],
        }
        scaler, members = self.scaler
        if scaler is not None:
            values["grad_scaler"] = scaler
        for name, value in values.items():
            storages = members if name == "grad_scaler" else {}
            # Megatron wraps every object in a list of one
            yield ObjectOut(f"{prefix}.{name}/shard_0_1", rank, object_record([value], storages))

    def _parts(
        self, key: str, bucket: Bucket, ranks: Sequence[int], states: Mapping[str, DType]
    ) -> Iterator[BucketOut]:
        """What the ranks of a group store of a bucket, one state after the other."""
        parts: list[tuple[int, int, int, list[_Filled]]] = []
        for rank, chunks in zip(ranks, dp_chunks(bucket, len(ranks)), strict=True):
            for start, length, position in chunks:
                local, begin = bucket.members[max(position, 0)]
                boxes = list(self._boxes(local, start - begin, length)) if position >= 0 else []
                parts.append((rank, start, length, boxes))
        for state, dtype in states.items():
            for rank, start, length, boxes in parts:
                pieces = ((first, _piece(state, name, box, dtype)) for name, box, first in boxes)
                where = (f"{key}.{state}", bucket.numel_unpadded, start, length)
                yield BucketOut(*where, dtype, rank, end_to_end(pieces, dtype, length))

    def _boxes(self, local: Local, skip: int, length: int) -> Iterator[_Filled]:
        """Elements `skip` to `skip + length` of a parameter as boxes of the tensors that it is made of."""
        at = -skip
        for tensor, box in local.segments:
            low, high = max(0, -at), min(box.volume, length - at)
            for inner in flat_range(box.shape, low, high - low):
                yield from self._present(tensor, inner.shifted(box.start), at + low)
                low += inner.volume
            at += box.volume

    def _present(self, tensor: str, box: Box, at: int) -> Iterator[_Filled]:
        """The part of a box that the source has."""
        rows = self.available.get(tensor, box.stop)
        if not box.shape or box.stop[0] <= rows[0]:
            yield tensor, box, at
        elif box.start[0] < rows[0]:
            yield tensor, Box(box.start, (rows[0] - box.start[0], *box.shape[1:])), at


def _piece(state: str, parameter: str, box: Box, dtype: DType) -> Piece:
    name = str(StateName(state, parameter))
    return Piece(name, dtype, box.shape, copies=[Copy(name, box, name, Box.whole(box.shape))])
