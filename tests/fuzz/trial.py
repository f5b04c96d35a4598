"""Runs mutants through the commands: whatever the input, only our own errors, and soon."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import resource
import shutil
import signal
import time
import traceback
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from converters.errors import DistckptError
from distckpt_cli.app import main as distckpt
from fuzz.mutants import TARGETS, Mutant, build
from fuzz.parts import PARTS, read_parts
from harness.support import GOLDEN
from hostile.corpus import GOOD

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["CPU_SECONDS", "Fault", "tried"]

CPU_SECONDS = 5.0
_MEMORY = 3 << 30
_ALWAYS = (
    ["inspect", "SRC", "--tensors", "*", "--args", "*", "--objects", "*", "--flat", "--json"],
    ["verify", "SRC", "--values"],
)
_ONE_OF = (
    *(
        ["export-hf", "SRC", "DST"],
        ["reshard", "SRC", "DST", "--tp", "2"],
        ["inspect", "SRC", "--files"],
    ),
    *(["convert", "SRC", "DST", "--to", to] for to in ("torch_dist", "legacy", "torch", "safetensors")),
    *(
        ["diff", "SRC", "GOOD", "--args"],
        ["load", "SRC"],
        ["inspect", "SRC"],
        ["reshard", "SRC", "DST", "--tp", "1", "-n"],
    ),
)


@dataclass(frozen=True)
class Fault:
    """A mutant that made something happen that must not.

    Args:
        mutant: Which.
        command: The words of the command.
        kind: Where it happened, the same for faults with one cause.
        text: What was said.
    """

    mutant: Mutant
    command: str
    kind: str
    text: str


def tried(mutants: list[Mutant], folder: Path, *, whole: bool = True) -> Iterator[Fault]:
    """Runs mutants in a child process, and those after one that killed it in another.

    Args:
        mutants: Which.
        folder: Where they are built.
        whole: Build them and run commands on them; else what was changed is only given to what reads it.
    """
    left = list(mutants)
    while left:
        reading, writing = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(reading)
            _child(left, folder, writing, whole)
        os.close(writing)
        begun, words = 0, ""
        with os.fdopen(reading, "r") as pipe:
            for line in pipe:
                answer = json.loads(line)
                if "begin" in answer:
                    begun, words = answer["begin"] + 1, answer["command"]
                else:
                    yield Fault(left[begun - 1], words, answer["kind"], answer["text"])
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status:
            name = "too slow" if status == -signal.SIGPROF else f"ended with {status}"
            yield Fault(left[max(begun - 1, 0)], words, f"{name}: {words} of {left[max(begun - 1, 0)].target}", "")
        left = left[max(begun, 1) :] if status else []


def _child(mutants: list[Mutant], folder: Path, answer: int, whole: bool) -> None:
    code = 99
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + _MEMORY, size + _MEMORY))
        os.environ |= {"DISTCKPT_PROGRESS": "off", "DISTCKPT_DEBUG": "1", "NO_COLOR": "1"}
        for number, made in enumerate(mutants):
            shutil.rmtree(folder / "case", ignore_errors=True)
            (folder / "case").mkdir()
            trial = _Trial(number, made, folder / "case", answer)
            if TARGETS[made.target].part in PARTS:
                trial.judge("parts", trial.parts)
            if whole:
                trial.commands()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        shutil.rmtree(folder / "case", ignore_errors=True)
        os._exit(code)


class _Trial:
    """What is done with one mutant; what comes of it is written to a pipe."""

    def __init__(self, number: int, made: Mutant, folder: Path, answer: int) -> None:
        self._number, self._made, self._folder, self._answer = number, made, folder, answer

    def parts(self) -> tuple[int, str]:
        """What was changed, to what reads it."""
        (self._folder / "parts").mkdir()
        try:
            read_parts(self._made, self._folder / "parts")
        except Exception:
            return 70, traceback.format_exc()
        return 0, ""

    def commands(self) -> None:
        """The checkpoint, to some commands."""
        source = build(self._made, self._folder)
        chosen = _ONE_OF[zlib.crc32(self._made.line().encode()) % len(_ONE_OF)]
        words = {"SRC": str(source), "GOOD": str(GOLDEN / GOOD), "DST": str(self._folder / "out" / "result.pt")}
        for command in (*_ALWAYS, chosen):
            (self._folder / "out").mkdir(exist_ok=True)
            argv = [words.get(word, word) for word in command]
            self.judge(" ".join(command), lambda argv=argv: _run(argv))  # type: ignore[misc]
            shutil.rmtree(self._folder / "out", ignore_errors=True)

    def judge(self, command: str, run: Callable[[], tuple[int, str]]) -> None:
        """Does something within its time, and tells if its exit code is none of ours."""
        os.write(self._answer, json.dumps({"begin": self._number, "command": command}).encode() + b"\n")
        begin = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS + 2)
        code, text = run()
        signal.setitimer(signal.ITIMER_PROF, 0)
        spent = time.process_time() - begin
        kind = ""
        if spent > CPU_SECONDS:
            kind = f"too slow: {command.split()[0]} of {self._made.target}"
        elif code not in (0, 1, 3, 4, 5):
            frames = re.findall(r'File "[^"]*/((?:converters|distckpt_cli|fuzz)/[^"]+)", line (\d+)', text)
            last = re.findall(r"^(\w+(?:\.\w+)*(?:Error|Exception)?)(?:: |$)", text, re.MULTILINE)
            kind = f"exit {code} at {frames[-1] if frames else '?'} {last[-1] if last else ''}"
        if kind:
            os.write(self._answer, json.dumps({"kind": kind, "text": text[-3000:]}).encode() + b"\n")


def _run(argv: list[str]) -> tuple[int, str]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        if argv[0] != "load":
            return distckpt(argv), out.getvalue()
        try:
            _load(argv[1])
        except DistckptError as error:
            return error.exit_code, ""
        except Exception:
            return 70, traceback.format_exc()
    return 0, ""


def _load(path: str) -> None:
    from converters import Layout, iter_tensors, load, load_common, load_metadata

    for call in (lambda: load(path, Layout(), optimizer=True), lambda: load_common(path), lambda: load_metadata(path)):
        with contextlib.suppress(DistckptError):
            call()
    for _ in iter_tensors(path):
        pass
