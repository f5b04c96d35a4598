"""Geometry: the laws everything else stands on."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from converters.box import Box, contiguous_tiles, find_overlap, flat_range, runs, tiling_fault, uncovered

shapes = st.lists(st.integers(1, 6), min_size=0, max_size=4).map(tuple)


@st.composite
def boxes_in(draw, shape):
    start = tuple(draw(st.integers(0, n - 1)) for n in shape)
    return Box(start, tuple(draw(st.integers(1, n - a)) for a, n in zip(start, shape, strict=True)))


@st.composite
def box_pairs(draw):
    shape = draw(shapes)
    return shape, draw(boxes_in(shape)), draw(boxes_in(shape))


@given(box_pairs())
def test_intersection_commutes_and_is_what_an_array_says(case):
    shape, a, b = case
    mask = np.zeros(shape, int)
    mask[a.slices] += 1
    mask[b.slices] += 1
    both = a.intersect(b)
    assert both == b.intersect(a)
    assert (0 if both is None else both.volume) == int((mask == 2).sum())
    if both is not None:
        assert both.relative_to(a.start).inside(a.shape)
        assert both.relative_to(a.start).shifted(a.start) == both


@given(box_pairs(), st.integers(1, 40))
def test_contiguous_tiles_cover_a_box_once_in_order_and_fit(case, limit):
    _, box, _ = case
    tiles = list(contiguous_tiles(box, limit))
    assert all(tile.volume <= limit for tile in tiles)
    order = np.arange(box.volume).reshape(box.shape)
    seen = [order[tile.relative_to(box.start).slices].reshape(-1) for tile in tiles]
    assert np.concatenate(seen).tolist() == list(range(box.volume))  # in C order, each contiguous, none twice


@given(box_pairs())
def test_runs_visit_exactly_the_elements_of_a_box(case):
    shape, box, _ = case
    order = np.arange(int(np.prod(shape, dtype=int))).reshape(shape)
    first, length, outer = runs(box, shape)
    offsets = [0]
    for count, stride in outer:
        offsets = [o + i * stride for o in offsets for i in range(count)]
    visited = [first + o + i for o in offsets for i in range(length)]
    assert visited == order[box.slices].reshape(-1).tolist()


@given(shapes.filter(bool), st.data())
def test_a_flat_range_is_few_boxes_that_hold_exactly_it(shape, data):
    total = int(np.prod(shape))
    start = data.draw(st.integers(0, total - 1))
    length = data.draw(st.integers(1, total - start))
    found = list(flat_range(shape, start, length))
    order = np.arange(total).reshape(shape)
    assert np.concatenate([order[b.slices].reshape(-1) for b in found]).tolist() == list(range(start, start + length))
    assert len(found) <= 2 * len(shape) - 1


@given(shapes, st.data())
def test_gaps_and_overlaps_are_found_exactly_when_an_array_has_them(shape, data):
    boxes = data.draw(st.lists(boxes_in(shape), max_size=6))
    count = np.zeros(shape, int)
    for box in boxes:
        count[box.slices] += 1
    gap = uncovered(shape, boxes)
    assert (gap is None) == bool((count > 0).all())
    if gap is not None:
        assert gap.volume > 0
        assert not count[gap.slices].any()
    twice = find_overlap(boxes)
    assert (twice is None) == bool((count <= 1).all())
    if twice is not None:
        assert twice[0] != twice[1]
        assert boxes[twice[0]].intersect(boxes[twice[1]]) is not None


def fault_of(shape, boxes):
    starts = np.array([box.start for box in boxes], np.int64).reshape(len(boxes), len(shape))
    return tiling_fault(shape, starts, np.array([box.shape for box in boxes], np.int64).reshape(starts.shape))


@given(shapes, st.data())
def test_a_fault_of_a_tiling_is_found_exactly_when_an_array_has_one(shape, data):
    boxes = data.draw(st.lists(boxes_in(shape), max_size=6))
    count = np.zeros(shape, int)
    for box in boxes:
        count[box.slices] += 1
    fault = fault_of(shape, boxes)
    assert (fault is None) == bool((count == 1).all())
    if fault is not None:
        where, rows = fault
        assert len(rows) == len(set(rows)) == min(2, int(count[where.slices].max()))
        assert not (count[where.slices] == 1).any()
        assert all(boxes[row].intersect(where) == where for row in rows)


def test_many_long_boxes_are_no_hard_case():
    """Rows that all begin together, beside columns: a sweep looks at every row again for every column."""
    n = 20_000
    boxes = [Box((0, i), (n, 1)) for i in range(n)] + [Box((i, n), (1, n)) for i in range(n)]
    steps = [Box((i, i), (n, 1)) for i in range(n)]
    begin = time.process_time()
    assert fault_of((n, 2 * n), boxes) is None
    assert uncovered((n, 2 * n), boxes) is None
    assert find_overlap(boxes) is None
    assert fault_of((n, 2 * n), boxes[:-1]) == (boxes[-1], [])
    assert fault_of((n, 2 * n), [*boxes, boxes[7]])[1] == [7, 2 * n]
    assert not fault_of((2 * n, n), steps)[1]
    assert time.process_time() - begin < 30  # less than one; looking at every row for every column takes minutes


def test_a_scalar_is_one_tile_without_axes():
    assert list(contiguous_tiles(Box((), ()), 1)) == [Box((), ())]
    assert runs(Box((), ()), ()) == (0, 1, [])
    assert uncovered((), []) == Box((), ())
    assert uncovered((), [Box((), ())]) is None


def test_an_empty_array_needs_no_boxes():
    assert uncovered((3, 0), []) is None
    assert list(contiguous_tiles(Box((0, 0), (3, 0)), 5)) == []


@pytest.mark.parametrize(("box", "shape", "inside"), [(Box((0,), (3,)), (3,), True), (Box((1,), (3,)), (3,), False)])
def test_inside(box, shape, inside):
    assert box.inside(shape) is inside
