"""Megatron-FSDP's `--ckpt-format fsdp_dtensor`: DCP files of DTensors, with everything else in objects of one value each.

    model.module.decoder.layers.0.mlp.linear_fc1.weight_w            gate; weight_v is the other half
    model.module.decoder.layers.0.mlp.experts.linear_fc2.weight3     expert 3 of all
    optimizer.state.module.module.module.NAME.exp_avg
    optimizer.param_to_group_meta.module.module.module.NAME.lr       the group's values again for each of its parameters
    opt_param_scheduler.min_lr    rng_state.(0, 0).0.torch_rng_state    args    iteration    checkpoint_version

What is stored of the model are the weights that the optimizer updates: in fp32 where mixed precision keeps such masters, in
which case there are no others. They are therefore both, the weight and its master.

Sources: Megatron-LM core_v0.14.0 to core_v0.16.1, megatron/training/checkpointing.py (`generate_state_dict`,
`preprocess_fsdp_dtensor_state_dict`), megatron/core/transformer/fsdp_dtensor_checkpoint.py, megatron/core/optimizer/
distrib_optimizer.py (`sharded_param_state_fsdp_dtensor`).
"""

from __future__ import annotations

import itertools
import re
import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from converters.catalog import Catalog, ObjectInfo, Problem
from converters.dtypes import dtype
from converters.errors import FormatError
from converters.formats.canonical import canonical_tensors, iteration_of, object_info
from converters.formats.common_state import Archive
from converters.formats.dcp.names import paths
from converters.formats.dcp.reader import DcpReader
from converters.formats.folder import open_source
from converters.formats.megatron import common_facts
from converters.names import StateName, printable
from converters.torchzip.records_out import storage_node, tensor_node

if TYPE_CHECKING:
    from converters.formats.dcp.names import Path as KeyPath
    from converters.formats.dcp.stored import StoredTensor
    from converters.pickles.nodes import Node

_MODEL = re.compile(r"model\d*\.(?:module\.)*(.*)", re.DOTALL)
_STATE = re.compile(r"optimizer\.(?:\d+\.)?state\.(?:module\.)+(.*)\.(\w+)", re.DOTALL)
_GROUPED = re.compile(r"\.experts\.(linear_fc[12])\.(weight|bias)(\d+)(?=$|_[wv]$)")
_SEQUENTIAL = re.compile(r"\.experts\.local_experts\.(\d+)\.")
_META = "param_to_group_meta"
_RANK = re.compile(r"\((\d+), (\d+)\)")
_APART = ("optimizer", "rng_state")
_EXTRA = "._extra_state"


class FsdpDtensorReader(DcpReader):
    """An open fsdp_dtensor checkpoint."""

    name: ClassVar[str] = "fsdp_dtensor"
    producer: ClassVar[str] = "Megatron-Core 0.14 or later"
    masters: ClassVar[bool] = True

    def _prepare(self, args: Mapping[str, Any], problems: list[Problem]) -> None:
        """What must be known before keys are named."""

    def _catalog(self) -> Catalog:
        metadata = self.metadata
        self._paths = paths([*metadata.tensors, *metadata.objects], metadata.planner_data)
        problems: list[Problem] = [Problem("warning", text) for text in metadata.stray]
        common = _Common(self)
        facts = common_facts(common)
        self._prepare(facts.args, problems)
        keyed = [
            replace(self._keyed(tensor), spelling=spelling)
            for key, tensor in metadata.tensors.items()
            if (spelling := self._spelling(key)) is not None
        ]
        tensors = canonical_tensors(keyed, problems)
        self._objects = self._random_states(facts.args) | self._extra_states()
        if not facts.args:
            problems.append(Problem("warning", "it holds no args: sizes are taken from the tensors"))
        optimizer = any(tensor.kind == "optimizer" for tensor in tensors.values())
        return Catalog(
            path=self.folder,
            format=self.name,
            framework="Megatron-LM",
            tensors=tensors,
            objects={key: info for key, (info, _) in self._objects.items()},
            args=facts.args,
            common=common,
            content={"distrib_optim_sharding_type": self.name} if optimizer and self.masters else {},
            iteration=facts.iteration if facts.iteration is not None else iteration_of(self.folder),
            producer=(self.producer, "no earlier one has the format"),
            files=self._check_files(tensors, problems),
            problems=tuple(problems),
            details={"metadata class": metadata.top_class},
            masters=self.masters,
        )

    def common_state(self) -> Archive:
        """See `Reader`: put together from objects of their own."""
        common = _Common(self)
        members = {"byteorder": b"little", "version": b"3\n"}
        return Archive({key: common[key] for key in common}, members, self.name)

    def stored_object(self, key: str) -> Archive:
        """See `Reader`: put together from keys of their own."""
        _, parts = self._objects[key]
        storages: dict[str, bytes] = {}
        value = _nested({path[2:]: self._value(part, storages) for part, path in parts.items()})
        return Archive.of_object(value, storages, key)

    def param_groups(self) -> list[dict[str, Node]]:
        """The optimizer's groups, each once, without their parameters."""
        members: dict[str, dict[str, str]] = defaultdict(dict)
        for key, path in self._paths.items():
            if path[0] == "optimizer" and _META in path[:-2] and key in self.metadata.objects:
                members[path[-2]][path[-1]] = key
        steps, values = self._steps(), self._values([key for keys in members.values() for key in keys.values()])
        groups: dict[str, dict[str, Node]] = {}
        for parameter, keys in members.items():
            group = {name: values[key] for name, key in keys.items() if key in values}
            if group.get("step") is None and parameter in steps:
                group["step"] = steps[parameter]
            groups.setdefault(repr(sorted(group.items())), group)
        return list(groups.values())

    def _values(self, keys: Iterable[str]) -> dict[str, Node]:
        """Many objects, most of them alike: equal records are parsed once."""
        objects = self.metadata.objects
        parsed: dict[bytes, Node] = {}
        out: dict[str, Node] = {}
        stored = sorted((objects[key] for key in keys if objects[key].file >= 0), key=lambda o: (o.file, o.offset))
        for file, group in itertools.groupby(stored, key=lambda o: o.file):
            with open_source(self.files[file]) as source:
                for item in group:
                    raw = source.read(item.offset, item.length)
                    if raw not in parsed:
                        parsed[raw] = self.object_value(item.key)
                    out[item.key] = parsed[raw]
        return out

    def _spelling(self, key: str) -> str | None:
        """The key of a tensor as torch_dist spells it; None for what is part of an object."""
        if self._paths[key][0] == "rng_state" or key.endswith(_EXTRA):
            return None
        model, state = _MODEL.fullmatch(key), _STATE.fullmatch(key)
        if state is not None:
            # torch's own Adam keeps a step for each parameter: a number of the group in every other format
            return None if state[2] == "step" else str(StateName(state[2], _experts(state[1])))
        return _experts(model[1]) if model is not None else key

    def _steps(self) -> dict[str, int]:
        out = {}
        for key, path in self._paths.items():
            if path[-1] == "step" and "state" in path[:-2] and key in self.metadata.tensors:
                stored = self.metadata.tensors[key]
                raw = self._elements(stored)
                out[path[-2]] = int(struct.unpack("<f" if stored.dtype == "float32" else "<q", raw)[0])
        return out

    def _random_states(self, args: Mapping[str, Any]) -> dict[str, tuple[ObjectInfo, dict[str, KeyPath]]]:
        """One object for each (pp, tp) rank, as torch_dist has them; with experts in parallel it has more than are here."""
        parts_of: dict[tuple[int, ...], dict[str, KeyPath]] = defaultdict(dict)
        for key, path in self._paths.items():
            if path[0] == "rng_state" and len(path) > 2 and (named := _RANK.fullmatch(path[1])):
                parts_of[int(named[1]), int(named[2])][key] = path
        grid = tuple(1 + max(axis) for axis in zip(*parts_of, strict=True)) if parts_of else ()
        if (args.get("expert_model_parallel_size") or 1) != 1 or len(parts_of) != (grid[0] * grid[1] if grid else 0):
            return {}
        out: dict[str, tuple[ObjectInfo, dict[str, KeyPath]]] = {}
        for rank, parts in sorted(parts_of.items()):
            out |= self._joint_object(f"rng_state/shard_{rank[0]}.{rank[1]}_{grid[0]}.{grid[1]}", parts)
        return out

    def _joint_object(self, name: str, parts: dict[str, KeyPath]) -> dict[str, tuple[ObjectInfo, dict[str, KeyPath]]]:
        """An object that is stored under several keys, located where the first of them is; empty if that is nowhere."""
        first = next((self.metadata.objects[key] for key in parts if key in self.metadata.objects), None)
        if first is None or first.file < 0:
            return {}
        file = self.metadata.files[first.file]
        return {name: (object_info(name, file, first.offset, first.length, wrapped=False), parts)}

    def _extra_states(self) -> dict[str, tuple[ObjectInfo, dict[str, KeyPath]]]:
        """TransformerEngine's, of each module; Megatron-FSDP drops them, torch's FSDP2 does not."""
        out: dict[str, tuple[ObjectInfo, dict[str, KeyPath]]] = {}
        for key in (*self.metadata.tensors, *self.metadata.objects):
            match = _MODEL.fullmatch(key) if key.endswith(_EXTRA) else None
            if match is None:
                continue
            name, (file, offset, length) = f"{match[1]}/shard_0_1", self._location(key)
            if file >= 0:
                info = object_info(name, self.metadata.files[file], offset, length, wrapped=False)
                out[name] = (info, {key: ("", "")})
        return out

    def _location(self, key: str) -> tuple[int, int, int]:
        """File, first byte and bytes of a record."""
        stored = self.metadata.objects.get(key)
        if stored is not None:
            return stored.file, stored.offset, stored.length
        tensor = self.metadata.tensors[key]
        return int(tensor.file[0]), int(tensor.offset[0]), int(tensor.length[0])

    def _value(self, key: str, storages: dict[str, bytes]) -> Node:
        """An object, or a tensor as a node whose elements go to `storages`."""
        if key in self.metadata.objects:
            return self.object_value(key)
        stored = self.metadata.tensors[key]
        name, kind, raw = str(len(storages)), dtype(stored.dtype), self._elements(stored)
        storages[f"data/{name}"] = raw
        return tensor_node(storage_node(kind, name, len(raw) // kind.itemsize), kind, stored.shape)

    def _elements(self, stored: StoredTensor) -> bytes:
        """The elements of a small tensor in one piece."""
        array = self._array(stored)
        if len(array.records) != 1 or array.records[0] < 0:
            raise FormatError(f"{printable(stored.key)} is not stored in one piece")
        record = int(array.records[0])
        with open_source(self.files[self.file_of(record)]) as source:
            payload = self.locate(record, source.read)
            return source.read(payload.offset, payload.nbytes)


class _Common(Mapping[str, Any]):
    """The common state, read object by object when it is asked for: param groups are thousands of them."""

    def __init__(self, reader: FsdpDtensorReader) -> None:
        self._reader = reader
        self._parts: dict[str, dict[KeyPath, str]] = defaultdict(dict)
        for key, path in reader._paths.items():
            if path[0] not in _APART and not path[0].startswith("model") and key in reader.metadata.objects:
                self._parts[path[0]][path[1:]] = key
        if any(path[0] == "optimizer" for path in reader._paths.values()):
            self._parts["optimizer"] = {}
        self._values: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._parts:
            raise KeyError(name)
        if name not in self._values:
            if name == "optimizer":
                self._values[name] = {"optimizer": {"param_groups": self._reader.param_groups()}}
            else:
                parts = {path: self._reader.object_value(key) for path, key in self._parts[name].items()}
                self._values[name] = _nested(parts)
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._parts))

    def __len__(self) -> int:
        return len(self._parts)


def _experts(name: str) -> str:
    """The name of an expert's parameter as the catalog has it, its half kept: `experts.3.linear_fc1.weight_w`."""
    return _SEQUENTIAL.sub(r".experts.\1.", _GROUPED.sub(r".experts.\3.\1.\2", name))


def _nested(values: Mapping[KeyPath, Node]) -> Node:
    """Dictionaries and lists again: DCP flattened them, and a list's positions are numbers as text here."""
    if () in values:
        return values[()]
    inner: dict[str, dict[KeyPath, Node]] = defaultdict(dict)
    for path, value in values.items():
        inner[path[0]][path[1:]] = value
    if all(name.isdecimal() for name in inner) and sorted(map(int, inner)) == list(range(len(inner))):
        return [_nested(inner[str(number)]) for number in range(len(inner))]
    return {name: _nested(below) for name, below in inner.items()}
