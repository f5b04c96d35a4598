"""The lists of `inspect`: tensors, files, arguments, objects, sizes by module."""

from __future__ import annotations

import difflib
import functools
import json
import re
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from converters.errors import RequestError
from converters.megatron.identity import writer_of
from converters.names import fold, folded, matcher, natural_key, printable
from converters.overview.tree import module_tree
from converters.pickles.describe import describe
from converters.words import counted, format_shape, format_size
from distckpt_cli.console import UsageProblem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from converters.catalog import Catalog, FileInfo, ObjectInfo, TensorInfo
    from converters.formats.base import Reader
    from converters.megatron.identity import SavedLayout
    from converters.overview.tree import Module
    from distckpt_cli.console import Console

_WIDE = 70  # a terminal that has room for the bars of a tree
_BAR = 20


@dataclass(frozen=True)
class Selection:
    """How names are matched and rows are sorted.

    Attributes:
        regex: Patterns are regular expressions, searched in the names; else globs of whole names.
        ignore_case: Ignore case.
        by_size: The largest rows come first; else the order of the model, weights before optimizer state.
    """

    regex: bool = False
    ignore_case: bool = False
    by_size: bool = False

    def matcher(self, pattern: str) -> Callable[[str], bool]:
        """Whether a name matches a pattern; a glob may hold `{0..31}` as the folded tables print it.

        Raises:
            UsageProblem: It is no regular expression.
        """
        if self.regex:
            try:
                compiled = re.compile(pattern, re.IGNORECASE if self.ignore_case else 0)
            except re.error as error:
                raise UsageProblem(f"{pattern!r} is not a regular expression: {error}") from None
            return lambda name: compiled.search(name) is not None
        if not self.ignore_case:
            return matcher(pattern)
        matches = matcher(pattern.lower())
        return lambda name: matches(name.lower())


_PLAIN = Selection()
_KINDS = {"weight": 0, "other": 1, "optimizer": 2}


def no_match_error(
    what: str, pattern: str, names: Sequence[str], counts: tuple[str, str] | None = None
) -> RequestError:
    """No match: the error with the nearest pattern that has some, or with examples of names.

    Args:
        what: What the names are of: "tensor".
        counts: What is counted, one of them and several, where that is not all that a checkpoint has of it.
    """
    rows = folded(names)
    candidates = dict.fromkeys(rows)
    for name in rows:
        parts = name.split(".")
        candidates.update(
            dict.fromkeys(".".join(parts[:n]) + ".*" for n in range(1, len(parts)) if "{" not in parts[n - 1])
        )
    near = difflib.get_close_matches(pattern, candidates, n=1, cutoff=0.6)
    part = [] if not pattern or set(pattern) & set("*?[") else [f"*{pattern}*"]
    other_case = [name for name in names if matcher(pattern.lower())(name.lower())]
    if other_case:
        return RequestError(
            f"no {what} matches {pattern!r}", hint=f"-i ignores the case: {counted(len(other_case), what)}"
        )
    count, meant = max(
        ((len(list(filter(matcher(glob), names))), glob) for glob in near + part), default=(0, ""), key=lambda c: c[0]
    )
    if count:
        hint = f"did you mean '{meant}'?  ({counted(count, what)})"
    else:
        verb = "is" if len(names) == 1 else "are"
        total, examples = counted(len(names), *(counts or (what,))), ", ".join(sorted(rows, key=len)[:3])
        hint = f"there {verb} {total}, for example {examples}"
    return RequestError(f"no {what} matches {pattern!r}", hint=hint)


def chosen_tensors(catalog: Catalog, pattern: str, selection: Selection = _PLAIN) -> list[TensorInfo]:
    """Tensors whose canonical name, or whose key in the file, matches a pattern; weights first, optimizer state last.

    Raises:
        RequestError: None does.
    """
    matches = functools.cache(selection.matcher(pattern))  # layers share keys
    chosen = [t for name, t in catalog.tensors.items() if matches(name) or any(map(matches, t.keys))]
    if not chosen:
        raise no_match_error("tensor", pattern, list(catalog.tensors), ("stored tensor", "stored tensors"))
    return sorted(chosen, key=lambda t: -t.nbytes if selection.by_size else _KINDS[t.kind])


def print_tensors(console: Console, tensors: Sequence[TensorInfo], selection: Selection, *, flat: bool) -> None:
    """A table of tensors, layers and experts folded unless `flat`, and a line of totals."""
    rows = [(t.name, [t]) for t in tensors] if flat else _folded(tensors)
    if selection.by_size:
        rows.sort(key=lambda row: -sum(t.nbytes for t in row[1]))
    lines = []
    for name, members in rows:
        counts = sorted({t.chunk_count for t in members})
        shown = str(counts[0]) if len(counts) == 1 else f"{counts[0]}-{counts[-1]}"
        shape = format_shape(members[0].shape)
        lines.append((members[0].dtype.short, shape, shown, format_size(sum(t.nbytes for t in members)), name))
    console.table(["DTYPE", ">SHAPE", ">CHUNKS", ">SIZE", "TENSOR"], lines)
    hint = "" if len(rows) == len(tensors) else f"  ({counted(len(rows), 'row')}; --flat for one row each)"
    console.out(f"{counted(len(tensors), 'tensor')}, {format_size(sum(t.nbytes for t in tensors))}{hint}")
    opaque = [t for t in tensors if t.opaque]
    if opaque:
        hold = "holds" if len(opaque) == 1 else "hold"
        console.note(f"{len(opaque):,} of them {hold} no single parameter: {opaque[0].opaque}")


def print_tree(
    console: Console, tensors: Sequence[TensorInfo], depth: int, selection: Selection, *, flat: bool
) -> None:
    """Sizes by module, each with its share of all as a bar."""
    roots = module_tree(tensors, folded=not flat)
    if selection.by_size:
        roots.sort(key=lambda root: -root.nbytes)
    total = sum(root.nbytes for root in roots) or 1
    wide = console.width is None or console.width >= _WIDE
    rows = []
    for root in roots:
        for level, module in root.walk(depth, by_size=selection.by_size):
            share = module.nbytes / total
            bar = ("#" * round(share * _BAR)).ljust(_BAR) if wide else ""
            size = (format_size(module.nbytes), f"{share:.0%}", *([bar] if wide else []))
            rows.append((*size, f"{module.tensors:,}", "  " * level + printable(module.name)))
    console.table([">SIZE", ">SHARE", *(["".ljust(_BAR)] if wide else []), ">TENSORS", "MODULE"], rows)
    console.out(f"{counted(len(tensors), 'tensor')}, {format_size(total)}")


def tree_document(tensors: Sequence[TensorInfo], *, folded: bool) -> list[dict[str, Any]]:
    """The tree for programs."""

    def document(module: Module) -> dict[str, Any]:
        sizes = {"bytes": module.nbytes, "parameters": module.parameters, "tensors": module.tensors}
        return {"name": module.name, **sizes, "children": [document(child) for child in module.children.values()]}

    return [document(root) for root in module_tree(tensors, folded=folded)]


def _folded(tensors: Sequence[TensorInfo]) -> list[tuple[str, list[TensorInfo]]]:
    by_name = {t.name: t for t in tensors}
    order = {name: position for position, name in enumerate(by_name)}
    groups: dict[tuple[str, tuple[int, ...]], list[str]] = defaultdict(list)
    for t in tensors:
        groups[t.dtype.name, t.shape].append(t.name)  # a row has one type and one shape
    rows = [(text, members) for names in groups.values() for text, members in fold(names)]
    rows.sort(key=lambda row: min(order[name] for name in row[1]))
    return [(text, [by_name[name] for name in members]) for text, members in rows]


def tensor_document(reader: Reader, tensor: TensorInfo, *, chunks: bool) -> dict[str, Any]:
    """A tensor for programs; offsets and shapes in elements, in the tensor's own coordinates."""
    document: dict[str, Any] = {
        "name": tensor.name,
        "keys": list(tensor.keys),
        "dtype": tensor.dtype.name,
        "shape": list(tensor.shape),
        "bytes": tensor.nbytes,
        "kind": tensor.kind,
        "opaque": tensor.opaque,
        "chunk_count": tensor.chunk_count,
    }
    if chunks:
        document["chunks"] = [
            {
                "offset": list(chunk.box.start),
                "shape": list(chunk.box.shape),
                "file": reader.file_name(reader.file_of(chunk.record)) if chunk.record >= 0 else None,
            }
            for chunk in tensor.chunks()
        ]
    return document


def print_files(console: Console, reader: Reader, layout: SavedLayout, selection: Selection = _PLAIN) -> None:
    """A table of files: which rank and writer wrote each, what it holds, and what is wrong with it."""
    catalog = reader.catalog
    holds = _contents_by_file(reader)
    with_ranks = layout.coordinates(0) is not None
    columns = [">RANK", ">WRITER", *([">TP", ">PP", ">DP"] if with_ranks else []), ">RECORDS", ">SIZE", "HOLDS", "FILE"]
    rows = []
    files = sorted(catalog.files, key=lambda f: (f.role not in ("data", "unreferenced"), natural_key(f.name)))
    for info in sorted(files, key=lambda f: -(f.size or 0)) if selection.by_size else files:
        writer = writer_of(info.name)
        coordinates = layout.coordinates(writer[0]) if writer else None
        at = [str(coordinates.tp), str(coordinates.pp), str(coordinates.dp)] if coordinates else ["-"] * 3
        rows.append(
            [
                *(map(str, writer) if writer else ("-", "-")),
                *(at if with_ranks else ()),
                f"{info.records:,}" if info.role == "data" else "-",
                "-" if info.size is None else format_size(info.size),
                _describe_contents(info, holds.get(info.name, ())),
                info.name,
            ]
        )
    console.table(columns, rows)
    console.out(f"{counted(len(rows), 'file')}, {format_size(sum(f.size or 0 for f in catalog.files))}")
    if any(writer_of(f.name) for f in catalog.files):
        console.note(
            "__R_W.distcp is file W that global rank R wrote; a rank splits its records among its writers by size"
        )


def _describe_contents(info: FileInfo, kinds: Sequence[str]) -> str:
    if info.size is None:
        return "MISSING"
    if info.role == "unreferenced":
        return "UNREFERENCED: belongs to no record"
    text = ", ".join(kinds) or info.role
    return f"SHORT by {info.needed - info.size:,} bytes: {text}" if info.size < info.needed else text


def _contents_by_file(reader: Reader) -> dict[str, list[str]]:
    """For each file, what it holds and how many bytes of that: `weights 1.50 GiB`."""
    catalog = reader.catalog
    words = {"weight": "weights", "optimizer": "optimizer", "other": "other tensors"}
    sizes: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    seen: set[str] = set()
    for tensor in catalog.tensors.values():
        for part in tensor.parts:
            if part.array.key in seen:
                continue
            seen.add(part.array.key)
            volumes = part.array.sizes.prod(axis=1, dtype=np.int64) * tensor.dtype.itemsize
            for record, volume in zip(part.array.records.tolist(), volumes.tolist(), strict=True):
                if record >= 0:
                    sizes[reader.file_name(reader.file_of(record))][words[tensor.kind]] += volume
    for item in catalog.objects.values():
        sizes[item.file]["optimizer" if item.of_optimizer else "objects"] += item.length
    order = [*words.values(), "objects"]
    return {
        name: [f"{word} {format_size(kinds[word])}" for word in order if word in kinds] for name, kinds in sizes.items()
    }


def chosen_args(catalog: Catalog, pattern: str, selection: Selection = _PLAIN) -> dict[str, Any]:
    """Training arguments, or the configuration of a framework that stores one instead, whose names match a glob.

    Raises:
        RequestError: There are none, or none matches.
    """
    arguments: Mapping[str, Any] = catalog.args or dict(_flatten(catalog.config))
    if not arguments:
        raise RequestError(
            f"this {catalog.framework} checkpoint stores no training arguments",
            hint="--json shows what the shapes tell",
        )
    names = list(filter(selection.matcher(pattern), sorted(arguments)))
    if not names:
        raise no_match_error("argument", pattern, sorted(arguments))
    return {name: describe(arguments[name]) for name in names}


def _flatten(config: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def print_args(console: Console, args: Mapping[str, Any]) -> None:
    """A table of arguments, by name."""
    rows = [(name, value if isinstance(value, str) else json.dumps(value, default=str)) for name, value in args.items()]
    console.table(["ARGUMENT", "VALUE"], rows)


def chosen_objects(catalog: Catalog, pattern: str, selection: Selection = _PLAIN) -> list[ObjectInfo]:
    """Stored objects whose name or key matches a glob.

    Raises:
        RequestError: None does, though there are some.
    """
    matches = functools.cache(selection.matcher(pattern))
    chosen = [o for key, o in catalog.objects.items() if matches(o.name) or matches(key)]
    if not chosen and catalog.objects:
        raise no_match_error("object", pattern, sorted({o.name for o in catalog.objects.values()}))
    return sorted(chosen, key=lambda o: (natural_key(o.name), o.offset))


def print_objects(console: Console, objects: Sequence[ObjectInfo], *, flat: bool) -> None:
    """A table of stored objects, one row for each grid unless `flat`."""
    if flat:
        rows = [(format_size(o.length), o.file or "MISSING", o.key) for o in objects]
        console.table([">SIZE", "FILE", "OBJECT"], rows)
    else:
        grouped: dict[tuple[str, tuple[int, ...]], list[ObjectInfo]] = defaultdict(list)
        for item in objects:
            grouped[item.name, item.grid].append(item)
        by_grid: dict[tuple[int, ...], list[str]] = defaultdict(list)
        for name, grid in grouped:
            by_grid[grid].append(name)
        lines = []
        for grid, names in by_grid.items():
            for text, members in fold(names):
                items = [o for name in members for o in grouped[name, grid]]
                size = format_size(sum(o.length for o in items))
                lines.append((f"{len(items):,}", " x ".join(map(str, grid)), size, text))
        console.table([">COUNT", ">GRID", ">SIZE", "OBJECT"], sorted(lines, key=lambda line: natural_key(line[3])))
    console.out(f"{counted(len(objects), 'object')}, {format_size(sum(o.length for o in objects))}")
