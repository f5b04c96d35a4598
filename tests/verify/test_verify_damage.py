"""Damage that `verify` must find, and undamaged checkpoints in which it must find nothing."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import random
import re
import shlex
import shutil
import zlib
from contextlib import redirect_stderr, redirect_stdout
from typing import TYPE_CHECKING

import numpy as np
import pytest

from converters.execute.manifest import write_manifest
from converters.formats import open_checkpoint
from converters.verification.run import verify_reader
from distckpt_cli.app import main
from harness.checkpoints import flip, golden, payloads, tree
from harness.conformance import _poison as poison
from harness.damage import (
    CATALOGUE,
    flipped,
    hole,
    linked,
    missing_file,
    other_dtype,
    smaller_than_its_record,
    swapped,
    truncated,
    zeroed_page,
)
from harness.support import GOLDEN, nobody
from harness.verify_cases import cli, found, golden_folder, opened, text_of

if TYPE_CHECKING:
    from pathlib import Path


DIST = "llama_adam_tp2pp2"


def everything() -> list[str]:
    names = (path.name for path in GOLDEN.iterdir() if path.is_dir() and path.name not in {"truth", "pickles"})
    return sorted(name for name in names if not name.startswith("broken_"))


# ---------------------------------------------------------------------- nothing where nothing is


@pytest.mark.parametrize("name", everything())
def test_no_false_alarm(name):
    """Every golden is good, with its values looked at: no error, and nothing that is worth a look either."""
    report = found(opened(name), values=True)
    assert report.good, text_of(report)
    assert [f.message for c in report.checks for f in c.findings if c.name not in ("structure",)] == []
    for check in report.checks:
        assert check.status in ("ok", "skipped", "warning")
    held = next(c for c in report.checks if c.name == "checksums")
    assert held.status == ("ok" if not held.skipped else "skipped")


def test_a_factor_of_an_adapter_that_was_lost(tmp_path):
    """Second factors that are all zero have not been trained yet (`mb_lora`); one among others has been lost."""
    folder = shutil.copytree(golden("mb_lora_tp2"), tmp_path / "run")
    lost = "decoder.layers.0.mlp.linear_fc1.adapter.linear_out.weight"
    for name, path, offset, size in payloads(folder, "weight"):
        if name == lost:
            with path.open("r+b") as file:
                file.seek(offset)
                file.write(bytes(size))
    texts = [f.message for c in found(folder, values=True).checks if c.name == "values" for f in c.findings]
    assert [text for text in texts if text.startswith(lost)], texts


# ---------------------------------------------------------------------- the catalogue of damage to torch DCP


@pytest.fixture(params=["qwen2_weights_tp2pp2", "v019_llama_fullyreshardable_tp2dp2"])
def source(request, tmp_path):
    copy = tmp_path / "iter_0000010"
    shutil.copytree(golden(request.param), copy)
    return copy


@pytest.mark.parametrize("damage", CATALOGUE, ids=lambda d: d.__name__)
def test_catalogue_of_damage(damage, source):
    """17 of 18 without a manifest, 18 with one. Only records of equal shape that were swapped look right without."""
    before = verify_reader(open_checkpoint(source))
    assert before.good, text_of(before)
    digests = {name: _sha256(source / name) for name in tree(source)}
    damage(source)
    code, out, err = cli(source)
    if damage is swapped and before.check("optimizer").skipped:  # masters, where there are some, tell even that
        assert code == 0
        assert "good" in out
    else:
        assert code in (1, 3), out + err
        assert ("damaged" in out) == (code == 1)
        assert "Traceback" not in err
    write_manifest(source, "integrity.json", digests)
    code, out, err = cli(source)
    assert code in (1, 3), out + err


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (hole, ["decoder.layers.mlp.linear_fc2.weight", "no chunk covers"]),
        (flipped, ["do not match their checksum", "distcp at "]),
        (truncated, ["bytes, the metadata needs", "affects"]),
        (other_dtype, ["holds a bfloat16 tensor", "the metadata promises float16"]),
        (missing_file, ["is missing, the metadata needs"]),
        (smaller_than_its_record, ["no chunk covers"]),
        (zeroed_page, ["distcp at 0"]),
        (linked, ["is a link to", "outside of the checkpoint"]),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_damage_is_named(damage, words, tmp_path):
    """File, tensor, offset, needed against found."""
    copy = tmp_path / "iter_0000010"
    shutil.copytree(golden("qwen2_weights_tp2pp2"), copy)
    damage(copy)
    code, out, _ = cli(copy)
    assert code == 1
    for word in words:
        assert word in out, out


# ---------------------------------------------------------------------- flipped bits

FLIPS = 200
FORMATS = [
    "llama_adam_tp2pp2",
    "mixtral_dpreshardable_ep2pp2",
    "v009_llama_bucketspace_tp2pp2dp2",
    "v019_llama_fullyreshardable_tp2dp2",
    "legacy_llama_distopt_tp2pp2dp2",
    "torch_mixtral_megatron",
    "hf_mixtral_bin",
    "fsdp2_llama_dp2",
]


@pytest.mark.parametrize("name", FORMATS)
def test_every_flipped_bit_of_a_payload_is_found(name, tmp_path):
    """200 bits at random in the elements of tensors, in every format with checksums: each is found, and the tensor named.

    torch loads such a record without a word: see the control below.
    """
    copy = tmp_path / "iter_0000010"
    shutil.copytree(golden_folder(name), copy)
    rng = random.Random(name)
    place = copy / opened(name).name if opened(name).is_file() else copy
    reader = open_checkpoint(place)
    chunks = payloads(place)
    weights = [size for *_, size in chunks]
    assert verify_reader(reader).good
    missed = []
    for _ in range(FLIPS // len(FORMATS)):
        tensor, path, at, size = rng.choices(chunks, weights)[0]
        where, mask = at + rng.randrange(size), 1 << rng.randrange(8)
        flip(path, where, mask)
        report = verify_reader(reader)
        check = report.check("checksums")
        named = [f for f in check.findings if f.file == str(path.relative_to(copy))]
        if reader.catalog.tensors[tensor].opaque:  # the parameters in the bucket are named, or, for its padding, itself
            names = [name for f in named for name in f.tensors]
            named = [
                n
                for n in names
                if n == tensor or (n.startswith("optimizer.state.") and tensor.endswith(n.split(".")[2]))
            ]
        else:
            named = [f for f in named if tensor in f.tensors]
        if report.good or len(check.findings) != 1 or not named:
            missed.append((tensor, path.name, where, mask))
        flip(path, where, mask)
    assert missed == []
    assert verify_reader(reader).good


def test_torch_loads_a_flipped_bit_silently(tmp_path):
    """The control: the same flip, read with torch."""
    import torch

    path = tmp_path / "one.pt"
    torch.save(torch.arange(1000, dtype=torch.float32), path)
    raw = path.read_bytes()
    at = raw.find(np.arange(1000, dtype=np.float32).tobytes())
    assert at > 0
    flip(path, at + 1999, 1)
    loaded = torch.load(path, weights_only=True)
    assert not torch.equal(loaded, torch.arange(1000, dtype=torch.float32))


def test_hostile_pickles_are_found_and_not_run(tmp_path):
    """In every place that verify reads pickles from: each file, and the objects inside data files."""
    marker = tmp_path / "executed"
    evil = f"cos\nsystem\n(S'touch {marker}'\ntR.".encode()
    pickle.loads(evil)
    assert marker.exists()
    marker.unlink()
    copy = tmp_path / "iter_0000010"
    shutil.copytree(golden(DIST), copy)
    for path in sorted(copy.iterdir()):
        raw = path.read_bytes()
        bad = poison(raw, evil)
        if bad == raw:
            continue
        path.write_bytes(bad)
        code, out, err = cli(copy)
        assert code in (1, 3), path.name
        assert "Traceback" not in err
        assert "internal error" not in err
        assert code == 3 or path.name in out
        assert not marker.exists()
        path.write_bytes(raw)
    assert found(copy).good


@pytest.mark.parametrize("member", ["common.pt", "an object"])
def test_flips_outside_of_tensors_are_found_too(member, tmp_path):
    copy = tmp_path / "iter_0000010"
    shutil.copytree(golden(DIST), copy)
    reader = open_checkpoint(copy)
    if member == "common.pt":
        path, at = copy / "common.pt", (copy / "common.pt").read_bytes().index(b"argparse") + 40
    else:
        stored = next(iter(reader.catalog.objects.values()))
        path, at = copy / stored.file, stored.start + 200
    crc = zlib.crc32(path.read_bytes())
    flip(path, at, 1)
    assert zlib.crc32(path.read_bytes()) != crc
    report = verify_reader(reader)
    assert not report.good
    assert path.name in text_of(report)


# ---------------------------------------------------------------------- the report


def test_json(tmp_path):
    copy = tmp_path / "iter_0000010"
    shutil.copytree(golden(DIST), copy)
    flipped(copy)
    code, out, _ = cli(copy, "--json")
    document = json.loads(out)
    assert code == 1
    assert document["schema"] == "distckpt.verify/1"
    assert document["good"] is False
    (check,) = [c for c in document["checks"] if c["status"] == "bad" and c["name"] == "checksums"]
    (finding,) = check["findings"]
    assert finding["file"].endswith(".distcp")
    assert finding["offset"] > 0
    assert finding["needed"].startswith("CRC-32 ")
    assert finding["found"].startswith("CRC-32 ")
    assert finding["needed"] != finding["found"]
    assert document["affected"][: len(finding["tensors"])] == finding["tensors"]


def test_what_is_no_checkpoint_at_all_is_3(tmp_path):
    copy = tmp_path / "iter_0000010"
    shutil.copytree(golden(DIST), copy)
    raw = (copy / ".metadata").read_bytes()
    (copy / ".metadata").write_bytes(b"\x80\x04K\x00" + raw[-1:])
    assert cli(copy)[0] == 3
    assert cli(tmp_path / "nowhere")[0] == 3


def test_quick_reads_no_payload(tmp_path):
    copy = tmp_path / "iter_0000010"
    shutil.copytree(golden(DIST), copy)
    flipped(copy)
    for path in copy.glob("*.distcp"):
        path.chmod(0)
    report = found(copy, quick=True)
    assert report.good
    assert report.bytes_read == report.files == 0
    assert report.check("checksums").status == "skipped"
    truncated(copy)
    assert not found(copy, quick=True).good
    assert cli(copy, "--quick", "--values")[0] == 2


def test_inspect_of_a_damaged_checkpoint_points_here(tmp_path):
    copy = tmp_path / "iter_0000010"
    shutil.copytree(golden(DIST), copy)
    truncated(copy)
    err = io.StringIO()
    with redirect_stdout(io.StringIO()), redirect_stderr(err):
        assert main(["inspect", str(copy)]) == 1
    assert f"distckpt verify {copy}" in err.getvalue()


def test_nothing_is_written(tmp_path):
    copy = tmp_path / "iter_0000010"
    shutil.copytree(golden(DIST), copy)
    before = tree(tmp_path)
    assert cli(copy, "--values")[0] == 0
    assert tree(tmp_path) == before


HINT = "--optimizer none keeps the weights"


def test_what_is_hinted_at_works(tmp_path):
    data = tmp_path / "whole" / "iter_0000010"
    shutil.copytree(GOLDEN / DIST, tmp_path / "whole")
    (data / "__1_0.distcp").unlink()  # weights are in it
    code, out, err = cli(tmp_path / "whole")
    assert (code, HINT in err) == (1, False)
    assert "restore the damaged files" in err
    assert "all weights but 2" in out
    os.truncate(shutil.copy(GOLDEN / DIST / "iter_0000010" / "__1_0.distcp", data), 5000)
    code, _, err = cli(tmp_path / "whole")
    assert (code, HINT in err) == (1, False)


def test_a_master_alone_is_affected_once_under_its_stored_name(tmp_path):
    shutil.copytree(GOLDEN / DIST, tmp_path / "ck")
    reader = open_checkpoint(tmp_path / "ck")
    name = "optimizer.state.fp32_param.decoder.final_layernorm.weight"
    record = int(reader.catalog.tensors[name].parts[0].array.records.reshape(-1)[0])
    path, payload = reader.files[reader.file_of(record)], None
    data = path.read_bytes()
    payload = reader.locate(record, lambda at, size: data[at : at + size])
    flip(path, payload.offset + payload.nbytes - 1)
    code, out, err = cli(tmp_path / "ck", "--json")
    affected = json.loads(out)["affected"]
    assert code == 1
    assert affected == [name]
    code, _, err = cli(tmp_path / "ck")
    assert HINT in err  # no weight is affected
    assert (
        main(["reshard", str(tmp_path / "ck"), str(tmp_path / "out"), "--optimizer", "none", "--progress", "off"]) == 0
    )


def test_a_file_without_permission_is_not_called_damaged(tmp_path):
    shutil.copytree(GOLDEN / DIST, tmp_path / "ck")
    (tmp_path / "ck" / "iter_0000010" / "__1_0.distcp").chmod(0o000)
    assert cli(GOLDEN / DIST)[0] == 0  # everything is imported
    with nobody(tmp_path):
        code, out, err = cli(tmp_path / "ck")
    assert (code, out) == (3, "")
    assert "__1_0.distcp cannot be read: Permission denied" in err


def test_a_cut_safetensors_file_is_not_said_to_be_readable(tmp_path):
    shutil.copytree(GOLDEN / "hf_llama_safetensors", tmp_path / "hf")
    (path,) = (tmp_path / "hf").glob("model-00002*.safetensors")
    assert "all could be read" in cli(tmp_path / "hf")[1]
    os.truncate(path, path.stat().st_size - 100)
    code, out, _ = cli(tmp_path / "hf")
    assert (code, "all could be read" in out) == (1, False)


@pytest.mark.parametrize("name", [".metadata", "metadata.json", "common.pt"])
@pytest.mark.parametrize("how", ["empty", "cut"])
def test_what_cannot_be_opened_for_damage_is_an_answer(name, how, tmp_path):
    data = tmp_path / "ck" / "iter_0000010"
    shutil.copytree(GOLDEN / DIST, tmp_path / "ck")
    assert cli(tmp_path / "ck", "--write-manifest")[0] == 0
    os.truncate(data / name, 0 if how == "empty" else (data / name).stat().st_size // 2)
    code, out, err = cli(tmp_path / "ck")
    assert code == 1
    said = {"metadata.json": "is not JSON"}.get(name, "cut short") if how == "cut" else f"{name} is empty (0 bytes)"
    assert said in out
    assert f"{name} is not the file that integrity.json lists" in out
    assert "restore" in err
    err = io.StringIO()
    with redirect_stderr(err):
        assert main(["inspect", str(tmp_path / "ck")]) == 3
    assert "hint:  distckpt verify" in err.getvalue()


def test_a_flipped_last_byte_is_an_answer_and_hostile_files_are_none(tmp_path):
    shutil.copytree(GOLDEN / DIST, tmp_path / "ck")
    path = tmp_path / "ck" / "iter_0000010" / "common.pt"
    flip(path, path.stat().st_size - 1)
    code, out, _ = cli(tmp_path / "ck")
    assert code == 1
    assert "common.pt is cut short or damaged at its end" in out
    (tmp_path / "ck" / "iter_0000010" / ".metadata").write_bytes(b"\x80\x02cposix\nsystem\n.")
    shutil.copy(GOLDEN / DIST / "iter_0000010" / "common.pt", path)
    assert cli(tmp_path / "ck")[0] == 3


def test_a_missing_file_is_not_called_wrong_masters(tmp_path):
    """What cannot be read is neither right nor wrong, and is not among the records that were read."""
    shutil.copytree(GOLDEN / DIST, tmp_path / "whole")
    whole = {check.name: check.summary for check in verify_reader(open_checkpoint(tmp_path / "whole")).checks}
    (tmp_path / "whole" / "iter_0000010" / "__1_0.distcp").unlink()
    report = verify_reader(open_checkpoint(tmp_path / "whole"))
    summary = report.check("records").summary
    lost = int(re.search(r"(\d+) records of missing files could not be read", summary)[1])
    read = int(re.match(r"(\d+) records hold", summary)[1])
    assert lost
    assert f"{read + lost} records hold" in whole["records"]
    assert not any("not round" in f.message for f in report.check("optimizer").findings)


@pytest.mark.parametrize("name", ["pao14_fsm_dp2", "pao16_full_tp2dp2", "pao16_dpr_tp2dp2"])
def test_remainders_without_a_common_state(name, tmp_path, capsys):
    """Only what is missing is wrong, and what reshard hints at works."""
    shutil.copytree(GOLDEN / name, tmp_path / "src")
    next((tmp_path / "src").rglob("common.pt")).unlink()
    report = verify_reader(open_checkpoint(tmp_path / "src"))
    assert [f.severity for f in report.check("optimizer").findings] in ([], ["unchecked"])
    assert len([f for c in report.checks for f in c.findings if f.severity == "error"]) == 1
    assert main(["reshard", str(tmp_path / "src"), str(tmp_path / "out"), "--tp", "1", "--progress", "off"]) == 4
    hint = capsys.readouterr().err.rpartition("hint:")[2].strip()
    words = shlex.split(hint.removeprefix("distckpt ").partition(" keeps")[0].replace("OUT", str(tmp_path / "out")))
    assert main([*words, "--progress", "off"]) == 0


def test_a_damaged_zip64_directory_is_an_answer(tmp_path):
    path = tmp_path / "model.pt"
    shutil.copy(next((GOLDEN / "torch_mixtral_megatron").rglob("*.pt")), path)
    raw = path.read_bytes()
    at = raw.rindex(b"PK\x06\x06")
    path.write_bytes(raw[: at + 1] + bytes([raw[at + 1] ^ 1]) + raw[at + 2 :])
    code, out, err = cli(path)
    assert (code, "damaged zip64 directory" in out, "restore the damaged files" in err) == (1, True, True)
