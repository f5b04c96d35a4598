"""Prediction layers of Qwen3-Next and Qwen3.5, which are named by themselves and which no key of config.json speaks of."""

import json
import shlex

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from converters import Layout, diff, verify
from converters.errors import FormatError, RequestError
from converters.formats import open_checkpoint
from converters.megatron.model_args import ModelArgs
from converters.write.export import plan_export
from converters.write.import_hf import plan_import
from converters.write.import_start import ImportOptions
from harness import import_cases as cases
from harness.imports import exported, imported, megatron_bits, same, tensors

pytestmark = pytest.mark.filterwarnings("ignore")
KINDS = ["linear_attention", "linear_attention", "full_attention"]


def folder(name, into, kinds=KINDS, **more):
    """A case whose prediction layer is as its last layer is, with the same elements."""
    cases.save(name, into, layer_types=kinds, mlp_only_layers=[])
    own, random = load_file(into / "model.safetensors"), torch.Generator().manual_seed(5)
    last = {
        n.replace("model.layers.2.", "mtp.layers.0."): value.clone() for n, value in own.items() if ".layers.2." in n
    }
    around = {f"mtp.{n}.weight": torch.randn(48, generator=random).bfloat16() for n in ("pre_fc_norm_hidden", "norm")}
    around["mtp.pre_fc_norm_embedding.weight"] = torch.randn(48, generator=random).bfloat16()
    around["mtp.fc.weight"] = torch.randn(48, 96, generator=random).bfloat16()
    save_file({**own, **last, **around, **more}, into / "model.safetensors", {"format": "pt"})
    return into


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"])
def test_they_are_where_megatron_keeps_them(name, tmp_path):
    source = folder(name, tmp_path / "hf")
    imported(source, tmp_path / "job", Layout(tp=2, pp=3))
    assert "--mtp-num-layers 1" in (tmp_path / "job" / "megatron_args.txt").read_text()
    made, own = megatron_bits(tmp_path / "job"), tensors(source)
    inner = {n.replace("mtp.layers.0.transformer_layer.", "decoder.layers.2."): n for n in made if "transformer_l" in n}
    assert len(inner) == sum(n.startswith("decoder.layers.2.") for n in made)
    assert all(np.array_equal(made[one], made[other]) for one, other in inner.items())
    names = {
        "eh_proj": "fc",
        "enorm": "pre_fc_norm_embedding",
        "hnorm": "pre_fc_norm_hidden",
        "final_layernorm": "norm",
    }
    for ours, theirs in names.items():
        bits = own[f"mtp.{theirs}.weight"].view(torch.uint16).numpy()
        assert np.array_equal(made[f"mtp.layers.0.{ours}.weight"], bits)
    assert same(exported(tmp_path / "job", tmp_path / "back", arch=name), own) == []
    assert diff(source, tmp_path / "job").identical
    assert verify(source).good


def test_they_may_be_left_out(tmp_path):
    source = folder("qwen3_next", tmp_path / "hf")
    plan = imported(source, tmp_path / "job", mtp="drop")
    assert any("1 multi-token prediction layers are left out" in note for note in plan.notes)
    assert ModelArgs.from_catalog(open_checkpoint(tmp_path / "job").catalog).mtp_num_layers is None
    assert all(name.startswith("mtp.") for name, _ in plan.dropped if name in tensors(source))


def test_megatrons_are_like_its_last_layer(tmp_path):
    """Behind linear attention a prediction layer would have linear attention, too."""
    cases.save("qwen3_next", tmp_path / "hf")
    own = load_file(tmp_path / "hf" / "model.safetensors")
    more = {n.replace("model.layers.1.", "mtp.layers.0."): v.clone() for n, v in own.items() if ".layers.1." in n}
    save_file({**own, **more}, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    plan = imported(tmp_path / "hf", tmp_path / "job")
    assert {name for name, _ in plan.dropped} >= more.keys()
    with pytest.raises(RequestError, match="cannot hold multi-token prediction layers"):
        plan_import(tmp_path / "hf", tmp_path / "job2", Layout(), ImportOptions(mtp="keep"))


def test_what_is_not_known_of_them_is_refused(tmp_path):
    source = folder("qwen3_5_text", tmp_path / "hf", **{"mtp.layers.0.mlp.scale": torch.ones(3)})
    with pytest.raises(RequestError, match="1 tensor has no place"):
        plan_import(source, tmp_path / "job", Layout())


def test_those_of_mimo_may_be_left_out(tmp_path):
    cases.save("mimo", tmp_path / "hf")
    cases.rewrite_config(tmp_path / "hf", auto_map={"AutoModelForCausalLM": "modeling_mimo.MiMoForCausalLM"})
    plan = imported(tmp_path / "hf", tmp_path / "job", mtp="drop")
    assert not any("final norm" in note for note in plan.notes)
    assert "--mtp-num-layers" not in (tmp_path / "job" / "megatron_args.txt").read_text()
    assert {name for name, _ in plan.dropped if name.startswith("model.mtp_layers.")}
    plan = imported(tmp_path / "hf", tmp_path / "kept", Layout(tp=2, pp=3))
    assert any("final norm" in note for note in plan.notes)
    assert same(exported(tmp_path / "kept", tmp_path / "back", arch="mimo"), tensors(tmp_path / "hf")) == []
    assert verify(tmp_path / "hf").good
    assert verify(tmp_path / "back").good
    notes = plan_export(open_checkpoint(tmp_path / "kept"), tmp_path / "qwen2").notes
    assert any("--arch mimo" in note for note in notes)


@pytest.mark.parametrize(
    ("name", "version", "text"),
    [("nemotron_h_mtp", "0.16", "in a hybrid"), ("qwen3_next_mtp", "0.19", "beside gated delta nets")],
)
def test_a_version_without_them_leaves_them_out(name, version, text, tmp_path):
    cases.save(name, tmp_path / "hf")
    plan = imported(tmp_path / "hf", tmp_path / "job", mcore=version)
    assert any(text in note for note in plan.notes)
    assert "--mtp-num-layers" not in (tmp_path / "job" / "megatron_args.txt").read_text()
    with pytest.raises(RequestError, match=text):
        plan_import(tmp_path / "hf", tmp_path / "no", Layout(), ImportOptions(mcore=version, mtp="keep"))


def test_those_of_a_hybrid_are_a_stack_of_their_own(tmp_path):
    source = tmp_path / "hf"
    cases.save("nemotron_h_mtp", source)
    for layout in (Layout(), Layout(tp=2, pp=5, ep=2, dp=2)):
        job = tmp_path / f"job{layout.pp}"
        imported(source, job, layout, mcore="0.19")
        assert shlex.join(["--hybrid-layer-pattern", "ME*-E/*E"]) in (job / "megatron_args.txt").read_text()
        assert same(exported(job, tmp_path / f"back{layout.pp}"), tensors(source)) == []
    stored = open_checkpoint(tmp_path / "job5").catalog.args["hybrid_layer_pattern"]
    assert (stored.replace("|", ""), stored.count("|")) == ("ME*-E/*E", 4)
    assert verify(tmp_path / "job5").good
    config = json.loads((tmp_path / "back5" / "config.json").read_text())
    assert (config["num_nextn_predict_layers"], config["mtp_layers_block_type"]) == (1, ["full_attention", "moe"])


def test_ling_is_known_by_its_class_and_keeps_its_prediction_layers(tmp_path):
    """Its files may say the model_type of the first generation, which is left out."""
    source = tmp_path / "hf"
    cases.save("bailing_moe_v2_mtp", source)
    code = {"AutoModelForCausalLM": "modeling_bailing_moe_v2.BailingMoeV2ForCausalLM"}
    cases.rewrite_config(source, model_type="bailing_moe", auto_map=code)
    imported(source, tmp_path / "job", Layout(tp=2, pp=3, ep=2, dp=2))
    assert same(exported(tmp_path / "job", tmp_path / "back", arch="bailing_moe_v2"), tensors(source)) == []
    assert verify(tmp_path / "back").good
    cases.rewrite_config(source, architectures=["BailingMoeForCausalLM"])
    with pytest.raises(RequestError, match="a bailing_moe is not imported"):
        plan_import(source, tmp_path / "no", Layout())
    cases.rewrite_config(source, architectures=["BailingMoeV2ForCausalLM"], rope_scaling="long")
    with pytest.raises(FormatError, match="does not take this"):
        plan_import(source, tmp_path / "no", Layout())
