"""Megatron-Core's `zarr` backend (0.4 to 0.15) and NeMo 1's `model_weights/`: a folder for each key.

    iter_0000010/
        metadata.json                        which backend wrote it; written last
        common.pt                            training args and the rest of the state
        decoder.layers.mlp.linear_fc1.weight/
            .zarray  0.0.0  0.1.0  ...       raw chunks, see `array`
        optimizer.state.exp_avg.KEY/         in the shape of the parameter, whatever the optimizer was sharded like
        optimizer.state.exp_avg.KEY.sync/    locks, without content
        rng_state/
            shard_0.1_2.2.pt                 torch.save of the object itself, not of a list of one as in torch_dist

Chunks carry no checksum: what can be noticed is a file that is absent or has another size.

Sources: megatron/core/dist_checkpointing/strategies/{zarr,tensorstore,common}.py (tags core_v0.4.0 to core_v0.15.0).
"""

from __future__ import annotations

import bisect
import itertools
import math
import re
from collections import defaultdict
from typing import TYPE_CHECKING, Any, ClassVar

from converters.catalog import Catalog, FileInfo, ObjectInfo, Problem, TensorInfo
from converters.errors import FormatError
from converters.formats.base import Reader, digest_of
from converters.formats.canonical import KeyedArray, TensorsInside, canonical_tensors, object_info
from converters.formats.common_state import read_object
from converters.formats.folder import exists, read_small, scan, status, walk
from converters.formats.links import follows_links
from converters.formats.megatron import megatron_catalog
from converters.formats.zarr.array import ChunkFiles, parse_zarr_json, parse_zarray, scan_chunks
from converters.lazy import LazySequence
from converters.names import parse_key, printable
from converters.torchzip.records import Payload, locate_tensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from converters.chunks import StoredArray
    from converters.formats.folder import Entry
    from converters.torchzip.records import Read
    from converters.torchzip.tensor_refs import TensorRef

_SHARD = re.compile(r"shard_(\d+(?:\.\d+)*)_(\d+(?:\.\d+)*)\.pt")
_CHUNK = re.compile(r"\d+(\.\d+)*")
_ZARRAY_LIMIT = 1 << 20
_DOCUMENTS = {".zarray": parse_zarray, "zarr.json": parse_zarr_json}
_ROLES = {"metadata.json": "metadata", "common.pt": "common state"}


class ZarrReader(Reader):
    """An open zarr checkpoint. A record is a chunk file; after these are numbered the tensors inside objects."""

    name: ClassVar[str] = "zarr"

    def __init__(self, folder: Path, arrays: Mapping[str, ChunkFiles], objects: Mapping[str, ObjectInfo]) -> None:
        self._folder, self._arrays, self._objects = folder, arrays, objects
        self._firsts = [0, *itertools.accumulate(len(chunks.cells) for chunks in arrays.values())]
        self._inside = TensorsInside(self._firsts[-1])
        self._files = _Files(folder, self._firsts, arrays, [o.file for o in objects.values()])
        self.files: Sequence[Path] = self._files
        self.catalog = self._catalog()

    @classmethod
    def open(cls, folder: Path) -> ZarrReader:
        """Reads every `.zarray` and lists every folder; no chunk is opened."""
        arrays: dict[str, ChunkFiles] = {}
        objects: dict[str, ObjectInfo] = {}
        for key in _key_folders(folder):
            with scan(folder / key) as entries:
                names = {entry.name: entry for entry in entries}
            documents = [name for name in _DOCUMENTS if name in names]
            if documents and names[documents[0]].is_file(follow_symlinks=follows_links(folder)):
                spec = _DOCUMENTS[documents[0]](read_small(folder / key / documents[0], _ZARRAY_LIMIT), key)
                if spec.codec is not None:
                    spec.codec.check(printable(key))
                arrays[key] = scan_chunks(folder / key, names.values(), spec)
            elif any(_CHUNK.fullmatch(name) for name in names):
                raise FormatError(
                    f"{printable(key)} has chunk files but no .zarray, which states the tensor's type and shape",
                    hint="use the previous iteration, or copy the hidden files .zarray too (cp -a, rsync -a)",
                )
            objects |= {info.key: info for info in _shards(key, names, follow=follows_links(folder))}
        return cls(folder, arrays, objects)

    def file_of(self, record: int) -> int:
        """Position in `files` of the file that holds a record."""
        inside = self._inside.find(record)
        return self._firsts[-1] + list(self._objects).index(inside[0]) if inside else record

    def locate(self, record: int, read: Read) -> Payload:
        """Where in its file the elements of a record lie: a chunk is the whole file."""
        inside = self._inside.find(record)
        if inside is None:
            spec = self._files.owner(record)[1].spec
            if spec.codec is None:
                return Payload(0, spec.chunk_nbytes, None, 0, spec.chunk_nbytes)
            entry = status(self._files[record])
            return Payload(0, spec.chunk_nbytes, None, 0, entry.size if entry else 0, spec.codec.decode)
        stored = self._objects[inside[0]]
        return locate_tensor(read, stored.start, stored.length, inside[1], printable(stored.file))

    def object_value(self, key: str) -> Any:
        """The inert tree of a stored object, None if there is none."""
        stored = self._objects.get(key)
        if stored is None:
            return None
        return read_object(self._folder / stored.file, printable(stored.file))

    def object_array(self, key: str, ref: TensorRef) -> StoredArray:
        """A tensor inside a stored object as an array of one chunk, with a record number of its own."""
        return self._inside.array(key, ref)

    def fingerprint(self) -> str:
        """Digest of the names, sizes and times of all files, and of every `.zarray`."""
        files = ((name, state) for name, state in walk(self._folder) if ".sync/" not in name)
        return digest_of(f"{name}:{state.size}:{state.mtime_ns};" for name, state in files)

    def _catalog(self) -> Catalog:
        folder = self._folder
        problems: list[Problem] = []
        stored = (
            KeyedArray(chunks.stored(key, first), chunks.spec.dtype)
            for first, (key, chunks) in zip(self._firsts, self._arrays.items(), strict=False)
        )
        tensors = canonical_tensors(stored, problems)
        for key, chunks in self._arrays.items():
            problems += _chunk_problems(key, chunks)
        problems += _object_problems(self._objects.values())
        path = folder / "common.pt"
        common = read_object(path, "common.pt") if exists(path) else None
        return megatron_catalog(
            self.name,
            folder,
            common,
            [*self._arrays],
            problems,
            tensors=tensors,
            objects=dict(self._objects),
            producer=("Megatron-Core 0.4 to 0.15", "no other has the zarr backend"),
            files=tuple(self._file_infos(tensors)),
        )

    def _file_infos(self, tensors: Mapping[str, TensorInfo]) -> Iterator[FileInfo]:
        for key, chunks in self._arrays.items():
            nbytes = chunks.spec.chunk_nbytes
            for position in range(len(chunks.cells)):
                name = f"{key}/{chunks.file_name(position)}"
                size = nbytes if chunks.spec.codec is None else self._size(name) or 0
                yield FileInfo(name, size, 1, size, size)
            if fault := chunks.fault():
                yield FileInfo(f"{key}/{fault[0]}", self._size(f"{key}/{fault[0]}"), 1, nbytes)
            for name in (*(name for name in _DOCUMENTS if exists(self._folder / key / name)), *chunks.stray):
                role = "metadata" if name in _DOCUMENTS else "unreferenced"
                yield FileInfo(f"{key}/{name}", self._size(f"{key}/{name}"), role=role)
        for stored in self._objects.values():
            yield FileInfo(stored.file, stored.length, 1, stored.length, stored.length)
        with scan(self._folder) as entries:
            for entry in entries:
                if entry.is_file():
                    yield FileInfo(entry.name, entry.stat().st_size, role=_ROLES.get(entry.name, "other"))

    def _size(self, name: str) -> int | None:
        state = status(self._folder / name)
        return state and state.size


class _Files(LazySequence["Path"]):
    """The chunk files, then the objects' files; a path is made when it is asked for."""

    def __init__(self, folder: Path, firsts: list[int], arrays: Mapping[str, ChunkFiles], objects: list[str]) -> None:
        self._folder, self._firsts, self._arrays, self._objects = folder, firsts, [*arrays.items()], objects

    def __len__(self) -> int:
        return self._firsts[-1] + len(self._objects)

    def _item(self, position: int) -> Path:
        if position >= self._firsts[-1]:
            return self._folder / self._objects[position - self._firsts[-1]]
        key, chunks, row = self.owner(position)
        return self._folder / key / chunks.file_name(row)

    def owner(self, record: int) -> tuple[str, ChunkFiles, int]:
        """The array that a chunk file belongs to, and its row there."""
        number = bisect.bisect_right(self._firsts, record) - 1
        return *self._arrays[number], record - self._firsts[number]


def _key_folders(folder: Path) -> list[str]:
    """Names of the folders that may hold a key. Only what the folder lists is used: no name from inside a file is."""
    with scan(folder) as entries:
        folders = [entry for entry in entries if not entry.name.endswith(".sync") and entry.is_dir()]
    linked = next((entry.name for entry in folders if entry.is_symlink()), None)
    if linked is not None and not follows_links(folder):
        raise FormatError(
            f"{printable(linked)} is a symbolic link; a checkpoint's folders must lie in it themselves",
            hint="--follow-links (follow_links=True) reads it, if you trust where it leads",
        )
    return sorted(entry.name for entry in folders)


def _shards(key: str, entries: Mapping[str, Entry], *, follow: bool) -> Iterator[ObjectInfo]:
    """The objects of a key. Up to 0.6 their names lack the grid's last size, if it has several: `shard_0.1_2.pt`."""
    matches = [(match, entries[name]) for name in entries if (match := _SHARD.fullmatch(name))]
    shards = [([int(n) for n in m[1].split(".")], [int(n) for n in m[2].split(".")], entry) for m, entry in matches]
    for offset, grid, entry in sorted(shards, key=lambda shard: shard[:2]):
        if not entry.is_file(follow_symlinks=follow):
            raise FormatError(f"{printable(f'{key}/{entry.name}')} is not a regular file")
        if len(grid) == len(offset) - 1:
            grid = [*grid, 1 + max(position[-1] for position, *_ in shards)]
        text = f"{key}/shard_{'.'.join(map(str, offset))}_{'.'.join(map(str, grid))}"
        yield object_info(text, f"{key}/{entry.name}", 0, entry.stat().st_size, wrapped=False)


def _chunk_problems(key: str, chunks: ChunkFiles) -> Iterator[Problem]:
    fault = chunks.fault()
    if fault is not None:
        name, text = f"{key}/{fault[0]}", fault[1]
        parsed = parse_key(key)
        tensors = [parsed.template.format(*prefix) for prefix in chunks.incomplete(len(parsed.axes))]
        yield Problem("error", f"{printable(name)} {text}", file=name, tensors=tuple(tensors))
    for name in chunks.stray[:4]:
        text = f"{printable(f'{key}/{name}')} belongs to no chunk of {list(chunks.spec.shape)}; left over?"
        yield Problem("warning", text, file=f"{key}/{name}")


def _object_problems(objects: Iterable[ObjectInfo]) -> Iterator[Problem]:
    shards: dict[str, list[ObjectInfo]] = defaultdict(list)
    for stored in objects:
        shards[stored.name].append(stored)
    for name, present in shards.items():
        wanted = math.prod(present[0].grid)
        if len(present) != wanted:
            yield Problem("warning", f"{printable(name)} has {len(present)} of its {wanted} shards")
