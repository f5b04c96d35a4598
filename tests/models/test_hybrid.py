"""Hybrids of Mamba, attention and experts, and gated delta nets: what their layers are, and every way they are moved."""

from dataclasses import replace

import numpy as np
import pytest

from converters.errors import DistckptError, RequestError
from converters.formats import open_checkpoint
from converters.megatron.identity import identify
from converters.megatron.layer_pattern import LayerPattern, all_but_every_nth, read_pattern, symbol_of
from converters.megatron.layout import Layout
from converters.megatron.layout_check import check_layout
from converters.megatron.model_args import ModelArgs
from converters.optimizer.state import optimizer_state
from converters.write.legacy import LegacyOptions, plan_legacy
from converters.write.reshard import plan_reshard
from converters.write.write_plan import run_conversion
from harness.checkpoints import golden
from harness.reshard_cases import args_of, folder_of, reshard
from harness.support import read_tensor

KINDS = {
    "hymoe16_full_tp2ep2": "hybrid M*EM: 2 Mamba, 1 attention, 1 MoE",
    "hymoeM_full_tp2ep2": "hybrid M*EM: 2 Mamba, 1 attention, 1 MoE",
    "hy16_dpr_tp2dp2": "hybrid M*-M: 2 Mamba, 1 attention, 1 MLP",
    "gdn16_dpr_tp2dp2": "gated delta net in 1 of 2",
}


def contents(folder):
    """Every weight and state of the optimizer, by canonical name; elements as unsigned integers."""
    reader = open_checkpoint(folder)
    tensors = dict(reader.catalog.weights) | optimizer_state(reader).tensors
    arrays = {name: read_tensor(reader, info) for name, info in tensors.items()}
    padded = ("word_embeddings.weight", "output_layer.weight")
    return {name: array[:120] if name.endswith(padded) else array for name, array in arrays.items()}


def same(found, wanted):
    assert found.keys() == wanted.keys()
    assert not [name for name, value in wanted.items() if not np.array_equal(found[name], value)]


# ---------------------------------------------------------------------- what the layers are


@pytest.mark.parametrize("name", KINDS)
def test_layers_are_what_the_pattern_says(name):
    catalog = open_checkpoint(golden(name)).catalog
    found = identify(catalog)
    assert found.model.layer_kinds == KINDS[name]
    assert found.contradictions == ()
    if name.startswith("hymoe"):
        assert found.model.moe_layers == (False, False, True, False)
        assert found.model.source["moe_layers"].endswith("_pattern")


def test_patterns_as_megatron_spells_them():
    pattern = LayerPattern.parse("M*-|MEG/M*/M*")
    assert (pattern.layers, pattern.stages, pattern.prediction, pattern.depths) == ("M*-MEG", (3, 3), "M*", 2)
    assert pattern.written() == "M*-MEG/M*/M*"
    assert pattern.written((1, 4, 1)) == "M|*-ME|G/M*/M*"
    assert LayerPattern.parse("MM||M").stages == (2, 0, 1)
    for text, why in (("M*XM", "'X' at position 2"), ("MM/M/E", "'M' and with 'E'"), ("MM/M|M", "boundary")):
        with pytest.raises(ValueError, match=why):
            LayerPattern.parse(text)


def test_patterns_of_older_arguments():
    assert read_pattern(
        {"hybrid_override_pattern": "M*", "mtp_hybrid_override_pattern": "MM", "mtp_num_layers": 2}
    ) == (
        "M*/MM/MM",
        "hybrid_override_pattern",
    )
    # by core_v0.16.1, ssm/mamba_hybrid_layer_allocation.py
    for layers, attention, mlp, pattern in (
        (9, 0.3, 0.3, "M-*M*-M*-"),
        (10, 0.2, 0.0, "MMM*MM*MMM"),
        (10, 0.1, 0.1, "MMMMM*MMM-"),
    ):
        given = {"num_layers": layers, "hybrid_attention_ratio": attention, "hybrid_mlp_ratio": mlp}
        assert read_pattern(given) == (pattern, "hybrid_attention_ratio")
    assert read_pattern({"num_layers": 2, "is_hybrid_model": True}) == ("MM", "is_hybrid_model")
    assert read_pattern({"num_layers": 2, "hybrid_attention_ratio": 0.0, "hybrid_override_pattern": None}) is None
    assert all_but_every_nth(4, 5) == (True, True, True, False, True)
    assert all_but_every_nth("([1]*2+[0]*1)", 3) == (True, True, False)


def test_a_layer_is_known_by_its_tensors():
    assert symbol_of(["mixer.A_log", "mixer.in_proj.weight.z"]) == "M"
    assert symbol_of(["self_attention.linear_proj.weight", "self_attention.linear_kv_down_proj.weight"]) == "+"
    assert (
        symbol_of(["self_attention.core_attention.indexer.linear_wk.weight", "self_attention.linear_proj.weight"])
        == "D"
    )
    assert symbol_of(["pre_mlp_layernorm.weight", "mlp.shared_experts.linear_fc1.weight", "mlp.router.weight"]) == "E"
    assert symbol_of(["self_attention.linear_qkv.weight", "mlp.linear_fc1.weight"]) == ""


def with_args(name, **changes):
    reader = open_checkpoint(golden(name))
    reader.catalog = replace(reader.catalog, args=dict(reader.catalog.args) | changes)
    return reader


def refused(reader, out, match):
    with pytest.raises(DistckptError, match=match) as caught:
        plan_reshard(reader, out, Layout())
    assert caught.value.exit_code in (1, 4)
    assert not out.exists()
    return caught.value


@pytest.mark.parametrize("symbol", "M*-EG+D")
def test_a_pattern_that_the_tensors_refute(symbol, tmp_path):
    for at, true in enumerate("M*EM"):
        pattern = "M*EM"[:at] + symbol + "M*EM"[at + 1 :]
        if symbol != true:
            error = refused(
                with_args("hymoe16_full_tp2ep2", hybrid_override_pattern=pattern), tmp_path / "o", "contradicts"
            )
            assert any(
                f"layer_pattern {pattern}, but the tensors of its layers are M*EM" in line for line in error.details
            )


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("hymoe16_full_tp2ep2", {"hybrid_override_pattern": "M*XM"}),
        ("hymoeM_full_tp2ep2", {"hybrid_layer_pattern": "M*EM/Q"}),
        ("gdn16_dpr_tp2dp2", {"experimental_attention_variant": "kda"}),
    ],
)
def test_what_is_not_understood_is_named(name, change, tmp_path):
    reader = with_args(name, **change)
    (option,) = change
    error = refused(reader, tmp_path / "o", f"not understood: args.{option}")
    assert "safetensors" in error.hint
    facts = ModelArgs.from_catalog(reader.catalog)
    assert facts.contradictions(reader.catalog) == []
    with pytest.raises(RequestError, match="not understood"):
        check_layout(facts, Layout(), {n: t.shape for n, t in reader.catalog.weights.items()})


MIXER, NET = "decoder.layers.0.mixer.", "decoder.layers.0.self_attention."


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("hy16_dpr_tp2dp2", MIXER + n)
        for n in ("A_log", "in_proj.weight.B", "conv1d.bias.x", "norm.weight", "out_proj.weight")
    ]
    + [
        ("gdn16_dpr_tp2dp2", NET + n)
        for n in ("dt_bias", "in_proj.weight.beta", "conv1d.weight.key", "out_norm.weight")
    ],
)
def test_a_layer_that_lacks_a_tensor_or_has_one_of_another_shape(name, tensor, tmp_path):
    reader = open_checkpoint(golden(name))
    catalog, info = reader.catalog, reader.catalog.tensors[tensor]
    reader.catalog = replace(catalog, tensors={n: t for n, t in catalog.tensors.items() if n != tensor})
    suffix = tensor.partition(".layers.")[2].partition(".")[2]
    refused(reader, tmp_path / "o", "contradicts")
    assert any(text.endswith(suffix) for text in ModelArgs.from_catalog(reader.catalog).contradictions(reader.catalog))
    odd = replace(info, shape=(info.shape[0] + 2, *info.shape[1:]))
    reader.catalog = replace(catalog, tensors=dict(catalog.tensors) | {tensor: odd})
    refused(reader, tmp_path / "o", "contradicts")


# ---------------------------------------------------------------------- moved


@pytest.mark.parametrize(
    ("name", "layout", "optimizer"),
    [
        ("hymoe16_full_tp2ep2", {"tp": 1, "pp": 4, "ep": 4, "dp": 4}, "fully_reshardable"),
        ("hymoeM_full_tp2ep2", {"tp": 1, "pp": 2, "ep": 2, "dp": 2, "first_layers": 1}, "dp_reshardable"),
        ("hy16_dpr_tp2dp2", {"tp": 1, "pp": 2}, "dp_reshardable"),
        ("gdn16_dpr_tp2dp2", {"tp": 1, "pp": 2}, "fully_reshardable"),
    ],
)
def test_resharded_there_and_back(name, layout, optimizer, tmp_path):
    wanted = contents(golden(name))
    reshard(name, tmp_path / "there", layout, optimizer=optimizer)
    there = folder_of(tmp_path / "there")
    same(contents(there), wanted)
    reshard(there, tmp_path / "back", {"tp": 2, "dp": 2}, optimizer="dp_reshardable")
    back = folder_of(tmp_path / "back")
    same(contents(back), wanted)
    keys = open_checkpoint(there).catalog.tensors["decoder.layers.0." + _FIRST[name]].keys
    assert keys == ("decoder.layers.0." + _FIRST[name],)  # each layer has keys of its own
    if "hybrid_layer_pattern" in args_of(there):
        assert args_of(there)["hybrid_layer_pattern"] == "M|*EM"
        assert Layout.saved(open_checkpoint(there).catalog).pp_layout == "Et|tttL"
        assert args_of(there)["decoder_first_pipeline_num_layers"] is None
        assert args_of(back)["hybrid_layer_pattern"] == "M*EM"


_FIRST = dict.fromkeys(KINDS, "mixer.A_log") | {"gdn16_dpr_tp2dp2": "self_attention.A_log"}


@pytest.mark.parametrize("name", ["hymoeM_full_tp2ep2", "hy16_dpr_tp2dp2", "gdn16_dpr_tp2dp2"])
def test_written_in_the_old_format_and_read_again(name, tmp_path):
    reader = open_checkpoint(golden(name))
    run_conversion(plan_legacy(reader, tmp_path / "out", Layout(tp=2, pp=2), LegacyOptions()))
    written = open_checkpoint(tmp_path / "out")
    fused = {n for n in written.catalog.weights if ".in_proj." in n or ".conv1d." in n}
    assert fused == {n for n in reader.catalog.weights if ".in_proj." in n or ".conv1d." in n}
    same(contents(tmp_path / "out"), contents(golden(name)))
    states = [
        {o.name for o in r.catalog.objects.values() if o.name.endswith("_extra_state")} for r in (reader, written)
    ]
    assert {state for state in states[0] if "layers." in state and ".experts." not in state} <= states[1]


@pytest.mark.parametrize(
    ("name", "layout", "match"),
    [
        ("hymoe16_full_tp2ep2", {"pp": 2, "vpp": 2}, "no virtual pipeline"),
        ("hymoe16_full_tp2ep2", {"pp": 2, "pp_layout": "Ett|ttL"}, "no stages but even ones"),
        ("hymoe16_full_tp2ep2", {"pp": 3}, "cannot be spread evenly"),
        ("hy16_dpr_tp2dp2", {"tp": 3}, "cannot be split over --tp 3"),
    ],
)
def test_layouts_that_a_hybrid_cannot_have(name, layout, match, tmp_path):
    with pytest.raises(RequestError, match=match):
        plan_reshard(open_checkpoint(golden(name)), tmp_path / "o", Layout(**layout))


def test_groups_and_heads_limit_tp():
    for name, field, what in (
        ("hy16_dpr_tp2dp2", "mamba_num_groups", "Mamba groups"),
        ("gdn16_dpr_tp2dp2", "linear_num_key_heads", "key heads of the gated delta net"),
    ):
        catalog = open_checkpoint(golden(name)).catalog
        facts = ModelArgs.from_catalog(catalog)
        number = getattr(facts, field)
        shapes = {n: t.shape for n, t in catalog.weights.items() if ".layers.0." in n and "linear_" not in n}
        with pytest.raises(RequestError, match=f"{number} {what} cannot be split over --tp {number * 2}"):
            check_layout(facts, Layout(tp=number * 2), shapes)
