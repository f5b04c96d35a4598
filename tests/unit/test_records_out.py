"""Records we write are, byte for byte, what torch.save writes; and the real loaders take them."""

from __future__ import annotations

import io
import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from converters.dtypes import dtype
from converters.torchzip.records import TensorLocator
from converters.torchzip.records_out import RecordLayout

NAMES = ["float32", "bfloat16", "float16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool"]
NAMES += ["float8_e4m3fn", "float8_e5m2", "uint16", "uint32", "complex64"]


def ours(tensor: torch.Tensor) -> bytes:
    raw = bytes(tensor.reshape(-1).contiguous().view(torch.uint8).tolist()) if tensor.numel() else b""
    layout = RecordLayout(dtype(str(tensor.dtype)), tuple(tensor.shape))
    record = layout.prefix + raw + layout.suffix(zlib.crc32(raw))
    assert len(record) == layout.length
    return record


def torch_saves(tensor: torch.Tensor) -> bytes:
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3), (1, 300, 7), (3, 0, 2)])
def test_a_record_is_what_torch_saves(name, shape):
    tensor = torch.zeros(shape, dtype=getattr(torch, name))
    if tensor.numel() and not name.startswith(("bool", "complex")):
        tensor = (torch.arange(tensor.numel()) % 5).reshape(shape).to(tensor.dtype)
    assert ours(tensor) == torch_saves(tensor)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=4), st.sampled_from(["float32", "bfloat16", "int64"]))
def test_any_shape(shape, name):
    tensor = torch.arange(torch.Size(shape).numel()).reshape(shape).to(getattr(torch, name))
    record = ours(tensor)
    assert record == torch_saves(tensor)
    assert torch.equal(torch.load(io.BytesIO(record), weights_only=True), tensor)


def test_a_record_is_found_again_where_it_was_put():
    tensor = torch.arange(24, dtype=torch.float32).reshape(2, 3, 4)
    record = b"x" * 37 + ours(tensor) + b"y" * 11
    payload = TensorLocator().locate(
        lambda at, n: record[at : at + n], 37, len(record) - 48, "test", expect=dtype("float32"), shape=(2, 3, 4)
    )
    raw = record[payload.offset : payload.offset + payload.nbytes]
    assert raw == bytes(tensor.reshape(-1).view(torch.uint8).tolist())
    assert payload.crc == zlib.crc32(raw)


@pytest.mark.slow
def test_a_record_beyond_four_gibibytes(tmp_path):
    numel = (4 << 30) + 100
    path = tmp_path / "archive.pt"  # torch names the archive after the file
    torch.save(torch.zeros(numel, dtype=torch.uint8), path)
    layout = RecordLayout(dtype("uint8"), (numel,))
    assert path.stat().st_size == layout.length
    with path.open("rb") as file:
        assert file.read(len(layout.prefix)) == layout.prefix
        crc = 0
        for _ in range(numel // (1 << 20) + 1):
            crc = zlib.crc32(file.read(min(1 << 20, len(layout.prefix) + numel - file.tell())), crc)
        assert file.read() == layout.suffix(crc)
