"""`inspect --html`: a checkpoint as one page that needs no network: card, treemap, ranks, tensors, shards, arguments.

The page is `page.html` with one JSON document in it. Scripts put texts from a checkpoint into the page as text only.
"""

from __future__ import annotations

import json
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from converters.megatron.identity import identify
from converters.names import printable
from converters.overview.card import card_lines
from converters.overview.tree import KINDS, module_tree
from converters.pickles.describe import describe
from converters.words import format_value

if TYPE_CHECKING:
    from collections.abc import Mapping

    from converters.formats.base import Reader
    from converters.megatron.identity import SavedLayout
    from converters.overview.tree import Module

_MOST_CHUNKS = 500_000
_MOST_RANKS = 4096


def checkpoint_page(reader: Reader, verification: Mapping[str, Any] | None = None) -> str:
    """The page of a checkpoint.

    Args:
        reader: The open checkpoint; only its metadata is read.
        verification: The document of `distckpt verify --json`; None without one.
    """
    catalog = reader.catalog
    identity = identify(catalog)
    (path, title), *card = card_lines(catalog, identity)
    dtypes: dict[str, int] = {}
    order = list(KINDS)
    tensors: list[list[Any]] = []
    room = _MOST_CHUNKS
    for tensor in sorted(catalog.tensors.values(), key=lambda t: order.index(t.kind)):
        chunks = None
        if tensor.chunk_count <= room:
            room -= tensor.chunk_count
            chunks = [
                [reader.file_of(c.record) if c.record >= 0 else -1, list(c.box.start), list(c.box.shape)]
                for c in tensor.chunks()
            ]
        number = dtypes.setdefault(tensor.dtype.short, len(dtypes))
        tensors.append([printable(tensor.name), number, list(tensor.shape), tensor.nbytes, chunks])
    data = {
        "title": printable(f"{path.strip()}  {title}"),
        "card": [[printable(label), printable(text)] for label, text in card],
        "checks": _checks(verification),
        "tree": [_branch(root) for root in module_tree(catalog.tensors.values())],
        "ranks": _rank_grid(identity.layout),
        "dtypes": list(dtypes),
        "files": [printable(reader.file_name(position)) for position in range(len(reader.files))],
        "tensors": tensors,
        "args": [[printable(str(k)), printable(format_value(describe(v)))] for k, v in sorted(catalog.options.items())],
    }
    text = json.dumps(data, separators=(",", ":"), default=str).replace("<", "\\u003c")
    return (files(__package__) / "page.html").read_text(encoding="utf-8").replace("DATA", text, 1)


def _branch(module: Module) -> dict[str, Any]:
    children = [_branch(child) for child in module.children.values()]
    return {
        "name": printable(module.name),
        "nbytes": module.nbytes,
        "tensors": module.tensors,
        "children": children,
    }


def _checks(verification: Mapping[str, Any] | None) -> list[list[str]]:
    if verification is None:
        return []
    lines = [["good" if verification.get("good") else "bad", printable(str(verification.get("path", "")))]]
    for check in verification.get("checks", ()):
        findings = [str(finding.get("message", "")) for finding in check.get("findings", ())]
        parts = [str(check.get("status", "")), str(check.get("summary", "")), *findings[:5]]
        lines.append([printable(str(check.get("name", ""))), printable("; ".join(filter(None, parts)))])
    return lines


def _rank_grid(layout: SavedLayout) -> list[list[str]]:
    """For each pipeline and tensor-parallel rank, the global ranks there; empty where the layout is not known."""
    dense = layout.dense
    if dense is None or dense.world_size > _MOST_RANKS:
        return []
    grid: list[list[list[int]]] = [[[] for _ in range(dense.tp)] for _ in range(dense.pp)]
    for rank in range(dense.world_size):
        coordinates = dense.coordinates(rank)
        grid[coordinates.pp][coordinates.tp].append(rank)
    return [[_ranks(cell) for cell in row] for row in grid]


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:6])) + (f", ... {ranks[-1]}" if len(ranks) > 6 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
