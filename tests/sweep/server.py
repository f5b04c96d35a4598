"""Starts one server of `ranks.py` for each version of Megatron-LM, and compares the states its jobs write."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Megatron:
    """A Megatron-LM source tree that can be asked to save and to load.

    Attributes:
        version: a release such as `0.16.1`, or `main`.
        python: the interpreter of an environment with torch and Megatron's requirements.
        paths: the import path: the source tree, the harness, and packages that the tree needs.
        work: a folder for logs.
    """

    version: str
    python: Path
    paths: list[Path]
    work: Path
    server: subprocess.Popen[str] | None = field(default=None, init=False)

    def ask(self, job: str, ranks: int, **options: object) -> str | None:
        """The message of the error that ended the job, or None."""
        if self.server is None or self.server.poll() is not None:
            self.server = self._start()
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        message = {"job": job, "ranks": ranks, "log": str(self.work / "log" / self.version / job), **options}
        print(json.dumps(message), file=self.server.stdin, flush=True)
        answer = self.server.stdout.readline()
        if not answer:
            raise RuntimeError(f"the server of Megatron {self.version} ended: see {self.work / f'{self.version}.log'}")
        return json.loads(answer)["error"]

    def close(self) -> None:
        if self.server is not None and self.server.stdin is not None:
            self.server.stdin.close()
            self.server.wait()

    def _start(self) -> subprocess.Popen[str]:
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(map(str, self.paths)),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "TORCHDYNAMO_DISABLE": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        self.work.mkdir(parents=True, exist_ok=True)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with (self.work / f"{self.version}.log").open("w") as log:
            command = ["nice", str(self.python), str(Path(__file__).parent / "ranks.py")]
            return subprocess.Popen(command, env=environment, stderr=log, **pipes)


def differences(wanted: Path, state: Path, *, versions_differ: bool = False) -> list[str]:
    """What differs, bit for bit, between two states that jobs of one layout wrote; each line names one thing.

    A state with int16 `master_param` beside bf16 weights (the precision-aware optimizer) is compared by the fp32 master
    weights that both make, when the other one holds fp32 master weights. Options of param groups that only one version
    of Megatron has do not count.
    """
    import torch

    out, files = [], sorted(path.name for path in wanted.glob("*.pt"))
    if files != sorted(path.name for path in state.glob("*.pt")):
        return ["not the same ranks"]
    for name in files:
        pair = [torch.load(folder / name, weights_only=False) for folder in (wanted, state)]
        if len({_has_remainders(one) for one in pair}) == 2:
            pair = [_in_fp32(one) for one in pair]
        first, second = pair
        for key in sorted(first.keys() | second.keys()):
            if key not in first or key not in second:
                of_version = versions_differ and key.startswith("param_group/")
                if not of_version and not _step_of_empty_group(key, first, second):
                    out.append(f"{name}: {key} only in {'the wanted state' if key in first else 'the result'}")
            elif not _same(first[key], second[key]):
                out.append(f"{name}: {key} differs: {_text(first[key])} wanted, {_text(second[key])}")
    return out


def names(folder: Path) -> set[str]:
    """The names of everything in a state that a job wrote."""
    import torch

    return {name for path in folder.glob("*.pt") for name in torch.load(path, weights_only=False)}


def _same(first: object, second: object) -> bool:
    import torch

    if torch.is_tensor(first) and torch.is_tensor(second):
        return first.dtype == second.dtype and first.shape == second.shape and _bits(first).equal(_bits(second))
    return type(first) is type(second) and first == second


def _bits(tensor: object) -> object:
    import torch

    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(kinds[tensor.element_size()])


def _text(value: object) -> str:
    if hasattr(value, "dtype"):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)} {value.flatten()[:3].tolist()}"
    return repr(value)


def _step_of_empty_group(key: str, first: dict, second: dict) -> bool:
    """FusedAdam has no step in a group without parameters on this rank; loading sets it to that of the others."""
    if not (key.startswith("param_group/") and key.endswith("/step")):
        return False
    value = {**first, **second}[key]
    return value in {v for k, v in first.items() if k.endswith("/step")}


def _has_remainders(state: dict) -> bool:
    return any(key.startswith("master_param/") for key in state)


def _in_fp32(state: dict) -> dict:
    """Master weights and moments in fp32, whatever the optimizer keeps them in."""
    import torch

    out = {}
    for key, value in state.items():
        kind, _, name = key.partition("/")
        if kind == "master_param" and value.dtype == torch.int16:
            weight = state[f"master/{name}"].view(torch.int16).int()
            out[f"master/{name}"] = (((weight - (value < 0).int()) << 16) | (value.int() & 0xFFFF)).view(torch.float32)
        elif kind == "master_param":
            out[f"master/{name}"] = value
        elif kind in ("exp_avg", "exp_avg_sq"):
            out[key] = value.float()
        elif kind != "master" or f"master_param/{name}" not in state:
            out[key] = value
    return out
