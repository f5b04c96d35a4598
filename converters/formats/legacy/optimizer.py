"""Optimizer state of a Megatron-LM legacy checkpoint, under the names of its parameters.

    plain Adam               state by number: the parameters of group after group, each in the order of the model; the fp32
                             master weights in a list of their own, which lacks parameters that are fp32 themselves
    distrib_optim.pt         flat buffers, see `parallel.buffers`; the order is that of the rank's own model, whose names
                             lie beside it. One array for each state (from 2024-04), or one for each bucket (from 2024-02)

A mixture of experts with expert parallelism has a list of two of either: the dense parameters, and the experts.

Sources: Megatron-Core, optimizer/optimizer.py (`Float16OptimizerWithFloat16Params.state_dict`, `ChainedOptimizer`),
optimizer/__init__.py (`_get_param_groups`), optimizer/distrib_optimizer.py (`get_parameter_state_dp_zero`), tags
core_v0.4.0 to core_v0.16.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from converters.archive.records import tensor_ref
from converters.errors import FormatError
from converters.formats.legacy.groups import group_members
from converters.optimizer.flat import StoredFlat, bucket_sizes, place, read_buffers
from converters.parallel.buffers import Local, Misfit, Rules, arrange

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from converters.archive.records import TensorRef
    from converters.dtypes import DType
    from converters.formats.containers.archive import PtFile, Storages
    from converters.parallel.collected import Collected
    from converters.parallel.layout import Layout

__all__ = ["FlatFile", "Owned", "optimizer_entries", "place_plain", "tensors_in"]

_MOST_PADDING = 1 << 17  # elements behind a bucket
DEEPEST = 64  # a pickle may hold a dictionary that holds itself


@dataclass(frozen=True, slots=True)
class Owned:
    """A parameter of one rank.

    Attributes:
        key: Its name in the rank's file.
        local: What it is: boxes of whole tensors.
        expert: It belongs to a routed expert.
    """

    key: str
    local: Local
    shape: tuple[int, ...]
    chunk: int
    expert: bool


def optimizer_entries(value: Any) -> list[Any]:
    """The states of a rank's optimizers: one, or one for dense parameters and one for experts; None for no state."""
    return list(value) if isinstance(value, list) else [value]


def place_plain(
    entries: list[Any],
    owned: Sequence[Owned],
    args: Mapping[str, Any],
    file: PtFile,
    storages: Storages,
    out: Collected,
) -> None:
    """The state of an optimizer that is not distributed.

    Raises:
        Misfit: The groups are not those that Megatron makes of these parameters.
    """
    for entry, mine in _chained(entries, owned, file.name):
        if not isinstance(entry, Mapping):
            continue
        inner = entry.get("optimizer", entry.get("optimizer_state_dict"))
        state = inner if isinstance(inner, Mapping) else entry  # fp32 training stores torch's own dictionary
        groups, held = state.get("param_groups"), state.get("state")
        if not isinstance(groups, list) or not isinstance(held, Mapping):
            raise Misfit(f"{file.name}: the optimizer is not the dictionary that Megatron-LM writes")
        masters = entry.get("fp32_from_fp16_params", entry.get("fp32_from_fp16", []))
        members = _grouped(groups, mine, args, file.name)
        for number, (group, parameters) in enumerate(zip(groups, members, strict=True)):
            low = iter(masters[number] if isinstance(masters, list) and number < len(masters) else ())
            for index, parameter in zip(group["params"], parameters, strict=True):
                nodes = dict(held.get(index, {}))
                if masters and parameter.local.dtype.name != "float32":
                    nodes["param"] = next(low, None)
                _place_states(nodes, parameter, file, storages, out)
            if next(low, None) is not None:
                raise Misfit(f"{file.name}: group {number} has more master weights than parameters")


def _place_states(nodes: Mapping[Any, Any], parameter: Owned, file: PtFile, storages: Storages, out: Collected) -> None:
    for state, node in nodes.items():
        what = f"{file.name}: {state} of {parameter.key}"
        ref = tensor_ref(node, what)
        if ref is None and state != "param":
            continue  # a step as a number
        if ref is not None and ref.shape in ((), (1,)) and state == "step":
            continue
        if ref is None or ref.shape != parameter.shape:
            raise Misfit(f"{what} is {list(ref.shape) if ref else 'missing'}, the parameter {list(parameter.shape)}")
        out.add(f"optimizer.state.{state}.", parameter.local, storages.array(file, ref, what), ref.dtype, ref.offset)


def _chained(entries: list[Any], owned: Sequence[Owned], what: str) -> Iterator[tuple[Any, list[Owned]]]:
    """Each optimizer of a rank with its parameters (`get_megatron_optimizer`)."""
    experts = [p for p in owned if p.expert]
    dense = [p for p in owned if not p.expert]
    if len(entries) > 1 and experts:
        yield entries[-1], experts
        entries = entries[:-1]
    else:
        dense = list(owned)
    if len(entries) == 1:
        yield entries[0], dense
    elif len(entries) == 2:  # overlap_param_gather_with_optimizer_step: the first model chunk has its own
        yield entries[0], [p for p in dense if p.chunk == 0]
        yield entries[1], [p for p in dense if p.chunk > 0]
    else:
        raise Misfit(f"{what}: {len(entries)} chained optimizers are not known to Megatron-LM")


def _grouped(groups: list[Any], owned: Sequence[Owned], args: Mapping[str, Any], what: str) -> list[list[Owned]]:
    """The parameters of each group."""
    if not all(isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in groups):
        raise Misfit(f"{what}: a param group has no list of parameters")
    places = group_members(groups, [(p.key, p.shape) for p in owned], args, what)
    members = [[owned[position] for position in mine] for mine in places]
    for number, (group, mine) in enumerate(zip(groups, members, strict=True)):
        if len(group["params"]) != len(mine):
            raise Misfit(f"{what}: group {number} has {len(group['params'])} parameters, {len(mine)} belong into it")
    return members


@dataclass(frozen=True)
class FlatFile:
    """A `distrib_optim.pt` and what decides how its job cut the buffers in it.

    Attributes:
        first_numel: Elements of all parameters of a rank of the first pipeline stage.
    """

    file: PtFile
    storages: Storages
    layout: Layout
    args: Mapping[str, Any]
    pp: int
    first_numel: int

    def place(self, owned: Sequence[Owned], out: Collected) -> None:
        """Notes where the state of every parameter lies.

        Args:
            owned: The rank's parameters, in the order of `named_parameters()`.
            out: Where to note it.

        Raises:
            Misfit: The parameters do not fill the buffers.
        """
        for entry, mine in _chained(optimizer_entries(self.file.tree), owned, self.file.name):
            if entry is None:
                continue  # another rank wrote it
            if not isinstance(entry, Mapping):
                raise Misfit(f"{self.file.name} is not the dictionary that Megatron-LM writes")
            wanted: dict[tuple[int, DType], list[Owned]] = {}
            for parameter in mine:
                wanted.setdefault((parameter.chunk, parameter.local.dtype), []).append(parameter)
            stored = read_buffers(entry, self.file.name, self._flat)
            if len(stored) != len(wanted):
                raise Misfit(f"{self.file.name} has {len(stored)} buffers, the parameters make {len(wanted)}")
            for (number, buffer), ((chunk, kind), parameters) in zip(
                sorted(stored.items()), wanted.items(), strict=True
            ):
                what = f"{self.file.name}: buffer {number}"
                if buffer.dtype not in (None, kind):
                    raise Misfit(f"{what} is for {buffer.dtype} parameters, the model's are {kind}")
                rules = list(self._rules(chunk, expert=parameters[0].expert))
                local = [p.local for p in parameters]
                padded = bucket_sizes(entry.get("per_bucket_numel"), number, what)
                if buffer.sizes is None and padded is not None:
                    buffer.sizes = _unpadded(local, padded, rules, what)
                place(buffer, local, rules, what, out)

    def _flat(self, ref: TensorRef, what: str) -> StoredFlat:
        return StoredFlat(self.storages.array(self.file, ref, what), ref.dtype, ref.offset, ref.shape[0])

    def _rules(self, chunk: int, *, expert: bool) -> Iterator[Rules]:
        """How they may have been cut, the likeliest first: the version that wrote the file is not known."""
        first = Rules.of(self.args, self.layout, lambda _: self.first_numel, self.pp, chunk, experts=expert)
        yield from (replace(first, align=align, early=early) for align in (64, 1) for early in (False, True))


def _unpadded(parameters: list[Local], padded: list[int], candidates: list[Rules], what: str) -> list[int]:
    """Sizes of buckets without the padding behind them, which Megatron-Core 0.4 did not store."""
    for rules in candidates:
        sizes = [bucket.numel_unpadded for bucket in arrange(parameters, rules)]
        if len(sizes) == len(padded) and all(
            have - _MOST_PADDING < n <= have for n, have in zip(sizes, padded, strict=True)
        ):
            return sizes
    raise Misfit(f"{what} has buckets of {', '.join(map(str, padded[:8]))} elements, which its parameters do not fill")


def tensors_in(value: Any, depth: int = 0) -> Iterator[TensorRef]:
    """Every tensor somewhere in a tree of dictionaries, lists and tuples."""
    if depth > DEEPEST:
        raise FormatError(f"dictionaries and lists lie in one another more than {DEEPEST} deep")
    if isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(item, depth + 1)
    else:
        ref = tensor_ref(value, "the optimizer")
        if ref is not None:
            yield ref
