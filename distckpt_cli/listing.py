"""The lists of `inspect`: tensors, sizes by module, files, arguments, objects."""

from __future__ import annotations

import difflib
import functools
from abc import ABC, abstractmethod
from collections import defaultdict
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from converters.errors import RequestError
from converters.megatron.identity import identify, writer_of
from converters.names import fold, folded, matcher, natural_key, printable
from converters.overview.tree import KINDS, module_tree
from converters.pickles.describe import describe
from converters.words import counted, format_shape, format_size, format_value

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from converters.catalog import FileInfo, ObjectInfo, TensorInfo
    from converters.formats.base import Reader
    from converters.overview.tree import Module
    from distckpt_cli.commands.inspect import Choosing, View
    from distckpt_cli.console import Console

_WIDE = 70  # a terminal that has room for the bars of a tree
_BAR = 20


def no_match_error(
    noun: str, pattern: str, names: Sequence[str], counts: tuple[str, str] | None = None
) -> RequestError:
    """No match: the error with the nearest pattern that has some, or with examples of names.

    Args:
        noun: What the names are of: "tensor".
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
            f"no {noun} matches {pattern!r}", hint=f"-i ignores the case: {counted(len(other_case), noun)}"
        )
    count, meant = max(
        ((len(list(filter(matcher(glob), names))), glob) for glob in near + part), default=(0, ""), key=lambda c: c[0]
    )
    if count:
        hint = f"did you mean '{meant}'?  ({counted(count, noun)})"
    else:
        verb = "is" if len(names) == 1 else "are"
        total, examples = counted(len(names), *(counts or (noun,))), ", ".join(sorted(rows, key=len)[:3])
        hint = f"there {verb} {total}, for example {examples}"
    return RequestError(f"no {noun} matches {pattern!r}", hint=hint)


class Listing(ABC):
    """A list of what a checkpoint holds: a table for people, a part of the document for programs, or names alone.

    Args:
        reader: The checkpoint.
        pattern: Which names are listed.
        view: Whether rows are folded, and how deep a tree is.
        choosing: How names are matched and rows are sorted.

    Raises:
        RequestError: No name matches.
    """

    def __init__(self, reader: Reader, pattern: str, view: View, choosing: Choosing) -> None:
        self.reader, self.catalog, self.view, self.choosing = reader, reader.catalog, view, choosing
        self.choose(pattern)

    @abstractmethod
    def choose(self, pattern: str) -> None:
        """Finds what is listed."""

    @abstractmethod
    def names(self) -> Iterable[str]:
        """The names alone."""

    @abstractmethod
    def document(self) -> Any:
        """The list for programs."""

    @abstractmethod
    def show(self, console: Console) -> None:
        """Prints the list, and a line of totals."""


class TensorListing(Listing):
    """Tensors whose canonical name, or whose key in the file, matches; weights first, optimizer state last."""

    def choose(self, pattern: str) -> None:
        """See `Listing`."""
        matches = functools.cache(self.choosing.matcher(pattern))  # layers share keys
        tensors = self.catalog.tensors
        chosen = [t for name, t in tensors.items() if matches(name) or any(map(matches, t.keys))]
        if not chosen:
            raise no_match_error("tensor", pattern, list(tensors), ("stored tensor", "stored tensors"))
        order = list(KINDS)
        self.tensors = sorted(chosen, key=lambda t: -t.nbytes if self.choosing.by_size else order.index(t.kind))

    def names(self) -> Iterable[str]:
        """See `Listing`."""
        return [tensor.name for tensor in self.tensors]

    def document(self) -> Any:
        """See `Listing`; chunks only with `--flat`."""
        return [self._tensor_document(tensor) for tensor in self.tensors]

    def show(self, console: Console) -> None:
        """See `Listing`; layers and experts are folded without `--flat`."""
        tensors = self.tensors
        rows = [(t.name, [t]) for t in tensors] if self.view.flat else _folded(tensors)
        if self.choosing.by_size:
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

    def _tensor_document(self, tensor: TensorInfo) -> dict[str, Any]:
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
        if self.view.flat:
            reader = self.reader
            document["chunks"] = [
                {
                    "offset": list(chunk.box.start),
                    "shape": list(chunk.box.shape),
                    "file": reader.file_name(reader.file_of(chunk.record)) if chunk.record >= 0 else None,
                }
                for chunk in tensor.chunks()
            ]
        return document


def _folded(tensors: Sequence[TensorInfo]) -> list[tuple[str, list[TensorInfo]]]:
    by_name = {t.name: t for t in tensors}
    order = {name: position for position, name in enumerate(by_name)}
    groups: dict[tuple[str, tuple[int, ...]], list[str]] = defaultdict(list)
    for t in tensors:
        groups[t.dtype.name, t.shape].append(t.name)  # a row has one type and one shape
    rows = [(text, members) for names in groups.values() for text, members in fold(names)]
    rows.sort(key=lambda row: min(order[name] for name in row[1]))
    return [(text, [by_name[name] for name in members]) for text, members in rows]


class TreeListing(TensorListing):
    """Sizes of all tensors by module."""

    def choose(self, pattern: str) -> None:
        """See `Listing`."""
        super().choose(pattern)
        self._roots = module_tree(self.catalog.tensors.values(), folded=not self.view.flat)

    def document(self) -> Any:
        """See `Listing`."""
        return [_module_document(root) for root in self._roots]

    def show(self, console: Console) -> None:
        """See `Listing`; each module has its share of all as a bar."""
        by_size = self.choosing.by_size
        roots = sorted(self._roots, key=lambda root: -root.nbytes) if by_size else self._roots
        total = sum(root.nbytes for root in roots) or 1
        wide = console.width is None or console.width >= _WIDE
        rows = []
        for root in roots:
            for level, module in root.walk(self.view.depth, by_size=by_size):
                share = module.nbytes / total
                bar = ("#" * round(share * _BAR)).ljust(_BAR) if wide else ""
                size = (format_size(module.nbytes), f"{share:.0%}", *([bar] if wide else []))
                rows.append((*size, f"{module.tensors:,}", "  " * level + printable(module.name)))
        console.table([">SIZE", ">SHARE", *(["".ljust(_BAR)] if wide else []), ">TENSORS", "MODULE"], rows)
        console.out(f"{counted(len(self.tensors), 'tensor')}, {format_size(total)}")


def _module_document(module: Module) -> dict[str, Any]:
    sizes = {"bytes": module.nbytes, "parameters": module.parameters, "tensors": module.tensors}
    return {"name": module.name, **sizes, "children": [_module_document(child) for child in module.children.values()]}


class FileListing(Listing):
    """All files: which rank and writer wrote each, what it holds, and what is wrong with it."""

    def choose(self, pattern: str) -> None:
        """See `Listing`."""

    def names(self) -> Iterable[str]:
        """See `Listing`."""
        return [info.name for info in self.catalog.files]

    def document(self) -> Any:
        """See `Listing`."""
        return [asdict(info) for info in self.catalog.files]

    def show(self, console: Console) -> None:
        """See `Listing`."""
        catalog, layout = self.catalog, identify(self.catalog).layout
        contents = _contents_by_file(self.reader)
        with_ranks = layout.coordinates(0) is not None
        axes = [">TP", ">PP", ">DP"] if with_ranks else []
        rows = []
        files = sorted(catalog.files, key=lambda f: (f.role not in ("data", "unreferenced"), natural_key(f.name)))
        for info in sorted(files, key=lambda f: -(f.size or 0)) if self.choosing.by_size else files:
            writer = writer_of(info.name)
            coordinates = layout.coordinates(writer[0]) if writer else None
            at = [str(coordinates.tp), str(coordinates.pp), str(coordinates.dp)] if coordinates else ["-"] * 3
            rows.append(
                [
                    *(map(str, writer) if writer else ("-", "-")),
                    *(at if with_ranks else ()),
                    f"{info.records:,}" if info.role == "data" else "-",
                    "-" if info.size is None else format_size(info.size),
                    _describe_contents(info, contents.get(info.name, ())),
                    info.name,
                ]
            )
        console.table([">RANK", ">WRITER", *axes, ">RECORDS", ">SIZE", "HOLDS", "FILE"], rows)
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
    counted_arrays: set[str] = set()
    for tensor in catalog.tensors.values():
        for part in tensor.parts:
            if part.array.key in counted_arrays:
                continue
            counted_arrays.add(part.array.key)
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


class ArgumentListing(Listing):
    """Training arguments, or the configuration of a framework that stores one instead."""

    def choose(self, pattern: str) -> None:
        """See `Listing`."""
        arguments: Mapping[str, Any] = self.catalog.args or dict(_flatten(self.catalog.config))
        if not arguments:
            raise RequestError(
                f"this {self.catalog.framework} checkpoint stores no training arguments",
                hint="--json shows what the shapes tell",
            )
        names = list(filter(self.choosing.matcher(pattern), sorted(arguments)))
        if not names:
            raise no_match_error("argument", pattern, sorted(arguments))
        self._arguments = {name: describe(arguments[name]) for name in names}

    def names(self) -> Iterable[str]:
        """See `Listing`."""
        return self._arguments

    def document(self) -> Any:
        """See `Listing`."""
        return self._arguments

    def show(self, console: Console) -> None:
        """See `Listing`."""
        rows = [(name, format_value(value)) for name, value in self._arguments.items()]
        console.table(["ARGUMENT", "VALUE"], rows)


def _flatten(config: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


class ObjectListing(Listing):
    """Stored objects whose name or key matches."""

    def choose(self, pattern: str) -> None:
        """See `Listing`."""
        stored = self.catalog.objects
        matches = functools.cache(self.choosing.matcher(pattern))
        chosen = [o for key, o in stored.items() if matches(o.name) or matches(key)]
        if not chosen and stored:
            raise no_match_error("object", pattern, sorted({o.name for o in stored.values()}))
        self._objects = sorted(chosen, key=lambda o: (natural_key(o.name), o.offset))

    def names(self) -> Iterable[str]:
        """See `Listing`."""
        return [item.key for item in self._objects]

    def document(self) -> Any:
        """See `Listing`."""
        return [asdict(item) for item in self._objects]

    def show(self, console: Console) -> None:
        """See `Listing`; one row for each grid without `--flat`."""
        objects = self._objects
        if self.view.flat:
            rows = [(format_size(o.length), o.file or "MISSING", o.key) for o in objects]
            console.table([">SIZE", "FILE", "OBJECT"], rows)
        else:
            console.table([">COUNT", ">GRID", ">SIZE", "OBJECT"], _rows_by_grid(objects))
        console.out(f"{counted(len(objects), 'object')}, {format_size(sum(o.length for o in objects))}")


def _rows_by_grid(objects: Iterable[ObjectInfo]) -> list[tuple[str, ...]]:
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
    return sorted(lines, key=lambda line: natural_key(line[3]))


LISTINGS: dict[str, type[Listing]] = {
    "tensors": TensorListing,
    "tree": TreeListing,
    "args": ArgumentListing,
    "objects": ObjectListing,
    "files": FileListing,
}
"""By the names of their options."""
