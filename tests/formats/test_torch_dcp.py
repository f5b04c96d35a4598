"""torch DCP folders of any model: what FSDP2, HSDP, DTensors and plain tensors leave, read bit for bit, and converted."""

import shutil

import numpy as np
import pytest

from converters.errors import FormatError
from converters.formats import open_checkpoint
from converters.formats.dcp.names import hugging_face, name_keys, paths
from converters.pickles.nodes import fields
from distckpt_cli.app import main
from harness.checkpoints import edit_metadata
from harness.conformance import Conformance, own_case
from harness.support import GOLDEN, load_safetensors, read_tensor

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
NAMES = ("fsdp2_llama_dp2", "hsdp_llama_2x2", "dtensor_2d", "dcp_plain")


class TestTorchDcp(Conformance):
    FORMAT = "torch_dcp"
    CASES = tuple(own_case(name) for name in NAMES)
    DEEP = 4


def converted(name, tmp_path, to="safetensors"):
    out = tmp_path / ("model.pt" if to == "torch" else "out")
    assert main(["convert", str(GOLDEN / name), str(out), "--to", to, "--progress", "off"]) == 0
    return out


def weights(name):
    catalog = open_checkpoint(GOLDEN / name).catalog
    return {n: t for n, t in load_safetensors(GOLDEN / "truth" / f"{name}.safetensors").items() if n in catalog.weights}


@pytest.mark.parametrize("name", NAMES)
def test_safetensors_hold_the_weights(name, tmp_path):
    got = load_safetensors(converted(name, tmp_path) / "model.safetensors")
    want = weights(name)
    assert got.keys() == want.keys()
    assert all(np.array_equal(got[n], want[n]) for n in want)


@pytest.mark.parametrize("name", NAMES)
def test_a_torch_file_holds_the_weights(name, tmp_path):
    import torch

    got = torch.load(converted(name, tmp_path, "torch"), weights_only=True, mmap=True)
    want = weights(name)
    assert got.keys() == want.keys()
    for key, tensor in got.items():
        assert np.array_equal(tensor.reshape(-1).view(torch.uint8).numpy(), want[key].reshape(-1).view(np.uint8)), key


@pytest.mark.parametrize(("name", "tied"), [("fsdp2_llama_dp2", False), ("hsdp_llama_2x2", True)])
def test_transformers_loads_what_fsdp2_saved(name, tied, tmp_path):
    """The names are those of transformers: with the model's config beside them the weights load, none missing or left."""
    import torch
    from transformers import LlamaForCausalLM

    from oracle.torch_dcp import llama

    out = converted(name, tmp_path)
    llama(tied=tied).config.save_pretrained(out)
    model, info = LlamaForCausalLM.from_pretrained(out, output_loading_info=True, dtype="auto")
    assert not any(info.values()), info
    for key, tensor in model.state_dict().items():
        got = tensor.reshape(-1).view(torch.uint8).numpy()
        assert np.array_equal(got, weights(name)[key].reshape(-1).view(np.uint8)), key


def test_flavour_and_kinds():
    catalog = open_checkpoint(GOLDEN / "fsdp2_llama_dp2").catalog
    assert catalog.framework == "Hugging Face"
    assert catalog.details["state dictionary"] == "model, optim, train"
    assert catalog.tensors["train.rng"].kind == "other"
    assert catalog.tensors["lm_head.weight"].keys == ("model.lm_head.weight",)
    assert len(catalog.weights) == 21
    assert {t.kind for n, t in catalog.tensors.items() if n.startswith("optimizer.state.exp_avg_sq.")} == {"optimizer"}
    assert "optim.param_groups.0.lr" in catalog.objects
    assert open_checkpoint(GOLDEN / "dtensor_2d").catalog.framework == "torch DCP"
    titan = open_checkpoint(GOLDEN / "hsdp_llama_2x2").catalog
    assert titan.tensors["train_state.step"].kind == "other"
    assert titan.tensors["optimizer.state.step.model.norm.weight"].shape == ()


def test_stored_values_are_not_taken_apart():
    """What lies in the record is the object: Megatron's list of one around it is its own."""
    reader = open_checkpoint(GOLDEN / "fsdp2_llama_dp2")
    assert reader.object_value("train.step") == 2
    assert reader.object_value("train.loss") == [1.5, 1.25]
    assert all(not stored.wrapped for stored in reader.catalog.objects.values())


@pytest.mark.parametrize(("command", "options"), [("reshard", ["--tp", "1"]), ("export-hf", [])])
def test_commands_for_megatrons_models_say_what_else_there_is(command, options, tmp_path, capsys):
    for name, whose in (("fsdp2_llama_dp2", "Hugging Face's names"), ("dtensor_2d", "names of their own")):
        assert main([command, str(GOLDEN / name), str(tmp_path / "out"), *options]) == 4
        text = capsys.readouterr().err
        assert whose in text
        assert "DST --to safetensors keeps the names" in text
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------------- names


def named(**tree):
    """Names and kinds of the tensors of a nested dictionary."""
    found = {}

    def walk(value, path):
        for key, inner in value.items():
            if isinstance(inner, dict):
                walk(inner, (*path, key))
            else:
                found[".".join(map(str, (*path, key)))] = (*path, key)

    walk(tree, ())
    return {key: (item.name, item.kind) for key, item in name_keys(paths(found, found)).items()}


def test_one_model_under_a_key():
    got = named(app={"model": {"a.w": 0, "b": 0}, "optim": {"state": {"a.w": {"exp_avg": 0}}, "lr": 0}}, step=0)
    assert got == {
        "app.model.a.w": ("a.w", "weight"),
        "app.model.b": ("b", "weight"),
        "app.optim.state.a.w.exp_avg": ("optimizer.state.exp_avg.a.w", "optimizer"),
        "app.optim.lr": ("app.optim.lr", "optimizer"),
        "step": ("step", "other"),
    }


def test_several_models_keep_their_keys():
    got = named(actor={"model": {"a.w": 0}}, critic={"model": {"a.w": 0}})
    assert set(got.values()) == {("actor.model.a.w", "weight"), ("critic.model.a.w", "weight")}


def test_a_folder_without_paths():
    """Megatron 0.19 and some others keep no planner data: keys are names."""
    keys = ["a.w", "state.a.w.exp_avg"]
    got = name_keys(paths(keys, None))
    assert {key: (item.name, item.kind) for key, item in got.items()} == {
        "a.w": ("a.w", "weight"),
        "state.a.w.exp_avg": ("optimizer.state.exp_avg.a.w", "optimizer"),
    }


def test_names_that_would_meet_stay_apart():
    got = named(model={"a.w": 0}, **{"a.w": 0})
    assert {name for name, _ in got.values()} == {"model.a.w", "a.w"}
    twice = named(x={"state": {"a": {"m": 0}}}, y={"state": {"a": {"m": 0}}})
    assert {name for name, _ in twice.values()} == twice.keys()


def test_whose_names():
    assert hugging_face(["model.layers.0.self_attn.q_proj.weight"])
    assert hugging_face(["transformer.h.11.attn.c_attn.weight"])
    assert not hugging_face(["decoder.layers.0.self_attention.linear_qkv.weight", "layers.0.attention.wq.weight"])


# ---------------------------------------------------------------------- several folders, and what is missing


def test_a_folder_for_the_model_and_one_for_the_optimizer(tmp_path):
    """What a loop leaves that calls dcp.save twice."""
    import torch
    import torch.distributed.checkpoint as dcp

    made = {"layer.a": torch.arange(6.0).reshape(2, 3), "layer.b": torch.arange(4.0)}
    state = {"state": {name: {"exp_avg": value + 1} for name, value in made.items()}}
    dcp.save(made, checkpoint_id=tmp_path / "step" / "model")
    dcp.save(state, checkpoint_id=tmp_path / "step" / "optimizer")
    reader = open_checkpoint(tmp_path / "step")
    tensors = reader.catalog.tensors
    assert set(reader.catalog.weights) == set(made)
    for name, value in made.items():
        assert np.array_equal(read_tensor(reader, tensors[name]).view(np.float32), value.numpy())
        state = read_tensor(reader, tensors[f"optimizer.state.exp_avg.{name}"]).view(np.float32)
        assert np.array_equal(state, value.numpy() + 1)
    assert {info.name for info in reader.catalog.files} >= {"model/.metadata", "optimizer/__0_0.distcp"}
    assert open_checkpoint(tmp_path / "step" / "model").catalog.weights.keys() == made.keys()
    (tmp_path / "step" / "model" / "__0_0.distcp").unlink()
    (problem,) = [p for p in open_checkpoint(tmp_path / "step").catalog.problems if p.severity == "error"]
    assert problem.file == "model/__0_0.distcp"
    assert set(problem.tensors) == set(made)


def test_no_metadata(tmp_path):
    shutil.copytree(GOLDEN / "fsdp2_llama_dp2", tmp_path / "ckpt")
    (tmp_path / "ckpt" / ".metadata").unlink()
    with pytest.raises(FormatError, match=r"\.metadata is missing: the save was not finished"):
        open_checkpoint(tmp_path / "ckpt")


def test_a_chunk_that_is_not_there(tmp_path):
    shutil.copytree(GOLDEN / "dtensor_2d", tmp_path / "ckpt")

    def change(state):
        fields(state["state_dict_metadata"]["encoder.both"])["chunks"].pop()

    edit_metadata(tmp_path / "ckpt", change)
    found = [p for p in open_checkpoint(tmp_path / "ckpt").catalog.problems if p.severity == "error"]
    assert "no chunk covers" in found[0].message
    assert found[0].tensors == ("encoder.both",)


def test_a_tensor_stored_across(tmp_path, capsys):
    """torch stores a transposed view as it lies in memory; its elements cannot be streamed in order, and never are wrong."""
    import torch
    import torch.distributed.checkpoint as dcp

    dcp.save({"layer.a": torch.arange(6.0).reshape(2, 3).T, "layer.b": torch.ones(3)}, checkpoint_id=tmp_path / "ckpt")
    assert main(["inspect", str(tmp_path / "ckpt")]) == 0
    assert main(["convert", str(tmp_path / "ckpt"), str(tmp_path / "out"), "--to", "safetensors"]) == 4
    assert "layer.a holds a tensor with strides [1, 3]" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
