"""What Megatron-Bridge keeps beside the tensors, at another layout: `run_config.yaml`, `train_state.pt`.

A Bridge job reads the sizes of the job that saved, and whether random states and optimizer were saved, from
`run_config.yaml`, and its progress from `train_state.pt` (megatron/bridge/training/checkpointing.py, 0.7).
The file's text is kept but for the values that change; nothing in it is built.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from converters.formats.folder import is_file, read_small

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from converters.catalog import Catalog
    from converters.conversion import ExtraFile
    from converters.layout import Layout

__all__ = ["companions"]

_CONFIG, _PROGRESS = "run_config.yaml", "train_state.pt"
# Bridge's names, and what is meant where one is absent (model providers, CheckpointConfig)
_ABSENT: dict[tuple[str, str], Any] = {
    ("model", "tensor_model_parallel_size"): 1,
    ("model", "pipeline_model_parallel_size"): 1,
    ("model", "virtual_pipeline_model_parallel_size"): None,
    ("model", "context_parallel_size"): 1,
    ("model", "expert_model_parallel_size"): 1,
    ("model", "expert_tensor_parallel_size"): None,
    ("model", "num_layers_in_first_pipeline_stage"): None,
    ("model", "num_layers_in_last_pipeline_stage"): None,
    ("model", "pipeline_model_parallel_layout"): None,
    ("model", "account_for_embedding_in_pipeline_split"): False,
    ("model", "account_for_loss_in_pipeline_split"): False,
    ("checkpoint", "save_rng"): True,
    ("checkpoint", "save_optim"): True,
}


def companions(
    catalog: Catalog, layout: Layout, folder: str, *, rng: bool, optimizer: bool
) -> tuple[dict[str, ExtraFile], list[str]]:
    """Small files of the result, by name within the training root, and what a person should know of them.

    Args:
        catalog: The source.
        layout: The target layout.
        folder: Where the result's iteration lies.
        rng: Random states are carried over.
        optimizer: So is optimizer state.

    Raises:
        FormatError: A file of the source cannot be read.
    """
    if catalog.args:
        return {}, []
    if catalog.flavour != "Megatron-Bridge" or not is_file(catalog.path / _CONFIG):
        return {}, [_left_behind(catalog, folder)]
    wanted = dict(zip(_ABSENT, (*_sizes(layout), rng, optimizer), strict=True))
    text = _edited(catalog.path / _CONFIG, wanted)
    files: dict[str, ExtraFile] = {f"{folder}/{_CONFIG}": text.encode()} if text is not None else {}
    notes = [] if files else [f"{_CONFIG} could not be changed for the new sizes and is not carried over"]
    if is_file(catalog.path / _PROGRESS):
        files |= {f"{folder}/{_PROGRESS}": catalog.path / _PROGRESS, f"latest_{_PROGRESS}": catalog.path / _PROGRESS}
    return files, notes


def _sizes(layout: Layout) -> tuple[Any, ...]:
    return (
        *(layout.tp, layout.pp, layout.vpp, layout.cp, layout.ep, layout.etp),
        *(layout.first_layers, layout.last_layers, layout.pp_layout),
        *(layout.account_for_embedding, layout.account_for_loss),
    )


def _left_behind(catalog: Catalog, folder: str) -> str:
    where = {"NeMo 2": "context/", "NeMo 1": "model_config.yaml"}.get(catalog.flavour)
    if where is None:
        return "the source holds no training arguments: the job that loads the result has to be told the model's"
    data = "weights" if catalog.flavour == "NeMo 2" else "model_weights"
    return (
        f"{catalog.flavour} keeps the model's configuration in {where}, beside the tensors; it is not carried over: "
        f"a job of {catalog.flavour} wants {folder} renamed to {data}, with a copy of {where} beside it"
    )


def _edited(path: Path, wanted: Mapping[tuple[str, str], Any]) -> str | None:
    """The text of a YAML file with some values of its sections changed; None if it is not written in a plain way."""
    import yaml

    from converters.formats.plain_yaml import PlainLoader

    raw = read_small(path, 8 << 20)
    text = raw.decode("utf-8", "replace")
    root = yaml.compose(raw, Loader=PlainLoader)
    goal = yaml.load(raw, Loader=PlainLoader)
    edits: list[tuple[int, int, str]] = []
    for name, (_, section) in _pairs(root).items():
        present = _pairs(section)
        for (part, key), value in wanted.items():
            if part != name:
                continue
            spelled = json.dumps(value)  # which YAML reads alike
            if key in present:
                label, old = present[key]
                if goal[part][key] == value:
                    continue
                tail = "" if isinstance(old, yaml.ScalarNode) else "\n" + " " * old.end_mark.column
                edits.append((label.end_mark.index, old.end_mark.index, f": {spelled}{tail}"))
            elif value != _ABSENT[part, key] and present:
                first = next(iter(present.values()))[0].start_mark
                edits.append((first.index, first.index, f"{key}: {spelled}\n{' ' * first.column}"))
            else:
                continue
            goal[part][key] = value
    for start, end, new in sorted(edits, reverse=True):
        text = text[:start] + new + text[end:]
    try:
        return text if yaml.load(text, Loader=PlainLoader) == goal else None
    except (yaml.YAMLError, RecursionError, ValueError):
        return None


def _pairs(node: Any) -> dict[str, tuple[Any, Any]]:
    """Entries of a YAML mapping: name -> (its node, the value's node)."""
    import yaml

    if not isinstance(node, yaml.MappingNode):
        return {}
    return {key.value: (key, value) for key, value in node.value if isinstance(key, yaml.ScalarNode)}
