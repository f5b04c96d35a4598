"""How ranks that have the same items to read deal them out, in rounds that all of them work out alike.

group (0, 2)   round 0           round 1              every member reads its own items of a round,
rank 0         item 0, 3         item 4               then what they have read is gathered on all members
rank 2         item 1, 2         item 5
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from converters.names import natural_key

if TYPE_CHECKING:
    from collections.abc import Iterable

    from converters.loading.plan import ReadItem

MIB = 1 << 20
_ROUND = 32 * MIB  # bytes that a round brings together; more in large groups, where each member reads one item
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class ScheduledRead:
    """An item within a round.

    Attributes:
        item: What is read.
        owner: Position in the group of the rank that reads it.
        at: First byte among those that the owner reads in the round.
    """

    item: ReadItem
    owner: int
    at: int


def rounds(items: Iterable[ReadItem], members: int, tile_bytes: int) -> list[list[ScheduledRead]]:
    """Deals items out to the members of a group, the same on every one of them.

    An item goes to the member with the fewest bytes in the round, then with the fewest in all; a round ends when the next
    item does not fit. So all members read about equally much in a round, and in all.
    """
    capacity = max(tile_bytes, _ROUND // members)
    total = [0] * members
    filled = [0] * members
    out: list[list[ScheduledRead]] = [[]]
    for item in sorted(items, key=lambda i: (natural_key(i.source), i.box.start)):
        owner = min(range(members), key=lambda member: (filled[member], total[member], member))
        if out[-1] and filled[owner] + item.nbytes > capacity:
            filled = [0] * members
            owner = min(range(members), key=lambda member: (total[member], member))
            out.append([])
        out[-1].append(ScheduledRead(item, owner, filled[owner]))
        filled[owner] += -(-item.nbytes // _ALIGNMENT) * _ALIGNMENT
        total[owner] += item.nbytes
    return [reads for reads in out if reads]
