"""The library under distckpt: formats, models, planning and moving bytes. Imports no CLI code.

    import converters

    with converters.open("ckpt/iter_0050000") as checkpoint:
        checkpoint.get_slice("output_layer.weight")[3:7, :]

    from converters import Layout, load
    state = load("ckpt/iter_0050000", Layout(tp=4, pp=2), rank=3)

    converters.verify("ckpt/iter_0050000").good
    converters.diff("ckpt/iter_0050000", "resharded").identical
    converters.reshard("ckpt/iter_0050000", "resharded", tp=2, pp=2).path
    converters.convert("ckpt/iter_0050000", "model.pt", to="torch")
    converters.strip("ckpt/iter_0050000", "weights-only")
    converters.edit_args("ckpt/iter_0050000", "edited", values={"lr": 1e-5})
    converters.export_hf("ckpt/iter_0050000", "llama-hf", dtype="bf16")
    converters.import_hf("llama-hf", "start", tp=2)

What is named below is imported when it is asked for; torch, when something is loaded.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from converters.commands import convert as convert
    from converters.commands import edit_args as edit_args
    from converters.commands import export_hf as export_hf
    from converters.commands import import_hf as import_hf
    from converters.commands import reshard as reshard
    from converters.commands import strip as strip
    from converters.comparison.compare import diff as diff
    from converters.comparison.report import DiffReport as DiffReport
    from converters.errors import DistckptError as DistckptError
    from converters.loading.loader import LoadedState as LoadedState
    from converters.loading.loader import LoadStream as LoadStream
    from converters.loading.loader import load as load
    from converters.loading.run import LoadReport as LoadReport
    from converters.loading.state import iter_tensors as iter_tensors
    from converters.loading.state import load_common as load_common
    from converters.loading.state import load_metadata as load_metadata
    from converters.loading.state import load_plain_tensors as load_plain_tensors
    from converters.megatron.layout import Layout as Layout
    from converters.overview.checkpoint import Checkpoint as Checkpoint
    from converters.overview.checkpoint import open as open
    from converters.overview.runs import survey as survey
    from converters.verification.report import Report as Report
    from converters.verification.run import verify as verify
    from converters.write.written import WriteReport as WriteReport

__version__ = "0.1.0"

_NAMES = {
    "commands": "convert edit_args export_hf import_hf reshard strip",
    "comparison.compare": "diff",
    "comparison.report": "DiffReport",
    "errors": "DistckptError",
    "loading.loader": "LoadStream LoadedState load",
    "loading.run": "LoadReport",
    "loading.state": "iter_tensors load_common load_metadata load_plain_tensors",
    "megatron.layout": "Layout",
    "overview.checkpoint": "Checkpoint open",
    "overview.runs": "survey",
    "verification.report": "Report",
    "verification.run": "verify",
    "write.written": "WriteReport",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
