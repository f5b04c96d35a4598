"""The identity card of a checkpoint: as lines for a person, as a document for a program."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from converters.dtypes import dtype
from converters.errors import RequestError
from converters.names import folded, listed, printable
from converters.pickles.describe import describe
from converters.words import counted, format_count, format_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from converters.catalog import Catalog, Problem
    from converters.megatron.identity import Identity, SavedLayout
    from converters.megatron.model_args import ModelArgs
    from converters.megatron.model_kind import ModelKind
    from converters.models.model import Model

_SHOWN_PROBLEMS = 8


def describe_layout(layout: SavedLayout) -> str:
    """The layout in one line: `tp 4  pp 2  dp 8 (64 ranks)`; a size of 1 is shown only for tp, pp and dp."""
    shown: list[str] = []
    for name in ("tp", "pp", "vpp", "cp", "ep", "etp", "dp"):
        size = getattr(layout, name)
        if size is None or (size == 1 and name not in ("tp", "pp", "dp")):
            continue
        if name == "etp" and ((layout.ep or 1) == 1 or size == layout.tp):
            continue  # it follows tp unless asked otherwise, and means nothing without experts
        shown.append(f"{name} {size}")
    text = "  ".join(shown) or "unknown"
    return text + (f" ({counted(layout.ranks, 'rank')})" if layout.ranks else "")


def find_architecture(catalog: Catalog, identity: Identity) -> tuple[Model | None, list[str]]:
    """The Hugging Face architecture of the model; or None, and why no known one fits."""
    from converters.models import ARCHITECTURES, infer

    if not catalog.megatron and catalog.config:  # what a config.json says it is
        named = [model for model in ARCHITECTURES if model.name == catalog.config.get("model_type")]
        return (named[0], []) if named else (None, [])
    if identity.kind.name in ("T5", "BERT", "encoder and decoder"):
        return None, []
    try:
        return infer(identity.model, catalog), []
    except RequestError as error:
        return None, [error.message, *error.details]


def describe_kind(kind: ModelKind, architecture: Model | None) -> str:
    """The kind of model: `llama`, `T5 (encoder of 12 layers, ...)`, `LLaVA: llama language model + ...`."""
    name = architecture.name if architecture else ""
    if kind.name in ("LLaVA", "model of several parts"):
        details = kind.details.replace("language model", f"{name} language model" if name else "language model", 1)
        return f"{kind.name}: {details}"
    if kind.name:
        return f"{kind.name} ({kind.details})" if kind.details else kind.name
    return name


def describe_model(model: ModelArgs, kind: str) -> str:
    """The model in one line: `llama, 32 layers, hidden 4096, 32 heads / 8 query groups, ffn 14336, ...`.

    Args:
        kind: From `describe_kind`.
    """
    parts = [kind] if kind else []
    if model.num_layers is not None:
        kinds = f" ({model.layer_kinds})" if model.layer_kinds else ""
        parts.append(counted(model.num_layers, "layer") + kinds)
    if model.hidden_size is not None:
        parts.append(f"hidden {model.hidden_size}")
    if model.num_attention_heads is not None:
        groups = model.num_query_groups
        shared = (
            f" / {counted(groups, 'query group')}" if groups is not None and groups != model.num_attention_heads else ""
        )
        parts.append(counted(model.num_attention_heads, "head") + shared)
    if model.mla:
        parts.append(f"latent attention (kv rank {model.kv_lora_rank})")
    if model.ffn_hidden_size is not None:
        parts.append(f"ffn {model.ffn_hidden_size}")
    if model.num_experts:
        top = f", top {model.moe_topk}" if model.moe_topk is not None else ""
        size = f" of {model.moe_ffn_hidden_size}" if model.moe_ffn_hidden_size is not None else ""
        parts.append(f"{counted(model.num_experts, 'expert')}{size}{top}")
    if model.mtp_num_layers:
        parts.append(f"multi-token prediction ({counted(model.mtp_num_layers, 'layer')})")
    rows = model.padded_vocab_size
    if model.vocab_size is not None or rows is not None:
        padded = f" (padded {rows})" if model.vocab_size is not None and rows is not None else ""
        parts.append(f"vocab {model.vocab_size or rows}{padded}")
    if model.dtype is not None:
        parts.append(dtype(model.dtype).short)
    return ", ".join(parts) or "unknown"


def describe_names(catalog: Catalog) -> str:
    """A model with names that are not Megatron's, in one line: `names of Hugging Face, 32 layers, bf16`."""
    numbers = {match[1] for name in catalog.weights if (match := re.search(r"\.(?:layers?|h|blocks?)\.(\d+)\.", name))}
    sizes: Counter[str] = Counter()
    for tensor in catalog.weights.values():
        sizes[tensor.dtype.short] += tensor.nbytes
    whose = "names of Hugging Face" if catalog.framework == "Hugging Face" else "unrecognised model"
    layers = [counted(len(numbers), "layer")] if numbers else []
    parts = [whose, *layers, *(name for name, _ in sizes.most_common(3))]
    return ", ".join(parts)


def card_lines(catalog: Catalog, identity: Identity) -> list[tuple[str, str]]:
    """`(label, text)` of every line of the card, the title first; the label is empty where it is that of the line above."""
    title = [
        catalog.format
        if catalog.framework in ("Megatron-LM", "Megatron-Core")
        else f"{catalog.format} ({catalog.framework})"
    ]
    if catalog.iteration is not None:
        title.append(f"iteration {catalog.iteration}")
    if catalog.producer:
        title.append(f"written by {catalog.producer[0]}")
    return [
        (f"{catalog.path}  ", ", ".join(title)),
        *_model_lines(catalog, identity),
        *_saved_lines(catalog, identity),
        ("size", _size_line(identity)),
        *_problem_lines(catalog.problems, identity),
    ]


def _model_lines(catalog: Catalog, identity: Identity) -> Iterator[tuple[str, str]]:
    architecture, _ = find_architecture(catalog, identity)
    described = catalog.megatron or catalog.config  # Hugging Face says in config.json what the model is
    kind = describe_kind(identity.kind, architecture)
    yield "model", describe_model(identity.model, kind) if described else describe_names(catalog)
    if identity.kind.adapters:
        yield "", f"adapters: {identity.kind.adapters}"
    if architecture is None and not identity.kind.name and identity.features:
        yield "", f"no known architecture; it has {', '.join(identity.features)}"


def _saved_lines(catalog: Catalog, identity: Identity) -> Iterator[tuple[str, str]]:
    pieces = max((tensor.chunk_count for tensor in catalog.weights.values()), default=0)
    in_pieces = f"in up to {pieces} pieces a tensor" if pieces != 1 else "each tensor in one piece"
    saved = [describe_layout(identity.layout) if catalog.megatron else in_pieces]
    if identity.sharing.parallel is not None:
        saved.append("fully parallel save" if identity.sharing.parallel else "saved by the first data-parallel rank")
    saved.append(f"optimizer: {identity.optimizer.name}")
    yield "saved on" if catalog.megatron else "saved", ", ".join(saved)
    if identity.optimizer.name != "none":
        yield "", identity.optimizer.permits
    if identity.optimizer.masters:
        yield "", identity.optimizer.masters


def _size_line(identity: Identity) -> str:
    size = f"{format_size(identity.disk_bytes)} in {counted(identity.files, 'file')}"
    padding = f" (and {format_count(identity.padding)} of padding)" if identity.padding else ""
    samples = identity.model.consumed_train_samples
    samples_seen = f", {samples:,} samples seen" if samples else ""
    return f"{size}, {format_count(identity.parameters)} parameters{padding}{samples_seen}"


def _problem_lines(problems: Sequence[Problem], identity: Identity) -> Iterator[tuple[str, str]]:
    for problem in problems[:_SHOWN_PROBLEMS]:
        yield problem.severity, problem.message
        if problem.tensors:
            yield "affects", listed(folded(problem.tensors), 1)
    if len(problems) > _SHOWN_PROBLEMS:
        yield "", f"and {counted(len(problems) - _SHOWN_PROBLEMS, 'more problem')}; --json lists all"
    yield from (("warning", f"not understood: {printable(text)}") for text in identity.model.unknown)
    yield from (("warning", text) for text in identity.contradictions)
    if identity.optimizer.caution:
        yield "warning", identity.optimizer.caution


def card_document(catalog: Catalog, identity: Identity) -> dict[str, Any]:
    """The card for programs: bytes as integers, null where nothing is known."""
    model = {f.name: getattr(identity.model, f.name) for f in fields(identity.model) if f.name != "source"}
    model["extras"] = {name: describe(value) for name, value in identity.model.extras.items()}
    producer = {"version": catalog.producer[0], "reason": catalog.producer[1]} if catalog.producer else None
    architecture, reasons = find_architecture(catalog, identity)
    architecture_document = {"name": architecture.name, "class": architecture.architecture} if architecture else None
    return {
        "path": str(catalog.path),
        "format": catalog.format,
        "flavour": catalog.framework,
        "producer": producer,
        "iteration": catalog.iteration,
        "architecture": None if identity.kind.name else architecture_document,
        "kind": asdict(identity.kind),
        "no_architecture": [f"a {identity.kind.name}"] if identity.kind.name else reasons,
        "features": list(identity.features),
        "model": model,
        "model_source": dict(identity.model.source),
        "contradictions": list(identity.contradictions),
        "layout": asdict(identity.layout),
        "fully_parallel_save": {"value": identity.sharing.parallel, "reason": identity.sharing.reason},
        "optimizer": asdict(identity.optimizer),
        "components": [
            {"name": c.name, "tensors": c.tensors, "dtypes": list(c.dtypes), "bytes": c.nbytes}
            for c in identity.components
        ],
        "parameters": identity.parameters,
        "padding_elements": identity.padding,
        "weight_dtypes": {k: {"tensors": n, "bytes": size} for k, (n, size) in identity.dtypes.items()},
        "consumed_train_samples": identity.model.consumed_train_samples,
        "bytes": identity.nbytes,
        "disk_bytes": identity.disk_bytes,
        "writers": list(identity.writers),
        "files": [asdict(info) for info in catalog.files],
        "problems": [asdict(problem) for problem in catalog.problems],
        "details": dict(catalog.details),
    }
