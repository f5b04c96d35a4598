"""The output of `diff`: a card, and the tensors that differ, the largest difference first."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, TypeVar

from converters.comparison.document import fact_document
from converters.comparison.pairs import Side
from converters.comparison.trees import ABSENT
from converters.errors import RequestError
from converters.names import any_of, folded, matcher, printable
from converters.words import counted, format_shape, format_value
from distckpt_cli.difference_values import show_values
from distckpt_cli.exits import ExitCode

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from converters.comparison.facts import Fact
    from converters.comparison.report import DiffReport
    from converters.formats.base import Reader
    from distckpt_cli.console import Console

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")
_CUT = 60  # characters of an argument's value


def show(console: Console, report: DiffReport, names: tuple[str, str], *, flat: bool) -> None:
    """Prints the answer.

    Args:
        names: A and B as they were typed, quoted for a shell.
        flat: One row per tensor.
    """
    plan = report.plan
    for side, name in zip(plan.sides, names, strict=True):
        console.fact(side.label, f"{name}  {_describe_side(side)}")
    if plan.options.quick:
        for text in plan.notes:
            console.note(text)
    _show_structure(console, report)
    _show_facts(console, "arguments", plan.arguments, _agreeing_arguments(report))
    _show_facts(console, "state", plan.facts.differing, _agreeing_state(report))
    show_values(console, report, flat=flat)
    if report.identical:
        how = "in everything"
        if plan.options.quick:
            how = "in everything but values, which were not compared"
        elif _has_uncounted(report):
            how = "in every value that counts; job settings, padding or stored types differ"
        console.fact("identical", how, style="ok")
        return
    console.fact("different", report.verdict, style="error")
    for hint in _next_steps(report, names):
        console.label("hint:", hint, "hint")


def _describe_side(side: Side) -> str:
    from converters.megatron.identity import identify
    from converters.overview.card import describe_layout

    catalog = side.catalog
    parts = [catalog.format]
    if catalog.iteration is not None:
        parts.append(f"iteration {catalog.iteration}")
    layout = describe_layout(identify(catalog).layout)
    parts += [" ".join(layout.split())] if layout != "unknown" and not side.is_hf else []
    parts += [catalog.producer[0]] if catalog.producer else []
    parts += [f"Hugging Face {printable(str(catalog.config.get('model_type', 'names')))[:40]}"] if side.is_hf else []
    return ", ".join(parts)


# ---------------------------------------------------------------------- structure


def _show_structure(console: Console, report: DiffReport) -> None:
    matching = report.plan.matching
    both = len(matching.pairs) + len(matching.shapes)
    types = _type_lines(report)
    is_different = bool(any(matching.only) or matching.shapes or types)
    text = f"{both:,} in both" + ("" if is_different else ", with the same shapes and types")
    console.fact("tensors", text if both else "none in both")
    for number, side in enumerate(report.plan.sides):
        console.facts(f"only in {side.label}", _lines_of_one_side(report, number), style="error")
    lines = []
    for (a, b), names in _grouped((shapes, name) for name, shapes in matching.shapes.items()).items():
        lines += [f"{text}  {format_shape(a)} in A, {format_shape(b)} in B" for text in folded(names)]
    console.facts("shapes", lines, style="error")
    console.facts("types", types, style=None if report.plan.options.tolerance else "error")
    console.facts("padding", _padding_lines(report))
    reasons = _grouped((reason, name) for name, reason in matching.skipped.items())
    console.facts("left out", [f"{reason} ({_name_or_count(names)})" for reason, names in reasons.items()])


def _lines_of_one_side(report: DiffReport, number: int) -> list[str]:
    """Tensors that one side has; its whole optimizer as one line if the other side has none."""
    names, other_side = report.plan.matching.only[number], report.plan.sides[1 - number]
    state = [name for name in names if name.startswith("optimizer.")]
    if not state or any(name.startswith("optimizer.") for name in other_side.tensors):
        return folded(names)
    weights = folded(name for name in names if not name.startswith("optimizer."))
    return [*weights, f"the optimizer state ({counted(len(state), 'tensor')})"]


def _type_lines(report: DiffReport) -> list[str]:
    out = []
    for (types_a, types_b), tensors in _grouped((t.types, t) for t in report.tensors if not t.same_type).items():
        a, b = ("/".join(kind.short for kind in kinds) for kinds in (types_a, types_b))
        values = [t.values for t in tensors if t.values is not None]
        remark = ""
        if values and len(values) == len(tensors):
            if not any(v.unequal for v in values):
                remark = "; the values are the same"
            elif all(v.rounds_a for v in values):
                remark = "; B is A, rounded"
            elif all(v.rounds_b for v in values):
                remark = "; A is B, rounded"
        out.append(f"{a} in A, {b} in B ({_name_or_count([t.name for t in tensors])}){remark}")
    return out


def _padding_lines(report: DiffReport) -> list[str]:
    lines = []
    for tensor in report.tensors:
        texts = []
        if tensor.pair.rows:
            texts.append(f"{tensor.pair.rows[0]:,} rows in A, {tensor.pair.rows[1]:,} in B")
        if tensor.padding is not None and tensor.padding.differing:
            texts.append("other contents")
        if texts:
            lines.append((f"of the vocabulary: {', '.join(texts)}; not counted", tensor.name))
    return [f"{text}  ({_name_or_count(names)})" for text, names in _grouped(lines).items()]


def _name_or_count(names: Sequence[str]) -> str:
    texts = folded(names)
    return texts[0] if len(texts) == 1 else f"{len(names):,} tensors"


def _grouped(pairs: Iterable[tuple[_Key, _Value]]) -> dict[_Key, list[_Value]]:
    groups: dict[_Key, list[_Value]] = defaultdict(list)
    for key, value in pairs:
        groups[key].append(value)
    return groups


# ---------------------------------------------------------------------- arguments and state


def _show_facts(console: Console, label: str, facts: Sequence[Fact], agreeing: str) -> None:
    counting = [fact for fact in facts if fact.counts]
    ignored = [fact for fact in facts if not fact.counts]
    if not counting and not agreeing:
        return
    if counting:
        console.facts(label, _fact_lines(counting), style="error")
    else:
        console.fact(label, agreeing)
    if ignored and label == "arguments":
        values = sum(fact.on_both_sides for fact in ignored)
        missing = f", {len(ignored) - values:,} exist on one side only" if len(ignored) > values else ""
        differ = f"{values:,} {'other differs' if values == 1 else 'others differ'}"
        console.fact("", f"{differ}{missing}; not counted (--args lists them)")
    elif console.verbose:
        for fact in ignored:
            console.fact("", f"{fact.name}: {_describe(fact)}  ({fact.note}; not counted)")


def _fact_lines(facts: Sequence[Fact]) -> list[str]:
    """A line for each, those that say the same of several layers or ranks as one."""
    groups = _grouped((_describe(fact), fact.name) for fact in facts)
    return [f"{name}: {text}" for text, names in groups.items() for name in folded(names)]


def _describe(fact: Fact) -> str:
    if not fact.on_both_sides:
        return f"only in {'B' if fact.a is ABSENT else 'A'}"
    a, b = _format_value(fact.a), _format_value(fact.b)
    return f"{a} in A, {b} in B" if a != b else f"not the same ({a})"


def _format_value(value: Any, most: int = _CUT) -> str:
    if value is None:
        return "none"
    text = repr(value) if value is ABSENT else format_value(value)
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _agreeing_arguments(report: DiffReport) -> str:
    sides = report.plan.sides
    if report.plan.options.tensors or report.plan.matching.config:
        return ""
    if any(side.is_hf for side in sides):
        stated = all(side.catalog.config for side in sides if side.is_hf)
        return "config.json describes the same model" if stated else ""
    if all(side.catalog.args for side in sides):
        return "of model and training agree"
    return "of the model agree" if all(side.catalog.args or side.catalog.config for side in sides) else ""


def _agreeing_state(report: DiffReport) -> str:
    compared = report.plan.facts.compared
    is_singular = len(compared) == 1 and not compared[0].endswith("s")
    return f"{', '.join(compared)} agree{'s' if is_singular else ''}" if compared else ""


# ---------------------------------------------------------------------- the end


def _has_uncounted(report: DiffReport) -> bool:
    plan = report.plan
    facts = any(not fact.counts for fact in (*plan.arguments, *plan.facts.differing))
    return facts or bool(plan.matching.skipped) or bool(_padding_lines(report)) or bool(_type_lines(report))


def _next_steps(report: DiffReport, names: tuple[str, str]) -> list[str]:
    plan, out = report.plan, []
    damaged = [text[0] for text in plan.notes if " is damaged: " in text]
    out += [f"distckpt verify {name}" for side, name in zip("AB", names, strict=True) if side in damaged]
    counting = [fact for fact in plan.facts.differing if fact.counts]
    suspects = {
        "optimizer": any(name.startswith("optimizer.") for side in plan.matching.only for name in side),
        "rng_state": any(fact.group == "random state" for fact in counting),
        "opt_param_scheduler": any(fact.name.startswith("opt_param_scheduler") for fact in counting),
    }
    ignorable = [word for word, differs in suspects.items() if differs]
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
    """Prints which arguments are not the same; 1 if some that count are not.

    Args:
        pattern: Of the arguments' names.
        ignore: Patterns of what is left out: `args.lr`.
        flat: Also those that only one side has.

    Raises:
        RequestError: There is nothing to compare: one side has none, both have them in words of their own, or none
            matches.
    """
    from converters.comparison.facts import argument_names, compare_arguments
    from distckpt_cli.listing import no_match_error

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
    names = argument_names(*sides)
    if not any(map(wanted, names)):
        raise no_match_error("argument", pattern, names)
    facts = [f for f in compare_arguments(*sides) if wanted(f.name.partition(".")[2]) and not unwanted(f.name)]
    both = [f for f in facts if f.on_both_sides]
    code = ExitCode.NO if any(f.counts for f in facts) else ExitCode.OK
    single = [[f for f in facts if f.b is ABSENT], [f for f in facts if f.a is ABSENT]]
    if console.json_requested:
        console.document("distckpt.diff/1", {"identical": not code, "arguments": [fact_document(f) for f in facts]})
        return code
    shown = [*both, *single[0], *single[1]] if flat else both
    longest = 10**9 if console.verbose else _CUT if console.width is None or console.width > 120 else 20
    rows = [
        [
            f.group.removesuffix(" arguments"),
            _format_value(f.a, longest),
            _format_value(f.b, longest),
            f.name.partition(".")[2],
        ]
        for f in shown
    ]
    if rows:
        console.table(["KIND", "A", "B", "ARGUMENT"], rows)
    uncounted = sum(not f.counts for f in both)
    aside = f", {uncounted:,} of them not counted: how the jobs ran" if uncounted else ""
    console.out(f"{len(both) or 'no'} argument{' differs' if len(both) < 2 else 's differ'}{aside}")
    if any(single) and not flat:
        console.note(f"{len(single[0]):,} exist only in A, {len(single[1]):,} only in B (--flat lists them)")
    return code
