"""`distckpt diff` on the command line: answers, exit codes, narrow and dumb terminals, JSON, ranks, interruption."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys

import pytest

from distckpt_cli import app
from distckpt_cli.exits import ExitCode
from harness.checkpoints import write_llama
from harness.cli_support import child, environment, same_as_file, terminal
from harness.diff_cases import set_element
from harness.support import GOLDEN

A, B = "llama_adam_tp2pp2", "llama_dpreshardable_buckets_tp2dp2"
WEIGHTS = "llama_localspec_weights_tp2pp2"


@pytest.fixture(scope="module")
def changed(tmp_path_factory):
    """A copy of another golden, in which some elements are others; its parent is where commands run."""
    folder = tmp_path_factory.mktemp("changed")
    for name in (A, WEIGHTS):
        (folder / name).symlink_to(GOLDEN / name)
    shutil.copytree(GOLDEN / "legacy_llama_adam_tp2pp2", folder / "changed")
    for layer, index in ((0, (3, 4)), (1, (20, 40))):
        set_element(
            folder / "changed", f"decoder.layers.{layer}.mlp.linear_fc2.weight", index, lambda bits: bits ^ 0x8000
        )
    set_element(folder / "changed", "output_layer.weight", (7, 7), lambda bits: 0x7FC0)
    moment = "optimizer.state.exp_avg.decoder.layers.1.self_attention.linear_proj.weight"
    set_element(folder / "changed", moment, (0, 1), lambda bits: bits ^ 1)
    return folder


def run(capsys, *args, cwd=None, monkeypatch=None):
    if cwd is not None:
        monkeypatch.chdir(cwd)
    code = app.main(["diff", *args, "--progress", "off"])
    out, err = capsys.readouterr()
    return code, out, err


def steady(text):
    """Without what a clock decides: the bar, its lines in a log, and the line with the speed."""
    text = re.sub(r"\r|\x1b\[[0-9;?]*[a-zA-Z]|^\d\d:\d\d:\d\d diff.*\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"^diff.*%.*\n", "", text, flags=re.MULTILINE)
    return re.sub(r"^read .*\n( .*\n)*", "", text, flags=re.MULTILINE)


@pytest.mark.parametrize(
    ("columns", "term", "args"),
    [
        (40, "xterm", ()),
        (80, "xterm", ()),
        (200, "xterm", ()),
        (80, "dumb", ()),
        (80, "dumb", ("--flat", "--rtol", "3")),
    ],
)
def test_terminals(columns, term, args, changed):
    command = [sys.executable, "-m", "distckpt_cli", "diff", A, "changed", *args]
    code, text = terminal(command, columns, cwd=changed, TERM=term)
    assert code == ExitCode.NO
    assert ("\x1b" in text) == (term != "dumb")
    # one line may be as long as the two numbers that it holds make it; names are never cut
    text = steady(text)
    assert all(len(line) <= columns or " " not in line.strip() for line in text.splitlines())
    same_as_file(text, f"cli_diff_{columns}_{term}{'_flat' if args else ''}.txt")


def test_the_same_is_0_and_silent_when_asked(capsys, monkeypatch):
    monkeypatch.chdir(GOLDEN)
    code, out, err = run(capsys, A, B)
    assert code == ExitCode.OK
    assert "of all 60 tensors identical (bit for bit)" in out
    assert out.splitlines()[-1] == "identical in every value that counts; job settings, padding or stored types differ"
    assert err == "note: random states are not compared: A was saved on pp 2 x tp 2, B on pp 1 x tp 2\n"
    assert run(capsys, A, B, "-q")[2] == ""


def test_other_types_with_the_same_values_are_told_apart(tmp_path, capsys):
    """An export in bf16 beside one in fp32, as a newcomer reads it: same numbers, other types, and how to let that pass."""
    for name, dtype in (("bf16", "bf16"), ("fp32", "fp32")):
        words = ["export-hf", str(GOLDEN / WEIGHTS), str(tmp_path / name), "--dtype", dtype, "--quiet"]
        assert app.main([*words, "--progress", "off"]) == 0
    capsys.readouterr()
    code, out, err = run(capsys, str(tmp_path / "bf16"), str(tmp_path / "fp32"))
    assert code == ExitCode.NO
    assert "safetensors, Hugging Face llama\n" in out
    assert "types     bf16 in A, fp32 in B (21 tensors); the values are the same\n" in out
    assert "of all 21 tensors identical (as numbers; not bit for bit, the types differ)\n" in out
    assert out.splitlines()[-1] == "different the type of 21 tensors"
    assert "--rtol 0 compares values instead of bits and types" in err
    code, out, _ = run(capsys, str(tmp_path / "bf16"), str(tmp_path / "fp32"), "--rtol", "0")
    assert (code, "of all 21 tensors identical (rtol 0, atol 0)" in out) == (ExitCode.OK, True)


def test_hints_say_what_to_leave_out(capsys, monkeypatch):
    monkeypatch.chdir(GOLDEN)
    code, out, err = run(capsys, WEIGHTS, A)
    assert code == ExitCode.NO
    assert "only in B the optimizer state (45 tensors)\n" in out
    hint = re.search(r"hint: distckpt (diff .*)\n", err)[1].split()
    assert app.main(hint) == ExitCode.OK


def test_json_says_it_all(changed, capsys, monkeypatch):
    code, out, _ = run(capsys, A, "changed", "--json", cwd=changed, monkeypatch=monkeypatch)
    document = json.loads(out)
    assert code == ExitCode.NO
    assert document["schema"] == "distckpt.diff/1"
    assert document["identical"] is False
    assert document["compared"] == {"tensors": 60, "identical": 56, "different": 4}
    assert (document["a"]["format"], document["b"]["format"]) == ("torch_dist", "legacy")
    found = {t["name"]: t for t in document["tensors"]}
    one = found["decoder.layers.0.mlp.linear_fc2.weight"]
    assert (one["differing"], one["first"]["index"], one["dtype_a"]) == (1, [3, 4], ["bfloat16"])
    assert one["first"]["a"] == -one["first"]["b"]
    assert one["max_rel"] == 2
    assert found["output_layer.weight"]["nan_only_in_b"] == 1
    assert found["output_layer.weight"]["first"]["b"] == "nan"
    assert {f["name"] for f in document["arguments"]} >= {"args.save"}
    assert all(not f["counts"] for f in document["arguments"])
    assert document["records_checked"] > 100
    assert len(json.loads(run(capsys, A, "changed", "--json", "--flat")[1])["tensors"]) == 60


def test_arguments_alone(capsys, monkeypatch):
    monkeypatch.chdir(GOLDEN)
    code, out, err = run(capsys, A, B, "--args")
    assert code == ExitCode.OK
    assert re.search(r"^other  +2 +1 +pipeline_model_parallel_size$", out, re.MULTILINE)
    assert out.splitlines()[-1] == "7 arguments differ, 7 of them not counted: how the jobs ran"
    code, document = (lambda ran: (ran[0], json.loads(ran[1])))(run(capsys, A, B, "--args", "--json"))
    assert (code, document["identical"], len(document["arguments"])) == (ExitCode.OK, True, 7)
    assert run(capsys, "mistral_weights_tp2pp2", WEIGHTS, "--args", "window*")[0] == ExitCode.NO  # of the model
    assert run(capsys, A, B, "--args", "*lr*")[:2] == (ExitCode.OK, "no argument differs\n")
    assert run(capsys, "mistral_weights_tp2pp2", WEIGHTS, "--args", "window*")[1].splitlines()[1].split() == [
        "model", "9", "none", "window_size",
    ]  # fmt: skip
    code, out, err = run(capsys, A, "v014_llama_modelspace_tp2pp2dp2", "--args")
    assert err == "note: 158 exist only in A, 22 only in B (--flat lists them)\n"
    assert "make_vocab_size_divisible_by" not in out
    flat = run(capsys, A, "v014_llama_modelspace_tp2pp2dp2", "--args", "--flat")[1]
    assert len(flat.splitlines()) == len(out.splitlines()) + 180
    assert run(capsys, A, B, "--args", "--ignore", "args")[:2] == (ExitCode.OK, "no argument differs\n")
    document = json.loads(run(capsys, A, B, "--args", "--json")[1])
    (found,) = (f for f in document["arguments"] if f["name"] == "args.pipeline_model_parallel_size")
    assert (found["a"], found["b"], found["counts"]) == (2, 1, False)


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        ((A,), ExitCode.USAGE, "missing argument"),
        ((A, "nowhere"), ExitCode.SOURCE, "nowhere"),
        ((A, B, "--rtol", "-1"), ExitCode.USAGE, "rtol"),
        ((A, B, "--rtol", "inf"), ExitCode.USAGE, "--rtol and --atol are numbers"),
        ((A, B, "--quick", "--atol", "1"), ExitCode.USAGE, "--quick compares no values"),
        ((A, B, "--args", "--quick"), ExitCode.USAGE, "--args compares arguments only"),
        ((A, B, "--args", "--vocab-size", "9"), ExitCode.USAGE, "--args compares arguments only"),
        ((A, "hf_llama_safetensors", "--args"), ExitCode.REQUEST, "config.json with config.json"),
        ((A, "dcp_plain", "--args"), ExitCode.REQUEST, "B holds no arguments"),
        ((A, B, "--args", "nosuch*"), ExitCode.REQUEST, "no argument matches 'nosuch*'"),
        ((A, B, "--args", "learning_rate"), ExitCode.REQUEST, "no argument matches 'learning_rate'"),
        ((A, B, "--tensors", "no.such.*"), ExitCode.REQUEST, "no tensor matches no.such.*"),
        ((A, B, "--max-memory", "1MiB"), ExitCode.REQUEST, "too small"),
        ((A, B, "--max-memory", "8G"), ExitCode.USAGE, "--max-memory"),
    ],
)
def test_what_cannot_be_done(args, code, message, capsys, monkeypatch):
    monkeypatch.chdir(GOLDEN)
    assert app.main(["diff", *args]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err


def test_torch_is_not_imported():
    code = (
        "import sys; from distckpt_cli.app import main\n"
        f"code = main(['diff', '{A}', '{B}', '-q'])\n"
        "sys.exit('imported torch' if {'torch', 'transformers'} & sys.modules.keys() else code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), cwd=GOLDEN)
    assert done.returncode == 0, done.stderr


def test_ranks_share_the_work_and_give_one_answer(changed):
    document = {}
    for workers in ("1", "3"):
        done = child("--workers", workers, "diff", A, "changed", "--json", cwd=changed)
        assert done.code == ExitCode.NO, done.err
        document[workers] = json.loads(done.out)
        del document[workers]["seconds"]
    records = [document[w].pop("records_checked") for w in "13"]
    read = [document[w].pop("bytes_read") for w in "13"]
    assert document["1"] == document["3"]
    assert records[1] >= records[0]  # a record that two ranks have read parts of is compared by both
    assert all(read[1][side] >= read[0][side] for side in "ab")
    same = child("--workers", "2", "diff", A, B, "--progress", "off", cwd=GOLDEN)
    assert (same.code, same.out.count("identical in every value that counts")) == (0, 1)


def test_ranks_agree_on_damage(changed, tmp_path):
    from harness.checkpoints import flip, payloads

    shutil.copytree(GOLDEN / B, tmp_path / "damaged")
    name, path, offset, _ = payloads(tmp_path / "damaged", "weight")[5]
    flip(path, offset)
    done = child("--workers", "2", "diff", str(GOLDEN / A), str(tmp_path / "damaged"))
    assert done.code == ExitCode.NO
    assert done.err.count("error:") == 1
    assert f"B is damaged: {path.name} is damaged: the bytes of {name}" in done.err


INTERRUPTED = """
import os, signal, sys
from converters.execute.work_sharing import WorkSharing
from distckpt_cli.app import main
report = WorkSharing.report
def interrupted(sharing, *arguments):
    if not sharing.should_stop():
        os.kill(os.getpid(), signal.SIGINT)
        sharing._stop.wait(100)
    report(sharing, *arguments)
WorkSharing.report = interrupted
sys.exit(main(sys.argv[1:]))
"""


def test_an_interruption_gives_no_answer():
    """Ctrl-C behind the first bytes that were compared."""
    command = [sys.executable, "-c", INTERRUPTED, "diff", A, B, "--threads", "1"]
    done = subprocess.run(command, cwd=GOLDEN, env=environment(), capture_output=True, text=True)
    assert done.returncode == ExitCode.INTERRUPTED
    assert done.stdout == ""
    assert "stopped" in done.stderr
    assert "Traceback" not in done.stderr


def test_names_from_files_cannot_act_on_a_terminal(tmp_path, capsys):
    import torch
    from safetensors.torch import save_file

    for name, extra in (("a", "x\x1b[2Jy"), ("b", "x\x1b[31mz")):
        save_file(
            {extra: torch.ones(2), "both\x07": torch.full((2,), float(len(extra)))}, tmp_path / f"{name}.safetensors"
        )
    code, out, err = run(capsys, str(tmp_path / "a.safetensors"), str(tmp_path / "b.safetensors"))
    assert code == ExitCode.NO
    assert not set("\x1b\x07") & set(out + err)
    assert "x\\x1b[2Jy" in out
    assert "both\\x07" in out


@pytest.mark.slow
def test_memory_does_not_grow_with_the_model(tmp_path):
    peaks = []
    for number, layers in enumerate((2, 12)):
        folder = tmp_path / str(number)
        write_llama(folder, layers=layers, hidden=1024, ffn=2816, vocab=8192, tp=2, pp=2)
        code = (
            "import sys; from pathlib import Path; from distckpt_cli.app import main\n"
            "code = main(['diff', sys.argv[1], sys.argv[1], '-q', '--max-memory', '16MiB'])\n"
            "print(Path('/proc/self/status').read_text().partition('VmHWM:')[2].split()[0]); sys.exit(code)"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, env=environment()
        )
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout.splitlines()[-1]) << 10)
    assert peaks[1] - peaks[0] < 4 << 20
    assert peaks[1] < 80 << 20


def test_padding_is_told_whatever_the_other_side_is(tmp_path, capsys):
    """120 rows in a Hugging Face folder, 128 and 256 in two imports of it."""
    paths = {rows: str(tmp_path / str(rows)) for rows in (120, 128, 256)}
    assert app.main(["export-hf", str(GOLDEN / WEIGHTS), paths[120], "--quiet", "--progress", "off"]) == 0
    for rows, tp in ((128, "1"), (256, "2")):
        words = ["import-hf", paths[120], paths[rows], "--tp", tp, "--make-vocab-size-divisible-by", "128"]
        assert app.main([*words, "--quiet", "--progress", "off"]) == 0
    capsys.readouterr()
    for a, b in ((120, 256), (128, 120), (256, 128)):
        code, out, _ = run(capsys, paths[a], paths[b])
        assert code == ExitCode.OK
        assert f"padding   of the vocabulary: {a} rows in A, {b} in B; not counted" in out
        assert out.splitlines()[-1].startswith("identical in every value that counts; job settings, padding")
