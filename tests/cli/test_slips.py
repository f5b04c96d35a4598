"""What a slip of the hand gives: a sentence about what was typed, and the exit code of its kind."""

import os

import pytest

from harness.checkpoints import copy_golden
from harness.cli_support import here
from harness.support import GOLDEN

LLAMA = GOLDEN / "llama_adam_tp2pp2"


def test_a_user_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for command in ("ls", "inspect", "verify"):
        ran = here(command, "~nobodyx")
        assert (ran.code, ran.err.splitlines()[0]) == (3, "error: ~nobodyx does not exist")
    ran = here("strip", LLAMA, "~nobodyx/out")
    assert (ran.code, ran.err.splitlines()[0]) == (5, "error: ~nobodyx: there is no such user")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_whose_name_begins_with_a_tilde(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    copy_golden("llama_adam_tp2pp2", tmp_path / "~dir")
    assert here("ls", "~dir").out == here("ls", "./~dir").out
    assert here("inspect", "~dir").code == 0


def test_home_in_the_name_of_a_page(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert here("inspect", LLAMA, "--html", "~/page.html").code == 0
    assert (tmp_path / "page.html").is_file()


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_dangling_link(command, tmp_path):
    (tmp_path / "dang").symlink_to("/nowhere/at/all")
    ran = here(command, tmp_path / "dang")
    assert (ran.code, "did you mean" in ran.err) == (3, False)
    assert "dang is a dangling symbolic link, to /nowhere/at/all" in ran.err


def test_a_device_is_no_checkpoint():
    ran = here("inspect", os.devnull)
    assert (ran.code, ran.err) == (3, f"error: {os.devnull} is neither a file nor a folder\n")


def test_a_watch_of_nothing(tmp_path):
    ran = here("watch", tmp_path / "nope", tmp_path / "out", "--once", "--", "export-hf")
    assert (ran.code, ran.out, ran.err) == (3, "", f"error: {tmp_path}/nope does not exist\n")
    assert here("doctor", "").code == 2


@pytest.mark.parametrize(
    ("line", "code", "sentence", "hint"),
    [
        (["inspect", ""], 2, "no checkpoint was named: the path is empty", "is a shell variable unset?"),
        (
            ["reshard", LLAMA, "OUT", "--tp", "1", "--max-memory", "1"],
            2,
            "--max-memory of 1 byte is too small: one worker needs 131,072 bytes",
            "give at least 128KiB; 64MiB is the default",
        ),
        (
            ["reshard", LLAMA, "OUT", "--tp", "1", "--etp", "2"],
            4,
            "--etp 2 is for a mixture of experts; this model has none",
            "leave --etp out",
        ),
        (
            ["strip", LLAMA, "OUT", "--scratch", "/tmp"],
            2,
            "--scratch is for a DST in an object store; this one is on a disk",
            "leave it out",
        ),
        (["inspect", LLAMA, "-q", "-v"], 2, "--quiet prints less, --verbose more", "choose one"),
        (["--workers", "3", "inspect", LLAMA], 2, "--workers: inspect is the work of one process", "leave it out"),
        (
            ["reshard", LLAMA, "OUT", "--tp", "1", "--mcore", "0.15"],
            2,
            "--mcore '0.15' is not a choice",
            "choose 0.16 or 0.19",
        ),
        (["formats", "--bogus"], 2, "no such option: --bogus", "see distckpt formats --help"),
        (["edit-args", LLAMA, "OUT", "--unset", "nothere"], 4, "the checkpoint has no argument nothere", None),
        (["strip", LLAMA, "OUT", "x"], 2, "too many arguments: x", "see distckpt strip --help"),
        (["ls", LLAMA, "--retry-for", "-1"], 2, "--retry-for must be 0 or more", "see distckpt ls --help"),
    ],
)
def test_what_is_said(line, code, sentence, hint, tmp_path):
    ran = here(*[tmp_path / "out" if word == "OUT" else word for word in line])
    lines = ran.err.splitlines()
    assert (ran.code, lines[0]) == (code, f"error: {sentence}")
    assert lines[1] == f"hint:  {hint or 'distckpt inspect CKPT --args shows all'}"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("variable", "value", "sentence"),
    [
        ("DISTCKPT_RETRY_FOR", "abc", "DISTCKPT_RETRY_FOR takes a number"),
        ("DISTCKPT_PROGRESS", "maybe", "DISTCKPT_PROGRESS 'maybe' is not a choice"),
    ],
)
def test_a_variable_is_blamed_for_its_value(variable, value, sentence, monkeypatch):
    monkeypatch.setenv(variable, value)
    assert here("verify", LLAMA).err.splitlines()[0] == f"error: {sentence}"


def test_a_pattern_that_leaves_nothing_out():
    line = ("diff", LLAMA, LLAMA, "--quick", "--ignore", "*.bias", "--ignore", "*norm*")
    assert here(*line).err.count("leaves nothing out") == 1
    assert "--ignore *.bias leaves nothing out" in here(*line).err


def test_what_reshard_can_change_is_all_in_its_hint(tmp_path):
    text = here("reshard", LLAMA, tmp_path / "out").err
    assert all(f"{option}," in text for option in ("--etp", "--layers", "--vocab-size", "--optimizer", "--rng"))
    assert "--mcore" in text


def test_a_read_only_file_system(tmp_path, monkeypatch):
    real = os.statvfs
    read_only = os.statvfs_result((*list(real(tmp_path))[:8], os.ST_RDONLY, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: read_only if path == tmp_path else real(path))
    ran = here("strip", LLAMA, tmp_path / "out")
    assert (ran.code, ran.err) == (5, f"error: {tmp_path} is on a read-only file system\n")


@pytest.mark.parametrize(("name", "no_rng"), [("llama_adam_tp2pp2", False), ("legacy_llama_adam_tp2pp2", True)])
def test_strip_prints_the_flags_that_its_help_names(name, no_rng, tmp_path):
    text = here("strip", GOLDEN / name, tmp_path / "out").err
    assert ("--no-load-optim" in text, "--no-load-rng" in text) == (True, no_rng)
