"""Casts and shifts: the same bits wherever they are made. The tests marked gpu need a CUDA device."""

import ml_dtypes
import numpy as np
import pytest
import torch

from converters.dtypes import dtype
from converters.errors import RequestError
from converters.events import Note
from converters.formats import open_checkpoint
from converters.io.cast import Caster, apply, choose_device
from converters.io.device import Device
from converters.io.platforms import Cuda
from converters.planning.plan import Op
from converters.write.export import ExportOptions, plan_export
from converters.write.write_plan import run_conversion
from harness.checkpoints import golden, run_cli, tree
from harness.simulated import Event, Simulated

SPECIAL = [0.0, -0.0, 1.0, 1e-45, 1e-40, 65504.0, 65520.0, 1e38, 3.4e38, np.inf, -np.inf, 1.00390625, 1.01171875]
SHORT = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
QUIET = {"bfloat16": 0x7FC0, "float16": 0x7E00, "float32": 0x7FC00000}


def values(count=5000):
    random = np.random.default_rng(0).integers(0, 1 << 32, count, np.uint32).view(np.float32)
    return np.concatenate([np.array(SPECIAL, np.float32), random])  # among them some 40 NaNs of all kinds


def cast(bits, source, target, op=Op.COPY, device="cpu"):
    result = np.empty(bits.size * dtype(target).itemsize, np.uint8)
    return Caster(device).cast(bits, dtype(source), dtype(target), op, result)


@pytest.mark.parametrize("target", ["bfloat16", "float16"])
def test_rounding_is_to_nearest_even_and_nans_are_quiet(target):
    given = values()
    found = cast(given.view(np.uint32), "float32", target)
    with np.errstate(over="ignore", invalid="ignore"):
        wanted = given.astype(SHORT[target]).view(np.uint16)
    nan = np.isnan(given)
    assert 10 < nan.sum() < 100
    assert (found[~nan] == wanted[~nan]).all()
    assert (found[nan] == QUIET[target]).all()


def test_bits_do_not_depend_on_where_a_tile_ends():
    """torch's own NaNs do, on some processors: vectors and what is left behind the last one differ."""
    given = np.full(1003, np.nan, np.float32).view(np.uint32)
    whole = cast(given, "float32", "bfloat16")
    assert set(whole.tolist()) == {0x7FC0}
    for cut in (1, 7, 33, 1000):
        parts = [cast(given[:cut], "float32", "bfloat16"), cast(given[cut:], "float32", "bfloat16")]
        assert (np.concatenate(parts) == whole).all()


def test_what_is_only_moved_keeps_its_bits():
    bits = torch.tensor([0x7FA1, 0x7FC1, -1, 5], dtype=torch.int16)
    out = torch.empty(4, dtype=torch.bfloat16)
    apply(bits.view(torch.bfloat16), out)
    assert (out.view(torch.int16) == bits).all()


def test_norms_are_shifted_in_fp32_and_a_transposed_tile_stays_so():
    norm = np.array([0.0078125, -1.0, 3e-3], ml_dtypes.bfloat16)
    found = cast(norm.view(np.uint16), "bfloat16", "bfloat16", Op.ADD_ONE)
    wanted = (norm.astype(np.float32) + 1).astype(ml_dtypes.bfloat16)
    assert (found == wanted.view(np.uint16)).all()
    matrix = values(87).reshape(10, 10)
    nan = np.isnan(matrix.T)
    found = cast(matrix.view(np.uint32).T, "float32", "float16")
    with np.errstate(over="ignore", invalid="ignore"):
        assert (found[~nan] == matrix.T.astype(np.float16).view(np.uint16)[~nan]).all()


def test_which_device():
    assert choose_device("cpu", computes=True) == ("cpu", None)
    assert choose_device("auto", computes=False) == ("cpu", None)
    if not torch.cuda.is_available():
        assert choose_device("auto", computes=True) == ("cpu", None)
        with pytest.raises(RequestError, match="there is no device cuda"):
            choose_device("cuda", computes=True)
    with pytest.raises(RequestError, match="unknown device"):
        choose_device("tpu", computes=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("more", [(), ("-n",)])
def test_a_missing_gpu_is_refused_before_anything_is_written(more, tmp_path):
    words = ("--dtype", "fp32", "--device", "cuda", *more)
    done = run_cli("export-hf", golden("llama_adam_tp2pp2"), tmp_path / "out", *words)
    assert done.returncode == 4
    assert "there is no device cuda" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.fixture(params=["simulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def gpu(request, monkeypatch):
    """The name of a device that casts."""
    if request.param == "cuda":
        return "cuda:0"
    device = Simulated()
    find = lambda name, local=0: Device() if name == "cpu" else device  # noqa: E731
    monkeypatch.setattr("converters.io.cast.find_device", find)
    return device.name


@pytest.mark.parametrize("op", [Op.COPY, Op.ADD_ONE, Op.SUBTRACT_ONE])
@pytest.mark.parametrize("target", SHORT)
@pytest.mark.parametrize("source", SHORT)
def test_bits_are_those_of_the_cpu(source, target, op, gpu):
    with np.errstate(over="ignore", invalid="ignore"):
        given = values()[:5000].astype(SHORT[source]).reshape(50, 100).T
    bits = given.view(f"u{given.itemsize}")
    want = cast(bits, source, target, op)
    result = np.zeros(want.nbytes, np.uint8)
    caster = Caster(gpu)
    for _ in range(3):
        found = caster.cast(bits, dtype(source), dtype(target), op, result)
        assert (found == want).all()
        result[:] = 0


def test_an_export_has_the_same_bytes(gpu, tmp_path):
    def export(device):
        notes, options = [], ExportOptions(dtype=dtype("float16"), device=device)
        plan = plan_export(open_checkpoint(golden("llama_adam_tp2pp2")), tmp_path / device[:3], options)
        run_conversion(plan, listener=lambda event: notes.append(event.text) if isinstance(event, Note) else None)
        return tree(tmp_path / device[:3]), notes

    (host, _), (there, said) = export("cpu"), export(gpu)
    assert f"elements are cast on {gpu}" in said
    assert there == host


def test_what_needs_no_device_or_does_not_fit(gpu, monkeypatch):
    name, said = choose_device(gpu, computes=False)
    assert name == "cpu"
    assert "has no effect" in said
    monkeypatch.setattr(Simulated if gpu.startswith("sim") else Cuda, "room", lambda self: 100 << 20)
    assert choose_device(gpu, computes=True, buffers=25 << 20)[0] == gpu
    with pytest.raises(RequestError, match="has 100 MiB free, 104 MiB are needed"):
        choose_device(gpu, computes=True, buffers=26 << 20)
    monkeypatch.setattr("converters.io.cast.gpu_of", lambda local: gpu)
    assert choose_device("auto", computes=True, buffers=26 << 20)[0] == "cpu"


def test_a_cast_that_does_not_wait_is_found(gpu, monkeypatch):
    """The negative control, on the simulation alone."""
    if gpu.startswith("sim"):
        monkeypatch.setattr(Event, "synchronize", lambda self: None)
        given = values().view(np.uint32)
        assert not np.array_equal(cast(given, "float32", "bfloat16", device=gpu), cast(given, "float32", "bfloat16"))
