"""Many ranks: who takes part, who does what, and the files by which they keep together. Processes: test_ranks_run.py."""

import errno
import itertools
import json
import os
import threading
import time
from pathlib import Path
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from converters.errors import (
    DamagedFileError,
    DestinationError,
    FormatError,
    IntegrityError,
    Interrupted,
    RequestError,
    StoreError,
    UnsupportedError,
)
from converters.events import FileDone, Moved, StopFlag
from converters.execute import journal
from converters.execute.destination import beside
from converters.execute.error_json import Stopped, pack_error, unpack_error
from converters.execute.publish import Staging
from converters.execute.rank_folder import RankFolder, claim, end_earlier_runs, is_locked
from converters.execute.ranks import Ranks, listed, shares, spans
from converters.formats import open_checkpoint
from converters.planning.tasks import Task
from converters.write.export import ExportOptions, plan_export
from converters.write.write_plan import run_conversion
from harness.checkpoints import golden, tree, write_llama
from harness.processes import wait_until

MIB = 1 << 20

# ---------------------------------------------------------------------- who takes part

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "x", "MASTER_PORT": "29500"}
SRUN = {"SLURM_PROCID": "5", "SLURM_NTASKS": "6", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "77"}


def without(env, name):
    return {key: value for key, value in env.items() if key != name}


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, (0, 1, 0)),
        (TORCHRUN, (3, 8, 1)),
        (SRUN, (5, 6, 1)),
        (SRUN | TORCHRUN, (3, 8, 1)),  # torchrun started by srun
        (SRUN | {"SLURM_STEP_NUM_TASKS": "1"}, (0, 1, 0)),  # one task of a larger allocation
        (without(SRUN, "SLURM_STEP_ID"), (0, 1, 0)),  # a batch script
        (SRUN | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, (0, 1, 0)),
        (without(TORCHRUN, "LOCAL_RANK"), (0, 1, 0)),  # a pod of a training job, a person typing
        (TORCHRUN | {"WORLD_SIZE": "1", "RANK": "0"}, (0, 1, 0)),
        (TORCHRUN | {"RANK": "x"}, (0, 1, 0)),
        (TORCHRUN | {"RANK": "8"}, (0, 1, 0)),
    ],
)
def test_ranks_from_the_environment(env, expected):
    ranks = Ranks.from_environment(env)
    assert (ranks.rank, ranks.world, ranks.local) == expected


def test_a_launch_is_told_from_another():
    other = TORCHRUN | {"TORCHELASTIC_RUN_ID": "y"}
    same = TORCHRUN | {"RANK": "1", "LOCAL_RANK": "0"}
    assert Ranks.from_environment(TORCHRUN).launch == Ranks.from_environment(same).launch
    assert Ranks.from_environment(TORCHRUN).launch != Ranks.from_environment(other).launch
    assert Ranks.from_environment(SRUN).launch != Ranks.from_environment(SRUN | {"SLURM_STEP_ID": "1"}).launch


# ---------------------------------------------------------------------- who does what


@given(st.lists(st.integers(0, 1 << 40), max_size=200), st.integers(1, 40))
def test_shares_are_the_plan_cut_in_balanced_ranges(sizes, world):
    tasks = [Task(number, (), frozenset(), nbytes) for number, nbytes in enumerate(sizes)]
    parts = shares(tasks, world)
    assert len(parts) == world
    assert [task for part in parts for task in part] == tasks
    mean, largest = sum(sizes) / world, max(sizes, default=0)
    for part in parts:
        assert abs(sum(task.nbytes for task in part) - mean) <= largest + 1


@given(st.sets(st.integers(0, 60)))
def test_spans_are_the_numbers(numbers):
    found = spans(sorted(numbers))
    assert [n for first, end in found for n in range(first, end)] == sorted(numbers)
    assert all(end < after for (_, end), (after, _) in itertools.pairwise(found))


def test_ranks_are_named_as_a_person_would():
    assert [listed(r) for r in ([2], [0, 1, 2, 7], [3, 5])] == ["rank 2", "ranks 0..2, 7", "ranks 3, 5"]


# ---------------------------------------------------------------------- locks, journals, errors


def test_a_lock_says_who_lives(tmp_path):
    path = tmp_path / "lock-1"
    assert not is_locked(path)
    fd, locked = claim(path)
    assert locked
    assert is_locked(path)
    assert claim(path) is None
    os.close(fd)
    assert not is_locked(path)
    path.unlink()


def test_ranks_of_an_earlier_run_have_to_end(tmp_path, monkeypatch):
    monkeypatch.setattr("converters.execute.rank_folder._PATIENCE", 0.3)
    (tmp_path / "rank-0").write_text("{}")
    fd, _ = claim(tmp_path / "lock-2")
    with pytest.raises(DestinationError, match="rank 2 of an earlier run"):
        end_earlier_runs([tmp_path])
    assert not (tmp_path / "rank-0").exists()  # so that it learns that it is over
    os.close(fd)
    end_earlier_runs([tmp_path])
    assert not tmp_path.exists()


def test_an_earlier_run_that_lives_keeps_its_files(tmp_path, monkeypatch):
    """A second launch must not begin anew in a folder into which ranks of the first still write."""
    monkeypatch.setattr("converters.execute.rank_folder._PATIENCE", 0.2)
    meeting = beside(tmp_path / "out", "ranks-00000000")
    meeting.mkdir()
    fd, _ = claim(meeting / "lock-1")
    with pytest.raises(DestinationError, match="earlier run"):
        Staging(tmp_path / "out", "f", [])
    os.close(fd)
    Staging(tmp_path / "out", "f", []).close()
    assert not meeting.exists()


def test_a_full_disk_can_still_be_told_of(tmp_path, monkeypatch):
    board = RankFolder(tmp_path, 1)
    board.write("rank-1", {"state": "here", "more": "x" * 50})

    def full(path, data):
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(Path, "write_bytes", full)
    board.write("rank-1", {"state": "failed"})
    assert board.read("rank-1") == {"state": "failed"}
    with pytest.raises(DestinationError, match="disk is full"):
        board.write("rank-2", {"state": "here"})


def lines(path, fingerprint, *documents):
    text = [json.dumps(document) + "\n" for document in (journal.header(fingerprint), *documents)]
    path.write_text("".join(text))


def line(*tasks):
    return {"tasks": list(tasks), "sums": [], "written": [], "losses": []}


def test_journals_of_all_ranks_become_one(tmp_path):
    first = Staging(tmp_path / "out", "f", [])
    first.journal.append(line(0))
    first.close()
    folder = first.folder
    lines(folder / ".journal-1", "f", line(4), line(5, 6))
    lines(folder / ".journal-2", "other", line(7))
    lines(folder / ".journal-3", "f", line(0), line(8, 9))  # line 0 was taken over before a crash
    with (folder / ".journal-3").open("a") as file:
        file.write('{"tasks": [10], "su')  # a crash within a line
    second = Staging(tmp_path / "out", "f", [])
    assert [entry["tasks"] for entry in second.journal.lines] == [[0], [4], [5, 6], [8, 9]]
    assert sorted(path.name for path in folder.iterdir()) == [".journal"]
    second.close()
    third = Staging(tmp_path / "out", "f", [])
    assert third.journal.lines == second.journal.lines
    third.publish()
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize(
    "error",
    [
        IntegrityError("a", details=["b"], hint="c", tensor="d"),
        DestinationError("full"),
        UnsupportedError("another form"),
        DamagedFileError("ckpt", {"common.pt": "common.pt is damaged"}, hint="c"),
        StoreError("no answer"),
        Interrupted(15, "stopped"),
        ZeroDivisionError("oops"),
    ],
)
def test_errors_arrive_with_the_same_exit_code(error):
    there = unpack_error(json.loads(json.dumps(pack_error(error))), "rank 3 on node7")
    text = f"{there.message} {there.details}"
    assert there.exit_code == getattr(error, "exit_code", 70)
    assert "rank 3 on node7" in text
    assert str(error).split("\n")[0] in text
    assert isinstance(there, Stopped) == isinstance(error, Interrupted)
    assert isinstance(there, FormatError) == isinstance(error, FormatError)


def test_passing_trouble_stays_passing():
    error = IntegrityError("a")
    error.__cause__ = OSError("stale handle")
    assert isinstance(unpack_error(pack_error(error), None).__cause__, OSError)


# ---------------------------------------------------------------------- the ranks of a run, as threads of this process


class Outcome:
    def __init__(self):
        self.stats, self.errors, self.events = {}, {}, []


def together(source, into, world, *, stops=None, ranks=None, late=0.0, late_rank=0, timeouts=(), **options):
    """Exports with several ranks, each a thread with a plan of its own; `late` is seconds, or waits for something."""
    outcome = Outcome()

    def one(rank):
        try:
            asked = {"max_memory": MIB, "threads": 2, "max_shard_bytes": 4 * MIB} | options
            asked = {k: v(rank) if callable(v) else v for k, v in asked.items()}
            plan = plan_export(open_checkpoint(source), into, ExportOptions(**asked))
            if rank == late_rank:
                late() if callable(late) else time.sleep(late)
            me = Ranks(rank, world, rank, "threads", dict(timeouts).get(rank, 600.0))
            listener = outcome.events.append if rank == 0 else None
            stop = stops[rank] if stops else None
            outcome.stats[rank] = run_conversion(plan, listener=listener, stop=stop, ranks=me)
        except BaseException as error:
            outcome.errors[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in (range(world) if ranks is None else ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcome


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A Llama of 32 MB and what one process makes of it."""
    root = tmp_path_factory.mktemp("llama")
    write_llama(root / "src")
    plan = plan_export(open_checkpoint(root / "src"), root / "out", ExportOptions(max_shard_bytes=4 * MIB))
    return root / "src", tree(root / "out"), run_conversion(plan), tree(root / "out")


def left_beside(into):
    return sorted(path.name for path in into.parent.iterdir() if path != into)


@pytest.mark.parametrize("late", [0.0, 0.4])
@pytest.mark.parametrize("world", [2, 5])
def test_ranks_make_the_same_bytes_and_read_each_once(llama, tmp_path, world, late):
    source, _, alone, expected = llama
    outcome = together(source, tmp_path / "out", world, late=late)
    assert not outcome.errors
    assert tree(tmp_path / "out") == expected
    assert left_beside(tmp_path / "out") == []
    stats = outcome.stats[0]
    assert (stats.bytes_written, stats.records_checked) == (alone.bytes_written, alone.records_checked)
    assert stats.bytes_read <= 1.02 * alone.bytes_read
    for rank in range(1, world):  # nobody was idle
        assert outcome.stats[rank].bytes_written > 0.5 * alone.bytes_written / world
    moved = sum(event.nbytes for event in outcome.events if isinstance(event, Moved))
    assert moved == alone.bytes_written
    done = [event.name for event in outcome.events if isinstance(event, FileDone)]
    assert sorted(done) == sorted(name for name in expected if name.endswith(".safetensors"))


def test_more_ranks_than_tasks(tmp_path):
    source = golden("llama_adam_tp2pp2")
    outcome = together(source, tmp_path / "out", 7)
    assert not outcome.errors
    run_conversion(plan_export(open_checkpoint(source), tmp_path / "alone", ExportOptions(max_shard_bytes=4 * MIB)))
    assert tree(tmp_path / "out") == tree(tmp_path / "alone")


@pytest.mark.parametrize("late_rank", [0, 1, 2])
def test_ranks_must_plan_the_same(late_rank, llama, tmp_path):
    size = {"max_shard_bytes": lambda rank: (9 if rank == 2 else 4) * MIB}
    outcome = together(llama[0], tmp_path / "out", 3, late=0.5, late_rank=late_rank, **size)
    assert {type(error) for error in outcome.errors.values()} == {RequestError}
    assert len(outcome.errors) == 3
    assert "rank 2 on" in str(outcome.errors[0])
    assert "do all ranks see the same files" in str(outcome.errors[0])
    assert [outcome.errors[r].shown_here for r in (1, 2)] == [False, False]
    assert left_beside(tmp_path / "out") == []  # found out before anything was written
    assert not (tmp_path / "out").exists()


def test_a_rank_that_never_comes(llama, tmp_path, monkeypatch):
    monkeypatch.setattr("converters.execute.rank_sync._ARRIVAL", 0.01)  # of a timeout that who has come keeps

    def rank_2_has_come():
        wait_until(lambda: [*tmp_path.glob(".out.distckpt-ranks-*/rank-2")])

    timeouts = {0: 60.0, 2: 60_000.0}  # rank 2 waits for rank 0 however slow the machine is
    outcome = together(llama[0], tmp_path / "out", 4, ranks=(0, 2), late=rank_2_has_come, timeouts=timeouts)
    assert "ranks 1, 3 did not start within 0.6 s" in str(outcome.errors[0])
    assert isinstance(outcome.errors[2], Interrupted)
    assert not (tmp_path / "out").exists()


def test_rank_0_that_never_comes(llama, tmp_path, monkeypatch):
    monkeypatch.setattr("converters.execute.rank_sync._ARRIVAL", 0.01)
    outcome = together(llama[0], tmp_path / "out", 4, ranks=(1, 2), timeouts={1: 60.0, 2: 60.0})
    assert all("rank 0 did not start within 0.6 s" in str(error) for error in outcome.errors.values())
    assert len(outcome.errors) == 2
    assert not (tmp_path / "out").exists()


def test_a_signal_to_one_rank_stops_all(llama, tmp_path):
    stops = [StopFlag() for _ in range(3)]
    stops[1].set(15)
    outcome = together(llama[0], tmp_path / "out", 3, stops=stops)
    assert all(isinstance(error, Interrupted) for error in outcome.errors.values())
    assert {error.signum for error in outcome.errors.values()} == {15}
    assert len(outcome.errors) == 3
    assert not (tmp_path / "out").exists()
    assert not together(llama[0], tmp_path / "out", 2).errors
    assert tree(tmp_path / "out") == llama[3]


def test_rank_0_learns_of_a_failure_before_it_came(llama, tmp_path):
    """It takes the word of a process that has ended for an earlier run's, and would wait for rank 1 until its time is up."""
    stops = [StopFlag() for _ in range(3)]
    stops[1].set(15)
    meeting = tmp_path / f".out.distckpt-ranks-{crc32(b'threads'):08x}"

    def rank_1_has_failed():
        wait_until(lambda: isinstance(status := RankFolder(meeting, 0).read("rank-1"), dict) and status["error"])
        time.sleep(0.5)  # in which a rank that does not wait is gone

    outcome = together(
        llama[0], tmp_path / "out", 3, stops=stops, late=rank_1_has_failed, timeouts=dict.fromkeys(range(3), 3.0)
    )
    assert sorted(outcome.errors) == [0, 1, 2]
    assert {error.signum for error in outcome.errors.values()} == {15}
    assert "did not start" not in str(outcome.errors[0])
    assert outcome.errors[1].shown_here is False  # rank 0 shows it
    assert left_beside(tmp_path / "out") == []


@pytest.mark.parametrize("state", ["over", "gone"])
def test_passing_trouble_with_the_last_word(llama, tmp_path, monkeypatch, state):
    """Nor with tidying up: the work is done, and all ranks say so."""
    original, failed = RankFolder.write, []

    def write(board, name, document):
        if document.get("state") == state and len(failed) < 2:
            failed.append(name)
            raise DestinationError("passing trouble")
        original(board, name, document)

    def trouble(*_, **__):
        raise OSError(errno.ESTALE, "stale")

    monkeypatch.setattr(RankFolder, "write", write)
    monkeypatch.setattr("converters.execute.disk.shutil.rmtree", trouble)
    outcome = together(llama[0], tmp_path / "out", 2)
    assert len(failed) == 2
    assert not outcome.errors
    assert tree(tmp_path / "out") == llama[3]


def test_what_an_earlier_run_left_fools_nobody(llama, tmp_path):
    """Same launch, so the same folder: old words of every kind, also one that says that all is over."""
    board = RankFolder(beside(tmp_path / "out", f"ranks-{crc32(b'threads'):08x}"), 0)
    board.folder.mkdir()
    old = {
        "nonce": "0",
        "fingerprint": "old",
        "host": "h",
        "machine": "m",
        "locked": True,
        "beat": 9,
        "step": 9,
        "error": None,
    }
    nonces = {"nonces": {"1": "1", "2": "2"}}
    board.write("rank-0", old | nonces | {"state": "over"})
    board.write("rank-1", old | {"nonce": "1", "state": "done", "error": pack_error(IntegrityError("old"))})
    board.write("rank-2", old | {"nonce": "2", "state": "done"})
    for step in range(1, 5):
        board.write(f"document-{step}-1", {"nonce": "1", "value": {"0": {}}})
        board.write(f"document-{step}-0", {"nonce": "0", "value": [[], [], []]})
    (board.folder / "rank-1.new").write_text("{")
    outcome = together(llama[0], tmp_path / "out", 3, late=0.3)
    assert not outcome.errors
    assert tree(tmp_path / "out") == llama[3]
