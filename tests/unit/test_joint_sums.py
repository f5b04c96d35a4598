"""Checksums put together from pieces that several processes have read, in any order."""

import itertools
import random
import threading
import zlib

import pytest

from converters.io.joint_sums import JointSums, shifted


def cut(data, count, seed):
    """`(start, end)` of pieces that tile the data, shuffled."""
    dice = random.Random(seed)
    ends = [0, *sorted(dice.sample(range(1, len(data)), count - 1)), len(data)]
    pieces = list(itertools.pairwise(ends))
    dice.shuffle(pieces)
    return pieces


@pytest.mark.parametrize("size", [2, 3, 64, 4097, 100_003])
def test_pieces_in_any_order_make_the_whole(size):
    data = random.Random(size).randbytes(size)
    sums = JointSums()
    for a, b in cut(data, min(size - 1, 17), 1):
        assert sums.take(5, size) is None
        sums.add(5, (a, b - a, zlib.crc32(data[a:b])))
    assert sums.take(5, size) == zlib.crc32(data)
    assert sums.take(5, size) is None
    assert sums.whole_records == [5]


@pytest.mark.parametrize("rows", [1, 2, 3, 1000])
def test_columns_make_the_whole(rows):
    data = random.Random(rows).randbytes(rows * 96)
    sums = JointSums()
    for start, width in ((32, 64), (0, 32)):
        runs = [zlib.crc32(data[i * 96 + start :][:width]) for i in range(rows)]
        sums.add_runs(1, start, 96, width, runs)
    assert sums.take(1, len(data)) == zlib.crc32(data)


def test_a_wrong_piece_is_noticed():
    data = bytearray(random.Random(0).randbytes(1000))
    sums = JointSums()
    sums.add(1, (0, 400, zlib.crc32(data[:400])))
    data[700] ^= 1
    sums.add(1, (400, 600, zlib.crc32(data[400:])))
    data[700] ^= 1
    assert sums.take(1, 1000) not in (None, zlib.crc32(data))


def test_processes_put_together_what_counts_for_the_job():
    data = random.Random(7).randbytes(9000)
    values = []
    for mine in ((0, 3000), (3000, 4000), (4000, 9000)):
        sums = JointSums()
        sums.count(alone=True, joint=False)  # a replica, which another process counts
        sums.add(1, (8000, 1000, zlib.crc32(data[8000:])))
        sums.count(alone=False, joint=True)
        sums.add(1, (mine[0], mine[1] - mine[0], zlib.crc32(data[slice(*mine)])))
        assert sums.partial == [1]
        values.append(sums.joint[1])
    assert sum(nbytes for nbytes, _ in values) == 9000
    value = 0
    for _, one in values:
        value ^= one
    assert shifted(value, 9000) == zlib.crc32(data)


def test_each_thread_says_for_itself_what_counts():
    sums = JointSums()
    sums.count(alone=False, joint=False)

    def other():
        sums.count(alone=True, joint=True)
        sums.add(2, (0, 3, zlib.crc32(b"abc")))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    sums.add(3, (0, 3, zlib.crc32(b"abc")))
    assert list(sums.joint) == sums.partial == [2]
    sums.forget(2)
    assert sums.take(2, 3) is None
