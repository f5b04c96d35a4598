"""Work shared by threads and ranks whose only result is an answer."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path

import pytest

from converters.errors import DistckptError, FormatError, Interrupted, RequestError
from converters.events import Moved, StopFlag
from converters.execute.rank_folder import RankFolder
from converters.execute.ranks import Ranks
from converters.execute.work_sharing import WorkSharing, scratch_folder


@dataclass(frozen=True)
class Task:
    number: int
    nbytes: int


class Squares:
    """Squares the number of a task; fails at one that it is told to fail at."""

    opened = closed = 0

    def __init__(self, sharing: WorkSharing, fail_at: int | None = None) -> None:
        type(self).opened += 1
        self._sharing, self._fail_at = sharing, fail_at

    def do(self, task: Task) -> dict[str, int]:
        self._sharing.check()
        if task.number == self._fail_at:
            raise FormatError(f"task {task.number} cannot be read")
        self._sharing.report(Moved(task.nbytes))
        return {"square": task.number**2}

    def close(self) -> None:
        type(self).closed += 1


TASKS = [Task(n, 1 + n % 7) for n in range(40)]
SQUARES = {n: {"square": n**2} for n in range(40)}


def test_one_process(tmp_path):
    events = []
    Squares.opened = Squares.closed = 0
    with WorkSharing("test", "x", threads=3, listener=events.append) as sharing:
        assert sharing.leads
        assert sharing.map(TASKS, lambda: Squares(sharing)) == SQUARES
        assert sharing.finish({"good": True}) == {"good": True}
    assert sum(event.nbytes for event in events) == sum(task.nbytes for task in TASKS)
    assert Squares.opened == Squares.closed == 3
    assert not [t for t in threading.enumerate() if t.name.startswith("distckpt")]


def test_a_failure_ends_all_threads():
    with WorkSharing("test", "x", threads=4) as sharing, pytest.raises(FormatError, match="task 7"):
        sharing.map(TASKS, lambda: Squares(sharing, fail_at=7))
    assert not [t for t in threading.enumerate() if t.name.startswith("distckpt")]


def test_interruption():
    stop = StopFlag()
    stop.set(15)
    with WorkSharing("test", "x", stop=stop) as sharing, pytest.raises(Interrupted) as caught:
        sharing.map(TASKS, lambda: Squares(sharing))
    assert caught.value.signum == 15


def together(tmp_path: Path, world: int, fingerprints: list[str] | None = None, fail_at: int | None = None) -> list:
    """What each of some ranks gets, or raises; each is a thread here."""
    out: list = [None] * world

    def one(rank: int) -> None:
        ranks = Ranks(rank, world, rank, launch=tmp_path.name)
        print_ = (fingerprints or ["same"] * world)[rank]
        try:
            with WorkSharing("test", print_, ranks=ranks, scratch=tmp_path) as sharing:
                results = sharing.map(TASKS, lambda: Squares(sharing, fail_at))
                answer = sharing.finish(len(results) if sharing.leads else -1)
                out[rank] = (results, answer)
        except DistckptError as error:
            out[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return out


def test_ranks_share_the_tasks_and_agree(tmp_path):
    out = together(tmp_path, 3)
    assert [answer for _, answer in out] == [40] * 3
    assert out[0][0] == SQUARES
    own = [set(results) for results, _ in out[1:]]
    assert all(own)
    assert not own[0] & own[1]
    assert list(tmp_path.iterdir()) == []


def test_ranks_meet_once_for_several_lists(tmp_path, monkeypatch):
    """A proof and what follows it; what is not done in the second list only rank 0 knows."""
    met, arrive = [], RankFolder.arrive
    monkeypatch.setattr(RankFolder, "arrive", lambda *arguments: met.append(1) or arrive(*arguments))
    out, shares = [None] * 3, []

    def one(rank):
        with WorkSharing(
            "test", "x", ranks=Ranks(rank, 3, rank, tmp_path.name, 5.0), destination=tmp_path / "out"
        ) as sharing:
            first = sharing.map(TASKS, lambda: Squares(sharing))
            second = sharing.map(
                TASKS,
                lambda: Squares(sharing),
                todo=TASKS[30:] if sharing.leads else None,
                on_shares=lambda parts: shares.append((rank, sum(map(len, parts)))),
            )
            numbers = sharing.gather(rank)
            out[rank] = sharing.finish(None), first, second, numbers

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert out[0][1:] == (SQUARES, {n: SQUARES[n] for n in range(30, 40)}, [0, 1, 2])
    assert dict(shares)[0] == 10
    assert sum(count for rank, count in shares if rank) < 10
    assert len(met) == 3
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("moment", ["between", "in the second"])
def test_a_rank_that_ends_before_the_last_list_is_missed(tmp_path, moment):
    """Having done its share of the first it is not done."""
    errors = {}

    def one(rank):
        try:
            with WorkSharing(
                "test", "x", ranks=Ranks(rank, 2, rank, tmp_path.name), destination=tmp_path / "out"
            ) as sharing:
                sharing.map(TASKS, lambda: Squares(sharing))
                if rank == 1 and moment == "between":
                    raise FormatError("the disk is gone")
                sharing.map(TASKS, lambda: Squares(sharing, fail_at=39))
                sharing.finish(None)
        except DistckptError as error:
            errors[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {type(error) for error in errors.values()} == {FormatError}
    assert len(errors) == 2


def test_a_failure_on_one_rank_is_raised_on_all(tmp_path):
    out = together(tmp_path, 3, fail_at=39)  # the last task, which is not rank 0's
    assert [type(error) for error in out] == [FormatError] * 3
    assert all("task 39 cannot be read" in error.message for error in out)


def test_ranks_that_see_something_else(tmp_path):
    out = together(tmp_path, 2, fingerprints=["one", "other"])
    assert isinstance(out[0], RequestError)
    assert "do all ranks see the same files?" in out[0].message
    assert isinstance(out[1], DistckptError)


@pytest.mark.parametrize(
    ("asked", "env", "shared"),
    [
        (None, {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}, False),
        (None, {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, True),
        (None, {"SLURM_STEP_NUM_NODES": "1"}, False),
        (None, {}, True),
    ],
)
def test_where_ranks_meet(asked, env, shared):
    """On several machines nobody knows a shared folder better than the person who started the job there."""
    assert (scratch_folder(asked, env) == Path.cwd()) == shared


def test_where_ranks_meet_when_told(tmp_path):
    assert scratch_folder(str(tmp_path), {}) == tmp_path
