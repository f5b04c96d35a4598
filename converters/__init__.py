"""The library under distckpt: formats, models, planning and moving bytes. Imports no CLI code.

    from converters import Layout, load
    state = load("ckpt/iter_0050000", Layout(tp=4, pp=2), rank=3)

    from converters import diff, verify
    assert verify("ckpt/iter_0050000").good
    assert diff("ckpt/iter_0050000", "resharded").identical

What is named below is imported when it is asked for; torch, when something is loaded.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from converters.comparison import diff as diff
    from converters.comparison.compare import DiffReport as DiffReport
    from converters.errors import DistckptError as DistckptError
    from converters.loading.loader import LoadedState as LoadedState
    from converters.loading.loader import LoadReport as LoadReport
    from converters.loading.loader import LoadStream as LoadStream
    from converters.loading.loader import load as load
    from converters.loading.state import iter_tensors as iter_tensors
    from converters.loading.state import load_common as load_common
    from converters.loading.state import load_metadata as load_metadata
    from converters.loading.state import load_plain_tensors as load_plain_tensors
    from converters.parallel.layout import Layout as Layout
    from converters.verification import verify as verify
    from converters.verification.report import Report as Report

__version__ = "0.1.0"

_HOMES = {
    "DiffReport": "comparison.compare",
    "DistckptError": "errors",
    "Layout": "parallel.layout",
    "LoadReport": "loading.loader",
    "LoadStream": "loading.loader",
    "LoadedState": "loading.loader",
    "Report": "verification.report",
    "diff": "comparison",
    "iter_tensors": "loading.state",
    "load": "loading.loader",
    "load_common": "loading.state",
    "load_metadata": "loading.state",
    "load_plain_tensors": "loading.state",
    "verify": "verification",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
