"""The report of an export on every tensor: `distckpt-report.json`, and a part of `--json`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from converters import __version__
from converters.names import fold
from converters.write.accounting import Accounting
from converters.write.companion_files import json_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from converters.catalog import Catalog
    from converters.execute.run import Stats
    from converters.formats.containers.safetensors_out import SafetensorsLayout
    from converters.models.quantizing import Quantization
    from converters.planning.plan import Copy
    from converters.write.export import Content


def export_report(
    content: Content, layout: SafetensorsLayout, form: Quantization | None, notes: Sequence[str]
) -> dict[str, Any]:
    """The accounting: every source tensor used or dropped with its reason, every target tensor and its origin.

    Args:
        content: What is exported.
        layout: The shards.
        form: Which of the targets are quantized; None if none is.
        notes: Sentences a person should read.
    """
    catalog, mapping = content.reader.catalog, content.mapping
    targets, scales = (form.targets, form.scales) if form else (mapping.targets, {})

    def changes(copy: Copy) -> Iterator[str]:
        if catalog.tensors[copy.source].update is not None:
            yield "adapter merged"
        if copy.target in scales.values():
            yield "scales"
        elif copy.target in scales:
            yield "quantized in blocks"
        elif catalog.tensors[copy.source].dtype != mapping.targets[copy.target].dtype:
            yield f"cast to {mapping.targets[copy.target].dtype}"

    of_scales = [replace(copy, target=scales[copy.target]) for copy in mapping.copies if copy.target in scales]
    accounts = Accounting(mapping.targets, [*mapping.copies, *of_scales], mapping.drops, changes)
    optimizer = [name for name, t in catalog.tensors.items() if t.kind == "optimizer"]
    return {
        "schema": "distckpt.export-hf/1",
        "distckpt": __version__,
        "source": {
            "path": str(catalog.path.name),
            "format": catalog.format,
            "written_by": catalog.framework,
            "iteration": catalog.iteration,
        },
        "architecture": content.model.name,
        "source_tensors": {
            "weights": len(catalog.weights),
            "used": len(accounts.used),
            "optimizer": len(optimizer),
        },
        "target_tensors": len(targets),
        "parameters": accounts.parameters,
        "total_size": sum(target.nbytes for target in targets.values()),
        "dropped": [
            *accounts.dropped,
            *({"tensor": text, "elements": "all", "reason": "optimizer state"} for text, _ in fold(optimizer)),
            *({"tensor": text, "elements": "all", "reason": "not a tensor"} for text in _object_names(catalog)),
        ],
        "targets": {
            name: {
                "file": layout.files[layout.locations[name].file].name,
                "dtype": target.dtype.name,
                "shape": list(target.shape),
                **accounts.origin(name),
            }
            for name, target in targets.items()
        },
        **({"quantization": form.config} if form else {}),
        **({"adapter": dict(content.adapter)} if content.adapter else {}),
        "notes": list(notes),
    }


def completed_report(report: Mapping[str, Any]) -> Callable[[Stats], bytes]:
    """The report when everything is written: with what quantizing has changed, and what fp16 made zero."""

    def complete(stats: Stats) -> bytes:
        losses = {"quantization_errors": stats.losses} if stats.losses else {}
        return json_bytes({**report, **losses, "underflowed": stats.underflowed})

    return complete


def _object_names(catalog: Catalog) -> list[str]:
    return [text for text, _ in fold(dict.fromkeys(o.name for o in catalog.objects.values()))]
