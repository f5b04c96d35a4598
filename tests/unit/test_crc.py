"""Sums of pieces in any order equal the sum of the whole."""

from __future__ import annotations

import itertools
import zlib

from hypothesis import given
from hypothesis import strategies as st

from converters.crc import RecordSums, crc32_combine, crc_of_zeros


@given(st.binary(), st.binary())
def test_combine_is_the_sum_of_the_concatenation(a, b):
    assert crc32_combine(zlib.crc32(a), zlib.crc32(b), len(b)) == zlib.crc32(a + b)


@given(st.binary(min_size=1, max_size=300), st.data())
def test_pieces_in_any_order_give_the_sum_of_the_record(data, draws):
    cuts = sorted({0, len(data), *draws.draw(st.lists(st.integers(0, len(data)), max_size=8))})
    pieces = [(a, b - a, zlib.crc32(data[a:b])) for a, b in itertools.pairwise(cuts)]
    sums = RecordSums()
    order = draws.draw(st.permutations(pieces))
    for piece in order[:-1]:
        sums.add(7, piece)
    if len(pieces) > 1:
        assert sums.take(7, len(data)) is None
        assert sums.gaps(7, len(data)) == [order[-1][:2]]
    sums.add(7, order[-1])
    assert sums.gaps(7, len(data)) == []
    assert len(sums.pieces[7]) == 1  # merged: memory does not grow with the number of pieces
    assert sums.take(7, len(data)) == zlib.crc32(data)


@given(st.integers(0, 5000))
def test_zeros_have_the_sum_of_zeros(count):
    assert crc_of_zeros(count) == zlib.crc32(bytes(count))
