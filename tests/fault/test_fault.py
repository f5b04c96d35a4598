"""A failing system call at any point of a command: the result is complete or absent, the source untouched, a rerun good.

The faults are injected by `fault.c`, loaded with LD_PRELOAD into a warm process (`server.py`) that forks for every case.
"""

import itertools
import os
import subprocess

import pytest
from injection import COMMANDS, COMPILER, case_of

from harness.checkpoints import run_cli, write_llama

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C compiler: faults cannot be injected")

SAMPLE = {"export-hf": 40, "rank 0": 12, "rank 1": 12}  # points of a command that the default suite tries


@pytest.fixture(scope="module")
def case(server, memory):
    return case_of(server, memory(), "export-hf")


def sweep(case, area, step=1):
    tried, published, violations = 0, 0, []
    for call, nth, action in itertools.islice(case.points(area), 0, None, step):
        tried += 1
        try:
            published += case.check(area, call, nth, action)[1]
        except AssertionError as error:
            violations.append(str(error))
    assert not violations, f"{len(violations)} of {tried} points:\n" + "\n\n".join(violations[:20])
    assert case.times() == case.stats
    case.unchanged()
    return tried, published


def test_the_shim_counts_and_fails(case):
    """The proof would be empty if nothing failed: known points, known answers."""
    counts = case.counts[case.out.parent]
    assert counts["fsync"] >= 8
    assert counts["pwrite"] >= 10
    assert counts["rename"] == 1
    assert case.counts[case.source]["preadv"] >= 10
    assert case.check(case.out.parent, "pwrite", 1, "ENOSPC") == (5, False)
    case.clean()
    assert "disk is full" in case.server.run(case.argv, "pwrite", 1, "ENOSPC", case.out.parent)[2]
    assert case.check(case.out.parent, "rename", 1, "EIO") == (5, False)
    assert case.check(case.out.parent, "rename", 1, "AFTER") == (-9, True)
    assert case.check(case.out.parent, "fsync", 3, "KILL") == (-9, False)
    assert case.check(case.out.parent, "fallocate", 1, "ENOSPC") == (5, False)
    assert case.check(case.out.parent, "fallocate", 2, "EOPNOTSUPP") == (0, True)
    assert case.check(case.source, "preadv", 2, "EIO") == (3, False)
    assert case.check(case.source, "preadv", 2, "SHORT") == (0, True)


def test_the_last_sync_says_that_the_result_is_there(case):
    last = case.counts[case.out.parent]["fsync"]
    case.clean()
    code, _, text = case.server.run(case.argv, "fsync", last, "EIO", case.out.parent)
    assert code == 5
    assert case.complete()
    assert "is complete" in text
    assert "nothing was published" not in text


def test_a_failing_rename_loses_no_work(case):
    case.clean()
    assert case.server.run(case.argv, "rename", 1, "EIO", case.out.parent)[0] == 5
    code, _, text = case.server.run(case.argv)
    assert (code, case.complete()) == (0, True)
    assert "kept from before" in text


@pytest.mark.parametrize("command", COMMANDS)
def test_faults(server, memory, command):
    """A sample of the points; `--all` tries many more."""
    case = case_of(server, memory(), command)
    for area in case.areas():
        points, most = sum(1 for _ in case.points(area)), SAMPLE.get(command, 16) // len(case.areas())
        tried, _ = sweep(case, area, step=points // most)
        assert tried >= most


@pytest.mark.slow
@pytest.mark.timeout(6000)
@pytest.mark.parametrize("command", COMMANDS)
def test_every_fault(server, memory, command, record_property):
    case = case_of(server, memory(), command)
    tried = sum(sweep(case, area)[0] for area in case.areas())
    record_property("points", tried)
    print(f"{command}: {tried} points, none violated")
    assert tried >= 150


@pytest.mark.parametrize("command", ["replacing", "swapping"])
def test_what_is_replaced_is_there_until_the_result_is(server, memory, command):
    """Every rename and removal, and the syncs around them."""
    case = case_of(server, memory(), command)
    area, outcomes = case.out.parent, set()
    assert case.counts[area]["rename"] == {"replacing": 1, "swapping": 4}[command]
    last = case.counts[area]["fsync"]
    for call, nth, action in case.points(area):
        if call in ("rename", "unlink", "rmdir") or (call == "fsync" and nth >= last - 1):
            outcomes.add(case.check(area, call, nth, action))
    assert outcomes == {(-9, False), (-9, True), (5, False), (5, True)}


# ---------------------------------------------------------------------- a disk that is really full


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "small"
    folder.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", folder]).returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_too_small_a_disk_is_refused_before_anything_is_written(small_disk, tmp_path):
    write_llama(tmp_path / "src", layers=2, hidden=256, ffn=512, vocab=2048)
    done = run_cli("export-hf", tmp_path / "src", small_disk / "out", "--progress", "off")
    assert done.returncode == 5
    assert "not enough room" in done.stderr
    assert "bytes are needed" in done.stderr
    assert "1,048,576 are free" in done.stderr
    assert not list(small_disk.iterdir())


def test_a_disk_that_fills_up_meanwhile(small_disk, tmp_path, monkeypatch):
    """Room when it was planned, none when it is written; with room again the same command goes on."""
    from converters.errors import DestinationError
    from converters.formats import open_checkpoint
    from converters.write import export, write_plan

    write_llama(tmp_path / "src", layers=2, hidden=64, ffn=256, vocab=2048)
    plan = export.plan_export(open_checkpoint(tmp_path / "src"), small_disk / "out")
    assert not write_plan._lack_of_room(plan.destination, plan.job.bytes_written)
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"x" * (700 << 10))
    monkeypatch.setattr(write_plan, "_lack_of_room", lambda *_: "")
    with pytest.raises(DestinationError, match="disk is full") as caught:
        write_plan.run_conversion(plan)
    assert "free some space" in caught.value.hint
    assert not (small_disk / "out").exists()
    ballast.unlink()
    write_plan.run_conversion(plan)
    assert (small_disk / "out" / "model.safetensors").exists()
