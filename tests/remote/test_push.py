"""`export-hf --push`: a model on the hub by one commit, with a card; what is said, what is kept, what is continued."""

from __future__ import annotations

import json

import pytest
import yaml

from distckpt_cli.app import main
from harness import hub_server
from harness.remote_fixtures import forget
from harness.support import GOLDEN

LLAMA = str(GOLDEN / "llama_adam_tp2pp2")
QUIET = ("--progress", "off")
EXPORT = ["export-hf", LLAMA, "--max-shard-size", "20KB", *QUIET]


@pytest.fixture
def hub(monkeypatch, tmp_path):
    from huggingface_hub import constants

    with hub_server.hub_server() as (state, url):
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # a protocol of its own, which needs its server
        monkeypatch.setenv("HF_TOKEN", hub_server.TOKEN)
        monkeypatch.setenv("HF_ENDPOINT", url)
        monkeypatch.setenv("DISTCKPT_RETRY_FOR", "5")
        monkeypatch.setenv("DISTCKPT_SCRATCH", str(tmp_path / "scratch"))
        forget()
        yield state
        forget()


def test_the_files_of_a_disk_in_one_commit(hub, tmp_path, capsys):
    assert main([*EXPORT, "--push", "org/new"]) == 0
    said = capsys.readouterr()
    assert 'from_pretrained("org/new")' in said.out + said.err
    assert hub_server.TOKEN not in said.out + said.err
    assert main([*EXPORT, str(tmp_path / "disk")]) == 0
    there, here = hub.files("org/new"), {p.name: p.read_bytes() for p in (tmp_path / "disk").iterdir()}
    assert {n: d for n, d in there.items() if n not in ("README.md", ".gitattributes")} == here
    assert len(hub.repositories["org/new"]["main"]) == 2
    assert hub.private["org/new"]
    assert not list((tmp_path / "scratch").iterdir())
    assert main(["diff", "hf://org/new", str(tmp_path / "disk"), *QUIET]) == 0


def test_the_card(hub):
    assert main([*EXPORT, "--push", "hf://org/new@wip"]) == 0
    assert [*hub.files("org/new")] == [".gitattributes"]
    _, header, body = hub.files("org/new", "wip")["README.md"].decode().split("---\n", 2)
    assert yaml.safe_load(header) == {
        "library_name": "transformers", "tags": ["distckpt", "megatron"], "pipeline_tag": "text-generation",
    }  # fmt: skip
    report = json.loads(hub.files("org/new", "wip")["distckpt-report.json"])
    for text in ("# org/new", f"{report['parameters']:,}", "| training iteration | 10 |", "optimizer state"):
        assert text in body
    assert LLAMA not in body


def test_a_model_that_is_there(hub, capsys):
    assert main([*EXPORT, "--push", "org/name"]) == 0
    mine = dict(hub.files("org/name"), **{"README.md": b"by hand", "notes.txt": b"old"})
    hub.repositories["org/name"]["main"].append(mine)
    again = [*EXPORT, "--dtype", "fp32", "--push", "org/name"]
    assert main(again) == 5
    assert "holds a model already" in capsys.readouterr().err
    assert hub.files("org/name") == mine
    assert main([*again, "--overwrite"]) == 0
    new = hub.files("org/name")
    assert "notes.txt" not in new
    assert new["README.md"] != b"by hand"
    assert new["config.json"] != mine["config.json"]
    assert ".gitattributes" in new


def test_a_card_by_hand_is_kept(hub):
    hub.repositories["org/name"] = {"main": [{"README.md": b"by hand", "LICENSE": b"x"}]}
    hub.private["org/name"] = False
    assert main([*EXPORT, "--push", "org/name"]) == 0
    assert hub.files("org/name")["README.md"] == b"by hand"
    assert "config.json" in hub.files("org/name")
    assert not hub.private["org/name"]


def test_it_is_continued(hub, capsys, tmp_path):
    """Nothing is seen before the commit; what was uploaded is not sent again, and what was made is not made again."""
    hub.fail.append(["commit/main", 403, 1])
    assert main([*EXPORT, "--push", "org/new"]) == 5
    said = capsys.readouterr().err
    assert "may not write" in said
    assert "same command" in said
    assert [*hub.files("org/new")] == [".gitattributes"]
    assert hub.objects
    hub.requests.clear()
    assert main([*EXPORT, "--push", "org/new"]) == 0
    assert not [line for line in hub.requests if line.startswith("PUT")]
    assert "config.json" in hub.files("org/new")
    assert not list((tmp_path / "scratch").iterdir())


@pytest.mark.parametrize("request_line", ["preupload", "objects/batch", "PUT /objects", "repos/create", "commit/main"])
def test_what_passes_is_tried_again(request_line, hub):
    hub.fail.append([request_line, 503, 1])
    assert main([*EXPORT, "--push", "org/new"]) == 0
    assert "config.json" in hub.files("org/new")


@pytest.mark.parametrize(
    ("token", "says"),
    [("", "no token"), ("hf_wrong", "does not accept the token"), (hub_server.READ_ONLY, "may not write")],
)
def test_who_may_not(token, says, hub, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "none"))
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    assert main([*EXPORT, "--push", "org/new"]) == 5
    said = capsys.readouterr().err
    assert says in said
    assert "HF_TOKEN" in said
    assert token == "" or token not in said
    assert not any("PUT" in line for line in hub.requests)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([*EXPORT, "hf://org/new"], "--push"),
        ([*EXPORT, "--push", "s3://bucket/new"], "not on the hub"),
        ([*EXPORT, "--push", "hf://org/new/folder"], "a folder in a repository"),
        (["reshard", LLAMA, "hf://org/new", "--tp", "1", *QUIET], "can only be read"),
    ],
)
def test_destinations_that_are_not_meant(argv, says, hub, capsys):
    assert main(argv) == 5
    assert says in capsys.readouterr().err
    assert not hub.repositories


def test_a_dry_run_asks_nobody(hub, capsys):
    assert main([*EXPORT, "--push", "org/new", "-n"]) == 0
    assert "hf://org/new" in capsys.readouterr().out
    assert not hub.requests
