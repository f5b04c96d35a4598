"""Optimizer state as `dp_reshardable` buckets of a target job: the inverse of `optimizer.state`.

A bucket is a 1-D tensor for each state; a rank saves pieces of it, each filled by boxes of parameters in C order:

    parameter  +-----------+         piece of dp rank 0    piece of dp rank 1
    rows 0..3  |###########|         ...|############|     |####|~~~|next parameter
    row 4      |####.......|  --->       rows 0..3, a part  the rest  gap
               +-----------+             of row 4           of row 4

Facts: Megatron-Core 0.16.1, optimizer/distrib_optimizer.py (`sharded_param_state_dp_reshardable`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from converters.archive.records_out import object_record
from converters.box import Box, flat_range
from converters.dtypes import dtype
from converters.formats.torch_dist.parts import FlatOut, ObjectOut
from converters.parallel.buffers import Bucket, Local, Rules, arrange, dp_chunks
from converters.parallel.local import LocalModel
from converters.pickles import Global

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from converters.optimizer.groups import ParamGroups
    from converters.parallel.layout import Layout
    from converters.parallel.split import Outline
    from converters.pickles import Node
    from converters.planning.plan import Target
    from converters.registration import Order

__all__ = ["flatten"]

_Filled = tuple[str, Box, int]
"""A box of a parameter, and the first element of the piece that it fills."""


def flatten(
    parameters: Mapping[str, Target],
    layout: Layout,
    outline: Outline,
    order: Order,
    *,
    states: Sequence[str],
    groups: ParamGroups,
    args: Mapping[str, Any] | None = None,
    available: Mapping[str, Sequence[int]] | None = None,
) -> tuple[list[FlatOut], list[ObjectOut]]:
    """What a job stores of its optimizer under `dp_reshardable`, beside what `param_groups` puts in the common state.

    Args:
        parameters: Name, type and shape at the target of every trainable tensor of the model.
        layout: The target job.
        outline: What of the model decides where its tensors live.
        order: How the job registers parameters.
        states: States of the optimizer: "param", "exp_avg", ...
        groups: Param groups of the source.
        args: The job's training arguments, as far as they cut buckets (`overlap_grad_reduce`, `ddp_bucket_size`,
            `ddp_num_buckets`, `ddp_pad_buckets_for_high_nccl_busbw`) or name them (`accumulate_allreduce_grads_in_fp32`).
        available: Shapes of the source tensors where they have fewer rows than the target's.

    Returns:
        The pieces of the buckets, filled from `optimizer.state.STATE.NAME`, and the objects of each data-parallel group.

    Raises:
        RequestError: A tensor cannot be divided so, or a data-parallel rank would have nothing of a bucket.
        FormatError: It is not known where a parameter stands in the order.
    """
    return _Flattener(parameters, layout, outline, order, groups, args or {}, available or {}).run(states)


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
        self.model = LocalModel(parameters, layout, outline, order)
        self.chained = layout.ep > 1 and any(".mlp.experts." in name for name in parameters)
        self.biases = any(".mlp.experts." in name and name.endswith(".bias") for name in parameters)

    def run(self, states: Sequence[str]) -> tuple[list[FlatOut], list[ObjectOut]]:
        pieces: list[FlatOut] = []
        objects: list[ObjectOut] = []
        for group in self._groups():
            numels: list[tuple[Node, list[Bucket]]] = []
            chunks = range(self.layout.chunks)
            owned = self.model.buffers(group.pp, chunks, group.tp, group.ep, experts=group.experts)
            for number, buffer in enumerate(owned):
                grad = "float32" if self._grads_in_fp32() else buffer.dtype.name
                types = (Global("torch", buffer.dtype.name), Global("torch", grad))
                job = (self.args, self.layout, self.model.numel, group.pp, buffer.chunk)
                made = arrange(buffer.parameters, Rules.of(*job, experts=group.experts is True))
                numels.append((types, made))
                key = group.key(f"gbuf_idx_{number}.dtype_(torch.{buffer.dtype.name}, torch.{grad})")
                for k, bucket in enumerate(made):
                    pieces += self._pieces(f"{key}.bucket_idx_{k}", bucket, group, states)
            objects += self._objects(group, numels)
        return pieces, objects

    def _grads_in_fp32(self) -> bool:
        return self.args.get("accumulate_allreduce_grads_in_fp32") is not False

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

    def _objects(self, group: _Group, numels: list[tuple[Node, list[Bucket]]]) -> Iterator[ObjectOut]:
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
            # Megatron wraps every object in a list of one
            yield ObjectOut(f"{group.key(name)}/shard_0_1", group.ranks[0], object_record([value], storages))

    def _pieces(self, key: str, bucket: Bucket, group: _Group, states: Sequence[str]) -> Iterator[FlatOut]:
        """What the ranks of a group store of a bucket, one state after the other."""
        found: list[tuple[int, int, int, list[_Filled]]] = []
        for rank, chunks in zip(group.ranks, dp_chunks(bucket, len(group.ranks)), strict=True):
            for start, length, position in chunks:
                local, begin = bucket.placed[max(position, 0)]
                filled = list(self._copies(local, start - begin, length)) if position >= 0 else []
                found.append((rank, start, length, filled))
        for state in states:
            for rank, start, length, filled in found:
                copies = tuple((f"optimizer.state.{state}.{name}", box, at) for name, box, at in filled)
                where = (f"{key}.{state}", bucket.numel_unpadded, start, length)
                yield FlatOut(*where, dtype("float32"), rank, copies, tuple(_holes(filled, length)))

    def _copies(self, local: Local, skip: int, length: int) -> Iterator[_Filled]:
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


def _holes(filled: Iterable[_Filled], length: int) -> Iterator[tuple[int, int]]:
    """`(first element, elements)` of what no parameter has: gaps, rows of the padded vocabulary."""
    at = 0
    for _, box, start in filled:
        if start > at:
            yield at, start - at
        at = start + box.volume
    if at < length:
        yield at, length - at
