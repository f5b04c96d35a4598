"""Whether config.json, the index and the tensors of a Hugging Face folder are of one model.

What transformers finds wrong when it loads is a line of a log at most: a tensor that is missing is made up, one that is too
much is left out. Here config.json says, through the architecture's table, which tensors of which shapes there must be.

What no shape shows cannot be found so: the rotary base, an activation, the number of heads where the width of all heads
together is the same.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from dataclasses import replace
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from converters.errors import DistckptError, FormatError, RequestError, UnsupportedError
from converters.formats.plain_json import read_json
from converters.models import of_config
from converters.models.built import unlike_transformers
from converters.models.config import KEYS
from converters.models.described import COMPUTED, HEADS, described, expected_shapes, own_names
from converters.models.predictions import can_hold_predictions, with_predictions
from converters.models.rules import Experts
from converters.names import fold, printable
from converters.transformers_config import CLASSLESS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from converters.catalog import Catalog
    from converters.megatron.model_args import ModelArgs
    from converters.models.model import Model
    from converters.verification.report import Check

    Shapes = Mapping[str, tuple[int, ...]]

_WEIGHTS = re.compile(r".*\.safetensors|.*model.*\.bin")  # not training_args.bin or optimizer.bin
_SHOWN = 12


def check_hugging_face(check: Check, catalog: Catalog) -> str:
    """Compares the tensors of a folder with its config.json and its index.

    Args:
        check: Where it is noted.
        catalog: What the folder holds.

    Returns:
        What was compared, or why nothing was, for the summary; empty for what is no such folder.
    """
    if catalog.framework != "Hugging Face" or not catalog.path.is_dir():
        return ""
    _check_index(check, catalog)
    config = catalog.config
    if not config:
        return "no config.json to compare them with"
    model = of_config(config)
    if model is None:
        return f"config.json was not compared: model_type {printable(str(config.get('model_type')))[:80]} is not known"
    if "quantization_config" in config:
        return "config.json was not compared: the weights are quantized"
    tensors = {
        name: catalog.weights[stored_name].shape for name, stored_name in own_names(model, catalog.weights).items()
    }
    try:
        args = described(model, config, biased=any(name.endswith("proj.bias") for name in tensors))
        _Comparison(check, model, config, tensors).run(args)
    except (RequestError, UnsupportedError) as error:
        return f"config.json was not compared: {printable(error.message)}"
    except FormatError as error:
        check.error(printable(error.message), file="config.json")
    return f"config.json of a {model.name} describes them"


def check_transformers(check: Check, catalog: Catalog) -> None:
    """Compares the tensors of a folder with those of the model that transformers builds of its config.json.

    Only of a folder in which `check_hugging_face` found nothing wrong, and of a configuration that speaks of no more layers
    and experts than stored are tensors: building it takes time for each.

    Args:
        check: What `check_hugging_face` noted, where more is noted.
        catalog: What the folder holds.
    """
    config, model = catalog.config, of_config(catalog.config)
    if catalog.framework != "Hugging Face" or model is None or check.status == "bad" or "quantization_config" in config:
        return
    if model.name in CLASSLESS:
        return
    counts = [n for key, n in config.items() if re.search("layer|expert", key) and type(n) is int]
    if max(counts, default=0) > len(catalog.weights):
        return
    try:
        stored_names = own_names(model, catalog.weights)
        unlike = unlike_transformers(
            config, {name: catalog.weights[stored].shape for name, stored in stored_names.items()}
        )
    except RequestError as error:
        check.warn(error.message, file="config.json")
        return
    for text in unlike[:_SHOWN]:
        check.error(text, file="config.json")
    check.summary += "" if unlike else ", transformers builds the same model of it"


class _Comparison:
    """The tensors of a folder beside those of a table."""

    def __init__(self, check: Check, model: Model, config: Mapping[str, Any], tensors: Shapes) -> None:
        self._check, self._model, self._config, self._tensors = check, model, config, tensors
        first, last = map(re.escape, model.layers.split("{}"))
        self._layer = re.compile(rf"{first}(\d{{1,5}}){last}")
        expert = re.compile(rf"{first}(\d{{1,5}}){last}.*\.experts\.(\d{{1,5}})\.")
        self._layers = {int(match[1]) for name in tensors if (match := self._layer.match(name))}
        self._experts = {(int(m[1]), int(m[2])) for name in tensors if (m := expert.match(name))}

    def run(self, args: ModelArgs) -> None:
        """Reports missing and extra tensors and wrong shapes."""
        args = with_predictions(self._model, self._with_stored_counts(args), self._tensors)
        if (args.num_layers or 0) > 2 * len(self._layers) + 16:
            return  # layers are missing, which has been said; a stranger's layer 10^5 shall not cost a list of all before it
        plain = expected_shapes(self._model, args)
        behind: Shapes = {}
        if (
            can_hold_predictions(self._model, args) and args.mtp_num_layers
        ):  # transformers leaves these layers out when it saves
            behind = expected_shapes(self._model, args, mtp=min(args.mtp_num_layers, 8))
        wanted = {**behind, **plain}
        wrong = {n: (shape, wanted[n]) for n, shape in self._tensors.items() if n in wanted and shape != wanted[n]}
        self._report_shapes(wrong, args)
        missing = [name for name in plain if name not in self._tensors]
        missing = [name for name in missing if name not in HEADS or self._needs_head(args)]
        self._report_names(
            missing, "is missing: config.json needs it", "are missing: config.json needs them", needed="present"
        )
        extra = [name for name in self._tensors if name not in wanted and not self._is_optional(name, args)]
        of_layers = [name for name in extra if self._layer.match(name) and not name.endswith("_scale")]
        self._report_names(of_layers, "does not belong to config.json's model", "do not belong to config.json's model")
        for text, names in fold(name for name in extra if name not in of_layers):
            self._check.warn(f"{printable(text)} does not belong to a {self._model.name}", tensors=tuple(names))

    def _needs_head(self, args: ModelArgs) -> bool:
        """Whether there must be an output layer: config.json says that it is not the embedding, nor of another class."""
        classes = self._config.get("architectures") or [self._model.architecture]
        return args.tied_embeddings is False and self._model.architecture in classes

    def _is_optional(self, name: str, args: ModelArgs) -> bool:
        """Whether a tensor is optional: computed when a model is built, a copy of the embedding, of a prediction layer."""
        layer = self._layer.match(name)
        behind = layer is not None and int(layer[1]) >= (args.num_layers or 0) and bool(args.mtp_num_layers)
        return name.endswith(COMPUTED) or name in HEADS or behind

    def _with_stored_counts(self, args: ModelArgs) -> ModelArgs:
        """The facts with the numbers of layers and experts that there are, after saying where others are stated."""
        stated, have = args.num_layers or 0, max(self._layers, default=-1) + 1
        if have < stated or (have > stated and not args.mtp_num_layers):
            mixed = {layer for layer, _ in self._experts}
            pattern = tuple(n in mixed if mixed else bool(self._model.moe) for n in range(have))
            args = replace(args, num_layers=have, moe_layers=pattern)
            self._report_count("num_layers", stated, have, "layers")
        experts = max((expert for _, expert in self._experts), default=-1) + 1
        if any(isinstance(rule, Experts) for rule in self._model.moe) and experts != args.num_experts:
            self._report_count("num_experts", args.num_experts or 0, experts, "experts")
            args = replace(args, num_experts=experts)
        return args

    def _report_count(self, field: str, stated: int, have: int, unit: str) -> None:
        key = next(name for name in KEYS[field] if name in self._config)
        text = f"config.json says {key} {stated:,}, the tensors are those of {have:,} {unit}"
        self._check.error(text, file="config.json", needed=f"{stated} {unit}", found=f"{have} {unit}")

    def _report_shapes(self, wrong: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]], args: ModelArgs) -> None:
        if not wrong:
            return
        groups: dict[tuple[tuple[int, ...], tuple[int, ...]], list[str]] = defaultdict(list)
        for name, shapes in wrong.items():
            groups[shapes].append(name)
        problems = [
            (
                f"{printable(text)} is {list(have)}, by config.json {list(want)}",
                members,
                str(list(want)),
                str(list(have)),
            )
            for (have, want), names in groups.items()
            for text, members in fold(names)
        ]
        reason = self._find_wrong_number(wrong, args)
        if reason is not None:
            key, stated, fitting = reason
            text = f"config.json says {key} {stated:,}, the shapes are those of {fitting:,}: {problems[0][0]}"
            problems = [(text, list(wrong), f"{key} {fitting}", f"{key} {stated}")]
        for text, members, needed, there in problems:
            self._check.error(text, tensors=tuple(members), needed=needed, found=there)

    def _find_wrong_number(
        self, wrong: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]], args: ModelArgs
    ) -> tuple[str, int, int] | None:
        """The one number of config.json with another value for which all shapes would fit, if there is one."""
        have, want = next(iter(wrong.values()))
        ratios = {(h, w) for h, w in zip(have, want, strict=False) if h != w and w}
        counted: dict[str, Any] = {
            "num_layers": args.num_layers,
            "moe_layers": args.moe_layers,
            "num_experts": args.num_experts,
        }
        keys = [key for names in KEYS.values() for key in names if type(self._config.get(key)) is int]
        for (h, w), key in itertools.product(ratios, keys):
            value, remainder = divmod(self._config[key] * h, w)
            if remainder or not value:
                continue
            try:
                facts = described(self._model, {**self._config, key: value}, biased=bool(args.add_qkv_bias))
            except DistckptError:
                continue
            shapes = expected_shapes(self._model, replace(facts, **counted))
            if all(self._tensors[name] == shapes.get(name) for name in wrong):
                return key, self._config[key], value
        return None

    def _report_names(self, names: Iterable[str], singular: str, plural: str, needed: str = "absent") -> None:
        folded = fold(names)
        actual = "absent" if needed == "present" else "present"
        for text, members in folded[:_SHOWN]:
            words = singular if len(members) == 1 else plural
            self._check.error(f"{printable(text)} {words}", tensors=tuple(members), needed=needed, found=actual)
        if len(folded) > _SHOWN:
            unlisted = tuple(name for _, members in folded[_SHOWN:] for name in members)
            self._check.error(f"{len(unlisted):,} more {plural}", tensors=unlisted, needed=needed, found=actual)


def _check_index(check: Check, catalog: Catalog) -> None:
    """Shards of another save, a total that is not that of the tensors; opening the folder has followed the weight map."""
    ending = ".safetensors" if catalog.format == "safetensors" else ".bin"
    for info in catalog.files:
        if not info.records and _WEIGHTS.fullmatch(PurePath(info.name).name):
            text = "is not read: no index names it; another save or format may have left it"
            check.warn(f"{printable(info.name)} {text}", file=info.name)
    index = next((info.name for info in catalog.files if info.name.endswith(f"{ending}.index.json")), None)
    if index is None:
        return
    try:
        document = read_json(catalog.path / index)
    except DistckptError as error:
        check.error(printable(error.message), file=index)
        return
    metadata = document.get("metadata") if isinstance(document, dict) else None
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    stored = {id(part.array): t for t in catalog.weights.values() for part in t.parts}
    stored_bytes = sum(t.nbytes for t in stored.values())
    all_bytes = sum(t.nbytes for t in catalog.weights.values())
    if type(total) in (int, float) and total not in (stored_bytes, all_bytes):
        text = f"{printable(index)} says total_size {total:,}, the tensors have {stored_bytes:,} bytes"
        check.warn(text, file=index, needed=f"{total}", found=f"{stored_bytes}")
