"""The zarr reader: real checkpoints and those of other configs rewritten as zarr, edges, damage, and hostile folders."""

import json
import os
import re
import shutil
import sys
import types

import numpy as np
import pytest
import torch

from converters.errors import FormatError, IntegrityError
from converters.formats import open_checkpoint
from converters.formats.canonical import object_info
from converters.formats.common_state import Archive
from converters.formats.megatron import common_facts
from converters.formats.zarr.array import parse_zarray
from distckpt_cli.app import main
from harness.checkpoints import GOLDENS, copy_golden, golden, truth
from harness.conformance import Conformance, megatron_case
from harness.exports import differing, export, exported
from harness.reshard_cases import TRAINED, by_parameter, compare, expected, folder_of, read_with_torch, reshard
from harness.support import GOLDEN, read_tensor

REAL = ["v009_zarr_llama_adam_tp2pp2", "v009_zarr_llama_distopt_tp2pp2dp2", "nemo1_zarr_llama4_weights_tp2pp2"]
SPELLINGS = {"bfloat16": "bfloat16", "float32": "<f4", "float16": "<f2", "uint8": "|u1", "int64": "<i8"}
FC1 = "decoder.layers.mlp.linear_fc1.weight"

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def write_array(folder, values, chunks, dtype="bfloat16", separator="."):
    """An array as zarr stores it: raw chunks, those at the upper edge filled up with 0xEE."""
    folder.mkdir(parents=True)
    document = {"zarr_format": 2, "shape": list(values.shape), "chunks": list(chunks), "dtype": dtype, "order": "C"}
    document |= {"compressor": None, "filters": None, "fill_value": None}
    (folder / ".zarray").write_text(json.dumps(document | ({"dimension_separator": "/"} if separator == "/" else {})))
    grid = [-(-n // chunk) for n, chunk in zip(values.shape, chunks, strict=True)]
    for index in np.ndindex(*grid):
        whole = np.full(chunks, 0xEE, values.dtype)
        start = [i * n for i, n in zip(index, chunks, strict=True)]
        part = values[tuple(slice(a, a + n) for a, n in zip(start, chunks, strict=True))]
        whole[tuple(slice(0, n) for n in part.shape)] = part
        path = folder / (separator.join(map(str, index)) or "0")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(whole.tobytes())


def as_zarr(name, into, chunk=lambda key, shape: shape):
    """A torch_dist golden rewritten as zarr: its keys, its shapes as torch reads them, its objects as bare .pt files."""
    source = golden(name)
    reader = open_checkpoint(source)
    dtypes = {key: t.dtype.name for t in reader.catalog.tensors.values() for key in t.keys}
    into.mkdir(parents=True)
    for key, values in read_with_torch(source).items():
        write_array(into / key, values, chunk(key, values.shape), SPELLINGS[dtypes[key]])
    for info in reader.catalog.objects.values():
        record = Archive.read(source / info.file, info.start, info.length)
        (into / info.name).mkdir(exist_ok=True)
        (into / f"{info.key}.pt").write_bytes(record.dump(record.tree[0], "archive"))
    shutil.copy(source / "common.pt", into)
    (into / "metadata.json").write_text('{"sharded_backend": "zarr", "sharded_backend_version": 1}')
    return into


@pytest.fixture
def copy(tmp_path):
    return copy_golden("v009_zarr_llama_distopt_tp2pp2dp2", tmp_path / "iter_0000010")


def problems(folder, severity="error"):
    return [p for p in open_checkpoint(folder).catalog.problems if p.severity == severity]


def refused(path):
    with pytest.raises(FormatError) as caught:
        open_checkpoint(path)
    return caught.value


def edit(folder, key, **changes):
    path = folder / key / ".zarray"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


class TestZarr(Conformance):
    FORMAT = "zarr"
    CASES = tuple(megatron_case(name) for name in REAL)
    CHECKSUMS = False  # raw chunks


# ---------------------------------------------------------------------- what is read


@pytest.mark.parametrize("name", REAL)
def test_tensorstore_reads_the_same(name):
    """An independent reader, which knows zarr and not Megatron: every array, whole."""
    tensorstore = pytest.importorskip("tensorstore")
    reader = open_checkpoint(GOLDEN / name)
    seen, arrays = set(), {}
    for info in reader.catalog.tensors.values():
        (part,) = info.parts
        key = part.array.key
        if key not in arrays:
            store = {"driver": "file", "path": str(golden(name) / key)}
            opened = tensorstore.open({"driver": "zarr", "kvstore": store, "fill_missing_data_reads": False}).result()
            arrays[key] = opened.read().result()
        value = read_tensor(reader, info)
        assert np.array_equal(arrays[key][part.prefix].view(value.dtype), value), info.name
        seen.add(key)
    assert seen == {path.parent.name for path in golden(name).glob("*/.zarray") if path.parent.suffix != ".sync"}


@pytest.mark.parametrize("name", REAL)
def test_what_it_is(name):
    catalog = open_checkpoint(GOLDEN / name).catalog
    assert catalog.format == "zarr"
    assert catalog.producer[0] == "Megatron-Core 0.4 to 0.15"
    assert catalog.framework == ("NeMo 1" if name.startswith("nemo1") else "Megatron-LM")
    assert catalog.iteration == 10
    assert not catalog.problems
    assert not any(".sync" in info.name for info in catalog.files)
    on_disk = [path for path in golden(name).rglob("*") if path.is_file() and ".sync" not in str(path)]
    assert {info.name for info in catalog.files} == {str(path.relative_to(golden(name))) for path in on_disk}
    assert all(info.size == (golden(name) / info.name).stat().st_size for info in catalog.files)
    assert all(not stored.wrapped and stored.file.endswith(".pt") for stored in catalog.objects.values())
    reader = open_checkpoint(GOLDEN / name)
    assert len(reader.files) == sum(info.role == "data" for info in catalog.files)
    assert all(path.is_file() for path in reader.files)
    assert reader.files[-1] == reader.files[len(reader.files) - 1 :][0]
    with pytest.raises(IndexError):
        reader.files[len(reader.files)]


def test_nemo_1_folder():
    path = GOLDEN / "nemo1_zarr_llama4_weights_tp2pp2"
    catalog = open_checkpoint(path).catalog
    assert catalog.path.name == "model_weights"
    assert catalog.config["num_query_groups"] == 4
    assert not any(name.startswith("model.") for name in catalog.tensors)
    assert {key for t in catalog.tensors.values() for key in t.keys} <= {p.name for p in golden(path.name).iterdir()}


def test_nemo_1_configuration_in_the_common_state(tmp_path):
    """NeMo 1 keeps the model's configuration beside the weights and, as omegaconf's objects, in the common state."""
    shutil.copytree(golden("nemo1_zarr_llama4_weights_tp2pp2"), tmp_path / "megatron_gpt-last")
    module = types.ModuleType("omegaconf.dictconfig")
    for name in ("DictConfig", "AnyNode"):
        setattr(module, name, type(name, (), {"__module__": "omegaconf.dictconfig"}))
    node, cfg = module.AnyNode(), module.DictConfig()
    node._val, node._parent = 64, cfg
    cfg._content = {"hidden_size": node}
    sys.modules |= {"omegaconf": types.ModuleType("omegaconf"), "omegaconf.dictconfig": module}
    try:
        common = {"pytorch-lightning_version": "2.2", "global_step": 7, "hyper_parameters": {"cfg": cfg}}
        torch.save(common, tmp_path / "megatron_gpt-last" / "common.pt")
    finally:
        del sys.modules["omegaconf"], sys.modules["omegaconf.dictconfig"]
    catalog = open_checkpoint(tmp_path / "megatron_gpt-last").catalog
    assert (catalog.framework, catalog.config, catalog.iteration) == ("NeMo 1", {"hidden_size": 64}, 7)
    assert common_facts({"hyper_parameters": {"cfg": {"a": [1, None]}}}).hyper_parameters == {"a": [1, None]}


@pytest.mark.parametrize("name", ["mixtral_adam_ep2tp2", "llama_singleton_weights_tp2pp2", "deepseek_mtp_adam_ep2pp2"])
def test_experts_halves_and_mtp(name, tmp_path):
    """Keys of other families: the same canonical tensors as in torch_dist, whatever the chunks."""

    def chunk(key, shape):  # layers and experts two to a chunk, edges along every other axis
        return tuple(min(n, 2) if axis == 0 else -(-n * 2 // 3) for axis, n in enumerate(shape))

    theirs = open_checkpoint(GOLDEN / name)
    for number, style in enumerate((chunk, lambda key, shape: shape)):
        reader = open_checkpoint(as_zarr(name, tmp_path / f"iter_{number:07d}", style))
        assert not [p for p in reader.catalog.problems if p.severity == "error"]
        assert reader.catalog.tensors.keys() == theirs.catalog.tensors.keys()
        for info in theirs.catalog.tensors.values():
            mine = reader.catalog.tensors[info.name]
            assert (mine.shape, mine.dtype, mine.kind) == (info.shape, info.dtype, info.kind)
            assert np.array_equal(read_tensor(reader, mine), read_tensor(theirs, info)), info.name


@pytest.mark.parametrize("separator", [".", "/"])
@pytest.mark.parametrize(
    ("shape", "chunks"),
    [((), ()), ((5,), (2,)), ((7, 5), (3, 5)), ((7, 5), (3, 2)), ((3, 4, 5), (2, 3, 2)), ((0, 3), (1, 3))],
)
def test_edges(shape, chunks, separator, tmp_path):
    """A chunk at the upper edge is stored whole; what lies outside the array never comes out of it."""
    values = np.arange(int(np.prod(shape)), dtype="<u4").reshape(shape)
    write_array(tmp_path / "iter_0000001" / "a.weight", values, chunks, "<f4", separator)
    write_array(
        tmp_path / "iter_0000001" / "decoder.layers.b", values.reshape(1, *shape), (2, *chunks), "<f4", separator
    )
    (tmp_path / "iter_0000001" / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    reader = open_checkpoint(tmp_path)
    assert not reader.catalog.problems
    assert np.array_equal(read_tensor(reader, reader.catalog.tensors["a.weight"]), values)
    assert np.array_equal(read_tensor(reader, reader.catalog.tensors["decoder.layers.0.b"]), values)


def test_the_engine_streams_edges(tmp_path):
    """Chunks that fit neither rows nor columns: the export is that of the truth."""
    folder = as_zarr(
        "llama_adam_tp2pp2", tmp_path / "iter_0000010", lambda k, shape: tuple(-(-n * 2 // 3) for n in shape)
    )
    export(folder, tmp_path / "out")
    assert not differing(tmp_path / "out", "llama", "llama")


# ---------------------------------------------------------------------- objects


@pytest.mark.parametrize("name", REAL[:2])
def test_objects_become_torch_dist_records(name, tmp_path):
    """In a .pt file lies the object, in a record of torch_dist a list of it; the same to torch, tensors included."""
    reshard(name, tmp_path / "out", {"tp": 2, "pp": 2})
    out, source = open_checkpoint(tmp_path / "out").catalog, open_checkpoint(GOLDEN / name).catalog
    assert {key for key in out.objects if key.startswith("rng_state")} == {
        f"rng_state/shard_{pp}.{tp}_2.2" for pp in (0, 1) for tp in (0, 1)
    }
    if "ckpt_format" in source.args:
        assert out.args["ckpt_format"] == "torch_dist"
    kept = [key for key in source.objects if key in out.objects]
    assert len(kept) == len(source.objects)
    for key in kept:
        stored = out.objects[key]
        raw = (out.path / stored.file).read_bytes()[stored.start : stored.start + stored.length]
        (tmp_path / "record").write_bytes(raw)
        mine = torch.load(tmp_path / "record", weights_only=False)
        theirs = torch.load(source.path / f"{key}.pt", weights_only=False)
        assert isinstance(mine, list)
        assert len(mine) == 1
        assert_same(mine[0], theirs)


def assert_same(mine, theirs):
    assert type(mine) is type(theirs)
    if isinstance(theirs, dict):
        assert mine.keys() == theirs.keys()
        for key, value in theirs.items():
            assert_same(mine[key], value)
    elif isinstance(theirs, list | tuple):
        assert len(mine) == len(theirs)
        for pair in zip(mine, theirs, strict=True):
            assert_same(*pair)
    elif isinstance(theirs, torch.Tensor):
        assert torch.equal(mine, theirs)
    elif isinstance(theirs, np.ndarray):
        assert np.array_equal(mine, theirs)
    elif hasattr(theirs, "getvalue"):
        assert mine.getvalue() == theirs.getvalue()
    else:
        assert mine == theirs


def test_names_that_lost_the_grids_last_size(copy):
    """Up to Megatron-Core 0.6: `Path("shard_0.1_2.2").with_suffix(".pt")` is `shard_0.1_2.pt`."""
    before = open_checkpoint(copy).catalog.objects
    for path in copy.glob("*/shard_*.pt"):
        path.rename(path.parent / re.sub(r"(\d+\.\d+_\d+)\.\d+\.pt", r"\1.pt", path.name))
    assert (copy / "rng_state" / "shard_0.1_2.pt").exists()
    after = open_checkpoint(copy).catalog
    assert after.objects.keys() == before.keys()
    assert after.objects["rng_state/shard_0.1_2.2"].grid == (2, 2)
    assert not after.problems


def test_optimizer_state_inside_objects(tmp_path):
    """dp_zero_gather_scatter, what training of 0.9 saves without fully parallel saving: one object for each group."""
    folder = as_zarr("llama_dpzero_tp2pp2dp2", tmp_path / "iter_0000010")
    reshard(folder, tmp_path / "out", {"tp": 1, "pp": 2, "dp": 2})
    found = by_parameter(read_with_torch(folder_of(tmp_path / "out")))
    compare(found, expected("llama", optimizer=True))


def test_flat_buckets(tmp_path):
    folder = as_zarr(
        "v009_llama_bucketspace_tp2pp2dp2", tmp_path / "iter_0000010", lambda k, s: (*s[:-1], -(-s[-1] // 2))
    )
    reshard(folder, tmp_path / "out", {"tp": 4})
    compare(by_parameter(read_with_torch(folder_of(tmp_path / "out"))), expected("llama", optimizer=True))


def test_object_keys():
    info = object_info("rng_state/shard_0.1_2.2", "rng_state/shard_0.1_2.2.pt", 0, 5, wrapped=False)
    assert (info.name, info.offset, info.grid, info.wrapped) == ("rng_state", (0, 1), (2, 2), False)


# ---------------------------------------------------------------------- damage


def test_a_missing_chunk_is_never_zeros(copy, tmp_path):
    (copy / FC1 / "1.2.0").unlink()
    (problem,) = problems(copy)
    assert problem.file == f"{FC1}/1.2.0"
    assert "is missing" in problem.message
    assert problem.tensors == ("decoder.layers.1.mlp.linear_fc1.weight",)
    with pytest.raises(IntegrityError, match=r"1\.2\.0 is missing"):
        export(copy, tmp_path / "out")
    with pytest.raises(IntegrityError, match=r"1\.2\.0 is missing"):
        reshard(copy, tmp_path / "out", {})
    assert not (tmp_path / "out").exists()
    (listed,) = [info for info in open_checkpoint(copy).catalog.files if info.name == problem.file]
    assert listed.size is None


def test_all_chunks_missing(copy):
    for path in (copy / FC1).glob("[0-9]*"):
        path.unlink()
    (problem,) = problems(copy)
    assert "0.0.0 is missing, and 7 more" in problem.message
    assert len(problem.tensors) == 2


def test_a_missing_optimizer_chunk_stops_what_needs_it(copy, tmp_path):
    key = "optimizer.state.exp_avg_sq.embedding.word_embeddings.weight"
    (copy / key / "1.0").unlink()
    assert problems(copy)[0].tensors == (key,)
    with pytest.raises(IntegrityError):
        reshard(copy, tmp_path / "out", {})
    export(copy, tmp_path / "weights")
    assert exported(tmp_path / "weights")


@pytest.mark.parametrize("size", [0, 1, 1000, 1535, 1537, 9999])
def test_a_chunk_of_another_size(copy, size, tmp_path):
    path = copy / FC1 / "0.1.0"
    assert path.stat().st_size == 1536
    path.write_bytes((path.read_bytes() * 9)[:size])
    (problem,) = problems(copy)
    assert f"0.1.0 is {size:,} bytes, .zarray needs 1,536" in problem.message
    assert problem.tensors == ("decoder.layers.0.mlp.linear_fc1.weight",)
    with pytest.raises(IntegrityError):
        export(copy, tmp_path / "out")


def test_extra_files_are_a_warning(copy, tmp_path):
    for name in ("2.0.0", "0.0.0.0", "00.0.0", "0.0.0.partial", "-1.0.0"):
        shutil.copy(copy / FC1 / "0.0.0", copy / FC1 / name)
    assert not problems(copy)
    assert {p.file.rpartition("/")[2] for p in problems(copy, "warning")} < {p.name for p in (copy / FC1).iterdir()}
    export(copy, tmp_path / "out")
    assert not differing(tmp_path / "out", "llama", "llama")


@pytest.mark.parametrize("kind", ["link", "folder", "pipe"])
def test_only_regular_files_are_chunks(copy, kind):
    path = copy / FC1 / "0.0.0"
    path.rename(copy.parent / "elsewhere")
    {"link": lambda: path.symlink_to(copy.parent / "elsewhere"), "folder": path.mkdir, "pipe": lambda: os.mkfifo(path)}[
        kind
    ]()
    (problem,) = problems(copy)
    assert "0.0.0 is not a regular file" in problem.message


def test_links_in_place_of_folders_and_objects(copy):
    (copy / FC1).rename(copy.parent / "elsewhere")
    (copy / FC1).symlink_to(copy.parent / "elsewhere")
    assert "symbolic link" in refused(copy).message
    (copy / FC1).unlink()
    (copy.parent / "elsewhere").rename(copy / FC1)
    path = copy / "rng_state" / "shard_0.0_2.2.pt"
    path.rename(copy.parent / "object")
    path.symlink_to(copy.parent / "object")
    assert "not a regular file" in refused(copy).message


def test_a_missing_object_and_no_metadata_json_are_warnings(copy):
    (copy / "rng_state" / "shard_1.1_2.2.pt").unlink()
    (copy / "metadata.json").unlink()
    assert not problems(copy)
    found = " ".join(p.message for p in problems(copy, "warning"))
    assert "3 of its 4 shards" in found
    assert "unfinished" in found


def test_no_zarray(copy):
    (copy / FC1 / ".zarray").unlink()
    assert f"{FC1} has chunk files but no .zarray" in refused(copy).message


def test_a_change_while_it_is_read_is_noticed(copy):
    reader = open_checkpoint(copy)
    before = reader.fingerprint()
    assert open_checkpoint(copy).fingerprint() == before
    os.utime(copy / FC1 / "0.0.0", ns=(0, 0))
    assert reader.fingerprint() != before


# ---------------------------------------------------------------------- chunks that are encoded


def zarr2(**changes):
    return lambda old: ("zarr", old | changes | ({"order": "C"} if len(old["shape"]) < 2 else {}))


def zarr3(codecs, key_encoding="default", inner=None):
    def make(old):
        chunks = [2 * n for n in old["chunks"]] if inner else old["chunks"]
        steps = codecs
        if inner:
            configuration = {"chunk_shape": old["chunks"], "codecs": codecs, "index_location": "end"}
            index = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
            steps = [{"name": "sharding_indexed", "configuration": configuration | {"index_codecs": index}}]
        return "zarr3", {
            "zarr_format": 3,
            "node_type": "array",
            "shape": old["shape"],
            "data_type": {"<f4": "float32"}.get(old["dtype"], old["dtype"]),
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunks}},
            "chunk_key_encoding": {"name": key_encoding},
            "fill_value": 0,
            "codecs": steps,
        }

    return make


BYTES = {"name": "bytes", "configuration": {"endian": "little"}}
ENCODED = {
    "zlib": zarr2(compressor={"id": "zlib", "level": 1}),
    "blosc": zarr2(compressor={"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": 1}, dimension_separator="/"),
    "zstd, Fortran's order": zarr2(compressor={"id": "zstd", "level": 3}, order="F"),
    "Fortran's order": zarr2(order="F"),
    "3, as they are": zarr3([BYTES]),
    "3, gzip": zarr3([BYTES, {"name": "gzip", "configuration": {"level": 1}}], "v2"),
    "3, big-endian": zarr3([{"name": "bytes", "configuration": {"endian": "big"}}, {"name": "crc32c"}]),
}


def encode(folder, form):
    """Rewrites every array by tensorstore."""
    import tensorstore

    for document in sorted(path for path in folder.glob("*/.zarray") if path.parent.suffix != ".sync"):
        array, stored = document.parent, json.loads(document.read_text())
        source = {"driver": "zarr", "kvstore": {"driver": "file", "path": str(array)}}
        values = tensorstore.open(source).result().read().result()
        shutil.rmtree(array)
        driver, metadata = ENCODED[form](stored)
        target = {"driver": driver, "kvstore": {"driver": "file", "path": str(array)}, "metadata": metadata}
        tensorstore.open(target, create=True).result().write(values).result()
        assert not any(path.name == ".zarray" for path in array.iterdir()) or driver == "zarr"


@pytest.mark.parametrize("form", ENCODED)
def test_encoded_chunks(copy, form, tmp_path):
    """Compressed, in another order, sharded, of zarr 3: the results of every command are those of the plain arrays."""
    assert main(["reshard", str(copy), str(tmp_path / "plain"), "--tp", "1", "--pp", "1", "-q"]) == 0
    encode(copy, form)
    catalog = open_checkpoint(copy).catalog
    assert not catalog.problems
    assert all(info.size == (copy / info.name).stat().st_size for info in catalog.files)
    assert main(["reshard", str(copy), str(tmp_path / "out"), "--tp", "1", "--pp", "1", "-q"]) == 0
    assert main(["diff", str(tmp_path / "plain"), str(tmp_path / "out"), "-q"]) == 0
    assert main(["verify", str(copy), "--values", "-q"]) == 0


def test_chunks_within_chunks_are_refused(copy, monkeypatch):
    monkeypatch.setitem(ENCODED, "3, shards", zarr3([BYTES], inner=True))
    encode(copy, "3, shards")
    error = refused(copy)
    assert error.exit_code == 4
    assert "sharding_indexed" in error.message


def test_encoded_chunks_that_are_damaged(copy, tmp_path, capsys):
    """A chunk that cannot be decoded, or is of another size: a sentence, exit 3, nothing written."""
    encode(copy, "zlib")
    chunk = copy / FC1 / "0.0.0"
    raw = chunk.read_bytes()
    for bad in (raw[:-9], b"", raw[:20] + b"\xff" * 20 + raw[40:], (copy / FC1 / "0.1.0").read_bytes()[:30]):
        chunk.write_bytes(bad)
        assert main(["export-hf", str(copy), str(tmp_path / "out"), "-q"]) == 3
        assert "cannot be decoded" in capsys.readouterr().err
        assert not (tmp_path / "out").exists()
        assert main(["verify", str(copy), "--values", "-q"]) != 0


# ---------------------------------------------------------------------- hostile .zarray


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"compressor": {"id": "pickle"}}, "compressor"),
        ({"compressor": {"id": "blosc", "cname": "../x"}}, "compressor"),
        ({"compressor": "gzip"}, "gzip"),
        ({"filters": [{"id": "pickle"}]}, "filters"),
        ({"dtype": "|O"}, "'|O'"),
        ({"dtype": ">f4"}, "'>f4'"),
        ({"dtype": "<V4"}, "'<V4'"),
        ({"dtype": [["a", "<f4"]]}, "type"),
        ({"dtype": None}, "None"),
        ({"order": "K"}, "order"),
        ({"zarr_format": 3}, "zarr_format 3"),
        ({"dimension_separator": "../"}, "dimension_separator"),
        ({"dimension_separator": None}, "dimension_separator"),
        ({"shape": [2, 96, -32]}, "impossible"),
        ({"shape": [2, 96]}, "impossible"),
        ({"shape": [2, 96, 32.0]}, "impossible"),
        ({"shape": [True, 96, 32]}, "impossible"),
        ({"shape": "abc"}, "impossible"),
        ({"shape": [1 << 40, 1 << 40, 1 << 40]}, "impossible"),
        ({"shape": [0, 1 << 70, 1]}, "impossible"),
        ({"chunks": [1, 0, 32]}, "impossible"),
        ({"chunks": [1 << 30, 1 << 30, 1 << 30]}, "impossible"),
        ({"shape": [1] * 40, "chunks": [1] * 40}, "impossible"),
        ({"kvstore": {"driver": "http"}}, "kvstore"),
        ({"\x1b[31m": 1}, "\\x1b[31m"),
    ],
)
def test_refused_by_name(copy, changes, complaint):
    edit(copy, FC1, **changes)
    error = refused(copy)
    message = error.message
    of_zarr = complaint in ("compressor", "filters", "'|O'", "'>f4'", "'<V4'", "zarr_format 3")
    assert error.exit_code == (4 if of_zarr else 3)
    assert complaint in message
    assert FC1 in message
    assert "\x1b" not in message


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"null", b"[" * 99999, b"\xff\xfe", b'{"shape": NaN}', b"1" * 9999])
def test_not_a_zarray(copy, raw):
    (copy / FC1 / ".zarray").write_bytes(raw)
    assert ".zarray" in refused(copy).message


def test_a_name_twice(copy):
    raw = (copy / FC1 / ".zarray").read_text()
    (copy / FC1 / ".zarray").write_text(raw.rstrip()[:-1] + ', "shape": [1]}')
    assert "twice" in refused(copy).details[0]


@pytest.mark.parametrize("shape", [[1 << 40, 96, 32], [2, 1 << 48, 32], [1 << 12, 96, 32]])
def test_shapes_much_larger_than_the_files_cost_nothing(copy, shape):
    edit(copy, FC1, shape=shape)
    if shape[0] == 1 << 40:
        assert "layers or experts" in refused(copy).message
        return
    found = problems(copy)
    assert any("is missing, and" in p.message for p in found)
    assert "decoder.layers.1.mlp.linear_fc1.weight" in found[0].tensors or shape[0] > 2


def test_all_spellings_of_types():
    base = {"zarr_format": 2, "shape": [2], "chunks": [2], "order": "C", "filters": None, "compressor": None}
    for spelt, name in [
        ("bfloat16", "bfloat16"),
        ("<V2", "bfloat16"),
        ("|V2", "bfloat16"),
        *((np.dtype(n).str, n) for n in ("float16", "float32", "float64", "int8", "uint8", "int16", "int32", "int64")),
        *((np.dtype(n).str, n) for n in ("bool", "complex64", "complex128", "uint16", "uint32", "uint64")),
    ]:
        spec = parse_zarray(json.dumps(base | {"dtype": spelt, "fill_value": None}).encode(), "key")
        assert spec.dtype.name == name
        assert spec.chunk_nbytes == 2 * spec.dtype.itemsize


def test_names_are_only_what_the_folder_lists(copy):
    """A key is a folder's name: it cannot leave the checkpoint, however it is spelt."""
    evil = copy / "..%2f\x1b[31m\n"
    shutil.copytree(copy / "decoder.final_layernorm.weight", evil)
    reader = open_checkpoint(copy)
    assert all(path.parent.parent == copy for path in reader.files)
    assert not problems(copy)
    (evil / "0").unlink()
    assert "\x1b" not in problems(copy)[0].message


def test_the_truth_covers_real_zarr():
    assert set(REAL) <= GOLDENS.keys()
    assert set(REAL[:2]) <= set(TRAINED)
    assert truth("llama")


def test_locks_of_the_writers_are_not_carried_along(tmp_path):
    name = "v009_zarr_llama_distopt_tp2pp2dp2"
    assert list((GOLDEN / name).rglob("*.sync"))
    assert main(["reshard", str(golden(name)), str(tmp_path / "out"), "--tp", "1", "-q"]) == 0
    assert not list((tmp_path / "out").rglob("*.sync"))
