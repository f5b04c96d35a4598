"""Flat optimizer buckets as a checkpoint stores them, found in its keys and objects.

    dp_reshardable, fully_sharded_bucket_space    one 1-D key for each bucket and state
    dp_zero_gather_scatter                        one object for each data-parallel group, with a tensor for each state in
                                                  it: all buckets of a buffer, one after the other, without padding

Facts: Megatron-Core, optimizer/distrib_optimizer.py (`sharded_param_state_*`) and optimizer/optimizer.py
(`ChainedOptimizer`), tags core_v0.6.0 to core_v0.19.0.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

from converters.archive.records import tensor_ref
from converters.dtypes import DType, dtype
from converters.errors import FormatError
from converters.formats.base import Reader
from converters.names import printable
from converters.pickles import Global

if TYPE_CHECKING:
    from collections.abc import Sequence

    from converters.archive.records import TensorRef
    from converters.catalog import StoredArray

__all__ = ["FlatReader", "StoredBuffer", "StoredGroup", "stored_groups"]

# (gbuf_idx, dtypes) -> state -> bucket_idx -> array and its element type
_Buffers: TypeAlias = "dict[tuple[int, str], dict[str, dict[int, tuple[StoredArray, DType]]]]"
_GROUP = re.compile(r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.(.*)", re.DOTALL)
_BUCKET = re.compile(r"gbuf_idx_(\d+)\.dtype_(.*)\.bucket_idx_(\d+)\.(\w+)", re.DOTALL)
_TORCH = re.compile(r"torch\.(\w+)")


@runtime_checkable
class FlatReader(Reader, Protocol):
    """A reader whose objects can be looked into."""

    def object_value(self, key: str) -> Any:
        """The inert tree of a stored object, None if there is none."""
        ...

    def object_array(self, key: str, ref: TensorRef) -> StoredArray:
        """A tensor inside a stored object, as an array with a record number of its own."""
        ...


@dataclass
class StoredBuffer:
    """One buffer (`gbuf_idx`) of a data-parallel group.

    Attributes:
        dtype: Element type of the parameters; None if the key does not tell (before 0.7).
        states: For each state, the arrays of its buckets with their element types; a single one for all of them if
            `coalesced`.
        sizes: Elements of each bucket without the padding at its end; None if not stored.
        coalesced: The buckets lie behind each other in one array.
    """

    dtype: DType | None
    states: dict[str, list[tuple[StoredArray, DType]]] = field(default_factory=dict)
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

    def what(self, buffer: int) -> str:
        """Names a buffer in an error."""
        return f"{self.prefix}optimizer dp_group_idx_{self.index} gbuf_idx_{buffer}"


def stored_groups(reader: FlatReader) -> dict[tuple[int | None, int], StoredGroup]:
    """All data-parallel groups with flat buckets, by number of the chained optimizer (None: a single one) and index."""
    groups: dict[tuple[int | None, int], StoredGroup] = {}
    found: dict[tuple[int | None, int], _Buffers] = defaultdict(dict)
    for tensor in reader.catalog.tensors.values():
        group = _GROUP.fullmatch(tensor.name) if tensor.opaque else None
        bucket = _BUCKET.fullmatch(group[3]) if group else None
        if group is None or bucket is None:
            continue
        chain = None if group[1] is None else int(group[1])
        states = found[chain, int(group[2])].setdefault((int(bucket[1]), bucket[2]), {})
        states.setdefault(bucket[4], {})[int(bucket[3])] = tensor.parts[0].array, tensor.dtype
    for where, buffers in found.items():
        made = groups[where] = StoredGroup(_prefix(where[0]), where[1])
        sizes = reader.object_value(made.key("per_bucket_numel_unpadded"))
        for (number, types), by_state in sorted(buffers.items()):
            ordered = {state: [arrays[k] for k in sorted(arrays)] for state, arrays in by_state.items()}
            made.buffers[number] = StoredBuffer(
                _param_dtype(_TORCH.findall(types)), ordered, _sizes(sizes, number, made.what(number))
            )
    for key, item in reader.catalog.objects.items():
        group = _GROUP.fullmatch(item.name)
        if group is not None and group[3] == "param_state":
            chain = None if group[1] is None else int(group[1])
            made = groups[chain, int(group[2])] = StoredGroup(_prefix(chain), int(group[2]))
            _read_param_state(reader, key, made)
    return groups


def _prefix(chain: int | None) -> str:
    return "" if chain is None else f"chained_{chain}."


def _param_dtype(names: Sequence[str]) -> DType | None:
    return dtype(names[0]) if len(names) == 2 else None


def _sizes(value: Any, number: int, what: str) -> list[int] | None:
    """`[{(torch.bfloat16, torch.float32): [6080, 6016]}]`, one entry for each buffer."""
    if value is None:
        return None
    try:
        entry = value[number] if isinstance(value, list) else value
        (sizes,) = entry.values()
        if not all(type(n) is int and n >= 0 for n in sizes):
            raise ValueError(sizes)
        return list(sizes)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{what}: per_bucket_numel_unpadded is not what Megatron writes") from error


def _read_param_state(reader: FlatReader, key: str, group: StoredGroup) -> None:
    """The legacy distrib_optim dictionary: `{gbuf_idx: {(param dtype, grad dtype): {state: tensor}}}`."""
    value = reader.object_value(key)
    if value is None:
        return
    what = printable(key)
    if not isinstance(value, Mapping):
        raise FormatError(f"{what} is not the dictionary that Megatron writes")
    for number, by_type in value.items():
        if type(number) is not int:
            continue
        if not isinstance(by_type, Mapping) or len(by_type) != 1:
            raise FormatError(f"{what}: buffer {number} is not what Megatron writes")
        ((types, states),) = by_type.items()
        names = [node.name for node in types if isinstance(node, Global)] if isinstance(types, tuple) else []
        buffer = group.buffers[number] = StoredBuffer(_param_dtype(names), coalesced=True)
        buffer.sizes = _sizes(value.get("per_bucket_numel_unpadded"), number, what)
        for state, node in states.items():
            if not isinstance(state, str) or state.startswith("numel"):
                continue
            nodes = node if isinstance(node, list) else [node]
            refs = [tensor_ref(inner, what) for inner in nodes]
            buffer.coalesced = not isinstance(node, list)
            if any(ref is None or len(ref.shape) != 1 for ref in refs):
                raise FormatError(f"{what}: {printable(state)} of buffer {number} is not a flat tensor")
            buffer.states[state] = [(reader.object_array(key, ref), ref.dtype) for ref in refs if ref is not None]
