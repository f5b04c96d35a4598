"""Megatron's common state, read as an inert tree, changed where the layout demands it, and written back.

Nothing in it is ever built: a field of the argument Namespace is replaced in the tree, and every other byte of the pickle
stays what it was. Tensors inside (a step counter, a random state) are members of the same archive and are kept.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from converters.crc import crc32
from converters.errors import FormatError
from converters.formats.folder import open_source
from converters.pickles.emit import dumps
from converters.torchzip.records import read_directory, read_member, read_pickle
from converters.torchzip.records_out import archive, object_record

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from converters.torchzip.records import Read
    from converters.torchzip.tensor_refs import TensorRef

_LIMIT = 1 << 30


def read_object(path: Path, label: str, start: int = 0, length: int | None = None) -> Any:
    """The inert tree of a `torch.save` archive; its tensors are not read.

    Args:
        length: Bytes; None for the whole file.
    """
    with open_source(path) as source:
        size = source.size if length is None else length
        return read_pickle(source.read, start, size, label)


@dataclass
class Archive:
    """A small `torch.save` archive: its inert tree, and the other members as bytes.

    Attributes:
        tree: The pickled value, inert; change it in place.
        members: The contents of the archive by name: the storages that the tree refers to, under `data/`.
        label: Names it in errors.
    """

    tree: Any
    members: dict[str, bytes]
    label: str

    @classmethod
    def read(cls, path: Path, start: int = 0, length: int | None = None, label: str | None = None) -> Archive:
        """An archive in a file.

        Args:
            length: Bytes; None for the whole file.

        Raises:
            FormatError: Damaged (every member is compared with its checksum), or too large for a common state.
        """
        with open_source(path) as source:
            size = source.size if length is None else length
            return cls._parsed(source.read, start, size, label or path.name)

    @classmethod
    def parse(cls, raw: bytes, label: str) -> Archive:
        """An archive that is in memory."""
        return cls._parsed(lambda at, n: raw[at : at + n], 0, len(raw), label)

    @classmethod
    def _parsed(cls, read: Read, start: int, size: int, label: str) -> Archive:
        directory = read_directory(read, start, size, label)
        tree = read_pickle(read, start, size, label, members=directory)
        members = {}
        for name, member in directory.items():
            if member.size > _LIMIT:
                raise FormatError(f"{label}: member {name!r} is {member.size} bytes, too large for a common state")
            members[name] = read_member(read, start, member, label)
            if crc32(members[name]) != member.crc:
                raise FormatError(f"{label} is damaged: member {name!r} does not match its checksum")
        return cls(tree, members, label)

    @classmethod
    def of_object(cls, value: Any, storages: Mapping[str, bytes], label: str) -> Archive:
        """An object that its format keeps otherwise, as an archive of its own: the caller may change its tree.

        Args:
            storages: The storages that the value refers to, under `data/`.
        """
        archive = cls.parse(object_record([value], storages), label)
        archive.tree = archive.tree[0]
        return archive

    def elements(self, ref: TensorRef) -> bytes:
        """The elements of a tensor in the tree.

        Raises:
            FormatError: Its storage is missing, or it does not lie in C order.
        """
        size = ref.dtype.itemsize
        raw = self.members.get(f"data/{ref.storage}", b"")
        if not ref.contiguous or len(raw) != ref.storage_nbytes:
            raise FormatError(f"{self.label} lacks storage {ref.storage}, or a tensor in it has odd strides")
        return raw[ref.offset * size : (ref.offset + math.prod(ref.shape)) * size]

    def dump(self, tree: Any, name: str) -> bytes:
        """An archive of `tree` with this one's other members.

        Args:
            tree: What to pickle; protocol 2, as torch.save does.
            name: Top folder inside the archive; torch.save takes the file's stem.
        """
        members = {**self.members, "data.pkl": dumps(tree, 2)}
        members.pop(".data/serialization_id", None)  # a fingerprint of contents that have changed; readers need none
        return archive(name, members)

    def record(self) -> bytes:
        """The record of an object whose value is the tree, as torch_dist stores it: a list of one."""
        return self.dump([self.tree], "archive")
