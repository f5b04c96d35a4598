"""The command line as such: help, exit codes, errors, streams, sizes, tables."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from converters.errors import (
    DestinationError,
    DistckptError,
    FormatError,
    IntegrityError,
    Interrupted,
    RequestError,
)
from converters.words import format_count, format_size
from distckpt_cli import app
from distckpt_cli.commands import COMMANDS
from distckpt_cli.console import Console, UsageProblem, json_value, parse_size, table
from distckpt_cli.exits import EPILOG, ExitCode
from harness.cli_support import ROOT, child, environment, same_as_file, terminal, wall_seconds


@pytest.fixture(autouse=True)
def plain_streams(monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR", "DISTCKPT_DEBUG", "DISTCKPT_PROGRESS", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)


# help


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_lists_every_command_under_its_panel(flag, capsys):
    assert app.main([flag]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for name, entry in COMMANDS.items():
        assert re.search(rf"^{entry.panel}:$", out, re.MULTILINE)
        assert re.search(rf"^  {name} +\w", out, re.MULTILINE)
    for code, meaning in EPILOG:
        assert re.search(rf"^  {re.escape(code)} +{re.escape(meaning.split()[0])}", out, re.MULTILINE)


def test_help_of_inspect(capsys):
    assert app.main(["inspect", "--help"]) == 0
    same_as_file(capsys.readouterr().out, "cli_help_inspect.txt")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_shows_examples(name, capsys):
    assert app.main([name, "-h"]) == 0
    out = capsys.readouterr().out
    assert f"  $ distckpt {name}" in out
    assert out.startswith(f"Usage: distckpt {name} [OPTIONS]")


def test_no_arguments_is_help_and_misuse(capsys):
    assert app.main([]) == ExitCode.USAGE
    assert "inspect" in capsys.readouterr().out


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from distckpt_cli.app import main; main(['--help'])\n"
        "heavy = {'torch', 'numpy', 'transformers', 'tensorstore', 'rich', 'pydantic', 'yaml'} & sys.modules.keys()\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), cwd=ROOT)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow  # speed is measured by scripts/; a loaded machine must not turn the suite red
def test_help_is_fast():
    assert wall_seconds("--help") < 0.3


def test_version(capsys):
    assert app.main(["--version"]) == 0
    assert re.fullmatch(r"distckpt \d+\.\d+\.\d+\S*\n", capsys.readouterr().out)


@pytest.mark.parametrize("command", ["formats", "models"])
def test_about(command, capsys):
    assert app.main([command]) == 0
    text = capsys.readouterr().out
    assert app.main([command, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == f"distckpt.{command}/1"
    assert all(entry["name"] in text for entry in document[command])


# misuse


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["inspct"], "no such command 'inspct'"),
        (["xyz"], "no such command 'xyz'"),
        (["inspect"], "missing argument 'CKPT...'"),
        (["inspect", "x", "--fils"], "no such option: --fils"),
        (["inspect", "x", "--files", "--args"], "--files and --args are different views"),
        (["inspect", "x", "--names", "--json"], "--names prints names and --json a document"),
        (["inspect", "x", "--silent", "--json"], "--silent prints nothing, --json a document"),
        (["reshard", "a", "b", "--tp", "two"], "--tp takes a whole number"),
        (["diff", "a", "b", "--rtol", "x"], "--rtol takes a number"),
        (["export-hf", "a", "b", "--progress", "fancy"], "--progress 'fancy' is not a choice"),
        (["export-hf", "a", "b", "--device", "gpu"], "--device 'gpu' is not a choice"),
        (["reshard", "a", "b", "--device", "cuda:x"], "--device 'cuda:x' is not a choice"),
        (["export-hf", "a", "b", "--arch", "foo"], "unknown architecture 'foo'"),
        (["diff", "a", "b", "--arch", "foo"], "unknown architecture 'foo'"),
        (["export-hf", "a", "b", "--dtype", "int8"], "cannot cast to 'int8'"),
    ],
)
def test_misuse_is_exit_2_with_one_sentence_and_a_hint(args, sentence, capsys):
    assert app.main(args) == ExitCode.USAGE
    out, err = capsys.readouterr()
    assert out == "" or "--json" in args
    assert err.splitlines()[0] == f"error: {sentence}"
    assert err.splitlines()[1].startswith("hint:  ")
    assert "Traceback" not in err


def test_misuse_as_json(capsys):
    assert app.main(["inspect", "--json"]) == ExitCode.USAGE
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "distckpt.error/1"
    assert document["error"]["kind"] == "usage"
    assert document["error"]["exit_code"] == 2


# the error boundary


def failing(monkeypatch, error: BaseException):
    def run(*_, **__):
        raise error

    monkeypatch.setattr("converters.formats.open_checkpoint", run)


ERRORS = [
    (FormatError("no such folder", details=["looked in a", "and b"], hint="try c"), 3),
    (IntegrityError("bytes differ", tensor="a.b"), 1),
    (RequestError("32 heads cannot be split over 6"), 4),
    (DestinationError("out exists"), 5),
    (UsageProblem("8G is ambiguous"), 2),
    (DistckptError("cannot happen"), 70),
    (Interrupted(2, "7 of 9 files done; run the same command to continue"), 130),
    (Interrupted(15, "7 of 9 files done; run the same command to continue"), 143),
    (KeyboardInterrupt(), 130),
    (KeyError("oops"), 70),
    (MemoryError(), 70),
    (RecursionError("deep"), 70),
    (PermissionError(13, "Permission denied", "/x"), 3),  # the disk's word, whoever hears it
    (OSError(9, "Bad file descriptor"), 70),
]


@pytest.mark.parametrize(("error", "code"), ERRORS, ids=[type(e).__name__ + str(c) for e, c in ERRORS])
def test_exit_codes(error, code, monkeypatch, capsys):
    failing(monkeypatch, error)
    assert app.main(["inspect", "ckpt"]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err


def test_error_text(monkeypatch, capsys):
    failing(monkeypatch, ERRORS[0][0])
    app.main(["inspect", "ckpt"])
    assert capsys.readouterr().err == "error: no such folder\n       looked in a\n       and b\nhint:  try c\n"


def test_interrupted_says_stopped(monkeypatch, capsys):
    failing(monkeypatch, ERRORS[6][0])
    app.main(["inspect", "ckpt"])
    assert capsys.readouterr().err == "stopped 7 of 9 files done; run the same command to continue\n"


def test_error_as_json(monkeypatch, capsys):
    failing(monkeypatch, IntegrityError("bytes differ", details=["at 7"], hint="copy again", tensor="a.b"))
    assert app.main(["inspect", "ckpt", "--json"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out) == {
        "schema": "distckpt.error/1",
        "error": {
            "kind": "damaged",
            "message": "bytes differ",
            "details": ["at 7"],
            "hint": "copy again",
            "tensor": "a.b",
            "exit_code": 1,
        },
    }
    assert err.startswith("error: bytes differ\n")


def test_a_bug_is_one_line_and_a_hint(monkeypatch, capsys):
    failing(monkeypatch, ValueError("two\nlines"))
    assert app.main(["inspect", "ckpt"]) == 70
    first, second = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"error: internal error: ValueError: two lines \(test_cli.py:\d+\)", first)
    assert "DISTCKPT_DEBUG=1" in second


@pytest.mark.parametrize("args", [["-vv"], ["-v", "-v"], ["--verbose", "-v"]])
def test_traceback_on_request(args, monkeypatch, capsys):
    failing(monkeypatch, ValueError("x"))
    app.main(["inspect", "ckpt", *args])
    assert "Traceback" in capsys.readouterr().err


def test_traceback_by_environment(monkeypatch, capsys):
    failing(monkeypatch, ValueError("x"))
    monkeypatch.setenv("DISTCKPT_DEBUG", "1")
    app.main(["inspect", "ckpt", "-v"])
    assert "Traceback" in capsys.readouterr().err


def test_hostile_error_text_is_escaped(monkeypatch, capsys):
    failing(monkeypatch, FormatError("bad \x1b[31mname\u202e", details=["a\x07"], hint="\x9b"))
    app.main(["inspect", "ckpt", "--json"])
    out, err = capsys.readouterr()
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e]", out + err)


def test_closed_pipe_is_quiet(tmp_path):
    command = f"{sys.executable} -m distckpt_cli inspect llama_adam_tp2pp2 --names 2>{tmp_path}/err | head -1"
    done = subprocess.run(
        ["bash", "-c", f"{command}; echo ${{PIPESTATUS[0]}}; cat {tmp_path}/err"],
        cwd=ROOT / "tests" / "golden",
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.stdout.splitlines()[0] == "decoder.final_layernorm.weight"
    assert done.stdout.splitlines()[1:] in (["141"], ["0"])  # 0: everything fitted into the pipe before head left


def test_closed_pipe_while_writing(monkeypatch):
    code = (
        "import os, sys; r, w = os.pipe(); os.close(r); os.dup2(w, 1)\n"
        "from distckpt_cli.app import main; sys.exit(main(['--help']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), cwd=ROOT)
    assert (done.returncode, done.stderr) == (141, "")


# sizes


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("8GB", 8 * 10**9),
        ("8GiB", 8 * 2**30),
        ("8 gib", 8 * 2**30),
        ("64MiB", 64 << 20),
        ("1.5GB", 1_500_000_000),
        ("5KB", 5000),
        ("2TiB", 2 << 40),
        ("4096", 4096),
        ("512B", 512),
        ("0", 0),
    ],
)
def test_parse_size(text, nbytes):
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["8G", "8Gi", "many", "", "-1GB", "1e9", "8GBB", "GB", "8 G B"])
def test_parse_size_refuses(text):
    with pytest.raises(UsageProblem, match="is not a size") as caught:
        parse_size(text, "--max-memory")
    assert "--max-memory" in caught.value.message
    if text == "8G":
        assert caught.value.hint == "write 8GB (powers of 1000) or 8GiB (powers of 1024)"


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (325_000, "0.31 MiB"),
        (268_435_456, "0.25 GiB"),
        (112_420_000_000, "104.70 GiB"),
        (20 << 40, "20.00 TiB"),
    ],
)
def test_format_size(nbytes, text):
    assert format_size(nbytes) == text


def test_format_count():
    assert [format_count(n) for n in (12, 23200, 124_439_808, 8_030_261_248)] == ["12", "23,200", "124.4 M", "8.03 B"]


# tables, colours, JSON


def test_table_aligns_and_keeps_the_last_column_whole():
    name = "a.very." + "long." * 40 + "name"
    lines = table(["DTYPE", ">SIZE", "TENSOR"], [("bf16", "1.00 GiB", name), ("fp32", "2 B", "b")], width=80)
    assert lines == [
        "DTYPE      SIZE  TENSOR",
        f"bf16   1.00 GiB  {name}",
        "fp32        2 B  b",
    ]


def test_table_on_a_narrow_terminal_gives_the_name_its_own_line():
    lines = table(["DTYPE", ">SIZE", "TENSOR"], [("bf16", "1.00 GiB", "n" * 50)], width=40)
    assert lines == ["DTYPE      SIZE", "  TENSOR", "bf16   1.00 GiB", "  " + "n" * 50]


@pytest.mark.parametrize(
    ("env", "on_terminal", "coloured"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"TERM": "dumb"}, True, False),
        ({"NO_COLOR": "1"}, True, False),
        ({"FORCE_COLOR": "1"}, False, True),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, True, False),
    ],
)
def test_colours(env, on_terminal, coloured):
    if on_terminal:
        code, text = terminal([sys.executable, "-m", "distckpt_cli", "inspect", "nothing-here"], 80, **env)
    else:
        code, _, text = child("inspect", "nothing-here", **env)
    assert code == 3
    assert ("\x1b[" in text) is coloured
    assert "error:" in text


def test_json_has_no_nan_and_no_objects():
    value = {"a": float("nan"), 1: [float("inf"), (2, {"b"})], "c": object, "d": None, "e": True}
    assert json.loads(json.dumps(json_value(value), allow_nan=False))["a"] == "nan"


def test_document_is_ascii(capsys):
    Console(json_requested=True).document("distckpt.x/1", {"name": "\x1b[31m\u202e\x7f\x9b\ud800"})
    assert re.fullmatch(r"[\x20-\x7e\n]+", capsys.readouterr().out)


def test_quiet_console_prints_no_notes(capsys):
    console = Console(quiet=True)
    console.note("a")
    console.next_step("b")
    console.label("c", "d")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("args", "hint"),
    [
        (["inspct"], "did you mean inspect?"),
        (["info"], "did you mean inspect?"),
        (["inspect", "x", "--fils"], "did you mean --files?"),
        (["reshard", "a", "b", "--optimizer", "dp-reshardable"], "did you mean dp_reshardable?"),
        (["convert", "a", "b", "--to", "Torch-Dist"], "did you mean torch_dist?"),
        (["convert", "a", "b", "--to", "hf"], "distckpt export-hf a b"),
        (["ls", "--sort", "sizes"], "did you mean size?"),
    ],
)
def test_what_was_most_likely_meant_is_said_in_one_form(args, hint, capsys):
    assert app.main(args) == ExitCode.USAGE
    assert f"\nhint:  {hint}" in capsys.readouterr().err


@pytest.mark.parametrize(("shell", "words"), [("bash", 1), ("zsh", 1), ("fish", 1)])
@pytest.mark.parametrize(
    ("line", "word", "completed"),
    [
        ("distckpt convert a b --to ", "", ["torch_dist", "legacy", "torch", "safetensors"]),
        ("distckpt export-hf a b --arch ", "qw", ["qwen2", "qwen3", "qwen3_moe"]),
        ("distckpt reshard a b --optimizer ", "dp", ["dp_reshardable"]),
        ("distckpt show llama_adam_tp2pp2 ", "outp", ["output_layer."]),
    ],
)
def test_values_complete_in_the_shell(shell, words, line, word, completed, tmp_path):
    text = line + word
    env = {"_DISTCKPT_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_ARGS": text, "COMP_WORDS": text}
    env |= {"COMP_CWORD": str(len(line.split())), "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    code = "from distckpt_cli.app import main; raise SystemExit(main())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment() | env,
        cwd=ROOT / "tests" / "golden",
        capture_output=True,
        text=True,
    )
    assert all(name in done.stdout for name in completed), (done.stdout, done.stderr)


def test_a_name_of_the_hub_is_understood_as_one(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert app.main(["inspect", "meta-llama/Llama-3.1-8B"]) == ExitCode.SOURCE
    assert "hint:  a model of the Hugging Face hub is hf://meta-llama/Llama-3.1-8B" in capsys.readouterr().err
