"""`distckpt doctor CKPT --for FLAGS`: will a job load it, and does the command that is named make it so?"""

import json
import re
import shlex

import pytest

from distckpt_cli.app import main
from harness.support import GOLDEN

LEGACY, DPR = "legacy_llama_adam_tp2pp2", "llama_dpreshardable_tp2pp2dp2"
DIST = "--use-distributed-optimizer"


def _doctor(path, flags, capsys):
    code = main(["doctor", str(path), "--for", flags, "--json"])
    document = json.loads(capsys.readouterr().out)
    assert code == (0 if document["loads"] else 1)
    return document


def _no(document):
    return {reason["subject"] for reason in document["reasons"] if reason["answer"] == "no"}


@pytest.mark.parametrize(
    ("name", "flags", "wrong"),
    [
        ("llama_adam_tp2pp2", "--tp 1 --pp 1 --mcore 0.16", set()),
        ("llama_adam_tp2pp2", "--tp 2 --pp 2 --mcore 0.16 --ckpt-format torch", {"format"}),
        ("llama_adam_tp2pp2", "--tp 3", {"layout"}),
        ("llama_adam_tp2pp2", f"--tp 1 --mcore 0.16 {DIST}", {"optimizer"}),
        ("llama_fullyreshardable_tp2pp2dp2", f"--tp 1 --pp 1 --dp 8 --mcore 0.16 {DIST}", set()),
        ("llama_fullyreshardable_tp2pp2dp2", f"--tp 1 --mcore 0.14 {DIST}", {"optimizer"}),
        ("llama_fullyreshardable_tp2pp2dp2", "--tp 1 --mcore 0.16", {"optimizer"}),
        ("llama_dpreshardable_tp2pp2dp2", f"--tp 4 --pp 1 --mcore 0.16 {DIST}", {"optimizer"}),
        ("llama_dpreshardable_tp2pp2dp2", f"--tp 4 --pp 1 --mcore 0.16 {DIST} --no-load-optim", set()),
        ("llama_dpzero_tp2pp2dp2", f"--tp 2 --pp 2 --dp 4 --mcore 0.16 {DIST}", set()),
        ("v014_llama_modelspace_tp2pp2dp2", f"--tp 1 --pp 1 --mcore 0.16 {DIST}", {"optimizer"}),
        ("v014_llama_modelspace_tp2pp2dp2", f"--tp 1 --pp 1 --mcore 0.14 {DIST}", set()),
        ("v019_llama_fullyreshardable_tp2dp2", f"--tp 1 --mcore 0.16 {DIST}", {"format"}),
        ("v019_llama_fullyreshardable_tp2dp2", f"--tp 1 --mcore 0.19 {DIST}", set()),
        ("legacy_llama_adam_tp2pp2", "--tp 1 --pp 1 --ckpt-format torch", {"layout", "optimizer"}),
        ("legacy_llama_adam_tp2pp2", "--tp 2 --pp 2 --ckpt-format torch", set()),
        ("legacy_llama_distopt_tp2pp2dp2", f"--tp 1 --pp 1 --ckpt-format torch {DIST}", {"layout", "optimizer"}),
        ("sgd16_tp2", "--tp 2 --mcore 0.16", {"optimizer"}),
        ("deepseek_v2_weights_pp2ep2", "--pp 2 --ep 2 --mcore 0.16 --no-load-optim", set()),
        ("deepseek_v2_weights_pp2ep2", "--pp 2 --ep 2 --mcore 0.19 --no-load-optim", {"model"}),
        ("hf_llama_safetensors", "--tp 2", {"format"}),
        ("fsdp_llama_dp2", f"--tp 1 --mcore 0.16 {DIST}", {"format"}),
        ("fsdp_llama_dp2", f"--mcore 0.16 {DIST} --use-megatron-fsdp --ckpt-format fsdp_dtensor", set()),
        ("mlm_fsdp2_llama_dp2", f"--tp 1 --mcore 0.16 {DIST}", {"format"}),
        ("torch_mixtral_megatron", "--tp 1 --mcore 0.16 --no-load-optim", {"format"}),
        ("v009_zarr_llama_adam_tp2pp2", f"--mcore 0.16 {DIST}", {"format", "optimizer"}),
        ("v009_zarr_llama_adam_tp2pp2", "--mcore 0.15", set()),
        ("legacy_llama4_vpp2_tp2pp2", f"--mcore 0.16 {DIST} --tp 1 --pp 1", {"layout", "optimizer"}),
        ("legacy_llama4_vpp2_tp2pp2", f"--mcore 0.16 {DIST} --tp 1 --pp 2", {"layout", "optimizer"}),
    ],
)
def test_answers_and_the_command_makes_it_so(name, flags, wrong, tmp_path, capsys):
    document = _doctor(GOLDEN / name, flags, capsys)
    assert _no(document) == wrong
    if document["remedy"]:
        words = shlex.split(document["remedy"])
        assert main([str(tmp_path / "out") if word == "DST" else word for word in words[1:]]) == 0
        capsys.readouterr()
        again = _doctor(tmp_path / "out", flags, capsys)
        assert again["loads"], again
    else:
        assert (
            not wrong
            or name in ("sgd16_tp2", "hf_llama_safetensors", "deepseek_v2_weights_pp2ep2")
            or "--tp 3" in flags
            or "0.14" in flags
        )


def test_reasons_are_about_the_checkpoint(capsys):
    for name in ("fsdp_llama_dp2", "mlm_fsdp2_llama_dp2", "torch_mixtral_megatron", "legacy_llama4_vpp2_tp2pp2"):
        text = json.dumps(_doctor(GOLDEN / name, f"--tp 1 --mcore 0.16 {DIST}", capsys))
        assert "loader of its own" not in text
        assert "scheduler" not in text
        assert "None" not in text


def test_remainders_are_told(capsys):
    flags = f"--tp 2 --mcore 0.16 {DIST}"
    reasons = _doctor(GOLDEN / "pao16_dpr_tp2dp2", flags, capsys)["reasons"]
    assert any(r["subject"] == "masters" and r["answer"] in ("no", "not decided") for r in reasons)


def test_what_is_not_known_is_said_and_does_not_count(capsys):
    document = _doctor(GOLDEN / "llama_adam_tp2pp2", "--tp 2 --pp 2 --mcore 0.16 --no-such-flag 3", capsys)
    assert document["loads"]
    assert any(r["answer"] == "not decided" and "--no-such-flag 3" in r["reason"] for r in document["reasons"])
    assert main(["doctor", str(GOLDEN / "llama_adam_tp2pp2"), "--for", "--no-such-flag 3"]) == 0
    assert "as far as the flags and files say" in capsys.readouterr().out


HF = "--tokenizer-type HuggingFaceTokenizer"
EIGHT = f"--make-vocab-size-divisible-by 8 {HF}"


@pytest.mark.parametrize(
    ("name", "flags", "wrong", "text"),
    [
        (
            "llama_adam_tp2pp2",
            f"--tp 1 --vocab-size 200 {EIGHT}",
            set(),
            "the others are zero",
        ),
        (
            "llama_adam_tp2pp2",
            f"--tp 1 --vocab-size 120 {EIGHT}",
            set(),
            "the padding is left",
        ),
        (
            "llama_adam_tp2pp2",
            f"--tp 1 --vocab-size 99 {EIGHT}",
            {"vocab"},
            "16 of them",
        ),
        ("llama_adam_tp2pp2", f"--tp 2 --padded-vocab-size 127 {HF}", {"vocab"}, "tp 2 must divide"),
        ("llama_adam_tp2pp2", "--tp 2 --pp 2 --use-checkpoint-args", set(), "the stored one 128"),
        (LEGACY, "--tp 2 --pp 2 --ckpt-format torch", set(), "if the job has its tokenizer"),
        (LEGACY, f"--tp 2 --pp 2 --ckpt-format torch --vocab-size 120 {HF}", {"vocab"}, "exactly its rows"),
        (
            LEGACY,
            f"--tp 1 --pp 1 --ckpt-format torch --vocab-size 120 {EIGHT}",
            {"vocab", "layout", "optimizer"},
            "exactly its rows",
        ),
        (DPR, f"--tp 2 --pp 2 --dp 2 --mcore 0.16 {DIST} --vocab-size 120 {HF}", {"vocab"}, "in flat buckets"),
        (DPR, f"--tp 2 --pp 2 --dp 2 --mcore 0.16 {DIST}", set(), "121 padded|120 padded"),
        (DPR, f"--tp 2 --pp 2 --mcore 0.16 {DIST} --no-load-optim --vocab-size 120 {HF}", set(), "the others are zero"),
    ],
)
def test_rows_of_the_vocabulary(name, flags, wrong, text, tmp_path, capsys):
    document = _doctor(GOLDEN / name, flags, capsys)
    assert _no(document) == wrong, document
    said = " ".join(r["reason"] for r in document["reasons"] if r["subject"] == "vocab")
    assert re.search(text, said), said
    if document["remedy"]:
        words = shlex.split(document["remedy"])
        assert main([str(tmp_path / "out") if word == "DST" else word for word in words[1:]]) == 0
        capsys.readouterr()
        assert _doctor(tmp_path / "out", flags, capsys)["loads"]
    else:
        assert not wrong or text in ("16 of them", "tp 2 must divide", "exactly its rows")


def test_the_size_of_a_tokenizer_is_read(tmp_path, capsys):
    words = {
        "model": {"vocab": {f"w{n}": n for n in range(118)}},
        "added_tokens": [{"content": "w3"}, {"content": "<s>"}],
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(words))
    flags = f"--tp 2 --pp 2 --make-vocab-size-divisible-by 8 {HF} --tokenizer-model {tmp_path}"
    reasons = _doctor(GOLDEN / "llama_adam_tp2pp2", flags, capsys)["reasons"]
    assert any("119 padded to a multiple of 8 x 2" in reason["reason"] for reason in reasons)
    (tmp_path / "tokenizer.json").write_text("[]")
    flags = f"--tp 2 --pp 2 --ckpt-format torch {HF} --tokenizer-model {tmp_path}"
    reasons = _doctor(GOLDEN / LEGACY, flags, capsys)["reasons"]
    assert ("vocab", "not decided") in {(r["subject"], r["answer"]) for r in reasons}


@pytest.mark.parametrize("flags", ["--tp", "--tp two", "--tp 0", "--mcore new", "--tp '2", "--vocab-size x"])
def test_wrong_flags(flags, capsys):
    assert main(["doctor", str(GOLDEN / "llama_adam_tp2pp2"), "--for", flags]) == 2
    assert "error" in capsys.readouterr().err
