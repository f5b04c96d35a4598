"""What is computed of elements, on a device and on the host: equal to the last bit, whatever the elements are."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from checkpoints import copy_golden, golden, run_cli
from diff_cases import set_element
from simulated import Simulated

from converters.comparison.compare import DiffOptions, plan_diff, run_diff
from converters.comparison.values import Pairwise, Tolerance
from converters.dtypes import dtype
from converters.errors import RequestError
from converters.events import Note
from converters.execute.ranks import Ranks
from converters.formats import open_checkpoint
from converters.io.arithmetic import BLOCK, CASTABLE, OnDevice, OnHost, examined, rounded, unequal
from converters.io.block_runner import Examiner, looking_device
from converters.io.device import Host
from converters.io.platforms import find_device
from converters.verification.run import VerifyOptions, verify
from converters.verification.values import count

FLOATS = (*CASTABLE, "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu")
SPECIAL = [0.0, -0.0, 1.0, -1.0, 1e-45, 3e-42, 1e-8, 65504.0, 65520.0, 3e38, -3e38, math.inf, -math.inf, math.nan]


@pytest.fixture(params=["simulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    """The device that is called cuda:0."""
    if request.param == "cuda":
        return find_device("cuda:0")
    made = Simulated()
    monkeypatch.setattr(
        "converters.io.block_runner.find_device", lambda name, local=0: made if "cuda" in name else Host()
    )
    return made


def elements(name, size, seed):
    """Bits of a type: what is special, what is like a weight, and anything."""
    rng, kind = np.random.default_rng(seed), dtype(name)
    anything = rng.integers(0, 256, (size, kind.itemsize), np.uint8).reshape(-1).view(f"<u{kind.itemsize}")
    if kind.itemsize == 1:
        return anything
    usual = rng.standard_normal(size) * 0.02
    usual[: len(SPECIAL) ** 2] = np.resize(SPECIAL if seed % 2 else np.repeat(SPECIAL, len(SPECIAL)), len(SPECIAL) ** 2)
    bits = rounded(usual.view("<u8"), dtype("float64"), kind)
    return np.where(rng.random(size) < 0.01, anything, bits)


def looked(device, examine, *arrays, tiles=5):
    """Rows of an examiner on a device, of equal tiles that come one after the other."""
    rows, nbytes = [], [array.nbytes for array in arrays]
    examiner = Examiner(device, sum(-(-n // 64) * 64 for n in nbytes))

    def gather(into):
        for piece, array in zip(into, arrays, strict=True):
            if piece is not None:
                piece[:] = array.view(np.uint8)
        return [a if p is None else p.view(a.dtype) for p, a in zip(into, arrays, strict=True)]

    for _ in range(tiles):
        examiner.look(nbytes, gather, examine, lambda found, _: rows.append(found))
    examiner.flush()
    examiner.close()
    assert len(rows) == tiles
    assert all(same(rows[0], more) for more in rows)
    return rows[0]


def same(a, b):
    """Equal bits, but for the sign of NaN and of zero, of which extremes have none."""
    return np.array_equal(a + 0.0, b + 0.0, equal_nan=True)


@pytest.mark.parametrize("tolerance", [None, Tolerance(0.1, 0.01)])
@pytest.mark.parametrize("kinds", [*((k, k) for k in FLOATS), *itertools.permutations(CASTABLE, 2)], ids="/".join)
def test_differences(device, kinds, tolerance):
    size = 2 * BLOCK + 77
    a, b = (elements(name, size, seed) for seed, name in enumerate(kinds))
    pair = Pairwise(*map(dtype, kinds), tolerance)
    if kinds[0] == kinds[1]:
        a[BLOCK : 2 * BLOCK] = b[BLOCK : 2 * BLOCK]  # a block of equal bits, in which the host looks no further
    want = examined(OnHost(), pair, a, b)
    found = looked(device, pair, a, b, tiles=2)
    assert same(found, want)
    assert repr(pair.difference(found, [a, b])) == repr(pair.difference(want, [a, b]))  # NaN is not itself


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("what", ["mixed", "usual", "constant", "zero", "nan"])
def test_statistics(device, name, what):
    kind, bits = dtype(name), elements(name, BLOCK + 5, 1)
    if what != "mixed":
        bits = bits[len(SPECIAL) ** 2 :] if what == "usual" else np.full_like(bits, bits[7])
        value = {"constant": 1.5, "zero": 0.0, "nan": math.nan}.get(what)
        if value is not None and kind.itemsize > 1:
            bits[:] = rounded(np.array([value]).view("<u8"), dtype("float64"), kind)
    want = examined(OnHost(), lambda on, x: count(on, x, kind), bits)
    assert same(looked(device, lambda on, x: count(on, x, kind), bits), want)


@pytest.mark.parametrize("kinds", itertools.product(CASTABLE, repeat=2), ids="/".join)
def test_masters_beside_weights(device, kinds):
    kind_a, kind_b = map(dtype, kinds)
    a = elements(kinds[0], BLOCK + 300, 0)
    b = rounded(a, kind_a, kind_b).copy()
    b[[5, 300, BLOCK + 1]] ^= 1
    examine = lambda on, x, y: unequal(on, x, y, kind_a, kind_b)  # noqa: E731
    rows = examined(OnHost(), examine, a, b)
    assert rows[:, 0].tolist() == [2, 1]
    assert rows[0, 1] == 5
    assert same(looked(device, examine, a, b), rows)


@pytest.mark.parametrize("kinds", itertools.permutations(CASTABLE, 2), ids="/".join)
def test_rounding_is_that_of_torch(kinds):
    bits, (source, target) = elements(kinds[0], 50_000, 1), (getattr(torch, name) for name in kinds)
    wide = torch.from_numpy(bits.view(f"<i{bits.itemsize}")).view(source)
    want = wide.to(target)
    found = torch.from_numpy(rounded(bits, *map(dtype, kinds)).view(f"<i{target.itemsize}")).view(target)
    assert torch.equal(torch.nan_to_num(want, nan=7.0), torch.nan_to_num(found, nan=7.0))
    assert torch.equal(want.isnan(), found.isnan())


def test_a_sum_in_another_order_is_found(device, monkeypatch):
    """The negative control: one element after the other."""

    def sums(self, *pairs, use=None):
        found = [(x * y).cpu().numpy().cumsum(-1)[..., -1] for x, y in pairs]
        return [torch.from_numpy(total).double().to(pairs[0][0].device) for total in found]

    monkeypatch.setattr(OnDevice, "sums", sums)
    kind = dtype("float32")
    bits = np.random.default_rng(2).standard_normal(BLOCK).astype("<f4").view("<u4")
    want = examined(OnHost(), lambda on, x: count(on, x, kind), bits)
    assert not same(looked(device, lambda on, x: count(on, x, kind), bits), want)


def told(options, path, **more):
    events = []
    report = verify(open_checkpoint(path), VerifyOptions(values=True, **options), listener=events.append, **more)
    return report, [event.text for event in events if isinstance(event, Note)]


@pytest.mark.parametrize("name", ["llama_adam_tp2pp2", "llama_dpreshardable_tp2pp2dp2", "gpt_adam_tp2pp2"])
def test_verify_finds_the_same(device, name, tmp_path):
    copy = copy_golden(name, tmp_path / "ckpt")
    set_element(copy, "decoder.layers.0.mlp.linear_fc2.weight", (3, 4), lambda bits: 0x7F80)
    set_element(copy, "decoder.layers.1.mlp.linear_fc2.weight", (3, 5), lambda bits: bits ^ 1)
    for path in (golden(name), copy):
        (host, _), (there, said) = told({"device": "cpu"}, path), told({"device": "cuda:0"}, path)
        assert said == ["values are looked at on " + device.name]
        documents = [{**report.document(), "seconds": 0} for report in (host, there)]
        assert documents[0] == documents[1]
        assert host.good == (path != copy)


def test_diff_finds_the_same(device, tmp_path):
    a = golden("llama_adam_tp2pp2")
    changed = copy_golden("llama_adam_tp2pp2", tmp_path / "ckpt")
    for name, index in (("decoder.layers.0.mlp.linear_fc2.weight", (3, 4)), ("output_layer.weight", (7, 7))):
        set_element(changed, name, index, lambda bits: bits ^ 0x8000)
    for b in (a, changed, golden("llama_dpreshardable_buckets_tp2dp2"), golden("v009_zarr_llama_adam_tp2pp2")):
        for tolerance in (None, Tolerance(0.1, 1e-3)):
            reports = [
                run_diff(plan_diff(open_checkpoint(a), open_checkpoint(b), DiffOptions(tolerance, device=where)))
                for where in ("cpu", "cuda:0")
            ]
            assert reports[0].identical == reports[1].identical
            assert reports[0].bytes_read == reports[1].bytes_read
            assert [(t.values, t.padding) for t in reports[0].tensors] == [
                (t.values, t.padding) for t in reports[1].tensors
            ]
    assert not reports[0].identical


# ---------------------------------------------------------------------- which device


def test_which_device(device, monkeypatch):
    """A GPU where it pays, as it is asked for, and an error with the numbers where it is too small."""
    needs = {"threads": 2, "tile_bytes": 4 << 20, "elements": 1 << 20}
    assert looking_device("cpu", 1 << 40, **needs)[1] is None
    assert looking_device("auto", 1 << 30, **needs)[0].unified
    assert looking_device("cuda:0", 0, **needs)[1].endswith("the device has nothing to do")
    assert looking_device("cuda:0", 1, **needs) == (device, f"values are looked at on {device.name}") or device.serial()
    monkeypatch.setattr("converters.io.block_runner.gpu_of", lambda local: f"cuda:{local}")
    found, said = looking_device("auto", 1 << 40, **needs)
    assert not found.unified
    assert said.startswith("values are looked at on ")
    monkeypatch.setattr(type(device), "room", lambda self: 100 << 20)
    with pytest.raises(RequestError, match=r"has 100 MiB free, 280 MiB are needed"):
        looking_device("cuda:0", 1, **needs)
    found, said = looking_device("auto", 1 << 40, **needs)
    assert found.unified
    assert said.endswith("280 MiB are needed: values are looked at on the cpu")


def test_each_rank_takes_the_gpu_of_its_number(monkeypatch):
    asked = []

    def find(name, local=0):
        asked.append((name, local))
        return Simulated()

    monkeypatch.setattr("converters.io.block_runner.find_device", find)
    a = open_checkpoint(golden("llama_adam_tp2pp2"))
    run_diff(plan_diff(a, a, DiffOptions(device="cuda")), ranks=Ranks(local=3))
    told({"device": "cuda"}, golden("llama_adam_tp2pp2"), ranks=Ranks(local=5))
    assert asked == [("cuda", 3), ("cuda", 5)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("command", [("verify", "--values"), ("diff", golden("llama_adam_tp2pp2"))])
def test_a_missing_gpu_is_an_error(command):
    where = golden("llama_adam_tp2pp2")
    done = run_cli(*command, where, "--device", "cuda")
    assert done.returncode == 4
    assert "there is no device cuda" in done.stderr
    assert run_cli(*command, where, "--device", "auto").returncode == 0
    refused = run_cli(command[0], *command[1:], where, "--quick", "--device", "cuda")
    assert refused.returncode == 2


def test_the_library_needs_no_torch_for_the_host():
    import subprocess
    import sys

    where = str(golden("llama_adam_tp2pp2"))
    code = (
        "import sys; from distckpt_cli.app import main\n"
        f"code = main(['diff', {where!r}, {where!r}, '--device', 'cpu'])\n"
        "assert code == 0; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
