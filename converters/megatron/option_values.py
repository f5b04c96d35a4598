"""Values of options as numbers, flags and words, collected with where each came from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


def as_int(value: Any) -> int | None:
    """A whole number, also one written as a float; None for anything else, as for True."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def as_float(value: Any) -> float | None:
    """A number, also one written as text."""
    if isinstance(value, str):
        try:
            return float(value)  # PyYAML reads `1e-5` as text
        except ValueError:
            return None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def as_bool(value: Any) -> bool | None:
    """A flag; numbers count."""
    return bool(value) if isinstance(value, bool | int) else None


def as_str(value: Any) -> str | None:
    """A word."""
    return value if isinstance(value, str) else None


def first_stated(options: Mapping[str, Any], names: Iterable[str]) -> Any:
    """The value of the first of these options that is stated; None if none is."""
    return next((options[name] for name in names if options.get(name) is not None), None)


class Facts:
    """Collects values and where each came from; the first source of a field wins."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.source: dict[str, str] = {}
        self.extras: dict[str, Any] = {}
        self.notes: list[str] = []
        self.unknown: list[str] = []

    def put(self, name: str, value: Any, source: str) -> None:
        """Takes a value unless one is known."""
        if value is not None and self.values.get(name) is None:
            self.values[name] = value
            self.source[name] = source

    def override(self, name: str, value: Any, source: str) -> None:
        """Takes a value even if one is known."""
        self.values[name] = value
        self.source[name] = source
