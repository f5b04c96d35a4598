"""Imports for Megatron-Bridge: the tensors and options that Bridge's own import stores; read back; refused where it must be.

`golden/bridge_imports.json` was made by Megatron-Bridge 067f987d (`AutoBridge.import_ckpt`, on a CPU, with a stand-in for
TransformerEngine) of the folders that `import_cases` makes: for each tensor the first 16 digits of its SHA-256, and the
options of the model that an import of ours writes, too.
"""

import hashlib
import json
import re
import shutil
from dataclasses import replace

import pytest
import torch
import yaml

from converters import Layout, convert, diff, models
from converters.errors import RequestError
from converters.formats import open_checkpoint
from converters.models import gemma, gemma2, rules
from converters.write.export import plan_export
from converters.write.import_hf import plan_import
from converters.write.import_start import ImportOptions
from converters.write.reshard import ReshardOptions, plan_reshard
from converters.write.write_plan import run_conversion
from harness import import_cases as cases
from harness.imports import exported, imported, megatron_bits, same, tensors, wrong_places
from harness.support import GOLDEN

pytestmark = pytest.mark.filterwarnings("ignore")
BRIDGE = json.loads((GOLDEN / "bridge_imports.json").read_text())
# transformers 5 has made `rotary_dim` a part of rope_parameters, which Bridge does not look at
UNLIKE = {"minimax_m2": {"rotary_percent": 0.4, "moe_router_dtype": "fp32"}}


@pytest.fixture(scope="module")
def hf(tmp_path_factory):
    root = tmp_path_factory.mktemp("hf")

    def make(name):
        if not (root / name).exists():
            cases.save(name, root / name)
        return root / name

    return make


def configured(root):
    return yaml.safe_load(next(root.glob("iter_*/run_config.yaml")).read_text())


@pytest.mark.parametrize("name", BRIDGE)
def test_bridge_itself_stores_the_same(name, hf, tmp_path):
    imported(hf(name), tmp_path / "job", to="megatron-bridge")
    digests = {
        n: hashlib.sha256(bits.tobytes()).hexdigest()[:16] for n, bits in megatron_bits(tmp_path / "job").items()
    }
    assert digests == BRIDGE[name]["tensors"]
    model = configured(tmp_path / "job")["model"]
    assert {key: model[key] for key in BRIDGE[name]["model"]} == BRIDGE[name]["model"] | UNLIKE.get(name, {})


def test_parts_of_one_projection_share_its_extra_state(hf, tmp_path):
    """A real job asks for it, and finds none where each part has a key of its own."""
    imported(hf("falcon_h1"), tmp_path / "job")
    objects = {info.name for info in open_checkpoint(tmp_path / "job").catalog.objects.values()}
    assert {f"decoder.layers.{n}.mamba_mixer.{p}_proj._extra_state" for n in range(3) for p in ("in", "out")} <= objects


def test_a_mixer_beside_attention_is_one_projection_in_a_legacy_file(hf, tmp_path):
    imported(hf("falcon_h1"), tmp_path / "job")
    source = open_checkpoint(tmp_path / "job")
    convert(tmp_path / "job", tmp_path / "old", to="legacy")
    comparison = diff(tmp_path / "old", tmp_path / "job")
    assert {tensor.status for tensor in comparison.tensors} == {"identical"}
    assert len(comparison.tensors) == len(source.catalog.weights)


def test_falcon_h1_is_read_as_its_provider_says(hf, tmp_path):
    imported(hf("falcon_h1_norm"), tmp_path / "job")
    path = tmp_path / "job" / "iter_0000000" / "run_config.yaml"
    text = path.read_text()
    model = yaml.safe_load(text)["model"]
    own = cases.settings("falcon_h1_norm")
    assert {name: model[name] for name in own if name.endswith(("multiplier", "multipliers"))} == {
        name: value for name, value in own.items() if name.endswith(("multiplier", "multipliers"))
    }
    stack = "megatron.bridge.models.falcon_h1.falconh1_provider.other"
    changes = {"d_conv": 3, "use_mlp": False, "falconh1_ratio": 0.5, "hybrid_override_pattern": "PM*", "rmsnorm": False}
    for name, value in (*changes.items(), ("falconh1_stack_spec", {"_target_": stack}), ("mlp_multipliers", [1.0])):
        path.write_text(yaml.safe_dump(yaml.safe_load(text) | {"model": model | {name: value}}))
        with pytest.raises(RequestError):
            plan_export(open_checkpoint(tmp_path / "job"), tmp_path / "back")


def test_progress_is_that_of_a_job_that_has_not_begun(hf, tmp_path):
    imported(hf("qwen3"), tmp_path / "job", to="megatron-bridge")
    one = torch.load(tmp_path / "job" / "latest_train_state.pt", weights_only=True)
    other = torch.load(GOLDEN / "mb_qwen3" / "latest_train_state.pt", weights_only=True)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name].to(one[name].dtype)) and not one[name].shape for name in one)
    assert (tmp_path / "job" / "latest_checkpointed_iteration.txt").read_text() == "0"
    assert not (tmp_path / "job" / "megatron_args.txt").exists()
    assert open_checkpoint(tmp_path / "job").catalog.args == {}
    imported(hf("qwen3"), tmp_path / "later", to="megatron-bridge", iteration=7)
    assert torch.load(tmp_path / "later" / "iter_0000007" / "train_state.pt", weights_only=True)["step"] == 7


LAYOUTS = [
    ("gemma2", Layout(tp=2, pp=3)),
    ("gemma3_text_mixed", Layout(tp=4)),
    ("falcon_h1_norm", Layout(tp=2, pp=3)),
    ("olmoe", Layout(tp=2, ep=3, etp=1, dp=3)),
    ("minimax_m2", Layout(tp=4, ep=2, dp=2)),
]


@pytest.mark.parametrize(("name", "layout"), LAYOUTS)
def test_any_layout(name, layout, hf, tmp_path):
    imported(hf(name), tmp_path / "job", layout)
    model = configured(tmp_path / "job")["model"]
    assert (model["tensor_model_parallel_size"], model["pipeline_model_parallel_size"]) == (layout.tp, layout.pp)
    assert model["should_pad_vocab"]  # 251 rows
    assert same(exported(tmp_path / "job", tmp_path / "back"), tensors(hf(name))) == []


def test_norms_over_all_heads_are_divided_as_the_family_does(hf, tmp_path):
    for name, parts in (("olmoe", 1), ("minimax_m2", 2)):
        imported(hf(name), tmp_path / name, Layout(tp=2))
        info = open_checkpoint(tmp_path / name).catalog.weights["decoder.layers.1.self_attention.q_layernorm.weight"]
        assert len(list(info.parts[0].chunks())) == parts


def test_a_window_of_other_layers_is_kept(hf, tmp_path):
    imported(hf("gemma3_text_mixed"), tmp_path / "job")
    model = configured(tmp_path / "job")["model"]
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert (model["interleaved_attn_pattern"], model["rope_scaling_factor"]) == (kinds, 8.0)
    assert model["rotary_base"] == [20000.0, 1000000.0]
    source = shutil.copytree(hf("gemma2"), tmp_path / "hf")
    cases.rewrite_config(source, layer_types=kinds[1:] + kinds[1:2])
    with pytest.raises(RequestError, match="layer_types"):
        plan_import(source, tmp_path / "job2", Layout())


def norms_exchanged():
    """The norm behind attention for the one before the MLP."""
    *rest, after, before, last = gemma.SANDWICH_ATTENTION
    return (*rest, rules.Rename(after.target, before.sources), rules.Rename(before.target, after.sources), last)


def test_one_mutated_rule_is_seen(hf, tmp_path, monkeypatch):
    wrong = replace(gemma2.MODEL, layer=norms_exchanged())
    tables = tuple(wrong if model is gemma2.MODEL else model for model in models.ARCHITECTURES)
    monkeypatch.setattr(models, "ARCHITECTURES", tables)
    imported(hf("gemma2"), tmp_path / "job")
    assert wrong_places("gemma2", hf("gemma2"), tmp_path / "job") != []


def test_the_tokenizer_lies_within_the_iteration(hf, tmp_path):
    source = shutil.copytree(hf("gemma"), tmp_path / "hf")
    (source / "tokenizer.json").write_text("{}")
    plan = imported(source, tmp_path / "job")
    assert {p.name for p in (tmp_path / "job" / "iter_0000000" / "tokenizer").iterdir()} >= {"tokenizer.json"}
    told = configured(tmp_path / "job")["tokenizer"]
    assert told["tokenizer_model"] == str(tmp_path / "job" / "iter_0000000" / "tokenizer")
    assert any("Megatron-LM's arguments cannot express it" in note for note in plan.notes)
    exported(tmp_path / "job", tmp_path / "back")
    assert (tmp_path / "back" / "tokenizer.json").read_text() == "{}"


def test_what_megatron_lm_has_no_words_for_goes_to_bridge(hf, tmp_path):
    """Llama 3.2 scales by 32, Megatron-LM by 8 only."""
    source = tmp_path / "hf"
    cases.save("llama31", source, rope_scaling=cases.LLAMA3 | {"factor": 32.0})
    with pytest.raises(RequestError, match="factor 32") as error:
        plan_import(source, tmp_path / "job", Layout())
    assert "--to megatron-bridge" in error.value.hint
    imported(source, tmp_path / "job", to="megatron-bridge")
    assert configured(tmp_path / "job")["model"]["rope_scaling_factor"] == 32.0
    assert diff(source, tmp_path / "job").identical


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("gemma", {"to": "legacy"}, "for Megatron-Bridge only"),
        ("deepseek_v3", {"to": "megatron-bridge"}, "latent attention"),
        ("qwen2_moe", {"to": "megatron-bridge"}, "in all layers or in none"),
        ("qwen3", {"to": "nemo"}, "not imported to nemo"),
        ("gpt_neox", {"to": "megatron-bridge"}, "activation gelu"),
    ],
)
def test_what_is_not_written_for_bridge(name, options, text, hf, tmp_path):
    with pytest.raises(RequestError) as error:
        plan_import(hf(name), tmp_path / "job", Layout(), ImportOptions(**options))
    assert text in f"{error.value.message} {error.value.details}"


@pytest.mark.parametrize("name", ["gemma3_text", "olmoe", "exaone4"])
def test_arguments_of_megatron_lm_say_which_model_it_is(name, hf, tmp_path):
    """Megatron-LM cannot build it; what is made of the folder for it is still known for what it is."""
    imported(hf(name), tmp_path / "job")
    plan = plan_reshard(
        open_checkpoint(tmp_path / "job"), tmp_path / "lm", Layout(), ReshardOptions(framework="megatron-lm")
    )
    assert any("Megatron-LM has no arguments for this model" in note for note in plan.notes)
    run_conversion(plan)
    (tmp_path / "lm" / "iter_0000000" / "run_config.yaml").unlink()
    if name == "gemma3_text":  # no argument says gated tanh GELU
        with pytest.raises(RequestError, match="no known architecture"):
            exported(tmp_path / "lm", tmp_path / "back")
        return
    assert same(exported(tmp_path / "lm", tmp_path / "back"), tensors(hf(name))) == []


@pytest.mark.parametrize(
    "change",
    [
        ("gemma2_provider.Gemma2ModelProvider", "gemma4_provider.Gemma4ModelProvider"),
        ("gemma2_provider.gemma2_layer_spec", "gemma3_provider.gemma3_layer_spec"),
        ("attn_logit_softcapping: 50.0", "attn_logit_softcapping: 50.0\n  softmax_type: learnable"),
    ],
)
def test_a_provider_that_is_not_known_is_not_exported(change, hf, tmp_path):
    imported(hf("gemma2"), tmp_path / "job")
    path = tmp_path / "job" / "iter_0000000" / "run_config.yaml"
    text = path.read_text()
    assert change[0] in text
    path.write_text(text.replace(*change))
    with pytest.raises(RequestError) as error:
        plan_export(open_checkpoint(tmp_path / "job"), tmp_path / "back")
    assert re.search(
        "bridge_family|transformer_layer_spec|softmax_type", f"{error.value.message} {error.value.details}"
    )
