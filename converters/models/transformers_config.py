"""config.json as transformers' own class reads it: what a file leaves out is what the class says, old spellings are new.

Beside `built`, the only place that imports transformers. Nothing of a model's own code is looked at: `auto_map` is left
out before.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from converters.errors import FormatError
from converters.names import printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["CODE_KEYS", "class_keys", "completed"]

CODE_KEYS = ("auto_map", "trust_remote_code")
"""What makes transformers look for code beside a model."""


def completed(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The whole configuration that a config.json stands for.

    Args:
        name: A `model_type` that transformers has a class for.
        config: Content of config.json.

    Raises:
        FormatError: transformers does not take it.
    """
    plain = {key: _number(value) for key, value in config.items() if key not in CODE_KEYS}
    try:
        with _silent():
            return dict(_class(name).from_dict({**plain, "model_type": name}).to_dict())
    except Exception as error:
        text = " ".join(str(error).split())
        raise FormatError(
            f"transformers does not take this config.json as a {printable(name)}",
            details=[printable(f"{type(error).__name__}: {text}")[:400]],
        ) from error


def _number(value: Any) -> Any:
    """What transformers 5 writes as `{"__float__": "Infinity"}`, which JSON has no number for."""
    if isinstance(value, list):
        return [_number(item) for item in value]
    if isinstance(value, dict) and value.keys() == {"__float__"} and value["__float__"] in _FLOATS:
        return float(value["__float__"])
    return value


_FLOATS = ("Infinity", "-Infinity", "NaN")


def class_keys(name: str) -> frozenset[str]:
    """The keys that a `model_type`'s class has."""
    with _silent():
        return frozenset(_class(name)().to_dict())


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Silences the warnings of transformers about a configuration: they are for the one who loads the model."""
    import logging

    from transformers.utils.logging import get_verbosity, set_verbosity

    before = get_verbosity()
    set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        set_verbosity(before)


def _class(name: str) -> Any:
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[name]
