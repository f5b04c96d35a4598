"""Error texts of Megatron, NeMo, Megatron-Bridge, torch and the common converters: what each means, and what to run.

They are listed in `symptoms.toml`. A symptom is recognised by the fixed part of its text, as the program raises it or as
people paste it. In a remedy, CKPT stands for the checkpoint.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_LONGEST_LINE = 4000
_SHOWN = 160


@dataclass(frozen=True, slots=True)
class Symptom:
    """A known error.

    Attributes:
        name: One word or two, stable, for programs.
        pattern: Recognises a line of a log.
        meaning: What it says of the checkpoint or the job.
        harmless: The job may go on.
        remedies: Commands or steps, the best first.
    """

    name: str
    pattern: re.Pattern[str]
    meaning: str
    remedies: tuple[str, ...] = ()
    harmless: bool = False


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A symptom in a text.

    Attributes:
        symptom: The symptom that the text shows.
        line: Number of the first line that shows it, from 1.
        text: That line, shortened.
        count: Lines that show it.
    """

    symptom: Symptom
    line: int
    text: str
    count: int


def _load() -> Iterator[Symptom]:
    with (files(__package__) / "symptoms.toml").open("rb") as file:
        entries = tomllib.load(file)["symptom"]
    for entry in entries:
        remedies, harmless = tuple(entry.get("remedies", ())), entry.get("harmless", False)
        yield Symptom(entry["name"], re.compile(entry["pattern"]), entry["meaning"], remedies, harmless)


SYMPTOMS = tuple(_load())
"""Every known error, in the order in which they are tried; a line shows the first that matches."""


def diagnose(lines: Iterable[str]) -> list[Diagnosis]:
    """The known errors in a text, in the order of their first lines. Memory does not grow with the text."""
    first: dict[str, Diagnosis] = {}
    for number, line in enumerate(lines, 1):
        text = line[:_LONGEST_LINE].rstrip()
        symptom = next((s for s in SYMPTOMS if s.pattern.search(text)), None)
        if symptom is not None:
            before = first.get(symptom.name)
            earlier = before or Diagnosis(symptom, number, " ".join(text.split())[:_SHOWN], 0)
            first[symptom.name] = Diagnosis(symptom, earlier.line, earlier.text, earlier.count + 1)
    return list(first.values())
