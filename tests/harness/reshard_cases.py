"""What the tests of `reshard` share: running it, and reading the result with torch's own reader."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed.checkpoint as dcp

from converters.formats import open_checkpoint
from converters.formats.common_state import Archive
from converters.megatron.layout import Layout
from converters.pickles.nodes import fields
from converters.write.reshard import ReshardOptions, plan_reshard
from converters.write.write_plan import run_conversion
from harness.checkpoints import GOLDENS, golden, truth
from harness.support import GOLDEN

if TYPE_CHECKING:
    from pathlib import Path

    from converters.execute.run import Stats
    from converters.write.write_plan import Conversion

TRAINED = [name for name in GOLDENS if "weights" not in name]
STATES = {"param": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
# configs without moments in their truth: the checkpoint whose moments, stored under their names, serve as such
_PLAIN = {"qwen3": "qwen3_adam_tp2", "gpt": "gpt_adam_tp2pp2", "deepseek_mtp": "deepseek_mtp_adam_ep2pp2"}
_UNSIGNED = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}


def reshard(source: str | Path, into: Path, layout: dict[str, object], **options: object) -> tuple[Conversion, Stats]:
    """Reshards a golden checkpoint (by name) or a folder."""
    folder = golden(source) if isinstance(source, str) else source
    plan = plan_reshard(open_checkpoint(folder), into, Layout(**layout), ReshardOptions(**options))
    return plan, run_conversion(plan)


def read_with_torch(folder: Path) -> dict[str, np.ndarray]:
    """Every array of a checkpoint as torch's own DCP reader loads it, by key; elements as unsigned integers."""
    reader = dcp.FileSystemReader(folder)
    known = reader.read_metadata().state_dict_metadata
    state = {
        key: torch.full(tuple(entry.size), 77, dtype=entry.properties.dtype)
        for key, entry in known.items()
        if hasattr(entry, "size")
    }
    dcp.load(state, storage_reader=reader, no_dist=True)
    return {key: value.view(_UNSIGNED[value.itemsize]).numpy() for key, value in state.items()}


def by_parameter(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Arrays by the parameter's own name: layers and experts that share an array apart. `STATE/NAME` or `model/NAME`."""
    out: dict[str, np.ndarray] = {}
    for key, array in arrays.items():
        found = re.fullmatch(r"(?:chained_\d+\.)?(?:optimizer\.state\.(\w+?)\.)?(?:module\.|model\.)?(.*)", key)
        assert found is not None
        kind, name = found[1] or "model", found[2]
        kind = {"fp32_param": "param"}.get(kind, kind)
        for path, value in _layers(name, array):
            for full, part in _experts(path, value):
                assert f"{kind}/{full}" not in out
                out[f"{kind}/{full}"] = part
    return out


def _layers(name: str, array: np.ndarray) -> list[tuple[str, np.ndarray]]:
    found = re.fullmatch(r"decoder\.layers\.(\D.*)", name)
    if found is None:
        return [(name, array)]
    return [(f"decoder.layers.{layer}.{found[1]}", value) for layer, value in enumerate(array)]


def _experts(name: str, array: np.ndarray) -> list[tuple[str, np.ndarray]]:
    if ".mlp.experts.experts." not in name:
        return [(name, array)]
    return [(name.replace(".experts.experts.", f".experts.{n}."), value) for n, value in enumerate(array)]


_EXPECTED: dict[str, dict[str, np.ndarray]] = {}


def expected(config: str, *, optimizer: bool) -> dict[str, np.ndarray]:
    """What every layout of a config holds: `model/NAME` (weights and buffers) and `STATE/NAME`, without padding rows."""
    if config not in _EXPECTED:
        values = {}
        for key, value in truth(config).items():
            kind, name = key.split("/", 1)
            if ".rotary_pos_emb." in name:
                continue  # a cache, which no checkpoint holds
            back = {wanted: state for state, wanted in STATES.items()}
            values[f"{back.get(kind, 'model')}/{name}"] = value
        if config in _PLAIN:
            rows = {key.split("/", 1)[1]: value.shape[0] for key, value in values.items()}
            for key, value in by_parameter(read_with_torch(golden(_PLAIN[config]))).items():
                kind, name = key.split("/", 1)
                if kind != "model":
                    values[key] = value[: rows[name]]
        _EXPECTED[config] = values
    return {key: value for key, value in _EXPECTED[config].items() if optimizer or key.startswith("model/")}


def compare(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    """Fails unless both hold the same names and the same bits; rows beyond the wanted ones are padding, and zero."""
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        rows = value.shape[0] if value.ndim else None
        assert found[name].dtype == value.dtype, name
        assert np.array_equal(found[name][:rows], value), name
        assert not found[name][rows:].any() if rows is not None else True, name


def folder_of(root: Path) -> Path:
    """The iteration's folder, as the tracker file names it; NeMo has neither."""
    for name in ("weights", "model_weights"):
        if (root / name).is_dir():
            return root / name
    text = (root / "latest_checkpointed_iteration.txt").read_text()
    return root / (text if text == "release" else f"iter_{int(text):07d}")


def common_of(folder: Path) -> dict[str, object]:
    """The inert tree of `common.pt`."""
    return Archive.read(folder / "common.pt").tree


def args_of(folder: Path) -> dict[str, object]:
    """The training arguments in `common.pt`."""
    return fields(common_of(folder)["args"])


def truth_of(config):
    return GOLDEN / "truth" / f"{config}-bf16.safetensors"


def param_groups(config):
    """Scalars of the param groups in the truth: what every layout holds."""
    document = json.loads((GOLDEN / "truth" / f"{config}-bf16.groups.json").read_text())
    groups: dict = {}
    for key, value in document.items():
        if key.startswith("param_group/"):
            _, chain, number, field = key.split("/")
            groups.setdefault((chain, number), {})[field] = value
    return sorted(groups.items())
