"""Runs `distckpt` command lines in forked children of one warm process, each with one fault armed.

Started with fault.so in LD_PRELOAD. Reads one JSON request per line and answers with one JSON line:

    {"argv": [...], "call": "pwrite", "nth": 3, "action": "EIO", "path": "/out", "log": "/tmp/stderr"}
    {"status": 5, "counts": {"pwrite": 12}}            status is negative for a signal
"""

import ctypes
import importlib
import json
import os
import pkgutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import converters
import distckpt_cli
from distckpt_cli.app import main as distckpt

CALLS = ("write", "pwrite", "read", "pread", "preadv", "fsync", "rename", "open", "mkdir", "ftruncate", "close")
CALLS += ("fallocate", "unlink", "rmdir")  # as in fault.c


def child(request, answer):
    shim = ctypes.CDLL(None)
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    text = [request[key].encode() for key in ("call", "action", "path")]
    shim.fault_arm(text[0], request["nth"], text[1], text[2])
    code = distckpt(request["argv"])
    counts = {call: shim.fault_count(call.encode()) for call in CALLS}
    shim.fault_arm(b"", 0, b"NONE", b"")
    sys.stdout.flush()
    sys.stderr.flush()
    os.write(answer, json.dumps(counts).encode())
    os._exit(code)


def main():
    for package in (converters, distckpt_cli):  # imported once here, not in every child
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    warm = distckpt(["--version"])
    assert warm == 0
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        reading, writing = os.pipe()
        pid = os.fork()
        if not pid:
            try:
                os.close(reading)
                child(request, writing)
            finally:
                os._exit(99)
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            counts = pipe.read()
        _, status = os.waitpid(pid, 0)
        print(
            json.dumps({"status": os.waitstatus_to_exitcode(status), "counts": json.loads(counts or "{}")}), flush=True
        )


if __name__ == "__main__":
    main()
