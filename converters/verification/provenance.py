"""Whether the parts of a checkpoint are of one save: what they say of their iteration and of the job that wrote them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from converters.names import printable

if TYPE_CHECKING:
    from converters.catalog import Catalog
    from converters.verification.report import Check

_ITERATION = re.compile(r"iter_(\d{7,})")
_RANK = re.compile(r"(?:.*/)?__(\d{1,9})_\d+\.distcp")


def check_provenance(check: Check, catalog: Catalog) -> None:
    """Reports parts of different saves or jobs.

    Args:
        check: Where it is noted.
        catalog: What the checkpoint holds.
    """
    named = next((match for part in reversed(catalog.path.parts) if (match := _ITERATION.fullmatch(part))), None)
    if named is not None and catalog.iteration is not None and int(named[1]) != catalog.iteration:
        text = (
            f"{named[0]} holds the state of iteration {catalog.iteration:,}: files of another save, or a renamed folder"
        )
        check.error(text, needed=f"iteration {int(named[1])}", found=f"iteration {catalog.iteration}")
    world = catalog.args.get("world_size")
    if not isinstance(world, int):
        return
    for info in catalog.files:
        rank = _RANK.fullmatch(info.name)
        if rank and info.records and int(rank[1]) >= world:
            text = (
                f"{printable(info.name)} is of rank {int(rank[1])}, the arguments are those of a job of {world:,} ranks"
            )
            check.error(text, file=info.name, needed=f"world_size > {int(rank[1])}", found=f"world_size {world}")
            break
