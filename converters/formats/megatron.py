"""What Megatron and the frameworks around it leave beside the tensors: common state, configuration, traces of versions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from converters.catalog import Catalog, Problem
from converters.formats.canonical import iteration_of
from converters.formats.folder import is_file, is_folder, read_small
from converters.formats.plain_json import parse_json
from converters.formats.registry import backend_of
from converters.names import parse_key
from converters.pickles.nodes import Global, Obj, fields

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class CommonFacts:
    """The parts of the common state that readers need.

    Attributes:
        content: `content_metadata` (Megatron-Core 0.13 and later).
        keys: Top-level keys of the common state.
        hyper_parameters: The model configuration that NeMo 1 stores with it, plain data; empty if there is none.
    """

    args: Mapping[str, Any] = field(default_factory=dict)
    content: Mapping[str, Any] = field(default_factory=dict)
    iteration: int | None = None
    keys: tuple[str, ...] = ()
    hyper_parameters: Mapping[str, Any] = field(default_factory=dict)


def common_facts(common: Any) -> CommonFacts:
    """Reads the inert tree of `common.pt`, or of the embedded common state."""
    if not isinstance(common, Mapping):
        return CommonFacts()
    args = common.get("args")
    iteration = next((common[key] for key in ("iteration", "global_step") if isinstance(common.get(key), int)), None)
    content = common.get("content_metadata")
    hyper = _plain(common.get("hyper_parameters"))
    return CommonFacts(
        args=fields(args) if isinstance(args, Obj) else {},
        content=content if isinstance(content, Mapping) else {},
        iteration=iteration,
        keys=tuple(key for key in common if isinstance(key, str)),
        hyper_parameters=_section(hyper, "cfg") if isinstance(hyper, Mapping) else {},
    )


def _plain(node: Any, depth: int = 0) -> Any:
    """Plain data of a configuration that may be omegaconf's: containers keep `_content`, values keep `_val`."""
    if depth > 64:
        return None
    if isinstance(node, Obj):
        attributes = fields(node)
        return _plain(attributes.get("_content", attributes.get("_val")), depth + 1)
    if isinstance(node, Mapping):
        return {key: _plain(value, depth + 1) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [_plain(value, depth + 1) for value in node]
    return node if isinstance(node, str | int | float | bool) else None


def find_framework(folder: Path, facts: CommonFacts, keys: Sequence[str]) -> tuple[str, Mapping[str, Any]]:
    """Which framework wrote a folder, and the model configuration it left there as plain data.

    Returns:
        `("NeMo 2", {...})`, `("NeMo 1", ...)`, `("Megatron-Bridge", ...)`, `("Megatron-LM", {})`, `("Megatron-Core", {})`,
        or `("torch DCP", {})` when nothing speaks for Megatron.
    """
    if is_file(folder / "run_config.yaml"):
        return "Megatron-Bridge", _section(_yaml(folder / "run_config.yaml"), "model")
    if folder.name == "weights" and is_folder(folder.parent / "context"):
        path = folder.parent / "context" / "model.yaml"
        return "NeMo 2", _section(_yaml(path), "config") if is_file(path) else _fiddle(path.with_name("io.json"))
    if folder.name == "model_weights":
        path = folder.parent / "model_config.yaml"
        return "NeMo 1", _yaml(path) if is_file(path) else facts.hyper_parameters
    if facts.hyper_parameters and "pytorch-lightning_version" in facts.keys:
        return "NeMo 1", facts.hyper_parameters
    if "pytorch-lightning_version" in facts.keys:
        return "NeMo 2", {}
    if facts.args:
        return "Megatron-LM", {}
    megatron = facts.content or is_file(folder / "metadata.json") or any(parse_key(k).axes for k in keys)
    return ("Megatron-Core" if megatron else "torch DCP"), {}


def megatron_catalog(
    name: str, folder: Path, common: Any, keys: Sequence[str], problems: list[Problem], **contents: Any
) -> Catalog:
    """The catalog of a distributed checkpoint of Megatron's: what common state and configuration say,
    and further `contents`."""
    facts = common_facts(common)
    framework, config = find_framework(folder, facts, keys)
    document = _yaml(folder / "run_config.yaml") if framework == "Megatron-Bridge" else {}
    if backend_of(folder) is None:
        text = "metadata.json is missing: Megatron writes it last, so the save may be unfinished"
        problems.append(Problem("warning", text))
    return Catalog(
        path=folder,
        format=name,
        framework="Megatron-Core" if framework == "torch DCP" else framework,
        args=facts.args,
        config=config,
        training=_training(document),
        adapters=peft if isinstance(peft := document.get("peft"), Mapping) else {},
        common=common,
        content=facts.content,
        iteration=facts.iteration if facts.iteration is not None else iteration_of(folder),
        problems=tuple(problems),
        **contents,
    )


def _yaml(path: Path) -> Mapping[str, Any]:
    from converters.formats.plain_yaml import read_yaml  # Megatron-LM's checkpoints have none: do not import the parser

    return read_yaml(path)


# of Megatron-Bridge's run_config.yaml: (section, setting) -> training argument (core, distributed_data_parallel_config.py,
# optimizer_config.py; Megatron-LM, training/training.py `get_model`)
_TRAINING = {
    ("ddp", "overlap_grad_reduce"): "overlap_grad_reduce",
    ("ddp", "bucket_size"): "ddp_bucket_size",
    ("ddp", "num_buckets"): "ddp_num_buckets",
    ("ddp", "pad_buckets_for_high_nccl_busbw"): "ddp_pad_buckets_for_high_nccl_busbw",
    ("ddp", "grad_reduce_in_fp32"): "accumulate_allreduce_grads_in_fp32",
    ("optimizer", "use_precision_aware_optimizer"): "use_precision_aware_optimizer",
    ("optimizer", "main_params_dtype"): "main_params_dtype",
    ("optimizer", "overlap_param_gather_with_optimizer_step"): "overlap_param_gather_with_optimizer_step",
}


def _training(document: Mapping[str, Any]) -> dict[str, Any]:
    """The options of Megatron-Bridge's job that `_TRAINING` names; a type is `{"_target_": "torch.float32", ..}`."""
    out: dict[str, Any] = {}
    for (section, setting), name in _TRAINING.items():
        inner = document.get(section)
        value = inner.get(setting) if isinstance(inner, Mapping) else None
        if isinstance(value, Mapping):
            module, _, leaf = str(value.get("_target_", "")).rpartition(".")
            value = Global(module, leaf)
        if value is not None:
            out[name] = value
    return out


def _fiddle(path: Path) -> Mapping[str, Any]:
    """The settings in `io.json`, all that the first versions of NeMo 2 kept: those that were set, no defaults."""
    document = parse_json(read_small(path, 64 << 20), path.name) if is_file(path) else {}
    objects = document.get("objects") if isinstance(document, dict) else None
    fields_of: dict[str, Any] = {}
    for entry in objects.values() if isinstance(objects, dict) else ():
        items = entry.get("items") if isinstance(entry, dict) else None
        values = dict(filter(None, map(_setting, items if isinstance(items, list) else ())))
        if "num_layers" in values and len(values) > len(fields_of):
            fields_of = values
    return fields_of


def _setting(item: Any) -> tuple[str, Any] | None:
    """`["Attr(name='hidden_size')", {"type": "leaf", "value": 64}]`; a function is told by its name."""
    if not isinstance(item, list) or len(item) != 2 or not isinstance(item[1], dict):
        return None
    name, kind = re.fullmatch(r"Attr\(name='(\w+)'\)", str(item[0])), item[1].get("type")
    if name is None or kind not in ("leaf", "pyref"):
        return None
    return name[1], item[1].get("value" if kind == "leaf" else "name")


def _section(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    inner = document.get(name)
    return inner if isinstance(inner, Mapping) else document
