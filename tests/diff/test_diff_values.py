"""The numbers that `diff` gives about elements, against their definitions written out in plain fp64."""

from __future__ import annotations

import math

import numpy as np
import pytest

from converters.box import Box
from converters.comparison.values import Difference, DifferenceOf, Tolerance, prepared, prepared_type
from converters.dtypes import dtype
from converters.io.arithmetic import BLOCK, Arithmetic, examine_blocks, rounded, widened
from converters.planning.plan import Op

SIZES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
INF, NAN = math.inf, math.nan


def bits_of(values, name):
    """Values of a floating type as unsigned integers."""
    wide = np.asarray(values, np.float64).view("<u8")
    return rounded(wide, dtype("float64"), dtype(name))


def compare(a, b, kind_a, kind_b, tolerance=None):
    """What the check of `diff` finds in two arrays, as one tile."""
    check, arrays = DifferenceOf(kind_a, kind_b, tolerance), [np.ascontiguousarray(a), np.ascontiguousarray(b)]
    check.add(Box.whole(a.shape), examine_blocks(Arithmetic(), check, *arrays), arrays)
    return check.total


def plainly(a, b, tolerance, bits_differ):
    """The definitions, one element at a time."""
    out = {"differing": 0, "unequal": 0, "max_abs": 0.0, "max_rel": 0.0, "nan_a": 0, "nan_b": 0, "first": None}
    for n, (x, y) in enumerate(zip(a.tolist(), b.tolist(), strict=True)):
        same = x == y or (math.isnan(x) and math.isnan(y))
        out["unequal"] += not same
        out["nan_a"] += math.isnan(x) and not math.isnan(y)
        out["nan_b"] += math.isnan(y) and not math.isnan(x)
        if not same and not math.isnan(x) and not math.isnan(y):
            distance = abs(x - y)
            out["max_abs"] = max(out["max_abs"], distance)
            out["max_rel"] = max(out["max_rel"], distance / max(abs(x), abs(y)) if distance < INF else INF)
        if tolerance is None:
            differs = bool(bits_differ[n])
        else:
            near = abs(x - y) <= tolerance.atol + tolerance.rtol * max(abs(x), abs(y))
            differs = not same and not (math.isfinite(x) and math.isfinite(y) and near)
        if differs and out["first"] is None:
            out["first"] = n
        out["differing"] += differs
    use = np.isfinite(a) & np.isfinite(b)
    norms = np.linalg.norm(a[use]), np.linalg.norm(b[use])
    out["cosine"] = a[use] @ b[use] / norms[0] / norms[1] if all(norms) else float(norms[0] == norms[1])
    return out


def check(found, expected, shape):
    for name in ("differing", "unequal", "max_abs", "max_rel", "nan_a", "nan_b"):
        assert getattr(found, name) == expected[name], name
    assert found.cosine == pytest.approx(expected["cosine"], abs=1e-6)
    where = None if found.first is None else int(np.ravel_multi_index(found.first[0], shape))
    assert where == expected["first"]


SPECIAL = [0.0, -0.0, 1.0, -1.0, NAN, INF, -INF, 1e-7, 3.0, 65504.0]


@pytest.mark.parametrize("tolerance", [None, Tolerance(), Tolerance(0.1, 0), Tolerance(0, 0.5), Tolerance(0.01, 0.01)])
@pytest.mark.parametrize(
    "kinds", [("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "float32"), ("float64", "bfloat16")]
)
def test_special_values_meet_every_other(kinds, tolerance):
    a, b = (np.array(v) for v in zip(*[(x, y) for x in SPECIAL for y in SPECIAL], strict=True))
    bits = bits_of(a, kinds[0]), bits_of(b, kinds[1])
    values = [widened(x, dtype(k)) for x, k in zip(bits, kinds, strict=True)]
    unequal = ~((values[0] == values[1]) | (np.isnan(values[0]) & np.isnan(values[1])))
    expected = plainly(*values, tolerance, bits[0] != bits[1] if kinds[0] == kinds[1] else unequal)
    for shape in ((100,), (4, 25), (1, 100, 1)):
        found = compare(*(x.reshape(shape) for x in bits), *map(dtype, kinds), tolerance)
        check(found, expected, shape)


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("touched", [0, 500])
def test_random_values(name, touched, scale):
    generator = np.random.default_rng(touched)
    size = BLOCK + 17
    a = generator.standard_normal(size) * (scale if name != "float16" else 1.0)
    b = a.copy()
    at = generator.integers(0, size, touched)
    b[at] *= generator.standard_normal(touched)
    bits = bits_of(a, name), bits_of(b, name)
    values = [widened(x, dtype(name)) for x in bits]
    for tolerance in (None, Tolerance(0.5)):
        expected = plainly(*values, tolerance, bits[0] != bits[1])
        check(compare(*bits, dtype(name), dtype(name), tolerance), expected, (size,))


def test_bits_that_mean_the_same_differ_only_as_bits():
    kind = dtype("float32")
    a, b = np.array([0, 0x7FC00000, 5], "<u4"), np.array([0x80000000, 0x7FC00001, 5], "<u4")
    found = compare(a, b, kind, kind)
    assert (found.differing, found.unequal, found.max_abs, found.worst) == (2, 0, 0.0, None)
    assert found.first[0] == (0,)
    assert compare(a, b, kind, kind, Tolerance()).differing == 0


@pytest.mark.parametrize(
    ("name", "code"),
    [("int64", "<i8"), ("int32", "<i4"), ("int8", "i1"), ("uint8", "u1"), ("bool", "u1"), ("uint16", "<u2")],
)
def test_integers(name, code):
    a = np.array([1, 0, 1, 0], code)
    b = np.array([1, 1, 1, 0], code)
    kind = dtype(name)
    found = compare(a.view(f"u{kind.itemsize}"), b.view(f"u{kind.itemsize}"), kind, kind)
    assert (found.differing, found.max_abs, found.first) == (1, 1.0, ((1,), 0, 1))
    assert isinstance(found.first[1], int)


def test_large_integers_differ_although_doubles_cannot_tell():
    a, b = np.array([1 << 60], "<i8"), np.array([(1 << 60) + 1], "<i8")
    found = compare(a.view("<u8"), b.view("<u8"), dtype("int64"), dtype("int64"))
    assert (found.differing, found.first) == (1, ((0,), 1 << 60, (1 << 60) + 1))


@pytest.mark.parametrize(("atol", "differing"), [(0.0, 1), (0.5, 1), (1.0, 0)])
def test_a_tolerance_does_not_make_large_integers_equal(atol, differing):
    a, b = np.array([1 << 60, 7], "<i8"), np.array([(1 << 60) + 1, 7], "<i8")
    found = compare(a.view("<u8"), b.view("<u8"), dtype("int64"), dtype("int64"), Tolerance(atol=atol))
    assert (found.differing, found.unequal, found.max_abs) == (differing, 1, 1.0)


def test_float8_and_complex():
    kind = dtype("float8_e4m3fn")
    found = compare(np.array([0x38, 0x40], "u1"), np.array([0x38, 0x38], "u1"), kind, kind)
    assert found.first == ((1,), 2.0, 1.0)
    kind = dtype("complex64")
    a = np.array([1 + 2j, 3 + 4j], "<c8")
    found = compare(a.view("<u8"), (a * [1, 1j]).astype("<c8").view("<u8"), kind, kind)
    assert (found.differing, found.first[0]) == (1, (1,))
    assert found.max_abs == pytest.approx(abs((3 + 4j) - (3 + 4j) * 1j))


def test_what_is_rounded_is_recognised():
    values = np.random.default_rng(3).standard_normal(BLOCK + 5)
    wide, narrow = bits_of(values, "float32"), bits_of(values.astype("f4"), "bfloat16")
    found = compare(wide, narrow, dtype("float32"), dtype("bfloat16"))
    assert found.rounds_a
    assert not found.rounds_b
    narrow[-1] ^= 1
    assert not compare(wide, narrow, dtype("float32"), dtype("bfloat16")).rounds_a


def test_parts_add_up_to_the_whole_in_any_order():
    generator = np.random.default_rng(8)
    a = generator.standard_normal((64, 32)).astype("<f4")
    b = np.where(generator.random(a.shape) < 0.2, a * 1.5, a).astype("<f4")
    kind = dtype("float32")
    whole = compare(a.view("<u4"), b.view("<u4"), kind, kind)
    for order in (range(0, 64, 8), reversed(range(0, 64, 8))):
        total = Difference()
        for row in order:
            part = compare(a[row : row + 8].view("<u4"), b[row : row + 8].view("<u4"), kind, kind)
            for name in ("first", "worst"):
                spot = getattr(part, name)
                setattr(part, name, spot and spot._replace(position=(spot[0][0] + row, spot[0][1])))
            total.add(part)
        assert (total.differing, total.first, total.worst) == (whole.differing, whole.first, whole.worst)
        assert (total.max_abs, total.max_rel) == (whole.max_abs, whole.max_rel)
        assert total.cosine == pytest.approx(whole.cosine, rel=1e-6)


def test_norms_are_shifted_as_an_export_does_it():
    import torch

    stored = torch.randn(500, generator=torch.Generator().manual_seed(5)).bfloat16()
    bits = stored.view(torch.int16).numpy().view("<u2")
    for target in ("bfloat16", "float32", "float16"):
        shifted = prepared(bits, dtype("bfloat16"), Op.ADD_ONE, dtype(target))
        want = (stored.float() + 1).to(getattr(torch, target))
        assert prepared_type(dtype("bfloat16"), Op.ADD_ONE, dtype(target)) == dtype(target)
        assert (
            shifted == want.view(torch.int32 if target == "float32" else torch.int16).numpy().view(shifted.dtype)
        ).all()
