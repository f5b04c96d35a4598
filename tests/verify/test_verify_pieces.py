"""One large file is read in pieces by several workers: the answer is that of one worker, and each byte is read once."""

from __future__ import annotations

import json
import os
import random
import shutil
import threading

import pytest

from converters.events import FileDone
from converters.execute.work_sharing import WorkSharing
from converters.formats import open_checkpoint
from converters.verification import files as reading
from converters.verification.files import FileRead, FileTask
from converters.verification.run import VerifyOptions, verify_reader
from harness.checkpoints import flip, payloads, write_llama
from harness.support import GOLDEN
from harness.verify_cases import found, golden_folder, opened


@pytest.fixture
def small(monkeypatch):
    """Pieces that every golden has many of."""

    def cut(nbytes: int = 1500) -> None:
        monkeypatch.setattr(reading, "PIECE_BYTES", nbytes)
        monkeypatch.setattr(reading, "_BATCH_BYTES", 0)

    return cut


def answer(report) -> dict:
    document = report.document()
    del document["seconds"], document["bytes_read"]
    return json.loads(json.dumps(document))


DAMAGED = [
    "llama_adam_tp2pp2",
    "v009_llama_modelspace_tp2pp2dp2",
    "legacy_llama_distopt_tp2pp2dp2",
    "torch_mixtral_megatron",
    "hf_mixtral_bin",
    "bytecheckpoint_llama_dp2",
]
WHOLE = ["hf_llama_safetensors", "llama_dpzero_tp2pp2dp2", "v009_zarr_llama_adam_tp2pp2", "dcp_plain"]


@pytest.mark.parametrize("name", [*DAMAGED, *WHOLE])
def test_the_answer_does_not_depend_on_the_cut(name, small):
    place = opened(name)
    whole = answer(found(place))
    for nbytes in (1500, 4096):
        small(nbytes)
        assert answer(found(place)) == whole
        assert whole["good"]


@pytest.mark.parametrize("name", DAMAGED)
def test_damage_is_found_and_named_alike(name, small, tmp_path):
    copy = tmp_path / "iter_0000010"
    shutil.copytree(golden_folder(name), copy)
    place = copy / opened(name).name if opened(name).is_file() else copy
    rng = random.Random(name)
    for _, path, at, size in rng.choices([p for p in payloads(place) if p[3]], k=3):
        flip(path, at + rng.randrange(size))
    largest = max(
        (p for p in copy.rglob("*") if p.suffix in (".distcp", ".pt", ".bin")), key=lambda p: p.stat().st_size
    )
    if name != "bytecheckpoint_llama_dp2":
        assert not found(place).good
    before = answer(found(place))
    small()
    assert answer(found(place)) == before
    if largest.suffix == ".distcp":
        os.truncate(largest, largest.stat().st_size * 2 // 3)
        cut = answer(found(place))
        small(1 << 30)
        assert answer(found(place)) == cut
        assert not cut["good"]


def test_pieces_are_shared_and_each_byte_is_read_once(small, tmp_path, monkeypatch):
    """A file of 8 MiB in 64 pieces: all threads have some, and what is read is the file, headers looked at apart."""
    copy = tmp_path / "iter_0000007"
    write_llama(copy, layers=2, hidden=512, ffn=1024, vocab=2048, tp=1, pp=1)
    (path,) = copy.glob("*.distcp")
    small(path.stat().st_size // 64 + 1)
    reader, threads, done = open_checkpoint(copy), dict[str, set[int]](), []
    original = WorkSharing.report

    all_there = threading.Barrier(3)  # none goes on before each has some, however busy the machine is

    def watched(self, event):
        name = threading.current_thread().name
        if name not in threads:
            threads[name] = set()
            all_there.wait(60)
        threads[name].add(id(event))
        original(self, event)

    monkeypatch.setattr(WorkSharing, "report", watched)
    report = verify_reader(
        reader, VerifyOptions(threads=3), listener=lambda e: done.append(e) if isinstance(e, FileDone) else None
    )
    assert report.good
    assert len(threads) == 3
    total = sum(p.stat().st_size for p in copy.iterdir() if p.is_file())
    assert total * 0.99 <= report.bytes_read <= total
    assert sorted(e.name for e in done) == sorted({e.name for e in done})
    assert report.files == len(done)


def test_pieces_cover_a_file_and_what_is_hashed_is_whole(small):
    small(100)
    tasks = list(
        FileTask.batches([FileRead("a", (0,), 250, False), FileRead("b", (), 250, True), FileRead("c", (), 0, False)])
    )
    pieces = [file for task in tasks for file in task.files]
    assert [(f.name, f.begin, f.end) for f in pieces] == [
        ("a", 0, 100),
        ("a", 100, 200),
        ("a", 200, 250),
        ("b", 0, 250),
        ("c", 0, 0),
    ]
    assert [task.number for task in tasks] == list(range(len(tasks)))
    for at in (0, 99, 100, 249, 250, 10_000):  # a record that begins beyond the end is the last one's to report
        assert sum(f.owns(at) for f in pieces if f.name == "a") == 1


def test_a_part_that_could_not_be_read_is_no_mismatch(small, tmp_path, monkeypatch):
    """Of a record in many pieces one piece fails: that is said, and nothing about its checksum."""
    copy = tmp_path / "ck"
    shutil.copytree(GOLDEN / "qwen2_weights_tp2pp2", copy)
    small(600)
    from converters.verification.blocks import Blocks

    fill = Blocks._fill

    def failing(self, at):
        if at == 1200:
            raise OSError(5, "Input/output error")
        return fill(self, at)

    monkeypatch.setattr(Blocks, "_fill", failing)
    report = found(copy)
    texts = [f.message for c in report.checks for f in c.findings if f.severity == "error"]
    assert texts
    assert all("failed: Input/output error" in text for text in texts)
