"""What is done with every hostile checkpoint, and what must be true afterwards."""

# ruff: noqa: PTH112, PTH113, PTH114, PTH118, PTH208

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.support import GOLDEN
from hostile.corpus import GOOD, Case, fired

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["COMMANDS", "Server", "Tally", "attack"]

MEMORY = 400 << 20
"""Bytes beyond those of the warm process: buffers are 64 MiB, and no file here is larger than 20 MB."""
_BAD = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufffe\uffff]")
_TO = ("torch_dist", "legacy", "torch", "safetensors")

COMMANDS: dict[str, list[str]] = {
    "inspect": ["inspect", "SRC"],
    "inspect all": ["inspect", "SRC", "--tensors", "*", "--args", "*", "--objects", "*", "--flat", "--json"],
    "verify": ["verify", "SRC", "--values", "-v"],
    "inspect tensors": ["inspect", "SRC", "--tensors", "*", "--flat"],
    "inspect files": ["inspect", "SRC", "--files"],
    "inspect args": ["inspect", "SRC", "--args", "*"],
    "inspect objects": ["inspect", "SRC", "--objects", "*", "--flat"],
    "inspect names": ["inspect", "SRC", "-q"],
    "verify quick": ["verify", "SRC", "--quick"],
    "verify json": ["verify", "SRC", "--json"],
    "verify manifest": ["verify", "SRC", "--write-manifest"],
    "diff": ["diff", "SRC", "GOOD", "--args"],
    "diff json": ["diff", "GOOD", "SRC", "--json"],
    "reshard plan": ["reshard", "SRC", "DST", "--tp", "2", "-n"],
    "reshard": ["reshard", "SRC", "DST", "--tp", "1", "--pp", "2"],
    "reshard weights": ["reshard", "SRC", "DST", "--optimizer", "none"],
    **{f"convert to {to}": ["convert", "SRC", "DST", "--to", to] for to in _TO},
    "convert to hf names": ["convert", "SRC", "DST", "--to", "safetensors", "--names", "hf"],
    "export-hf": ["export-hf", "SRC", "DST"],
    "export-hf reference": ["export-hf", "GOOD", "DST", "--hf-config", "SRC"],
    "load": ["load", "SRC"],
}


class Server:
    """The warm processes that fork for every run: one with torch, one without, each started when it is needed."""

    def __init__(self) -> None:
        self._processes: dict[bool, subprocess.Popen[str]] = {}

    def run(self, *, torch: bool = False, **request: Any) -> dict[str, Any]:
        """One run: see `server`."""
        process = self._process(torch=torch or request["argv"][0] in ("load", "rival"))
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(request, default=str) + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())
        except BaseException:  # the limit of a test, Ctrl-C: an answer that comes later is nobody's
            self.close()
            raise

    def _process(self, *, torch: bool) -> subprocess.Popen[str]:
        if torch not in self._processes:
            command = [sys.executable, str(Path(__file__).with_name("server.py")), *(["--torch"] if torch else [])]
            environment = {
                **os.environ,
                "PYTHONDONTWRITEBYTECODE": "1",
                "DISTCKPT_PROGRESS": "log",
                "CUDA_VISIBLE_DEVICES": "",
            }
            made = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
                start_new_session=True,
            )
            self._processes[torch] = made
            assert made.stdout is not None
            assert made.stdout.readline() == "ready\n"
        return self._processes[torch]

    def close(self) -> None:
        """Ends them with all that they have started."""
        while self._processes:
            _, process = self._processes.popitem()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


@dataclass
class Tally:
    """What came of many runs.

    Attributes:
        inputs: Checkpoints.
        runs: Commands run on them.
        executed: Runs that did what a reader may not: ran something, imported, connected, wrote or read elsewhere.
        hangs: Runs of more than 5 s of processor time, or killed for it.
        tracebacks: Runs that ended in an error that is not one of ours.
        codes: Exit codes, and how often.
        slowest: Processor time in seconds, and where.
        largest: Bytes above those of the warm process, and where.
        wrong: All that must not be, in words.
    """

    inputs: int = 0
    runs: int = 0
    executed: int = 0
    hangs: int = 0
    tracebacks: int = 0
    codes: dict[int, int] = field(default_factory=dict)
    slowest: tuple[float, str] = (0.0, "")
    largest: tuple[int, str] = (0, "")
    wrong: list[str] = field(default_factory=list)

    def add(self, title: str, outcome: dict[str, Any], wrong: list[str]) -> None:
        """Counts one run."""
        self.runs += 1
        self.executed += any(text.startswith(("did ", "the payload")) for text in wrong)
        self.hangs += any(text.startswith(("took ", "exit -")) and not text.endswith("MiB") for text in wrong)
        self.tracebacks += any(text.startswith("traceback") for text in wrong)
        self.codes[outcome["status"]] = self.codes.get(outcome["status"], 0) + 1
        self.slowest = max(self.slowest, (outcome["cpu"], title))
        self.largest = max(self.largest, (outcome["peak"], title))
        self.wrong += [f"{title}: {text}" for text in wrong]

    def __str__(self) -> str:
        """The counts in a line."""
        codes = ", ".join(f"{code}: {count}" for code, count in sorted(self.codes.items()))
        counts = f"{self.inputs} inputs, {self.runs} runs, {self.executed} executed, {self.hangs} hangs"
        counts += f", {self.tracebacks} tracebacks, {len(self.wrong)} complaints; exit {codes}"
        slowest, largest = self.slowest, self.largest
        return f"{counts}; {slowest[0]:.2f} s {slowest[1]!r}, {largest[0] >> 20} MiB {largest[1]!r}"


def attack(server: Server, case: Case, commands: Iterable[str], folder: Path, tally: Tally) -> None:
    """Runs commands on one hostile checkpoint and notes whatever must not be."""
    outside, marker = folder / "outside", folder / "marker"
    outside.mkdir(parents=True)
    for name in ("secret", "secret.safetensors"):
        (outside / name).write_bytes(b"secret")
    source = case.make(folder, marker)
    before = _state(folder)
    tally.inputs += 1
    for command in commands:
        outcome, wrong = _run(server, case, command, folder, source)
        if set(outcome["seen"]) == {"import of torch"}:  # by every thread: tables of float8, values that are rounded
            outcome, wrong = _run(server, case, command, folder, source, torch=True)
        after = _state(folder)
        for name in after.keys() - before.keys() if command == "verify manifest" else ():
            if name.endswith((".json", ".sha256")):
                (folder / name).unlink(missing_ok=True)
                after.pop(name)
        if fired(marker):
            wrong.append("the payload ran")
            shutil.rmtree(marker, ignore_errors=True)
        elif after != before:
            changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
            wrong.append(f"changed {sorted(changed)[:3]!r}")
            before = after
        tally.add(f"{case.title} | {command}", outcome, wrong)


def _run(
    server: Server, case: Case, command: str, folder: Path, source: Path, *, torch: bool = False
) -> tuple[dict[str, Any], list[str]]:
    """One command on a checkpoint: what came of it, and what is wrong with that."""
    out, scratch, answer, log = (folder / name for name in ("out", "scratch", "stdout", "stderr"))
    destination = out / ("model.pt" if command == "convert to torch" else "result")
    out.mkdir()
    scratch.mkdir()
    words = {"SRC": str(source), "GOOD": str(GOLDEN / GOOD), "DST": str(destination)}
    manifest = [folder / "ckpt"] if command == "verify manifest" else []
    outcome = server.run(
        torch=torch,
        argv=[words.get(word, word) for word in COMMANDS[command]],
        answer=answer,
        log=log,
        writable=[out, scratch, answer, log, *manifest],
        forbidden=[folder / "outside"],
        env={"TMPDIR": str(scratch), "XDG_CACHE_HOME": str(scratch), "HOME": str(scratch), "NO_COLOR": "1"},
    )
    said = [path.read_bytes().decode("utf-8", "replace") for path in (answer, log)]
    wrong = [*_complaints(outcome, *said, command, case), *_left(destination, outcome["status"])]
    for path in (answer, log):
        path.unlink()
    for path in (out, scratch):
        shutil.rmtree(path)
    return outcome, wrong


def _complaints(outcome: dict[str, Any], answer: str, log: str, command: str, case: Case) -> Iterable[str]:
    status, text = outcome["status"], answer + log
    if outcome["seen"]:
        yield f"did {outcome['seen']}"
    if status not in (0, 1, 3, 4, 5):
        yield f"exit {status}: {text[-600:]}"
    if "Traceback" in text or "internal error" in text:
        yield f"traceback: {text[-600:]}"
    if outcome["cpu"] > 5 and command != "load":  # which counts for itself
        yield f"took {outcome['cpu']:.1f} s"
    if outcome["peak"] > MEMORY:
        yield f"took {outcome['peak'] >> 20} MiB"
    if bad := _BAD.search(text.replace("\ufffd", "?")):
        yield f"wrote {bad[0]!r} to the terminal: {text[max(0, bad.start() - 80) : bad.end() + 20]!r}"
    if re.search(r"^\s*INJECTED", text, re.MULTILINE):
        yield f"let a name make a line: {text[-300:]!r}"
    if len(text) > 64 << 20:
        yield f"wrote {len(text)} characters"
    if "--json" in COMMANDS[command]:
        try:
            json.loads(answer)
        except ValueError as error:
            yield f"printed no JSON: {error}; {answer[:200]!r}"
    if case.refused and command == "verify" and status == 0:
        yield f"verify found nothing: {text[-700:]}"


def _left(destination: Path, status: int) -> Iterable[str]:
    """What a command may not leave behind: a result that it refused, or anything beside it but its unfinished work."""
    for name in os.listdir(destination.parent):
        if name == destination.name and status:
            yield f"left a result and exit code {status}"
        elif name != destination.name and not name.startswith(f".{destination.name}"):
            yield f"wrote {name!r} beside the result"


def _state(folder: Path) -> dict[str, str]:
    """Every file and folder below one: kind, time, digest of the contents."""
    out: dict[str, str] = {}
    for root, folders, names in os.walk(folder):
        for name in (*folders, *names):
            path = os.path.join(root, name)
            found = os.lstat(path)
            digest = ""
            if os.path.isfile(path) and not os.path.islink(path):
                digest = hashlib.md5(Path(path).read_bytes()).hexdigest()
            time = found.st_mtime_ns if not os.path.isdir(path) or os.path.islink(path) else 0
            out[os.path.relpath(path, folder)] = f"{found.st_mode} {time} {digest}"
    return out
