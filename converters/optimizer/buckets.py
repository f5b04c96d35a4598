"""Optimizer state as `dp_reshardable` buckets of a target job: the inverse of `optimizer.state`.

    target = flatten(parameters, layout, outline, order, groups=read_param_groups(reader))
    for bucket in target.buckets:
        for chunk in bucket.chunks:      # a record of rank `chunk.rank`, for each state of the optimizer
            ...                          # copies fill it, but for `chunk.fills`

A chunk is a piece of a 1-D tensor; every copy fills a range of it with a box of a parameter, in C order:

    parameter  +-----------+         chunk of dp rank 0    chunk of dp rank 1
    rows 0..3  |###########|         ...|############|     |####|~~~|next parameter
    row 4      |####.......|  --->       rows 0..3, a part  the rest  gap
               +-----------+             of row 4           of row 4

Facts: Megatron-Core 0.16.1, optimizer/distrib_optimizer.py (`sharded_param_state_dp_reshardable`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from converters.box import Box, flat_range
from converters.parallel.buffers import Bucket, Local, Owners, Rules, arrange, bucket_size, dp_chunks
from converters.pickles import Global

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from converters.optimizer.groups import ParamGroups
    from converters.parallel.layout import Layout
    from converters.parallel.split import Outline
    from converters.pickles import Node
    from converters.planning.plan import Target
    from converters.registration import Order

__all__ = ["FlatBucket", "FlatChunk", "FlatCopy", "FlatOptimizer", "GroupObject", "flatten"]


@dataclass(frozen=True, slots=True)
class FlatCopy:
    """A box of a parameter that fills a range of a chunk, in C order.

    Attributes:
        tensor: Canonical name of the parameter, without `optimizer.state.*`.
        box: In its coordinates.
        at: First element of the chunk that it fills.
    """

    tensor: str
    box: Box
    at: int


@dataclass(frozen=True, slots=True)
class FlatChunk:
    """One stored piece of a bucket.

    Attributes:
        start: First element in the bucket.
        length: Elements.
        rank: The rank that saves it.
        copies: What fills it.
        fills: `(first element of the chunk, elements)` of what no parameter has: gaps, rows of the padded vocabulary.
    """

    start: int
    length: int
    rank: int
    copies: tuple[FlatCopy, ...]
    fills: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class FlatBucket:
    """A 1-D tensor for each state of the optimizer.

    Attributes:
        key: Its key, up to the state: append `.param`, `.exp_avg` or `.exp_avg_sq`.
        numel: Elements.
        chunks: The pieces, in order; they tile it.
    """

    key: str
    numel: int
    chunks: tuple[FlatChunk, ...]


@dataclass(frozen=True, slots=True)
class GroupObject:
    """An object of one data-parallel group.

    Attributes:
        key: With its grid suffix.
        rank: The rank that saves it.
        tree: What is saved, inert; Megatron wraps every object in a list of one, so this is that list.
        storages: The tensors in it, as members of its archive.
    """

    key: str
    rank: int
    tree: Node
    storages: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class FlatOptimizer:
    """What a job stores of its optimizer under `dp_reshardable`, beside what `param_groups` puts in the common state."""

    buckets: tuple[FlatBucket, ...]
    objects: tuple[GroupObject, ...]


def flatten(
    parameters: Mapping[str, Target],
    layout: Layout,
    outline: Outline,
    order: Order,
    *,
    groups: ParamGroups,
    args: Mapping[str, Any] | None = None,
    available: Mapping[str, Sequence[int]] | None = None,
) -> FlatOptimizer:
    """The buckets that a job at a layout stores, each with where its elements come from.

    Args:
        parameters: Name, type and shape at the target of every trainable tensor of the model.
        layout: The target job.
        outline: What of the model decides where its tensors live.
        order: How the job registers parameters.
        groups: Param groups of the source.
        args: The job's training arguments, as far as they cut buckets (`overlap_grad_reduce`, `ddp_bucket_size`,
            `ddp_num_buckets`, `ddp_pad_buckets_for_high_nccl_busbw`) or name them (`accumulate_allreduce_grads_in_fp32`).
        available: Shapes of the source tensors where they have fewer rows than the target's.

    Raises:
        RequestError: A tensor cannot be divided so, or a data-parallel rank would have nothing of a bucket.
        FormatError: It is not known where a parameter stands in the order.
    """
    return _Flattener(parameters, layout, outline, order, groups, args or {}, available or {}).run()


@dataclass(frozen=True, slots=True)
class _Group:
    """A data-parallel group: its number, the ranks in it, and the parameters they share."""

    prefix: str
    index: int
    pp: int
    tp: int
    ep: int | None
    experts: bool | None
    ranks: tuple[int, ...]

    def key(self, name: str) -> str:
        return f"{self.prefix}optimizer.distributed.dp_group_idx_{self.index}.{name}"


class _Flattener:
    def __init__(
        self,
        parameters: Mapping[str, Target],
        layout: Layout,
        outline: Outline,
        order: Order,
        groups: ParamGroups,
        args: Mapping[str, Any],
        available: Mapping[str, Sequence[int]],
    ) -> None:
        self.parameters, self.layout, self.groups, self.args = parameters, layout, groups, args
        self.available = available
        self.owners = Owners(parameters, layout, outline, order)
        self.chained = layout.ep > 1 and any(".mlp.experts." in name for name in parameters)
        self.biases = any(".mlp.experts." in name and name.endswith(".bias") for name in parameters)

    def run(self) -> FlatOptimizer:
        buckets: list[FlatBucket] = []
        objects: list[GroupObject] = []
        for group in self._groups():
            numels: list[tuple[Node, list[Bucket]]] = []
            chunks = range(self.layout.chunks)
            owned = self.owners.buffers(group.pp, chunks, group.tp, group.ep, experts=group.experts)
            for number, buffer in enumerate(owned):
                grad = "float32" if self._grads_in_fp32() else buffer.dtype.name
                types = (Global("torch", buffer.dtype.name), Global("torch", grad))
                made = arrange(buffer.parameters, self._rules(group, buffer.chunk))
                numels.append((types, made))
                key = group.key(f"gbuf_idx_{number}.dtype_(torch.{buffer.dtype.name}, torch.{grad})")
                for k, bucket in enumerate(made):
                    filled = tuple(self._chunks(bucket, group))
                    buckets.append(FlatBucket(f"{key}.bucket_idx_{k}", bucket.numel_unpadded, filled))
            objects += self._objects(group, numels)
        return FlatOptimizer(tuple(buckets), tuple(objects))

    def _grads_in_fp32(self) -> bool:
        return self.args.get("accumulate_allreduce_grads_in_fp32") is not False

    def _rules(self, group: _Group, chunk: int) -> Rules:
        first = group.pp == 0 and chunk == 0
        size = bucket_size(self.args, self.layout, self.owners) if first else None
        busbw = self.args.get("ddp_pad_buckets_for_high_nccl_busbw") is True
        return Rules(len(group.ranks), bucket_size=size, busbw=busbw)

    def _groups(self) -> Iterator[_Group]:
        at = self.layout
        prefix, kind = ("chained_0.", False) if self.chained else ("", None)
        for pp in range(at.pp):
            for tp in range(at.tp):
                ranks = sorted(at.rank(tp, cp, dp, pp) for cp in range(at.cp) for dp in range(at.dp))
                yield _Group(prefix, pp * at.tp + tp, pp, tp, None, kind, tuple(ranks))
        for pp in range(at.pp if self.chained else 0):
            for ep in range(at.ep):
                for tp in range(at.expert_tp):
                    ranks = sorted(at.expert_rank(tp, ep, edp, pp) for edp in range(at.edp))
                    index = (pp * at.ep + ep) * at.expert_tp + tp
                    yield _Group("chained_1.", index, pp, tp, ep, True, tuple(ranks))

    def _objects(self, group: _Group, numels: list[tuple[Node, list[Bucket]]]) -> Iterator[GroupObject]:
        if group.experts:
            param_groups = self.groups.for_experts(biases=self.biases)
        else:
            param_groups = self.groups.dense if self.chained else self.groups.merged()
        values: dict[str, Node] = {
            "optimizer": {"param_groups": [dict(g) for g in param_groups]},
            "per_bucket_numel": [{types: [b.numel for b in made]} for types, made in numels],
            "per_bucket_numel_unpadded": [{types: [b.numel_unpadded for b in made]} for types, made in numels],
        }
        if self.groups.scaler is not None:
            values["grad_scaler"] = self.groups.scaler
        for name, value in values.items():
            storages = self.groups.storages if name == "grad_scaler" else {}
            yield GroupObject(f"{group.key(name)}/shard_0_1", group.ranks[0], [value], storages)

    def _chunks(self, bucket: Bucket, group: _Group) -> Iterator[FlatChunk]:
        for rank, chunks in zip(group.ranks, dp_chunks(bucket, len(group.ranks)), strict=True):
            for start, length, position in chunks:
                if position < 0:
                    yield FlatChunk(start, length, rank, (), ((0, length),))
                    continue
                local, begin = bucket.placed[position]
                copies = tuple(self._copies(local, start - begin, length))
                yield FlatChunk(start, length, rank, copies, tuple(_holes(copies, length)))

    def _copies(self, local: Local, skip: int, length: int) -> Iterator[FlatCopy]:
        """Elements `skip` to `skip + length` of a parameter as boxes of the tensors that it is made of."""
        at = -skip
        for tensor, box in local.segments:
            low, high = max(0, -at), min(box.volume, length - at)
            for inner in flat_range(box.shape, low, high - low):
                yield from self._present(tensor, inner.shifted(box.start), at + low)
                low += inner.volume
            at += box.volume

    def _present(self, tensor: str, box: Box, at: int) -> Iterator[FlatCopy]:
        """The part of a box that the source has."""
        rows = self.available.get(tensor, box.stop)
        if not box.shape or box.stop[0] <= rows[0]:
            yield FlatCopy(tensor, box, at)
        elif box.start[0] < rows[0]:
            yield FlatCopy(tensor, Box(box.start, (rows[0] - box.start[0], *box.shape[1:])), at)


def _holes(copies: Sequence[FlatCopy], length: int) -> Iterator[tuple[int, int]]:
    at = 0
    for copy in copies:
        if copy.at > at:
            yield at, copy.at - at
        at = copy.at + copy.box.volume
    if at < length:
        yield at, length - at
