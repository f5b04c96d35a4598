"""The report of an export on every tensor: `distckpt-report.json`, and a part of `--json`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from converters import __version__
from converters.names import fold
from converters.write.accounting import Accounting
from converters.write.companion_files import json_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from converters.catalog import Catalog
    from converters.execute.run import Stats
    from converters.planning.plan import Copy
    from converters.write.export import ExportPlan


def export_report(plan: ExportPlan) -> dict[str, Any]:
    """The accounting: every source tensor used or dropped with its reason, every target tensor and its origin."""
    catalog, mapping = plan.reader.catalog, plan.mapping
    scales = plan.quantization.scales if plan.quantization else {}

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
        "architecture": plan.model.name,
        "source_tensors": {
            "weights": len(catalog.weights),
            "used": len(accounts.used),
            "optimizer": len(optimizer),
        },
        "target_tensors": len(plan.targets),
        "parameters": accounts.parameters,
        "total_size": sum(target.nbytes for target in plan.targets.values()),
        "dropped": [
            *accounts.dropped,
            *({"tensor": text, "elements": "all", "reason": "optimizer state"} for text, _ in fold(optimizer)),
            *({"tensor": text, "elements": "all", "reason": "not a tensor"} for text in _object_names(catalog)),
        ],
        "targets": {
            name: {
                "file": plan.job.files[plan.layout.locations[name].file].name,
                "dtype": target.dtype.name,
                "shape": list(target.shape),
                **accounts.origin(name),
            }
            for name, target in plan.targets.items()
        },
        **({"quantization": plan.quantization.config} if plan.quantization else {}),
        **({"adapter": dict(plan.adapter)} if plan.adapter else {}),
        "notes": list(plan.notes),
    }


def completed_report(report: Mapping[str, Any]) -> Callable[[Stats], bytes]:
    """The report when everything is written: with what quantizing has changed, and what fp16 made zero."""

    def complete(stats: Stats) -> bytes:
        losses = {"quantization_errors": stats.losses} if stats.losses else {}
        return json_bytes({**report, **losses, "underflowed": stats.underflowed})

    return complete


def _object_names(catalog: Catalog) -> list[str]:
    return [text for text, _ in fold(dict.fromkeys(o.name for o in catalog.objects.values()))]
