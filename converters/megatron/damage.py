"""Refusing a source that is known to be damaged before hours are spent on it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from converters.box import tiling_fault
from converters.errors import IntegrityError, RequestError
from converters.names import fold, listed_lines, printable, quoted

if TYPE_CHECKING:
    from converters.catalog import Catalog, TensorInfo
    from converters.chunks import Chunk
    from converters.megatron.model_args import ModelArgs


def refuse_damaged(catalog: Catalog, *kinds: str) -> None:
    """`refuse_damage` of all tensors of these kinds: before planning reads the first of them."""
    named = {name for problem in catalog.problems for name in problem.tensors}
    refuse_damage(catalog, {name for name in named & catalog.tensors.keys() if catalog.tensors[name].kind in kinds})


def refuse_damaged_object(catalog: Catalog, key: str) -> None:
    """`refuse_damage` of a stored object."""
    problem = next((p for p in catalog.problems if p.severity == "error" and key in p.objects), None)
    if problem is not None:
        raise IntegrityError(problem.message, details=["needed for", printable(key)], hint=_hint(catalog))


def _hint(catalog: Catalog) -> str:
    return f"distckpt verify {quoted(catalog.root)} says what else is; restore it from a copy, or use another iteration"


def refuse_damage(catalog: Catalog, used: set[str]) -> None:
    """What was noticed when the checkpoint was opened: better now than after hours.

    Raises:
        IntegrityError: Some of the tensors cannot be read as they are.
        RequestError: It is not understood what some of them are.
    """
    relevant = [p for p in catalog.problems if not used.isdisjoint(p.tensors)]
    errors = [p for p in relevant if p.severity == "error"]
    unknown = next((p for p in relevant if p.severity == "unknown"), None)
    if unknown is not None and not errors:
        raise RequestError(
            unknown.message,
            hint="--optimizer none, or --weights-only, leaves the optimizer's state out",
            tensor=unknown.tensors[0],
        )
    if not errors:
        return
    damaged = used.intersection(name for problem in errors for name in problem.tensors)
    affected = [name for name in catalog.tensors if name in damaged]
    folded = [text for text, _ in fold(affected)]
    raise IntegrityError(
        errors[0].message,
        details=[*(p.message for p in errors[1:8]), "needed for", *listed_lines(folded, 8)],
        hint=_hint(catalog),
        tensor=affected[0],
    )


def stored_chunks(source: TensorInfo) -> list[Chunk]:
    """The chunks of a tensor, checked: they store every element that is not computed exactly once.

    Raises:
        IntegrityError: A hole, an overlap, or a missing record.
    """
    chunks = [chunk for chunk in source.chunks() if chunk.record >= 0]
    shape = (source.shape[0] - source.mean_rows, *source.shape[1:]) if source.mean_rows else source.shape
    boxes = [chunk.box for chunk in chunks]
    outside = next((box for box in boxes if not box.inside(shape)), None)
    if outside is not None:
        raise IntegrityError(f"{source.name}: chunk {outside} lies outside shape {list(shape)}", tensor=source.name)
    starts = np.array([box.start for box in boxes], np.int64).reshape(len(boxes), len(shape))
    sizes = np.array([box.shape for box in boxes], np.int64).reshape(starts.shape)
    fault = tiling_fault(shape, starts, sizes)
    if fault is None:
        return chunks
    where, rows = fault
    if rows:
        text = f"{source.name} is stored twice at {boxes[rows[0]]} and {boxes[rows[1]]}"
    else:
        text = f"{source.name} is incomplete: nothing is stored for {where} of shape {list(shape)}"
    raise IntegrityError(text, tensor=source.name)


def refuse_contradictions(args: ModelArgs, catalog: Catalog) -> None:
    """A result made from either side of a contradiction would be wrong."""
    contradictions = args.contradictions(catalog)
    if contradictions:
        raise RequestError(
            "the checkpoint contradicts itself: its arguments do not fit its tensors",
            details=[printable(text) for text in contradictions[:8]],
            hint="a config.json made from either would be wrong; was the checkpoint edited, or args taken from elsewhere?",
        )


def refuse_foreign_names(catalog: Catalog) -> None:
    """Layouts and architectures are known by Megatron's names.

    Raises:
        RequestError: The weights have others.
    """
    if catalog.megatron:
        return
    naming = "Hugging Face's names" if catalog.framework == "Hugging Face" else "names of their own"
    model = catalog.framework == "Hugging Face" and catalog.config
    hint = f"distckpt convert {quoted(catalog.root)} DST --to safetensors keeps the names"
    raise RequestError(
        f"the checkpoint's tensors have {naming}, not Megatron's",
        details=[f"for example {printable(name)}" for name in list(catalog.weights or catalog.tensors)[:2]],
        hint=f"distckpt import-hf {quoted(catalog.root)} DST makes a checkpoint of Megatron's of it" if model else hint,
    )
