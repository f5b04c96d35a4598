"""Real pickles are read, shown, edited and written back; the package needs no torch for it."""

from __future__ import annotations

import argparse
import collections
import io
import json
import pickle
import random
import subprocess
import sys
import types
import zipfile
from pathlib import Path

import pytest

from converters.errors import FormatError, RequestError
from converters.pickles.describe import describe
from converters.pickles.emit import dumps
from converters.pickles.limits import Limits
from converters.pickles.machine import Machine, parse
from converters.pickles.nodes import Global, Obj, PersId, PickleFormatError, fields, pairs, set_field

GOLDEN = Path(__file__).parents[1] / "golden" / "pickles"
REAL = sorted(path.name for path in GOLDEN.iterdir())


@pytest.mark.parametrize("name", REAL)
def test_unedited_rewrite_is_byte_identical(name):
    data = (GOLDEN / name).read_bytes()
    assert dumps(parse(data, label=name), data[1]) == data


@pytest.mark.parametrize("name", REAL)
def test_description_is_json(name):
    text = json.dumps(describe(parse((GOLDEN / name).read_bytes())))
    assert len(text) < 200_000


def random_value(rng: random.Random, depth: int, pool: list):
    """Plain data with sharing, of the kinds that protocol 4 has opcodes for."""
    if pool and rng.random() < 0.2:
        return rng.choice(pool)
    kind = rng.randrange(7 if depth == 0 else 14)
    size = rng.choice([0, 1, 2, 3, 5])
    text = "".join(rng.choice("ab\xe9\U0001f600\ud800") for _ in range(rng.choice([0, 1, 3, 255, 256])))
    ints = [0, 255, 256, 65535, 65536, -1, -128, -129, 1 << 31, -(1 << 31), (1 << 63) - 1, -(1 << 63), 1 << 200]
    value = (
        lambda: rng.choice([None, True, False]),
        lambda: rng.choice([*ints, rng.getrandbits(80), -rng.getrandbits(33)]),
        rng.random,
        lambda: text,
        lambda: str(rng.randrange(12)),
        lambda: rng.randbytes(rng.choice([0, 1, 255, 256])),
        lambda: (),
        lambda: [random_value(rng, depth - 1, pool) for _ in range(size)],
        lambda: {f"k{n}": random_value(rng, depth - 1, pool) for n in range(size)},
        lambda: tuple(random_value(rng, depth - 1, pool) for _ in range(size)),
        lambda: set(range(size)),
        lambda: frozenset(range(size)),
        lambda: collections.OrderedDict((str(n), random_value(rng, depth - 1, pool)) for n in range(size)),
        lambda: bytearray(rng.randbytes(size)),
    )[kind]()
    pool.append(value)
    return value


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_writes_what_the_c_pickler_writes(protocol):
    rng = random.Random(protocol)
    for _ in range(300):
        data = pickle.dumps(random_value(rng, 5, []), protocol)
        assert dumps(parse(data), protocol) == data


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("count", [999, 1000, 1001, 2000])
def test_batches(protocol, count):
    numbers = range(count)
    for value in ([7] * count, dict.fromkeys(numbers), collections.OrderedDict.fromkeys(numbers), set(numbers)):
        data = pickle.dumps(value, protocol)
        assert dumps(parse(data), protocol) == data


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_large_strings_and_frames(protocol):
    value = ["a" * 65535, "b" * 65536, b"c" * 70000, ["d" * 300] * 3, [f"{n:0300}" for n in range(500)]]
    data = pickle.dumps(value, protocol)
    assert dumps(parse(data), protocol) == data


def test_values_that_contain_themselves():
    a: list = []
    b: list = []
    short, long = (a,), (b, 1, 2, 3)
    a.append(short)
    b.append(long)
    for value in (short, long):
        data = pickle.dumps(value)
        assert dumps(parse(data), 4) == data
    assert len(json.dumps(describe(parse(pickle.dumps(long))))) < 1000


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_new_plain_values_in_every_protocol(protocol):
    value = {"b": [b"", b"xyz\xff"], "s": {1, 2}, "f": frozenset({3}), "a": bytearray(b"q"), "e": [bytearray(), set()]}
    assert pickle.loads(dumps(value, protocol)) == value


def namespace(**values) -> bytes:
    return pickle.dumps({"args": argparse.Namespace(**values), "iteration": 7}, 2)


def test_edited_namespace_is_what_a_real_unpickler_reads():
    tree = parse(namespace(tensor_model_parallel_size=2, lr=1e-4, name="x"))
    args = tree["args"]
    assert fields(args) == {"tensor_model_parallel_size": 2, "lr": 1e-4, "name": "x"}
    set_field(args, "tensor_model_parallel_size", 4)
    set_field(args, "added", [1, (2, None)])
    tree["iteration"] = 0
    loaded = pickle.loads(dumps(tree, 2))
    assert loaded == {
        "args": argparse.Namespace(tensor_model_parallel_size=4, lr=1e-4, name="x", added=[1, (2, None)]),
        "iteration": 0,
    }


def test_edited_file_is_what_torch_reads(tmp_path):
    torch = pytest.importorskip("torch")
    path = tmp_path / "common.pt"
    original = {
        "args": argparse.Namespace(tensor_model_parallel_size=2, params_dtype=torch.bfloat16),
        "state": collections.OrderedDict(w=torch.arange(6).reshape(2, 3)),
        "ns": types.SimpleNamespace(a=1),
    }
    torch.save(original, path)
    with zipfile.ZipFile(path) as archive:
        members = {item.filename: archive.read(item) for item in archive.infolist()}
    name = next(key for key in members if key.endswith("data.pkl"))
    tree = parse(members[name])
    assert dumps(tree, 2) == members[name]
    set_field(tree["args"], "tensor_model_parallel_size", 8)
    set_field(tree["ns"], "b", "new")
    members[name] = dumps(tree, 2)
    edited = io.BytesIO()
    with zipfile.ZipFile(edited, "w") as archive:
        for key, raw in members.items():
            archive.writestr(key, raw)
    edited.seek(0)
    loaded = torch.load(edited, weights_only=False)
    assert loaded["args"] == argparse.Namespace(tensor_model_parallel_size=8, params_dtype=torch.bfloat16)
    assert loaded["ns"] == types.SimpleNamespace(a=1, b="new")
    assert torch.equal(loaded["state"]["w"], original["state"]["w"])


def test_inert_nodes():
    tree = parse((GOLDEN / "legacy_mixtral_optim.pkl").read_bytes())
    keys = [key for key in tree[0] if isinstance(key, tuple)] if isinstance(tree, dict) else []
    for key in keys:
        assert all(type(part) is Global and part.module == "torch" for part in key)
    common = parse((GOLDEN / "v016_common.pkl").read_bytes())
    args = common["args"]
    assert type(args) is Obj
    assert args.func.path == "argparse.Namespace"
    assert fields(args)["tensor_model_parallel_size"] == 2
    shown = describe(common, max_nodes=5000)
    assert shown["args"]["params_dtype"] == "torch.bfloat16"
    assert shown["args"]["attention_backend"].startswith("AttnBackend(")


def test_nodes_are_equal_only_to_themselves():
    first, second = Global("torch", "Size"), Global("torch", "Size")
    assert first != second
    assert len({first, second, Obj(first), Obj(first), PersId(1)}) == 5
    assert repr(first) == "<global torch.Size>"
    assert repr(Obj(first, ((1, 2),))) == "<torch.Size([1, 2])>"
    assert "storage" in repr(PersId(("storage", "0")))


def test_dict_subclasses_and_slots():
    ordered = parse(pickle.dumps(collections.OrderedDict(a=1, b=2)))
    assert pairs(ordered) == [("a", 1), ("b", 2)]
    assert pairs(parse(pickle.dumps(collections.OrderedDict()))) == []
    assert pairs({"x": 1}) == [("x", 1)]
    with pytest.raises(PickleFormatError):
        pairs([1])
    slots = Obj(Global("m", "C"), (), None, "newobj", (None, {"a": 1}))
    set_field(slots, "a", 2)
    assert fields(slots) == {"a": 2}
    with pytest.raises(RequestError):
        set_field(Obj(Global("m", "C"), state=[1]), "a", 1)
    fresh = Obj(Global("m", "C"))
    set_field(fresh, "a", 1)
    assert fields(fresh) == {"a": 1}


def test_concatenated_pickles():
    with pytest.raises(PickleFormatError, match="follow the end"):
        parse(b"".join(pickle.dumps(value, 2) for value in (1, "two", [3])))


def test_describe_is_bounded():
    tree = [[n] * 50 for n in range(50)]
    assert len(json.dumps(describe(tree, max_nodes=30))) < 500
    assert describe([[[1]]], max_depth=2) == [["..."]]
    assert describe({"x": float("nan"), (1, 2): 1 << 100, "s": "\ud800", "b": b"12"}) == {
        "x": "nan", "[1, 2]": "0x10000000000000000000000000", "s": "\\ud800", "b": "<2 bytes>",
    }  # fmt: skip
    call = Obj(Global("functools", "partial"), (Global("torch.nn.init", "normal_"),))
    assert describe(call) == "functools.partial(...)"
    assert describe(Obj(Global("megatron.core.transformer.enums", "AttnBackend"), (5,))) == "AttnBackend(5)"
    assert describe(Obj(Global("pathlib", "PosixPath"), ("/", "a", "b"))) == "/a/b"


def test_errors_name_file_offset_and_opcode():
    with pytest.raises(FormatError) as caught:
        parse(b"\x80\x02}K\x01o.", label="common.pt: data.pkl")
    assert "common.pt: data.pkl" in caught.value.message
    assert caught.value.details == ["at byte 5, opcode 0x6f OBJ"]
    with pytest.raises(FormatError, match="ends before STOP"):
        parse(b"\x80\x04K")
    with pytest.raises(FormatError, match="larger than"):
        Machine(b"\x80\x04N.", Limits(data_bytes=3), "x").run()


def test_dumps_refuses_what_it_cannot_write():
    with pytest.raises(RequestError):
        dumps(object(), 4)
    with pytest.raises(RequestError):
        dumps(1, 1)
    deep: list = []
    for _ in range(500):
        deep = [deep]
    with pytest.raises(RequestError):
        dumps(deep, 4)


def test_torch_is_not_imported():
    code = (
        "import sys, converters.formats.dcp.metadata as m, pathlib;"
        f"m.read_metadata(pathlib.Path({str(GOLDEN / 'v016_deepseek.metadata')!r}).read_bytes());"
        "sys.exit(any(name.split('.')[0] in ('torch', 'megatron') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2]).returncode == 0
