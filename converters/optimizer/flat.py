"""Flat optimizer buckets as a checkpoint stores them, and which parameter lies where in them.

    dp_reshardable, fully_sharded_bucket_space    one 1-D key for each bucket and state
    dp_zero_gather_scatter                        one object for each data-parallel group, with a tensor for each state in
                                                  it: all buckets of a buffer, one after the other, without padding
    distrib_optim.pt                              the same, in a file of a legacy checkpoint

Facts: Megatron-Core, optimizer/distrib_optimizer.py (`sharded_param_state_*`) and optimizer/optimizer.py
(`ChainedOptimizer`), tags core_v0.6.0 to core_v0.19.0.
"""

from __future__ import annotations

import contextlib
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from converters.dtypes import DType, dtype
from converters.megatron.buffers import Misfit, arrange, fit
from converters.megatron.optimizer_parts import MASTERS
from converters.names import StateName, printable
from converters.pickles.nodes import Global
from converters.torchzip.records import tensor_ref
from converters.words import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from converters.chunks import StoredArray
    from converters.formats.base import Reader
    from converters.megatron.buffers import Bucket, Local, Rules
    from converters.megatron.flat_index import Collected
    from converters.torchzip.records import TensorRef

# (gbuf_idx, dtypes) -> state -> bucket_idx
_Buffers: TypeAlias = "dict[tuple[int, str], dict[str, dict[int, StoredFlat]]]"
_GROUP = re.compile(r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.(.*)", re.DOTALL)
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


def stored_groups(reader: Reader) -> dict[tuple[int | None, int], StoredGroup]:
    """All data-parallel groups with flat buckets, by number of the chained optimizer (None: a single one) and index."""
    groups: dict[tuple[int | None, int], StoredGroup] = {}
    by_group: dict[tuple[int | None, int], _Buffers] = defaultdict(dict)
    for tensor in reader.catalog.tensors.values():
        group = _GROUP.fullmatch(tensor.name) if tensor.opaque else None
        bucket = _BUCKET.fullmatch(group[3]) if group else None
        if group is None or bucket is None:
            continue
        chain = None if group[1] is None else int(group[1])
        states = by_group[chain, int(group[2])].setdefault((int(bucket[1]), bucket[2]), {})
        array = tensor.parts[0].array
        states.setdefault(bucket[4], {})[int(bucket[3])] = StoredFlat(array, tensor.dtype, 0, array.shape[0])
    for where, buffers in by_group.items():
        stored_group = groups[where] = StoredGroup(_prefix(where[0]), where[1])
        sizes = reader.object_value(stored_group.key("per_bucket_numel_unpadded"))
        for (number, types), by_state in sorted(buffers.items()):
            ordered = {state: [arrays[k] for k in sorted(arrays)] for state, arrays in by_state.items()}
            stored_group.buffers[number] = StoredBuffer(
                _param_dtype(_TORCH.findall(types)), ordered, bucket_sizes(sizes, number, stored_group.label(number))
            )
    for key, item in reader.catalog.objects.items():
        group = _GROUP.fullmatch(item.name)
        if group is not None and group[3] == "param_state":
            chain = None if group[1] is None else int(group[1])
            groups[chain, int(group[2])] = StoredGroup(_prefix(chain), int(group[2]), _param_state(reader, key))
    return groups


def _param_state(reader: Reader, key: str) -> dict[int, StoredBuffer]:
    value = reader.object_value(key)
    if value is None:
        return {}

    def flat(ref: TensorRef, _: str) -> StoredFlat:
        return StoredFlat(reader.object_array(key, ref), ref.dtype, 0, ref.shape[0])

    return read_buffers(value, printable(key), flat)


def _prefix(chain: int | None) -> str:
    return "" if chain is None else f"chained_{chain}."


def _param_dtype(names: Sequence[str]) -> DType | None:
    return dtype(names[0]) if len(names) == 2 else None


def bucket_sizes(value: Any, number: int, what: str) -> list[int] | None:
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
        raise Misfit(f"{what}: the sizes of its buckets are not what Megatron writes") from error


def read_buffers(value: Any, what: str, flat: Callable[[TensorRef, str], StoredFlat]) -> dict[int, StoredBuffer]:
    """The buffers of a rank in the form of `distrib_optim.pt`: `{gbuf_idx: {(param dtype, grad dtype): {state: tensor}}}`.

    Args:
        value: The dictionary. A state is one tensor (from 2024-04), or a list of one for each bucket (from 2024-02).
        what: Names it in an error.
        flat: Gives a tensor in it its place.

    Raises:
        Misfit: It is not what Megatron writes.
    """
    if not isinstance(value, Mapping):
        raise Misfit(f"{what} is not the dictionary that Megatron writes")
    out = {}
    for number, by_type in value.items():
        if type(number) is not int:
            continue
        where = f"{what}: buffer {number}"
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


def collect_states(
    stored: StoredBuffer, parameters: Sequence[Local], rules: Sequence[Rules], what: str, out: Collected
) -> None:
    """Notes where the state of each of a buffer's parameters lies, as `optimizer.state.STATE.NAME`.

    Args:
        stored: The buffer.
        parameters: In the order of `named_parameters()`.
        rules: How its job may have cut it, the likeliest first.
        what: Names it in an error.
        out: Where to note it.

    Raises:
        Misfit: The parameters do not fill it.
    """
    if not stored.states:
        return
    first = next(iter(stored.states.values()))
    if stored.coalesced and stored.sizes is None:
        buckets = _arranged(parameters, first[0].numel, rules, what)
    else:
        buckets = _fitted(parameters, stored.sizes or [flat.numel for flat in first], rules, what)
    total = sum(bucket.numel_unpadded for bucket in buckets)
    for state, flats in stored.states.items():
        if stored.coalesced and flats[0].numel != total:
            raise Misfit(f"{what} has {flats[0].numel:,} elements, its parameters take {total:,}")
        if not stored.coalesced and len(flats) != len(buckets):
            raise Misfit(f"{what} has {counted(len(flats), 'bucket')}, its parameters fill {len(buckets)}")
        base, prefix = 0, str(StateName(MASTERS.get(state, state), ""))
        for number, bucket in enumerate(buckets):
            flat = flats[0 if stored.coalesced else number]
            if base + bucket.numel_unpadded > flat.numel:
                raise Misfit(f"{what} is smaller than its parameters, which take {total:,} elements")
            for local, start in bucket.members:
                out.add(prefix, local, flat.array, flat.dtype, flat.first + base + start)
            base += bucket.numel_unpadded if stored.coalesced else 0


def _fitted(parameters: Sequence[Local], sizes: Sequence[int], candidates: Sequence[Rules], what: str) -> list[Bucket]:
    *alternatives, last = dict.fromkeys(rules.align for rules in candidates)
    for align in alternatives:
        with contextlib.suppress(Misfit):
            return fit(parameters, sizes, align, what)
    return fit(parameters, sizes, last, what)


def _arranged(parameters: Sequence[Local], total: int, candidates: Sequence[Rules], what: str) -> list[Bucket]:
    """Where parameters lie in a buffer whose buckets are stored end to end: the first rules that fill it."""
    sizes = []
    for rules in candidates:
        buckets = arrange(parameters, rules)
        sizes.append(sum(bucket.numel_unpadded for bucket in buckets))
        if sizes[-1] == total:
            return buckets
    raise Misfit(f"{what} has {total:,} elements, its parameters take {sizes[0]:,}")
