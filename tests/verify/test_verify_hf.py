"""Hugging Face folders: config.json and index against the tensors; no alarm on what transformers or an export wrote."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file

from distckpt_cli.app import main
from harness import model_cases as cases
from harness.checkpoints import GOLDENS, flip
from harness.support import GOLDEN
from harness.verify_cases import cli, found, text_of

if TYPE_CHECKING:
    from pathlib import Path

    from converters.verification.report import Report


def clean(folder: Path) -> Report:
    """Verifies a folder in which nothing is wrong, nor worth a look."""
    report = found(folder)
    assert [f.message for check in report.checks for f in check.findings] == []
    return report


def described(report: Report) -> bool:
    return "config.json of a" in report.check("structure").summary


# ---------------------------------------------------------------------- no false alarms


def tiny(family: str, *, tied: bool):
    """A config of transformers' own making, with its own defaults where sizes allow."""
    from transformers import AutoConfig

    sizes = {"vocab_size": 50, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 6}
    sizes |= {"intermediate_size": 40, "max_position_embeddings": 32, "tie_word_embeddings": tied, "pad_token_id": 0}
    sizes |= {} if family in ("gpt2", "gpt_neox") or family.startswith("deepseek") else {"num_key_value_heads": 2}
    sizes |= {"head_dim": 4} if family.startswith("qwen3") else {}
    if "moe" in family or family.startswith(("mixtral", "deepseek")):
        sizes |= {"num_experts_per_tok": 2, "moe_intermediate_size": 10, "shared_expert_intermediate_size": 14}
        sizes |= {"shared_intermediate_size": 14, "num_local_experts": 4}
        sizes |= {"num_experts": 4} if family.startswith("qwen") else {}
    if family.startswith("deepseek"):
        sizes |= {"q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 4, "qk_rope_head_dim": 6, "v_head_dim": 5}
        sizes |= {
            "n_routed_experts": 4,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "n_group": 2,
            "topk_group": 1,
        }
        sizes |= {"num_key_value_heads": 6, "intermediate_size": 40}
    return AutoConfig.for_model(family, **sizes)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", cases.FAMILIES)
def test_what_transformers_saves_is_described(family, tied, tmp_path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(tiny(family, tied=tied))
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    report = clean(tmp_path)
    assert described(report)
    assert "transformers builds the same model of it" in report.check("structure").summary


@pytest.mark.parametrize("head", ["AutoModel", "AutoModelForSequenceClassification"])
def test_models_without_an_output_layer(head, tmp_path):
    import transformers

    getattr(transformers, head).from_config(tiny("qwen2", tied=False)).save_pretrained(tmp_path)
    report = found(tmp_path)
    assert report.good, text_of(report)
    assert described(report)
    warnings = [f.message for f in report.check("structure").findings]
    assert warnings == ([] if head == "AutoModel" else ["score.weight does not belong to a qwen2"])


def test_files_of_torch_too(tmp_path):
    """pytorch_model.bin, tied, its two names one storage; GPT-2's own files have no prefix and store buffers."""
    from transformers import AutoModelForCausalLM

    config = tiny("gpt2", tied=True)
    state = AutoModelForCausalLM.from_config(config).state_dict()
    config.save_pretrained(tmp_path)
    torch.save(state, tmp_path / "pytorch_model.bin")
    assert described(clean(tmp_path))
    bare = {name.removeprefix("transformer."): value for name, value in state.items() if name != "lm_head.weight"}
    bare |= {f"h.{n}.attn.bias": torch.ones(1, 1, 32, 32) for n in range(3)}
    torch.save(bare, tmp_path / "pytorch_model.bin")
    assert described(clean(tmp_path))


@pytest.mark.parametrize(("name", "config"), [(name, rest[0]) for name, rest in GOLDENS.items()])
def test_every_export_is_described(name, config, tmp_path):
    words = ["export-hf", str(GOLDEN / name), str(tmp_path / "hf"), "--progress", "off", "--quiet"]
    assert main([*words, "--max-shard-size", "20KB"]) == 0
    assert described(clean(tmp_path / "hf")), config


@pytest.mark.parametrize("name", ["hf_llama_safetensors", "hf_mixtral_bin", "hf_gpt2_bin"])
def test_goldens(name):
    clean(GOLDEN / name)


# ---------------------------------------------------------------------- what is wrong with a folder


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Exports by family: of a golden, in several shards."""
    made: dict[str, Path] = {}

    def export(golden: str) -> Path:
        if golden not in made:
            made[golden] = tmp_path_factory.mktemp("hf") / golden
            words = [
                str(GOLDEN / golden),
                str(made[golden]),
                "--max-shard-size",
                "20KB",
                "--progress",
                "off",
                "--quiet",
            ]
            assert main(["export-hf", *words]) == 0
        return made[golden]

    return export


def edit(folder: Path, **changes) -> None:
    document = json.loads((folder / "config.json").read_text())
    for name, value in changes.items():
        if value is None:
            document.pop(name, None)
        else:
            document[name] = value
    (folder / "config.json").write_text(json.dumps(document))


def edit_tensors(folder: Path, change) -> None:
    """Rewrites the shard of what `change` names; its result replaces it, and the index follows."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    paths = sorted(folder.glob("*.safetensors"))
    for path in paths:
        held = load_file(path)
        kept = change(dict(held))
        save_file(kept, path, {"format": "pt"})
        for name in held.keys() - kept.keys():
            del index["weight_map"][name]
        index["weight_map"] |= dict.fromkeys(kept, path.name)
    index["metadata"]["total_size"] = sum(t.nbytes for path in paths for t in load_file(path).values())
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def without(*names: str):
    return lambda held: {name: value for name, value in held.items() if name not in names}


def beside(name: str, new: str, value):
    return lambda held: held | ({new: value} if name in held else {})


LLAMA, MIXTRAL, QWEN3, DEEPSEEK = (
    "llama_adam_tp2pp2",
    "mixtral_adam_ep2tp2",
    "qwen3_adam_tp2",
    "deepseek_v3_weights_pp2ep2",
)
GPT = "gpt_adam_tp2pp2"
LAYER = "model.layers.{0..1}."

CONFIGS = [
    (LLAMA, {"num_hidden_layers": 3}, "config.json says num_hidden_layers 3, the tensors are those of 2 layers"),
    (LLAMA, {"num_hidden_layers": 1}, "config.json says num_hidden_layers 1, the tensors are those of 2 layers"),
    (LLAMA, {"num_hidden_layers": 10**9}, "config.json says num_hidden_layers 1,000,000,000, which is too large"),
    (LLAMA, {"hidden_size": 64}, "config.json says hidden_size 64, the shapes are those of 32: "),
    (LLAMA, {"vocab_size": 128}, "config.json says vocab_size 128, the shapes are those of 120: "),
    (LLAMA, {"intermediate_size": 64}, "config.json says intermediate_size 64, the shapes are those of 48: "),
    (LLAMA, {"num_key_value_heads": 4}, f"{LAYER}self_attn.k_proj.weight is [16, 32], by config.json [32, 32]"),
    (LLAMA, {"num_attention_heads": 8}, "config.json says num_attention_heads 8, the shapes are those of 4: "),
    (LLAMA, {"head_dim": 16}, "config.json says head_dim 16, the shapes are those of 8: "),
    (LLAMA, {"num_key_value_heads": 3}, "config.json says 4 heads, which 3 query groups cannot share"),
    (LLAMA, {"attention_bias": True, "mlp_bias": True}, f"{LAYER}self_attn.o_proj.bias are missing"),
    (LLAMA, {"model_type": "qwen2"}, f"{LAYER}self_attn.q_proj.bias are missing: config.json needs them"),
    (LLAMA, {"model_type": "qwen3"}, f"{LAYER}self_attn.q_norm.weight are missing"),
    (LLAMA, {"hidden_size": "32"}, "config.json says hidden_size '32', which is not a size"),
    (LLAMA, {"hidden_size": None}, "config.json does not say hidden_size"),
    (LLAMA, {"num_attention_heads": 1 << 30}, "which is too large"),
    (LLAMA, {"tie_word_embeddings": True}, "lm_head.weight: "),
    (QWEN3, {"model_type": "qwen2"}, f"{LAYER}self_attn.q_norm.weight do not belong to config.json's model"),
    (MIXTRAL, {"num_local_experts": 8}, "config.json says num_local_experts 8, the tensors are those of 4 experts"),
    (MIXTRAL, {"num_local_experts": 2}, "config.json says num_local_experts 2, the tensors are those of 4 experts"),
    (MIXTRAL, {"num_local_experts": 10**6}, "which is too large"),
    (MIXTRAL, {"intermediate_size": 96}, "config.json says intermediate_size 96, the shapes are those of 24: "),
    (DEEPSEEK, {"kv_lora_rank": 20}, "by config.json"),
    (DEEPSEEK, {"first_k_dense_replace": 0}, "model.layers.0.mlp.gate.weight is missing"),
    (DEEPSEEK, {"n_shared_experts": 3}, "mlp.shared_experts.down_proj.weight is"),
    (DEEPSEEK, {"model_type": "deepseek_v2"}, "e_score_correction_bias does not belong"),
    (GPT, {"n_positions": 16}, "config.json says n_positions 16, the shapes are those of "),
    (GPT, {"n_embd": 16}, "config.json says n_embd 16, the shapes are those of 32: "),
]


@pytest.mark.parametrize(
    ("golden", "changes", "words"), CONFIGS, ids=[f"{g[:5]}-{next(iter(c.items()))}" for g, c, _ in CONFIGS]
)
def test_a_config_of_another_model(golden, changes, words, exported, tmp_path):
    copy = tmp_path / "hf"
    shutil.copytree(exported(golden), copy)
    edit(copy, **changes)
    for quick in (True, False):
        if not quick or "tie_word_embeddings" not in changes:
            report = found(copy, quick=quick)
            assert not report.good
            text = text_of(report)
            assert words in text
    assert cli(copy)[0] == 1


TENSORS = [
    (LLAMA, without("lm_head.weight"), "lm_head.weight is missing: config.json needs it"),
    (LLAMA, without("model.layers.1.mlp.up_proj.weight"), "model.layers.1.mlp.up_proj.weight is missing"),
    (LLAMA, without("model.norm.weight"), "model.norm.weight is missing"),
    (
        LLAMA,
        beside("model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.q_proj.bias", torch.ones(32)),
        "model.layers.0.self_attn.q_proj.bias does not belong to config.json's model",
    ),
    (
        LLAMA,
        lambda held: {n: v[:4].clone() if n == "model.layers.1.input_layernorm.weight" else v for n, v in held.items()},
        "model.layers.1.input_layernorm.weight is [4], by config.json [32]",
    ),
    (
        LLAMA,  # the halves of one tensor-parallel rank
        lambda held: {n: v[: len(v) // 2].clone() if "gate_proj" in n else v for n, v in held.items()},
        f"{LAYER}mlp.gate_proj.weight is [24, 32], by config.json [48, 32]",
    ),
    (
        MIXTRAL,
        without("model.layers.1.block_sparse_moe.experts.2.w3.weight"),
        "experts.2.w3.weight is missing",
    ),
    (
        QWEN3,
        beside("model.norm.weight", "model.layers.0.self_attn.q_proj.lora_A.weight", torch.ones(4, 32)),
        "model.layers.0.self_attn.q_proj.lora_A.weight does not belong",
    ),
]


@pytest.mark.parametrize(("golden", "change", "words"), TENSORS, ids=[words[:60] for *_, words in TENSORS])
def test_tensors_of_another_model(golden, change, words, exported, tmp_path):
    copy = tmp_path / "hf"
    shutil.copytree(exported(golden), copy)
    edit_tensors(copy, change)
    report = found(copy)
    assert words in text_of(report)
    assert report.affected


def test_a_tensor_outside_of_the_layers_is_worth_a_look(exported, tmp_path):
    copy = tmp_path / "hf"
    shutil.copytree(exported(LLAMA), copy)
    edit_tensors(copy, beside("model.norm.weight", "value_head.weight", torch.ones(1, 32)))
    report = found(copy)
    assert report.good
    assert [f.message for f in report.check("structure").findings] == ["value_head.weight does not belong to a llama"]


@pytest.mark.parametrize("tied", [True, False])
def test_an_output_layer_stored_although_tied(tied, exported, tmp_path):
    copy = tmp_path / "hf"
    shutil.copytree(exported("qwen2_weights_tp2pp2"), copy)
    words = next(
        load_file(p)["model.embed_tokens.weight"]
        for p in copy.glob("*.safetensors")
        if "embed" in str(load_file(p).keys())
    )
    edit(copy, tie_word_embeddings=True)
    head = words.clone()
    head[7, 3] += 0 if tied else 1
    edit_tensors(copy, lambda held: {n: v for n, v in held.items() if n != "lm_head.weight"})
    edit_tensors(copy, beside("model.norm.weight", "lm_head.weight", head))
    report = found(copy)
    assert report.good is tied
    assert tied or "lm_head.weight: 1 of 3,840 elements, first at [7, 3], differ from model.embed_tokens" in text_of(
        report
    )


def test_a_strange_layer_costs_nothing(exported, tmp_path):
    copy = tmp_path / "hf"
    shutil.copytree(exported(LLAMA), copy)
    edit_tensors(copy, beside("model.norm.weight", "model.layers.999999.mlp.up_proj.weight", torch.ones(48, 32)))
    assert "no model has so many layers or experts" in text_of(found(copy, quick=True))


# ---------------------------------------------------------------------- what is no error


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "bert"}, "config.json was not compared: model_type bert is not known"),
        ({"model_type": None}, "model_type None is not known"),
        ({"quantization_config": {"quant_method": "fp8"}}, "config.json was not compared: the weights are quantized"),
    ],
)
def test_what_is_not_known_is_a_note(changes, words, exported, tmp_path):
    copy = tmp_path / "hf"
    shutil.copytree(exported(LLAMA), copy)
    edit(copy, **changes)
    report = clean(copy)
    assert words in report.check("structure").summary
    code, out, _ = cli(copy)
    assert code == 0
    assert words in " ".join(out.split())


def test_a_variant_is_compared_with_what_transformers_builds(exported, tmp_path):
    """Llama with biases has no table here; transformers knows it."""
    from transformers import AutoModelForCausalLM

    config = tiny("llama", tied=False)
    config.mlp_bias = True
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "variant")
    summary = clean(tmp_path / "variant").check("structure").summary
    assert "an unknown variant of llama" in summary
    assert "transformers builds the same model of it" in summary
    copy = tmp_path / "hf"
    shutil.copytree(exported(LLAMA), copy)
    edit(copy, mlp_bias=True)
    assert "model.layers.0.mlp.gate_proj.bias of [48] is missing" in text_of(found(copy))


def test_a_configuration_of_very_many_layers_is_not_built(exported, tmp_path):
    copy = tmp_path / "hf"
    shutil.copytree(exported(LLAMA), copy)
    edit(copy, mlp_bias=True, num_hidden_layers=100)
    assert "transformers" not in clean(copy).check("structure").summary


def test_no_config_at_all(exported, tmp_path):
    copy = tmp_path / "hf"
    shutil.copytree(exported(LLAMA), copy)
    (copy / "config.json").unlink()
    assert "no config.json to compare them with" in clean(copy).check("structure").summary
    file = next(copy.glob("*.safetensors"))
    assert found(file).good  # a file by itself is no folder


# ---------------------------------------------------------------------- the index


def index(folder: Path, change) -> None:
    document = json.loads((folder / "model.safetensors.index.json").read_text())
    change(document)
    (folder / "model.safetensors.index.json").write_text(json.dumps(document))


def test_an_index_that_points_to_the_wrong_shard(exported, tmp_path):
    copy = tmp_path / "hf"
    shutil.copytree(exported(LLAMA), copy)
    names = sorted(path.name for path in copy.glob("*.safetensors"))
    index(copy, lambda d: d["weight_map"].update({"model.norm.weight": names[0]}))
    code, out, err = cli(copy)
    assert code == 1
    assert f"{names[0]} lacks 1 tensor that model.safetensors.index.json promises" in out + err
    assert "model.norm.weight" in out + err


def test_a_lost_shard(exported, tmp_path):
    copy = tmp_path / "hf"
    shutil.copytree(exported(LLAMA), copy)
    sorted(copy.glob("*.safetensors"))[1].unlink()
    code, out, err = cli(copy)
    assert code == 1
    assert "shards: model-00002" in out + err


def test_totals_and_shards_of_another_save(exported, tmp_path):
    copy = tmp_path / "hf"
    shutil.copytree(exported(LLAMA), copy)
    index(copy, lambda d: d["metadata"].update(total_size=1234))
    first = next(copy.glob("*.safetensors"))
    stale = ["model-00009-of-00009.safetensors", "model-old.safetensors", "pytorch_model.bin"]
    for name in (*stale, "training_args.bin"):
        shutil.copy(first, copy / name)
    report = found(copy)
    assert report.good
    texts = [f.message for f in report.check("structure").findings]
    said = " is not read: no index names it; another save or format may have left it"
    assert [text.removesuffix(said) for text in texts if text.endswith(said)] == stale
    assert any(
        text.startswith("model.safetensors.index.json says total_size 1,234, the tensors have ") for text in texts
    )


def test_flips_in_safetensors_need_a_manifest(exported, tmp_path):
    """The control of what is said about formats without checksums."""
    copy = tmp_path / "hf"
    shutil.copytree(exported(LLAMA), copy)
    assert cli(copy, "--write-manifest")[0] == 0
    path = sorted(copy.glob("*.safetensors"))[0]
    flip(path, path.stat().st_size - 9)
    assert "is not the file that distckpt-manifest.json lists" in cli(copy)[1]
    (copy / "distckpt-manifest.json").unlink()
    code, out, _ = cli(copy)
    assert code == 0
    assert "not checkable" in out


# ---------------------------------------------------------------------- tensors in each other's places


def exchanged(one: str, other: str):
    def change(held):
        if one in held and other in held:
            held[one], held[other] = held[other].clone(), held[one].clone()
        return held

    return change


def test_q_and_k_exchanged(exported, tmp_path):
    """Of different widths, as with query groups, the shapes tell; of one width nothing does."""
    copy = tmp_path / "hf"
    shutil.copytree(exported(LLAMA), copy)
    layer = "model.layers.0.self_attn."
    held = {n: v for path in copy.glob("*.safetensors") for n, v in load_file(path).items()}
    for path in copy.glob("*.safetensors"):
        path.unlink()
    (copy / "model.safetensors.index.json").unlink()
    save_file(exchanged(f"{layer}q_proj.weight", f"{layer}k_proj.weight")(dict(held)), copy / "model.safetensors")
    assert f"{layer}q_proj.weight is [16, 32], by config.json [32, 32]" in text_of(found(copy))
    save_file(exchanged(f"{layer}k_proj.weight", f"{layer}v_proj.weight")(dict(held)), copy / "model.safetensors")
    assert found(copy, values=True).good
    save_file(
        exchanged("model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.down_proj.weight")(dict(held)),
        copy / "model.safetensors",
    )
    assert "model.layers.0.mlp.gate_proj.weight is [32, 48], by config.json [48, 32]" in text_of(found(copy))
