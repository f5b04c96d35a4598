"""Runs modules of this folder, each in a forked child of one process that has imported megatron-core.

Importing it takes longer than most runs. Reads one JSON request per line, answers with one line:

    {"module": "oracle.run", "arguments": ["load", ...], "input": FILE, "output": FILE, "errors": FILE}
    {"code": 0}
"""

import contextlib
import importlib
import json
import os
import runpy
import sys

from oracle import ranks  # redirects devices before megatron is imported

# what the ranks of a run would import, each for itself
WARM = (
    "megatron.core.dist_checkpointing.strategies.torch",
    "megatron.core.dist_checkpointing.strategies.fully_parallel",
    "megatron.core.distributed",
    "megatron.core.optimizer",
    "oracle.optim",
    "oracle.run",
    "safetensors.torch",
    "torch._dynamo",
    "torch.distributed.checkpoint",
)


def run(request):
    """Runs a module as `python -m MODULE ARGUMENTS` would, and never returns.

    The streams of `sys` stay: nothing is in their buffers between two requests.
    """
    for number, (name, flags) in enumerate(
        (("input", os.O_RDONLY), ("output", os.O_WRONLY | os.O_CREAT), ("errors", os.O_WRONLY | os.O_CREAT))
    ):
        opened = os.open(request[name], flags, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    sys.argv = [request["module"], *request["arguments"]]
    code = 1
    try:
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def main():
    assert ranks  # imported for what it does
    for name in WARM:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            run(json.loads(line))
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        sys.stdout.write(json.dumps({"code": code}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
