"""veScale's checkpoints: DCP files, one folder of them for the model and one for each pipeline stage's optimizer.

    checkpoint/
        model/.metadata  model/__0_0.distcp ...
        optimizer/pp_0/.metadata  optimizer/pp_0/__0_0.distcp ...
        optimizer/pp_1/...

    torch.float32.NAME.exp_avg                       ("torch.float32", "NAME", "exp_avg"): under the type of the gradients
    torch.float32.NAME.shard_casted_float16_groups   the fp32 master weights
    param_group_meta                                 an object

veScale itself opens only the stage of its own rank; here all of them together are the optimizer.

Source: veScale, legacy/vescale/checkpoint (0.1.18) and legacy/vescale/optim/distributed_optimizer.py (`state_dict`).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, ClassVar, Self

from converters.catalog import Problem
from converters.errors import FormatError
from converters.formats.dcp.names import Named, name_keys
from converters.formats.dcp.torch_dcp import TorchDcpReader
from converters.formats.registry import dcp_folders
from converters.names import StateName, printable, state_names
from converters.words import counted

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from converters.catalog import TensorInfo
    from converters.formats.dcp.names import Path as KeyPath

_TYPED = re.compile(r"torch\.\w+")
_KEY = re.compile(r"torch\.\w+?\.(.+)\.(\w+)", re.DOTALL)
_MASTERS = {"shard_casted_float16_groups": "param"}


class VeScaleReader(TorchDcpReader):
    """An open checkpoint of veScale."""

    name: ClassVar[str] = "vescale"
    framework: ClassVar[str] = "veScale"

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Reads the metadata of the model and of every stage's optimizer."""
        inner = dcp_folders(folder)
        if inner and "model/" not in inner:
            raise FormatError(
                f"{printable(str(folder))} has no model/.metadata: the save was not finished, or not copied"
            )
        stages = [int(name.split("_")[1].rstrip("/")) for name in inner if "/pp_" in name]
        most = max(stages, default=-1) + 1
        if most > 100_000:
            raise FormatError(
                f"{printable(str(folder))} has a folder optimizer/pp_{most - 1:,}: no job has so many stages"
            )
        missing = sorted(set(range(most)) - set(stages))
        if missing:
            shown = ", ".join(f"optimizer/pp_{number}" for number in missing)
            raise FormatError(
                f"the optimizer lacks {len(missing)} of {len(stages) + len(missing)} stages: {shown}",
                hint="copy them from where the checkpoint was saved",
            )
        return super().open(folder)

    def _named(self, key_paths: Mapping[str, KeyPath]) -> dict[str, Named]:
        states = {}
        for key, path in key_paths.items():
            if len(path) == 3 and _TYPED.fullmatch(path[0]):
                states[key] = _state(path[1], path[2])
            elif (match := _KEY.fullmatch(key)) is not None:
                states[key] = _state(match[1], match[2])
        return name_keys({key: path for key, path in key_paths.items() if key not in states}) | states

    def _tensors(self, named: Mapping[str, Named], problems: list[Problem]) -> dict[str, TensorInfo]:
        tensors = super()._tensors(named, problems)
        without = _without_state(tensors)
        if without:
            text = f"no optimizer state for {counted(len(without), 'weight')}: frozen in training, or a lost optimizer/pp_*?"
            problems.append(Problem("warning", text, tensors=tuple(without)))
        return tensors


def _without_state(tensors: Mapping[str, TensorInfo]) -> list[str]:
    """Weights without optimizer state, if others have some."""
    trained = {at.parameter for _, at in state_names(tensors) if at.state == "exp_avg"}
    weights = (name for name, t in tensors.items() if t.kind == "weight" and t.dtype.floating)
    return [name for name in weights if trained and name not in trained]


def _state(name: str, state: str) -> Named:
    return Named(str(StateName(_MASTERS.get(state, state), name)), "optimizer")
