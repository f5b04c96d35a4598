"""The library under distckpt: formats, models, planning and moving bytes. Imports no CLI code.

    from converters import Layout, load
    state = load("ckpt/iter_0050000", Layout(tp=4, pp=2), rank=3)

What is named below is imported when it is asked for; torch, when something is loaded.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from converters.errors import DistckptError as DistckptError
    from converters.layout import Layout as Layout
    from converters.load_state import iter_tensors as iter_tensors
    from converters.load_state import load_common as load_common
    from converters.load_state import load_metadata as load_metadata
    from converters.load_state import load_plain_tensors as load_plain_tensors
    from converters.loader import LoadedState as LoadedState
    from converters.loader import LoadReport as LoadReport
    from converters.loader import LoadStream as LoadStream
    from converters.loader import load as load

__version__ = "0.1.0"

_HOMES = {
    "DistckptError": "errors",
    "Layout": "layout",
    "LoadReport": "loader",
    "LoadStream": "loader",
    "LoadedState": "loader",
    "iter_tensors": "load_state",
    "load": "loader",
    "load_common": "load_state",
    "load_metadata": "load_state",
    "load_plain_tensors": "load_state",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
