"""Runs `distckpt` command lines in forked children of one warm process, and disturbs them on request.

Started with fault.so in LD_PRELOAD where system calls shall fail. Reads one JSON request per line, answers with one line:

    {"runs": [{"argv": [...], "log": "/tmp/0", "env": {"RANK": "0"}, "fault": ["pwrite", 3, "EIO", "/out"],
               "phase": ["working", "KILL"], "limits": {"NOFILE": 40}, "trace": ["/tmp/trace", "/out"],
               "constants": {"execute.run._SAFE_POINT_SECONDS": 0.01}}],
     "kill": [0.25, 9]}
    {"runs": [{"status": 5, "counts": {"pwrite": 12}, "read": 1234}], "late": false}

All runs of a request are started together. Only `argv` and `log` must be given. `status` is negative for a signal; `kill`
sends a signal to all after so many seconds; `read` are the bytes a run has read. A run that was stopped is let go on when
the others have ended, and one that takes longer than `SECONDS` is killed (`late`).
"""

import ctypes
import gc
import importlib
import json
import os
import pkgutil
import resource
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import phases

import converters
import distckpt_cli
from distckpt_cli.app import main as distckpt

SECONDS = 500  # until runs are taken for hanging
CALLS = ("write", "pwrite", "read", "pread", "preadv", "fsync", "rename", "open", "mkdir", "ftruncate", "fallocate")
CALLS += ("close", "unlink", "rmdir", "link", "stat", "list")  # as in fault.c


def child(run, answer):
    log = os.open(run["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(run.get("env", {}))
    for place, value in run.get("constants", {}).items():
        module, _, name = place.rpartition(".")
        assert hasattr(sys.modules[f"converters.{module}"], name)
        setattr(sys.modules[f"converters.{module}"], name, value)
    for name, most in run.get("limits", {}).items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))
    if "phase" in run:
        phases.disturb(*run["phase"])
    fault, shim = run.get("fault"), ctypes.CDLL(None)
    if "trace" in run:
        path, below = run["trace"]
        shim.fault_trace(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), below.encode())
    if fault:
        call, nth, action, path = fault
        shim.fault_arm(call.encode(), nth, action.encode(), path.encode())
    code = distckpt(run["argv"])
    counts = {}
    if fault:
        counts = {call: shim.fault_count(call.encode()) for call in CALLS}
        shim.fault_arm(b"", 0, b"NONE", b"")
    if "trace" in run:
        shim.fault_trace(-1, b"")
    for name in run.get("limits", {}):
        if name == "NOFILE":
            os.closerange(3, answer)
    sys.stdout.flush()
    sys.stderr.flush()
    os.write(answer, json.dumps({"counts": counts, "read": bytes_read()}).encode())
    os._exit(code)


def bytes_read():
    try:
        return int(Path("/proc/self/io").read_text().split()[1])
    except OSError:  # no more open files allowed
        return 0


def start(run):
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.close(reading)
            child(run, writing)
        finally:
            os._exit(99)
    os.close(writing)
    return pid, os.fdopen(reading, "rb")


def serve(request):
    begin = time.monotonic()
    started = [start(run) for run in request["runs"]]
    running, stopped, codes, late = {pid for pid, _ in started}, set(), {}, False
    kill_at, number = request.get("kill") or (None, 0)
    while running:
        for pid in list(running):
            found, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
            if found and os.WIFSTOPPED(status):
                stopped.add(pid)
            elif found:
                running.discard(pid)
                stopped.discard(pid)
                codes[pid] = os.waitstatus_to_exitcode(status)
        now = time.monotonic() - begin
        if kill_at is not None and now >= kill_at:
            kill_at = None
            for pid in running:
                os.kill(pid, number)
        if running and running == stopped:
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)
            stopped.clear()
        if now > SECONDS:
            late = True
            for pid in running:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.001)
    answers = []
    for pid, pipe in started:
        with pipe:
            said = json.loads(pipe.read() or b'{"counts": {}, "read": 0}')
        answers.append({"status": codes[pid], **said})
    return {"runs": answers, "late": late}


def warm_up():
    """Runs commands, so that no child has to import what they use of other packages."""
    golden, words = Path(__file__).parents[1] / "golden", ["--progress", "off"]
    silent, output, errors = os.open(os.devnull, os.O_WRONLY), os.dup(1), os.dup(2)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    try:
        with tempfile.TemporaryDirectory() as folder:
            for name in ("llama_adam_tp2pp2", "v009_zarr_llama_adam_tp2pp2"):
                assert distckpt(["export-hf", str(golden / name), f"{folder}/{name}", *words]) == 0
                assert (
                    distckpt(["convert", str(golden / name), f"{folder}/{name}-1", "--to", "safetensors", *words]) == 0
                )
    finally:
        os.dup2(output, 1)
        os.dup2(errors, 2)
        for stream in (silent, output, errors):
            os.close(stream)


def main():
    for package in (converters, distckpt_cli):  # imported once here, not in every child
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    warm_up()
    gc.freeze()
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(serve(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
