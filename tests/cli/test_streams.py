"""stdout and stderr that are closed, full or have no reader: the exit code says what it says otherwise."""

import subprocess
import sys

import pytest

from harness.checkpoints import copy_golden, golden, run_cli
from harness.cli_support import ROOT, environment

GOOD = golden("llama_singleton_weights_tp2pp2")


def shell(line):
    command = f'"{sys.executable}" -m distckpt_cli {line}'
    return subprocess.run(
        ["bash", "-c", command], cwd=ROOT, env=environment(), capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    "command", [f"verify {GOOD}", f"verify --json {GOOD}", f"diff {GOOD} {GOOD} --quick", "formats", "--help"]
)
def test_an_answer_that_cannot_be_written_is_not_the_answer_no(command):
    done = shell(f"{command} > /dev/full")
    assert done.returncode == 5
    assert "the answer cannot be written to stdout: No space left on device" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("line", "code", "prints"),
    [
        (f"verify {GOOD} >&-", 0, False),
        (f"verify {GOOD} --json >&-", 5, False),
        (f"verify {GOOD} 2>&-", 0, True),
        ("doctor - <&-", 3, False),
        (f"verify {GOOD} 2>/dev/full", 0, True),
        ("inspect missing 2>&-", 3, False),
        ("inspect missing >&-", 3, False),
        ("--help >&-", 0, False),
        ("--version 2>&-", 0, True),
    ],
)
def test_closed_and_full_streams(line, code, prints):
    done = shell(line)
    assert done.returncode == code, done.stderr
    assert bool(done.stdout) == prints
    assert "Traceback" not in done.stderr


def test_a_reader_that_leaves():
    done = subprocess.run(
        ["bash", "-c", f'"{sys.executable}" -m distckpt_cli inspect {GOOD} --tensors --flat | true'],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr


def test_overwrite_tells_what_it_deletes_and_spares_training_runs(tmp_path):
    out = tmp_path / "out"
    assert run_cli("export-hf", GOOD, out).returncode == 0
    (out / "my-notes.txt").write_text("dear")
    for more in (["-n"], []):
        done = run_cli("export-hf", GOOD, out, "--overwrite", *more)
        assert done.returncode == 0
        assert "is replaced after success, with all in it: config.json" in done.stderr
        assert "my-notes.txt" in done.stderr
    assert not (out / "my-notes.txt").exists()
    run = tmp_path / "run"
    for number in (10, 20):
        copy_golden("llama_singleton_weights_tp2pp2", run / f"iter_{number:07d}")
    (run / "latest_checkpointed_iteration.txt").write_text("20")
    done = run_cli("export-hf", GOOD, run, "--overwrite")
    assert done.returncode == 5
    assert "a training run with 2 iterations" in done.stderr
    assert (run / "iter_0000020").is_dir()
