"""Work shared by threads and ranks whose only result is an answer."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path

import pytest

from converters.engine.crew import Crew, scratch_folder
from converters.engine.ranks import Ranks
from converters.errors import DistckptError, FormatError, Interrupted, RequestError
from converters.events import Moved, StopFlag


@dataclass(frozen=True)
class Task:
    number: int
    nbytes: int


class Squares:
    """Squares the number of a task; fails at one that it is told to fail at."""

    opened = closed = 0

    def __init__(self, crew: Crew, fail_at: int | None = None) -> None:
        type(self).opened += 1
        self._crew, self._fail_at = crew, fail_at

    def do(self, task: Task) -> dict[str, int]:
        self._crew.check()
        if task.number == self._fail_at:
            raise FormatError(f"task {task.number} cannot be read")
        self._crew.moved(Moved(task.nbytes), task.nbytes)
        return {"square": task.number**2}

    def close(self) -> None:
        type(self).closed += 1


TASKS = [Task(n, 1 + n % 7) for n in range(40)]
SQUARES = {n: {"square": n**2} for n in range(40)}


def test_one_process(tmp_path):
    events = []
    Squares.opened = Squares.closed = 0
    with Crew("test", "x", threads=3, listener=events.append) as crew:
        assert crew.leads
        assert crew.map(TASKS, lambda: Squares(crew)) == SQUARES
        assert crew.agree({"good": True}) == {"good": True}
    assert sum(event.nbytes for event in events) == sum(task.nbytes for task in TASKS)
    assert Squares.opened == Squares.closed == 3
    assert not [t for t in threading.enumerate() if t.name.startswith("distckpt")]


def test_a_failure_ends_all_threads():
    with Crew("test", "x", threads=4) as crew, pytest.raises(FormatError, match="task 7"):
        crew.map(TASKS, lambda: Squares(crew, fail_at=7))
    assert not [t for t in threading.enumerate() if t.name.startswith("distckpt")]


def test_interruption():
    stop = StopFlag()
    stop.set(15)
    with Crew("test", "x", stop=stop) as crew, pytest.raises(Interrupted) as caught:
        crew.map(TASKS, lambda: Squares(crew))
    assert caught.value.signum == 15


def together(tmp_path: Path, world: int, fingerprints: list[str] | None = None, fail_at: int | None = None) -> list:
    """What each of some ranks gets, or raises; each is a thread here."""
    out: list = [None] * world

    def one(rank: int) -> None:
        ranks = Ranks(rank, world, rank, launch=tmp_path.name, timeout=5.0)
        print_ = (fingerprints or ["same"] * world)[rank]
        try:
            with Crew("test", print_, ranks=ranks, scratch=tmp_path) as crew:
                results = crew.map(TASKS, lambda: Squares(crew, fail_at))
                answer = crew.agree(len(results) if crew.leads else -1)
                out[rank] = (results, answer)
        except DistckptError as error:
            out[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return out


def test_ranks_share_the_tasks_and_agree(tmp_path):
    out = together(tmp_path, 3)
    assert [answer for _, answer in out] == [40] * 3
    assert out[0][0] == SQUARES
    own = [set(results) for results, _ in out[1:]]
    assert all(own)
    assert not own[0] & own[1]
    assert list(tmp_path.iterdir()) == []


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
