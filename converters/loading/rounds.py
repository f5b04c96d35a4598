"""How ranks that make the same fetches deal them out, in rounds that all of them work out alike.

group (0, 2)   round 0           round 1              every member reads its own part of a round,
rank 0         fetch 0, 3        fetch 4              then the parts are gathered on all members
rank 2         fetch 1, 2        fetch 5
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from converters.names import natural_key

if TYPE_CHECKING:
    from collections.abc import Iterable

    from converters.loading.plan import ReadItem

MIB = 1 << 20
_ROUND = 32 * MIB  # bytes that a round brings together; more in large groups, where each member reads one fetch
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Part:
    """A fetch within a round.

    Attributes:
        fetch: What is read.
        owner: Position in the group of the rank that reads it.
        at: First byte in the owner's part of the round.
    """

    fetch: ReadItem
    owner: int
    at: int


def rounds(fetches: Iterable[ReadItem], members: int, tile_bytes: int) -> list[list[Part]]:
    """Deals fetches out to the members of a group, the same on every one of them.

    A fetch goes to the member with the fewest bytes in the round, then with the fewest in all; a round ends when the next
    fetch does not fit. So the parts of a round are about equal, and so is what each member reads in all.
    """
    capacity = max(tile_bytes, _ROUND // members)
    total = [0] * members
    filled = [0] * members
    out: list[list[Part]] = [[]]
    for fetch in sorted(fetches, key=lambda f: (natural_key(f.source), f.box.start)):
        owner = min(range(members), key=lambda member: (filled[member], total[member], member))
        if out[-1] and filled[owner] + fetch.nbytes > capacity:
            filled = [0] * members
            owner = min(range(members), key=lambda member: (total[member], member))
            out.append([])
        out[-1].append(Part(fetch, owner, filled[owner]))
        filled[owner] += -(-fetch.nbytes // _ALIGNMENT) * _ALIGNMENT
        total[owner] += fetch.nbytes
    return [parts for parts in out if parts]
