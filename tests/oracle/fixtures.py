"""pytest fixtures that run the real megatron-core in child processes."""

import atexit
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
TIMEOUT = 600  # seconds; a run takes three to eight


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


class Server:
    """The process that has imported megatron-core, of this process of pytest: see `oracle.server`."""

    running: subprocess.Popen[str] | None = None

    @classmethod
    def ask(cls, request, timeout):
        """The exit code of a run. One that takes longer is killed, with all that it started."""
        if cls.running is None or cls.running.poll() is not None:
            environment = os.environ | {"PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS.parent}", "OMP_NUM_THREADS": "1"}
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
            command = [sys.executable, "-m", "oracle.server"]
            cls.running = subprocess.Popen(command, cwd=TESTS, env=environment, start_new_session=True, **pipes)
            atexit.register(cls.stop)
        alarm = threading.Timer(timeout, os.killpg, (cls.running.pid, signal.SIGKILL))
        alarm.start()
        try:
            cls.running.stdin.write(json.dumps(request) + "\n")
            cls.running.stdin.flush()
            answer = cls.running.stdout.readline()
        except BaseException:  # Ctrl-C, the timeout of a test
            cls.stop()
            raise
        finally:
            alarm.cancel()
        if not answer:
            cls.stop()
            return -signal.SIGKILL
        return json.loads(answer)["code"]

    @classmethod
    def stop(cls):
        """Ends it with everything that it started."""
        if cls.running is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(cls.running.pid, signal.SIGKILL)
            cls.running.communicate()
            cls.running = None


def run_module(module, *arguments, text="", timeout=TIMEOUT):
    """Runs `python -m MODULE` of this folder with `text` as its input: (exit code, standard output, standard error)."""
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
        pytest.skip("megatron-core is not installed")
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: Path(folder) / name for name in ("input", "output", "errors")}
        paths["input"].write_text(text)
        named = {name: str(path) for name, path in paths.items()}
        code = Server.ask({"module": module, "arguments": [*map(str, arguments)], **named}, timeout)
        return code, *(path.read_text() if path.exists() else "" for path in (paths["output"], paths["errors"]))


def run_oracle(*arguments):
    """Runs `oracle.run`: (exit code, standard output). No process of it is left behind."""
    code, answer, noise = run_module("oracle.run", *arguments, "--timeout", TIMEOUT - 10, timeout=TIMEOUT)
    if code and not answer:
        pytest.fail(f"oracle.run {' '.join(map(str, arguments))}\nexit {code}\n{noise[-3000:]}", pytrace=False)
    return code, answer


def layout_arguments(tp, pp, ep, dtype, overrides):
    for name, value in (("--tp", tp), ("--pp", pp), ("--ep", ep), ("--dtype", dtype)):
        yield from (name, str(value))
    for name, value in overrides.items():
        yield from ("--set", f"{name}={value!r}")


@pytest.fixture(scope="session")
def megatron_checkpoint(tmp_path_factory):
    """Function that returns a checkpoint written by megatron-core; each request is made once a session."""
    checkpoints = {}

    def make(config="llama", *, tp=1, pp=1, ep=1, dtype="bf16", per_layer=False, **overrides):
        request = (config, tp, pp, ep, dtype, per_layer, repr(sorted(overrides.items())))
        if request not in checkpoints:
            root = tmp_path_factory.mktemp(f"megatron-{config}-tp{tp}pp{pp}ep{ep}")
            checkpoint = MegatronCheckpoint(
                root / "ckpt", root / "expected.safetensors", root / "logits.safetensors", config
            )
            outputs = ("--expected", checkpoint.expected, "--logits", checkpoint.logits)
            options = [
                *layout_arguments(tp, pp, ep, dtype, overrides),
                *(["--per-layer"] if per_layer else []),
            ]
            code, _ = run_oracle("write", checkpoint.folder, "--config", config, *outputs, *options)
            assert code == 0
            checkpoints[request] = checkpoint
        return checkpoints[request]

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
