"""What somebody who is new to it tries: options are taken or refused, hints lead on, answers are about what was asked."""

import json
import os
import re
import shlex
import shutil
import subprocess

import pytest
from safetensors.torch import load_file, save_file

from distckpt_cli.app import main
from harness.checkpoints import copy_golden
from harness.support import GOLDEN

LLAMA, HF = str(GOLDEN / "llama_adam_tp2pp2"), str(GOLDEN / "hf_llama_safetensors")
BUCKETS = str(GOLDEN / "llama_dpreshardable_tp2pp2dp2")


def _said(capsys, *words):
    code = main([str(word) for word in words])
    out = capsys.readouterr()
    return code, out.out, out.err


@pytest.mark.parametrize(
    ("line", "code", "text"),
    [
        (["show", LLAMA, "*norm*", "--histogram"], 2, "--histogram show one"),
        (
            ["reshard", LLAMA, "OUT", "--optimizer", "none", "--masters", "fp32"],
            2,
            "--masters is about optimizer state",
        ),
        (["diff", LLAMA, BUCKETS, "--arch", "llama"], 2, "--arch is for"),
        (["diff", HF, HF, "--vocab-size", "3"], 2, "--vocab-size is for"),
        (["diff", LLAMA, BUCKETS, "--vocab-size", "9999"], 4, "an embedding has 128 rows"),
        (["diff", LLAMA, BUCKETS, "--vocab-size", "50"], 4, "would leave out trained rows"),
        (["diff", LLAMA, HF, "--vocab-size", "50"], 4, "would leave out trained rows"),
        (["export-hf", LLAMA, "OUT", "--mtp", "keep"], 4, "no multi-token prediction layers"),
        (["doctor", "some text", "no/such"], 3, "does not exist"),
        (["reshard", LLAMA, "OUT", "--tp", "1", "--mcore", "0.18"], 2, "choose 0.16 or 0.19"),
        (["import-hf", HF, "OUT", "--mcore", "0.18"], 2, "choose 0.16 or 0.19"),
    ],
)
def test_options_are_taken_or_refused(line, code, text, tmp_path, capsys):
    words = [str(tmp_path / "out") if word == "OUT" else word for word in line]
    got, _, err = _said(capsys, *words)
    assert (got, text in err) == (code, True), err
    assert not (tmp_path / "out").exists()


def test_fewer_workers_than_asked_for_are_said(tmp_path, capsys):
    line = ["reshard", LLAMA, tmp_path / "out", "--tp", "1", "--threads", "64", "--dry-run"]
    code, out, err = _said(capsys, *line)
    assert (code, "workers   4" in out) == (0, True)
    assert "--max-memory 64MiB is enough for 4 workers, not for the 64 of --threads" in err
    assert "not for" not in _said(capsys, *line, "--max-memory", "2GiB")[2]


@pytest.mark.parametrize(
    "line",
    [
        ["import-hf", LLAMA, "OUT"],
        ["reshard", HF, "OUT", "--tp", "2"],
        ["export-hf", HF, "OUT"],
        ["show", BUCKETS, "*bucket*"],
        ["doctor", HF],
    ],
)
def test_hints_lead_on(line, tmp_path, capsys):
    """The command that a hint names works as it stands."""
    code, _, err = _said(capsys, *[tmp_path / "x" if word == "OUT" else word for word in line])
    assert code in (2, 4)
    hint = next(text for text in err.splitlines() if text.startswith("hint:"))
    command = hint.partition("distckpt ")[2]
    for end in (" makes", " shows what", " examines"):
        command = command.partition(end)[0]
    words = [str(tmp_path / "out") if word == "DST" else word for word in shlex.split(command)]
    assert _said(capsys, *words)[0] == 0, words


def test_hints_of_edit_args_fit_the_format(tmp_path, capsys):
    assert "config.json" in _said(capsys, "edit-args", HF, tmp_path / "x", "--set", "lr=1")[2]


def test_several_of_which_one_has_lost_a_file(tmp_path, capsys):
    for name in ("a", "b"):
        copy_golden("llama_adam_tp2pp2", tmp_path / name / "iter_0000010")
    assert _said(capsys, "inspect", tmp_path)[0] == 0
    next((tmp_path / "b" / "iter_0000010").glob("*.distcp")).unlink()
    for words in (["inspect", tmp_path], ["inspect", tmp_path, "--json"]):
        assert _said(capsys, *words)[0] == 1
    assert _said(capsys, "ls", tmp_path)[0] == 0


def test_the_page_shows_the_verification_of_its_checkpoint_only(tmp_path, capsys):
    result, page = tmp_path / "verify.json", tmp_path / "page.html"
    result.write_text(_said(capsys, "verify", LLAMA, "--json")[1])
    assert _said(capsys, "inspect", LLAMA, "--html", page, "--verification", result)[0] == 0
    code, _, err = _said(capsys, "inspect", BUCKETS, "--html", page, "--verification", result)
    assert (code, "is the verification of" in err) == (4, True)
    result.write_text(json.dumps({"schema": "distckpt.diff/1", "path": LLAMA}))
    assert _said(capsys, "inspect", LLAMA, "--html", page, "--verification", result)[0] == 3


def _changed_model(folder, change):
    """The Hugging Face golden with other values."""
    shutil.copytree(HF, folder)
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, {"format": "pt"})
    return folder


def test_numbers_that_fp16_does_not_have_are_said(tmp_path, capsys):
    def shrink(tensors):
        if "model.norm.weight" in tensors:
            tensors["model.norm.weight"][:3] = 1e-9
            tensors["model.norm.weight"][3] = 0

    model = _changed_model(tmp_path / "hf", shrink)
    code, out, _ = _said(capsys, "import-hf", model, tmp_path / "out", "--dtype", "fp16", "--max-memory", "1MiB")
    assert code == 0
    assert "underflow 3 elements that are not zero in the source became zero" in out
    again = _said(capsys, "import-hf", model, tmp_path / "json", "--dtype", "fp16", "--json")[1]
    assert json.loads(again)["underflowed"] == 3
    source = tmp_path / "out"
    assert _said(capsys, "export-hf", source, tmp_path / "hf16", "--dtype", "fp16")[0] == 0
    assert json.loads((tmp_path / "hf16" / "distckpt-report.json").read_text())["underflowed"] == 0
    assert "underflow" not in _said(capsys, "import-hf", model, tmp_path / "bf16", "--dtype", "bf16")[1]


def test_gate_and_up_may_be_equal(tmp_path, capsys):
    """A model may be made so; it is worth a look, and proves no damage."""

    def equal(tensors):
        for name in tensors:
            if "up_proj" in name:
                tensors[name] = tensors[name.replace("up_proj", "gate_proj")].clone()

    model = _changed_model(tmp_path / "hf", equal)
    for tp in (1, 2):
        assert _said(capsys, "import-hf", model, tmp_path / f"tp{tp}", "--tp", tp)[0] == 0
        code, out, _ = _said(capsys, "verify", tmp_path / f"tp{tp}")
        assert (code, "gate and up are the same elements" in out) == (0, True), out
        assert "written twice" not in out


STEPS = {
    "the largest tensor": (["inspect", LLAMA, "--tensors", "--flat", "--sort", "size"], 0, "embedding.word_embeddings"),
    "two iterations": (["diff", LLAMA, BUCKETS], 0, "values    of all 60 tensors identical"),
    "one bias": (["show", str(GOLDEN / "gpt_adam_tp2pp2"), "decoder.layers.0.mlp.linear_fc2.bias"], 0, "values    [0:"),
    "incomplete runs": (["ls", "RUNS", "--incomplete", "--names"], 0, "b/iter_0000010\n"),
    "export": (["export-hf", LLAMA, "OUT"], 0, "wrote"),
    "resume at another TP": (["reshard", BUCKETS, "OUT", "--tp", "1"], 0, "wrote"),
    "import": (["import-hf", HF, "OUT"], 0, "wrote"),
    "a download": (["verify", HF], 0, "good"),
    "why a job refuses": (
        ["doctor", BUCKETS, "--for", "--tp 1 --mcore 0.16 --use-distributed-optimizer"],
        1,
        "no: dp_resh",
    ),
    "a run": (["watch", LLAMA, "OUT", "--once", "--", "export-hf"], 0, "1 new of 1 complete iteration"),
}
"""What somebody wants first, each in one command."""


@pytest.mark.parametrize("wanted", STEPS)
def test_one_command_each(wanted, tmp_path, capfd):
    """Command and options are in `--help`; the answer is on stdout, and `--json` says it, too."""
    for name in ("a", "b"):
        copy_golden("llama_adam_tp2pp2", tmp_path / "runs" / name / "iter_0000010")
    next((tmp_path / "runs" / "b" / "iter_0000010").glob("*.distcp")).unlink()
    line, code, text = STEPS[wanted]
    words = [{"OUT": tmp_path / "out", "RUNS": tmp_path / "runs"}.get(word, word) for word in line]
    assert main(["--help"]) == 0
    assert line[0] in capfd.readouterr().out
    assert main([line[0], "--help"]) == 0
    described = capfd.readouterr().out
    asked = line[: line.index("--")] if "--" in line else line
    assert all(word in described for word in asked if word.startswith("--") and " " not in word)
    assert main(list(map(str, words))) == code
    assert text in capfd.readouterr().out


@pytest.mark.parametrize("wanted", sorted(STEPS.keys() - {"incomplete runs"}))
def test_one_document_each(wanted, tmp_path, capfd):
    line, code, _ = STEPS[wanted]
    at = line.index("--") if "--" in line else len(line)
    words = [tmp_path / "out" if word == "OUT" else word for word in [*line[:at], "--json", *line[at:]]]
    assert main(list(map(str, words))) == code
    assert json.loads(capfd.readouterr().out)["schema"].startswith("distckpt.")


def test_a_narrow_terminal(tmp_path, capsys, monkeypatch):
    from distckpt_cli.console import Console

    monkeypatch.setattr(Console, "__init__", _narrow(Console.__init__))
    for words in (["ls", GOLDEN / "llama_adam_tp2pp2"], ["show", LLAMA, "decoder.final_layernorm.weight"]):
        code, out, _ = _said(capsys, *words)
        longest = max((text for text in out.splitlines() if "/" not in text), key=len)
        assert (code, len(longest) <= 40) == (0, True), longest


def _narrow(init):
    def make(self, **options):
        init(self, **{**options, "width": 40})

    return make


def test_a_dry_run_says_that_the_disk_is_too_small(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("converters.write.write_plan.free_bytes", lambda folder: 1000)
    line = ["reshard", str(GOLDEN / LLAMA), str(tmp_path / "out"), "--tp", "1"]
    assert main([*line, "--dry-run"]) == 0
    assert re.search(r"note: not enough room in .*: [\d,]+ bytes are needed, 1,000 are free", capsys.readouterr().err)
    assert main(line) == 5


def test_what_is_suggested_can_be_typed_whatever_the_name(tmp_path, capsys):
    name = os.fsdecode(b"a\xff\x1b[31m'\\b\xc2\x85")
    shutil.copytree(GOLDEN / LLAMA, tmp_path / name)
    assert main(["inspect", str(tmp_path / name)]) == 0
    command = capsys.readouterr().err.split("next: ")[1].strip()
    assert command.isascii()
    words = subprocess.run(["bash", "-c", f"printf '%s\\0' {command}"], capture_output=True, check=True).stdout.split(
        b"\0"
    )
    assert words[2] == os.fsencode(tmp_path / name)


def test_how_many_tensors_of_what(capsys):
    """15 weights, 60 with optimizer state: the words say which of both is counted."""
    name = str(GOLDEN / "llama_dpreshardable_tp2pp2dp2")
    for words, text in (
        (["show", name, "nope"], "there are 15 tensors of the model, "),
        (["show", name, ""], "there are 15 tensors of the model, "),
        (["show", name, "*", "--slice", "0"], "60 tensors match '*' (15 of the model, 45 of the optimizer)"),
        (["inspect", name, "--tensors", "nomatch*"], "there are 27 stored tensors, "),
    ):
        assert main(words) in (2, 4)
        assert text in capsys.readouterr().err
