"""Checkpoints whose files are links, as where storage deduplicates: refused unless asked for; hostile ones always."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest

import converters
from converters import diff, load, load_metadata, verify
from converters.errors import FormatError, Interrupted
from converters.events import Phase
from converters.formats import open_checkpoint
from converters.formats.base import fingerprint_of
from converters.megatron.layout import Layout
from converters.write.reshard import ReshardOptions, plan_reshard
from converters.write.write_plan import run_conversion
from harness.cli_support import here
from harness.support import GOLDEN

LLAMA = GOLDEN / "llama_adam_tp2pp2"


@pytest.fixture
def tmp_path():
    """On a disk: links are not followed to where the kernel makes things up, and /dev/shm is below /dev."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def links_of(source, tmp_path):
    """A copy of a folder whose files are all links into a pool."""
    shutil.copytree(source, tmp_path / "run")
    (tmp_path / "pool").mkdir()
    for number, path in enumerate(sorted(p for p in (tmp_path / "run").rglob("*") if p.is_file())):
        target = tmp_path / "pool" / f"{number:04d}"
        path.rename(target)
        path.symlink_to(target)
    return tmp_path / "run"


@pytest.fixture
def linked(tmp_path):
    """A training root whose files are all links into a pool."""
    return links_of(LLAMA, tmp_path)


def test_an_iteration_that_is_a_link(tmp_path):
    (tmp_path / "iter_0000010").symlink_to(LLAMA / "iter_0000010")
    assert verify(tmp_path / "iter_0000010", quick=True).good
    assert open_checkpoint(tmp_path / "iter_0000010" / "common.pt").catalog.iteration == 10


def test_links_out_of_it(linked):
    with pytest.raises(FormatError, match="is a link to") as caught:
        open_checkpoint(linked)
    assert "--follow-links" in caught.value.hint
    assert verify(linked, follow_links=True).good
    assert diff(linked, LLAMA, follow_links=True).identical
    assert load(linked, Layout(), 0, follow_links=True)
    with pytest.raises(FormatError):  # asked for each time
        open_checkpoint(linked)


def test_commands(linked, tmp_path):
    assert here("inspect", str(linked)).code == 3
    assert here("inspect", "--follow-links", str(linked)).code == 0
    out = str(tmp_path / "out")
    assert here("reshard", str(linked), out, "--tp", "1", "--pp", "1", "--follow-links").code == 0
    assert verify(out).good


def test_a_replaced_target(linked):
    reader = open_checkpoint(linked, follow_links=True)
    before, path = fingerprint_of(reader), reader.files[0]
    target = path.resolve()
    status = target.stat()
    other = target.with_name("other")
    shutil.copy2(target, other)
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    path.unlink()
    path.symlink_to(other)  # the same bytes, size and time, somewhere else
    assert fingerprint_of(open_checkpoint(linked, follow_links=True)) != before


@pytest.mark.parametrize(
    "target", ["/dev/zero", "/proc/self/environ", "/proc/self/mem", "/sys/kernel/uevent_seqnum", "common.pt"]
)
def test_hostile(linked, target):
    path = linked / "iter_0000010" / "common.pt"
    path.unlink()
    path.symlink_to(target)  # the last leads to itself
    with pytest.raises(FormatError):
        load(linked, Layout(), 0, follow_links=True)


def test_reading_functions(linked):
    with pytest.raises(FormatError, match="is a link to"):
        load_metadata(linked)
    names = load_metadata(linked, follow_links=True)
    assert names.keys() == load_metadata(LLAMA).keys()
    norm = "decoder.final_layernorm.weight"
    assert norm in converters.load_plain_tensors(linked, norm, follow_links=True)
    assert converters.load_common(linked, follow_links=True)["iteration"] == 10
    with converters.open(linked, follow_links=True) as checkpoint:
        assert norm in checkpoint.keys()  # noqa: SIM118
    assert [found.status for found in converters.survey(linked)] == ["unreadable"]
    assert [found.status for found in converters.survey(linked, follow_links=True)] == ["complete"]


def test_ls_and_show(linked):
    assert "unreadable" in here("ls", str(linked)).out
    assert "unreadable" not in here("ls", "--follow-links", str(linked)).out
    words = ["show", str(linked), "decoder.final_layernorm.weight", "-q"]
    assert here(*words).code == 3
    assert here(*words, "--follow-links").code == 0


def test_import_hf(tmp_path):
    folder = links_of(GOLDEN / "hf_llama_safetensors", tmp_path)
    words = ["import-hf", str(folder), str(tmp_path / "out"), "--quiet"]
    assert here(*words).code == 3
    assert here(*words, "--follow-links").code == 0
    assert diff(GOLDEN / "hf_llama_safetensors", tmp_path / "out").identical


def test_zarr(tmp_path):
    source = GOLDEN / "v009_zarr_llama_distopt_tp2pp2dp2"
    folder = links_of(source, tmp_path)
    key = next(path.parent for path in sorted(folder.rglob(".zarray")))
    key.rename(tmp_path / "array")  # one array's folder is a link, too
    key.symlink_to(tmp_path / "array")
    with pytest.raises(FormatError) as caught:
        open_checkpoint(folder)
    assert "--follow-links" in caught.value.hint
    assert diff(folder, source, follow_links=True).identical
    assert verify(folder, follow_links=True).good


def moved(path, pool):
    """Replaces the target of a link by another file of the same bytes, size and time."""
    target = path.resolve()
    status = target.stat()
    other = pool / f"moved-{target.name}"
    shutil.copy2(target, other)
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    path.unlink()
    path.symlink_to(other)


@pytest.mark.parametrize("replaced", [False, True])
def test_resume(linked, tmp_path, replaced):
    """An interrupted run goes on with what it has, unless a link leads to another file by now."""

    def planned():
        options = ReshardOptions(threads=1)
        return plan_reshard(open_checkpoint(linked, follow_links=True), tmp_path / "out", Layout(), options)

    def listen(event):
        if isinstance(event, Phase) and event.name == "publishing":
            raise Interrupted(signal.SIGTERM, "stopped")

    plan = planned()
    with pytest.raises(Interrupted):
        run_conversion(plan, listener=listen)
    assert (tmp_path / ".out.distckpt-partial").exists()
    if replaced:
        moved(plan.reader.files[0], tmp_path / "pool")
    stats = run_conversion(planned())
    assert (stats.bytes_kept == 0) == replaced
    assert diff(tmp_path / "out", LLAMA).identical


def test_overwrite(linked, tmp_path):
    """A target that is cut after a first result: the second run reads it, refuses, and the first result stays."""
    words = ["reshard", str(linked), str(tmp_path / "out"), "--tp", "1", "--follow-links", "--quiet"]
    assert here(*words).code == 0
    path = open_checkpoint(linked, follow_links=True).files[0]
    moved(path, tmp_path / "pool")
    assert here(*words, "--overwrite").code == 0
    path.resolve().write_bytes(path.read_bytes()[:-4096])
    assert here(*words, "--overwrite").code in (1, 3)
    assert verify(tmp_path / "out").good
