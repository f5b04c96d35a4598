"""What `verify` looks at beside damaged bytes: structure, optimizer against weights, copies, values, manifests, ranks."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
import threading
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from converters.box import Box
from converters.catalog import Catalog, ObjectInfo, TensorInfo
from converters.dtypes import dtype
from converters.errors import Interrupted, RequestError
from converters.events import FileDone, Moved, PlanReady, StopFlag
from converters.execute.manifest import MEGATRON, read_manifest, write_manifest
from converters.formats import open_checkpoint
from converters.io.arithmetic import Arithmetic, examine_blocks
from converters.optimizer.state import optimizer_state
from converters.pickles.nodes import fields
from converters.verification.report import Check
from converters.verification.run import VerifyOptions, verify_reader
from converters.verification.structure import check_structure
from converters.verification.values import Stats, count, judge_values
from harness.checkpoints import copy_golden, edit_metadata, flip, golden, payloads, run_cli, tree, truth, write_llama
from harness.on_disk import swap_on_disk
from harness.processes import finish, start
from harness.support import GOLDEN, read_tensor
from harness.verify_cases import cli, found, golden_folder, text_of


def writable(name: str, into: Path) -> Path:
    copy = into / "iter_0000010"
    shutil.copytree(golden_folder(name), copy)
    return copy


def rewrite(folder: Path, which: str, change) -> None:
    """Changes the elements of a stored tensor, and every checksum with them: what a wrong program would have saved."""
    reader = open_checkpoint(folder)
    info = {**reader.catalog.tensors, **reader.catalog.copies}[which]
    for chunk in info.chunks():
        path = reader.files[reader.file_of(chunk.record)]
        raw = bytearray(path.read_bytes())
        where = reader.locate(chunk.record, lambda at, n, raw=raw: bytes(raw[at : at + n]))
        begin, size = where.offset + chunk.base * info.dtype.itemsize, chunk.box.volume * info.dtype.itemsize
        bits = np.frombuffer(bytes(raw[begin : begin + size]), f"<u{info.dtype.itemsize}").copy()
        raw[begin : begin + size] = np.asarray(change(bits), bits.dtype).tobytes()
        if where.crc is not None:
            member = bytes(raw[where.crc_offset : where.crc_offset + where.crc_nbytes])
            tail = bytes(raw[where.crc_offset + where.crc_nbytes :])  # the data descriptor and the directory follow it
            fresh = tail.replace(where.crc.to_bytes(4, "little"), zlib.crc32(member).to_bytes(4, "little"))
            raw[where.crc_offset + where.crc_nbytes :] = fresh
        path.write_bytes(raw)


# ---------------------------------------------------------------------- structure


def fake(names: dict[str, tuple[int, ...]], **more) -> Catalog:
    kind = dtype("bfloat16")
    tensors = {
        n: TensorInfo(n, kind, s, "optimizer" if n.startswith("opt") else "weight", ()) for n, s in names.items()
    }
    return Catalog(Path("ckpt"), "torch_dist", "Megatron-LM", tensors, **more)


def shard(name: str, at: tuple[int, ...], grid: tuple[int, ...]) -> ObjectInfo:
    return ObjectInfo(name, f"{name}/{at}", at, grid, "__0_0.distcp", 0, 1)


def structure(catalog: Catalog) -> list[str]:
    check = Check("structure")
    check_structure(check, catalog)
    return [f.message for f in check.findings if "elements" not in f.message and "stored for" not in f.message]


LAYER = ("self_attention.linear_qkv.weight", "mlp.linear_fc1.weight", "mlp.linear_fc2.weight")


def layers(*numbers: int, lacking: tuple[str, ...] = ()) -> dict[str, tuple[int, ...]]:
    names = [f"decoder.layers.{n}.{suffix}" for n in numbers for suffix in LAYER]
    return {name: (0, 0) for name in names if name not in lacking}


def test_layers_are_counted():
    assert [t for t in structure(fake(layers(0, 1, 2, 3))) if "missing" in t] == []
    (text,) = [t for t in structure(fake(layers(0, 1, 3))) if "missing" in t]
    assert text == "decoder.layers: 2 of 4 are missing"
    lost = "decoder.layers.2.mlp.linear_fc2.weight"
    (text,) = [t for t in structure(fake(layers(0, 1, 2, 3, lacking=(lost,)))) if "missing" in t]
    assert text == f"{lost} is missing; layer 0 has it"


def test_layers_of_another_kind_are_not_incomplete():
    """Dense layers before experts, and attention only in some layers of a hybrid."""
    dense = {"decoder.layers.0.mlp.linear_fc1.weight": (0, 0)}
    moe = {f"decoder.layers.{n}.mlp.experts.{e}.linear_fc1.weight": (0, 0) for n in (1, 2) for e in range(4)}
    assert [t for t in structure(fake(dense | moe)) if "missing" in t] == []
    mamba = {f"decoder.layers.{n}.mixer.in_proj.weight": (0, 0) for n in (0, 2)}
    attention = {f"decoder.layers.{n}.self_attention.linear_qkv.weight": (0, 0) for n in (1, 3)}
    assert [t for t in structure(fake(mamba | attention)) if "missing" in t] == []


def test_experts_are_counted():
    names = {f"decoder.layers.{n}.mlp.experts.{e}.linear_fc1.weight": (0, 0) for n in (0, 1, 2) for e in range(8)}
    assert [t for t in structure(fake(names)) if "missing" in t] == []
    del names["decoder.layers.1.mlp.experts.5.linear_fc1.weight"]
    (text,) = [t for t in structure(fake(names)) if "of 8" in t]
    assert text == "decoder.layers.1.mlp.experts.*.linear_fc1.weight: 5 of 8 are missing"


def test_grids_of_objects():
    whole = {str(i): shard("rng_state", (i, j), (2, 2)) for i, (j) in enumerate((0, 0))}
    whole = {f"{i}{j}": shard("rng_state", (i, j), (2, 2)) for i in range(2) for j in range(2)}
    assert structure(fake({}, objects=whole)) == []
    lost = {key: item for key, item in whole.items() if key != "10"}
    assert structure(fake({}, objects=lost)) == ["rng_state has 3 of its 4 shards; [1, 0] is missing"]
    outside = whole | {"x": shard("rng_state", (2, 0), (2, 2))}
    assert structure(fake({}, objects=outside)) == ["shard [2, 0] of rng_state lies outside its grid [2, 2]"]
    mixed = whole | {"x": shard("rng_state", (0, 0), (1, 2))}
    assert "of different grids: [1, 2] and [2, 2]" in structure(fake({}, objects=mixed))[0]


def test_both_moments_are_there():
    names = [f"optimizer.state.{state}.a.{n}.weight" for state in ("exp_avg", "exp_avg_sq") for n in range(3)]
    assert structure(fake(dict.fromkeys(names, (0,)))) == []
    (text,) = structure(fake(dict.fromkeys(names[:-1], (0,))))
    assert text == "optimizer.state.exp_avg_sq.a.2.weight is missing, the other moment is there"
    lion = [name for name in names if "_sq" not in name]
    assert structure(fake(dict.fromkeys(lion, (0,)))) == []


def test_a_lost_object_of_a_real_checkpoint(tmp_path):
    copy = copy_golden("llama_adam_tp2pp2", tmp_path / "iter_0000010")

    def change(state):
        key = next(k for k in state["state_dict_metadata"] if k.startswith("rng_state/"))
        del state["state_dict_metadata"][key]
        for index in [i for i in state["storage_data"] if fields(i)["fqn"] == key]:
            del state["storage_data"][index]

    edit_metadata(copy, change)
    assert "rng_state has 3 of its 4 shards" in text_of(found(copy, quick=True))


def test_an_object_without_a_record(tmp_path):
    copy = copy_golden("llama_adam_tp2pp2", tmp_path / "iter_0000010")
    names: list[str] = []

    def change(state):
        names.append(next(k for k in state["state_dict_metadata"] if k.startswith("rng_state/")))
        for index in [i for i in state["storage_data"] if fields(i)["fqn"] == names[0]]:
            del state["storage_data"][index]

    edit_metadata(copy, change)
    assert f"the object {names[0]} has no record" in text_of(found(copy, quick=True))


def test_a_stale_file_is_told(tmp_path):
    copy = copy_golden("qwen2_weights_tp2pp2", tmp_path / "iter_0000010")
    shutil.copy(copy / "__0_0.distcp", copy / "__7_0.distcp")
    report = found(copy)
    assert report.good
    (finding,) = report.check("structure").findings
    assert finding.severity == "warning"
    assert finding.file == "__7_0.distcp"
    code, out, _ = cli(copy)
    assert code == 0
    assert "structure look  __7_0.distcp" in out


def test_arguments_that_do_not_fit():
    reader = open_checkpoint(golden("qwen2_weights_tp2pp2"))
    reader.catalog = replace(reader.catalog, args={**reader.catalog.args, "num_layers": 4})
    report = verify_reader(reader, VerifyOptions(quick=True))
    assert "args say num_layers 4, but the checkpoint holds 2 layers" in text_of(report)


# ---------------------------------------------------------------------- optimizer against weights


@pytest.mark.parametrize(
    "name", ["llama_fullyreshardable_tp2pp2dp2", "llama_adam_tp2pp2", "v009_zarr_llama_adam_tp2pp2"]
)
def test_state_that_was_saved_shifted(name, tmp_path):
    """As Megatron-Core 0.15.0 to 0.19.0 did: every checksum is right, the master weights are those of elsewhere."""
    copy = writable(name, tmp_path)
    wrong = "decoder.layers.1.mlp.linear_fc2.weight"
    rewrite(copy, f"optimizer.state.{_master(copy)}.{wrong}", lambda bits: np.roll(bits, 64))
    report = found(copy)
    assert report.check("checksums").status in ("ok", "skipped")
    check = report.check("optimizer")
    assert check.status == "bad"
    headline, saved, detail = check.findings
    assert headline.message.startswith("1 of 15 master weights does not round")
    assert ("saved optimizer state shifted" in headline.message) == (name == "llama_fullyreshardable_tp2pp2dp2")
    assert saved.message.startswith("what can be saved: all weights; the optimizer state of 14 of 15 parameters: ")
    assert headline.tensors == detail.tensors
    assert [name.split(".", 3)[3] for name in headline.tensors] == [wrong]  # the master, not the weight
    assert f"elements, first at [0, 0], do not round to {wrong}" in detail.message
    assert cli(copy)[0] == 1


def test_state_that_megatron_did_save_shifted():
    """Written by Megatron-Core 0.16.1 with several buckets: whose master weights are right is what the truth says."""
    folder = GOLDEN / "broken_llama_fullyreshardable_buckets_dp2"
    reader, values = open_checkpoint(folder), truth("llama")
    agree: dict[str, set[str]] = {}
    for name, info in optimizer_state(reader).tensors.items():
        state, _, parameter = name.removeprefix("optimizer.state.").partition(".")
        wanted = values[f"{'master' if state == 'param' else state}/{parameter}"]
        got = read_tensor(reader, info)[: len(wanted)]
        if np.array_equal(got, wanted.view(got.dtype)):
            agree.setdefault(state, set()).add(parameter)
    right = agree["param"]
    assert right <= agree["exp_avg"]  # where the master weight is right, so are the moments
    assert right <= agree["exp_avg_sq"]
    report = verify_reader(reader)
    headline, saved, *details = report.check("optimizer").findings
    assert 0 < len(right) < 15
    assert headline.message.startswith(
        f"{15 - len(right)} of 15 master weights do not round to the weights beside them"
    )
    assert "Megatron-Core 0.15.0 to 0.19.0 saved optimizer state shifted" in headline.message
    masters = {name.removeprefix("optimizer.state.param.") for name in headline.tensors}
    assert masters == reader.catalog.weights.keys() - right
    assert f"the optimizer state of {len(right)} of 15 parameters: " in saved.message
    assert len(details) == 15 - len(right)
    assert all(check.status == "ok" for check in report.checks if check.name != "optimizer")
    code, _, err = cli(folder)
    assert code == 1
    assert "reshard" in err
    assert "--optimizer none keeps the weights" in err


def _master(folder: Path) -> str:
    names = open_checkpoint(folder).catalog.tensors
    return next(s for s in ("param", "fp32_param") if any(n.startswith(f"optimizer.state.{s}.") for n in names))


def test_one_wrong_master_element_is_counted(tmp_path):
    copy = writable("llama_adam_tp2pp2", tmp_path)

    def change(bits):
        bits[5] ^= 0x00800000
        return bits

    rewrite(copy, "optimizer.state.fp32_param.decoder.final_layernorm.weight", change)
    _, kept, detail = found(copy).check("optimizer").findings
    assert "1 of 32 elements, first at [5]" in detail.message
    assert kept.severity == "warning"


def test_parameters_swapped_in_a_flat_bucket(tmp_path):
    copy = copy_golden("llama4_dpreshardable_pp4dp2", tmp_path / "iter_0000010")
    prefix = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32)"
    swap_on_disk(copy, f"{prefix}.bucket_idx_0.param", 0, 6144, 6144)
    report = found(copy)
    assert not report.good
    assert "no known order of parameters fits" in text_of(report)
    assert "decoder.layers.0.mlp.linear_fc1.weight" in text_of(report)


# ---------------------------------------------------------------------- copies


@pytest.mark.parametrize(
    ("name", "which"),
    [
        ("legacy_gpt_adam_tp2pp2", "embedding.word_embeddings.weight (copy of pp 1)"),
        ("legacy_llama_adam_tp2pp2", "decoder.layers.1.mlp.linear_fc1.layer_norm_weight (copy of pp 1, tp 1)"),
        ("legacy_mixtral_distopt_ep2pp2", "decoder.layers.0.self_attention.linear_qkv.weight (copy of pp 0, ep 1)"),
    ],
)
def test_copies_on_other_ranks_are_compared(name, which, tmp_path):
    """A tied embedding, a norm on every tensor-parallel rank, dense parameters on every expert-parallel rank."""
    copy = writable(name, tmp_path)

    def change(bits):
        bits[7] ^= 1
        return bits

    rewrite(copy, which, change)
    report = found(copy)
    assert [c.name for c in report.checks if c.status == "bad"] == ["copies"], text_of(report)
    (finding,) = report.check("copies").findings
    assert finding.message.startswith(f"{which}: ")
    assert finding.tensors == (which.partition(" ")[0],)
    assert "differ from" in finding.message


def test_a_tied_output_layer_that_differs(tmp_path):
    """Both are stored, and the arguments say that they are one."""
    reader = open_checkpoint(golden("llama_adam_tp2pp2"))
    assert {"output_layer.weight", "embedding.word_embeddings.weight"} <= reader.catalog.weights.keys()
    assert not any(c.name == "copies" for c in verify_reader(reader).checks)
    args = {**reader.catalog.args, "untie_embeddings_and_output_weights": False}
    reader.catalog = replace(reader.catalog, args=args)
    assert "output_layer.weight" in text_of(verify_reader(reader))
    assert "differ from embedding.word_embeddings.weight" in text_of(verify_reader(reader))


# ---------------------------------------------------------------------- values

BF16 = {"nan": 0x7FC0, "inf": 0x7F80, "one": 0x3F80, "tiny": 0x0001}
FC2 = "decoder.layers.1.mlp.linear_fc2.weight"


def first(value: int):
    def change(bits):
        bits[0] = value
        return bits

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (first(BF16["nan"]), "elements are NaN"),
        (first(BF16["inf"]), "elements are infinite"),
        (np.zeros_like, "elements are zero, those of other layers are not"),
        (lambda bits: np.full_like(bits, BF16["one"]), "elements are 1, those of other layers are not"),
        (lambda bits: np.where(np.arange(bits.size) % 20 == 0, BF16["tiny"], bits), "are denormal"),
    ],
    ids=["nan", "inf", "zero", "constant", "denormal"],
)
def test_values_that_cannot_be(change, words, tmp_path):
    copy = writable("qwen2_weights_tp2pp2", tmp_path)
    rewrite(copy, FC2, change)
    assert found(copy).good  # every checksum is right, and nobody asked
    report = found(copy, values=True)
    (finding,) = [f for f in report.check("values").findings if f.severity == "error"]
    assert finding.tensors == (FC2,)
    assert words in finding.message
    assert report.check("checksums").status == "ok"
    assert cli(copy, "--values")[0] == 1


def test_an_embedding_of_zeros():
    """It has no siblings; a matrix of zeros elsewhere may be one that is not trained yet."""
    info, stats = stats_of(np.zeros(256, np.float32))
    for name, severity in (("embedding.word_embeddings.weight", "error"), ("value_head.weight", "warning")):
        check = Check("values")
        judge_values(check, {name: stats}, {name: replace(info, name=name, shape=(16, 16))})
        assert [(f.severity, f.message) for f in check.findings] == [(severity, f"{name}: all 256 elements are zero")]


def test_a_negative_second_moment(tmp_path):
    copy = writable("llama_adam_tp2pp2", tmp_path)
    name = f"optimizer.state.exp_avg_sq.{FC2}"

    def change(bits):
        bits[0] = 0xBF800000
        return bits

    rewrite(copy, name, change)
    assert "a second moment cannot be negative, the smallest is -1" in text_of(found(copy, values=True))


def stats_of(values: np.ndarray, kind: str = "float32") -> tuple[TensorInfo, dict]:
    info = TensorInfo("x", dtype(kind), values.shape, "weight", ())
    one = Stats(info)
    half = max(1, values.size // 2)
    for part in (values.reshape(-1)[:half], values.reshape(-1)[half:]):
        bits = part.view(f"u{values.itemsize}")
        one.add(
            Box.whole(bits.shape),
            examine_blocks(Arithmetic(), lambda on, block: count(on, block, info.dtype), bits),
            [bits],
        )
    return info, one.document()


@pytest.mark.parametrize("kind", ["float64", "float32", "float16"])
def test_statistics_are_those_of_numpy(kind):
    values = np.random.default_rng(7).normal(size=4096).astype(kind)
    values[:3], values[10:15], values[20] = 0, np.nan, -np.inf
    values[30:40] = np.finfo(kind).smallest_subnormal
    _, got = stats_of(values, kind)
    finite = values[np.isfinite(values)].astype(np.float64)
    assert (got["numel"], got["nan"], got["inf"], got["zero"], got["denormal"]) == (4096, 5, 1, 3, 10)
    assert got["min"] == finite.min()
    assert got["max"] == finite.max()
    assert math.isclose(got["rms"], math.sqrt((finite**2).mean()), rel_tol=1e-5)
    assert not got["constant"]
    assert stats_of(np.full(100, 3, kind), kind)[1]["constant"]


def test_huge_values_are_not_infinite():
    _, got = stats_of(np.full(64, 3e38, np.float32))
    assert got["inf"] == 0
    assert math.isclose(got["rms"], 3e38, rel_tol=1e-3)


def test_layers_unlike_the_others():
    """10 times the usual size is worth a look, 1000 times is an error; half of it is nothing."""
    rng = np.random.default_rng(3)
    for factor, severity in ((2.0, None), (20.0, "warning"), (0.02, "warning"), (5000.0, "error")):
        stats, tensors = {}, {}
        for n in range(8):
            values = rng.normal(size=256).astype(np.float32) * (factor if n == 5 else 1.0)
            name = f"decoder.layers.{n}.mlp.linear_fc1.weight"
            info, stats[name] = stats_of(values)
            tensors[name] = replace(info, name=name, shape=(16, 16))
        check = Check("values")
        judge_values(check, stats, tensors)
        assert [(f.severity, f.tensors) for f in check.findings] == (
            [(severity, ("decoder.layers.5.mlp.linear_fc1.weight",))] if severity else []
        )


# ---------------------------------------------------------------------- manifests


def megatron_manifest(folder: Path) -> bytes:
    """What Megatron-Core 0.19.0's `save_integrity_manifest` writes, byte for byte."""
    files = {}
    for entry in sorted(folder.iterdir(), key=str):
        if entry.is_file() and entry.name != "integrity.json":
            files[entry.name] = hashlib.sha256(entry.read_bytes()).hexdigest()
    return json.dumps({"algorithm": "sha256", "files": files}, indent=2).encode()


@pytest.mark.parametrize("name", ["v019_llama_fullyreshardable_tp2dp2", "llama_adam_tp2pp2"])
def test_the_manifest_is_megatrons(name, tmp_path):
    copy = writable(name, tmp_path)
    before, wanted = tree(copy), megatron_manifest(copy)
    code, out, err = cli(copy, "--write-manifest")
    assert code == 0, err
    assert f"{MEGATRON} lists {len(before)} files" in out
    assert (copy / MEGATRON).read_bytes() == wanted
    after = tree(copy)
    del after[MEGATRON]
    assert after == before
    code, out, _ = cli(copy)
    assert code == 0
    assert f"manifest  ok    {len(before)} files are those that {MEGATRON} lists" in out
    assert f"{MEGATRON} is there already" in cli(copy, "--write-manifest")[1]


@pytest.mark.parametrize("name", ["legacy_llama_adam_tp2pp2", "v009_zarr_llama_adam_tp2pp2"])
def test_files_in_folders_are_listed_too(name, tmp_path):
    """And then a flipped bit is found even in zarr, which has no checksums of its own."""
    copy = writable(name, tmp_path)
    count = len(tree(copy))
    assert cli(copy, "--write-manifest")[0] == 0
    assert len(json.loads((copy / MEGATRON).read_text())["files"]) == count
    report = found(copy)
    assert report.good
    assert report.check("checksums").status == "ok"
    assert "not checkable" not in report.check("checksums").summary
    _, path, at, size = next(p for p in payloads(copy) if p[3] > 100)
    flip(path, at + size // 2)
    assert f"{path.relative_to(copy)} is not the file that {MEGATRON} lists" in text_of(found(copy))


@pytest.mark.parametrize("name", ["llama_adam_tp2pp2", "legacy_llama_adam_tp2pp2", "v009_zarr_llama_adam_tp2pp2"])
def test_a_manifest_without_reading_payload(name, tmp_path):
    """What describes the data is compared, data only looked for; and that is said."""
    copy = writable(name, tmp_path)
    (copy / "config.json").write_bytes(b'{"hidden_size": 32}')
    assert cli(copy, "--write-manifest")[0] == 0
    code, out, _ = cli(copy, "--quick")
    assert (code, "of the data not computed (--quick)" in out) == (0, True), out
    _, path, at, size = next(p for p in payloads(copy) if p[3] > 100)
    flip(path, at + size // 2)
    assert cli(copy, "--quick")[0] == 0, "payload was read"
    (copy / "config.json").write_bytes(b'{"hidden_size": 33}')
    assert text_of(found(copy, quick=True)) == f"manifest: config.json is not the file that {MEGATRON} lists"
    (copy / "config.json").unlink()
    assert text_of(found(copy, quick=True)) == f"manifest: config.json is missing or unreadable, {MEGATRON} lists it"


def test_zarr_without_a_manifest_says_what_it_cannot_know(tmp_path):
    copy = writable("v009_zarr_llama_adam_tp2pp2", tmp_path)
    report = found(copy)
    assert report.good
    assert "not checkable: zarr stores none for 0.31 MiB of tensors" in report.check("checksums").summary
    _, path, at, _ = next(p for p in payloads(copy, "weight") if p[3] > 100)
    flip(path, at)
    assert "do not round to" in text_of(found(copy))  # the master weight beside it knows better
    path.write_bytes(path.read_bytes()[:-2])
    assert not found(copy, quick=True).good


def test_what_manifests_may_say(tmp_path):
    copy = writable("qwen2_weights_tp2pp2", tmp_path)
    outside = tmp_path / "secret"
    outside.write_text("not ours")
    digest = hashlib.sha256(b"not ours").hexdigest()
    good = {name: hashlib.sha256((copy / name).read_bytes()).hexdigest() for name in tree(copy)}
    cases = {
        "../secret": ("which is not a file of this folder", good | {"../secret": digest}),
        "absolute": ("which is not a file of this folder", good | {str(outside): digest}),
        "gone": ("gone.distcp is missing or unreadable", good | {"gone.distcp": digest}),
        "no digest": ("has no SHA-256 for common.pt", good | {"common.pt": "1234"}),
        "other": ("common.pt is not the file", good | {"common.pt": digest}),
    }
    for words, files in cases.values():
        write_manifest(copy, MEGATRON, files)
        assert words in text_of(found(copy))
    for raw in (b"{", b"[]", b'{"files": 3}', b'{"algorithm": "md5", "files": {}}', b'{"files": {}, "files": {}}'):
        (copy / MEGATRON).write_bytes(raw)
        assert not found(copy).good
        assert cli(copy)[0] == 1
    write_manifest(copy, MEGATRON, {n: d for n, d in good.items() if n != "common.pt"})
    report = found(copy)
    assert report.good
    assert "common.pt is not listed in integrity.json" in report.check("manifest").findings[0].message
    assert read_manifest(tmp_path / "nowhere") is None


def test_no_manifest_of_a_damaged_checkpoint(tmp_path):
    copy = writable("qwen2_weights_tp2pp2", tmp_path)
    _, path, at, _ = next(p for p in payloads(copy) if p[3] > 100)
    flip(path, at)
    code, out, _ = cli(copy, "--write-manifest")
    assert code == 1
    assert "not written" in out
    assert not (copy / MEGATRON).exists()


def test_a_manifest_is_complete_or_absent(tmp_path, monkeypatch):
    copy = writable("qwen2_weights_tp2pp2", tmp_path)
    before = tree(copy)

    def full(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert cli(copy, "--write-manifest")[0] == 5
    assert tree(copy) == before


# ---------------------------------------------------------------------- running


def test_events_and_interruption(tmp_path):
    reader = open_checkpoint(golden("llama_adam_tp2pp2"))
    events = []
    report = verify_reader(reader, VerifyOptions(values=True), listener=events.append)
    (plan,) = [e for e in events if isinstance(e, PlanReady)]
    assert plan.files == report.files == sum(isinstance(e, FileDone) for e in events)
    assert sum(e.nbytes for e in events if isinstance(e, Moved)) == report.bytes_read
    assert report.bytes_read >= sum(path.stat().st_size for path in reader.files)
    stop = StopFlag()
    stop.set(2)
    with pytest.raises(Interrupted):
        verify_reader(reader, stop=stop)
    assert not [t for t in threading.enumerate() if t.name.startswith("distckpt")]


def test_a_checkpoint_that_changes_meanwhile(tmp_path):
    copy = writable("qwen2_weights_tp2pp2", tmp_path)
    reader = open_checkpoint(copy)

    def meddle(event):
        if isinstance(event, FileDone):
            os.utime(copy / "__0_0.distcp", ns=(1, 1))

    assert "changed while it was read" in text_of(verify_reader(reader, listener=meddle))


def test_a_manifest_needs_a_folder(tmp_path):
    reader = open_checkpoint(golden("qwen2_weights_tp2pp2"))
    reader.catalog = replace(reader.catalog, path=golden("qwen2_weights_tp2pp2") / "common.pt")
    with pytest.raises(RequestError, match="lists the files of a folder"):
        verify_reader(reader, VerifyOptions(write_manifest=True))


@pytest.mark.parametrize("damaged", [False, True])
def test_ranks_share_the_files_and_agree(damaged, tmp_path):
    """Three processes: one answer, printed once, the same exit code, the same findings as one process alone."""
    copy = writable("llama_adam_tp2pp2", tmp_path)
    if damaged:
        for _, path, at, size in payloads(copy, "weight")[::9]:
            flip(path, at + size // 2)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    alone = json.loads(cli(copy, "--json", "--values")[1])
    words = ["--json", "--values", "--write-manifest", "--progress", "off"]
    done = [
        start(
            [sys.executable, "-m", "distckpt_cli", "verify", copy, *words],
            env={
                **os.environ,
                "PYTHONPATH": str(GOLDEN.parent.parent),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": "3",
                "MASTER_PORT": "1",
                "TORCHELASTIC_RUN_ID": tmp_path.name,
                "DISTCKPT_SCRATCH": str(scratch),
            },
        )
        for rank in range(3)
    ]
    answers = [(*said, process.returncode) for said, process in zip(finish(done), done, strict=True)]
    assert [code for *_, code in answers] == [int(damaged)] * 3, answers
    assert [bool(out) for out, _, _ in answers] == [True, False, False]
    together = json.loads(answers[0][0])
    for document in (alone, together):
        document.pop("seconds")
        document.pop("bytes_read")  # a manifest needs what lies between the records, too
    assert together.pop("manifest").startswith("not written" if damaged else "integrity.json lists")
    assert alone.pop("manifest") == ""
    assert together == alone
    assert (copy / MEGATRON).exists() is not damaged
    assert damaged or (copy / MEGATRON).read_bytes() == megatron_manifest(copy)
    assert together["good"] is not damaged
    assert list(scratch.iterdir()) == []


def test_one_rank_that_dies_ends_all(tmp_path):
    copy = writable("llama_adam_tp2pp2", tmp_path)
    env = {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1", "DISTCKPT_SCRATCH": str(tmp_path)}
    done = run_cli("verify", copy, "--rank-timeout", "0.3", "--progress", "off", env=env)
    assert done.returncode != 0
    assert "rank 1" in done.stderr


def test_memory_does_not_grow_with_the_model(tmp_path):
    """Peak memory of a child process: 60 MiB more of weights, the same few MiB of buffers."""
    peaks = []
    for layers_, hidden in ((2, 128), (8, 768)):
        folder = tmp_path / f"{hidden}" / "iter_0000007"
        nbytes = write_llama(folder, layers=layers_, hidden=hidden, ffn=2 * hidden, vocab=4096)
        code = (
            "import resource, sys; from distckpt_cli.app import main\n"
            f"code = main(['verify', {str(folder)!r}, '--values', '--threads', '2', '--progress', 'off'])\n"
            "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss); sys.exit(code)"
        )
        env = {**os.environ, "PYTHONPATH": str(GOLDEN.parent.parent)}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
        peaks.append((nbytes, int(done.stdout.split()[-1]) << 10))
    assert peaks[1][0] > peaks[0][0] + (60 << 20)
    assert peaks[1][1] < peaks[0][1] + (30 << 20)
