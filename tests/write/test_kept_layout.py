"""Sizes of the target layout that are not given stay those of the source; what does not fit names the option to give."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from converters.commands import target_layout
from converters.formats import open_checkpoint
from converters.megatron.layout import Layout
from distckpt_cli.app import main
from harness.support import GOLDEN


@pytest.fixture(autouse=True)
def at_golden(monkeypatch):
    monkeypatch.chdir(GOLDEN)


def run(capsys, *words):
    code = main(list(map(str, words)))
    return code, *capsys.readouterr()


def planned(capsys, tmp_path, *words):
    code, out, err = run(capsys, *words[:2], tmp_path / "out", *words[2:], "-n", "--json")
    assert code == 0, err + out
    return json.loads(out)["layout"]


@pytest.mark.parametrize(
    ("words", "sizes"),
    [
        (["reshard", "llama_adam_tp2pp2", "--dp", "4"], {"tp": 2, "pp": 2, "dp": 4}),
        (["reshard", "llama_dpreshardable_tp2pp2dp2", "--tp", "1"], {"tp": 1, "pp": 2, "dp": 2}),
        (["reshard", "mixtral_adam_ep2tp2", "--tp", "1"], {"tp": 1, "ep": 2, "expert_tp": 1, "dp": 2}),
        (["reshard", "llama_adam_tp2pp2", "--optimizer", "none"], {"tp": 2, "pp": 2, "dp": 1}),
        (["reshard", "legacy_llama4_vpp2_tp2pp2", "--tp", "1"], {"tp": 1, "pp": 2, "vpp": 2}),
        (["reshard", "legacy_llama4_vpp2_tp2pp2", "--pp", "4"], {"tp": 2, "pp": 4, "vpp": None}),
        (["convert", "llama_adam_tp2pp2", "--to", "legacy"], {"tp": 2, "pp": 2}),
        (["convert", "legacy_mixtral_distopt_ep2pp2", "--to", "torch_dist"], {"tp": 1, "pp": 2, "ep": 2, "dp": 2}),
        (["convert", "nemo2_llama_weights_tp1", "--to", "torch_dist"], {"tp": 1, "pp": 1, "dp": 1}),
        (["import-hf", "hf_llama_safetensors"], {"tp": 1, "pp": 1, "ep": 1, "dp": 1}),
        (["import-hf", "hf_mixtral_bin", "--ep", "2"], {"tp": 1, "ep": 2, "dp": 2}),
    ],
)
def test_sizes_that_are_not_given_stay(words, sizes, capsys, tmp_path):
    layout = planned(capsys, tmp_path, *words)
    assert {name: layout[name] for name in sizes} == sizes


@pytest.mark.parametrize("name", ["hf_llama_safetensors", "vescale_llama_tp2pp2dp2", "fsdp2_llama_dp2"])
def test_a_source_that_no_megatron_job_saved_has_sizes_of_1(name):
    catalog = open_checkpoint(name).catalog
    assert target_layout(catalog, {}) == Layout()
    assert target_layout(catalog, {"ep": 4}) == Layout(ep=4, dp=4)


def test_where_no_argument_says_it_the_stored_pieces_do():
    catalog = open_checkpoint("llama_adam_tp2pp2").catalog
    bare = replace(catalog, args={}, config={})
    assert target_layout(bare, {"dp": 2}) == Layout(tp=2, pp=2, dp=2)  # the grid of the random states
    bare = replace(bare, objects={})
    assert target_layout(bare, {}).tp == 2  # the pieces of a row-parallel weight


@pytest.mark.parametrize("words", [[], ["--threads", "2"], ["-n"], ["--overwrite"]])
def test_nothing_asked_is_misuse_and_names_the_options(words, capsys, tmp_path):
    code, out, err = run(capsys, "reshard", "llama_adam_tp2pp2", tmp_path / "out", *words)
    assert (code, out) == (2, "")
    assert "reshard needs at least one change" in err
    for option in ("--tp", "--pp", "--vpp", "--ep", "--etp", "--cp", "--dp", "--pp-layout"):
        assert option in err


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (
            ["llama4_dpreshardable_pp4dp2", "--vpp", "2"],
            "--pp 4 is the source's value, as --pp was not given",
        ),
        (["mixtral_adam_ep2tp2", "--tp", "1", "--dp", "3"], "--ep 2 is the source's value"),
        (["llama_adam_tp2pp2", "--first-layers", "2"], "--pp 2 is the source's value"),
    ],
)
def test_a_kept_size_that_does_not_fit_is_named(words, kept, capsys, tmp_path):
    code, _, err = run(capsys, "reshard", words[0], tmp_path / "out", *words[1:])
    assert code == 4
    assert kept in err
    assert err.count("is the source's value") == 1
    code, _, err = run(capsys, "reshard", words[0], tmp_path / "out", *words[1:], *kept.split()[:2])
    assert (code, "source's value" in err) == (4, False)
