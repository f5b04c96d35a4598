"""What `diff` prints: a card, and the tensors that differ, the worst first."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from converters.diff_pairs import Side
from converters.diff_trees import ABSENT
from converters.errors import RequestError
from converters.names import any_of, fold, matcher, printable
from distckpt_cli.console import format_size, table
from distckpt_cli.difference_document import fact_document
from distckpt_cli.exits import ExitCode

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from converters.diff import DiffReport, TensorReport
    from converters.diff_facts import Fact
    from converters.formats.base import Reader
    from distckpt_cli.console import Console

__all__ = ["show", "show_arguments"]

_ROWS = 20  # of tensors that differ
_LINES = 8  # of anything else
_CUT = 60  # characters of an argument's value
_NARROW = 60


def show(console: Console, report: DiffReport, names: tuple[str, str], *, flat: bool) -> None:
    """Prints the answer.

    Args:
        console: Where to.
        report: The answer.
        names: A and B as they were typed, quoted for a shell.
        flat: One row for each tensor.
    """
    plan = report.plan
    for side, name in zip(plan.sides, names, strict=True):
        console.fact(side.label, f"{name}  {_what(side)}")
    if plan.options.quick:
        for text in plan.notes:
            console.note(text)
    _show_structure(console, report)
    _show_facts(console, "arguments", plan.arguments, _arguments(report), names)
    _show_facts(console, "state", plan.facts.found, _agreeing(report), names)
    _show_values(console, report, flat=flat)
    if report.identical:
        how = "but for what is not counted" if _uncounted(report) else "in everything"
        if plan.options.quick:
            how = "as far as can be said without values"
        console.fact("identical", how, style="ok")
        return
    console.fact("different", _verdict(report), style="error")
    for hint in _hints(report, names):
        console.label("hint:", hint, "hint")


def _what(side: Side) -> str:
    from converters.identity import identify
    from distckpt_cli.card import describe_layout

    catalog = side.catalog
    parts = [catalog.format]
    if catalog.iteration is not None:
        parts.append(f"iteration {catalog.iteration}")
    layout = describe_layout(identify(catalog).layout)
    parts += [" ".join(layout.split())] if layout != "unknown" and not side.is_hf else []
    parts += [catalog.producer[0]] if catalog.producer else []
    return ", ".join(parts)


# ---------------------------------------------------------------------- structure


def _show_structure(console: Console, report: DiffReport) -> None:
    matching = report.plan.matching
    both = len(matching.pairs) + len(matching.shapes)
    types = _types(report)
    trouble = bool(any(matching.only) or matching.shapes or types)
    text = f"{both:,} in both" + ("" if trouble else ", with the same shapes and types")
    console.fact("tensors", text if both else "none in both")
    for number, side in enumerate(report.plan.sides):
        _list(console, f"only in {side.label}", _only(report, number), style="error")
    lines = []
    for (a, b), names in _grouped((shapes, name) for name, shapes in matching.shapes.items()).items():
        lines += [f"{text}  {_shape(a)} in A, {_shape(b)} in B" for text, _ in fold(names)]
    _list(console, "shapes", lines, style="error")
    _list(console, "types", types, style=None if report.plan.options.tolerance else "error")
    _list(console, "padding", _padding(report))
    reasons = _grouped((reason, name) for name, reason in matching.skipped.items())
    _list(console, "left out", [f"{reason} ({_count(names)})" for reason, names in reasons.items()])


def _only(report: DiffReport, number: int) -> list[str]:
    """Tensors that one side has; its whole optimizer as one line if the other side has none."""
    names, other = report.plan.matching.only[number], report.plan.sides[1 - number]
    state = [name for name in names if name.startswith("optimizer.")]
    if not state or any(name.startswith("optimizer.") for name in other.tensors):
        return [text for text, _ in fold(names)]
    rest = [text for text, _ in fold(name for name in names if not name.startswith("optimizer."))]
    return [*rest, f"the optimizer state ({len(state):,} tensors)"]


def _types(report: DiffReport) -> list[str]:
    groups: dict[str, list[TensorReport]] = defaultdict(list)
    for tensor in report.tensors:
        if not tensor.same_type:
            a, b = ("/".join(kind.short for kind in kinds) for kinds in tensor.types)
            groups[f"{a} in A, {b} in B"].append(tensor)
    out = []
    for text, tensors in groups.items():
        found = [t.values for t in tensors if t.values is not None]
        more = ""
        if found and len(found) == len(tensors):
            if not any(v.unequal for v in found):
                more = "; the values are the same"
            elif all(v.rounds_a for v in found):
                more = "; B is A, rounded"
            elif all(v.rounds_b for v in found):
                more = "; A is B, rounded"
        out.append(f"{text} ({_count([t.name for t in tensors])}){more}")
    return out


def _padding(report: DiffReport) -> list[str]:
    out: dict[str, list[str]] = defaultdict(list)
    for tensor in report.tensors:
        texts = []
        if tensor.pair.rows:
            texts.append(f"{tensor.pair.rows[0]:,} rows in A, {tensor.pair.rows[1]:,} in B")
        if tensor.padding is not None and tensor.padding.differing:
            texts.append("other contents")
        if texts:
            out[f"of the vocabulary: {', '.join(texts)}; not counted"].append(tensor.name)
    return [f"{text}  ({_count(names)})" for text, names in out.items()]


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def _count(names: Sequence[str]) -> str:
    folded = [text for text, _ in fold(names)]
    if len(folded) == 1:
        return folded[0]
    return f"{len(names):,} tensors"


def _grouped(pairs: Iterable[tuple[Any, str]]) -> dict[Any, list[str]]:
    out: dict[Any, list[str]] = defaultdict(list)
    for key, name in pairs:
        out[key].append(name)
    return out


def _list(console: Console, label: str, lines: Sequence[str], *, style: str | None = None) -> None:
    shown = lines if console.verbose else lines[:_LINES]
    for number, line in enumerate(shown):
        console.fact(label if not number else "", line, style=style if not number else None)
    if len(lines) > len(shown):
        console.fact("", f"and {len(lines) - len(shown):,} more (-v)")


# ---------------------------------------------------------------------- arguments and state


def _show_facts(console: Console, label: str, facts: Sequence[Fact], agreeing: str, names: tuple[str, str]) -> None:
    counted = [fact for fact in facts if fact.counts]
    others = [fact for fact in facts if not fact.counts]
    if not counted and not agreeing:
        return
    if counted:
        _list(console, label, _folded(counted), style="error")
    else:
        console.fact(label, agreeing)
    if others and label == "arguments":
        values = sum(fact.a is not ABSENT and fact.b is not ABSENT for fact in others)
        missing = f", {len(others) - values:,} exist on one side only" if len(others) > values else ""
        differ = f"{values:,} {'other differs' if values == 1 else 'others differ'}"
        console.fact("", f"{differ}{missing}; not counted (--args lists them)")
    elif others and console.verbose:
        for fact in others:
            console.fact("", f"{fact.name}: {_fact(fact)}  ({fact.note}; not counted)")


def _folded(facts: Sequence[Fact]) -> list[str]:
    """A line for each, those that say the same of several layers or ranks as one."""
    groups = _grouped((_fact(fact), fact.name) for fact in facts)
    return [f"{name}: {text}" for text, names in groups.items() for name, _ in fold(names)]


def _fact(fact: Fact) -> str:
    if fact.a is ABSENT or fact.b is ABSENT:
        return f"only in {'B' if fact.a is ABSENT else 'A'}"
    a, b = _value(fact.a), _value(fact.b)
    return f"{a} in A, {b} in B" if a != b else f"not the same ({a})"


def _value(value: Any, most: int = _CUT) -> str:
    if value is None:
        return "none"
    text = value if isinstance(value, str) else repr(value) if value is ABSENT else json.dumps(value, default=str)
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _arguments(report: DiffReport) -> str:
    sides = report.plan.sides
    if report.plan.options.tensors:
        return ""
    if report.plan.matching.config:
        return ""
    if any(side.is_hf for side in sides):
        stated = all(side.catalog.config for side in sides if side.is_hf)
        return "config.json describes the same model" if stated else ""
    if all(side.catalog.args for side in sides):
        return "of model and training agree"
    return "of the model agree" if all(side.catalog.args or side.catalog.config for side in sides) else ""


def _agreeing(report: DiffReport) -> str:
    compared = report.plan.facts.compared
    one = len(compared) == 1 and not compared[0].endswith("s")
    return f"{', '.join(compared)} agree{'s' if one else ''}" if compared else ""


# ---------------------------------------------------------------------- values


def _show_values(console: Console, report: DiffReport, *, flat: bool) -> None:
    plan = report.plan
    _list(console, "config", plan.matching.config, style="error")
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
    console.fact("values", f"{text} ({how})", style="error" if bad else None)
    if bad or near:
        _table(console, bad or near, flat=flat)
        _worst(console, bad or near)
    rate = f", {format_size(sum(report.bytes_read) / report.seconds)}/s" if report.seconds > 0.05 else ""
    checked = f"; {report.records_checked:,} records match their checksums" if report.records_checked else ""
    sizes = " and ".join(f"{format_size(n)} of {s.label}" for n, s in zip(report.bytes_read, plan.sides, strict=True))
    console.fact("read", f"{sizes}, {report.seconds:.1f} s{rate}{checked}")


def _rows(tensors: Sequence[TensorReport], *, flat: bool) -> list[tuple[str, list[TensorReport]]]:
    """Tensors that differ, folded, those with the largest difference first."""
    named = {t.name: t for t in tensors}
    folded = [(name, [name]) for name in named] if flat else fold(named)
    rows = [(text, [named[name] for name in members]) for text, members in folded]
    return sorted(rows, key=lambda row: max(map(_severity, row[1])), reverse=True)


def _severity(tensor: TensorReport) -> tuple[int, float, float, int]:
    found = tensor.values
    assert found is not None
    return min(1, found.nan_a + found.nan_b), found.max_rel, found.max_abs, found.differing


def _table(console: Console, tensors: Sequence[TensorReport], *, flat: bool) -> None:
    rows = _rows(tensors, flat=flat)
    shown = rows if flat or console.verbose else rows[:_ROWS]
    narrow = console.width is not None and console.width < _NARROW
    columns = [
        ">MAX ABS",
        *([] if narrow else [">MAX REL"]),
        ">COSINE",
        ">DIFFERING",
        *([] if narrow else ["FIRST AT"]),
    ]
    lines = []
    for text, members in shown:
        found = [t.values for t in members if t.values is not None]
        count, total = sum(v.differing or v.unequal for v in found), sum(v.elements for v in found)
        nan = " NaN" if any(v.nan_a or v.nan_b for v in found) else ""
        first = next((v.first for v in found if v.first), None)
        furthest = max(v.max_abs for v in found)
        cells = [
            "NaN" if nan and not furthest else _number(furthest) + nan,
            _number(max(v.max_rel for v in found)),
            _cosine(min(v.cosine for v in found)),
            f"{count:,} of {total:,}",
            _index(first[0]) if first and len(members) == 1 else "-",
        ]
        lines.append([*(cells[:1] + cells[2:4] if narrow else cells), printable(text)])
    wide = console.width is None or all(len(line) <= console.width for line in table([*columns, "TENSOR"], lines))
    header, *body = table([*columns, "TENSOR"], lines, None if wide else 1)
    console.out(console.style(header, "bold"))
    console.lines(body)
    if len(rows) > len(shown):
        console.out(f"and {len(rows) - len(shown):,} more rows (-v; --flat: one for each tensor)")


def _worst(console: Console, tensors: Sequence[TensorReport]) -> None:
    """Where the first one differs, and where the difference is largest, with both values."""
    worst = max(tensors, key=_severity)
    found = worst.values
    assert found is not None
    spots = [("first", found.first), ("largest", found.worst)]
    if found.first and found.worst and found.first[0] == found.worst[0]:
        spots = [("first", found.first)]
    for label, spot in spots:
        if spot is not None:
            index, a, b = spot
            console.fact(label, f"{worst.name} {_index(index)}: {_element(a)} in A, {_element(b)} in B")


def _index(index: Sequence[int]) -> str:
    return f"[{', '.join(map(str, index))}]"


def _element(value: Any) -> str:
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def _number(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"


def _cosine(value: float) -> str:
    return f"{value:.7f}" if value < 1 - 1e-7 else f"1-{1 - value:.0e}" if value < 1 - 1e-14 else "1"


# ---------------------------------------------------------------------- the end


def _uncounted(report: DiffReport) -> bool:
    plan = report.plan
    facts = any(not fact.counts for fact in (*plan.arguments, *plan.facts.found))
    return facts or bool(plan.matching.skipped) or bool(_padding(report)) or bool(_types(report))


def _verdict(report: DiffReport) -> str:
    matching, plan = report.plan.matching, report.plan
    bad = sum(t.differs for t in report.tensors)
    only = sum(map(len, matching.only))
    facts = sum(f.counts for f in plan.facts.found)
    arguments = sum(f.counts for f in plan.arguments) + len(matching.config)
    parts = [
        _several(bad, "tensor"),
        _several(len(matching.shapes), "shape"),
        f"{only:,} only on one side" if only else "",
        _several(arguments, "argument"),
        _several(facts, "entry", "entries") + " of the state" if facts else "",
    ]
    return ", ".join(filter(None, parts))


def _several(number: int, word: str, words: str | None = None) -> str:
    return f"{number:,} {word if number == 1 else words or word + 's'}" if number else ""


def _hints(report: DiffReport, names: tuple[str, str]) -> list[str]:
    plan, out = report.plan, []
    damaged = [text[0] for text in plan.notes if " is damaged: " in text]
    out += [f"distckpt verify {name}" for side, name in zip("AB", names, strict=True) if side in damaged]
    ignorable = []
    if any(name.startswith("optimizer.") for side in plan.matching.only for name in side):
        ignorable.append("optimizer")
    groups = {fact.group for fact in plan.facts.found if fact.counts}
    if "random state" in groups:
        ignorable.append("rng_state")
    if any(f.name.startswith("opt_param_scheduler") for f in plan.facts.found if f.counts):
        ignorable.append("opt_param_scheduler")
    if ignorable:
        words = " ".join(f"--ignore {word}" for word in ignorable)
        out.append(f"distckpt diff {names[0]} {names[1]} {words}")
    bad = [t for t in report.tensors if t.differs]
    if bad and plan.options.tolerance is None and all(not t.same_type for t in bad):
        furthest = max((t.values.max_rel for t in bad if t.values is not None), default=0.0)
        if furthest < 0.1:
            out.append(f"--rtol {float(f'{furthest * 1.01:.1e}'):g} compares values instead of bits and types")
    return out


def show_arguments(
    console: Console, a: Reader, b: Reader, pattern: str, ignore: Sequence[str] = (), *, flat: bool
) -> int:
    """Prints which arguments are not the same; 1 if some are not.

    Args:
        console: Where to.
        a: The first checkpoint.
        b: The second.
        pattern: Of the arguments' names.
        ignore: Patterns of what is left out: `args.lr`.
        flat: Also those that only one side has.

    Raises:
        RequestError: There is nothing to compare: one side has none, or both have them in words of their own.
    """
    from converters.diff_facts import compare_arguments

    wanted, unwanted = matcher(pattern), any_of(ignore)
    sides = (Side("A", a, {}), Side("B", b, {}))
    silent = [side.label for side in sides if not side.catalog.args and not side.catalog.config]
    if silent:
        raise RequestError(f"{' and '.join(silent)} hold{'s' if len(silent) == 1 else ''} no arguments to be compared")
    if sides[0].is_hf != sides[1].is_hf:
        raise RequestError(
            "--args compares Megatron's arguments with Megatron's, or config.json with config.json",
            hint="without --args, the arguments are compared with config.json through the model's table",
        )
    found = [f for f in compare_arguments(*sides) if wanted(f.name.partition(".")[2]) and not unwanted(f.name)]
    both = [f for f in found if f.a is not ABSENT and f.b is not ABSENT]
    single = [[f for f in found if f.a is not ABSENT and f.b is ABSENT], [f for f in found if f.a is ABSENT]]
    if console.json_asked:
        console.document("distckpt.diff/1", {"identical": not both, "arguments": [fact_document(f) for f in found]})
        return ExitCode.NO if both else ExitCode.OK
    shown = [*both, *single[0], *single[1]] if flat else both
    most = 10**9 if console.verbose else _CUT if console.width is None or console.width > 120 else 20
    rows = [
        [f.group.removesuffix(" arguments"), _value(f.a, most), _value(f.b, most), f.name.partition(".")[2]]
        for f in shown
    ]
    if rows:
        console.table(["KIND", "A", "B", "ARGUMENT"], rows)
    console.out(f"{_several(len(both), 'argument') or 'no argument'} differ{'s' if len(both) < 2 else ''}")
    if any(single) and not flat:
        console.note(f"{len(single[0]):,} exist only in A, {len(single[1]):,} only in B (--flat lists them)")
    return ExitCode.NO if both else ExitCode.OK
