"""Low-rank adapters (LoRA) of Megatron-Bridge: which weights they change, and by how much.

    BASE.weight                            (rows, columns)   W, absent where the job saved its adapters alone
    BASE.adapter.linear_in.weight          (rank, columns)   A
    BASE.adapter.linear_out.weight         (rows, rank)      B: its rows are in the order of W's, whatever the layout

    the model computes with  W + (alpha / rank) * B @ A

Source: Megatron-Bridge 067f987d (2026-08), peft/utils.py `ParallelLinearAdapter`, peft/lora_merge.py; what was asked of the
training is the section `peft:` of run_config.yaml (peft/lora.py, `LoRA`).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from converters.errors import FormatError, IntegrityError, RequestError
from converters.names import fold, listed_lines, printable
from converters.words import counted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from converters.catalog import Catalog, TensorInfo

_NAME = re.compile(r"(decoder\.layers\.\d+\.(?!.*\bexperts\.).+)\.adapter\.linear_(in|out)\.weight")
_MARK = ".adapter."
_CLASSES = ("megatron.bridge.peft.lora.LoRA", "megatron.bridge.peft.lora.VLMLoRA")


@dataclass(frozen=True, slots=True)
class Factors:
    """The adapter of one weight.

    Attributes:
        columns: A, (rank, columns of the weight).
        rows: B, (rows of the weight, rank).
    """

    columns: TensorInfo
    rows: TensorInfo

    @property
    def rank(self) -> int:
        """Rows of A."""
        return self.columns.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        """Of the weight that is changed."""
        return self.rows.shape[0], self.columns.shape[1]


@dataclass(frozen=True)
class Adapters:
    """All adapters of a checkpoint.

    Attributes:
        factors: By the name of the weight that each changes: `decoder.layers.0.mlp.linear_fc1.weight`.
        alpha: What the product is multiplied by, times the rank.
        rank: That of the job, or of most adapters.
        dropout: Of the training.
        dropout_behind: The training's dropout came behind the product, not before it.
    """

    factors: dict[str, Factors]
    alpha: float
    rank: int
    dropout: float
    dropout_behind: bool

    def scale(self, name: str) -> float:
        """What B @ A is multiplied by for a weight."""
        return self.alpha / self.factors[name].rank


def is_adapter(name: str) -> bool:
    """Whether a tensor belongs to an adapter, of any kind."""
    return _MARK in name


def has_adapters(catalog: Catalog) -> bool:
    """Whether a model has adapters, of any kind."""
    return catalog.megatron and any(map(is_adapter, catalog.weights))


def only_adapters(catalog: Catalog) -> bool:
    """Whether a checkpoint holds adapters and nothing of the model that they change."""
    return catalog.megatron and all(map(is_adapter, catalog.weights))


def read_adapters(catalog: Catalog, alpha: float | None = None) -> Adapters:
    """The adapters of a checkpoint.

    Args:
        catalog: The checkpoint.
        alpha: To be used if the checkpoint does not say it.

    Raises:
        RequestError: It has none, or such as are not known; or nothing says `alpha`.
        IntegrityError: One half of an adapter is missing, or halves do not fit.
        FormatError: The section `peft:` is invalid.
    """
    factors = _factors(catalog)
    stated = catalog.adapters
    kind = stated.get("_target_")
    if stated and kind not in _CLASSES:
        raise RequestError(
            f"the adapters are of an unknown kind: {printable(str(kind))[:80]}",
            hint="convert --to safetensors keeps them under Megatron's names",
        )
    ranks = [pair.rank for pair in factors.values()]
    rank = max(set(ranks), key=ranks.count) if stated.get("dim") is None else _read_number(stated, "dim")
    if rank != int(rank) or (stated and not set(ranks) <= {rank}):
        raise RequestError(
            f"peft: in run_config.yaml says dim {rank:g}, but the adapters have rank "
            f"{', '.join(map(str, sorted(set(ranks))))}"
        )
    dropout = _read_number(stated, "dropout", least=0.0) if stated.get("dropout") is not None else 0.0
    return Adapters(factors, _alpha(stated, alpha), int(rank), dropout, stated.get("dropout_position") == "post")


def _alpha(stated: Mapping[str, Any], option: float | None) -> float:
    if option is not None and not (math.isfinite(option) and option > 0):
        raise RequestError(f"--lora-alpha {option} is not a positive number")
    if stated.get("alpha") is None:
        if option is None:
            raise RequestError(
                "the adapters' alpha is not stated: run_config.yaml has no section peft:",
                hint="--lora-alpha N states it; the weights change by alpha / rank * B @ A",
            )
        return option
    alpha = _read_number(stated, "alpha")
    if option is not None and option != alpha:
        raise RequestError(f"--lora-alpha {option:g} contradicts run_config.yaml, where alpha is {alpha:g}")
    return alpha


def _read_number(stated: Mapping[str, Any], key: str, least: float | None = None) -> float:
    value = stated[key]
    sound = type(value) in (int, float) and math.isfinite(value)
    if not sound or (value <= 0 if least is None else value < least):
        raise FormatError(f"run_config.yaml says {key} {printable(str(value))[:80]} of the adapters")
    return float(value)


def _factors(catalog: Catalog) -> dict[str, Factors]:
    halves: dict[str, dict[str, TensorInfo]] = {}
    unsupported = []
    for name, info in catalog.weights.items():
        if not is_adapter(name):
            continue
        match = _NAME.fullmatch(name)
        if match is None or len(info.shape) != 2 or not info.numel or not info.dtype.floating:
            unsupported.append(name)
        else:
            halves.setdefault(f"{match[1]}.weight", {})[match[2]] = info
    if unsupported:
        raise RequestError(
            f"{counted(len(unsupported), 'tensor')} of adapters cannot belong to a LoRA of one linear layer of a decoder",
            details=listed_lines([text for text, _ in fold(unsupported)], 8),
            hint="experts' adapters, DoRA and canonical LoRA are not known; convert --to safetensors keeps them",
            tensor=unsupported[0],
        )
    if not halves:
        raise RequestError("the checkpoint has no adapters", hint="give the checkpoint of a job with peft:")
    out = {}
    for name, pair in halves.items():
        if len(pair) < 2:
            raise IntegrityError(f"the adapter of {printable(name)} has only linear_{next(iter(pair))}", tensor=name)
        factors = Factors(pair["in"], pair["out"])
        if factors.rank != factors.rows.shape[1]:
            raise IntegrityError(
                f"the adapter of {printable(name)} does not fit together: linear_in is {list(factors.columns.shape)}, "
                f"linear_out {list(factors.rows.shape)}",
                tensor=name,
            )
        out[name] = factors
    return out
