"""The README and those of the folders say what is true: links lead somewhere, transcripts are what the commands print."""

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
from typer.main import get_command

from converters.formats import REGISTRY
from converters.models import ARCHITECTURES
from distckpt_cli.app import app, main
from distckpt_cli.commands import COMMANDS
from distckpt_cli.exits import EPILOG
from harness.cli_support import ROOT, environment

DOCUMENTS = {
    name: (ROOT / name).read_text()
    for name in ("README.md", *(f"{folder}/README.md" for folder in ("distckpt_cli", "converters", "tests", "scripts")))
}
TEXT = "\n".join(DOCUMENTS.values())
FENCED = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PROSE = {name: FENCED.sub("", text) for name, text in DOCUMENTS.items()}
ALL_PROSE = "\n".join(PROSE.values())
LINKS = sorted({(name, target) for name, text in PROSE.items() for target in re.findall(r"\]\(([^)]+)\)", text)})


def section(title):
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL)
    assert found, f"no README has a section {title}"
    return found[1]


def first_column(text, header):
    """The first cells of the table whose first title is `header`."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    start = next(n for n, row in enumerate(rows) if row[0] == header)
    out = []
    for row in rows[start + 2 :]:
        if len(row) != len(rows[start]) or set(row[0]) <= {"-"}:
            break
        out.append(row[0])
    return out


# ---------------------------------------------------------------------- links, tests, scripts


def anchors(text):
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize(("name", "target"), LINKS)
def test_links_lead_somewhere(name, target):
    if target.startswith("https://"):
        return
    path, _, anchor = target.partition("#")
    file = ((ROOT / name).parent / path).resolve() if path else ROOT / name
    assert file.exists()
    assert file.is_relative_to(ROOT)
    if anchor:
        assert anchor in anchors(file.read_text())


@pytest.mark.parametrize(
    ("document", "name", "file"),
    [(d, *pair) for d, text in PROSE.items() for pair in re.findall(r"\[(test_\w+)\]\(([^)]+\.py)\)", text)],
)
def test_linked_tests_exist(document, name, file):
    source = ((ROOT / document).parent / file).read_text()
    assert re.search(rf"^def {name}\(", source, re.MULTILINE), name


@pytest.mark.parametrize("command", re.findall(r"`pytest ([^`]+)`", ALL_PROSE))
def test_commands_that_prove_something_select_tests(command):
    words = shlex.split(command)
    files = [word for word in words if word.endswith(".py")]
    functions = [re.findall(r"^def (test_\w+)", (ROOT / file).read_text(), re.MULTILINE) for file in files]
    assert all(functions)
    if "-k" in words:
        for keyword in words[words.index("-k") + 1].split(" or "):
            assert any(keyword in name for names in functions for name in names), keyword


@pytest.mark.parametrize(
    "path", sorted(set(re.findall(r"(?:\./)?((?:scripts|tests|converters|distckpt_cli)/[\w./]+)", TEXT)))
)
def test_named_files_exist(path):
    path = path.rstrip(".")
    if path.endswith("/NAME.py"):  # the file that the reader is going to write
        path = str(Path(path).parent)
    assert (ROOT / path).exists()


# ---------------------------------------------------------------------- transcripts


def transcripts():
    """The console blocks, as lists of (command, lines shown)."""
    for language, block in FENCED.findall(TEXT):
        if language == "console":
            parts = re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]
            yield [(part.partition("\n")[0], part.partition("\n")[2].splitlines()) for part in parts]


def normalised(line):
    """A line without what differs from one machine and one second to the next."""
    line = re.sub(r"\d[\d.]* (?:[KMGT]i)?B\b(?:/s)?", "SIZE", line)
    line = re.sub(r"\d+\.\d s\b", "TIME", line)
    line = re.sub(r"-> \[.*\]", "-> TOKENS", line)  # ties between tokens may fall differently on another processor
    return " ".join(line.split())


def as_pattern(lines):
    """A regular expression for the lines, where `...` stands for any number of lines."""
    return "".join(r"(?:.*\n)*" if line == "..." else re.escape(normalised(line)) + "\n" for line in lines)


def typed(words, folder):
    """A command line run in a folder: exit code, and what it prints. Without processes of its own it runs in this one."""
    env = environment(DISTCKPT_PROGRESS="off", PYTHONUNBUFFERED="1", HF_HUB_OFFLINE="1")
    if words[0] == "distckpt" and not {"watch", "--workers"} & {*words}:
        printed = io.StringIO()
        with (
            patch.dict(os.environ, env, clear=True),
            contextlib.chdir(folder),
            contextlib.redirect_stdout(printed),
            contextlib.redirect_stderr(printed),
        ):
            return main(words[1:]), printed.getvalue()
    assert words[0] in ("distckpt", "python")
    command = [sys.executable, *(["-m", "distckpt_cli"] if words[0] == "distckpt" else []), *words[1:]]
    done = subprocess.run(command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.returncode, done.stdout


@pytest.mark.parametrize("block", list(transcripts()), ids=lambda block: block[0][0][:40])
def test_transcripts_are_what_the_commands_print(block, tmp_path):
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    for command, shown in block:
        code, text = typed(shlex.split(command), tmp_path)
        assert code == (4 if shown[0].startswith("error:") else 0), text
        printed = "".join(normalised(line) + "\n" for line in text.splitlines())
        assert re.fullmatch(as_pattern(shown), printed), f"$ {command}\n{text}"


def shown_commands():
    text = TEXT.replace("\\\n", " ")
    for line in re.findall(r"(?:-m distckpt_cli|\$ distckpt|^    srun .* distckpt) (.*)$", text, re.MULTILINE):
        yield line.strip()


@pytest.mark.parametrize("line", list(shown_commands()))
def test_commands_parse(line):
    name, *words = shlex.split(line)
    get_command(app).get_command(None, name).make_context(name, words)


def test_the_library_example_runs(tmp_path):
    (code,) = [block for language, block in FENCED.findall(TEXT) if language == "python"]
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment(), check=True)
    assert (tmp_path / "demo-output" / "library" / "latest_checkpointed_iteration.txt").is_file()


MEGATRON = {
    "--ckpt-format",
    "--dist-ckpt-strictness",
    "--load",
    "--qk-layernorm",
    "--use-checkpoint-args",
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--use-distributed-optimizer",
    "--use-precision-aware-optimizer",
    "--dist-ckpt-optim-fully-reshardable",
}


def test_named_options_exist():
    group = get_command(app)
    known = {name for command in COMMANDS for p in group.get_command(None, command).params for name in p.opts}
    named = {
        name for quoted in re.findall(r"`([^`]+)`", ALL_PROSE) for name in re.findall(r"(?<!\S)--[a-z][a-z-]+", quoted)
    }
    assert len(named) > 20
    assert named <= known | MEGATRON | {
        "--help",
        "--workers",
        "--all",
        "--simulated",
        "--quick",
    }  # and those of scripts


# ---------------------------------------------------------------------- tables


def test_the_table_of_commands_is_that_of_help():
    named = [cell.strip("`").split()[1] for cell in first_column(section("Commands"), "command")]
    assert named == list(COMMANDS)


def test_the_table_of_families_is_complete():
    named = [cell.split("`")[1] for cell in first_column(section("Hugging Face families"), "family")]
    assert sorted(named) == sorted(model.name for model in ARCHITECTURES)


def test_formats_that_are_read_are_those_in_the_table():
    lines = section("What is read and written").splitlines()
    rows = [line for line in lines if line.startswith("| ")]
    for reader in REGISTRY:
        found = [row for row in rows if reader.name in row.split("|")[1]]
        assert found, reader.name
        assert not any("not yet" in row for row in found), reader.name


def test_exit_codes_are_those_of_help():
    lines = [line for line in section("For scripts").splitlines() if re.match(r"\| \d", line)]
    assert lines == [f"| {code} | {meaning} |" for code, meaning in EPILOG]


def test_schemas_are_those_that_are_printed():
    sources = [*(ROOT / "distckpt_cli").rglob("*.py"), *(ROOT / "converters").rglob("*.py")]
    used = {name for path in sources for name in re.findall(r'"(distckpt\.[\w-]+/\d+)"', path.read_text())}
    assert set(re.findall(r"`(distckpt\.[\w-]+/\d+)`", TEXT)) == used


def test_environment_variables_are_those_that_are_read():
    sources = [*(ROOT / "distckpt_cli").rglob("*.py"), *(ROOT / "converters").rglob("*.py")]
    used = {name for path in sources for name in re.findall(r"\bDISTCKPT_[A-Z_]+\b", path.read_text())}
    assert used <= set(re.findall(r"`(DISTCKPT_[A-Z_]+)`", section("For scripts")))


def test_the_first_is_short_and_none_names_a_machine():
    assert len(DOCUMENTS["README.md"].splitlines()) <= 150
    assert not re.search(r"/(?:home|root|work|Users)/", TEXT)


def test_the_picture_is_there_asks_no_server_and_is_of_commands_that_there_are():
    assert "(scripts/terminal.svg)" in DOCUMENTS["README.md"]
    picture = (ROOT / "scripts" / "terminal.svg").read_text()
    assert not re.search(r"url\(.?http|href=|<script", picture)
    shown = set(re.findall(r"\$&#160;distckpt&#160;([a-z-]+)", picture))
    assert len(shown) >= 3
    assert shown <= set(COMMANDS)


def test_help_of_the_demo_changes_nothing():
    done = subprocess.run(
        ["bash", ROOT / "scripts" / "demo", "--help"],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin"},
        check=True,
    )
    assert "It takes no options" in done.stdout
    assert done.stderr == ""
