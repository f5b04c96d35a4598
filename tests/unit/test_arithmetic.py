"""What is computed of elements, block by block, against torch and against a reading of all elements at once in fp64."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys

import numpy as np
import pytest
import torch

from converters.dtypes import dtype
from converters.io.arithmetic import BLOCK, CASTABLE, Arithmetic, examine_blocks, rounded, unequal, widened
from converters.verification.values import count
from harness.checkpoints import golden, run_cli

FLOATS = (*CASTABLE, "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu")
SPECIAL = [0.0, -0.0, 1.0, -1.0, 1e-45, 3e-42, 1e-8, 65504.0, 65520.0, 3e38, -3e38, math.inf, -math.inf, math.nan]


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


@pytest.mark.parametrize("name", FLOATS)
def test_statistics(name):
    kind, bits = dtype(name), elements(name, BLOCK + 5, 1)
    rows = examine_blocks(Arithmetic(), lambda on, x: count(on, x, kind), bits)
    values = widened(bits, kind)
    finite = values[np.isfinite(values)]
    least = torch.finfo(getattr(torch, name)).smallest_normal if kind.itemsize > 1 else 0.0
    want = [np.isnan(values).sum(), np.isinf(values).sum(), (values == 0).sum()]
    assert rows[:, :3].sum(0).tolist() == want
    assert rows[:, 3].sum() == ((np.abs(values) < least) & (values != 0)).sum()
    assert (rows[:, 4].min(), rows[:, 5].max()) == (finite.min(), finite.max())
    with np.errstate(over="ignore"):
        assert rows[:, 6].sum() == pytest.approx((finite * finite).sum(), rel=1e-6)
    assert not rows[:, 7].any()


@pytest.mark.parametrize("kinds", itertools.product(CASTABLE, repeat=2), ids="/".join)
def test_masters_beside_weights(kinds):
    kind_a, kind_b = map(dtype, kinds)
    a = elements(kinds[0], BLOCK + 300, 0)
    b = rounded(a, kind_a, kind_b).copy()
    b[[5, 300, BLOCK + 1]] ^= 1
    rows = examine_blocks(Arithmetic(), lambda on, x, y: unequal(on, x, y, kind_a, kind_b), a, b)
    assert rows[:, 0].tolist() == [2, 1]
    assert rows[0, 1] == 5


@pytest.mark.parametrize("kinds", itertools.permutations(CASTABLE, 2), ids="/".join)
def test_rounding_is_that_of_torch(kinds):
    bits, (source, target) = elements(kinds[0], 50_000, 1), (getattr(torch, name) for name in kinds)
    wide = torch.from_numpy(bits.view(f"<i{bits.itemsize}")).view(source)
    want = wide.to(target)
    got = torch.from_numpy(rounded(bits, *map(dtype, kinds)).view(f"<i{target.itemsize}")).view(target)
    assert torch.equal(torch.nan_to_num(want, nan=7.0), torch.nan_to_num(got, nan=7.0))
    assert torch.equal(want.isnan(), got.isnan())


def test_a_sum_does_not_depend_on_what_it_is_called_with():
    """A tree: one element after the other gives another sum, the same numbers in a longer scratch row the same."""
    values = np.random.default_rng(2).standard_normal(BLOCK - 7).astype("<f4")
    arithmetic = Arithmetic()
    (total,) = arithmetic.sums((values, values))
    arithmetic.wide(0, np.ones(BLOCK))
    assert arithmetic.sums((values, values), (values, values)).tolist() == [total, total]
    products = values * values
    assert float(products.cumsum()[-1]) != total
    while products.size > 1:
        half = 1 << (products.size - 1).bit_length() >> 1
        rest = products.size - half
        products = np.concatenate([products[:rest] + products[half:], products[rest:half]])
    assert float(products[0]) == total


@pytest.mark.parametrize("command", [("verify", "--values"), ("diff", golden("llama_adam_tp2pp2"))])
def test_nothing_but_casts_runs_on_a_device(command):
    done = run_cli(*command, golden("llama_adam_tp2pp2"), "--device", "cuda")
    assert done.returncode == 2
    assert "--device" in done.stderr


def test_the_library_needs_no_torch_to_compare():
    where = str(golden("llama_adam_tp2pp2"))
    code = (
        "import sys; from distckpt_cli.app import main\n"
        f"code = main(['diff', {where!r}, {where!r}])\n"
        "assert code == 0; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
