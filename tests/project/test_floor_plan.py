"""`converters/README.md` is true: what it names is there, every package is named, the rows are those of the layer test."""

from __future__ import annotations

import re

import pytest

from harness.layers import LEVELS, ROOT

PLAN = (ROOT / "converters" / "README.md").read_text()
LIBRARY = ROOT / "converters"


def table(heading: str) -> list[list[str]]:
    """The cells of all tables below a heading, without their own headings."""
    section = PLAN.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    tables = re.findall(r"^\|.*\n\|[-|]+\n((?:\|.*\n)+)", section, re.MULTILINE)
    return [[cell.strip() for cell in line.strip("|").split("|")] for rows in tables for line in rows.splitlines()]


def test_the_rows_are_those_of_the_layer_test():
    rows = {name: int(number) for number, names in table("Who may call whom") for name in re.findall(r"`(\w+)`", names)}
    assert rows == LEVELS


def test_every_package_and_module_has_a_room():
    there = {p.stem for p in LIBRARY.glob("*.py") if p.stem != "__init__"}
    there |= {p.parent.name for p in LIBRARY.glob("*/__init__.py")}
    assert {row[0].strip("`") for row in table("The rooms")} == there


@pytest.mark.parametrize("path", sorted(set(re.findall(r"\b[a-z_]+(?:/[a-z_]+)*\.py\b", PLAN))))
def test_every_file_that_is_named_is_there(path):
    assert (LIBRARY / path).is_file() or (ROOT / path).is_file()


@pytest.mark.parametrize("folder", sorted(set(re.findall(r"`([a-z_]+/(?:[a-z_]+/?)*)`", PLAN))))
def test_every_folder_that_is_named_is_there(folder):
    assert (ROOT / folder).is_dir()


def test_the_questions_name_files():
    questions = table("Where do I look for ...")
    assert len(questions) >= 20
    assert all(re.search(r"`[a-z_0-9/]+\.py`", files) for _, files in questions)
