"""Megatron-Core's `torch_dist`: torch DCP files with Megatron's own keys, common state and conventions.

    iter_0000010/
        .metadata            a pickle: every key, its shape, its chunks, and where each record lies
        metadata.json        which backend wrote it; written last, so its absence means an unfinished save
        common.pt            training args and the rest of the state (Megatron-Core <= 0.18; later inside the data files)
        __{rank}_{n}.distcp  records, one torch.save archive each, one after the other: file n of that rank

Sources: megatron/core/dist_checkpointing (tags core_v0.6.0 to core_v0.19.0), torch/distributed/checkpoint/filesystem.py.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from converters.catalog import Catalog, FileInfo, Problem, StoredArray
from converters.dtypes import dtype
from converters.errors import FormatError
from converters.formats.base import StoredArchive
from converters.formats.canonical import KeyedArray, canonical_tensors, iteration_of, object_info
from converters.formats.common_state import read_tree
from converters.formats.dcp_metadata import DcpMetadata, StoredTensor, read_metadata
from converters.formats.folder import read_small
from converters.formats.geometry import geometry_digest
from converters.formats.megatron import common_facts, find_flavour, find_producer
from converters.formats.registry import backend_of
from converters.formats.tiling import tiling_problem
from converters.names import printable
from converters.pickles import Obj, fields
from converters.records import Payload, TensorLocator, TensorRef, locate_tensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from converters.catalog import TensorInfo
    from converters.formats.base import Read

__all__ = ["TorchDistReader"]

_COMMON_OBJECT = "common_state/shard_0_1"


class TorchDistReader:
    """An open torch_dist checkpoint (also plain torch DCP folders, whose keys are taken as they are)."""

    name: ClassVar[str] = "torch_dist"

    def __init__(self, folder: Path, metadata: DcpMetadata, digest: str) -> None:
        self.files = [folder / name for name in metadata.files]
        self._metadata = metadata
        self._digest = digest
        self._locator = TensorLocator()
        self._sizes = _file_sizes(folder)
        self._inside: dict[tuple[str, TensorRef], int] = {}  # record numbers of tensors inside objects
        self._number_records()
        self.catalog = self._catalog(folder)

    @classmethod
    def open(cls, folder: Path) -> TorchDistReader:
        """Reads `.metadata` and the common state."""
        if not (folder / ".metadata").exists():
            raise FormatError(
                f"{printable(str(folder))} has no .metadata: the save was not finished, or the file was not copied",
                details=["without it nobody knows which bytes belong to which tensor"],
                hint="use the previous iteration, or copy the hidden file .metadata too (cp -a, rsync -a)",
            )
        raw = read_small(folder / ".metadata", limit=8 << 30)
        return cls(folder, read_metadata(raw, what=".metadata"), hashlib.sha256(raw).hexdigest())

    def file_of(self, record: int) -> int:
        """Position in `files` of the file that holds a record."""
        if record >= len(self._record_file):
            return self._metadata.objects[self._tensor_inside(record)[0]].file
        return int(self._record_file[record])

    def locate(self, record: int, read: Read) -> Payload:
        """Where in its file the elements of a record lie; the record is checked against the metadata."""
        if record >= len(self._record_file):
            key, ref = self._tensor_inside(record)
            stored = self._metadata.objects[key]
            what = f"{self.files[stored.file].name} at {stored.offset}: {printable(key)}"
            return locate_tensor(read, stored.offset, stored.length, ref, what)
        tensor = self._owner(record)
        row = record - self._first[tensor.key]
        start, length = int(self._record_start[record]), int(self._record_length[record])
        what = f"{self.files[self.file_of(record)].name} at {start}: {printable(tensor.key)}"
        shape = tuple(tensor.sizes[row].tolist())
        return self._locator.locate(read, start, length, what, expect=dtype(tensor.dtype), shape=shape)

    def archives(self, file: int) -> Iterator[StoredArchive]:
        """The records of a file, tensors and objects, in the order in which they lie in it."""
        rows = np.flatnonzero(self._record_file == file)
        found = [
            (start, length, record, self._owner(record).key)
            for start, length, record in zip(
                self._record_start[rows].tolist(), self._record_length[rows].tolist(), rows.tolist(), strict=True
            )
        ]
        found += [(o.offset, o.length, -1, o.key) for o in self._metadata.objects.values() if o.file == file]
        return (StoredArchive(*archive) for archive in sorted(found))

    def object_value(self, key: str) -> Any:
        """The inert tree of a stored object, None if there is none; Megatron's list of one around it is taken off."""
        return self._object_value(key)

    def object_array(self, key: str, ref: TensorRef) -> StoredArray:
        """A tensor inside a stored object as an array of one chunk, with a record number of its own.

        Args:
            key: The object's key.
            ref: The tensor, as `tensor_ref` makes it of a node in the object's value.
        """
        number = self._inside.setdefault((key, ref), len(self._record_file) + len(self._inside))
        starts, sizes = np.zeros((1, len(ref.shape)), np.int64), np.array([ref.shape], np.int64)
        return StoredArray(key, ref.shape, starts, sizes, np.array([number], np.int64))

    def _tensor_inside(self, record: int) -> tuple[str, TensorRef]:
        return next(itertools.islice(self._inside, record - len(self._record_file), None))

    @cached_property
    def geometry(self) -> tuple[str, int]:
        """Digest of keys, types, shapes, chunks and record lengths, and the number of records."""
        return geometry_digest(self._tensors, self._metadata.objects), len(self._record_file)

    def fingerprint(self) -> str:
        """Digest of `.metadata` and of the size and time of every data file."""
        digest = hashlib.sha256(self._digest.encode())
        for path in self.files:
            try:
                status = path.stat()
            except FileNotFoundError:
                continue
            digest.update(f"{path.name}:{status.st_size}:{status.st_mtime_ns};".encode())
        return digest.hexdigest()

    def _number_records(self) -> None:
        """Gives every tensor chunk a number: keys in file order, chunks in the order of `StoredTensor`."""
        tensors = list(self._metadata.tensors.values())
        counts = [len(t.file) for t in tensors]
        firsts = np.cumsum([0, *counts])
        self._first = {t.key: int(first) for t, first in zip(tensors, firsts, strict=False)}
        self._firsts, self._tensors = firsts, tensors
        empty = np.zeros(0, np.int64)
        self._record_file = np.concatenate([empty, *(t.file for t in tensors)])
        self._record_start = np.concatenate([empty, *(t.offset for t in tensors)])
        self._record_length = np.concatenate([empty, *(t.length for t in tensors)])

    def _owner(self, record: int) -> StoredTensor:
        return self._tensors[int(np.searchsorted(self._firsts, record, side="right")) - 1]

    def _array(self, tensor: StoredTensor) -> StoredArray:
        numbers = np.arange(len(tensor.file), dtype=np.int64) + self._first[tensor.key]
        records = np.where(tensor.file >= 0, numbers, -1)
        return StoredArray(tensor.key, tensor.shape, tensor.starts, tensor.sizes, records)

    def _catalog(self, folder: Path) -> Catalog:
        metadata = self._metadata
        problems: list[Problem] = [Problem("warning", text) for text in metadata.stray]
        stored = (
            KeyedArray(self._array(t), dtype(t.dtype), t.original_shape, tiling_problem(t))
            for t in metadata.tensors.values()
        )
        tensors = canonical_tensors(stored, problems)
        files = self._check_files(folder, tensors, problems)
        common = self._common(folder)
        facts = common_facts(common)
        flavour, config = find_flavour(folder, facts, [*metadata.tensors])
        backend = backend_of(folder)
        if backend is None and flavour != "torch DCP":
            problems.append(
                Problem("warning", "metadata.json is missing: Megatron writes it last, so the save may be unfinished")
            )
        if common is None and flavour != "torch DCP":
            text = "common.pt is missing: arguments, scheduler and parts of the optimizer are not known"
            problems.append(Problem("warning", text))
        evidence = {
            "save_id": _save_id(metadata),
            "embedded": _COMMON_OBJECT in metadata.objects,
            "class": metadata.top_class,
            "mcore_data": metadata.has_mcore_data,
            "plans": metadata.plans is not None,
            "planner_data": metadata.planner_data is not None,
        }
        return Catalog(
            path=folder,
            format=self.name,
            flavour=flavour,
            tensors=tensors,
            objects={
                key: object_info(key, metadata.files[o.file] if o.file >= 0 else "", o.offset, o.length)
                for key, o in metadata.objects.items()
            },
            args=facts.args,
            config=config,
            common=common,
            content=facts.content,
            iteration=facts.iteration if facts.iteration is not None else iteration_of(folder),
            producer=find_producer(facts, evidence),
            files=files,
            problems=tuple(problems),
            details={"metadata class": metadata.top_class},
        )

    def _common(self, folder: Path) -> Any:
        path = folder / "common.pt"
        if path.exists():
            return read_tree(path, "common.pt")
        return self._object_value(_COMMON_OBJECT)

    def _object_value(self, key: str) -> Any:
        """The inert tree of a stored object, None if there is none; Megatron wraps it in a list of one."""
        stored = self._metadata.objects.get(key)
        if stored is None or stored.file < 0 or not self.files[stored.file].exists():
            return None
        what = f"{self.files[stored.file].name} at {stored.offset}: {printable(key)}"
        value = read_tree(self.files[stored.file], what, stored.offset, stored.length)
        return value[0] if isinstance(value, list) and len(value) == 1 else value

    def _check_files(
        self, folder: Path, tensors: Mapping[str, TensorInfo], problems: list[Problem]
    ) -> tuple[FileInfo, ...]:
        """Compares what the metadata places in each file with what is on disk."""
        metadata = self._metadata
        objects = [o for o in metadata.objects.values() if o.file >= 0]
        held = self._record_file >= 0
        file = np.concatenate([self._record_file[held], np.array([o.file for o in objects], np.int64)]).astype(np.int64)
        start = np.concatenate([self._record_start[held], np.array([o.offset for o in objects], np.int64)])
        length = np.concatenate([self._record_length[held], np.array([o.length for o in objects], np.int64)])
        order = np.lexsort((start, file))
        file, start, length = file[order], start[order], length[order]
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
        known = {info.name for info in infos}
        for name, size in sorted(self._sizes.items()):
            if name not in known:
                role = _role(name)
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
                for position in {int(p) for p in np.unique(self._record_file[rows[rows >= 0]])} & bad.keys():
                    size = bad[position][1]
                    mine = rows[(rows >= 0)]
                    mine = mine[self._record_file[mine] == position]
                    if (size is None or (ends[mine] > size).any()) and name not in hit[position]:
                        hit[position].append(name)
        out = []
        for position, (name, size, needed) in bad.items():
            found = "is missing" if size is None else f"is {size:,} bytes"
            text = f"{printable(name)} {found}, the metadata needs {needed:,}"
            out.append(Problem("error", text, file=name, tensors=tuple(hit[position])))
        return out


def _save_id(metadata: DcpMetadata) -> str:
    """What the writer noted as the save's id: ours is `distckpt 0.1.0`, torch's a random one."""
    meta = metadata.attributes.get("storage_meta")
    found = fields(meta).get("save_id") if isinstance(meta, Obj) else None
    return found if isinstance(found, str) else ""


def _file_sizes(folder: Path) -> dict[str, int]:
    with os.scandir(folder) as entries:
        return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}


_ROLES = {
    ".metadata": "metadata",
    "metadata.json": "metadata",
    "integrity.json": "metadata",
    "common.pt": "common state",
    "run_config.yaml": "configuration",
    "train_state.pt": "configuration",
}


def _role(name: str) -> str:
    return "unreferenced" if name.endswith(".distcp") else _ROLES.get(name, "other")
