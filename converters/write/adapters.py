"""Adapters in an export: written alone, or merged into the weights of a model."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from converters.catalog import LowRank
from converters.chunks import ViewPart
from converters.errors import RequestError
from converters.formats import open_checkpoint
from converters.formats.base import ReaderPair
from converters.megatron.adapters import has_adapters, is_adapter, only_adapters, read_adapters
from converters.megatron.damage import refuse_damage
from converters.names import fold, listed_lines, printable
from converters.planning.plan import Drop
from converters.words import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from converters.catalog import Catalog, TensorInfo
    from converters.chunks import FlatPart, Part, StoredArray
    from converters.formats.base import Reader
    from converters.megatron.adapters import Adapters

_MERGED = "W + alpha / rank * B @ A in fp32, rounded once to the type of W"
_MERGEABLE = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Merge:
    """A checkpoint with adapters that are merged into its weights while they are read.

    Attributes:
        reader: Its records and those of the adapters; its catalog's weights say what is added to them.
        catalog: The same without the adapters' own tensors.
        drops: Those, where the checkpoint itself holds them.
        facts: What is merged, for the report.
        root: The outermost folder of the checkpoint with the adapters; nothing is written inside it.
    """

    reader: Reader
    catalog: Catalog
    drops: tuple[Drop, ...]
    facts: Mapping[str, Any]
    root: Path


def wants_peft(catalog: Catalog, peft: bool, merge: bool) -> bool:
    """Whether an export writes adapters alone.

    Raises:
        RequestError: It shall, but there is more to the request; or the model has adapters and no option for them was given.
    """
    if peft and merge:
        raise RequestError("--peft writes adapters alone, --merge-adapter merges them: choose one")
    if merge or not has_adapters(catalog):
        if peft:
            raise RequestError("the checkpoint has no adapters", hint="without --peft its weights are exported")
        return False
    if not peft and not only_adapters(catalog):
        raise RequestError(
            "the model has adapters, which are not merged into its weights",
            hint="--peft exports the adapters alone, --merge-adapter with this same checkpoint merges them; "
            "convert --to safetensors keeps both under Megatron's names",
        )
    return True


def merge_adapters(reader: Reader, path: str | Path, alpha: float | None) -> Merge:
    """Merges the adapters of another checkpoint, or of the same one, into a checkpoint's weights.

    Args:
        reader: The model.
        path: The checkpoint with the adapters, as a person names it.
        alpha: Theirs, if their checkpoint does not say it.

    Raises:
        RequestError: There are none, they are of a kind that is not known, or they do not fit the model.
        IntegrityError: Part of them is missing.
    """
    catalog, source = reader.catalog, open_checkpoint(path)
    alone = source.catalog.path.resolve() == catalog.path.resolve()
    if has_adapters(catalog) and not alone:
        raise RequestError(
            "the model has adapters of its own, beside those that shall be merged",
            hint="name the same checkpoint twice to merge its own: export-hf SRC DST --merge-adapter SRC",
        )
    adapters = read_adapters(source.catalog, alpha)
    refuse_damage(source.catalog, {info.name for info in _tensors(adapters)})
    _check_fit(catalog, adapters)
    offset = 0 if alone else 1 + _last_record(catalog.tensors.values())
    arrays: dict[int, StoredArray] = {}
    updates = {
        name: LowRank(
            _renumbered(factors.rows, offset, arrays),
            _renumbered(factors.columns, offset, arrays),
            adapters.scale(name),
        )
        for name, factors in adapters.factors.items()
    }
    tensors = {
        name: replace(info, update=updates[name]) if name in updates else info for name, info in catalog.tensors.items()
    }
    merged = replace(catalog, tensors=tensors)
    merged_names = [name for name, info in tensors.items() if info.kind == "weight" and is_adapter(name)]
    facts = {
        "checkpoint": source.catalog.path.name,
        "rank": adapters.rank,
        "alpha": adapters.alpha,
        "merged": _MERGED,
        "weights": list(updates),
    }
    return Merge(
        _AdaptedReader(reader, source, offset, merged, f"{adapters.alpha}"),
        replace(merged, tensors={name: info for name, info in tensors.items() if name not in merged_names}),
        tuple(Drop(name, None, "merged into the weight") for name in merged_names),
        facts,
        source.catalog.root,
    )


class _AdaptedReader(ReaderPair):
    """A checkpoint and the adapters that are merged into it; `alpha` belongs to what the result depends on."""

    def __init__(self, first: Reader, second: Reader, offset: int, catalog: Catalog, alpha: str) -> None:
        super().__init__(first, second, offset or sys.maxsize, catalog)
        self._alpha = alpha

    def fingerprint(self) -> str:
        """See `Reader`."""
        return f"{super().fingerprint()}:{self._alpha}"


def _tensors(adapters: Adapters) -> Iterable[TensorInfo]:
    return (info for factors in adapters.factors.values() for info in (factors.rows, factors.columns))


def _check_fit(catalog: Catalog, adapters: Adapters) -> None:
    wrong = []
    for name, factors in adapters.factors.items():
        weight = catalog.weights.get(name)
        if weight is None:
            wrong.append(f"the model has no {printable(name)}")
        elif weight.shape != factors.shape:
            wrong.append(f"{printable(name)} is {list(weight.shape)}, its adapter is for {list(factors.shape)}")
        elif weight.dtype.name not in _MERGEABLE:
            wrong.append(f"{printable(name)} is {weight.dtype}, to which no adapter is added")
    if wrong:
        raise RequestError(
            f"{counted(len(wrong), 'adapter', verb='does/do')} not fit the model",
            details=listed_lines([text for text, _ in fold(wrong)], 8),
            hint="name the checkpoint that they were trained on",
        )


def _last_record(tensors: Iterable[TensorInfo]) -> int:
    arrays = {id(part.array): part.array.records for info in tensors for part in info.parts}
    return max((int(records.max()) for records in arrays.values() if records.size), default=-1)


def _renumbered(info: TensorInfo, offset: int, arrays: dict[int, StoredArray]) -> TensorInfo:
    """A tensor whose records have numbers behind those of another checkpoint."""
    parts: list[Part | FlatPart | ViewPart] = []
    for part in info.parts:
        if (array := arrays.get(id(part.array))) is None:
            records = np.where(part.array.records < 0, -1, part.array.records + offset)
            array = arrays[id(part.array)] = replace(part.array, records=records)
        if isinstance(part, ViewPart):
            pieces = tuple(replace(p, record=p.record + offset if p.record >= 0 else -1) for p in part.pieces)
            parts.append(replace(part, array=array, pieces=pieces))
        else:
            parts.append(replace(part, array=array))
    return replace(info, parts=tuple(parts))
