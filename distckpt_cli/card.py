"""The identity card of a checkpoint, for people and as JSON."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from converters.dtypes import dtype
from converters.errors import RequestError
from converters.names import fold
from converters.pickles import describe
from distckpt_cli.console import format_count, format_size

if TYPE_CHECKING:
    from converters.catalog import Catalog
    from converters.facts.identity import Identity, SavedLayout
    from converters.facts.model_args import ModelArgs
    from converters.models import Model
    from distckpt_cli.console import Console

__all__ = ["card_document", "describe_layout", "describe_model", "find_architecture", "print_card"]

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
    return text + (f" ({layout.ranks} rank{'s' if layout.ranks != 1 else ''})" if layout.ranks else "")


def find_architecture(catalog: Catalog, identity: Identity) -> tuple[Model | None, list[str]]:
    """The Hugging Face architecture of the model; or None, and why no known one fits."""
    from converters.models import KNOWN, infer

    if not catalog.megatron and catalog.config:  # what a config.json says it is
        named = [model for model in KNOWN if model.name == catalog.config.get("model_type")]
        return (named[0], []) if named else (None, [])
    try:
        return infer(identity.model, catalog), []
    except RequestError as error:
        return None, [error.message, *error.details]


def describe_model(model: ModelArgs, architecture: Model | None) -> str:
    """The model in one line: `llama, 32 layers, hidden 4096, 32 heads / 8 query groups, ffn 14336, ...`."""
    parts = [architecture.name] if architecture else []
    if model.num_layers is not None:
        parts.append(f"{model.num_layers} layer{'s' if model.num_layers != 1 else ''}")
    if model.hidden_size is not None:
        parts.append(f"hidden {model.hidden_size}")
    if model.num_attention_heads is not None:
        groups = model.num_query_groups
        several = groups is not None and groups != model.num_attention_heads
        parts.append(f"{model.num_attention_heads} heads" + (f" / {groups} query groups" if several else ""))
    if model.mla:
        parts.append(f"latent attention (kv rank {model.kv_lora_rank})")
    if model.ffn_hidden_size is not None:
        parts.append(f"ffn {model.ffn_hidden_size}")
    if model.num_experts:
        top = f", top {model.moe_topk}" if model.moe_topk is not None else ""
        size = f" of {model.moe_ffn_hidden_size}" if model.moe_ffn_hidden_size is not None else ""
        parts.append(f"{model.num_experts} experts{size}{top}")
    if model.mtp_num_layers:
        parts.append(f"multi-token prediction ({model.mtp_num_layers} layer{'s' if model.mtp_num_layers > 1 else ''})")
    rows = model.padded_vocab_size
    if model.vocab_size is not None or rows is not None:
        padded = f" (padded {rows})" if model.vocab_size is not None and rows is not None else ""
        parts.append(f"vocab {model.vocab_size or rows}{padded}")
    if model.dtype is not None:
        parts.append(dtype(model.dtype).short)
    return ", ".join(parts) or "unknown"


def describe_names(catalog: Catalog) -> str:
    """A model with names that are not Megatron's, in one line: `names of Hugging Face, 32 layers, bf16`."""
    numbers = {found[1] for name in catalog.weights if (found := re.search(r"\.(?:layers?|h|blocks?)\.(\d+)\.", name))}
    sizes: Counter[str] = Counter()
    for tensor in catalog.weights.values():
        sizes[tensor.dtype.short] += tensor.nbytes
    whose = "names of Hugging Face" if catalog.flavour == "Hugging Face" else "names of its own"
    layers = [f"{len(numbers)} layer{'s' if len(numbers) != 1 else ''}"] if numbers else []
    parts = [whose, *layers, *(name for name, _ in sizes.most_common(3))]
    return ", ".join(parts)


def print_card(console: Console, catalog: Catalog, identity: Identity) -> None:
    """Prints the card: what it is, the model, how it was saved, components, problems."""
    title = [
        catalog.format
        if catalog.flavour in ("Megatron-LM", "Megatron-Core")
        else f"{catalog.format} ({catalog.flavour})"
    ]
    if catalog.iteration is not None:
        title.append(f"iteration {catalog.iteration}")
    if catalog.producer:
        title.append(f"written by {catalog.producer[0]}")
    console.fact(f"{catalog.path}  ", ", ".join(title), style="bold")
    architecture, _ = find_architecture(catalog, identity)
    told = catalog.megatron or catalog.config  # Hugging Face says in config.json what the model is
    console.fact("model", describe_model(identity.model, architecture) if told else describe_names(catalog))
    if architecture is None and identity.features:
        console.fact("", f"no known architecture; it has {', '.join(identity.features)}")
    pieces = max((tensor.chunk_count for tensor in catalog.weights.values()), default=0)
    in_pieces = f"in up to {pieces} pieces a tensor" if pieces != 1 else "each tensor in one piece"
    saved = [describe_layout(identity.layout) if catalog.megatron else in_pieces]
    if identity.sharing.parallel is not None:
        saved.append("fully parallel save" if identity.sharing.parallel else "saved by the first data-parallel rank")
    saved.append(f"optimizer: {identity.optimizer.name}")
    console.fact("saved on" if catalog.megatron else "saved", ", ".join(saved))
    if identity.optimizer.name != "none":
        console.fact("", identity.optimizer.permits)
    size = f"{format_size(identity.disk_bytes)} in {identity.files:,} files"
    console.fact("size", f"{size}, {format_count(identity.parameters)} parameters{_samples(identity)}")
    _print_problems(console, identity)
    console.out()
    rows = [(c.name, f"{c.tensors:,}", ", ".join(c.dtypes) or "-", format_size(c.nbytes)) for c in identity.components]
    # sizes stand under each other at the end of the line, so the last column is padded here
    width = max((len(row[3]) for row in rows), default=0)
    columns = ["COMPONENT", ">TENSORS", "DTYPE", "SIZE".rjust(width)]
    console.table(columns, [(*row[:3], row[3].rjust(width)) for row in rows])


def _samples(identity: Identity) -> str:
    return f", {identity.consumed_samples:,} samples seen" if identity.consumed_samples else ""


def _print_problems(console: Console, identity: Identity) -> None:
    for problem in identity.problems[:_SHOWN_PROBLEMS]:
        console.fact(problem.severity, problem.message, style="error" if problem.severity == "error" else "warning")
        affected = [name for name, _ in fold(problem.tensors)]
        if affected:
            more = f" and {len(affected) - 1} more" if len(affected) > 1 else ""
            console.fact("affects", affected[0] + more)
    if len(identity.problems) > _SHOWN_PROBLEMS:
        console.fact("", f"and {len(identity.problems) - _SHOWN_PROBLEMS} more problems; --json lists all")
    for text in identity.contradictions:
        console.fact("warning", text, style="warning")
    if identity.optimizer.caution:
        console.fact("warning", identity.optimizer.caution, style="warning")


def card_document(catalog: Catalog, identity: Identity) -> dict[str, Any]:
    """The card for programs: bytes as integers, null where nothing is known."""
    model = {f.name: getattr(identity.model, f.name) for f in fields(identity.model) if f.name != "source"}
    model["extras"] = {name: describe(value) for name, value in identity.model.extras.items()}
    producer = {"version": catalog.producer[0], "reason": catalog.producer[1]} if catalog.producer else None
    architecture, reasons = find_architecture(catalog, identity)
    found = {"name": architecture.name, "class": architecture.architecture} if architecture else None
    return {
        "path": str(catalog.path),
        "format": catalog.format,
        "flavour": catalog.flavour,
        "producer": producer,
        "iteration": catalog.iteration,
        "architecture": found,
        "no_architecture": reasons,
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
        "consumed_train_samples": identity.consumed_samples,
        "bytes": identity.nbytes,
        "disk_bytes": identity.disk_bytes,
        "writers": list(identity.writers),
        "files": [asdict(info) for info in catalog.files],
        "problems": [asdict(problem) for problem in identity.problems],
        "details": dict(catalog.details),
    }
