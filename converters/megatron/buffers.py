"""The distributed optimizer's flat buffers: which part of which tensor lies where.

Every model-parallel rank (shared by a data-parallel group) puts its parameters, last one first, end to end into a buffer
per element type, cut into buckets. Each parameter begins at a multiple of 64 elements, each bucket in memory at a
multiple of lcm(dp, 128). The state of a bucket (fp32 master weights, exp_avg, exp_avg_sq) lies in the same order, split
evenly over the data-parallel ranks:

    named_parameters:  embedding  proj  qkv.norm  qkv  fc1.norm  fc1  fc2  final_norm  output
                                                                     (reversed)
    bucket 0  | output     | final_norm | .. | fc2 | fc1: gate up | fc1.norm | .. | qkv | ... |  embedding  |#####|
              ^ 0                        gap: next multiple of 64                 numel_unpadded ^     numel ^
              | dp rank 0         | dp rank 1         | dp rank 2         | dp rank 3                       |

Facts: Megatron-Core, distributed/param_and_grad_buffer.py (0.7.0 to 0.16.1), distributed/distributed_data_parallel.py,
optimizer/distrib_optimizer.py, models/common/language_module/language_module.py (`shared_embedding`).
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from converters.box import ranges_between
from converters.errors import RequestError
from converters.words import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from converters.box import Box
    from converters.dtypes import DType
    from converters.megatron.layout import Layout
    from converters.megatron.rank_state_dict import LocalTensor


_P = TypeVar("_P", "Local", "LocalTensor")


class Misfit(RequestError):
    """The parameters do not fill the buckets: the order or the layout that was assumed is not that of the writer."""


@dataclass(frozen=True, slots=True)
class Local:
    """A parameter of one rank, flattened.

    Attributes:
        name: Canonical name; that of the whole if it is stored as several tensors.
        dtype: Element type of the weight.
        segments: Tensor and box, one after the other, each in C order.
        numel: Elements of all of them.
        first: No rank before this one holds the same elements; others hold replicas.
        shared: A copy of the embedding is trained on another stage too, which gives it a bucket of its own.
    """

    name: str
    dtype: DType
    segments: tuple[tuple[str, Box], ...]
    numel: int
    first: bool = True
    shared: bool = False


@dataclass(frozen=True, slots=True)
class Bucket(Generic[_P]):
    """A part of a buffer.

    Attributes:
        members: Parameters and the element at which each begins, in order.
        numel_unpadded: Elements up to the end of the last one (of the gap behind it, before a shared embedding).
        numel: Elements in memory, a multiple of the data-parallel size.
    """

    members: tuple[tuple[_P, int], ...]
    numel_unpadded: int
    numel: int


@dataclass(frozen=True, slots=True)
class Rules:
    """How a job cuts its buffers.

    Attributes:
        dp: Size of the data-parallel group that shares a buffer (with context parallelism; for experts, the experts').
        align: Parameters begin at multiples of this: 64, or 1 before Megatron-Core 0.8.
        bucket_size: A bucket is closed when it has so many elements; None for one bucket. Megatron applies it to the
            first model chunk of the first pipeline stage only.
        busbw: `--ddp-pad-buckets-for-high-nccl-busbw`: pad buckets to 65536 elements too.
        early: As Megatron-Core 0.8 to 0.12 did: the bucket before a shared embedding is padded like one in memory, unless
            it ends at a multiple of `dp` anyway.
    """

    dp: int
    align: int = 64
    bucket_size: int | None = None
    busbw: bool = False
    early: bool = False

    @classmethod
    def of(
        cls,
        args: Mapping[str, Any],
        layout: Layout,
        numel: Callable[[int], int],
        pp: int,
        chunk: int,
        *,
        experts: bool | None = False,
        align: int = 64,
        early: bool = False,
    ) -> Rules:
        """Those for a model chunk of a pipeline stage of a job.

        Args:
            args: Training arguments.
            layout: The job.
            numel: Elements of all parameters of a rank of a pipeline stage, for `--ddp-num-buckets`.
            pp: Pipeline rank.
            chunk: Which of its model chunks.
            experts: The parameters are those of experts, which have an optimizer of their own.
            align: As the attribute.
            early: As the attribute.
        """
        size = None
        apart = args.get("overlap_param_gather_with_optimizer_step") is True
        if pp == chunk == 0 and args.get("overlap_grad_reduce") is True and not apart:
            count, size = args.get("ddp_num_buckets"), args.get("ddp_bucket_size")
            size = size if isinstance(size, int) else max(40_000_000, 1_000_000 * layout.dp_cp)
            size = numel(0) // count if isinstance(count, int) else size
        busbw = args.get("ddp_pad_buckets_for_high_nccl_busbw") is True
        return cls(layout.edp if experts else layout.dp_cp, align, size, busbw, early)

    def padded(self, numel: int) -> int:
        """Elements of a bucket in memory."""
        return _ceil(numel, math.lcm(self.dp, 128, 1 << 16 if self.busbw else 1))


@dataclass(frozen=True, slots=True)
class Buffer:
    """The parameters of one model chunk and one element type, in the order of `named_parameters()`.

    Attributes:
        rules: How the job cuts it.
    """

    dtype: DType
    parameters: tuple[LocalTensor, ...]
    rules: Rules

    def buckets(self) -> list[Bucket[LocalTensor]]:
        """Its buckets as Megatron makes them."""
        return arrange(self.parameters, self.rules)


def _ceil(n: int, step: int) -> int:
    return -(-n // step) * step


def arrange(parameters: Sequence[_P], rules: Rules) -> list[Bucket[_P]]:
    """Buckets of a buffer as Megatron makes them.

    Args:
        parameters: In the order of `named_parameters()`.
    """
    out: list[Bucket[_P]] = []
    members: list[tuple[_P, int]] = []
    at = 0  # in the open bucket: buckets begin at multiples of 128, so that alignment may be counted from there

    def close() -> None:
        nonlocal at, members
        out.append(Bucket(tuple(members), at, rules.padded(at)))
        members, at = [], 0

    for parameter in reversed(parameters):
        at = _ceil(at, rules.align)
        if parameter.shared and members:
            if rules.early and at % rules.dp:
                at = rules.padded(at)
            close()
        members.append((parameter, at))
        at += parameter.numel
        if parameter.shared or (rules.bucket_size is not None and at >= rules.bucket_size):
            close()
    if members:
        close()
    return out


def fit(parameters: Sequence[_P], sizes: Sequence[int], align: int, label: str) -> list[Bucket[_P]]:
    """Buckets of a buffer whose sizes are known.

    Args:
        parameters: In the order of `named_parameters()`.
        sizes: Elements of each bucket, the padding at its end left out.
        align: Parameters begin at multiples of this.

    Raises:
        Misfit: The parameters do not fill the buckets exactly.
    """
    out: list[Bucket[_P]] = []
    members: list[tuple[_P, int]] = []
    at = 0
    for parameter in reversed(parameters):
        start = _ceil(at, align)
        alone = parameter.shared or (members and members[-1][0].shared)
        if members and len(out) < len(sizes) and (alone or start + parameter.numel > sizes[len(out)]):
            out.append(_closed(members, at, sizes[len(out)], align, label, shared=parameter.shared))
            members, start = [], 0
        if len(out) == len(sizes) or start + parameter.numel > sizes[len(out)]:
            numbers = f"{sum(p.numel for p in parameters):,} elements of parameters, {sum(sizes):,} in buckets"
            raise Misfit(f"{label}: {parameter.name} does not fit", details=[numbers], tensor=parameter.name)
        members.append((parameter, start))
        at = start + parameter.numel
    if members:
        out.append(_closed(members, at, sizes[len(out)], align, label))
    if len(out) != len(sizes):
        raise Misfit(f"{label} has {counted(len(sizes), 'bucket')}, its parameters fill {len(out)}")
    return out


def _closed(
    members: list[tuple[_P, int]], end: int, size: int, align: int, label: str, *, shared: bool = False
) -> Bucket[_P]:
    padded = shared and size % 128 == 0 and end <= size < end + (1 << 17)  # see `Rules.early`
    if size not in (end, _ceil(end, align)) and not padded:
        names = f"up to {members[-1][0].name}"
        raise Misfit(f"{label} has a bucket of {size:,} elements, its parameters take {end:,}", details=[names])
    return Bucket(tuple(members), size, size)


def dp_chunks(bucket: Bucket[_P], dp: int) -> list[list[tuple[int, int, int]]]:
    """What each data-parallel rank stores of a bucket: `(start, length, position in bucket.members)`, in order.

    As `sharded_param_state_dp_reshardable` of 0.16.1 does: each rank has an equal share of the padded bucket, stored as a
    chunk for each parameter in it and one for each gap, whose position is -1; what lies behind the last parameter is not
    stored.

    Raises:
        RequestError: A rank would have nothing but padding; Megatron fails there ("empty bucket encountered").
    """
    share = bucket.numel // dp
    starts = [start for _, start in bucket.members]
    stops = [start + parameter.numel for parameter, start in bucket.members]
    out = []
    for rank in range(dp):
        low, high = rank * share, (rank + 1) * share
        positions = range(bisect_right(stops, low), bisect_left(starts, high))
        if not positions:
            raise RequestError(
                f"a bucket of {bucket.numel_unpadded:,} elements leaves data-parallel rank {rank} of {dp} without any",
                hint="write the optimizer with --optimizer fully_reshardable, or choose a smaller --dp",
            )
        parts = [(max(starts[n], low), min(stops[n], high), n) for n in positions]
        filled = ((begin - low, end - low) for begin, end, _ in parts)
        gaps = [(low + a, low + b, -1) for a, b in ranges_between(filled, min(high, bucket.numel_unpadded) - low)]
        out.append([(begin, end - begin, position) for begin, end, position in sorted(parts + gaps)])
    return out
