"""Choices of options and arguments: completed by the shell; other values are refused in one form."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer  # noqa: TC002 - Typer evaluates those of `complete_tensors`

from converters.errors import DistckptError
from converters.names import printable
from distckpt_cli.console import UsageProblem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


@dataclass(frozen=True)
class Words:
    """The words that an option takes: the shell completes them, `check` refuses all others.

    Attributes:
        words: Lists them; called only when one is needed, as they may lie in modules that take long to import.
        strict: Others are refused; else the command itself says what it takes.
    """

    words: Callable[[], Iterable[str]]
    strict: bool = True

    def complete(self, incomplete: str) -> list[str]:
        """The words that begin so."""
        return [word for word in self.words() if word.startswith(incomplete)]

    def check(self, context: typer.Context, param: typer.CallbackParam, value: str | None) -> str | None:
        """Refuses other words, as Typer's callback of the option.

        Raises:
            UsageProblem: It is one.
        """
        if value is not None and self.strict:
            source = context.get_parameter_source(str(param.name))
            in_environment = source is not None and source.name == "ENVIRONMENT"
            check_choice(str(param.envvar) if in_environment else max(param.opts, key=len), value, self.words())
        return value


def choice(*words: str) -> Words:
    """An option that takes one of these words."""
    return Words(lambda: words)


def choice_of(name: str) -> Words:
    """An option that takes the words that the library has under its name."""

    def words() -> Iterable[str]:
        from converters.commands import CHOICES

        return CHOICES[name]

    return Words(words)


def _architectures() -> Iterable[str]:
    from converters.models import ARCHITECTURES

    return [model.name for model in ARCHITECTURES]


def _formats() -> Iterable[str]:
    from converters.formats import REGISTRY

    return [entry.name for entry in REGISTRY]


def _versions() -> Iterable[str]:
    from converters.megatron.megatron_flags import VERSIONS

    return VERSIONS


def _optimizers() -> Iterable[str]:
    from converters.write.convert import WRITERS

    return dict.fromkeys(form for writer in WRITERS.values() for form in writer.optimizers())


ARCHITECTURES = Words(_architectures, strict=False)
DEVICES = Words(lambda: ("auto", "cpu", "cuda"), strict=False)
DTYPES = Words(lambda: ("bf16", "fp16", "fp32"), strict=False)
FORMATS = Words(_formats)
MCORE_VERSIONS = Words(_versions)
OPTIMIZERS = Words(_optimizers, strict=False)


def complete_tensors(context: typer.Context, incomplete: str) -> list[str]:
    """Names of the tensors of the checkpoint that was named before, up to the next dot; none if it cannot be opened."""
    from converters.formats import open_checkpoint

    try:
        names = open_checkpoint(str(context.params.get("ckpt") or "")).catalog.tensors
    except DistckptError:
        return []
    ends = (name.find(".", len(incomplete)) + 1 or len(name) for name in names)
    return list(dict.fromkeys(n[:end] for n, end in zip(names, ends, strict=True) if n.startswith(incomplete)))


def nearest(word: str, words: Iterable[str]) -> str | None:
    """The word that was most likely meant; upper case, and - for _, are no difference."""
    by_plain_form = {other.lower().replace("-", "_"): other for other in words}
    matches = difflib.get_close_matches(word.lower().replace("-", "_"), by_plain_form, n=1)
    return by_plain_form[matches[0]] if matches else None


def suggestion(word: str, words: Sequence[str]) -> str:
    """The hint for a word that is none of the choices, in the same form for all commands."""
    near = None if word[:1].isdigit() else nearest(word, words)  # no version is like another one
    listed = " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
    return (f"did you mean {near}? " if near and len(words) > 1 else "") + f"choose {listed}"


def check_choice(option: str, value: str | None, choices: Iterable[str]) -> None:
    """Refuses a word that is none of the choices; None is an option that was not given.

    Raises:
        UsageProblem: It is not.
    """
    words = tuple(choices) if value is not None else ()
    if value is not None and value not in words:
        raise UsageProblem(f"{option} {printable(value)!r} is not a choice", hint=suggestion(value, words))


def check_device(device: str) -> None:
    """Refuses what no machine has.

    Raises:
        UsageProblem: It is no name of a device.
    """
    if not re.fullmatch("auto|cpu|cuda(:[0-9]+)?", device):
        words = ("auto", "cpu", "cuda", "cuda:N")
        raise UsageProblem(f"--device {printable(device)!r} is not a choice", hint=suggestion(device, words))
