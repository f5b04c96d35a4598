"""The proof of coverage must hold for every right plan and fail for every wrong one."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from converters.box import Box, contiguous_tiles
from converters.dtypes import dtype
from converters.errors import RequestError
from converters.planning.plan import Copy, Drop, Op, Target, prove, reversed_copy

BF16 = dtype("bfloat16")


def one_to_one(shape, limit):
    copies = [Copy("s", box, "t", box) for box in contiguous_tiles(Box.whole(shape), limit)]
    return {"s": shape}, {"t": Target("t", BF16, shape)}, copies


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple), st.integers(1, 20), st.data())
def test_any_tiling_is_accepted_and_any_omission_is_refused(shape, limit, data):
    sources, targets, copies = one_to_one(shape, limit)
    prove(sources, targets, copies, [])
    prove({"t": shape}, {"s": Target("s", BF16, shape)}, [reversed_copy(c) for c in copies], [])
    lost = data.draw(st.integers(0, len(copies) - 1))
    with pytest.raises(RequestError):
        prove(sources, targets, copies[:lost] + copies[lost + 1 :], [])
    with pytest.raises(RequestError, match="twice"):
        prove(sources, targets, [*copies, copies[lost]], [])


def test_an_unused_source_needs_a_reason():
    sources, targets, copies = one_to_one((4, 2), 8)
    sources["extra.layers.0.weight"] = (3,)
    with pytest.raises(RequestError, match="lost without a reason"):
        prove(sources, targets, copies, [])
    prove(sources, targets, copies, [Drop("extra.layers.0.weight", None, "not needed")])


def test_part_of_a_source_may_be_dropped_but_not_more_than_that():
    targets = {"t": Target("t", BF16, (3, 2))}
    copies = [Copy("s", Box((0, 0), (3, 2)), "t", Box((0, 0), (3, 2)))]
    prove({"s": (4, 2)}, targets, copies, [Drop("s", Box((3, 0), (1, 2)), "padding")])
    with pytest.raises(RequestError, match=r"\[4:5, 0:2\] go nowhere"):
        prove({"s": (5, 2)}, targets, copies, [Drop("s", Box((3, 0), (1, 2)), "padding")])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source": "nowhere"}, "has no tensor nowhere"),
        ({"target": "nowhere"}, "not a tensor of the target"),
        ({"source_box": Box((3, 0), (4, 2))}, "lies outside s"),
        ({"target_box": Box((0, 0), (2, 4))}, "lies outside t"),
        ({"source_box": Box((0, 0), (4, 1))}, "does not fit"),
        ({"op": Op.TRANSPOSE}, "does not fit"),
    ],
)
def test_a_wrong_copy_is_refused_by_name(change, message):
    sources, targets, copies = one_to_one((4, 2), 8)
    with pytest.raises(RequestError, match=message):
        prove(sources, targets, [dataclasses.replace(copies[0], **change)], [])


def test_a_transpose_swaps_the_axes_and_is_its_own_inverse():
    copy = Copy("s", Box((0, 0), (2, 3)), "t", Box((0, 0), (3, 2)), Op.TRANSPOSE)
    prove({"s": (2, 3)}, {"t": Target("t", BF16, (3, 2))}, [copy], [])
    assert reversed_copy(reversed_copy(copy)) == copy
    assert reversed_copy(dataclasses.replace(copy, op=Op.ADD_ONE)).op is Op.SUBTRACT_ONE


def test_many_lost_tensors_are_folded():
    sources = {f"decoder.layers.{i}.mlp.router.weight": (2,) for i in range(32)}
    with pytest.raises(RequestError) as caught:
        prove(sources, {}, [], [])
    assert caught.value.details == ["decoder.layers.{0..31}.mlp.router.weight"]
