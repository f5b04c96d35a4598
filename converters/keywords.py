"""Keyword arguments that are the fields of an options class, in the signature of the function that takes them."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_Function = TypeVar("_Function", bound="Callable[..., Any]")


def keyword(name: str, default: Any, annotation: Any = inspect.Parameter.empty) -> inspect.Parameter:
    """A parameter that is given by its name."""
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def with_keywords(keywords: Iterable[inspect.Parameter]) -> Callable[[_Function], _Function]:
    """Gives a function that takes any keyword the signature of one that takes these, for `help` and for errors."""

    def wrap(function: _Function) -> _Function:
        signature = inspect.signature(function)
        parameters = {n: p for n, p in signature.parameters.items() if p.kind is not inspect.Parameter.VAR_KEYWORD}
        added = [parameter for parameter in keywords if parameter.name not in parameters]
        signature = signature.replace(parameters=[*parameters.values(), *added])

        @functools.wraps(function)
        def run(*args: Any, **options: Any) -> Any:
            signature.bind(*args, **options)  # a TypeError that names what there is not
            return function(*args, **options)

        run.__signature__ = signature  # type: ignore[attr-defined]
        return run  # type: ignore[return-value]

    return wrap
