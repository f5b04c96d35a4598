"""Flat buckets of the distributed optimizer and the parameters in them, in both directions.

A bucket is a 1-D tensor for each state; a data-parallel rank has a part of it, filled by boxes of parameters in C order:

    parameter  +-----------+         part of dp rank 0     part of dp rank 1
    rows 0..3  |###########|         ...|############|     |####|~~~|next parameter
    row 4      |####.......|  <-->       rows 0..3, a part  the rest  gap
               +-----------+             of row 4           of row 4

    unflatten       stored buckets -> which elements of them a tensor `optimizer.state.STATE.NAME` consists of
    index_states    the same for a single buffer: of torch_dist (`unflatten`) and of the legacy format
    flatten         parameters -> what each rank stores of each bucket under `dp_reshardable`
    buffer_pieces   the same for a buffer whose buckets lie end to end, of the legacy format

All of them take the order of parameters and the cuts from `LocalModel.buffers` and `megatron.buffers`.

Facts: Megatron-Core 0.16.1, optimizer/distrib_optimizer.py (`sharded_param_state_dp_reshardable`).
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from converters.box import flat_range
from converters.formats.torch_dist.parts import BucketOut, ObjectOut
from converters.megatron.buffers import Misfit, arrange, dp_chunks, fit
from converters.megatron.flat_index import FlatIndex
from converters.megatron.optimizer_chain import adam_chain
from converters.megatron.optimizer_parts import MASTERS
from converters.megatron.rank_state_dict import LocalModel
from converters.names import StateName, state_names
from converters.pickles.nodes import Global
from converters.planning.plan import Copy, Piece, end_to_end, reversed_copy
from converters.planning.routes import target_box_of
from converters.torchzip.records_out import object_record
from converters.words import counted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from converters.catalog import Catalog, TensorInfo
    from converters.dtypes import DType
    from converters.megatron.buffers import Bucket, Buffer, Local, Rules
    from converters.megatron.layout import Layout
    from converters.megatron.rank_state_dict import LocalTensor
    from converters.optimizer.groups import ChainedOptimizer
    from converters.optimizer.state import Candidate
    from converters.optimizer.stored_buckets import StoredBuffer, StoredGroup
    from converters.pickles.nodes import Node

# ---------------------------------------------------------------------- reading


def unflatten(
    catalog: Catalog,
    groups: Mapping[tuple[int, int], StoredGroup],
    layout: Layout,
    candidate: Candidate,
    names: frozenset[str],
) -> tuple[dict[str, TensorInfo], set[str]]:
    """The optimizer's tensors, if the job that saved ordered its parameters as a candidate says.

    Args:
        groups: The stored buckets, by the optimizer's number in the chain and the data-parallel group.
        layout: The job that saved.
        names: Canonical names of the parameters that are in flat buckets.

    Returns:
        The tensors by canonical name, in the order of the parameters; and the parameters that begin or end within a stored
        chunk.

    Raises:
        Misfit: The parameters do not fill the buckets.
    """
    producer = catalog.producer[0] if catalog.producer else ""
    rules = {"align": candidate.align, "early": producer.startswith(("Megatron-Core 0.8", "Megatron-Core 0.11"))}
    model, index = LocalModel.trained(catalog, layout, candidate.order), FlatIndex()
    numbers, unused = sorted({number for number, _ in groups}), dict(groups)
    for member in adam_chain(numbers, layout.chunks, "the checkpoint", experts_apart=layout.ep > 1, names=names):
        for group_index, group, buffers in model.data_parallel_buffers(member, catalog.job_options, **rules):
            if group.ep is not None and candidate.expert_groups == "ep-pp-tp":
                group_index = (group.ep * layout.pp + group.pp) * layout.tp + group.tp
            stored = unused.pop((member.number, group_index), None)
            stored_buffers = stored.buffers if stored else {}
            if len(buffers) != len(stored_buffers):
                raise Misfit(
                    f"data-parallel group {group_index} has {counted(len(stored_buffers), 'buffer')}, its parameters make "
                    f"{len(buffers)}",
                    details=[f"pipeline rank {group.pp}, tensor-parallel rank {group.tp}"],
                )
            for number, buffer in enumerate(buffers):
                assert stored is not None
                stored_buffer, label = stored_buffers.get(number), stored.label(number)
                if stored_buffer is None or stored_buffer.dtype not in (None, buffer.dtype):
                    raise Misfit(f"{label} should hold {buffer.dtype} parameters")
                parameters = [tensor.flattened(model.order) for tensor in buffer.parameters]
                index_states(stored_buffer, parameters, [buffer.rules], label, index)
    if unused:
        raise Misfit(
            f"no rank of the job has {next(iter(unused.values())).label(0)}", details=[f"{len(unused)} such groups"]
        )
    states = sorted({parts.state for _, parts in state_names(index.pieces)})
    shapes = {str(StateName(state, n)): t.shape for n, t in model.tensors.items() for state in states}
    tensors = {n: index.tensor(n, shape, "optimizer") for n, shape in shapes.items() if n in index.pieces}
    return tensors, index.inside


def index_states(
    stored: StoredBuffer, parameters: Sequence[Local], candidates: Sequence[Rules], label: str, index: FlatIndex
) -> None:
    """Notes where the state of each of a buffer's parameters lies, as `optimizer.state.STATE.NAME`.

    Args:
        stored: The buffer.
        parameters: In the order of `named_parameters()`.
        candidates: Rules by which its job may have cut it, the likeliest first.
        label: Names it in an error.
        index: Where to note it.

    Raises:
        Misfit: The parameters do not fill it.
    """
    if not stored.states:
        return
    first = next(iter(stored.states.values()))
    if stored.coalesced and stored.sizes is None:
        buckets = _arranged(parameters, first[0].numel, candidates, label)
    else:
        buckets = _fitted(parameters, stored.sizes or [flat.numel for flat in first], candidates, label)
    total = sum(bucket.numel_unpadded for bucket in buckets)
    for state, flats in stored.states.items():
        if stored.coalesced and flats[0].numel != total:
            raise Misfit(f"{label} has {flats[0].numel:,} elements, its parameters take {total:,}")
        if not stored.coalesced and len(flats) != len(buckets):
            raise Misfit(f"{label} has {counted(len(flats), 'bucket')}, its parameters fill {len(buckets)}")
        base, prefix = 0, str(StateName(MASTERS.get(state, state), ""))
        for number, bucket in enumerate(buckets):
            flat = flats[0 if stored.coalesced else number]
            if base + bucket.numel_unpadded > flat.numel:
                raise Misfit(f"{label} is smaller than its parameters, which take {total:,} elements")
            for local, start in bucket.members:
                index.add(prefix, local, flat.array, flat.dtype, flat.first + base + start)
            base += bucket.numel_unpadded if stored.coalesced else 0


def _fitted(
    parameters: Sequence[Local], sizes: Sequence[int], candidates: Sequence[Rules], label: str
) -> list[Bucket[Local]]:
    *alternatives, last = dict.fromkeys(rules.align for rules in candidates)
    for align in alternatives:
        with contextlib.suppress(Misfit):
            return fit(parameters, sizes, align, label)
    return fit(parameters, sizes, last, label)


def _arranged(parameters: Sequence[Local], total: int, candidates: Sequence[Rules], label: str) -> list[Bucket[Local]]:
    """Where parameters lie in a buffer whose buckets are stored end to end: the first rules that fill it."""
    sizes = []
    for rules in candidates:
        buckets = arrange(parameters, rules)
        sizes.append(sum(bucket.numel_unpadded for bucket in buckets))
        if sizes[-1] == total:
            return buckets
    raise Misfit(f"{label} has {total:,} elements, its parameters take {sizes[0]:,}")


# ---------------------------------------------------------------------- writing


def flatten(
    model: LocalModel,
    states: Mapping[str, DType],
    chain: Sequence[ChainedOptimizer],
    args: Mapping[str, Any],
    *,
    scaler: tuple[Node, Mapping[str, bytes]] = (None, {}),
) -> tuple[list[BucketOut], list[ObjectOut]]:
    """What a job stores of its distributed optimizers under `dp_reshardable`, beside its common state.

    Args:
        model: The trainable tensors of the target job.
        states: States of the optimizer: "param", "exp_avg", ..., with their element types.
        chain: Its optimizers; those that are not distributed have no buckets.
        args: The job's training arguments, as far as they cut buckets (`Rules.of`) or name them (`gradient_type`).
        scaler: State of the loss scaler, and the tensors in it.

    Returns:
        The stored parts of the buckets, filled from `optimizer.state.STATE.NAME`, and the objects of each data-parallel
        group.

    Raises:
        RequestError: A tensor cannot be divided so, it is not known where a parameter stands in the order, or a
            data-parallel rank would have nothing of a bucket.
    """
    parts, objects = list[BucketOut](), list[ObjectOut]()
    for chained in chain:
        if not chained.part.distributed:
            continue
        for group_index, group, buffers in model.data_parallel_buffers(chained.member, args):
            prefix = f"{chained.prefix}optimizer.distributed.dp_group_idx_{group_index}"
            ranks = model.layout.group_ranks(group)
            values: dict[str, Any] = {
                "optimizer": {"param_groups": [dict(options) for options in chained.groups]},
                "per_bucket_numel": [],
                "per_bucket_numel_unpadded": [],
            }
            for number, buffer in enumerate(buffers):
                types, buckets = gradient_type(buffer.dtype, args), buffer.buckets()
                values["per_bucket_numel"].append({types: [b.numel for b in buckets]})
                values["per_bucket_numel_unpadded"].append({types: [b.numel_unpadded for b in buckets]})
                key = f"{prefix}.gbuf_idx_{number}.dtype_({', '.join(kind.path for kind in types)})"
                for k, bucket in enumerate(buckets):
                    parts += _stored_parts(f"{key}.bucket_idx_{k}", bucket, ranks, states)
            if scaler[0] is not None:
                values["grad_scaler"] = scaler[0]
            for name, value in values.items():
                storages = scaler[1] if name == "grad_scaler" else {}
                # Megatron wraps every object in a list of one
                objects.append(ObjectOut(f"{prefix}.{name}/shard_0_1", ranks[0], object_record([value], storages)))
    return parts, objects


def gradient_type(dtype: DType, args: Mapping[str, Any]) -> tuple[Global, Global]:
    """The element types of a buffer's parameters and of their gradients, by which Megatron names it."""
    in_fp32 = args.get("accumulate_allreduce_grads_in_fp32") is not False
    return Global("torch", dtype.name), Global("torch", "float32" if in_fp32 else dtype.name)


def _stored_parts(
    key: str, bucket: Bucket[LocalTensor], ranks: Sequence[int], states: Mapping[str, DType]
) -> Iterator[BucketOut]:
    """What the ranks of a group store of a bucket, one state after the other."""
    parts: list[tuple[int, int, int, list[tuple[int, Piece]]]] = []
    for rank, chunks in zip(ranks, dp_chunks(bucket, len(ranks)), strict=True):
        for start, length, position in chunks:
            tensor, begin = bucket.members[max(position, 0)]
            pieces = list(flat_pieces(tensor, start - begin, length)) if position >= 0 else []  # else a gap
            parts.append((rank, start, length, pieces))
    for state, dtype in states.items():
        for rank, start, length, pieces in parts:
            filled = ((first, state_piece(piece, state, dtype)) for first, piece in pieces)
            stored_as = (f"{key}.{state}", bucket.numel_unpadded, start, length)
            yield BucketOut(*stored_as, dtype, rank, end_to_end(filled, dtype, length))


def buffer_pieces(buffer: Buffer, state: str, dtype: DType) -> list[Piece]:
    """What fills the buckets of a buffer for one state, end to end, without the padding behind each."""
    pieces, base = list[tuple[int, Piece]](), 0
    for bucket in buffer.buckets():
        pieces += [(base + start, state_piece(tensor, state, dtype)) for tensor, start in bucket.members]
        base += bucket.numel_unpadded
    return end_to_end(pieces, dtype, base)


def state_piece(parameter: Piece, state: str, dtype: DType) -> Piece:
    """What the optimizer keeps for a parameter, filled as the parameter is."""
    copies = [replace(copy, source=str(StateName(state, copy.source))) for copy in parameter.copies]
    return replace(parameter, dtype=dtype, copies=copies)


def flat_pieces(tensor: Piece, start: int, length: int) -> Iterator[tuple[int, Piece]]:
    """Some elements of a tensor, counted in C order, as pieces; each with its first element, counted from `start`."""
    first = 0
    for box in flat_range(tensor.laid, start, length):
        copies = [
            Copy(
                copy.source,
                target_box_of(reversed_copy(copy), inner),
                copy.target,
                inner.relative_to(box.start),
                copy.op,
            )
            for copy in tensor.copies
            if (inner := copy.target_box.intersect(box)) is not None
        ]
        fills = [inner.relative_to(box.start) for fill in tensor.fills if (inner := fill.intersect(box)) is not None]
        yield first, Piece(tensor.name, tensor.dtype, box.shape, copies=copies, fills=fills)
        first += box.volume
