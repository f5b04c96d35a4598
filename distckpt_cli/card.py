"""The identity card of a checkpoint on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from converters.overview.card import card_lines
from converters.words import format_size

if TYPE_CHECKING:
    from converters.catalog import Catalog
    from converters.megatron.identity import Identity
    from distckpt_cli.console import Console


def print_card(console: Console, catalog: Catalog, identity: Identity) -> None:
    """Prints the card: what it is, the model, how it was saved, problems, components."""
    for number, (label, text) in enumerate(card_lines(catalog, identity)):
        style = label if label in ("error", "warning") else None if number else "bold"
        console.fact(label, text, style=style)
    console.out()
    rows = [(c.name, f"{c.tensors:,}", ", ".join(c.dtypes) or "-", format_size(c.nbytes)) for c in identity.components]
    # sizes stand under each other at the end of the line, so the last column is padded here
    width = max((len(row[3]) for row in rows), default=0)
    columns = ["COMPONENT", ">TENSORS", "DTYPE", "SIZE".rjust(width)]
    console.table(columns, [(*row[:3], row[3].rjust(width)) for row in rows])
