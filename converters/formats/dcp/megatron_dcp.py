"""Megatron-LM's `--ckpt-format torch_dcp`, what `--use-torch-fsdp2` saves: DCP files, and the optimizer by numbers.

    model.decoder.layers.0.mlp.linear_fc1.weight          whole: gate over up
    optimizer.optimizer.state.3.exp_avg                   of the parameter that a group has under this number
    optimizer.optimizer.param_groups.0.params             those numbers, in the order of the model
    optimizer.fp32_from_fp16_params.0.3                   master weight of a group's fourth parameter

Names of the numbered ones follow from how Megatron makes groups; before anything is published, master weights must round
to the weights beside them.

Sources: Megatron-LM core_v0.12.0 to core_v0.16.1, megatron/training/checkpointing.py (`generate_state_dict`),
megatron/core/optimizer/optimizer.py (`Float16OptimizerWithFloat16Params.state_dict`).
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, ClassVar

from converters.catalog import Problem
from converters.formats.dcp.fsdp_dtensor import FsdpDtensorReader
from converters.formats.legacy.groups import group_members
from converters.megatron.buffers import Misfit
from converters.names import StateName
from converters.param_order import trainable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from converters.catalog import ObjectInfo
    from converters.formats.dcp.names import Path as KeyPath
    from converters.pickles.nodes import Node

_MASTERS = "fp32_from_fp16_params"


class MegatronDcpReader(FsdpDtensorReader):
    """An open checkpoint of Megatron-LM with torch's FSDP2."""

    name: ClassVar[str] = "megatron_dcp"
    producer: ClassVar[str] = "Megatron-Core 0.12 or later"
    masters: ClassVar[bool] = False

    def _prepare(self, args: Mapping[str, Any], problems: list[Problem]) -> None:
        """Finds the parameters that the optimizer's numbers stand for."""
        self._spellings: dict[str, str] = {}
        try:
            self._spellings = self._named_states(args)
        except Misfit as error:
            text = " ".join([f"the optimizer state is not understood: {error.message}", *error.details])
            unknown = tuple(key for key in self.metadata.tensors if self._paths[key][0] == "optimizer")
            problems.append(Problem("unknown", text, tensors=unknown))

    def param_groups(self) -> list[dict[str, Node]]:
        """The optimizer's groups without their parameters."""
        steps, out = self._steps(), []
        for group in self._groups():
            numbers = group.pop("params", None)
            first = str(numbers[0]) if isinstance(numbers, list) and numbers else ""
            if group.get("step") is None and first in steps:
                group["step"] = steps[first]
            out.append(group)
        return out

    def _spelling(self, key: str) -> str | None:
        path = self._paths[key]
        if path[0] == "optimizer":
            return None if path[-1] == "step" and "state" in path else self._spellings.get(key, key)
        return super()._spelling(key)

    def _trained(self, key: str) -> bool:
        name = self._paths[key][-1]
        return self._paths[key][0] == "model" and not name.endswith("._extra_state") and trainable(name)

    def _groups(self) -> list[dict[str, Node]]:
        keys: dict[int, dict[str, str]] = defaultdict(dict)
        for key, path in self._paths.items():
            if path[0] == "optimizer" and "param_groups" in path[:-2] and key in self.metadata.objects:
                keys[int(path[-2])][path[-1]] = key
        return [{name: self.object_value(key) for name, key in keys[number].items()} for number in sorted(keys)]

    def _named_states(self, args: Mapping[str, Any]) -> dict[str, str]:
        """The spelling that torch_dist has for each tensor of the optimizer."""
        if not any(path[0] == "optimizer" for path in self._paths.values()):
            return {}
        tensors, groups = self.metadata.tensors, self._groups()
        order = self.metadata.planner_data if isinstance(self.metadata.planner_data, dict) else {}
        names = [
            (self._paths[key][-1], tensors[key].shape, tensors[key].dtype)
            for key in order
            if key in tensors and self._trained(key)
        ]
        members = group_members(groups, [(name, shape) for name, shape, _ in names], args, "the optimizer")
        by_number: dict[str, str] = {}
        by_position: dict[tuple[str, str], str] = {}
        for number, (group, positions) in enumerate(zip(groups, members, strict=True)):
            numbers = group.get("params")
            if not isinstance(numbers, list) or len(numbers) != len(positions):
                raise Misfit(f"param group {number} does not have the {len(positions)} parameters of the model")
            by_number |= {str(n): names[at][0] for n, at in zip(numbers, positions, strict=True)}
            halves = [names[at][0] for at in positions if names[at][2] != "float32"]
            by_position |= {(str(number), str(position)): name for position, name in enumerate(halves)}
        return dict(self._spell(by_number, by_position))

    def _spell(self, by_number: Mapping[str, str], by_position: Mapping[tuple[str, str], str]) -> list[tuple[str, str]]:
        out = []
        for key, path in self._paths.items():
            if path[0] != "optimizer" or key not in self.metadata.tensors or path[-1] == "step":
                continue
            if len(path) >= 3 and path[-3] == "state":
                name, state = by_number.get(path[-2]), path[-1]
            elif len(path) >= 3 and path[-3] == _MASTERS:
                name, state = by_position.get((path[-2], path[-1])), "fp32_param"
            else:
                continue
            if name is None:
                raise Misfit(f"{key} belongs to no parameter")
            if self.metadata.tensors[key].shape != self.metadata.tensors[f"model.{name}"].shape:
                raise Misfit(f"{key} has another shape than {name}")
            out.append((key, str(StateName(state, name))))
        return out

    def _random_states(self, args: Mapping[str, Any]) -> dict[str, tuple[ObjectInfo, dict[str, KeyPath]]]:
        """One state for all ranks: that of a job without tensor and pipeline parallelism."""
        sizes = [args.get(f"{axis}_model_parallel_size") or 1 for axis in ("tensor", "pipeline", "expert")]
        parts = {key: ("rng_state", "", *path[1:]) for key, path in self._paths.items() if path[0] == "rng_state"}
        return self._joint_object("rng_state/shard_0.0_1.1", parts) if sizes == [1, 1, 1] else {}
