"""pytest fixtures that run the real megatron-core in child processes."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
TIMEOUT = 120  # seconds; a run takes three to eight


@dataclass(frozen=True)
class MegatronCheckpoint:
    """A checkpoint that megatron-core wrote.

    Attributes:
        folder: what Megatron-LM would be given as --load: holds the tracker file and one iteration.
        iteration: the folder `iter_0000010`.
        expected: safetensors of every tensor, whole and unpadded, by its per-layer name.
        logits: safetensors of `tokens` (2, 24) and of Megatron's fp32 `logits` (2, 24, vocabulary).
        config: name of the model, see `oracle.models.CONFIGS`.
    """

    folder: Path
    expected: Path
    logits: Path
    config: str

    @property
    def iteration(self):
        return self.folder / "iter_0000010"


def run_oracle(*arguments):
    """Runs `python -m oracle.run`: (exit code, standard output). No process of it is left behind."""
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
        pytest.skip("megatron-core is not installed")
    command = [sys.executable, "-m", "oracle.run", *map(str, arguments), "--timeout", str(TIMEOUT - 10)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = os.environ | {"PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, cwd=TESTS, env=environment, start_new_session=True, **pipes) as child:
        try:
            answer, noise = child.communicate(timeout=TIMEOUT)
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
    if child.returncode and not answer:
        pytest.fail(f"{' '.join(command)}\nexit {child.returncode}\n{noise[-3000:]}", pytrace=False)
    return child.returncode, answer


def layout_arguments(tp, pp, ep, dtype, overrides):
    for name, value in (("--tp", tp), ("--pp", pp), ("--ep", ep), ("--dtype", dtype)):
        yield from (name, str(value))
    for name, value in overrides.items():
        yield from ("--set", f"{name}={value!r}")


@pytest.fixture(scope="session")
def megatron_checkpoint(tmp_path_factory):
    """Function that returns a checkpoint written by megatron-core; each request is made once a session."""
    made = {}

    def make(config="llama", *, tp=1, pp=1, ep=1, dtype="bf16", per_layer=False, **overrides):
        request = (config, tp, pp, ep, dtype, per_layer, repr(sorted(overrides.items())))
        if request not in made:
            root = tmp_path_factory.mktemp(f"megatron-{config}-tp{tp}pp{pp}ep{ep}")
            found = MegatronCheckpoint(
                root / "ckpt", root / "expected.safetensors", root / "logits.safetensors", config
            )
            outputs = ("--expected", found.expected, "--logits", found.logits)
            options = [
                *layout_arguments(tp, pp, ep, dtype, overrides),
                *(["--per-layer"] if per_layer else []),
            ]
            code, _ = run_oracle("write", found.folder, "--config", config, *outputs, *options)
            assert code == 0
            made[request] = found
        return made[request]

    return make


@pytest.fixture(scope="session")
def megatron_load():
    """Function that loads a folder with megatron-core at a layout and compares it with expected values.

    With `optimizer=True` also masters and moments of a distributed optimizer.
    """

    def load(
        folder, expected, config="llama", *, tp=1, pp=1, ep=1, dp=None, optimizer=False, dtype="bf16", **overrides
    ):
        options = [*layout_arguments(tp, pp, ep, dtype, overrides), *(["--optimizer"] if optimizer else [])]
        options += ["--dp", dp] if dp else []
        _, answer = run_oracle("load", folder, "--config", config, "--expected", expected, *options)
        return json.loads(answer)

    return load
