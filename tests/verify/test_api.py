"""`converters.verify` and `converters.diff`: what the commands say, for programs."""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
import subprocess
import sys

import pytest

import converters
from converters import DistckptError, diff, verify
from converters.errors import FormatError, Interrupted, RequestError
from converters.events import FileDone, StopFlag
from harness.checkpoints import REPOSITORY, flip, payloads
from harness.support import GOLDEN
from harness.verify_cases import cli

LLAMA = GOLDEN / "llama_adam_tp2pp2"


def test_verify_says_what_the_command_says(tmp_path):
    copy = tmp_path / "ck"
    shutil.copytree(LLAMA, copy)
    assert verify(copy).good
    assert verify(str(copy), quick=True).bytes_read == 0
    tensor, path, at, size = next(p for p in payloads(copy, "weight") if p[3] > 100)
    flip(path, at + size // 2)
    report, told = verify(copy, values=True, threads=1), json.loads(cli(copy, "--values", "--json")[1])
    assert not report.good
    assert tensor in report.affected
    said = json.loads(json.dumps(report.document()))
    assert {name: value for name, value in told.items() if name in said and name != "seconds"} == {
        name: value for name, value in said.items() if name != "seconds"
    }
    assert "not written" in verify(copy, write_manifest=True).manifest


def test_verify_answers_where_nothing_can_be_opened(tmp_path):
    copy = tmp_path / "ck"
    shutil.copytree(LLAMA, copy)
    (copy / "iter_0000010" / ".metadata").write_bytes(b"")
    report = verify(copy)
    assert not report.good
    assert report.checks[0].findings[0].message == ".metadata is empty (0 bytes)"
    with pytest.raises(FormatError):
        verify(tmp_path / "nowhere")
    with pytest.raises(RequestError, match="no format"):
        verify(LLAMA, format="parquet")
    assert issubclass(FormatError, DistckptError)


def test_verify_tells_and_stops():
    events = []
    report = verify(LLAMA, listener=events.append)
    assert sum(isinstance(event, FileDone) for event in events) == report.files
    stop = StopFlag()
    stop.set(2)
    with pytest.raises(Interrupted):
        verify(LLAMA, stop=stop)
    with pytest.raises(Interrupted):
        diff(LLAMA, GOLDEN / "llama_dpzero_tp2pp2dp2", stop=stop)


def test_reports_are_a_few_lines_of_text(tmp_path):
    copy = tmp_path / "ck"
    shutil.copytree(LLAMA, copy)
    assert re.fullmatch(
        r".*/iter_0000010 is good: errors 0, warnings 0 \(torch_dist, \d+ files, [\d,]+ bytes read\)", str(verify(copy))
    )
    for _, path, at, size in payloads(copy, "weight"):
        flip(path, at + size // 2)
    report = verify(copy)
    first, *others = str(report).splitlines()
    errors = sum(check.count["error"] for check in report.checks)
    assert f" is damaged: errors {errors}, " in first
    assert len(others) == 5
    assert others[0] == f"checksums: {report.check('checksums').findings[0].message}"
    assert others[4] == f"and {errors + sum(c.count['warning'] for c in report.checks) - 4} more"

    same = diff(LLAMA, GOLDEN / "legacy_llama_adam_tp2pp2", ignore=["args.*"])
    assert re.fullmatch(r"A .*/iter_0000010 and B .*/iter_0000010 are identical: 60 tensors", str(same))
    quick = diff(LLAMA, GOLDEN / "legacy_llama_adam_tp2pp2", ignore=["args.*"], quick=True)
    assert str(quick).endswith("are identical: 60 tensors; values were not compared")
    other = diff(LLAMA, GOLDEN / "qwen2_weights_tp2pp2")
    first, *others = str(other).splitlines()
    only = sum(map(len, other.plan.matching.only))
    assert f" differ: {len(other.differing)} tensors, {only} only on one side, " in first
    assert others[0] == f"{other.differing[0].name}: different"
    assert len(others) == 5
    assert others[4] == f"and {len(other.differing) - 4} more"


def test_diff_of_two_formats():
    report = diff(LLAMA, GOLDEN / "legacy_llama_adam_tp2pp2", ignore=["args.*"])
    assert report.identical
    assert report.differing == ()
    assert len(report.tensors) == 60


def test_diff_finds_and_tolerates():
    other = GOLDEN / "qwen2_weights_tp2pp2"
    report = diff(LLAMA, other, tensors=["decoder.final_layernorm.weight"])
    assert not report.identical
    (tensor,) = report.differing
    assert tensor.name == "decoder.final_layernorm.weight"
    assert tensor.values is not None
    assert 0 < tensor.values.max_abs < 4
    assert diff(LLAMA, other, tensors=["decoder.final_layernorm.weight"], atol=tensor.values.max_abs).identical
    assert diff(LLAMA, other, tensors=["decoder.final_layernorm.weight"], quick=True).tensors[0].values is None
    with pytest.raises(RequestError, match="no tensor matches"):
        diff(LLAMA, other, tensors=["nothing"])


def test_neither_typer_nor_rich_nor_torch_is_needed():
    """In a process in which they cannot be imported."""
    code = f"""
import sys
for name in ("typer", "rich", "click", "torch", "transformers", "tensorstore"):
    sys.modules[name] = None
from converters import diff, verify
assert verify({str(LLAMA)!r}).good
assert diff({str(LLAMA)!r}, {str(GOLDEN / "legacy_llama_adam_tp2pp2")!r}, ignore=["args.*"]).identical
"""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_every_option_of_the_commands_has_its_place():
    """What the commands take and the functions do not is about terminals and about several processes."""
    shell = {"ckpt", "a", "b", "looking", "flat", "args"}
    for name in ("verify", "diff"):
        command = inspect.signature(getattr(__import__(f"distckpt_cli.commands.{name}", fromlist=[name]), name))
        function = inspect.signature(getattr(converters, name))
        spread = {"as_json", "quiet", "silent", "verbose", "progress", "color", "rank_timeout", "scratch", "plain"}
        spread |= {"retry_for"}
        assert set(command.parameters) - shell - spread <= set(function.parameters)
        assert all(parameter.annotation is not parameter.empty for parameter in function.parameters.values())


def test_names_are_listed():
    assert {"diff", "load", "verify", "Report", "DiffReport"} <= set(dir(converters))
    assert all(getattr(converters, name) is not None for name in converters._HOMES)
