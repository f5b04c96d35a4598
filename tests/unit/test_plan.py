"""The proof of coverage must hold for every right plan and fail for every wrong one."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from converters.box import Box, contiguous_tiles
from converters.dtypes import dtype
from converters.errors import RequestError
from converters.planning.plan import Copy, Drop, Op, Piece, Target, end_to_end, pieces_of, prove, reversed_copy

BF16 = dtype("bfloat16")


def one_to_one(shape, limit):
    copies = [Copy("s", box, "t", box) for box in contiguous_tiles(Box.whole(shape), limit)]
    return {"s": shape}, Target("t", BF16, shape), copies


def check(sources, target, copies, drops=()):
    prove(pieces_of({target.name: target}, copies).values(), sources, drops)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple), st.integers(1, 20), st.data())
def test_any_tiling_is_accepted_and_any_omission_is_refused(shape, limit, data):
    sources, target, copies = one_to_one(shape, limit)
    check(sources, target, copies)
    check({"t": shape}, Target("s", BF16, shape), [reversed_copy(c) for c in copies])
    lost = data.draw(st.integers(0, len(copies) - 1))
    with pytest.raises(RequestError):
        check(sources, target, copies[:lost] + copies[lost + 1 :])
    with pytest.raises(RequestError, match="twice"):
        check(sources, target, [*copies, copies[lost]])


def test_an_unused_source_needs_a_reason():
    sources, target, copies = one_to_one((4, 2), 8)
    sources["extra.layers.0.weight"] = (3,)
    with pytest.raises(RequestError, match="lost without a reason"):
        check(sources, target, copies)
    check(sources, target, copies, [Drop("extra.layers.0.weight", None, "not needed")])


def test_part_of_a_source_may_be_dropped_but_not_more_than_that():
    target = Target("t", BF16, (3, 2))
    copies = [Copy("s", Box((0, 0), (3, 2)), "t", Box((0, 0), (3, 2)))]
    check({"s": (4, 2)}, target, copies, [Drop("s", Box((3, 0), (1, 2)), "padding")])
    with pytest.raises(RequestError, match=r"\[4:5, 0:2\] go nowhere"):
        check({"s": (5, 2)}, target, copies, [Drop("s", Box((3, 0), (1, 2)), "padding")])


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
    sources, target, copies = one_to_one((4, 2), 8)
    with pytest.raises(RequestError, match=message):
        check(sources, target, [dataclasses.replace(copies[0], **change)])


def test_a_transpose_swaps_the_axes_and_is_its_own_inverse():
    copy = Copy("s", Box((0, 0), (2, 3)), "t", Box((0, 0), (3, 2)), Op.TRANSPOSE)
    check({"s": (2, 3)}, Target("t", BF16, (3, 2)), [copy])
    assert reversed_copy(reversed_copy(copy)) == copy
    assert reversed_copy(dataclasses.replace(copy, op=Op.ADD_ONE)).op is Op.SUBTRACT_ONE


def test_many_lost_tensors_are_folded():
    sources = {f"decoder.layers.{i}.mlp.router.weight": (2,) for i in range(32)}
    with pytest.raises(RequestError) as caught:
        prove([], sources)
    assert caught.value.details == ["decoder.layers.{0..31}.mlp.router.weight"]


def test_a_part_of_the_work_need_not_use_all_of_a_source():
    sources, target, copies = one_to_one((4, 2), 8)
    prove(pieces_of({"t": target}, copies).values(), sources | {"other": (3,)}, None)
    with pytest.raises(RequestError, match="nothing in the checkpoint fills 1 target"):
        prove([Piece("t", BF16, (4, 2))], sources, None)


@pytest.mark.parametrize(
    ("fills", "message"),
    [
        ([Box((0,), (3,))], r"nothing fills t \[3:4\]"),
        ([Box((0,), (4,)), Box((2,), (2,))], "written twice"),
        ([Box((0,), (5,))], "outside"),
    ],
)
def test_what_no_source_fills_must_be_said_exactly(fills, message):
    prove([Piece("t", BF16, (4,), fills=[Box((0,), (4,))])], {})
    with pytest.raises(RequestError, match=message):
        prove([Piece("t", BF16, (4,), fills=fills)], {})


def test_pieces_of_a_flat_array_lie_end_to_end_with_gaps_between():
    pieces = [Piece("a", BF16, (2, 2)), Piece("b", BF16, (3,))]
    laid = end_to_end(zip([1, 5], pieces, strict=True), BF16, 10)
    assert [(piece.shape, bool(piece.fills)) for piece in laid] == [
        ((1,), True),
        ((2, 2), False),
        ((3,), False),
        ((2,), True),
    ]
    for first, numel, message in (([1, 4], 10, "where others reach to 5"), ([1, 5], 7, "ends at element 8 of 7")):
        with pytest.raises(RequestError, match=message):
            end_to_end(zip(first, pieces, strict=True), BF16, numel)
