"""Arguments that change what a model computes: each is in config.json, or refused by name; and how many rows are real."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from converters import models
from converters.catalog import model_section
from converters.errors import RequestError
from converters.formats import open_checkpoint
from converters.megatron.layout import Layout
from converters.megatron.layout_check import check_layout
from converters.megatron.model_args import ModelArgs
from converters.write.export import ExportOptions, choose_mapping
from distckpt_cli.app import main
from harness.checkpoints import golden

NEWER = {"yarn_beta_fast": None, "null_tokenizer_eod_id": None}  # arguments that 0.19 and 0.18 brought


def changed(name, **arguments):
    catalog = open_checkpoint(golden(name)).catalog
    return replace(catalog, args={**catalog.args, **arguments})


def config(name, **arguments):
    return choose_mapping(changed(name, **arguments), ExportOptions())[1].config


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        (
            "mixtral_adam_ep2tp2",
            {"moe_router_load_balancing_type": "sinkhorn"},
            "load_balancing_type = 'sinkhorn' changes",
        ),
        ("mixtral_adam_ep2tp2", {"moe_router_load_balancing_type": ["aux_loss", "sinkhorn"]}, "load_balancing_type"),
        ("mixtral_adam_ep2tp2", {"moe_router_load_balancing_type": "quantile_balancing"}, "load_balancing_type"),
        ("mixtral_adam_ep2tp2", {"moe_router_force_load_balancing": True}, "force_load_balancing = True changes"),
        ("mixtral_adam_ep2tp2", {"moe_router_force_biased": 0.5}, "force_biased = 0.5 changes"),
        ("mixtral_adam_ep2tp2", {"moe_mlp_glu_interleave_size": 32}, "glu_interleave_size = 32 changes"),
        ("qwen2_moe_weights_pp2ep2", {"moe_shared_expert_glu_interleave_size": 32}, "glu_interleave_size = 32 changes"),
        ("llama_adam_tp2pp2", {"spec": ["my.own.layers", "get_spec"]}, "spec = 'my.own.layers.get_spec' changes"),
        ("llama_adam_tp2pp2", {"rotary_base": [10000, 1000000]}, "rotary_base = [10000, 1000000] is not understood"),
        ("llama_adam_tp2pp2", {"window_size": 128}, "window_size = 128 is not understood"),
        ("llama_adam_tp2pp2", {"rope_scaling": {"rope_type": "su"}}, "rope_scaling = {'rope_type': 'su'} is not"),
        ("mixtral_adam_ep2tp2", {"moe_router_score_function": ["softmax"]}, "moe_router_score_function = ['softmax']"),
        ("llama_adam_tp2pp2", {**NEWER, "rotary_seq_len_interpolation_factor": 2, "use_rope_scaling": True}, "= 2.0"),
    ],
)
def test_what_changes_the_forward_pass_is_refused_by_name(name, arguments, said):
    with pytest.raises(RequestError) as error:
        config(name, **arguments)
    assert said in "\n".join([str(error.value), *error.value.details])


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("llama_adam_tp2pp2", {"spec": "local"}),
        ("llama_adam_tp2pp2", {"spec": ["megatron.core.models.gpt.gpt_layer_specs", "get_gpt_layer_local_spec"]}),
        ("mixtral_adam_ep2tp2", {"moe_router_load_balancing_type": ["seq_aux_loss", "global_aux_loss"]}),
        ("mixtral_adam_ep2tp2", {"moe_router_load_balancing_type": "none"}),
        ("llama_adam_tp2pp2", {"rotary_seq_len_interpolation_factor": 2}),  # which 0.16 does not pass on
    ],
)
def test_what_changes_nothing_is_taken(name, arguments):
    assert config(name, **arguments) == config(name)


@pytest.mark.parametrize("newer", [NEWER, {"use_legacy_models": True}], ids=["0.19", "legacy models"])
def test_an_interpolated_rotary_embedding_is_scaled_where_the_job_scaled_it(newer):
    """gpt_config_from_args of core_v0.19.0, language_model.py of legacy models; 0.16.1's gpt_builder leaves it out."""
    written = config("llama_adam_tp2pp2", **newer, rotary_seq_len_interpolation_factor=2)
    assert written["rope_parameters"] == {"rope_theta": 10000.0, "rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize(
    ("spec", "refused"),
    [
        ("megatron.bridge.models.gpt_provider.default_layer_spec", False),
        ("megatron.core.models.gpt.gpt_layer_specs.get_gpt_decoder_block_spec", False),
        ("megatron.bridge.models.ministral3.ministral3_provider.ministral_layer_spec", True),
    ],
)
def test_layers_of_somebodys_own_are_refused(spec, refused):
    catalog = open_checkpoint(golden("mb_qwen3")).catalog
    layers = {"transformer_layer_spec": {"_target_": spec, "_call_": False}}
    model = ModelArgs.from_catalog(replace(catalog, config={**model_section(catalog.config), **layers}))
    reasons = models.by_name("qwen3").unexpressible(model)
    assert [f"transformer_layer_spec = '{spec}' changes the forward pass"] * refused == reasons


@pytest.mark.parametrize(
    ("function", "activation"),
    [
        ({"_target_": "torch.nn.functional.gelu", "_call_": False}, "gelu"),
        ({"_target_": "torch.nn.functional.silu", "_partial_": True, "_args_": []}, "silu"),
        ({"_target_": "torch.nn.functional.gelu", "_partial_": True, "_args_": [], "approximate": "tanh"}, "gelu_tanh"),
        ({"_target_": "megatron.core.activations.fast_gelu", "_call_": False}, "gelu_tanh"),
        ({"_target_": "torch.nn.functional.silu", "_partial_": True, "beta": 2}, "silu with {'beta': 2}"),
    ],
)
def test_arguments_bound_to_an_activation_count(function, activation):
    catalog = open_checkpoint(golden("mb_qwen3")).catalog
    settings = {**model_section(catalog.config), "activation_func": function}
    assert ModelArgs.from_catalog(replace(catalog, config=settings)).activation == activation


# 128 rows: the padding of 120 or of 121 at tp 2, where rows are a multiple of 16; of 128 and of 112 only without one more
@pytest.mark.parametrize(
    ("arguments", "rows"),
    [
        ({"vocab_size": 120}, 120),
        ({"vocab_size": 128, **NEWER}, 128),
        ({"vocab_size": 112}, 113),
        ({"vocab_size": 112, "tokenizer_type": "NullMultimodalTokenizer", **NEWER}, 113),
        ({"vocab_size": 112, **NEWER}, 112),
        ({"vocab_size": 112, "tokenizer_type": "TikTokenizer"}, 112),
        ({"vocab_size": 112, "tokenizer_type": "HuggingFaceTokenizer"}, None),
        ({"vocab_size": 120, "tokenizer_type": "HuggingFaceTokenizer"}, 120),
    ],
)
def test_the_tokenizer_says_which_rows_are_padding(arguments, rows):
    """A NullTokenizer had one token more than --vocab-size until core 0.18; others do not look at the argument."""
    catalog = changed("llama_adam_tp2pp2", **arguments)
    assert ModelArgs.from_catalog(catalog).vocab_size == rows
    mapping = choose_mapping(catalog, ExportOptions())[1]
    assert mapping.targets["model.embed_tokens.weight"].shape == (rows or 128, 32)


def test_a_row_that_may_end_documents_is_not_left_out_in_silence(tmp_path, capsys):
    """120 tokens and 121 are padded alike: it may be the row of NullTokenizer's own token."""
    source = golden("llama_adam_tp2pp2")
    for arguments in (
        ("reshard", source, tmp_path / "a", "--tp", "1"),
        ("convert", source, tmp_path / "b", "--to", "legacy", "--tp", "1"),
        ("convert", source, tmp_path / "c.pt", "--to", "torch"),
        ("export-hf", source, tmp_path / "d"),
    ):
        assert main([*map(str, arguments), "--progress", "off"]) == 0
        said = capsys.readouterr()
        assert "row 120 of the embedding is left out as padding" in said.out + said.err, arguments
    assert main(["reshard", str(source), str(tmp_path / "e"), "--tp", "1", "--vocab-size", "121", "--json"]) == 0
    assert "row 120" not in json.dumps(json.loads(capsys.readouterr().out))


def test_interleaved_gates_keep_their_tensor_parallel_size():
    """Each part has its gates and ups in turn; gates of two parts are not the gates of one (moe/experts.py)."""
    catalog = changed("mixtral_adam_ep2tp2", moe_mlp_glu_interleave_size=8, expert_tensor_parallel_size=2)
    args, shapes = ModelArgs.from_catalog(catalog), {name: info.shape for name, info in catalog.weights.items()}
    check_layout(args, Layout(tp=2, ep=2, dp=2), shapes)
    with pytest.raises(RequestError, match="the rows of gate and up alternate"):
        check_layout(args, Layout(tp=1, ep=2, dp=2), shapes)
