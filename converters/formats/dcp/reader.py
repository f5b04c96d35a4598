"""Shared base of the readers of torch DCP folders: records, files, and their checks without tensor data.

    .metadata              a pickle: every key, its shape, its chunks, and where each record lies
    __{rank}_{n}.distcp    records, one after the other: file n of that rank

A format adds what its keys mean, and where it keeps what is not a tensor. Several such folders may make up one checkpoint
(model/, optimizer/): `merged` puts their metadata together.

Source: torch/distributed/checkpoint/{metadata,filesystem}.py, torch 2.1 to 2.13.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from converters.catalog import FileInfo, Problem
from converters.chunks import StoredArray
from converters.dtypes import dtype
from converters.errors import FormatError
from converters.formats.base import Reader, StoredArchive, digest_of
from converters.formats.broken import damage_in, damaged_file
from converters.formats.canonical import KeyedArray, TensorsInside, object_info
from converters.formats.common_state import read_object
from converters.formats.dcp.geometry import tiling_problem
from converters.formats.dcp.metadata import read_metadata
from converters.formats.folder import exists, is_folder, read_small, scan, status
from converters.formats.registry import METADATA_LIMIT, dcp_folders
from converters.names import printable
from converters.torchzip.records import Payload, TensorLocator, locate_tensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from converters.catalog import Catalog, ObjectInfo, TensorInfo
    from converters.formats.dcp.stored import DcpMetadata, StoredObject, StoredTensor
    from converters.torchzip.records import Read
    from converters.torchzip.tensor_refs import TensorRef


def read_folder(folder: Path, prefix: str = "") -> tuple[DcpMetadata, str]:
    """What the `.metadata` of a folder says, and a digest of it.

    Args:
        prefix: Its path in the checkpoint, with a slash at the end: `model/`.

    Raises:
        FormatError: There is none, or it is unsafe or damaged.
    """
    if not exists(folder / ".metadata"):
        text = "is missing: the save was not finished, or the hidden file was not copied (cp -a and rsync -a do)"
        why = "only it says which bytes belong to which tensor"
        raise damaged_file(folder, {".metadata": f"{prefix}.metadata {text}"}, why)
    raw = read_small(folder / ".metadata", limit=METADATA_LIMIT)
    return read_metadata(raw, label=f"{prefix}.metadata"), hashlib.sha256(raw).hexdigest()


class DcpReader(Reader):
    """An open folder of torch DCP files; a format makes the catalog.

    Args:
        folder: The checkpoint's folder; names of files are relative to it.
        metadata: What its `.metadata` says, or those of its inner folders together.
        digest: Of the bytes of these files.
    """

    BESIDE: ClassVar[tuple[str, ...]] = ()
    """Inner folders that belong to the checkpoint and hold no records, each with a slash at its end."""

    def __init__(self, folder: Path, metadata: DcpMetadata, digest: str) -> None:
        self.folder, self.metadata = folder, metadata
        self.files = [folder / name for name in metadata.files]
        self._digest = digest
        self._locator = TensorLocator()
        self._sizes = _file_sizes(folder, [*metadata.files, *self.BESIDE])
        self._number_records()
        self._inside = TensorsInside(len(self._record_file))
        self.catalog = self._catalog()

    @abstractmethod
    def _catalog(self) -> Catalog:
        """What the folder holds, in the names of its format."""

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Reads `.metadata`, or those of the inner folders, and what else is needed to know the catalog."""
        inner = [] if (folder / ".metadata").exists() else dcp_folders(folder)
        if not inner:
            return cls(folder, *read_folder(folder))
        parts = {prefix: read_folder(folder / prefix, prefix) for prefix in inner}
        digest = "".join(digest for _, digest in parts.values())
        return cls(folder, merged({prefix: metadata for prefix, (metadata, _) in parts.items()}), digest)

    def file_of(self, record: int) -> int:
        """Position in `files` of the file that holds a record."""
        inside = self._inside.find(record)
        return self.metadata.objects[inside[0]].file if inside else int(self._record_file[record])

    def locate(self, record: int, read: Read) -> Payload:
        """Where in its file the elements of a record lie; the record is checked against the metadata."""
        if (inside := self._inside.find(record)) is not None:
            key, ref = inside
            stored = self.metadata.objects[key]
            label = f"{self.files[stored.file].name} at {stored.offset}: {printable(key)}"
            return locate_tensor(read, stored.offset, stored.length, ref, label)
        tensor, row, label = self._chunk_of(record)
        start, length = int(self._record_start[record]), int(self._record_length[record])
        shape = tuple(tensor.sizes[row].tolist())
        return self._locator.locate(read, start, length, label, expect=dtype(tensor.dtype), shape=shape)

    def archives(self, file: int) -> Iterator[StoredArchive]:
        """The records of a file, tensors and objects, in the order in which they lie in it."""
        rows = np.flatnonzero(self._record_file == file)
        records = [
            (start, length, record, self._owner(record).key)
            for start, length, record in zip(
                self._record_start[rows].tolist(), self._record_length[rows].tolist(), rows.tolist(), strict=True
            )
        ]
        records += [(o.offset, o.length, -1, o.key) for o in self.metadata.objects.values() if o.file == file]
        return (StoredArchive(*archive) for archive in sorted(records))

    def object_value(self, key: str) -> Any:
        """The inert tree of a stored object, None if there is none."""
        stored = self.metadata.objects.get(key)
        if stored is None or stored.file < 0 or not exists(self.files[stored.file]):
            return None
        label = f"{self.files[stored.file].name} at {stored.offset}: {printable(key)}"
        path, name = self.files[stored.file], self.metadata.files[stored.file]
        with damage_in(self.folder, name):
            return read_object(path, label, stored.offset, stored.length)

    def object_array(self, key: str, ref: TensorRef) -> StoredArray:
        """A tensor inside a stored object as an array of one chunk, with a record number of its own."""
        return self._inside.array(key, ref)

    def fingerprint(self) -> str:
        """Digest of `.metadata` and of the size and time of every data file."""
        states = {name: status(self.folder / name) for name in self.metadata.files}
        present = (f"{name}:{state.size}:{state.mtime_ns};" for name, state in states.items() if state is not None)
        return digest_of((self._digest, *present))

    def _number_records(self) -> None:
        """Gives every tensor chunk a number: keys in file order, chunks in the order of `StoredTensor`."""
        tensors = list(self.metadata.tensors.values())
        counts = [len(t.file) for t in tensors]
        firsts = np.cumsum([0, *counts])
        self._first = {t.key: int(first) for t, first in zip(tensors, firsts, strict=False)}
        self._firsts, self._numbered = firsts, tensors
        empty = np.zeros(0, np.int64)
        self._record_file = np.concatenate([empty, *(t.file for t in tensors)])
        self._record_start = np.concatenate([empty, *(t.offset for t in tensors)])
        self._record_length = np.concatenate([empty, *(t.length for t in tensors)])

    def _owner(self, record: int) -> StoredTensor:
        return self._numbered[int(np.searchsorted(self._firsts, record, side="right")) - 1]

    def _chunk_of(self, record: int) -> tuple[StoredTensor, int, str]:
        """The tensor that a record is a chunk of, which one, and how to name the record in an error."""
        tensor = self._owner(record)
        name, start = self.files[self.file_of(record)].name, self._record_start[record]
        return tensor, record - self._first[tensor.key], f"{name} at {start}: {printable(tensor.key)}"

    def _array(self, tensor: StoredTensor) -> StoredArray:
        numbers = np.arange(len(tensor.file), dtype=np.int64) + self._first[tensor.key]
        records = np.where(tensor.file >= 0, numbers, -1)
        return StoredArray(tensor.key, tensor.shape, tensor.starts, tensor.sizes, records)

    def _keyed(self, tensor: StoredTensor) -> KeyedArray:
        return KeyedArray(self._array(tensor), dtype(tensor.dtype), tensor.original_shape, tiling_problem(tensor))

    def _object_infos(self, *, wrapped: bool) -> dict[str, ObjectInfo]:
        files = self.metadata.files
        return {
            key: object_info(key, files[o.file] if o.file >= 0 else "", o.offset, o.length, wrapped=wrapped)
            for key, o in self.metadata.objects.items()
        }

    def _check_files(self, tensors: Mapping[str, TensorInfo], problems: list[Problem]) -> tuple[FileInfo, ...]:
        """Compares what the metadata places in each file with what is on disk."""
        metadata = self.metadata
        objects = [(o.file, o.offset, o.length) for o in metadata.objects.values() if o.file >= 0]
        tensor_records = np.stack([self._record_file, self._record_start, self._record_length]).astype(np.int64)
        object_records = np.array(objects, np.int64).reshape(-1, 3).T
        records = np.concatenate([tensor_records[:, self._record_file >= 0], object_records], axis=1)
        file, start, length = records[:, np.lexsort((records[1], records[0]))]
        clash = (file[1:] == file[:-1]) & (start[:-1] + length[:-1] > start[1:])
        needed = np.zeros(len(metadata.files), np.int64)
        np.maximum.at(needed, file, start + length)
        counts, used = np.bincount(file, minlength=len(needed)), np.bincount(file, length, minlength=len(needed))
        for row in np.flatnonzero(clash)[:8].tolist():
            name = metadata.files[int(file[row])]
            problems.append(
                Problem("error", f"two records overlap in {name}, at {start[row]} and {start[row + 1]}", file=name)
            )
        infos, bad = [], {}
        for position, name in enumerate(metadata.files):
            size = self._sizes.get(name)
            if size is None or size < needed[position]:
                bad[position] = (name, size, int(needed[position]))
            infos.append(FileInfo(name, size, int(counts[position]), int(needed[position]), int(used[position])))
        problems += self._file_problems(bad, tensors)
        listed = {info.name for info in infos}
        for name, size in sorted(self._sizes.items()):
            if name not in listed:
                role = "unreferenced" if name.endswith(".distcp") else _ROLES.get(name.rpartition("/")[2], "other")
                infos.append(FileInfo(name, size, role=role))
                if role == "unreferenced":
                    text = f"{printable(name)} ({size} bytes) belongs to no record; left over from another save?"
                    problems.append(Problem("warning", text, file=name))
        return tuple(infos)

    def _file_problems(
        self, bad: Mapping[int, tuple[str, int | None, int]], tensors: Mapping[str, TensorInfo]
    ) -> list[Problem]:
        if not bad:
            return []
        hit: dict[int, list[str]] = {position: [] for position in bad}
        ends = self._record_start + self._record_length
        for name, tensor in tensors.items():
            for part in tensor.parts:
                rows = part.array.records[part.rows()]
                rows = rows[rows >= 0]
                for position in set(np.unique(self._record_file[rows]).tolist()) & bad.keys():
                    size = bad[position][1]
                    in_file = rows[self._record_file[rows] == position]
                    if (size is None or (ends[in_file] > size).any()) and name not in hit[position]:
                        hit[position].append(name)
        out = []
        for position, (name, size, needed) in bad.items():
            state = "is missing" if size is None else f"is {size:,} bytes"
            text = f"{printable(name)} {state}, the metadata needs {needed:,} bytes"
            inside = (o for o in self.metadata.objects.values() if o.file == position)
            lost = tuple(o.key for o in inside if size is None or o.offset + o.length > size)
            out.append(Problem("error", text, name, tuple(hit[position]), lost))
        return out


def _file_sizes(folder: Path, names: list[str]) -> dict[str, int]:
    """Sizes of all files in the folder and in the inner folders that hold data, by path in the folder."""
    out = {}
    for inner in sorted({"", *(name.rpartition("/")[0] for name in names)}):
        if not is_folder(folder / inner):
            continue
        with scan(folder / inner) as entries:
            sizes = {f"{inner}/{e.name}".lstrip("/"): e.stat().st_size for e in entries if e.is_file()}
        out.update(sizes)
    return out


_ROLES = {
    ".metadata": "metadata",
    "metadata.json": "metadata",
    "integrity.json": "metadata",
    "common.pt": "common state",
    "run_config.yaml": "configuration",
    "train_state.pt": "configuration",
}


def merged(parts: Mapping[str, DcpMetadata]) -> DcpMetadata:
    """One metadata for a checkpoint that lies in several folders.

    Args:
        parts: By the folder's path in the checkpoint, with a slash at the end.

    Raises:
        FormatError: Two folders have the same tensor, with different pieces or shapes.
    """
    files: list[str] = []
    tensors: dict[str, StoredTensor] = {}
    objects: dict[str, StoredObject] = {}
    stray: list[str] = []
    for prefix, part in parts.items():
        base = len(files)
        files += [f"{prefix}{name}" for name in part.files]
        for key, tensor in part.tensors.items():
            moved = replace(tensor, file=np.where(tensor.file >= 0, tensor.file + base, -1).astype(np.int32))
            earlier = tensors.setdefault(key, moved)
            if not _same_geometry(earlier, moved):
                raise FormatError(
                    f"{printable(prefix)} has another {printable(key)} than a folder before it", tensor=key
                )
        for key, stored in part.objects.items():
            objects.setdefault(key, replace(stored, file=stored.file + base if stored.file >= 0 else -1))
        stray += [f"{prefix}: {text}" for text in part.stray]
    first = next(iter(parts.values()))
    planner = {
        k: v for part in parts.values() if isinstance(part.planner_data, dict) for k, v in part.planner_data.items()
    }
    attributes = dict(first.attributes)
    for part in list(parts.values())[1:]:  # ByteCheckpoint describes every tensor's record in one of them
        for name, value in part.attributes.items():
            before = attributes.setdefault(name, value)
            if isinstance(before, dict) and isinstance(value, dict):
                attributes[name] = {**before, **value}
    return replace(
        first,
        files=files,
        tensors=tensors,
        objects=objects,
        stray=stray,
        planner_data=planner or None,
        attributes=attributes,
    )


def _same_geometry(first: StoredTensor, second: StoredTensor) -> bool:
    return (first.dtype, first.shape) == (second.dtype, second.shape) and all(
        np.array_equal(getattr(first, name), getattr(second, name)) for name in ("starts", "sizes")
    )
