"""Layers of different sizes: what Megatron-LM or this project cannot build or does not understand is refused by name."""

import json
import shutil
from dataclasses import replace

import pytest
from safetensors.torch import load_file, save_file

import converters
from converters import Layout, diff, verify
from converters.errors import RequestError
from converters.formats import open_checkpoint
from converters.megatron.heterogeneous import ENCODED, mlp_width, parse_blocks, read_blocks
from converters.megatron.identity import identify
from converters.megatron.layout_check import check_layout
from converters.megatron.model_args import ModelArgs
from converters.models import by_name
from converters.param_order import Order
from converters.write.import_hf import plan_import
from converters.write.import_start import ImportOptions
from converters.write.write_plan import run_conversion
from harness import import_cases as cases
from harness.decilm import block

NAME = "nemotron-nas"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uneven") / "hf"
    cases.save(NAME, folder)
    return folder


@pytest.fixture(scope="module")
def job(source):
    run_conversion(plan_import(source, source.parent / "job", Layout(tp=2, pp=2), ImportOptions()))
    return source.parent / "job"


def changed(number, part, **changes):
    """The blocks of the case, one of them with other keys."""
    blocks = json.loads(json.dumps(cases.settings(NAME)["block_configs"]))
    blocks[number][part] |= changes
    return {"block_configs": blocks}


ROPE = {"rope_theta": 500000.0, **cases.LLAMA3}
BAD = {
    "a window": (changed(2, "attention", window_length=512), "window_length 512 of attention of layer 2"),
    "sparse": (changed(0, "ffn", sparsify=["2:4"]), "of ffn of layer 0, which is not understood"),
    "an empty layer": (changed(1, "ffn", no_op=True, ffn_mult=None), "layer 1 has neither attention nor an MLP"),
    "no size": (changed(0, "ffn", ffn_mult=None), "neither ffn_mult nor ffn_hidden_size of ffn of layer 0"),
    "a size of nothing": (changed(1, "attention", n_heads_in_group=2), "n_heads_in_group of attention of layer 1"),
    "heads": (changed(0, "attention", n_heads_in_group=3), "n_heads_in_group 3 of layer 0"),
    "infinite": (changed(0, "ffn", ffn_mult=1e300), "ffn_mult 1e+300 of ffn of layer 0"),
    "DeciLM-7B": ({"block_configs": ..., "num_key_value_heads_per_layer": [4] * 6}, "has no block_configs"),
    "fewer": ({"num_hidden_layers": 5}, "num_hidden_layers 5, block_configs 6"),
    "no attention": ({"block_configs": [block(attention=None, ffn=2.0)] * 6}, "has no layer with attention"),
    "another factor": ({"rope_parameters": ROPE | {"factor": 16.0}}, "by 8, 1, 4 of 8192 only"),
    "a rope of its own": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        "with the rotary embedding of Llama 3.1 only",
    ),
    "a bias": ({"attention_bias": True, "mlp_bias": True}, "an unknown variant"),
    "wide heads": ({"head_dim": 10}, "head_dim is 10"),
    "widths": (changed(1, "ffn", ffn_mult=2.0), "does not fit the tensors: model.layers.1.mlp"),
    "groups": (changed(5, "attention", n_heads_in_group=2), "does not fit the tensors: model.layers.5.self_attn"),
}


@pytest.mark.parametrize("what", BAD)
def test_what_cannot_be_built_is_refused(what, source, tmp_path):
    changes, text = BAD[what]
    folder = shutil.copytree(source, tmp_path / "hf")
    cases.rewrite_config(folder, **changes)
    with pytest.raises(RequestError) as caught:
        plan_import(folder, tmp_path / "job", Layout())
    assert text in f"{caught.value} {caught.value.details}"
    assert caught.value.exit_code == 4


def test_not_for_bridge(source, tmp_path):
    with pytest.raises(RequestError, match="layers of different sizes are not written for Megatron-Bridge"):
        plan_import(source, tmp_path / "job", Layout(), ImportOptions(to="megatron-bridge"))


def test_what_megatron_reads(job, source):
    args = open_checkpoint(job).catalog.args
    document = json.loads(args[ENCODED])
    stated = {b["attention"]["n_heads_in_group"] for b in document["block_configs"]}
    assert stated == {2, None}  # its parser wants one number
    assert [b.query_groups for b in read_blocks(args[ENCODED], 8, 48)] == [4, None, 2, None, 4, 8]
    assert [b.ffn_hidden_size for b in read_blocks(args[ENCODED], 8, 48)] == [256, 512, None, 768, None, 256]
    assert document["rope_scaling"]["factor"] == 8.0
    assert args["heterogeneous_layers_config_path"] == str(job / "tokenizer" / "config.json")
    assert (args["num_query_groups"], args["ffn_hidden_size"]) == (4, 256)


def test_verified_compared_and_resharded(job, source, tmp_path):
    assert verify(source).good
    assert verify(job).good
    assert identify(open_checkpoint(job).catalog).contradictions == ()
    converters.reshard(job, tmp_path / "one", tp=1, pp=1)
    converters.reshard(job, tmp_path / "pp3", tp=2, pp=3)
    converters.convert(job, tmp_path / "legacy", to="legacy", tp=2, pp=2)
    for result in ("one", "pp3", "legacy"):
        assert verify(tmp_path / result).good
        assert diff(job, tmp_path / result).identical
        assert diff(source, tmp_path / result).identical


def test_layers_share_no_keys(job, source, tmp_path):
    folder = shutil.copytree(source, tmp_path / "hf")
    keys = {tensor.keys[0] for tensor in open_checkpoint(job).catalog.weights.values()}
    assert "decoder.layers.3.self_attention.weight" in keys
    assert not any(key.startswith("decoder.layers.self_attention") for key in keys)
    with pytest.raises(RequestError, match="the layers of this model are not alike"):
        converters.reshard(job, tmp_path / "out", tp=1, pp=1, layers="stacked")
    # all of one kind, of two widths: the same names in every layer
    cases.save(NAME, folder, block_configs=[block(attention=2, ffn=2.0 + 20 * (n % 2)) for n in range(6)])
    converters.import_hf(folder, tmp_path / "job", tp=1)
    converters.reshard(tmp_path / "job", tmp_path / "two", tp=2, pp=1)
    names = {tensor.keys[0] for tensor in open_checkpoint(tmp_path / "two").catalog.weights.values()}
    assert "decoder.layers.3.mlp.linear_fc1.weight" in names
    assert diff(folder, tmp_path / "two").identical


def test_arguments_of_another_model_are_named(job, tmp_path):
    catalog = open_checkpoint(job).catalog
    facts = ModelArgs.from_catalog(catalog)
    document = json.loads(catalog.args[ENCODED])
    blocks = document["block_configs"]
    for number, other, text in (
        (3, 1, "decoder.layers.3.self_attention.weight is (48, 48)"),
        (0, 5, "decoder.layers.0.self_attention.linear_qkv.weight is (96, 48)"),
        (1, 5, "decoder.layers.1.self_attention.linear_qkv.weight does not exist"),
    ):
        lie = document | {"block_configs": [blocks[other] if n == number else b for n, b in enumerate(blocks)]}
        catalog.args[ENCODED] = json.dumps(lie)
        sentences = ModelArgs.from_catalog(catalog).contradictions(catalog)
        assert any(text in sentence for sentence in sentences), sentences
    for lie, text in (
        ("{", "is not JSON"),
        (json.dumps({"block_configs": [1]}), "says nothing of attention of layer 0"),
    ):
        catalog.args[ENCODED] = lie
        facts = ModelArgs.from_catalog(catalog)
        with pytest.raises(RequestError, match="the model is not understood") as caught:
            check_layout(facts, Layout(tp=2), {n: t.shape for n, t in catalog.weights.items()})
        assert text in caught.value.message
    del catalog.args[ENCODED]
    facts = ModelArgs.from_catalog(catalog)  # the path of a file that is elsewhere
    assert "heterogeneous_layers_config_path" in facts.unknown[0]


def test_a_tensor_that_is_lost_is_missed(job, source, tmp_path):
    catalog = open_checkpoint(job).catalog
    facts = ModelArgs.from_catalog(catalog)
    for module, leaves in (
        ("3.self_attention", ""),
        ("4.mlp", ""),
        ("0.self_attention", "linear_qkv."),
        ("1.mlp", "linear_fc1."),
    ):
        for leaf in ("weight", "layer_norm_weight"):
            name = f"decoder.layers.{module}.{leaves}{leaf}"
            weights = {key: tensor for key, tensor in catalog.weights.items() if key != name}
            sentences = facts.contradictions(replace(catalog, tensors=weights))
            assert any(name in sentence.replace(" has no ", ".") for sentence in sentences), name
    folder = shutil.copytree(source, tmp_path / "hf")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.3.self_attn.linear_attn.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert "model.layers.3.self_attn.linear_attn.weight" in str(verify(folder))


def test_every_layer_limits_the_layout(job):
    catalog = open_checkpoint(job).catalog
    facts = ModelArgs.from_catalog(catalog)
    shapes = {name: tensor.shape for name, tensor in catalog.weights.items()}
    assert check_layout(facts, Layout(tp=2), shapes) == []
    assert "2 query groups" in check_layout(facts, Layout(tp=4), shapes)[0]


def test_widths_that_megatron_states_become_multipliers(job):
    catalog = open_checkpoint(job).catalog
    facts = ModelArgs.from_catalog(catalog)
    document = json.loads(catalog.args[ENCODED])
    for config, width in zip(document["block_configs"], (256, 512, None, 768, None, 256), strict=True):
        config["ffn"] |= {"ffn_mult": None, "ffn_hidden_size": width}
    catalog.args[ENCODED] = json.dumps(document)
    settings = by_name(NAME).settings(ModelArgs.from_catalog(catalog))
    multipliers = [config["ffn"]["ffn_mult"] for config in settings["block_configs"]]
    assert [m and mlp_width(m, 48) for m in multipliers] == [256, 512, None, 768, None, 256]
    assert not any("ffn_hidden_size" in config["ffn"] for config in settings["block_configs"])
    assert parse_blocks(settings["block_configs"], 8, 48) == facts.blocks
    document["block_configs"][0]["ffn"]["ffn_hidden_size"] = 300
    catalog.args[ENCODED] = json.dumps(document)
    assert "300 wide" in by_name(NAME).unexpressible(ModelArgs.from_catalog(catalog))[0]


def test_parameters_in_the_order_of_their_modules():
    names = [
        *("input_layernorm.weight", "self_attention.layer_norm_weight", "self_attention.weight"),
        *("pre_mlp_layernorm.weight", "mlp.layer_norm_weight", "mlp.weight"),
    ]
    positions = [Order().position(f"decoder.layers.3.{name}") for name in names]
    assert positions == sorted(positions)


def test_legacy_files_have_the_extra_states_of_single_matrices(job, tmp_path):
    converters.convert(job, tmp_path / "legacy", to="legacy", tp=1, pp=1)
    import torch

    path = next((tmp_path / "legacy").rglob("model_optim_rng.pt"))
    model = torch.load(path, weights_only=False)["model"]
    for name in ("decoder.layers.3.self_attention", "decoder.layers.4.mlp"):
        assert f"{name}._extra_state" in model
    assert "decoder.layers.3.mlp._extra_state" not in model
