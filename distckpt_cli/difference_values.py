"""The table of differing values of `diff`, the largest difference first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from converters.names import fold, printable
from converters.words import format_size
from distckpt_cli.console import NARROW, table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from converters.comparison.report import DiffReport, TensorReport
    from distckpt_cli.console import Console

_ROWS = 20  # of tensors that differ


def show_values(console: Console, report: DiffReport, *, flat: bool) -> None:
    """Prints what was found of the values: a line if they agree, else a table."""
    plan = report.plan
    console.facts("config", plan.matching.config, style="error")
    if plan.options.quick:
        console.fact("values", "not compared (--quick)")
        return
    if not report.tensors:
        return
    bad = [t for t in report.tensors if t.status == "different"]
    near = [t for t in report.tensors if t.status == "tolerated"]
    number = len(report.tensors)
    tolerance = plan.options.tolerance
    how = "bit for bit" if tolerance is None else f"rtol {tolerance.rtol:g}, atol {tolerance.atol:g}"
    if bad:
        text = f"{len(bad):,} of {number:,} tensors differ"
    elif near:
        text = f"{number - len(near):,} of {number:,} tensors identical, {len(near):,} within tolerance"
    else:
        text = f"of all {number:,} tensors identical" if number > 1 else "identical"
    if not bad and tolerance is None and any(t.status == "type" for t in report.tensors):
        how = "as numbers; not bit for bit, the types differ"
    console.fact("values", f"{text} ({how})", style="error" if bad else None)
    if bad or near:
        _print_table(console, bad or near, flat=flat)
        _print_worst(console, bad or near)
    checked = f"; {report.records_checked:,} records match their checksums" if report.records_checked else ""
    sizes = " and ".join(f"{format_size(n)} of {s.label}" for n, s in zip(report.bytes_read, plan.sides, strict=True))
    console.read_fact(sizes, sum(report.bytes_read), report.seconds, checked)


def _sorted_rows(tensors: Sequence[TensorReport], *, flat: bool) -> list[tuple[str, list[TensorReport]]]:
    """Tensors that differ, folded, those with the largest difference first."""
    by_name = {t.name: t for t in tensors}
    folded_rows = [(name, [name]) for name in by_name] if flat else fold(by_name)
    rows = [(text, [by_name[name] for name in members]) for text, members in folded_rows]
    return sorted(rows, key=lambda row: max(map(_severity, row[1])), reverse=True)


def _severity(tensor: TensorReport) -> tuple[int, float, float, int]:
    values = tensor.values
    assert values is not None
    return min(1, values.nan_a + values.nan_b), values.max_rel, values.max_abs, values.differing


def _print_table(console: Console, tensors: Sequence[TensorReport], *, flat: bool) -> None:
    rows = _sorted_rows(tensors, flat=flat)
    shown = rows if flat or console.verbose else rows[:_ROWS]
    narrow = console.width is not None and console.width < NARROW
    columns = [">MAX ABS", ">MAX REL", ">COSINE", ">DIFFERING", "FIRST AT", "TENSOR"]
    lines = []
    for text, members in shown:
        values = [t.values for t in members if t.values is not None]
        count, total = sum(v.differing or v.unequal for v in values), sum(v.elements for v in values)
        nan = " NaN" if any(v.nan_a or v.nan_b for v in values) else ""
        first = next((v.first for v in values if v.first), None)
        furthest = max(v.max_abs for v in values)
        cells = [
            "NaN" if nan and not furthest else _format_number(furthest) + nan,
            _format_number(max(v.max_rel for v in values)),
            _format_cosine(min(v.cosine for v in values)),
            f"{count:,} of {total:,}",
            _format_index(first[0]) if first and len(members) == 1 else "-",
            printable(text),
        ]
        lines.append(cells)
    if narrow:  # no room for all numbers
        columns, *lines = ([row[0], *row[2:4], row[5]] for row in (columns, *lines))
    wide = console.width is None or all(len(line) <= console.width for line in table(columns, lines))
    header, *body = table(columns, lines, None if wide else 1)
    console.out(console.style(header, "bold"))
    console.lines(body)
    if len(rows) > len(shown):
        console.out(f"and {len(rows) - len(shown):,} more rows (-v; --flat: one for each tensor)")


def _print_worst(console: Console, tensors: Sequence[TensorReport]) -> None:
    """Where the first one differs, and where the difference is largest, with both values."""
    worst = max(tensors, key=_severity)
    values = worst.values
    assert values is not None
    spots = [("first", values.first), ("largest", values.worst)]
    if values.first and values.worst and values.first[0] == values.worst[0]:
        spots = [("first", values.first)]
    for label, spot in spots:
        if spot is not None:
            index, a, b = spot
            console.fact(
                label, f"{worst.name} {_format_index(index)}: {_format_element(a)} in A, {_format_element(b)} in B"
            )


def _format_index(index: Sequence[int]) -> str:
    return f"[{', '.join(map(str, index))}]"


def _format_element(value: Any) -> str:
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def _format_number(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"


def _format_cosine(value: float) -> str:
    return f"{value:.7f}" if value < 1 - 1e-7 else f"1-{1 - value:.0e}" if value < 1 - 1e-14 else "1"
