"""scripts/gpu_check without a GPU: every step runs on the simulated device, and fails where what it checks is wrong."""

import argparse
import json
import subprocess

import pytest
import torch

import gpu_check
import gpu_steps
from harness import device_faults
from harness.simulated import Simulated


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    return argparse.Namespace(simulated=True, dir=tmp_path_factory.mktemp("gpu-check"), gib=0.001)


@pytest.mark.parametrize("step", gpu_check.STEPS)
def test_every_step_runs(step, asked):
    result = getattr(gpu_steps, f"check_{step}")(asked)
    assert result["verdict"] == "pass", result
    assert result["notes"] or result["rows"]
    json.dumps(result)


@pytest.mark.parametrize("fault", device_faults.FAULTS)
def test_a_control_that_is_not_found_fails(fault, asked, monkeypatch):
    """A fault that does nothing: the load is right, where it must be wrong."""
    monkeypatch.setattr(gpu_steps, "FAULTS", (fault,))
    monkeypatch.setattr(gpu_steps, "with_fault", lambda device, _: device)
    monkeypatch.setattr(gpu_steps, "applied", lambda _: device_faults.applied(None))
    result = gpu_steps.check_order(asked)
    assert result["verdict"] == "fail"
    assert result["notes"][0] == f"late, fault: {fault}: the bits are the same"


def test_a_device_that_is_wrong_fails(asked, monkeypatch):
    class Wrong(Simulated):
        """A bit of each result, turned."""

        def submit(self, stream, work, event, after=()):
            super().submit(stream, work, event, after)
            for item in stream.items:
                if isinstance(item, tuple) and item[0] is work:
                    stream.items[stream.items.index(item)] = (lambda: (work(), self.turn(work)), *item[1:])

        def turn(self, work):
            cells = dict(zip(work.__code__.co_freevars, work.__closure__ or (), strict=True))
            for name in ("target", "out"):
                if name in cells:
                    cells[name].cell_contents.reshape(-1).view(torch.uint8)[0] ^= 1

    monkeypatch.setattr(gpu_steps, "Simulated", Wrong)
    for step, said in (
        ("order", "late: the bits are not the same"),
        ("casts", "float32 to float16: 64 of"),
        ("exchange", ""),
    ):
        result = getattr(gpu_steps, f"check_{step}")(asked)
        assert result["verdict"] == "fail", step
        assert result["notes"][0].startswith(said)


def test_a_load_that_is_too_slow_fails(asked, monkeypatch):
    """On the simulation figures mean nothing, so nothing fails there; a GPU is held to them."""

    def bench(command, **_):
        answer = {
            "4": {"ours": {"seconds": 1.0}, "dcp": {"seconds": 1.6}},
            "8": {"ours": {"seconds": 1.0}, "dcp": {"seconds": 2.9}},
        }
        command[command.index("--json") + 1].write_text(json.dumps(answer))
        return subprocess.CompletedProcess(command, 0, "a folder\na table\n", "")

    monkeypatch.setattr(subprocess, "run", bench)
    monkeypatch.setattr(gpu_steps, "checkpoint", lambda *_, **__: asked.dir)
    real = argparse.Namespace(**vars(asked) | {"simulated": False})
    result = gpu_steps.check_load(real)
    assert (result["verdict"], result["notes"][0]) == ("fail", "tp 8: 2.90 times as fast as dcp.load, wanted 3.0")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys):
    assert gpu_check.main([]) == gpu_check.NO_GPU
    assert "torch finds no GPU" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        gpu_check.main(["nothing"])


def test_a_report_keeps_what_other_runs_found(tmp_path, monkeypatch):
    steps = {"casts": {"verdict": "pass", "notes": [], "rows": [["a", "b"], [1, 2]]}}
    steps |= {"load": {"verdict": "fail", "notes": ["too slow"], "rows": []}}
    monkeypatch.setattr(gpu_check, "run_step", lambda name, *_: steps[name] | {"step": name, "seconds": 1.0})
    common = ["--simulated", "--dir", str(tmp_path), "--report", str(tmp_path / "report")]
    assert gpu_check.main(["load", *common]) == 1
    assert gpu_check.main(["casts", *common]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert {name: step["verdict"] for name, step in report["steps"].items()} == {"load": "fail", "casts": "pass"}
    text = (tmp_path / "report.md").read_text()
    assert "- too slow" in text
    assert "| a | b |\n| --- | --- |\n| 1 | 2 |" in text


def test_a_step_that_takes_too_long_is_ended(tmp_path):
    asked = argparse.Namespace(simulated=True, gib=1, limit=0.01)
    result = gpu_check.run_step("order", asked, tmp_path)
    assert (result["verdict"], result["notes"]) == ("fail", ["not done after 0.01 s"])
