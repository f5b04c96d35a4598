"""The engine: the same bytes whatever the workers, the memory and the interruptions; nothing wrong is ever published."""

import errno
import itertools
import json
import os
import random
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

from converters.dtypes import from_option
from converters.errors import DestinationError, IntegrityError, Interrupted, RequestError
from converters.events import Moved, StopFlag
from converters.execute import run as engine
from converters.execute.journal import Journal
from converters.formats import open_checkpoint
from converters.write.export import ExportOptions, plan_export
from converters.write.write_plan import run_conversion
from harness.checkpoints import copy_golden, flip, payloads, tree, write_llama
from harness.processes import finish, start
from harness.support import GOLDEN

MIB = 1 << 20
DRIVER = Path(__file__).parents[1] / "harness" / "engine_driver.py"


def export(source, into, **options):
    plan = plan_export(open_checkpoint(source), into, ExportOptions(**options))
    return plan, run_conversion(plan)


def partial(folder):
    return folder.with_name(f".{folder.name}.distckpt-partial")


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A Llama of 32 MB and what an uninterrupted export makes of it."""
    root = tmp_path_factory.mktemp("llama")
    write_llama(root / "src")
    export(root / "src", root / "out", max_shard_bytes=4 * MIB)
    return root / "src", tree(root / "out")


# ---------------------------------------------------------------------- the same bytes, each read once


@pytest.mark.parametrize("source", ["llama", "v009_llama_modelspace_tp2pp2dp2", "gpt_untied_weights_tp2pp2"])
def test_bytes_do_not_depend_on_workers_or_memory(source, llama, tmp_path):
    source = llama[0] if source == "llama" else GOLDEN / source
    digests, tiles = [], set()
    for number, (threads, memory) in enumerate(
        [(1, 64 * MIB), (2, 64 * MIB), (8, 256 * MIB), (1, MIB // 4), (2, MIB // 2), (8, 5 * MIB)]
    ):
        plan, _ = export(source, tmp_path / str(number), threads=threads, max_memory=memory, max_shard_bytes=4 * MIB)
        assert plan.job.peak_memory <= memory
        tiles.add((plan.job.tile_bytes, plan.job.threads))
        digests.append(tree(tmp_path / str(number)))
    assert len(tiles) > 3
    assert all(digest == digests[0] for digest in digests)


@pytest.mark.parametrize("threads", [1, 2, 8])
@pytest.mark.parametrize("memory", [MIB, 64 * MIB])
def test_every_byte_is_read_once_and_every_record_checked(threads, memory, llama, tmp_path):
    plan, stats = export(llama[0], tmp_path / "out", threads=threads, max_memory=memory)
    needed = sum(plan.reader.catalog.tensors[name].nbytes for name in plan.job.sources)
    records = {chunk.record for name in plan.job.sources for chunk in plan.job.sources[name].chunks()}
    assert needed <= stats.bytes_read <= 1.02 * needed
    assert stats.records_checked == len(records)
    assert stats.bytes_kept == 0


def test_views_on_a_larger_storage_are_checked_too(tmp_path):
    """Megatron-Core 0.9 saved views: the record's checksum covers more than the tensor; the rest is read for it."""
    plan, stats = export(GOLDEN / "v009_llama_modelspace_tp2pp2dp2", tmp_path / "out")
    records = {chunk.record for name in plan.job.sources for chunk in plan.job.sources[name].chunks()}
    assert stats.records_checked == len(records)


def test_too_little_memory_is_refused(llama, tmp_path):
    with pytest.raises(RequestError, match="max-memory"):
        export(llama[0], tmp_path / "out", max_memory=1000)
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------------- memory


def drive(*args):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
    return start([sys.executable, DRIVER, *args], env=environment)


def answer_of(child):
    ((out, noise),) = finish([child])
    assert out, noise
    return json.loads(out.splitlines()[-1])


SLACK = 8 * MIB  # interpreter, thread stacks, reports


@pytest.fixture(scope="module")
def big(tmp_path_factory):
    root = tmp_path_factory.mktemp("big")
    size = write_llama(root / "src", layers=8, hidden=1024, ffn=2816, vocab=16384)
    assert size >= 200_000_000
    yield root / "src"
    shutil.rmtree(root)


@pytest.mark.parametrize(
    "options",
    [
        ["threads=2"],
        ["threads=4", f"max_memory={128 * MIB}"],
        ["threads=1", f"max_memory={4 * MIB}"],
        pytest.param(["threads=2", f"max_memory={16 * MIB}"], marks=pytest.mark.slow),
        pytest.param(["threads=2", "dtype=fp32"], marks=pytest.mark.slow),
        pytest.param(["threads=2", "dtype=fp16"], marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_peak_memory_is_what_the_plan_says(big, tmp_path, options):
    answer = answer_of(drive(big, tmp_path / "out", "--measure", *options))
    shutil.rmtree(tmp_path / "out")
    assert "error" not in answer
    assert answer["bytes_read"] >= 200_000_000
    assert answer["peak"] - answer["base"] <= answer["planned"] + SLACK


# ---------------------------------------------------------------------- damage


def test_a_flipped_byte_is_found_wherever_it_is(tmp_path):
    generator = random.Random(7)
    source = copy_golden("llama_adam_tp2pp2", tmp_path / "src")
    places = payloads(source, "weight")
    chosen = [(*place, generator.randrange(place[3])) for place in generator.sample(places, 12)]
    chosen += [(*places[0], 0), (*places[-1], places[-1][3] - 1)]  # the first and the last byte
    for name, path, begin, _, at in chosen:
        flip(path, begin + at, 1 << generator.randrange(8))
        with pytest.raises(IntegrityError, match="do not match their checksum") as caught:
            export(source, tmp_path / "out")
        assert path.name in caught.value.message
        assert re.sub(r"\d+", "", caught.value.tensor) == re.sub(r"\d+", "", name)  # a record may hold several layers
        assert "stored CRC-32" in caught.value.details[0]
        assert [entry.name for entry in tmp_path.iterdir()] == ["src"]  # no result, no litter
        flip(path, begin + at, 0xFF)
        shutil.copy2(next((GOLDEN / "llama_adam_tp2pp2").glob("*/" + path.name)), path)
    export(source, tmp_path / "out")


def test_a_restored_file_is_not_remembered_as_damaged(llama, tmp_path, monkeypatch):
    """The journal of a run that met damage must not outlive it, though sizes and times are the same after the repair."""
    monkeypatch.setattr(engine, "_SAFE_POINT_SECONDS", 0.0)
    shutil.copytree(llama[0], tmp_path / "src")
    name, path, begin, size = payloads(tmp_path / "src", "weight")[-1]
    flip(path, begin + size // 2, 0x10)
    for _ in range(2):
        with pytest.raises(IntegrityError):
            export(tmp_path / "src", tmp_path / "out", max_shard_bytes=4 * MIB, max_memory=MIB)
    flip(path, begin + size // 2, 0x10)  # restored with its times
    export(tmp_path / "src", tmp_path / "out", max_shard_bytes=4 * MIB, max_memory=MIB)
    assert tree(tmp_path / "out") == llama[1], name


def test_records_without_checksums_are_read(tmp_path):
    """torch.serialization.set_crc32_options(False): every sum is stored as 0, which is not damage."""
    import torch

    torch.serialization.set_crc32_options(False)
    try:
        write_llama(tmp_path / "src", layers=2, hidden=64, ffn=96, vocab=256)
    finally:
        torch.serialization.set_crc32_options(True)
    write_llama(tmp_path / "summed", layers=2, hidden=64, ffn=96, vocab=256)
    _, stats = export(tmp_path / "src", tmp_path / "out")
    assert stats.records_checked == 0
    export(tmp_path / "summed", tmp_path / "same")
    assert tree(tmp_path / "out")["model.safetensors"] == tree(tmp_path / "same")["model.safetensors"]


def test_a_source_that_changes_while_it_is_read_is_refused(llama, tmp_path):
    shutil.copytree(llama[0], tmp_path / "src")
    plan = plan_export(open_checkpoint(tmp_path / "src"), tmp_path / "out", ExportOptions(max_memory=MIB))
    moved = []

    def touch(event):
        if type(event).__name__ == "Moved" and not moved:
            moved.append(event)
            os.utime(plan.reader.files[-1])

    with pytest.raises(IntegrityError, match="source changed"):
        run_conversion(plan, listener=touch)
    assert [entry.name for entry in tmp_path.iterdir()] == ["src"]


def test_a_source_that_changes_between_planning_and_running_is_refused(llama, tmp_path):
    shutil.copytree(llama[0], tmp_path / "src")
    plan = plan_export(open_checkpoint(tmp_path / "src"), tmp_path / "out")
    os.utime(plan.reader.files[0])
    with pytest.raises(IntegrityError, match="source changed"):
        run_conversion(plan)
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------------- interruptions


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_stop_where_it_can_go_on(number, code, llama, tmp_path):
    source, wanted = llama
    options = [f"max_shard_bytes={4 * MIB}", f"max_memory={MIB}"]
    child = drive(source, tmp_path / "out", "--hold", 3, *options)
    assert child.stdout.readline() == "held\n"
    child.send_signal(number)
    answer = answer_of(child)
    assert (child.returncode, answer["error"], answer["code"]) == (code, "Interrupted", code)
    assert "finished work is kept" in answer["message"]
    assert "same command" in answer["hint"]
    assert not (tmp_path / "out").exists()
    plan, stats = export(source, tmp_path / "out", max_shard_bytes=4 * MIB, max_memory=MIB)
    assert stats.bytes_kept > 0
    assert stats.bytes_kept + stats.bytes_written == plan.facts["total_size"]
    assert tree(tmp_path / "out") == wanted


def path_of(fd):
    return str(Path(f"/proc/self/fd/{fd}").readlink())


class PowerCut(BaseException):
    """Everything that was written since the last fsync of its file is lost."""


@pytest.mark.parametrize("seed", range(12))
def test_after_a_power_cut_only_synced_work_is_trusted(seed, llama, tmp_path, monkeypatch):
    source, wanted = llama
    generator = random.Random(seed)
    monkeypatch.setattr(engine, "_SAFE_POINT_SECONDS", 0.005)
    pending, budget = {}, [generator.randrange(1, 100)]
    real_write, real_sync = os.pwrite, os.fsync

    def pwrite(fd, data, offset):
        if budget[0] <= 0:
            raise PowerCut
        budget[0] -= 1
        time.sleep(0.001)
        path = path_of(fd)
        done = real_write(fd, data, offset)
        pending.setdefault(path, []).append((offset, done))
        return done

    def fsync(fd):
        path = path_of(fd)
        safe = list(pending.get(path, []))  # what was written before the sync began
        real_sync(fd)
        pending[path] = [entry for entry in pending.get(path, []) if entry not in safe]

    monkeypatch.setattr(os, "pwrite", pwrite)
    monkeypatch.setattr(os, "fsync", fsync)
    # the worker that meets the cut ends the run; its last safe point must not happen either
    monkeypatch.setattr(engine.Run, "_safe_point", guarded(engine.Run._safe_point, budget))
    with pytest.raises(PowerCut):
        export(source, tmp_path / "out", max_shard_bytes=4 * MIB, max_memory=MIB)
    monkeypatch.undo()
    for path, lost in pending.items():
        if not lost:
            continue
        with open(path, "r+b") as file:
            for offset, n in lost:
                file.seek(offset)
                file.write(b"\xee" * n)
    assert not (tmp_path / "out").exists()
    export(source, tmp_path / "out", max_shard_bytes=4 * MIB, max_memory=MIB)
    assert tree(tmp_path / "out") == wanted


def guarded(original, budget):
    def safe_point(self):
        if budget[0] > 0:
            original(self)

    return safe_point


@pytest.fixture
def stopped(llama, tmp_path):
    """A source whose export was stopped half-way, with work in the journal."""
    shutil.copytree(llama[0], tmp_path / "src")
    plan = plan_export(open_checkpoint(tmp_path / "src"), tmp_path / "out", ExportOptions(max_memory=MIB))
    stop, done = StopFlag(), itertools.count(1)

    def listener(event):
        if isinstance(event, Moved) and next(done) == 4:
            stop.set(signal.SIGTERM)

    with pytest.raises(Interrupted):
        run_conversion(plan, listener=listener, stop=stop)
    assert len((partial(tmp_path / "out") / ".journal").read_text().splitlines()) > 1
    return tmp_path / "src", tmp_path / "out"


def test_the_same_command_goes_on(stopped):
    source, out = stopped
    _, stats = export(source, out, max_memory=MIB, threads=7)  # the number of workers may change
    assert stats.bytes_kept > 0


def test_a_changed_source_begins_anew(stopped):
    source, out = stopped
    os.utime(source / "__0_0.distcp")
    _, stats = export(source, out, max_memory=MIB)
    assert stats.bytes_kept == 0


@pytest.mark.parametrize("change", [{"max_shard_bytes": 4 * MIB}, {"dtype": "fp32"}, {"vocab_size": 100}])
def test_changed_options_begin_anew(stopped, tmp_path, change):
    source, out = stopped
    change = {k: from_option(v) if k == "dtype" else v for k, v in change.items()}
    _, stats = export(source, out, max_memory=MIB, **change)
    assert stats.bytes_kept == 0
    export(source, tmp_path / "fresh", max_memory=MIB, **change)
    assert tree(out) == tree(tmp_path / "fresh")
    assert not partial(out).exists()


def test_files_of_the_interrupted_run_do_not_reach_the_result(stopped, llama, tmp_path):
    source, out = stopped
    (partial(out) / "tokenizer.json").write_text("from --hf-config of a run before")
    (partial(out) / "sub").mkdir()
    (partial(out) / "sub" / "x").touch()
    _, stats = export(source, out, max_memory=MIB)
    assert stats.bytes_kept > 0
    assert not (out / "tokenizer.json").exists()
    assert not (out / "sub").exists()


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / ".journal").write_bytes(b""),
        lambda folder: (folder / ".journal").write_bytes(b"garbage\n"),
        lambda folder: (folder / ".journal").write_bytes((folder / ".journal").read_bytes()[:-3]),
        lambda folder: (folder / ".journal").unlink(),
        lambda folder: (folder / "model.safetensors").unlink(),
        lambda folder: os.truncate(folder / "model.safetensors", 1000),
    ],
)
def test_a_damaged_staging_folder_is_no_obstacle(stopped, tmp_path, damage):
    source, out = stopped
    damage(partial(out))
    export(source, out, max_memory=MIB)
    export(source, tmp_path / "fresh")
    assert tree(out) == tree(tmp_path / "fresh")


def test_a_link_in_the_staging_folder_is_not_followed(stopped, tmp_path):
    source, out = stopped
    victim = tmp_path / "victim"
    shutil.copy(partial(out) / "model.safetensors", victim)
    before = victim.read_bytes()
    (partial(out) / "model.safetensors").unlink()
    (partial(out) / "model.safetensors").symlink_to(victim)
    export(source, out, max_memory=MIB)
    assert victim.read_bytes() == before
    assert not (out / "model.safetensors").is_symlink()


# ---------------------------------------------------------------------- one writer at a time


def test_a_second_run_is_refused_while_the_first_writes(llama, tmp_path):
    """Whether that is another process or another thread: test_ranks_run.py has two launches."""
    plan = plan_export(open_checkpoint(llama[0]), tmp_path / "out", ExportOptions(max_memory=MIB))
    refusals = []

    def listener(event):
        if isinstance(event, Moved) and not refusals:
            with pytest.raises(DestinationError, match="another distckpt is writing") as caught:
                export(llama[0], tmp_path / "out", max_memory=MIB)
            refusals.append(caught.value.exit_code)

    run_conversion(plan, listener=listener)
    assert refusals == [5]
    export(llama[0], tmp_path / "alone", max_memory=MIB)
    assert tree(tmp_path / "out") == tree(tmp_path / "alone")


def test_a_destination_filled_meanwhile_is_not_touched(llama, tmp_path):
    plan = plan_export(open_checkpoint(llama[0]), tmp_path / "out")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "theirs").write_text("x")
    with pytest.raises(DestinationError, match="changed by another program"):
        run_conversion(plan)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["theirs"]


def test_a_file_that_cannot_be_closed_leaves_nothing_to_continue(llama, tmp_path, monkeypatch):
    # NFS says at the close that a write was lost, and the next sync, through another descriptor, says nothing
    class Os:
        def __getattr__(self, name):
            return getattr(os, name)

        def close(self, fd):
            os.close(fd)
            raise OSError(errno.EIO, "Input/output error")

    source = open_checkpoint(llama[0])
    with monkeypatch.context() as patch:
        patch.setattr("converters.execute.worker.os", Os())
        with pytest.raises(DestinationError, match="Input/output error"):
            run_conversion(plan_export(source, tmp_path / "out", ExportOptions(max_shard_bytes=4 * MIB)))
    assert len((partial(tmp_path / "out") / ".journal").read_text().splitlines()) == 1  # no task is said to be done
    _, stats = export(llama[0], tmp_path / "out", max_shard_bytes=4 * MIB)
    assert stats.bytes_kept == 0
    assert tree(tmp_path / "out") == llama[1]


def test_nothing_is_journalled_before_it_is_synced(llama, tmp_path, monkeypatch):
    """Order of system calls: at each journal line, every file it speaks of has no write that is not followed by a sync."""
    monkeypatch.setattr(engine, "_SAFE_POINT_SECONDS", 0.002)
    written, lines = {}, []  # path -> task writes not yet synced
    real_write, real_sync, real_log, real_done = os.pwrite, os.fsync, Journal.append, engine.Run.done
    dirty_at_done = {}

    def pwrite(fd, data, offset):
        written[path_of(fd)] = time.monotonic_ns()
        time.sleep(0.001)
        return real_write(fd, data, offset)

    synced = {}

    def fsync(fd):
        begun = time.monotonic_ns()
        real_sync(fd)
        synced[path_of(fd)] = begun

    def done(self, task, *rest):
        dirty_at_done[task.number] = (time.monotonic_ns(), task.files)
        real_done(self, task, *rest)

    def log(self, *more):
        for number in (number for line in more for number in line.get("tasks", ())):
            when, files = dirty_at_done[number]
            for file in files:
                assert synced[str(self._path.parent / names[file])] >= when
        lines.extend(more)
        real_log(self, *more)

    monkeypatch.setattr(os, "pwrite", pwrite)
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(engine.Run, "done", done)
    monkeypatch.setattr(Journal, "append", log)
    plan = plan_export(
        open_checkpoint(llama[0]), tmp_path / "out", ExportOptions(max_memory=MIB, max_shard_bytes=4 * MIB)
    )
    names = [output.name for output in plan.job.files]
    run_conversion(plan)
    assert len(lines) > 1
    assert sum(len(line.get("tasks", ())) for line in lines) == len(plan.job.tasks)
