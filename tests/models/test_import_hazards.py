"""Folders that look healthy, and would be imported as another model than transformers loads."""

import json
import shlex
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import converters
from converters import Layout
from converters.errors import FormatError, RequestError
from converters.models import by_name
from converters.models.config_check import find_departures
from converters.models.quantized import _method
from converters.models.stated import stated
from converters.transformers_config import completed
from converters.write.import_hf import plan_import
from converters.write.write_plan import run_conversion
from harness import import_cases as cases

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def small_llama(tmp_path):
    """A llama of transformers, saved in fp32 in one file."""
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, vocab_size=37
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "src")
    return tmp_path / "src"


def with_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def test_a_single_file_beside_an_index_of_others_is_refused(small_llama, tmp_path):
    """transformers would load the single file, and we would the shards."""
    shutil.copy(small_llama / "model.safetensors", small_llama / "other.safetensors")
    weights = load_file(small_llama / "model.safetensors")
    index = {"weight_map": dict.fromkeys(weights, "other.safetensors")}
    (small_llama / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(FormatError, match="transformers takes the first"):
        plan_import(small_llama, tmp_path / "out", Layout())
    index = {"weight_map": dict.fromkeys(weights, "model.safetensors")}
    (small_llama / "model.safetensors.index.json").write_text(json.dumps(index))
    plan_import(small_llama, tmp_path / "out", Layout())


def test_attention_in_both_directions_is_refused(small_llama, tmp_path):
    with pytest.raises(RequestError, match="is_causal is False"):
        plan_import(with_config(small_llama, is_causal=False), tmp_path / "out", Layout())


def test_a_mistral_with_kinds_of_layers_is_a_ministral(small_llama, tmp_path):
    """As transformers' AutoConfig reads it: only some layers have the window."""
    kinds = ["full_attention", "sliding_attention"]
    folder = with_config(small_llama, model_type="mistral", sliding_window=8, layer_types=kinds)
    plan = plan_import(folder, tmp_path / "out", Layout())
    assert dict(plan.summary)["model"].startswith("ministral")
    run_conversion(plan)
    words = shlex.split((tmp_path / "out" / "megatron_args.txt").read_text())
    assert "--window-attn-skip-freq" in words


def test_verify_and_diff_read_a_mistral_with_kinds_of_layers_as_import_does(small_llama, tmp_path):
    kinds = ["full_attention", "sliding_attention"]
    folder = with_config(small_llama, model_type="mistral", sliding_window=8, layer_types=kinds)
    check = next(check for check in converters.verify(folder).checks if "config.json" in check.summary)
    assert "config.json of a ministral" in check.summary
    converters.import_hf(folder, tmp_path / "start")
    assert converters.diff(tmp_path / "start", folder).identical
    report = converters.diff(tmp_path / "start", with_config(folder, layer_types=kinds[::-1]))
    assert not report.identical
    assert "layer_types" in report.plan.matching.config[0]
    converters.export_hf(tmp_path / "start", tmp_path / "out", hf_config=with_config(folder, layer_types=kinds))


def test_verify_and_diff_read_the_second_ling_by_its_class(tmp_path):
    cases.save("bailing_moe_v2", tmp_path / "src")
    folder = with_config(tmp_path / "src", model_type="bailing_moe", architectures=["BailingMoeV2ForCausalLM"])
    assert any("config.json of a bailing_moe_v2" in check.summary for check in converters.verify(folder).checks)
    converters.import_hf(folder, tmp_path / "start")
    assert converters.diff(tmp_path / "start", folder).identical


def test_a_config_that_is_supplied_contradicts_the_export_by_the_same_keys(small_llama, tmp_path):
    window = with_config(small_llama, model_type="mistral", architectures=["MistralForCausalLM"], sliding_window=8)
    converters.import_hf(window, tmp_path / "start")
    options = {"hf_config": window, "dry_run": True}
    converters.export_hf(tmp_path / "start", tmp_path / "out", **options)
    with_config(window, layer_types=["sliding_attention", "sliding_attention"])
    converters.export_hf(tmp_path / "start", tmp_path / "out", **options)
    for wrong, text in (
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types ['full_attention', 'sliding_attention'], but",
        ),
        ({"is_causal": False}, "is_causal False"),
    ):
        before = (window / "config.json").read_text()
        with pytest.raises(RequestError) as refused:
            converters.export_hf(
                tmp_path / "start", tmp_path / "out", **{**options, "hf_config": with_config(window, **wrong)}
            )
        assert text in " ".join([refused.value.message, *refused.value.details])
        (window / "config.json").write_text(before)


def test_an_overflow_in_bf16_is_refused(small_llama, tmp_path):
    weights = load_file(small_llama / "model.safetensors")
    weights["model.layers.0.self_attn.q_proj.weight"][0, 0] = 3.4e38
    save_file(weights, small_llama / "model.safetensors", {"format": "pt"})
    with pytest.raises(RequestError, match="1 elements are too large for bfloat16"):
        converters.import_hf(small_llama, tmp_path / "out", dtype="bf16")
    assert not (tmp_path / "out").exists()
    converters.import_hf(small_llama, tmp_path / "out")


@pytest.mark.parametrize(("experts", "groups", "chosen"), [(8, 5, 2), (8, 8, 2), (4, 1, 9)])
def test_a_routing_that_no_router_can_do_is_refused(experts, groups, chosen):
    model = by_name("deepseek_v3")
    routing = {"n_routed_experts": experts, "n_group": groups, "topk_group": 1, "num_experts_per_tok": chosen}
    small = cases.LATENT | routing
    config = completed("deepseek_v3", {"model_type": "deepseek_v3", **small})
    assert "no router can do that" in " ".join(find_departures(model, stated(model, config, biased=False), config))


def test_weights_that_are_stored_in_another_basis_are_refused():
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor"}
    section = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"0": {"weights": weights}},
    }
    assert _method(section | {"sparsity_config": {"format": "dense"}, "transform_config": {}})
    for beside in (
        {"transform_config": {"config_groups": {"R1": {"type": "hadamard"}}}},
        {"sparsity_config": {"format": "2:4"}},
    ):
        with pytest.raises(RequestError, match=next(iter(beside))):
            _method(section | beside)
