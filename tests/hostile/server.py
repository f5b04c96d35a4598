"""Runs commands on hostile checkpoints, each in a forked child of one warm process, watched and limited.

Reads one JSON request per line, answers with one line:

    {"argv": ["inspect", "SRC"], "answer": "/t/stdout", "log": "/t/stderr", "writable": ["/t/out"], "forbidden": ["/t/outside"]}
    {"status": 3, "seen": [], "cpu": 0.05, "peak": 1234567, "seconds": 0.06}

`argv` is a command line of distckpt, or `["load", SRC]`, `["rival", KIND, SRC]` for what is no command and needs a server
that was started with `--torch`: a child of a process with torch costs twice as much, and no command may import it.
`status` is negative for a signal, `seen` is what the child did that it may not, `peak` are bytes above the warm process. The rival is
not watched: it shall show that the payloads are live.
"""

# ruff: noqa: E402, PT017, E501

from __future__ import annotations

import gc
import importlib
import json
import os
import pkgutil
import resource
import sys
import tempfile
import time
import traceback
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[1])]

import converters
import distckpt_cli
from converters.errors import DistckptError
from distckpt_cli.app import main as distckpt
from distckpt_cli.help import LazyGroup
from hostile.watch import watch

CPU_SECONDS = 5
WALL_SECONDS = 400  # the machine may be busy with other things
ADDRESS_SPACE = 4 << 30  # beyond what the warm process has
GOLDEN = Path(__file__).resolve().parents[1] / "golden"


def load(path: str) -> int:
    """Everything that the library loads, as a job of one rank would."""
    from converters import Layout, iter_tensors, load, load_common, load_metadata, load_plain_tensors

    def drain(pairs):
        for _ in pairs:
            pass

    calls = {
        "load": lambda: load(path, Layout(), optimizer=True),
        "stream": lambda: drain(load(path, Layout(), names="hf", stream=True)),
        "load_common": lambda: load_common(path),
        "load_metadata": lambda: load_metadata(path),
        "load_plain_tensors": lambda: load_plain_tensors(path),
        "iter_tensors": lambda: drain(iter_tensors(path)),
    }
    code = 0
    for name, call in calls.items():
        begin = time.process_time()
        try:
            call()
        except DistckptError as error:
            code = error.exit_code
            from converters.names import printable

            assert printable(error.message) == error.message, f"{name}: control characters in {error.message!r}"
            if code == 70:
                raise
        spent = time.process_time() - begin
        assert spent < CPU_SECONDS, f"{name} took {spent:.1f} s"
    return code


def rival(kind: str, path: str) -> int:
    """What people use today, on the same bytes."""
    import torch
    import torch.distributed.checkpoint as dcp

    if kind == "dcp":
        reader = dcp.FileSystemReader(path)
        metadata = reader.read_metadata()
        from torch.distributed.checkpoint.metadata import BytesStorageMetadata

        wanted = {
            key: object() if isinstance(value, BytesStorageMetadata) else torch.empty(value.size, dtype=value.properties.dtype)
            for key, value in metadata.state_dict_metadata.items()
        }  # fmt: skip
        dcp.load(wanted, storage_reader=reader, no_dist=True)
    else:
        torch.load(path, weights_only=False)
    return 0


def child(request: dict, answer: int) -> None:
    for number, path in ((1, request["answer"]), (2, request["log"])):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
    os.environ.update(request.get("env", {}))
    most = CPU_SECONDS * (6 if request["argv"][0] == "load" else 1) + 1  # which is many calls
    resource.setrlimit(resource.RLIMIT_CPU, (most, most + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + ADDRESS_SPACE, size + ADDRESS_SPACE))
    argv = request["argv"]
    seen, stop = [], int
    if argv[0] != "rival":
        seen, stop = watch([Path(p) for p in request["writable"]], [Path(p) for p in request["forbidden"]])
    try:
        if argv[0] == "load":
            code = load(argv[1])
        elif argv[0] == "rival":
            code = rival(*argv[1:])
        else:
            code = distckpt(argv)
    except BaseException:
        code = 70
        stop()
        traceback.print_exc()
    stop()
    sys.stdout.flush()
    sys.stderr.flush()
    os.write(answer, json.dumps(seen[:20]).encode())
    os._exit(code)


def serve(request: dict, base: int) -> dict:
    reading, writing = os.pipe()
    begin = time.monotonic()
    pid = os.fork()
    if not pid:
        try:
            os.close(reading)
            child(request, writing)
        finally:
            os._exit(99)
    os.close(writing)
    late = False
    while True:
        found, status, usage = os.wait4(pid, os.WNOHANG)
        if found:
            break
        if not late and time.monotonic() - begin > WALL_SECONDS:
            late = True
            os.kill(pid, 9)
        time.sleep(0.001)
    with os.fdopen(reading, "rb") as pipe:
        seen = json.loads(pipe.read() or b"[]")
    return {
        "status": os.waitstatus_to_exitcode(status),
        "seen": seen,
        "cpu": usage.ru_utime + usage.ru_stime,
        "peak": max(0, usage.ru_maxrss * 1024 - base),
        "seconds": time.monotonic() - begin,
    }


def beginning() -> int:
    """The memory that a child begins with."""
    pid = os.fork()
    if not pid:
        os._exit(0)
    return os.wait4(pid, 0)[2].ru_maxrss * 1024


def warm(*, torch: bool = True) -> None:
    """Imports once what any command may import, by importing all of ours and doing everything once.

    Args:
        torch: What the library's loader needs, too, and the rival.
    """
    for package in (converters, distckpt_cli):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    converters.names.printable("\x1b\udcff")  # the codec is a module

    if torch:
        importlib.import_module("torch.distributed.checkpoint")
    good = [GOLDEN / "qwen2_weights_tp2pp2", GOLDEN / "hf_llama_safetensors", GOLDEN / "nemo2_llama4_weights_tp2pp2"]
    silent = os.open(os.devnull, os.O_WRONLY)
    keep = os.dup(1), os.dup(2)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    try:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder)
            for number, path in enumerate(good):
                for words in (["inspect", path], ["verify", "--values", path], ["diff", path, path]):
                    distckpt([str(word) for word in words])
                distckpt(["inspect", str(path), "--tensors", "*", "--args", "*", "--objects", "*", "--json"])
                distckpt(["export-hf", str(path), str(out / f"hf{number}")])
                for to in ("torch_dist", "legacy", "torch", "safetensors"):
                    distckpt(["convert", str(path), str(out / f"{to}{number}"), "--to", to])
                distckpt(["reshard", str(path), str(out / f"reshard{number}")])
                if torch:
                    load(str(path))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(keep[0], 1)
        os.dup2(keep[1], 2)


def keep_parsers() -> None:
    """Typer makes the parser of a command again for every command line, a fifth of a run; from now on it is kept."""
    make, kept = LazyGroup.get_command, {}

    def get_command(self, ctx, name):
        if name not in kept:
            kept[name] = make(self, ctx, name)
        return kept[name]

    LazyGroup.get_command = get_command


def main() -> None:
    keep_parsers()
    warm(torch="--torch" in sys.argv[1:])
    gc.collect()
    gc.freeze()
    base = beginning()
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(serve(json.loads(line), base)), flush=True)


if __name__ == "__main__":
    main()
