"""Flat optimizer buckets as checkpoints store them; `optimizer.buckets` says which parameter lies where in them.

    dp_reshardable, fully_sharded_bucket_space    one 1-D key for each bucket and state
    dp_zero_gather_scatter                        one object for each data-parallel group, with a tensor for each state in
                                                  it: all buckets of a buffer, one after the other, without padding
    distrib_optim.pt                              the same, in a file of a legacy checkpoint

Facts: Megatron-Core, optimizer/distrib_optimizer.py (`sharded_param_state_*`) and optimizer/optimizer.py
(`ChainedOptimizer`), tags core_v0.6.0 to core_v0.19.0.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from converters.dtypes import DType, dtype
from converters.megatron.buffers import Misfit
from converters.names import printable
from converters.pickles.nodes import Global
from converters.torchzip.tensor_refs import tensor_ref

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from converters.chunks import StoredArray
    from converters.formats.base import Reader
    from converters.torchzip.tensor_refs import TensorRef

# (gbuf_idx, dtypes) -> state -> bucket_idx
_Buffers: TypeAlias = "dict[tuple[int, str], dict[str, dict[int, StoredFlat]]]"
_GROUP = re.compile(
    r"(?P<prefix>(?:chained_(?P<number>\d+)\.)?)optimizer\.distributed\.dp_group_idx_(?P<index>\d+)\.(?P<name>.*)",
    re.DOTALL,
)
_BUCKET = re.compile(r"gbuf_idx_(\d+)\.dtype_(.*)\.bucket_idx_(\d+)\.(\w+)", re.DOTALL)
_TORCH = re.compile(r"torch\.(\w+)")


class StoredFlat(NamedTuple):
    """A stored 1-D tensor: the array that it lies in, its element type, its first element there, its elements."""

    array: StoredArray
    dtype: DType
    first: int
    numel: int


@dataclass
class StoredBuffer:
    """One buffer (`gbuf_idx`) of a data-parallel group.

    Attributes:
        dtype: Element type of the parameters; None if the key does not tell (before 0.7).
        states: For each state, its buckets; a single one for all of them if `coalesced`.
        sizes: Elements of each bucket without the padding at its end; None if not stored.
        coalesced: The buckets lie behind each other in one array.
    """

    dtype: DType | None
    states: dict[str, list[StoredFlat]] = field(default_factory=dict)
    sizes: list[int] | None = None
    coalesced: bool = False


@dataclass
class StoredGroup:
    """The buffers of one data-parallel group of one optimizer.

    Attributes:
        prefix: What stands before `optimizer.distributed`: "chained_1." for the experts' optimizer, or "".
        index: `dp_group_idx`.
        buffers: By `gbuf_idx`.
    """

    prefix: str
    index: int
    buffers: dict[int, StoredBuffer] = field(default_factory=dict)

    def key(self, name: str) -> str:
        """Key of one of the group's objects."""
        return f"{self.prefix}optimizer.distributed.dp_group_idx_{self.index}.{name}/shard_0_1"

    def label(self, buffer: int) -> str:
        """Names a buffer in an error."""
        return f"{self.prefix}optimizer dp_group_idx_{self.index} gbuf_idx_{buffer}"


def stored_groups(reader: Reader) -> dict[tuple[int, int], StoredGroup]:
    """All data-parallel groups with flat buckets, by the optimizer's number in the chain (0 for the only one) and index.

    Raises:
        Misfit: Some keys are those of the only optimizer of a job, others those of one of several.
    """
    groups: dict[tuple[int, int], StoredGroup] = {}
    by_group: dict[tuple[int, int], _Buffers] = defaultdict(dict)
    for tensor in reader.catalog.tensors.values():
        key = _GROUP.fullmatch(tensor.name) if tensor.opaque else None
        bucket = _BUCKET.fullmatch(key["name"]) if key else None
        if key is None or bucket is None:
            continue
        states = by_group[_stored_group(groups, key)].setdefault((int(bucket[1]), bucket[2]), {})
        array = tensor.parts[0].array
        states.setdefault(bucket[4], {})[int(bucket[3])] = StoredFlat(array, tensor.dtype, 0, array.shape[0])
    for where, buffers in by_group.items():
        group = groups[where]
        sizes = reader.object_value(group.key("per_bucket_numel_unpadded"))
        for (number, types), by_state in sorted(buffers.items()):
            ordered = {state: [arrays[k] for k in sorted(arrays)] for state, arrays in by_state.items()}
            group.buffers[number] = StoredBuffer(
                _param_dtype(_TORCH.findall(types)), ordered, bucket_sizes(sizes, number, group.label(number))
            )
    for name, item in reader.catalog.objects.items():
        key = _GROUP.fullmatch(item.name)
        if key is not None and key["name"] == "param_state":
            groups[_stored_group(groups, key)].buffers = _param_state(reader, name)
    return groups


def _stored_group(groups: dict[tuple[int, int], StoredGroup], key: re.Match[str]) -> tuple[int, int]:
    """Where in `groups` the group of a key is; makes it."""
    where = int(key["number"] or 0), int(key["index"])
    group = groups.setdefault(where, StoredGroup(key["prefix"], where[1]))
    if group.prefix != key["prefix"]:
        raise Misfit(f"{group.label(0)} is of one optimizer of a chain, {printable(key[0])} of another with its number")
    return where


def _param_state(reader: Reader, key: str) -> dict[int, StoredBuffer]:
    value = reader.object_value(key)
    if value is None:
        return {}

    def flat(ref: TensorRef, _: str) -> StoredFlat:
        return StoredFlat(reader.object_array(key, ref), ref.dtype, 0, ref.shape[0])

    return read_buffers(value, printable(key), flat)


def _param_dtype(names: Sequence[str]) -> DType | None:
    return dtype(names[0]) if len(names) == 2 else None


def bucket_sizes(value: Any, number: int, label: str) -> list[int] | None:
    """Elements of each bucket of a buffer, of all buffers': `[{(torch.bfloat16, torch.float32): [6080, 6016]}]`."""
    if value is None:
        return None
    try:
        entry = value[number] if isinstance(value, list) else value.get(number, value)
        (sizes,) = entry.values()
        if not all(type(n) is int and n >= 0 for n in sizes):
            raise ValueError(sizes)
        return list(sizes)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise Misfit(f"{label}: the sizes of its buckets are not what Megatron writes") from error


def read_buffers(value: Any, label: str, flat: Callable[[TensorRef, str], StoredFlat]) -> dict[int, StoredBuffer]:
    """The buffers of a rank in the form of `distrib_optim.pt`: `{gbuf_idx: {(param dtype, grad dtype): {state: tensor}}}`.

    Args:
        value: The dictionary. A state is one tensor (from 2024-04), or a list of one for each bucket (from 2024-02).
        label: Names it in an error.
        flat: Gives a tensor in it its place.

    Raises:
        Misfit: It is not what Megatron writes.
    """
    if not isinstance(value, Mapping):
        raise Misfit(f"{label} is not the dictionary that Megatron writes")
    out = {}
    for number, by_type in value.items():
        if type(number) is not int:
            continue
        where = f"{label}: buffer {number}"
        if not isinstance(by_type, Mapping) or len(by_type) != 1:
            raise Misfit(f"{where} is not what Megatron has written since 2024-02; older files were keyed by model")
        ((types, states),) = by_type.items()
        if not isinstance(states, Mapping):
            raise Misfit(f"{where} has no states")
        names = [node.name for node in types if isinstance(node, Global)] if isinstance(types, tuple) else []
        buffer = out[number] = StoredBuffer(_param_dtype(names), coalesced=True)
        buffer.sizes = bucket_sizes(value.get("per_bucket_numel_unpadded"), number, where)
        for state, node in states.items():
            if not isinstance(state, str) or state.startswith("numel"):
                continue
            buffer.coalesced = not isinstance(node, list)
            refs = [tensor_ref(inner, where) for inner in (node if isinstance(node, list) else [node])]
            if any(ref is None or len(ref.shape) != 1 for ref in refs):
                raise Misfit(f"{where}: {printable(state)} is not a flat tensor")
            buffer.states[state] = [flat(ref, where) for ref in refs if ref is not None]
    return out
