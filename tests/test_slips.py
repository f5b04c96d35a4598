"""What a slip of the hand gives: a sentence about what was typed, and the exit code of its kind."""

import os

import pytest
from checkpoints import copy_golden
from cli_support import here
from support import GOLDEN

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
