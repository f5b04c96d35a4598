"""How bytes reach the disk: large pieces past the page cache where the kernel can, in order and complete in any case."""

import errno
import os

import pytest

from converters.execute import disk

PIECE = bytes(range(256)) * 8192  # 2 MiB


@pytest.fixture
def calls(monkeypatch):
    """The calls of `os.pwritev` and `os.pwrite`, and a kernel that has RWF_DONTCACHE whatever runs here."""
    log = []
    real = os.pwrite

    def pwrite(fd, view, offset):
        log.append(("pwrite", len(view)))
        return real(fd, view, offset)

    def pwritev(fd, views, offset, flags):
        assert flags == 0x80
        log.append(("pwritev", len(views[0])))
        return real(fd, views[0], offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    monkeypatch.setattr(os, "pwritev", pwritev)
    monkeypatch.setattr(disk, "_DONTCACHE", [0x80])
    return log


def written(path, *pieces):
    with disk.opened(path, os.O_RDWR | os.O_CREAT) as fd:
        for data, offset in pieces:
            disk.write_at(fd, data, offset)
    return path.read_bytes()


def test_large_pieces_leave_the_page_cache_and_small_ones_stay(tmp_path, calls):
    assert written(tmp_path / "f", (PIECE, 0), (b"end", len(PIECE))) == PIECE + b"end"
    assert calls == [("pwritev", len(PIECE)), ("pwrite", 3)]


def test_a_short_write_goes_on_where_it_ended(tmp_path, calls, monkeypatch):
    whole = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda fd, views, offset, flags: whole(fd, [views[0][:1234567]], offset, flags))
    assert written(tmp_path / "f", (PIECE, 5))[5:] == PIECE
    assert calls == [("pwritev", 1234567), ("pwrite", len(PIECE) - 1234567)]


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS])
def test_where_the_kernel_cannot_the_plain_way_is_taken_at_once_and_from_then_on(tmp_path, calls, monkeypatch, number):
    def refused(*_):
        calls.append("refused")
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pwritev", refused)
    assert written(tmp_path / "f", (PIECE, 0), (PIECE, len(PIECE))) == 2 * PIECE
    assert calls == ["refused", ("pwrite", len(PIECE)), ("pwrite", len(PIECE))]


def test_a_disk_that_fails_is_not_taken_for_one_that_cannot(tmp_path, calls, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(OSError, match="No space left"):
        written(tmp_path / "f", (PIECE, 0))
    assert calls == []


def test_the_real_kernel_keeps_every_byte(tmp_path):
    assert written(tmp_path / "f", (PIECE, 4096), (PIECE[::-1], 3), (PIECE, 4096)) == (
        PIECE[::-1][: 4096 - 3].rjust(4096, b"\0") + PIECE
    )
