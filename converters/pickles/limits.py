"""Limits on the size, depth and cost of one pickle."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds that no honest checkpoint meets. A pickle that exceeds one is refused with its name.

    Memory is bounded by charging every object made against `base_bytes + bytes_per_byte * len(data)`:
    torch's own `.metadata` needs 11 bytes of Python objects per byte of pickle.
    """

    data_bytes: int = 1 << 30
    """Size of the pickle."""
    base_ops: int = 6_000_000
    """Opcodes allowed whatever the size (about two seconds)."""
    ops_per_byte: float = 0.0
    """More opcodes allowed per byte, for files that are large for a good reason."""
    base_bytes: int = 96 << 20
    bytes_per_byte: int = 12
    marks: int = 500
    """Nesting of lists, dicts and tuples under construction."""
    memo: int = 64_000_000
    key_depth: int = 4
    """Nesting of a tuple that is a dict key: hashing a tuple walks all of it."""
    key_leaves: int = 64
    """Elements in a tuple that is a dict key."""
    tuple_keys: int = 4096
    """Dict keys that are tuples: their hashes can be made to collide, so the cost may be quadratic."""
    number_keys: int = 65_536
    """Dict keys that are numbers, for the same reason; strings and bytes have a secret hash."""
    int_bytes: int = 64
    """Width of an integer."""
    name_chars: int = 512
    """Length of a module or class name."""

    def ops(self, size: int) -> int:
        """Opcodes allowed in a pickle of `size` bytes."""
        return self.base_ops + int(self.ops_per_byte * size)

    def memory(self, size: int) -> int:
        """Bytes of Python objects allowed for a pickle of `size` bytes."""
        return self.base_bytes + self.bytes_per_byte * size
