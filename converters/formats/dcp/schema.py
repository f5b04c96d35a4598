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

from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np

from converters.errors import FormatError, UnsupportedError
from converters.formats.dcp.stored import (
    OBJECT,
    Chunks,
    DcpMetadata,
    Ints,
    Points,
    Records,
    StoredObject,
    StoredTensor,
    match,
)
from converters.pickles.columns import Bail, Batch, Columns
from converters.pickles.describe import describe
from converters.pickles.nodes import Global, Node, Obj, Run, Slot, fields

if TYPE_CHECKING:
    from collections.abc import Callable

    from converters.pickles.machine import Machine

_MAX_SIZE: Final = 1 << 62
_MAX_DIMS: Final = 32

_Shapes: TypeAlias = dict[int, tuple[str, tuple[int, ...]]]
"""dtype and shape of each tensor, by its position in `state_dict_metadata`."""


class Schema:
    """Matches the inert tree of one file."""

    def __init__(self, label: str, machine: Machine, columns: Columns | None) -> None:
        self.label = label
        self.machine = machine
        self.columns = columns
        self.lists = columns.batches(Columns.LIST) if columns else []
        self.entries = columns.batches(Columns.PAIR) if columns else []
        self.runs_met = 0
        self.state: list[str] = []
        self.keys: list[str] = []
        self.numbers: dict[str, int] = {}
        self.files: dict[str, int] = {}

    def fail(self, why: str, key: str | None = None) -> FormatError:
        """An error about one key, or about the file."""
        return FormatError(f"{self.label}: {why}", tensor=key, details=[key] if key else [])

    def read(self, root: Node) -> DcpMetadata:
        """The whole file."""
        if type(root) is not Obj or not root.func.name.endswith("Metadata"):
            raise self.fail(f"it holds {_brief(root)}, not a Metadata object")
        top = fields(root)
        state, stored = top.pop("state_dict_metadata", None), top.pop("storage_data", None)
        if type(state) is not dict or type(stored) is not dict:
            raise self.fail("it has no state_dict_metadata or no storage_data")
        mcore, plans = top.pop("mcore_data", None), top.pop("all_local_plans", None)
        planner_data = top.pop("planner_data", None)
        shapes = self._state(state)
        # a million chunks take hundreds of MB as objects: they go as soon as they are arrays
        chunks = self._chunks(state)
        state.clear()
        records = self._records(stored)
        stored.clear()
        if self.columns is not None and self.runs_met != len(self.columns.runs):
            raise Bail
        self.lists, self.entries, self.columns = [], [], None
        self.machine.memo.clear()
        files = self._sort_files(records)
        stray: list[str] = []
        objects = self._objects(shapes, records, stray)
        tensors = self._tensors(shapes, chunks, records, self._originals(mcore), stray)
        plan_count = -1 if self.machine.stopped_at is not None else len(plans) if isinstance(plans, list) else None
        return DcpMetadata(
            files, tensors, objects, sorted(stray), root.func.path, top, planner_data, plan_count, mcore is not None
        )

    # -- single values ---------------------------------------------------------------------------------

    def ints(self, value: Node, key: str) -> tuple[int, ...]:
        """A shape or an offset: `torch.Size`, tuple or list."""
        if type(value) is Obj and value.func.name == "Size" and len(value.args) == 1:
            value = value.args[0]
        if type(value) not in (tuple, list) or len(value) > _MAX_DIMS or any(type(item) is not int for item in value):
            raise self.fail(f"expected a shape or an offset, found {_brief(value)}", key)
        if any(not 0 <= item < _MAX_SIZE for item in value):
            raise self.fail(f"a shape or an offset is negative or too large: {_brief(value)}", key)
        return tuple(value)

    def _state(self, state: dict[Node, Node]) -> _Shapes:
        """Numbers the keys; dtype and shape of those that are tensors."""
        shapes: _Shapes = {}
        for number, (key, node) in enumerate(state.items()):
            if type(key) is not str:
                raise self.fail(f"a key of state_dict_metadata is not text but {_brief(key)}")
            self.keys.append(key)
            self.numbers[key] = number
            if type(node) is Obj and node.func.name == "BytesStorageMetadata":
                continue
            state_of = _attributes(node) if type(node) is Obj and node.func.name == "TensorStorageMetadata" else {}
            properties = state_of.get("properties")
            if type(properties) is not Obj:
                raise self.fail(f"neither a tensor nor an object: {_brief(node)}", key)
            values = properties.state
            dtype = values[0] if type(values) is tuple and values else _attributes(properties).get("dtype")
            if type(dtype) is not Global or dtype.module != "torch":
                raise self.fail(f"not a torch dtype: {_brief(dtype)}", key)
            shapes[number] = dtype.name, self.ints(state_of.get("size"), key)
        self.state = list(self.keys)
        return shapes

    def _originals(self, mcore: Node) -> dict[str, tuple[int, ...]]:
        originals = {}
        for key, extra in mcore.items() if isinstance(mcore, dict) else ():
            shape = extra.get("nd_reformulated_orig_global_shape") if isinstance(extra, dict) else None
            if shape is not None:
                originals[key] = self.ints(shape, str(key))
        return originals

    # -- chunks ----------------------------------------------------------------------------------------

    def _chunks(self, state: dict[Node, Node]) -> Chunks:
        owners: list[int] = []
        starts: list[tuple[int, ...]] = []
        sizes: list[tuple[int, ...]] = []
        owner_of_run = np.full(len(self.columns.runs) if self.columns else 0, -1, np.int32)
        for number, (key, node) in enumerate(state.items()):
            if node.func.name == "BytesStorageMetadata":
                continue
            chunks = _attributes(node).get("chunks")
            if type(chunks) is not list:
                raise self.fail(f"its chunks are {_brief(chunks)}", key)
            for chunk in chunks:
                if type(chunk) is Run:
                    if owner_of_run[chunk.number] >= 0:
                        raise Bail
                    owner_of_run[chunk.number] = number
                    self.runs_met += 1
                    continue
                part = _attributes(chunk) if type(chunk) is Obj else {}
                owners.append(number)
                starts.append(self.ints(part.get("offsets"), key))
                sizes.append(self.ints(part.get("sizes"), key))
        owner, start, size = [np.array(owners, np.int32)], [Points.of(starts)], [Points.of(sizes)]
        for batch in self.lists:
            part = _fields_of(batch.tree)
            owner.append(owner_of_run[batch.run])
            start.append(self._points(part.get("offsets"), batch))
            size.append(self._points(part.get("sizes"), batch))
        chunks = Chunks(np.concatenate(owner), Points.joined(start), Points.joined(size))
        if chunks.owner.min(initial=0) < 0:
            raise Bail
        return chunks

    # -- records ---------------------------------------------------------------------------------------

    def _records(self, stored: dict[Node, Node]) -> Records:
        owners: list[int] = []
        starts: list[tuple[int, ...] | None] = []
        locations: list[tuple[int, int, int]] = []
        for index, info in stored.items():
            if type(index) is Run:
                if type(info) is not Run or (info.number, info.count) != (index.number, 0):
                    raise Bail
                self.runs_met += 1
                continue
            state = _attributes(index) if type(index) is Obj else {}
            key, where = state.get("fqn"), state.get("offset")
            if type(key) is not str:
                raise self.fail(f"a key of storage_data is not a MetadataIndex but {_brief(index)}")
            owners.append(self._number(key))
            starts.append(None if where is None else self.ints(where, key))
            locations.append(self._location_of(info, key))
        owner, start = [np.array(owners, np.int32)], [Points.of(starts)]
        location = [np.array(locations, np.int64).reshape(-1, 3)]
        for batch in self.entries:
            index, info = (_fields_of(part) for part in batch.tree)
            owner.append(self._texts(index.get("fqn"), batch, self._number))
            where = index.get("offset")
            start.append(self._nowhere(batch) if where is None else self._points(where, batch))
            if info.get("transform_descriptors"):
                raise Bail
            columns = [
                self._texts(info.get("relative_path"), batch, self._file),
                self._ints_of(info.get("offset"), batch),
                self._ints_of(info.get("length"), batch),
            ]
            location.append(np.stack(columns, axis=1))
        return Records(np.concatenate(owner), Points.joined(start), np.concatenate(location))

    def _number(self, key: str) -> int:
        number = self.numbers.setdefault(key, len(self.keys))
        if number == len(self.keys):
            self.keys.append(key)
        return number

    def _location_of(self, info: Node, key: str) -> tuple[int, int, int]:
        state = _attributes(info) if type(info) is Obj else {}
        path = state.get("relative_path")
        if type(path) is not str:
            raise self.fail(f"a record is not a _StorageInfo but {_brief(info)}", key)
        if state.get("transform_descriptors"):
            raise UnsupportedError(
                f"{self.label}: its records are compressed or transformed: {_brief(state['transform_descriptors'])}",
                details=[key],
                tensor=key,
            )
        offset, length = self.ints((state.get("offset"), state.get("length")), key)
        return self._file(path), offset, length

    def _file(self, path: str) -> int:
        if path not in self.files:
            if not path or path in {".", ".."} or len(path) > 255 or any(char in path for char in "/\\\0"):
                raise self.fail(f"a record lies outside of the checkpoint's own folder: {path!r:.300}")
            self.files[path] = len(self.files)
        return self.files[path]

    # -- columns ---------------------------------------------------------------------------------------

    def _nowhere(self, batch: Batch) -> Points:
        return Points(np.zeros((len(batch.run), 0), np.int64), np.full(len(batch.run), OBJECT, np.int8))

    def _points(self, node: Node, batch: Batch, rows: Ints | None = None) -> Points:
        """The shapes or offsets that a node of the batch's tree stands for, of all items or of the given rows."""
        count = len(batch.run) if rows is None else len(rows)
        if type(node) is Slot and node.is_ref:
            return self._referred(batch.values[node.index] if rows is None else batch.values[node.index][rows])
        if type(node) is Obj and node.func.name == "Size" and len(node.args) == 1:
            node = node.args[0]
        if type(node) is not tuple or len(node) > _MAX_DIMS:
            raise Bail
        at = np.zeros((count, len(node)), np.int64)
        for dim, item in enumerate(node):
            values = self._ints_of(item, batch)
            at[:, dim] = values if rows is None else values[rows]
        return Points(at, np.full(count, len(node), np.int8))

    def _referred(self, indexes: Ints) -> Points:
        """The shapes or offsets that memo indexes refer to: in items taken as columns, or made."""
        unique, inverse = np.unique(indexes, return_inverse=True)
        left = np.ones(len(unique), bool)
        hits, parts = [], []
        for batch in self.lists + self.entries:
            for tree, memo_indexes in batch.parts:
                item = np.minimum(np.searchsorted(memo_indexes, unique), len(memo_indexes) - 1)
                hit = np.flatnonzero(memo_indexes[item] == unique)
                if len(hit):
                    hits.append(hit)
                    parts.append(self._points(tree, batch, item[hit]))
                    left[hit] = False
        unmatched = np.flatnonzero(left)
        hits.append(unmatched)
        parts.append(Points.of([self._memo_point(index) for index in unique[unmatched].tolist()]))
        back = np.empty(len(unique), np.int64)
        back[np.concatenate(hits)] = np.arange(len(unique))
        return Points.joined(parts).take(back[inverse])

    def _memo_point(self, index: int) -> tuple[int, ...]:
        try:
            return self.ints(self.machine.memo[index], "")
        except FormatError:
            raise Bail from None

    def _ints_of(self, node: Node, batch: Batch) -> Ints:
        if type(node) is Slot and not node.is_ref:
            values = batch.values[node.index]
        elif type(node) is int:
            values = np.full(len(batch.run), node, np.int64)
        else:
            raise Bail
        # Read without columns, the error names the key.
        if len(values) and (values.min() < 0 or values.max() >= _MAX_SIZE):
            raise Bail
        return values

    def _texts(self, node: Node, batch: Batch, number: Callable[[str], int]) -> Ints:
        if type(node) is str:
            return np.full(len(batch.run), number(node), np.int32)
        if type(node) is not Slot or not node.is_ref or self.columns is None:
            raise Bail
        codes, strings = self.columns.texts(self.machine, batch.values[node.index])
        used, inverse = np.unique(codes, return_inverse=True)
        return np.array([number(strings[code]) for code in used.tolist()], np.int32)[inverse]

    # -- bringing together -----------------------------------------------------------------------------

    def _sort_files(self, records: Records) -> list[str]:
        """Number the files in sorted order, so that the order of reading does not show."""
        names = sorted(self.files)
        rank = {path: number for number, path in enumerate(names)}
        if names:
            records.location[:, 0] = np.array([rank[path] for path in self.files], np.int64)[records.location[:, 0]]
        return names

    def _objects(self, shapes: _Shapes, records: Records, stray: list[str]) -> dict[str, StoredObject]:
        first_rows: dict[int, int] = {}
        for row in np.flatnonzero(records.starts.ndim == OBJECT).tolist():
            number = int(records.owner[row])
            if number >= len(self.state) or number in shapes:
                stray.append(f"{self.keys[number]}, an object")
            elif number in first_rows:
                raise self.fail("two records for one object", self.keys[number])
            else:
                first_rows[number] = row
        objects = {}
        for number, key in enumerate(self.state):
            if number not in shapes:
                file, offset, length = (
                    records.location[first_rows[number]].tolist() if number in first_rows else (-1, 0, 0)
                )
                objects[key] = StoredObject(key, file, offset, length)
        return objects

    def _tensors(
        self, shapes: _Shapes, chunks: Chunks, records: Records, originals: dict[str, tuple[int, ...]], stray: list[str]
    ) -> dict[str, StoredTensor]:
        ndim = np.full(len(self.keys), OBJECT - 1, np.int64)
        for number, (_, shape) in shapes.items():
            ndim[number] = len(shape)
        for label, points in (("offset", chunks.starts), ("size", chunks.sizes)):
            wrong = np.flatnonzero(points.ndim != ndim[chunks.owner])
            if len(wrong):
                key, row = self.keys[chunks.owner[wrong[0]]], int(wrong[0])
                raise self.fail(
                    f"a chunk's {label} has {points.ndim[row]} dimensions, the tensor {ndim[chunks.owner[row]]}", key
                )
        fits = records.starts.ndim == ndim[records.owner]
        stray += self._describe(records, np.flatnonzero(~fits & (records.starts.ndim != OBJECT)))
        rows = np.flatnonzero(fits)
        tensor_records = records
        if len(rows) < len(fits):
            tensor_records = Records(records.owner[rows], records.starts.take(rows), records.location[rows])
        matched = match(chunks, tensor_records)
        if len(matched.twice):
            raise self.fail("two records for one chunk", self.keys[tensor_records.owner[matched.twice[0]]])
        stray += self._describe(tensor_records, matched.unused)
        location = np.concatenate([tensor_records.location, [[-1, 0, 0]]])[matched.records]
        file = location[:, 0].astype(np.int32)
        starts, sizes = chunks.starts.at[matched.chunks], chunks.sizes.at[matched.chunks]
        bounds = np.searchsorted(chunks.owner[matched.chunks], np.arange(len(self.state) + 1)).tolist()
        tensors = {}
        for number, (dtype, shape) in shapes.items():
            key, span, width = self.keys[number], slice(bounds[number], bounds[number + 1]), len(shape)
            tensors[key] = StoredTensor(
                key, dtype, shape, starts[span, :width], sizes[span, :width],
                file[span], location[span, 1], location[span, 2], originals.get(key),
            )  # fmt: skip
        return tensors

    def _describe(self, records: Records, rows: Ints) -> list[str]:
        return [
            f"{self.keys[records.owner[row]]} at {tuple(records.starts.at[row, : records.starts.ndim[row]].tolist())}"
            for row in rows.tolist()
        ]


def _attributes(node: Obj) -> dict[str, Node]:
    """`fields`, without a copy where there need not be one."""
    return node.state if type(node.state) is dict else fields(node)


def _fields_of(tree: Node) -> dict[str, Node]:
    if type(tree) is not Obj:
        raise Bail
    return fields(tree)


def _brief(node: Node) -> str:
    return f"{describe(node, max_depth=2, max_nodes=16)!r:.200}"  # repr() itself knows no bounds
