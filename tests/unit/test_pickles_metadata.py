"""`.metadata` is read as torch means it, with and without columns alike, and nonsense is refused by key."""

from __future__ import annotations

import gc
import pickle
import random
import tracemalloc
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

import bench_metadata
from converters.errors import FormatError
from converters.formats.dcp.metadata import read_metadata
from converters.pickles.columns import Columns
from converters.pickles.emit import dumps
from converters.pickles.limits import Limits
from converters.pickles.machine import Machine, parse
from converters.pickles.nodes import Global, Obj, fields, set_field

if TYPE_CHECKING:
    from converters.formats.dcp.stored import DcpMetadata

GOLDEN = Path(__file__).parents[1] / "golden"
REAL = sorted(path for path in GOLDEN.rglob("*metadata") if path.name == ".metadata" or path.parent.name == "pickles")


def assert_same(a: DcpMetadata, b: DcpMetadata) -> None:
    assert a.files == b.files
    assert a.objects == b.objects
    assert a.stray == b.stray
    assert list(a.tensors) == list(b.tensors)
    assert (a.top_class, a.plans, a.has_mcore_data) == (b.top_class, b.plans, b.has_mcore_data)
    for x, y in zip(a.tensors.values(), b.tensors.values(), strict=True):
        assert (x.key, x.dtype, x.shape, x.original_shape) == (y.key, y.dtype, y.shape, y.original_shape)
        for name in ("starts", "sizes", "file", "offset", "length"):
            left, right = getattr(x, name), getattr(y, name)
            assert left.dtype == right.dtype
            assert np.array_equal(left, right), (x.key, name)


def assert_true(found: DcpMetadata, truth: Metadata) -> None:
    """`found` says what the real object says."""
    records = {(index.fqn, index.offset): info for index, info in truth.storage_data.items()}
    assert set(found.tensors) | set(found.objects) == set(truth.state_dict_metadata)
    for key, tensor in found.tensors.items():
        real = truth.state_dict_metadata[key]
        assert tensor.dtype == str(real.properties.dtype).removeprefix("torch.")
        assert tensor.shape == tuple(real.size)
        chunks = sorted((tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in real.chunks)
        assert chunks == list(zip(map(tuple, tensor.starts.tolist()), map(tuple, tensor.sizes.tolist()), strict=True))
        for row, (start, _) in enumerate(chunks):
            info = records[key, torch.Size(start)]
            assert found.files[tensor.file[row]] == info.relative_path
            assert (tensor.offset[row], tensor.length[row]) == (info.offset, info.length)
    for key, stored in found.objects.items():
        info = records[key, None]
        assert (found.files[stored.file], stored.offset, stored.length) == (
            info.relative_path,
            info.offset,
            info.length,
        )


def metadata(seed: int, keys: int = 40, chunks: int = 30) -> Metadata:
    """A random checkpoint: sizes of every width, shared and separate objects, hints or none, objects among tensors."""
    rng = random.Random(seed)
    state, storage = {}, []
    hints, share_offsets, share_names, share_sizes = (rng.random() < 0.5 for _ in range(4))
    for number in range(keys):
        name = f"decoder.layers.{number}.weight" + "x" * rng.choice([0, 0, 0, 250])
        path = f"__{rng.randrange(5)}_{rng.randrange(2)}.distcp"
        if rng.random() < 0.15:
            state[f"{name}/shard_0_1"] = BytesStorageMetadata()
            storage.append((MetadataIndex(f"{name}/shard_0_1"), _StorageInfo(path, number, 1 << rng.randrange(40))))
            continue
        dims = rng.randrange(5)
        count = rng.choice([1, 1, 2, 3, rng.randrange(1, chunks + 1)]) if dims else 1
        step = 1 << rng.choice([1, 7, 15, 30, 40])
        size = torch.Size([step] + [3] * (dims - 1) if dims else [])
        items = []
        for chunk in range(count):
            offset = torch.Size([chunk * step] + [0] * (dims - 1) if dims else [])
            items.append(ChunkStorageMetadata(offset, size if share_sizes else torch.Size(list(size))))
            index = MetadataIndex(
                name if share_names else "".join([name[:3], name[3:]]), None, chunk if hints else None
            )
            object.__setattr__(index, "offset", offset if share_offsets else torch.Size(list(offset)))
            storage.append(
                (index, _StorageInfo(path, rng.getrandbits(rng.choice([7, 15, 31, 50])), rng.getrandbits(31)))
            )
        rng.shuffle(items)
        whole = torch.Size([count * step, *size[1:]]) if dims else size
        dtype = rng.choice([torch.bfloat16, torch.float32, torch.uint8, torch.float8_e4m3fn])
        state[name] = TensorStorageMetadata(TensorProperties(dtype), whole, items)
    rng.shuffle(storage)
    return Metadata(state, rng.choice([None, {"a": ("a", 0)}]), dict(storage), StorageMeta("x"), "1.0.0")


@pytest.mark.parametrize("path", REAL, ids=lambda path: f"{path.parent.parent.name}-{path.name}")
def test_real_files(path):
    data = path.read_bytes()
    found = read_metadata(data)
    assert found.tensors
    assert not found.stray
    assert all((tensor.file >= 0).all() for tensor in found.tensors.values())
    assert all(stored.file >= 0 for stored in found.objects.values())
    assert_same(found, read_metadata(data, fast=False))


def test_attributes_of_real_files():
    old = read_metadata((GOLDEN / "pickles" / "v009_modelspace.metadata").read_bytes())
    assert old.has_mcore_data
    assert old.plans is None
    assert any(tensor.original_shape for tensor in old.tensors.values())
    new = read_metadata((GOLDEN / "pickles" / "v019_fullyreshardable.metadata").read_bytes())
    assert not new.has_mcore_data
    assert new.plans == -1
    assert new.attributes["version"] == "1.0.0"
    assert new.top_class == "torch.distributed.checkpoint.metadata.Metadata"


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("seed", range(12))
def test_random_checkpoints(seed, protocol):
    truth = metadata(seed)
    data = pickle.dumps(truth, protocol)
    found = read_metadata(data)
    assert_true(found, truth)
    assert_same(found, read_metadata(data, fast=False))


@pytest.mark.parametrize("protocol", [4, 5])
def test_most_items_are_read_as_columns(protocol):
    truth = metadata(3, keys=8, chunks=3000)
    data = pickle.dumps(truth, protocol)
    columns = Columns(data)
    Machine(data, Limits(ops_per_byte=1), "x", columns=columns).run()
    count = sum(len(value.chunks) for value in truth.state_dict_metadata.values() if hasattr(value, "chunks"))
    for kind in (Columns.LIST, Columns.PAIR):
        assert sum(len(batch.run) for batch in columns.batches(kind)) > 0.9 * count
    assert_true(read_metadata(data), truth)


def test_mutations_are_read_alike_with_and_without_columns():
    """Also of damaged files, whatever is not refused means the same both ways."""
    original = pickle.dumps(metadata(5, keys=12, chunks=60), 4)
    rng = random.Random(1)
    accepted = 0
    for _ in range(150):
        mutant = bytearray(original)
        for _ in range(rng.choice([1, 1, 2])):
            at = rng.randrange(2, len(mutant))
            if rng.random() < 0.7:
                mutant[at] = (mutant[at] + rng.choice([1, 255, 16, 128])) % 256
            else:
                other = rng.randrange(len(original))
                mutant[at : at + 8] = original[other : other + 8]
        outcomes = []
        for fast in (True, False):
            try:
                outcomes.append(read_metadata(bytes(mutant), fast=fast))
            except FormatError as error:
                outcomes.append(str(error))
        if isinstance(outcomes[1], str):
            assert isinstance(outcomes[0], str)  # perhaps another one of several errors
        else:
            accepted += 1
            assert_same(*outcomes)
    assert accepted > 5


def test_strings_that_look_like_items():
    """The bytes of a whole item inside a string are not an item."""
    truth = metadata(7, keys=6, chunks=40)
    plain = pickle.dumps(truth, 4)
    at = plain.index(b"offsets")
    bait = plain[at - 30 : at + 400].decode("latin-1")
    index = MetadataIndex(bait)
    truth.state_dict_metadata[bait] = BytesStorageMetadata()
    truth.storage_data = {index: _StorageInfo("__0_0.distcp", 1, 2), **truth.storage_data}
    assert_true(read_metadata(pickle.dumps(truth, 4)), truth)


def test_renamed_classes_are_matched_by_bare_name():
    tree = parse(pickle.dumps(metadata(2), 4))
    seen = set()
    stack = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, Obj) and id(node) not in seen:
            seen.add(id(node))
            if node.func.module.startswith("torch.distributed"):
                node.func.module = "vescale.checkpoint.storage"
            stack += [*node.args, node.state]
        elif isinstance(node, dict):
            stack += [*node.keys(), *node.values()]
        elif isinstance(node, (list, tuple)):
            stack += node
    found = read_metadata(dumps(tree, 4))
    assert found.top_class == "vescale.checkpoint.storage.Metadata"
    assert_same(read_metadata(pickle.dumps(metadata(2), 4)), _with_class(found))


def _with_class(found: DcpMetadata) -> DcpMetadata:
    object.__setattr__(found, "top_class", "torch.distributed.checkpoint.metadata.Metadata")
    return found


def small() -> Obj:
    """One tensor in two chunks and one object, as an inert tree that can be spoiled."""
    properties = TensorProperties(torch.float32)
    chunks = [ChunkStorageMetadata(torch.Size([n * 2]), torch.Size([2])) for n in range(2)]
    state = {"w": TensorStorageMetadata(properties, torch.Size([4]), chunks), "o/shard_0_1": BytesStorageMetadata()}
    storage = {MetadataIndex("w", [n * 2]): _StorageInfo("__0_0.distcp", n * 10, 10) for n in range(2)}
    storage[MetadataIndex("o/shard_0_1")] = _StorageInfo("__0_0.distcp", 20, 5)
    return parse(pickle.dumps(Metadata(state, None, storage), 4))


def info(tree: Obj) -> Obj:
    return next(iter(tree.state["storage_data"].values()))


def chunk(tree: Obj) -> Obj:
    return fields(tree.state["state_dict_metadata"]["w"])["chunks"][1]


def size(*values) -> Obj:
    return Obj(Global("torch", "Size"), (values,))


@pytest.mark.parametrize(("spoil", "says"), [
    (lambda t: set_field(info(t), "relative_path", "../x.distcp"), "outside"),
    (lambda t: set_field(info(t), "relative_path", "/etc/passwd"), "outside"),
    (lambda t: set_field(info(t), "relative_path", "a/b"), "outside"),
    (lambda t: set_field(info(t), "relative_path", ".."), "outside"),
    (lambda t: set_field(info(t), "relative_path", "a\0b"), "outside"),
    (lambda t: set_field(info(t), "relative_path", ""), "outside"),
    (lambda t: set_field(info(t), "relative_path", 7), "_StorageInfo"),
    (lambda t: set_field(info(t), "offset", -1), "negative or too large"),
    (lambda t: set_field(info(t), "length", 1 << 63), "negative or too large"),
    (lambda t: set_field(info(t), "length", None), "expected a shape"),
    (lambda t: set_field(info(t), "transform_descriptors", ["zstd"]), "compressed or transformed"),
    (lambda t: set_field(chunk(t), "offsets", size(1, 2)), "2 dimensions, the tensor 1"),
    (lambda t: set_field(chunk(t), "sizes", size()), "0 dimensions, the tensor 1"),
    (lambda t: set_field(chunk(t), "sizes", size(-1)), "negative or too large"),
    (lambda t: set_field(chunk(t), "sizes", size(1.5)), "expected a shape"),
    (lambda t: set_field(chunk(t), "sizes", None), "expected a shape"),
    (lambda t: t.state["state_dict_metadata"].update({3: 4}), "not text"),
    (lambda t: t.state["state_dict_metadata"].update({"x": 4}), "neither a tensor nor an object"),
    (lambda t: t.state["storage_data"].update({"x": 4}), "MetadataIndex"),
    (lambda t: t.state.pop("storage_data"), "no storage_data"),
    (lambda t: set_field(t.state["state_dict_metadata"]["w"], "size", size(1 << 62)), "negative or too large"),
    (lambda t: t.state["storage_data"].update(
        {Obj(Global("m", "MetadataIndex"), (), None, "newobj", {"fqn": "w", "offset": (0,)}): info(t)}), "two records"),
    (lambda t: t.state["storage_data"].update(
        {Obj(Global("m", "MetadataIndex"), (), None, "newobj", {"fqn": "o/shard_0_1"}): info(t)}), "two records"),
])  # fmt: skip
def test_nonsense_is_refused(spoil, says):
    tree = small()
    spoil(tree)
    with pytest.raises(FormatError, match=says) as caught:
        read_metadata(dumps(tree, 4), "ckpt/.metadata")
    assert caught.value.message.startswith("ckpt/.metadata: ")


def test_missing_and_stray_records():
    tree = small()
    index = next(iter(tree.state["storage_data"]))
    set_field(index, "offset", size(3))
    tree.state["storage_data"][Obj(Global("m", "MetadataIndex"), (), None, "newobj", {"fqn": "gone"})] = info(tree)
    found = read_metadata(dumps(tree, 4))
    assert found.tensors["w"].file.tolist() == [-1, 0]
    assert found.stray == ["gone, an object", "w at (3,)"]


def test_plans_before_other_attributes_are_not_skipped():
    tree = small()
    set_field(tree, "all_local_plans", [None] * 3)
    assert read_metadata(dumps(tree, 4)).plans == -1
    set_field(tree, "mcore_data", {"w": {"nd_reformulated_orig_global_shape": (2, 2)}})
    found = read_metadata(dumps(tree, 4))
    assert found.plans == 3
    assert found.tensors["w"].original_shape == (2, 2)


def test_garbage_collection_is_left_as_it_was():
    data = dumps(small(), 4)
    read_metadata(data)
    assert gc.isenabled()
    with pytest.raises(FormatError):
        read_metadata(data[:-5])
    assert gc.isenabled()


def test_truncated_file():
    data = pickle.dumps(metadata(1), 4)
    for at in (0, 1, 50, len(data) // 2, len(data) - 1):
        with pytest.raises(FormatError):
            read_metadata(data[:at])
    plans = (GOLDEN / "pickles" / "v019_fullyreshardable.metadata").read_bytes()
    with pytest.raises(FormatError):
        read_metadata(plans[:-100])


def test_memory_of_a_chunk(tmp_path):
    """What a million chunks behind 125,000 keys take is 1 GiB with the file: 800 bytes each; they were 1,160."""
    bench_metadata.write(tmp_path / ".metadata", 40_000, "keys", 4)
    data = (tmp_path / ".metadata").read_bytes()
    read_metadata(data)
    tracemalloc.start()
    try:
        read_metadata(data)
        assert tracemalloc.get_traced_memory()[1] < 900 * 40_000
    finally:
        tracemalloc.stop()
