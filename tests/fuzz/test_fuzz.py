"""Mutants of checkpoints, made from their numbers: only our own errors come out, within 5 s of processor time each.

`--all` runs more; `python -m fuzz --seconds 3600` in `tests/` as many as one likes. What was ever found is in
`fuzz/seeds`, a line each, and is run again here.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from fuzz.mutants import TARGETS, Mutant, build, mutant, mutants_of
from fuzz.parts import PARTS
from fuzz.trial import tried
from hostile.server import warm

SEEDS = Path(__file__).parent / "seeds" / "found.jsonl"


@pytest.fixture(scope="module", autouse=True)
def everything_imported():
    warm()


def faults(mutants, folder, **options):
    return [f"{fault.kind} | {fault.command} | {fault.text[-600:]}" for fault in tried(mutants, folder, **options)]


@pytest.mark.parametrize("target", TARGETS)
def test_mutants(target, tmp_path):
    made = [mutant(target, number) for number in range(16)]
    assert faults(made[:1], tmp_path) == []
    assert TARGETS[target].part not in PARTS or faults(made[1:], tmp_path, whole=False) == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("target", TARGETS)
def test_many_mutants(target, tmp_path):
    assert faults([mutant(target, number) for number in range(16, 320)], tmp_path) == []


def test_what_was_found_before(tmp_path):
    assert faults(mutants_of(SEEDS), tmp_path) == []


@pytest.mark.parametrize("target", TARGETS)
def test_a_mutant_is_what_its_line_says(target, tmp_path):
    """The same number is the same mutant, and a kept line builds the same files."""
    made = mutant(target, 7)
    assert mutant(target, 7) == made
    again = Mutant.of(made.line())
    for name, one in (("a", made), ("b", again)):
        (tmp_path / name).mkdir()
        build(one, tmp_path / name)
    contents = [
        {str(p.relative_to(tmp_path / name)): p.read_bytes() for p in (tmp_path / name).rglob("*") if p.is_file()}
        for name in ("a", "b")
    ]
    assert contents[0] == contents[1]


def test_a_mistake_would_be_found(tmp_path, monkeypatch):
    """The control: with a reader that raises what it must not, hangs, or dies, there is a fault of each kind."""
    import os

    from converters.formats import registry

    made = [mutant("common.pt", 1)]
    monkeypatch.setattr(registry, "backend_of", lambda folder: [].pop())
    assert any("IndexError" in text for text in faults(made, tmp_path))
    monkeypatch.setattr(registry, "backend_of", lambda folder: os._exit(7))
    assert any("ended with 7" in text for text in faults(made, tmp_path))

    def slow(folder):
        while True:
            pass

    monkeypatch.setattr(registry, "backend_of", slow)
    monkeypatch.setattr("fuzz.trial.CPU_SECONDS", -1.7)
    assert any("too slow" in text for text in faults(made, tmp_path))
