"""The JSON document of `diff --json`."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from converters.comparison.trees import ABSENT

if TYPE_CHECKING:
    from converters.comparison.facts import Fact
    from converters.comparison.pairs import Side
    from converters.comparison.report import DiffReport, TensorReport
    from converters.comparison.values import Difference


def document(report: DiffReport, *, every: bool) -> dict[str, Any]:
    """The answer as JSON has it.

    Args:
        every: List identical tensors, too.
    """
    plan, matching = report.plan, report.plan.matching
    counts: dict[str, int] = defaultdict(int)
    for tensor in report.tensors:
        counts[tensor.status] += 1
    tolerance = plan.options.tolerance
    return {
        "identical": report.identical,
        **{side.label.lower(): _side_document(side) for side in plan.sides},
        "tolerance": None if tolerance is None else {"rtol": tolerance.rtol, "atol": tolerance.atol},
        "compared": {"tensors": len(report.tensors), **counts},
        "only_in_a": matching.only[0],
        "only_in_b": matching.only[1],
        "shapes": [{"name": n, "a": list(a), "b": list(b)} for n, (a, b) in matching.shapes.items()],
        "config": matching.config,
        "arguments": [fact_document(fact) for fact in plan.arguments],
        "state": [fact_document(fact) for fact in plan.facts.differing],
        "state_compared": plan.facts.compared,
        "tensors": [_tensor_document(t) for t in report.tensors if every or t.status not in ("identical", "unread")],
        "padding": [_tensor_document(t) for t in report.tensors if t.pair.rows or (t.padding and t.padding.differing)],
        "left_out": [{"name": name, "reason": reason} for name, reason in matching.skipped.items()],
        "notes": list(plan.notes),
        "bytes_read": {side.label.lower(): n for side, n in zip(plan.sides, report.bytes_read, strict=True)},
        "records_checked": report.records_checked,
        "seconds": round(report.seconds, 3),
    }


def _side_document(side: Side) -> dict[str, Any]:
    catalog = side.catalog
    return {
        "path": str(catalog.path),
        "format": catalog.format,
        "written_by": catalog.framework,
        "iteration": catalog.iteration,
        "tensors": len(side.tensors),
    }


def fact_document(fact: Fact) -> dict[str, Any]:
    """Something that is not the same."""
    values = {key: value for key, value in (("a", fact.a), ("b", fact.b)) if value is not ABSENT}
    return {"group": fact.group, "name": fact.name, **values, "counts": fact.counts, "note": fact.note}


def _tensor_document(tensor: TensorReport) -> dict[str, Any]:
    out: dict[str, Any] = {
        "name": tensor.name,
        "status": tensor.status,
        "a": list(tensor.pair.a),
        "b": list(tensor.pair.b),
        "shape": list(tensor.pair.shape),
        "dtype_a": [kind.name for kind in tensor.types[0]],
        "dtype_b": [kind.name for kind in tensor.types[1]],
    }
    if tensor.values is not None:
        out |= _values_document(tensor.values)
    if tensor.padding is not None and tensor.padding.elements:
        out["padding"] = _values_document(tensor.padding)
    if tensor.pair.rows:
        out["rows"] = list(tensor.pair.rows)
    return out


def _values_document(difference: Difference) -> dict[str, Any]:
    spots = {
        name: None if spot is None else {"index": list(spot[0]), "a": spot[1], "b": spot[2]}
        for name, spot in (("first", difference.first), ("largest", difference.worst))
    }
    numbers = ("elements", "differing", "unequal", "max_abs", "max_rel", "cosine")
    return {
        **{name: getattr(difference, name) for name in numbers},
        "nan_only_in_a": difference.nan_a,
        "nan_only_in_b": difference.nan_b,
        **spots,
    }
