"""Finding tensors inside `torch.save` records, and refusing what only looks like one."""

import io
import random
import warnings
import zipfile
import zlib

import numpy as np
import pytest
import torch

from converters.dtypes import dtype
from converters.errors import DistckptError, FormatError
from converters.formats import open_checkpoint
from converters.torchzip.records import TensorLocator, read_directory, read_pickle
from converters.torchzip.tensor_refs import tensor_ref
from converters.write.export import plan_export
from converters.write.write_plan import run_conversion
from harness.checkpoints import copy_golden, payloads
from harness.support import GOLDEN

TYPES = ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"]
TYPES += ["float8_e4m3fn", "float8_e5m2"]


def saved(value, **options):
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


def reader(raw):
    return lambda at, n: raw[at : at + n]


def locate(raw, name, shape, start=0):
    expect = dtype(name)
    return TensorLocator().locate(reader(raw), start, len(raw) - start, "record", expect=expect, shape=shape)


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 5), (2, 3, 4)])
def test_elements_are_where_torch_put_them(name, shape):
    value = torch.arange(int(np.prod(shape))).reshape(shape).to(torch.float32).to(getattr(torch, name))
    raw = b"something before" + saved(value)
    found = locate(raw, name, shape, start=16)
    want = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
    assert raw[found.offset : found.offset + found.nbytes] == want
    assert zlib.crc32(raw[found.crc_offset : found.crc_offset + found.crc_nbytes]) == found.crc


def test_a_view_is_found_in_its_storage():
    base = torch.arange(40.0)
    raw = saved(base[10:22].view(3, 4))
    found = locate(raw, "float32", (3, 4))
    assert np.array_equal(np.frombuffer(raw, "<f4", 12, found.offset), np.arange(10.0, 22.0, dtype="<f4"))
    assert (found.crc_nbytes, found.offset - found.crc_offset) == (160, 40)
    assert zlib.crc32(raw[found.crc_offset :][:160]) == found.crc


def test_a_parameter_is_a_tensor():
    found = locate(saved(torch.nn.Parameter(torch.ones(3))), "float32", (3,))
    assert found.nbytes == 12


def test_a_large_directory():
    raw = saved({f"t{i}": torch.full((2,), float(i)) for i in range(500)})
    tree = read_pickle(reader(raw), 0, len(raw), "record")
    members = read_directory(reader(raw), 0, len(raw), "record")
    assert len(tree) == 500
    for name, node in tree.items():
        ref = tensor_ref(node, name)
        assert members[f"data/{ref.storage}"].size == 8


REFUSALS = {
    "another type": (torch.ones(3), "int64", (3,), "holds a float32 tensor"),
    "another shape": (torch.ones(3), "float32", (4,), r"tensor of \[3\]"),
    "an object": ({"a": 1}, "float32", (3,), "holds an object"),
    "a transposed tensor": (torch.ones(3, 4).T, "float32", (4, 3), "strides"),
    "an expanded tensor": (torch.ones(1).expand(5), "float32", (5,), "strides"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_the_metadata_did_not_promise_is_refused(case):
    value, name, shape, message = REFUSALS[case]
    with pytest.raises(FormatError, match=message):
        locate(saved(value), name, shape)


def zipped(members, method=zipfile.ZIP_STORED):
    buffer = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(buffer, "w", method) as archive:
        warnings.simplefilter("ignore")  # names that occur twice
        for name, content in members:
            archive.writestr(name, content)
    return buffer.getvalue()


GOOD = [(f"archive/{n}", c) for n, c in (("data.pkl", b"\x80\x02N."), ("data/0", b"\0" * 12), ("version", b"3\n"))]


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"PK",
        b"\0" * 22,
        b"\0" * 5000,
        zipped(GOOD, zipfile.ZIP_DEFLATED),
        zipped([*GOOD, GOOD[1]]),
        zipped([*GOOD, ("archive/../../etc/passwd", b"x")]),
        zipped(GOOD)[:-1],
        zipped(GOOD) + b"x",
        zipped(GOOD)[:-22] + zipped(GOOD)[-22:].replace(b"\x03\x00\x03\x00", b"\x04\x00\x04\x00"),
        zipped([(n, c) for n, c in GOOD if not n.endswith("pkl")]),
        zipped([*GOOD, ("archive/code/x.py", b"")]),
    ],
    ids=range(12),
)
def test_archives_that_torch_does_not_write_are_refused(raw):
    with pytest.raises(FormatError):
        read_pickle(reader(raw), 0, len(raw), "record")


def test_no_byte_of_a_record_can_be_changed_unnoticed(tmp_path):
    """Flips all over whole files: each ends in an error of ours, or changes nothing of the result."""
    generator = random.Random(11)
    source = copy_golden("llama_singleton_weights_tp2pp2", tmp_path / "src")
    plan = plan_export(open_checkpoint(source), tmp_path / "good")
    run_conversion(plan)
    good = (tmp_path / "good" / "model.safetensors").read_bytes()
    inside = [(path, at, at + n) for _, path, at, n in payloads(source, "weight")]
    caught = harmless = 0
    for _ in range(150):
        path = generator.choice(sorted(source.glob("*.distcp")))
        raw = bytearray(path.read_bytes())
        at = generator.randrange(len(raw))
        raw[at] ^= 1 << generator.randrange(8)
        original = path.read_bytes()
        path.write_bytes(raw)
        payload = any(path == p and a <= at < b for p, a, b in inside)
        try:
            run_conversion(plan_export(open_checkpoint(source), tmp_path / "out"))
        except DistckptError:
            caught += 1
            assert [p.name for p in sorted(tmp_path.iterdir())] == ["good", "src"]
        else:
            assert not payload, f"{path.name} {at}"
            assert (tmp_path / "out" / "model.safetensors").read_bytes() == good
            harmless += 1
            for entry in (tmp_path / "out").iterdir():
                entry.unlink()
            (tmp_path / "out").rmdir()
        path.write_bytes(original)
    assert caught > 10
    assert harmless > 10


def test_every_golden_record_is_summed():
    """The checksums that torch stored are those of the bytes, in every record of every version."""
    for name in ("llama_adam_tp2pp2", "v009_llama_bucketspace_tp2pp2dp2", "v019_llama_fullyreshardable_tp2dp2"):
        opened = open_checkpoint(GOLDEN / name)
        for info in opened.catalog.tensors.values():
            for chunk in info.chunks():
                raw = opened.files[opened.file_of(chunk.record)].read_bytes()
                found = opened.locate(chunk.record, reader(raw))
                assert zlib.crc32(raw[found.crc_offset :][: found.crc_nbytes]) == found.crc
