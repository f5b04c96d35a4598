"""Files of whole tensors that others wrote: what is in them is found, what is wrong with them is said."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import tarfile
from collections import OrderedDict

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from converters.errors import FormatError
from converters.formats import open_checkpoint
from distckpt_cli.app import main
from harness.checkpoints import golden
from harness.conformance import Case, Conformance, held
from harness.container_cases import SHARDS, bits, convert, loaded
from harness.exports import differing
from harness.hostile_headers import BAD_INDEX, HOSTILE, edit_index, entry, write_safetensors
from harness.support import GOLDEN, read_tensor

CONTAINER = (("convert", "SRC", "DST", "--to", "safetensors"),)


def of_files(*names, load):
    """Every tensor that the real library finds in files of `golden`."""
    return lambda: {key: bits(value) for name in names for key, value in load(GOLDEN / name).items()}


def of_megatron():
    """A file saved by a user of GPTModel, under canonical names."""
    with torch.serialization.safe_globals([argparse.Namespace]):
        model = torch.load(GOLDEN / "torch_mixtral_megatron/model.pt", weights_only=True)["model"]
    out = {}
    for name, value in model.items():
        if value is not None and not name.endswith("_extra_state"):
            name = re.sub(r"(layers\.\d+\.)input_layernorm\.", r"\1self_attention.linear_qkv.layer_norm_", name)
            out[name.replace("experts.local_experts.", "experts.")] = bits(value)
    return out


BINS = [f"hf_mixtral_bin/pytorch_model-0000{n}-of-00003.bin" for n in (1, 2, 3)]


class TestSafetensors(Conformance):
    FORMAT = "safetensors"
    CASES = (Case("hf_llama_safetensors", of_files(*SHARDS, load=load_file), CONTAINER),)
    CHECKSUMS = False

    def test_nothing_is_executed(self, copy, deep, tmp_path, capsys):
        """There is no pickle in it."""
        assert not any(b"\x80\x02" in path.read_bytes()[:8] for path in copy.iterdir())


class TestTorch(Conformance):
    FORMAT = "torch"
    CASES = (
        Case("hf_mixtral_bin", of_files(*BINS, load=loaded), CONTAINER),
        Case("hf_gpt2_bin", of_files("hf_gpt2_bin/pytorch_model.bin", load=loaded), CONTAINER),
        Case("torch_mixtral_megatron/model.pt", of_megatron, CONTAINER),
    )
    DEEP = 2


# ---------------------------------------------------------------------- torch files by anybody


def catalog_of(tmp_path, saved, **options):
    torch.save(saved, tmp_path / "x.pt", **options)
    return open_checkpoint(tmp_path / "x.pt")


def check(reader, wanted):
    found = held(reader)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert np.array_equal(read_tensor(reader, found[name]), bits(value)), name


def test_views_and_shared_storages(tmp_path):
    base = torch.arange(60, dtype=torch.float32).reshape(6, 10)
    saved = {
        "whole": base,
        "rows": base[2:4],
        "columns": base[:, 3:7],
        "every other row": base[::2],
        "transposed": base.T,
        "expanded": base[:1].expand(3, 10),
        "again": base,
        "scalar": base[1, 1],
        "empty": base[:0],
        "bf16": base.bfloat16(),
    }
    reader = catalog_of(tmp_path, saved)
    check(reader, saved)
    out = convert(tmp_path / "x.pt", tmp_path / "st", "safetensors")
    assert all(torch.equal(value, saved[name]) for name, value in load_file(out / "model.safetensors").items())
    assert catalog_of(tmp_path, {"x": base.to(torch.float8_e4m3fn), "y": base.bool()}).catalog.framework == "torch"


def test_elements_too_far_apart_are_refused_by_name(tmp_path, capsys):
    torch.save({"wide.weight": torch.zeros(300, 300).T}, tmp_path / "x.pt")
    assert main(["inspect", str(tmp_path / "x.pt")]) == 4
    said = capsys.readouterr().err
    assert "wide.weight" in said
    assert "contiguous()" in said


@pytest.mark.parametrize("key", [None, "model", "state_dict", "module", "model_state_dict"])
@pytest.mark.parametrize("wrapper", ["", "module.", "_orig_mod."])
def test_where_the_state_dict_lies(key, wrapper, tmp_path):
    state = {f"{wrapper}a.weight": torch.ones(2), f"{wrapper}b": torch.zeros(3)}
    saved = state if key is None else {key: state, "epoch": 3, "optimizer": {"state": {0: {"exp_avg": torch.ones(5)}}}}
    reader = catalog_of(tmp_path, saved)
    rest = {} if key is None else {"optimizer.state.0.exp_avg": torch.ones(5)}
    check(reader, {"a.weight": torch.ones(2), "b": torch.zeros(3)} | rest)
    assert {t.kind for n, t in reader.catalog.tensors.items() if n.startswith("optimizer")} <= {"optimizer"}


def test_megatron_names_in_any_wrapper_become_canonical(tmp_path):
    with torch.serialization.safe_globals([argparse.Namespace]):
        saved = torch.load(GOLDEN / "torch_mixtral_megatron/model.pt", weights_only=True)
    saved["model"] = {f"module.{name}": value for name, value in saved["model"].items()}
    found = held(catalog_of(tmp_path, saved))
    assert found.keys() == of_megatron().keys()


def test_hugging_face_names_stay_as_they_are(tmp_path):
    state = {"model.embed_tokens.weight": torch.ones(4, 2), "model.layers.0.mlp.up_proj.weight": torch.ones(2, 2)}
    reader = catalog_of(tmp_path, state)
    assert reader.catalog.framework == "Hugging Face"
    check(reader, state)
    assert not reader.catalog.megatron


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        (torch.ones(3), "one tensor, not a dictionary"),
        ([torch.ones(3)], "not a dictionary of tensors"),
        ({"epoch": 3}, "no tensors under names"),
        ({}, "no tensors under names"),
    ],
)
def test_files_without_a_state_dict(saved, message, tmp_path, capsys):
    torch.save(saved, tmp_path / "x.pt")
    assert main(["inspect", str(tmp_path / "x.pt")]) == 3
    assert message in capsys.readouterr().err


def test_files_that_are_no_archives(tmp_path, capsys):
    path = tmp_path / "x.pt"
    torch.save({"w": torch.ones(3)}, path, _use_new_zipfile_serialization=False)
    assert main(["inspect", str(path)]) == main(["verify", str(path)]) == 4
    said = capsys.readouterr().err
    assert "before 1.6" in said
    assert "rewrite each file once" in said
    path.write_bytes(b"PK\x03\x04" + b"data.pkl" * 10)
    assert main(["inspect", str(path)]) == 3
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), path)
    assert main(["inspect", str(path)]) == 3
    assert "Traceback" not in capsys.readouterr().err


def test_a_way_that_is_closed_says_what_is_missing(tmp_path, capsys):
    """Weights without training arguments: looked at and converted, but no job resumes from them."""
    convert(golden("bridge_llama4_weights_tp2pp2"), tmp_path / "m.pt", "torch")
    assert main(["convert", str(tmp_path / "m.pt"), str(tmp_path / "d"), "--to", "torch_dist"]) == 4
    assert "holds no training arguments" in capsys.readouterr().err
    convert(GOLDEN / "hf_llama_safetensors", tmp_path / "hf.pt", "torch")
    check(open_checkpoint(tmp_path / "hf.pt"), {k: v for name in SHARDS for k, v in load_file(GOLDEN / name).items()})
    for command in (
        ["export-hf"],
        ["convert", "--to", "torch_dist"],
        ["convert", "--to", "torch", "--names", "megatron"],
    ):
        argv = [command[0], str(tmp_path / "hf.pt"), str(tmp_path / "no"), *command[1:]]
        assert main(argv) == 4
        assert "Traceback" not in capsys.readouterr().err


# ---------------------------------------------------------------------- hostile safetensors


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_headers_are_refused(case, tmp_path, capsys):
    header, data, length = HOSTILE[case]
    write_safetensors(tmp_path / "x.safetensors", header, data, length)
    for command in ("inspect", "verify"):
        assert main([command, str(tmp_path / "x.safetensors")]) in (1, 3), case
        assert "Traceback" not in capsys.readouterr().err


def test_a_good_header_is_read(tmp_path, capsys):
    """The negative control of the above; names are shown as text, whatever they are."""
    name = "\x1b[31mred\x1b[0m"
    write_safetensors(tmp_path / "x.safetensors", {name: entry(0, 8), "__metadata__": {"format": "pt"}}, b"x" * 8)
    assert main(["inspect", str(tmp_path / "x.safetensors"), "--tensors"]) == 0
    said = capsys.readouterr().out
    assert "\x1b[31m" not in said
    assert "red" in said


@pytest.fixture
def sharded(tmp_path):
    shutil.copytree(GOLDEN / "hf_llama_safetensors", tmp_path / "hf")
    return tmp_path / "hf"


@pytest.mark.parametrize("case", BAD_INDEX)
def test_bad_indexes_are_refused(case, sharded, capsys):
    change, message = BAD_INDEX[case]
    edit_index(sharded, change)
    assert main(["inspect", str(sharded)]) == 3
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said


def test_what_an_index_leaves_out_is_told(sharded):
    edit_index(sharded, lambda m: m.pop("lm_head.weight"))
    catalog = open_checkpoint(sharded).catalog
    assert "lm_head.weight" not in catalog.tensors
    assert any("not in model.safetensors.index.json" in problem.message for problem in catalog.problems)


def test_what_an_index_leaves_out_is_lost_by_no_command(sharded, tmp_path, capsys):
    shard = sharded / "model-00001-of-00002.safetensors"
    save_file(load_file(shard) | {"model.extra.weight": torch.ones(3)}, shard, {"format": "pt"})
    reason = f"in {shard.name}, but not in the index of the files"
    assert open_checkpoint(sharded).catalog.unread == {"model.extra.weight": reason}
    assert main(["import-hf", str(sharded), str(tmp_path / "start"), "--progress", "off"]) == 0
    assert "model.extra.weight" in capsys.readouterr().err
    dropped = json.loads((tmp_path / "start" / "distckpt-report.json").read_text())["dropped"]
    assert {"tensor": "model.extra.weight", "elements": "all", "reason": reason} in dropped
    assert main(["convert", str(sharded), str(tmp_path / "x.pt"), "--to", "torch", "--progress", "off"]) == 0
    assert "model.extra.weight" in capsys.readouterr().err
    for other in (GOLDEN / "hf_llama_safetensors", tmp_path / "start"):
        assert main(["diff", str(sharded), str(other), "--progress", "off"]) == 1
        assert "model.extra.weight" in capsys.readouterr().out
        assert main(["diff", str(sharded), str(other), "--ignore", "model.extra.*", "--progress", "off"]) == 0
        capsys.readouterr()


def test_shards_without_an_index(sharded, capsys):
    (sharded / "model.safetensors.index.json").unlink()
    assert len(open_checkpoint(sharded).catalog.tensors) == 21
    (sharded / "model-00001-of-00002.safetensors").unlink()
    assert main(["inspect", str(sharded)]) == 3
    assert "model-00001-of-00002.safetensors" in capsys.readouterr().err


def test_a_name_in_two_files(sharded, capsys):
    (sharded / "model.safetensors.index.json").unlink()
    shutil.copy(sharded / "model-00001-of-00002.safetensors", sharded / "other.safetensors")
    assert main(["inspect", str(sharded)]) == 3
    err = capsys.readouterr().err
    assert "is in two files, model-00001-of-00002.safetensors and other.safetensors" in err
    assert f"to open one of them, name it: {sharded / 'other.safetensors'}" in err


def test_a_file_beside_others_is_read_alone(sharded):
    torch.save({"mine": torch.ones(3)}, sharded / "mine.pt")
    assert list(open_checkpoint(sharded / "mine.pt").catalog.tensors) == ["mine"]
    part = open_checkpoint(sharded / "model-00001-of-00002.safetensors").catalog
    assert len(part.tensors) == 21  # a part of a checkpoint means the checkpoint


def test_config_json_says_what_the_model_is(capsys):
    for name, said in (
        ("hf_llama_safetensors", "llama, 2 layers, hidden 32, 4 heads / 2 query groups, ffn 48, vocab 120, bf16"),
        (
            "hf_mixtral_bin",
            "mixtral, 2 layers, hidden 32, 4 heads / 2 query groups, ffn 48, 4 experts, top 2, vocab 120, bf16",
        ),
    ):
        assert main(["inspect", str(GOLDEN / name)]) == 0
        assert said in capsys.readouterr().out
    config = open_checkpoint(GOLDEN / "hf_mixtral_bin").catalog.config
    assert config["model_type"] == "mixtral"


@pytest.mark.parametrize("packed", [False, True])
def test_an_undivided_nemo_1_model(packed, tmp_path):
    """What NeMo 1 saved without model parallelism: one file of torch, its configuration beside it, packed as .nemo."""
    divided = GOLDEN / "nemo1_zarr_llama4_weights_tp2pp2"
    document = loaded(convert(golden(divided.name), tmp_path / "m.pt", "torch"))
    (tmp_path / "nemo").mkdir()
    torch.save({f"model.{n}": v for n, v in document["model"].items()}, tmp_path / "nemo" / "model_weights.ckpt")
    shutil.copy(divided / "model_config.yaml", tmp_path / "nemo")
    source = tmp_path / "nemo"
    if packed:
        source = tmp_path / "m.nemo"
        with tarfile.open(source, "w") as tar:
            tar.add(tmp_path / "nemo", ".")
    catalog = open_checkpoint(source).catalog
    assert catalog.framework == "NeMo 1"
    assert not catalog.problems
    assert main(["diff", str(source), str(golden(divided.name)), "--progress", "off"]) == 0
    assert main(["export-hf", str(source), str(tmp_path / "hf"), "--progress", "off"]) == 0
    assert not differing(tmp_path / "hf", "llama4", "llama")


def test_no_tensor_is_forgotten(tmp_path):
    state = {"model": {"a": torch.ones(2), 3: torch.ones(4)}, "ema": {"a": torch.zeros(2)}, "list": [torch.ones(1), 5]}
    reader = catalog_of(tmp_path, state)
    check(reader, {"a": torch.ones(2), "3": torch.ones(4), "ema.a": torch.zeros(2), "list.0": torch.ones(1)})
    assert reader.catalog.tensors["ema.a"].kind == "other"
    with pytest.raises(FormatError, match="which is not a name"):
        catalog_of(tmp_path, {"model": {("a", 1): torch.ones(2)}})


@pytest.mark.parametrize("key", ["model", "ema", "optimizer"])
def test_a_list_that_stands_for_too_many_values(tmp_path, key):
    """A file of 1 kB: each list holds the one below it ten times."""
    values: list[object] = [1]
    for _ in range(40):
        values = [values] * 10
    with pytest.raises(FormatError, match="hold too much"):
        catalog_of(tmp_path, {"model": {"w": torch.ones(2)}} | {key: {"w": torch.ones(2), "values": values}})


def test_a_folder_with_one_file_is_that_file(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    torch.save({"w": torch.ones(2)}, tmp_path / "run" / "model.pt")
    check(open_checkpoint(tmp_path / "run"), {"w": torch.ones(2)})
    torch.save({"w": torch.ones(2)}, tmp_path / "run" / "other.pt")  # which of them is meant is not to be told
    assert main(["verify", str(tmp_path / "run")]) == 3
    assert "holds 2 checkpoints" in capsys.readouterr().err
    assert main(["inspect", str(tmp_path / "run")]) == 0  # lists them, as of several that are named
    listed = capsys.readouterr().out
    assert "run/model.pt" in listed
    assert "run/other.pt" in listed


def test_tensors_in_any_dictionary_or_list(tmp_path):
    """The state of a moving average is an OrderedDict; two models may lie beside each other."""
    one, two, three = torch.ones(2), torch.zeros(3), torch.full((4,), 2.0)
    state = {"model": OrderedDict(w=one, rest=[two]), "ema": OrderedDict(w=two, more=(three,))}
    wanted = {"w": one, "rest.0": two, "ema.w": two, "ema.more.0": three}
    check(catalog_of(tmp_path, state), wanted)
    check(catalog_of(tmp_path, {"model0": {"w": one}, "model1": {"w": two}}), {"model0.w": one, "model1.w": two})
    check(catalog_of(tmp_path, {"w": torch.nn.Parameter(one)}), {"w": one})


@pytest.mark.parametrize(
    "saved",
    [
        {"a": {"b": torch.zeros(2)}, "a.b": torch.ones(2)},
        {"model": {1: torch.zeros(2), "1": torch.ones(2)}},
        {"model": {"ema.w": torch.zeros(2)}, "ema": {"w": torch.ones(2)}},
    ],
)
def test_two_tensors_of_one_name_are_refused(saved, tmp_path):
    with pytest.raises(FormatError, match="two tensors that are both"):
        catalog_of(tmp_path, saved)


_COMPLEX = torch.tensor([1 + 2j, 3 + 4j])


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (_COMPLEX.conj(), "marked as the conjugate"),
        (_COMPLEX.conj().imag, "marked as the conjugate or the negative"),
        (torch.eye(3).to_sparse(), "_rebuild_sparse_tensor"),
        (torch.ones(3, device="meta"), "_rebuild_meta_tensor"),
    ],
)
def test_tensors_whose_values_are_not_what_is_stored(tensor, message, tmp_path):
    with pytest.raises(FormatError, match=message):
        catalog_of(tmp_path, {"w": tensor, "v": torch.ones(2)})
    with pytest.raises(FormatError, match=message):
        catalog_of(tmp_path, {"model": {"v": torch.ones(2)}, "other": [tensor]})


def test_what_has_tensors_is_no_common_state(tmp_path, capsys):
    """A random state of torch is a tensor; it would be missing in `common.pt`."""
    saved = loaded(convert(golden("llama_adam_tp2pp2"), tmp_path / "m.pt", "torch"))
    saved |= {"rng_state": [{"torch_rng_state": torch.get_rng_state()}], "ema": torch.ones(3)}
    reader = catalog_of(tmp_path, saved)
    assert "random states" in reader.catalog.details
    assert reader.catalog.tensors["ema"].kind == "other"
    assert not {"rng_state", "ema"} & reader.catalog.common.keys()
    assert reader.catalog.common["opt_param_scheduler"]
    command = ["convert", str(tmp_path / "x.pt"), str(tmp_path / "dist"), "--to", "torch_dist"]
    assert main(command) == 4
    assert "ema" in capsys.readouterr().err
    del saved["ema"]
    catalog_of(tmp_path, saved)
    assert main(command) == 0
    with torch.serialization.safe_globals([argparse.Namespace]):
        assert "iteration" in torch.load(tmp_path / "dist" / "iter_0000010" / "common.pt")


def test_state_of_another_shape_than_its_weight(tmp_path):
    saved = loaded(convert(golden("llama_adam_tp2pp2"), tmp_path / "m.pt", "torch"))
    moments = saved["optimizer"]["state"]["exp_avg"]
    moments["decoder.final_layernorm.weight"] = moments["decoder.final_layernorm.weight"][:-1].clone()
    with pytest.raises(FormatError, match=r"final_layernorm.weight is \[31\]: the weight is \[32\]"):
        catalog_of(tmp_path, saved)
