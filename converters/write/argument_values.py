"""Values of training arguments as typed or given, in the types that the checkpoint has them in."""

from __future__ import annotations

import ast
import contextlib
import json
import math
from typing import Any

from converters.dtypes import dtype
from converters.errors import RequestError, UnsupportedError, UsageError
from converters.names import printable
from converters.pickles.nodes import Global, Obj
from converters.write.job_arguments import shown_argument

_KINDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    list: "a list",
    dict: "a dictionary",
}


class LiteralText(str):
    """A value as typed: a Python or JSON literal, or the name of a torch type."""

    __slots__ = ()


def argument_value(name: str, value: Any, before: Any) -> Any:
    """A value as the inert Namespace holds it.

    Args:
        value: See `EditOptions.values`.
        before: The argument's value in the checkpoint; None if it has none.

    Raises:
        RequestError: It is not plain data, or of another type than the one before.
    """
    is_type = isinstance(before, Global) and before.module == "torch"
    if is_type or (name.endswith("dtype") and before is None):
        with contextlib.suppress(UnsupportedError):
            return Global("torch", dtype(str(value).strip("'\"").removeprefix("torch.")).name)
    if isinstance(value, LiteralText):
        value = _literal(name, value)
    shown = printable(repr(value))[:100]
    if not _is_plain(value):
        raise RequestError(f"the value of {printable(name)} is not plain data: {shown}")
    if value is None or before is None:
        return value
    if isinstance(before, Obj | Global):
        whose = before.path if isinstance(before, Global) else f"an instance of {before.func.path}"
        raise RequestError(f"{printable(name)} is {whose} in the checkpoint, and {shown} is none")
    if type(before) is float and type(value) is int:
        return float(value)
    kinds = (list, tuple) if isinstance(before, list | tuple) else (type(before),)
    if type(value) not in kinds:
        raise RequestError(
            f"{printable(name)} is {_KINDS.get(kinds[0], 'of another kind')} in the checkpoint, "
            f"{printable(str(shown_argument(before)))[:100]}, and {shown} is none",
            hint=f"--set {printable(name)}=null stores that it has no value" if type(before) is not bool else None,
        )
    return type(before)(value) if kinds == (list, tuple) else value


def _literal(name: str, text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            raise UsageError(
                f"the value of {printable(name)} is no literal: {printable(text)[:100]}",
                hint=f"numbers, true, false, null, lists; a text in quotes: --set '{name}=\"...\"'; "
                "torch types by name: params_dtype=bfloat16",
            ) from None


def _refuse_constant(text: str) -> None:
    raise ValueError(text)  # NaN and Infinity are no JSON


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    return value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value))
