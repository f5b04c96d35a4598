"""The schema of torch DCP's `.metadata`: which chunks of which tensors lie where, as arrays.

`.metadata` is a pickle of `torch.distributed.checkpoint.metadata.Metadata` (or of a subclass, or a
relative's copy of it). Nothing of it is loaded: the inert tree is matched against the schema below, by bare
class names, since Megatron 0.15, veScale and ByteCheckpoint keep these classes in packages of their own.

    Metadata.state_dict_metadata   {key: TensorStorageMetadata(properties, size, chunks) | BytesStorageMetadata}
    Metadata.storage_data          {MetadataIndex(fqn, offset | None): _StorageInfo(relative_path, offset, length)}
    Metadata.mcore_data            {key: {"nd_reformulated_orig_global_shape": shape}}    Megatron-Core 0.8-0.15
    Metadata.all_local_plans       every rank's save plan, often most of the file, not needed: not parsed
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from converters.errors import FormatError
from converters.pickles import Global, Limits, Node, Obj, fields
from converters.pickles.machine import Machine
from converters.pickles.policy import hostile_tail

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["DcpMetadata", "StoredObject", "StoredTensor", "read_metadata"]

_MAX_SIZE = 1 << 62
_MAX_DIMS = 32


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    """One tensor key of `state_dict_metadata` with its chunks, n of them, sorted by offset.

    Args:
        key: As stored.
        dtype: The name after `torch.`: "bfloat16".
        shape: Global shape as stored (of the flattened form, see `original_shape`).
        starts: (n, ndim) offsets of the chunks in the tensor.
        sizes: (n, ndim) shapes of the chunks.
        file: (n,) index into `DcpMetadata.files`; -1 if `storage_data` has no record for the chunk.
        offset: (n,) first byte of the record in its file.
        length: (n,) bytes of the record, its zip container included.
        original_shape: Shape before Megatron-Core 0.8-0.15 flattened the blocks
            (`nd_reformulated_orig_global_shape`); None for an ordinary tensor.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    file: NDArray[np.int32]
    offset: NDArray[np.int64]
    length: NDArray[np.int64]
    original_shape: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One non-tensor key.

    Args:
        key: As stored: `rng_state/shard_0.0_2.2`.
        file: Index into `DcpMetadata.files`; -1 if `storage_data` has no record for it.
        offset: First byte of the record in its file.
        length: Bytes of the record.
    """

    key: str
    file: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True, eq=False)
class DcpMetadata:
    """What `.metadata` says, with nothing checked against the files it names.

    Args:
        files: `relative_path`s, in order of first mention; each is a bare file name.
        tensors: By key, in the order of `state_dict_metadata`.
        objects: By key, likewise.
        stray: `storage_data` entries that belong to no known key or chunk, in words.
        top_class: Full name of the outermost class.
        attributes: The other attributes (`version`, `storage_meta`), inert.
        planner_data: As stored, inert; None if absent or None.
        plans: Number of `all_local_plans`; None if there are none, -1 if they are there but were not read.
        has_mcore_data: Whether Megatron-Core 0.8-0.15 wrote it.
    """

    files: list[str]
    tensors: dict[str, StoredTensor]
    objects: dict[str, StoredObject]
    stray: list[str]
    top_class: str
    attributes: dict[str, Node]
    planner_data: Node
    plans: int | None
    has_mcore_data: bool


def read_metadata(data: bytes, what: str = ".metadata") -> DcpMetadata:
    """Read a `.metadata` file without loading it.

    Args:
        data: The file's bytes.
        what: Names the file in errors.

    Returns:
        Every chunk and record as arrays.

    Raises:
        FormatError: Not a `.metadata`, unsafe, or with values that cannot be: negative or absurd sizes,
            paths that leave the directory, compressed records.
    """
    limits = Limits(ops_per_byte=0.5, tuple_keys=1 << 16)
    # all_local_plans is last whenever it is there (Megatron-Core 0.11 and later set it after construction);
    # were it followed by mcore_data, that name would occur after it.
    machine = Machine(data, limits, what, stop_key="all_local_plans")
    root = machine.run()
    if machine.stopped_at is None and machine.pos != len(data):
        raise FormatError(f"{what}: {len(data) - machine.pos} bytes follow the end of the pickle")
    if machine.stopped_at is not None:
        _check_tail(data, machine.stopped_at, what)
    return _Schema(what).read(root, machine.stopped_at is not None)


def _check_tail(data: bytes, start: int, what: str) -> None:
    if not data.endswith(b"ub."):
        raise FormatError(f"{what}: the pickle does not end where the file does; it may be truncated")
    found = hostile_tail(data, start)
    if found is not None:
        raise FormatError(f"{what}: hostile global in the save plans at byte {found}")


@dataclass(slots=True)
class _Rows:
    """Chunks or records met so far, as columns of Python values."""

    owner: list[int] = field(default_factory=list)
    starts: list[tuple[int, ...]] = field(default_factory=list)
    a: list[Any] = field(default_factory=list)
    b: list[int] = field(default_factory=list)
    c: list[int] = field(default_factory=list)


class _Schema:
    """Matches the inert tree of one file."""

    def __init__(self, what: str) -> None:
        self.what = what

    def fail(self, why: str, key: str | None = None) -> FormatError:
        return FormatError(f"{self.what}: {why}", tensor=key, details=[key] if key else [])

    def read(self, root: Node, stopped: bool) -> DcpMetadata:
        if type(root) is not Obj or not root.func.name.endswith("Metadata"):
            raise self.fail(f"it holds {root!r:.200}, not a Metadata object")
        top = fields(root)
        known = {"state_dict_metadata", "storage_data", "planner_data", "mcore_data", "all_local_plans"}
        originals = self._mcore(top.get("mcore_data"))
        state, records = top.get("state_dict_metadata"), top.get("storage_data")
        if not isinstance(state, dict) or not isinstance(records, dict):
            raise self.fail("it has no state_dict_metadata or no storage_data")
        plans = top.get("all_local_plans")
        files: dict[str, int] = {}
        table: dict[tuple[str, tuple[int, ...] | None], tuple[int, int, int]] = {}
        for index, info in records.items():
            key, where = self._index(index)
            table[key, where] = self._info(info, key, files)
        tensors, objects = {}, {}
        for key, value in state.items():
            if type(key) is not str:
                raise self.fail(f"a key of state_dict_metadata is not text: {key!r:.100}")
            if type(value) is Obj and value.func.name == "BytesStorageMetadata":
                objects[key] = StoredObject(key, *table.pop((key, None), (-1, 0, 0)))
            else:
                tensors[key] = self._tensor(key, value, table, originals.get(key))
        return DcpMetadata(
            list(files), tensors, objects, [f"{key} at {where}" for key, where in table], root.func.path,
            {name: value for name, value in top.items() if name not in known}, top.get("planner_data"),
            -1 if stopped else len(plans) if isinstance(plans, list) else None, "mcore_data" in top,
        )  # fmt: skip

    def _mcore(self, mcore: Node) -> dict[str, tuple[int, ...]]:
        found = {}
        for key, extra in mcore.items() if isinstance(mcore, dict) else ():
            shape = extra.get("nd_reformulated_orig_global_shape") if isinstance(extra, dict) else None
            if shape is not None:
                found[key] = self._ints(shape, key)
        return found

    def _ints(self, value: Node, key: str) -> tuple[int, ...]:
        if type(value) is Obj and value.func.name == "Size" and len(value.args) == 1:
            value = value.args[0]
        if type(value) is list:
            value = tuple(value)
        if type(value) is not tuple or len(value) > _MAX_DIMS or any(type(item) is not int for item in value):
            raise self.fail(f"expected a shape, found {value!r:.100}", key)
        if any(not 0 <= item < _MAX_SIZE for item in value):
            raise self.fail(f"a shape or an offset is negative or absurd: {value!r:.100}", key)
        return value

    def _index(self, node: Node) -> tuple[str, tuple[int, ...] | None]:
        state = fields(node) if type(node) is Obj else {}
        key = state.get("fqn")
        if type(key) is not str:
            raise self.fail(f"a storage_data key is not a MetadataIndex: {node!r:.100}")
        where = state.get("offset")
        return key, None if where is None else self._ints(where, key)

    def _info(self, node: Node, key: str, files: dict[str, int]) -> tuple[int, int, int]:
        state = fields(node) if type(node) is Obj else {}
        path, offset, length = (state.get(name) for name in ("relative_path", "offset", "length"))
        if type(path) is not str:
            raise self.fail(f"a record is not a _StorageInfo: {node!r:.100}", key)
        if path not in files:
            if not path or path in {".", ".."} or "/" in path or "\\" in path or "\0" in path:
                raise self.fail(f"a record lies outside of the checkpoint: {path!r:.200}", key)
            files[path] = len(files)
        if state.get("transform_descriptors"):
            raise self.fail(f"the records are compressed or transformed: {state['transform_descriptors']!r:.100}", key)
        offset, length = self._ints((offset, length), key)
        return files[path], offset, length

    def _tensor(self, key: str, node: Node, table: Any, original: tuple[int, ...] | None) -> StoredTensor:
        state = fields(node) if type(node) is Obj and node.func.name == "TensorStorageMetadata" else {}
        properties, chunks = state.get("properties"), state.get("chunks")
        if type(properties) is not Obj or type(chunks) is not list:
            raise self.fail(f"neither a tensor nor an object: {node!r:.100}", key)
        dtype = properties.state[0] if type(properties.state) is tuple else fields(properties).get("dtype")
        if type(dtype) is not Global or dtype.module != "torch":
            raise self.fail(f"not a torch dtype: {dtype!r:.100}", key)
        shape = self._ints(state.get("size"), key)
        rows = []
        for chunk in chunks:
            part = fields(chunk) if type(chunk) is Obj else {}
            start, size = self._ints(part.get("offsets"), key), self._ints(part.get("sizes"), key)
            if len(start) != len(shape) or len(size) != len(shape):
                raise self.fail(f"a chunk has {len(start)} dimensions, the tensor {len(shape)}", key)
            rows.append((start, size, *table.pop((key, start), (-1, 0, 0))))
        rows.sort()
        grid = np.array([row[:2] for row in rows], np.int64).reshape(len(rows), 2, len(shape))
        place = np.array([row[2:] for row in rows], np.int64).reshape(len(rows), 3)
        return StoredTensor(
            key, dtype.name, shape, grid[:, 0], grid[:, 1], place[:, 0].astype(np.int32), place[:, 1],
            place[:, 2], original,
        )  # fmt: skip
