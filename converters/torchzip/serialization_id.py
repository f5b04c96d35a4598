"""The `.data/serialization_id` of a torch.save archive: 20 digits from its members' names, 20 from their checksums.

torch combines the hashes of the names in the order in which a C++ `unordered_set` happens to keep them, so that order is
followed here. No reader asks for it; with it, what we write is byte for byte what torch.save writes.

Source: caffe2/serialize/inline_container.cc (writeSerializationId), GCC's libstdc++ (hash_bytes.cc, hashtable.h), which
torch's wheels are built with.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_MASK = (1 << 64) - 1
_MULTIPLIER = 0xC6A4A7935BD1E995  # MurmurHash64A
_SEED = 0xC70F6907
# how many buckets the set grows to, step by step: primes from its table
_BUCKETS = [13, 29, 59, 127, 257, 541, 1109, 2357, 5087, 10273, 20753, 42043, 85229, 172933, 351061, 712697, 1447153]
_BUCKETS += [2938679, 5967347, 12117689, 24607243, 49969847, 101473717]


def serialization_id(storages: int, checksums: Iterable[int]) -> bytes:
    """The id of an archive.

    Args:
        storages: Number of its `data/...` members.
        checksums: CRC-32 of every member that is not empty, in order, without the id's own.
    """
    combined = 0
    for crc in checksums:
        combined = _mix(combined, crc)
    return f"{_names(storages):020d}{combined:020d}".encode()


def _mix(seed: int, value: int) -> int:
    return (seed ^ (value + 0x9E3779B9 + (seed << 6) + (seed >> 2))) & _MASK


@lru_cache(maxsize=64)
def _names(storages: int) -> int:
    fixed = ["data.pkl", ".format_version", ".storage_alignment", "byteorder"]
    names = [*fixed, *(f"data/{number}" for number in range(storages)), "version"]
    combined = 0
    for value in _set_order([_hash(name.encode()) for name in names]):
        combined = _mix(combined, value)
    return combined


def _hash(text: bytes) -> int:
    value = _SEED ^ (len(text) * _MULTIPLIER & _MASK)
    words_end = len(text) & ~7
    for at in range(0, words_end, 8):
        word = int.from_bytes(text[at : at + 8], "little") * _MULTIPLIER & _MASK
        value = (value ^ ((word ^ (word >> 47)) * _MULTIPLIER & _MASK)) * _MULTIPLIER & _MASK
    if len(text) > words_end:
        value = (value ^ int.from_bytes(text[words_end:], "little")) * _MULTIPLIER & _MASK
    value = (value ^ (value >> 47)) * _MULTIPLIER & _MASK
    return value ^ (value >> 47)


def _set_order(hashes: Sequence[int]) -> list[int]:
    """The hashes in the order of a set they were put into one by one.

    The set is one linked list; each bucket knows the node before its first. A new node goes to the front of its bucket, or,
    if that is empty, to the front of the list; growing moves the nodes over by the same rule, in the list's order.
    """
    head, end = -1, -2
    following, before, size = {head: end}, dict[int, int](), 0

    def insert(node: int) -> None:
        bucket = hashes[node] % size
        if bucket not in before:
            before[bucket] = head
            first = following[head]
            if first != end:
                before[hashes[first] % size] = node
        previous = before[bucket]
        following[node], following[previous] = following[previous], node

    def listed() -> list[int]:
        nodes, node = [], following[head]
        while node != end:
            nodes.append(node)
            node = following[node]
        return nodes

    growth = iter(_BUCKETS)
    for number in range(len(hashes)):
        if number == size:
            nodes, size = listed(), next(growth)
            before.clear()
            following = {head: end}
            for node in nodes:
                insert(node)
        insert(number)
    return [hashes[node] for node in listed()]
