"""`distckpt show`: the values of tensors."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from converters.names import quoted
from converters.words import format_shape
from distckpt_cli.choices import complete_tensors
from distckpt_cli.console import Console, UsageProblem
from distckpt_cli.exits import ExitCode
from distckpt_cli.options import Ckpt, FollowLinks, Speaking, flag, panel, spread, value

if TYPE_CHECKING:
    from converters.box import Box
    from converters.catalog import TensorInfo
    from converters.overview.checkpoint import Checkpoint
    from converters.overview.statistics import Statistics

_view = panel("What to show")
_BINS = 16
_BAR = 40
_PREVIEW = (4, 8)  # rows and columns that are shown where nothing was asked for
_CELL = 11  # columns that a value takes
_MOST_VALUES = 1 << 20
_RANGE = re.compile(r"(-?\d+)?(?:(:)(-?\d+)?)?")
_UNREADABLE = "read as START:STOP, a number or nothing for each axis, with commas between: 0:4,:8"

Tensor = Annotated[
    str,
    typer.Argument(
        metavar="TENSOR",
        help="A tensor's name, or a glob: one row for each that matches.",
        autocompletion=complete_tensors,
    ),
]


@dataclass(frozen=True)
class View:
    """Which part of a tensor is shown, and with which statistics."""

    slice: str | None = value(_view, "RANGES", "Values of this part: 0:4,:8 or 17 or :,3.")
    values: bool = flag(_view, "Print only values, no statistics.", "--values")
    histogram: bool = flag(_view, "Add a histogram of the values.", "--histogram")


@spread
def show(
    ckpt: Ckpt,
    tensor: Tensor,
    view: View,
    speaking: Speaking,
    *,
    follow_links: FollowLinks = False,
) -> int:
    """Show the values of a tensor and their statistics: a weight, a master weight or a moment, in any format.

    Optimizer state is named by its parameter: optimizer.state.param.NAME (master weight), .exp_avg.NAME,
    .exp_avg_sq.NAME. Statistics are exact, of the slice if one is given. The tensor is read in tiles, once for each 16
    bits of an element. Quantiles are elements of the tensor, not interpolated (numpy's method inverted_cdf).

        $ distckpt show ckpt decoder.final_layernorm.weight
        $ distckpt show ckpt output_layer.weight --slice 0:4,:8
        $ distckpt show ckpt '*.layers.0.*.weight'
        $ distckpt show ckpt optimizer.state.exp_avg.output_layer.weight --histogram
        $ distckpt show ckpt output_layer.weight --slice 17 --json | jq .values
    """
    from converters.overview.checkpoint import Checkpoint

    console = speaking.console
    with Checkpoint(ckpt, framework="np", follow_links=follow_links) as checkpoint:
        names = _matching_names(checkpoint, tensor)
        if len(names) == 1:
            _show_one(console, checkpoint, names[0], view)
        elif view.slice or view.values or view.histogram:
            hint = f"--slice, --values and --histogram show one, for example {quoted(names[0])}"
            state = sum(name.startswith("optimizer.") for name in names)
            parts = f" ({len(names) - state:,} of the model, {state:,} of the optimizer)" if state else ""
            raise UsageProblem(f"{len(names):,} tensors match {tensor!r}{parts}", hint=hint)
        else:
            _show_rows(console, checkpoint, names)
            console.next_step(f"distckpt show {quoted(ckpt)} {quoted(names[0])}")
    return ExitCode.OK


def _matching_names(checkpoint: Checkpoint, pattern: str) -> list[str]:
    from converters.names import matcher
    from distckpt_cli.listing import no_match_error

    optimizer = pattern.startswith(("optimizer", "*"))
    names = checkpoint.keys(optimizer=optimizer)
    chosen = [pattern] if pattern in names else list(filter(matcher(pattern), names))
    if not chosen:
        _refuse_buckets(checkpoint, pattern)
        counts = None if optimizer else ("tensor of the model", "tensors of the model")
        raise no_match_error("tensor", pattern, names, counts)
    return chosen


def _refuse_buckets(checkpoint: Checkpoint, pattern: str) -> None:
    """Refuses a flat bucket, and names the states of parameters that are in it."""
    from converters.errors import RequestError
    from converters.names import matcher

    tensors, matches = checkpoint.catalog.tensors, matcher(pattern)
    buckets = [name for name, info in tensors.items() if info.opaque and (name == pattern or matches(name))]
    if buckets:
        path = quoted(checkpoint.path)
        raise RequestError(
            f"{buckets[0]} is a flat bucket, which holds elements of many parameters",
            hint=f"distckpt show {path} 'optimizer.state.*' shows what is in it, by parameter",
        )


def _show_one(console: Console, checkpoint: Checkpoint, name: str, view: View) -> None:
    from converters.overview.checkpoint import as_numpy
    from converters.overview.statistics import tensor_statistics

    info = checkpoint.info(name)
    box = parse_ranges(view.slice, info.shape)
    shown_box = box if view.slice else _preview(info.shape, console.width)
    if shown_box.volume > _MOST_VALUES:
        raise UsageProblem(
            f"--slice {view.slice} has {shown_box.volume:,} values, more than {_MOST_VALUES:,}",
            hint="name a smaller part",
        )
    values = as_numpy(checkpoint.read(name, shown_box), info.dtype)
    if view.values and not console.json_requested:
        console.lines(_value_lines(values))
        return
    stats = tensor_statistics(checkpoint, name, box, bins=_BINS if view.histogram else 0)
    if console.json_requested:
        document = {**_document(info, stats), "statistics_of": _format_ranges(box)}
        document |= {"values": _json_values(values), "values_of": _format_ranges(shown_box)}
        console.document("distckpt.show/1", document)
        return
    console.fact(f"{name}  ", f"{info.dtype}, {format_shape(info.shape)}", style="bold")
    for label, text in _statistics_lines(stats):
        console.fact(label, text)
    for line in _histogram_lines(stats):
        console.out(line)
    console.out()
    console.fact("values", f"[{_format_ranges(shown_box)}]")
    console.lines(_value_lines(values))


def _show_rows(console: Console, checkpoint: Checkpoint, names: list[str]) -> None:
    from converters.overview.statistics import tensor_statistics

    pairs = [(checkpoint.info(name), tensor_statistics(checkpoint, name)) for name in names]
    if console.json_requested:
        console.document("distckpt.show/1", {"tensors": [_document(info, stats) for info, stats in pairs]})
        return
    columns = ["DTYPE", ">SHAPE", ">MIN", ">MAX", ">MEAN", ">STD", ">NORM", ">ZERO", ">NAN/INF", "TENSOR"]
    rows = [
        (
            info.dtype.short,
            format_shape(info.shape),
            *(_format_number(x) for x in (stats.minimum, stats.maximum, stats.mean, stats.std, stats.norm)),
            f"{stats.zero:,}",
            f"{stats.nan + stats.infinite:,}",
            info.name,
        )
        for info, stats in pairs
    ]
    console.table(columns, rows)


def parse_ranges(text: str | None, shape: tuple[int, ...]) -> Box:
    """The box that `--slice` means; None is the whole tensor. A missing last axis is taken whole.

    Raises:
        UsageProblem: It cannot be read, or lies outside of the tensor.
    """
    from converters.box import Box

    words = [] if text is None else [word.strip() for word in text.strip().strip("[]").split(",")]
    if len(words) > len(shape):
        raise UsageProblem(f"--slice {text} has {len(words)} ranges, the tensor {len(shape)} axes", hint=_UNREADABLE)
    start, stop = [0] * len(shape), list(shape)
    for axis, word in enumerate(words):
        parsed = _RANGE.fullmatch(word)
        if parsed is None or not word:
            raise UsageProblem(f"--slice: {word!r} is not a range", hint=_UNREADABLE)
        size, low = shape[axis], int(parsed[1] or 0)
        high = int(parsed[3]) if parsed[3] else size if parsed[2] else low + 1
        low, high = (low + size if low < 0 else low), (high + size if high < 0 or (high == 0 and low < 0) else high)
        if 0 <= high <= low <= size:
            raise UsageProblem(f"--slice: {word} is empty: it ends before it begins", hint=_UNREADABLE)
        if not 0 <= low < high <= size:
            raise UsageProblem(f"--slice: {word} is outside of axis {axis}, which has {size:,} elements")
        start[axis], stop[axis] = low, high
    return Box(tuple(start), tuple(b - a for a, b in zip(start, stop, strict=True)))


def _preview(shape: tuple[int, ...], width: int | None) -> Box:
    from converters.box import Box

    preview = _PREVIEW[0], _PREVIEW[1] if width is None else max(1, min(_PREVIEW[1], width // _CELL))
    limits = (*(1,) * (len(shape) - 2), *preview[-min(len(shape), 2) :]) if shape else ()
    return Box((0,) * len(shape), tuple(min(n, limit) for n, limit in zip(shape, limits, strict=True)))


def _format_ranges(box: Box) -> str:
    return ", ".join(f"{a}:{b}" for a, b in zip(box.start, box.stop, strict=True))


def _format_number(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"


def _statistics_lines(stats: Statistics) -> list[tuple[str, str]]:
    finite = stats.numel - stats.nan - stats.infinite
    bad = [f"{count:,} {word}" for count, word in ((stats.nan, "NaN"), (stats.infinite, "infinite")) if count]
    lines = [("elements", ", ".join([f"{stats.numel:,}", f"{stats.zero:,} zero", *(bad or ["all finite"])]))]
    if finite:
        numbers = {"min": stats.minimum, "max": stats.maximum, "mean": stats.mean, "std": stats.std, "norm": stats.norm}
        lines.append(("range", "  ".join(f"{word} {_format_number(value)}" for word, value in numbers.items())))
        quantiles = (f"{q:.0%} {_format_number(value)}" for q, value in stats.quantiles.items())
        lines.append(("quantiles", "  ".join(quantiles)))
    return lines


def _histogram_lines(stats: Statistics) -> list[str]:
    if not stats.histogram or stats.minimum is None or stats.maximum is None:
        return []
    most, width = max(stats.histogram), (stats.maximum - stats.minimum) / len(stats.histogram)
    lines = []
    for number, count in enumerate(stats.histogram):
        bar = "#" * -(-count * _BAR // most)
        lines.append(f"{_format_number(stats.minimum + number * width):>12}  {bar:<{_BAR}}  {count:,}")
    return lines


def _value_lines(values: Any) -> list[str]:
    """Values as text, a line for each row of the last axis."""
    rows = values.reshape(-1, values.shape[-1]) if values.ndim else values.reshape(1, 1)
    cells = [
        [f"{value:.6g}" if isinstance(value, float) else str(value) for value in row] for row in _json_values(rows)
    ]
    width = max((len(cell) for row in cells for cell in row), default=0)
    return ["  ".join(cell.rjust(width) for cell in row) for row in cells]


def _json_values(values: Any) -> Any:
    """Nested lists of numbers; what numpy itself has no type for (bf16, fp8) as fp64."""
    return (values if values.dtype.kind in "biufc" else values.astype("float64")).tolist()


def _document(info: TensorInfo, stats: Statistics) -> dict[str, Any]:
    from dataclasses import asdict

    return {"name": info.name, "dtype": info.dtype.name, "shape": list(info.shape), "statistics": asdict(stats)}
