"""What NeMo and Megatron-Bridge keep around the tensors, for a checkpoint at another layout: their configuration.

    NeMo 1              NeMo 2                      Megatron-Bridge
      model_config.yaml   context/                    latest_checkpointed_iteration.txt
      tokenizer files       model.yaml  io.json       latest_train_state.pt
      model_weights/        tokenizer files           iter_0000010/
                          weights/                      run_config.yaml  train_state.pt  tokenizer/

A Bridge job reads the sizes of the job that saved, and whether random states and optimizer were saved, from
`run_config.yaml`, and its progress from `train_state.pt`. The text of a file is kept but for the values that change;
nothing in it is built.

Sources: Megatron-Bridge v0.6.0 src/megatron/bridge/training/checkpointing.py (_load_checkpoint_from_path); NeMo v2.4.0
nemo/lightning/io/mixin.py, nemo/core/connectors/save_restore_connector.py.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from converters.errors import FormatError
from converters.formats.folder import is_file, is_folder, read_small, scan, walk
from converters.megatron.layout import Layout
from converters.names import printable
from converters.write.job_arguments import provider_values
from converters.write.target_state import iteration_folder

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from converters.catalog import Catalog
    from converters.write.write_plan import ExtraFile

_CONFIG, _PROGRESS = "run_config.yaml", "train_state.pt"
_FOLDERS = {"NeMo 1": "model_weights", "NeMo 2": "weights"}
_LIMIT = 64 << 20
_MOST_FILES = 10_000
# settings of a model, and what is meant where one is absent (TransformerConfig, the model providers)
_ABSENT = provider_values(Layout()) | {"expert_tensor_parallel_size": None, "save_rng": True, "save_optim": True}

_FP32 = {"_call_": False, "_target_": "torch.float32"}
# where the optimizer is not precision-aware, no type may be another (core, optimizer/optimizer_config.py)
_PLAIN_MASTERS: dict[tuple[str, str], Any] = {
    ("optimizer", "use_precision_aware_optimizer"): False,
    **{("optimizer", f"{label}_dtype"): _FP32 for label in ("main_params", "main_grads", "exp_avg", "exp_avg_sq")},
}

Settings = dict[tuple[str, str], Any]
"""(Section, setting) -> value; the section is empty for what stands at the top of a file."""


@dataclass(frozen=True)
class Companions:
    """Where the tensors go in the result, and what lies around them.

    Attributes:
        folder: The tensors' folder.
        files: Small files by name within the result.
        tracker: The result is a training root, with Megatron's tracker file.
        notes: Sentences a person should read.
        dropped: `(what, reason)` of what is not carried over.
        advice: How a job loads the result; empty for Megatron-LM.
    """

    folder: str
    files: Mapping[str, ExtraFile] = field(default_factory=dict)
    tracker: bool = True
    notes: tuple[str, ...] = ()
    dropped: tuple[tuple[str, str], ...] = ()
    advice: str = ""


def keeps_framework(catalog: Catalog) -> bool:
    """Whether there are companions to keep: NeMo's folders have names of their own. Others become Megatron-LM's."""
    return catalog.framework not in _FOLDERS or catalog.path.name == _FOLDERS[catalog.framework]


def companions(
    catalog: Catalog, layout: Layout, *, framework: str, rng: bool, optimizer: bool, completed: bool = False
) -> Companions:
    """What lies around the tensors of a result.

    Args:
        framework: "keep", or "megatron-lm", for which NeMo's are left out and Bridge's, which do not disturb, are kept.
        completed: The result's master weights are fp32, where the job that saved kept remainders.

    Raises:
        FormatError: A file of the source cannot be read.
    """
    sizes = provider_values(layout) | {"expert_tensor_parallel_size": layout.etp}
    sizes_text = f"tensor_model_parallel_size {layout.tp} and pipeline_model_parallel_size {layout.pp}"
    inner, outer = catalog.path, catalog.path.parent
    if catalog.framework == "Megatron-Bridge" and is_file(inner / _CONFIG):
        saved = {("checkpoint", "save_rng"): rng, ("checkpoint", "save_optim"): optimizer}
        saved |= _PLAIN_MASTERS if completed else {}
        advice = f"load it in Megatron-Bridge as checkpoint.load, with {sizes_text}" if framework == "keep" else ""
        result = _bridge_files(inner, iteration_folder(catalog), {("model", n): v for n, v in sizes.items()} | saved)
        return replace(result, advice=advice)
    if framework == "keep" and catalog.framework == "NeMo 2":
        advice = f"resume from its folder in NeMo 2, with {sizes_text} in the trainer's MegatronStrategy"
        files, notes = _nemo2_files(outer / "context", sizes)
        return Companions(inner.name, files, tracker=False, notes=notes, advice=advice)
    if framework == "keep" and catalog.framework == "NeMo 1":
        advice = f"restore its folder in NeMo 1, or pack it with `tar -C DST -cf model.nemo .`, with {sizes_text}"
        files, notes = _nemo1_files(outer, sizes)
        return Companions(inner.name, files, tracker=False, notes=notes, advice=advice)
    silent = "the source holds no training arguments: the job that loads the result has to be told the model's"
    return Companions(iteration_folder(catalog), notes=() if catalog.options else (silent,))


def _bridge_files(source: Path, folder: str, wanted: Settings) -> Companions:
    files, notes = _with_settings(f"{folder}/{_CONFIG}", source / _CONFIG, wanted)
    if is_file(source / _PROGRESS):
        files |= {f"{folder}/{_PROGRESS}": source / _PROGRESS, f"latest_{_PROGRESS}": source / _PROGRESS}
    return Companions(folder, files, notes=notes)


def _nemo2_files(context: Path, sizes: Mapping[str, Any]) -> tuple[dict[str, ExtraFile], tuple[str, ...]]:
    if not is_folder(context):  # left out by `ModelCheckpoint(always_save_context=False)`
        return {}, ("the source has no context folder: give the job that loads the result the model's arguments",)
    files: dict[str, ExtraFile] = {f"context/{name}": path for name, path in _files_below(context)}
    notes: tuple[str, ...] = ()
    if files.pop("context/model.yaml", None) is not None:
        settings = {("config", name): size for name, size in sizes.items()}
        model_files, notes = _with_settings("context/model.yaml", context / "model.yaml", settings)
        files |= model_files
    if "context/io.json" in files:
        files["context/io.json"] = _edited_fiddle_json(context / "io.json", sizes)
    return files, notes


def _nemo1_files(outer: Path, sizes: Mapping[str, Any]) -> tuple[dict[str, ExtraFile], tuple[str, ...]]:
    with scan(outer) as entries:
        names = sorted(entry.name for entry in entries if entry.is_file(follow_symlinks=False))
    files: dict[str, ExtraFile] = {name: outer / name for name in names if name != "model_config.yaml"}
    if len(names) == len(files):
        return files, ()
    settings = {("", name): size for name, size in sizes.items()}
    model_files, notes = _with_settings("model_config.yaml", outer / "model_config.yaml", settings)
    return files | model_files, notes


def _files_below(folder: Path) -> Iterator[tuple[str, Path]]:
    """The files below a folder; links are left out."""
    for number, (name, entry) in enumerate(walk(folder)):
        if number >= _MOST_FILES or entry.size > _LIMIT:
            raise FormatError(f"{printable(str(folder))} holds more than a configuration: {printable(name)}")
        if entry.file:
            yield name, folder / name


# ---------------------------------------------------------------------- settings are changed where they stand


def _with_settings(name: str, path: Path, wanted: Settings) -> tuple[dict[str, ExtraFile], tuple[str, ...]]:
    text = _edited_yaml(path, wanted)
    if text is None:
        return {}, (f"{path.name} could not be changed for the new sizes and is not carried over",)
    return {name: text.encode("utf-8", "surrogateescape")}, ()


def _edited_yaml(path: Path, wanted: Settings) -> str | None:
    """The text of a YAML file with some values of its sections changed; None if it is not written in a plain way."""
    import yaml

    from converters.formats.plain_yaml import PlainLoader

    raw = read_small(path, 8 << 20)
    text = raw.decode("utf-8", "surrogateescape")
    try:
        root, goal = yaml.compose(raw, Loader=PlainLoader), yaml.load(raw, Loader=PlainLoader)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise FormatError(f"{path.name} is not plain YAML", details=[printable(str(error))[:300]]) from error
    edits: list[tuple[int, int, str]] = []
    for (part, key), value in wanted.items():
        holder = goal.get(part) if part and isinstance(goal, dict) else goal
        present = _yaml_entries(_yaml_entries(root)[part][1] if part in _yaml_entries(root) else None if part else root)
        if not isinstance(holder, dict) or not present:
            continue
        spelled = json.dumps(value)  # which YAML reads alike
        if key not in present:
            if value == _ABSENT.get(key, value):
                continue
            first = next(iter(present.values()))[0].start_mark
            edits.append((first.index, first.index, f"{key}: {spelled}\n{' ' * first.column}"))
        elif holder[key] == value:
            continue
        else:
            label, old = present[key]
            tail = "" if isinstance(old, yaml.ScalarNode) else "\n" + " " * old.end_mark.column
            edits.append((label.end_mark.index, old.end_mark.index, f": {spelled}{tail}"))
        holder[key] = value
    for start, end, new in sorted(edits, reverse=True):
        text = text[:start] + new + text[end:]
    try:
        return text if yaml.load(text, Loader=PlainLoader) == goal else None
    except (yaml.YAMLError, RecursionError, ValueError):
        return None


def _yaml_entries(node: Any) -> dict[str, tuple[Any, Any]]:
    """Entries of a YAML mapping: name -> (its node, the value's node)."""
    import yaml

    if not isinstance(node, yaml.MappingNode):
        return {}
    return {key.value: (key, value) for key, value in node.value if isinstance(key, yaml.ScalarNode)}


_ATTRIBUTE = re.compile(r"Attr\(name='(\w+)'\)")


def _edited_fiddle_json(path: Path, values: Mapping[str, Any]) -> bytes:
    """fiddle's JSON: objects with `items`, pairs of `Attr(name='...')` and `{"type": "leaf", "value": ...}`."""
    raw = read_small(path, _LIMIT)
    try:
        document, changed = json.loads(raw), False
        for node in document["objects"].values():
            for item in node.get("items") or ():
                match = _ATTRIBUTE.fullmatch(item[0])
                if match is None or match[1] not in values or item[1].get("type") != "leaf":
                    continue
                if (item[1]["value"] or None) != (values[match[1]] or None):
                    item[1]["value"], changed = values[match[1]], True
    except (ValueError, RecursionError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise FormatError("io.json is not what NeMo 2 writes", details=[printable(repr(error))[:200]]) from error
    return json.dumps(document).encode() if changed else raw
