"""`diff` of Megatron checkpoints and Hugging Face folders, through the model's table."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from converters.comparison.compare import DiffOptions, plan_diff, run_diff
from converters.comparison.pairs import Side
from converters.dtypes import from_option
from converters.formats import open_checkpoint
from converters.models import ARCHITECTURES, llama
from converters.models.rules import GateUp
from converters.write.export import ExportOptions, plan_export
from converters.write.write_plan import run_conversion
from harness.checkpoints import GOLDENS, golden
from harness.diff_cases import set_element, values
from harness.support import GOLDEN

FAMILIES = {arch: name for name, (_, arch) in reversed(GOLDENS.items())}
LLAMA = "llama_adam_tp2pp2"


def diff(a, b, **options):
    return run_diff(plan_diff(open_checkpoint(a), open_checkpoint(b), DiffOptions(**options)))


def differing(report):
    return {t.name: t.values for t in report.tensors if t.differs}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Exports a golden checkpoint, each with its options once."""
    known = {}

    def export(name, **options):
        key = name, repr(options)
        if key not in known:
            known[key] = tmp_path_factory.mktemp("hf") / "out"
            run_conversion(plan_export(open_checkpoint(golden(name)), known[key], ExportOptions(**options)))
        return known[key]

    return export


@pytest.mark.parametrize("name", [*FAMILIES.values(), "llama_ln1p_weights_tp2pp2", "qwen3_hd16_weights_tp2pp2"])
def test_an_export_is_identical(name, exported):
    folder = exported(name)
    report = diff(golden(name), folder)
    assert report.identical
    assert {t.name for t in report.tensors} == set(open_checkpoint(folder).catalog.tensors)
    weights = open_checkpoint(golden(name)).catalog.weights
    assert {source for t in report.tensors for source in t.pair.a} == set(weights)
    assert {reason for n, reason in report.plan.matching.skipped.items() if n in weights} == set()
    assert diff(folder, golden(name)).identical


@pytest.mark.parametrize(
    ("name", "tensor", "index", "source", "source_index"),
    [
        # 2 query groups of 2 heads of 8 rows, a key and a value each: the second group's key begins at row 32 + 16
        (
            LLAMA,
            "model.layers.1.self_attn.k_proj.weight",
            (9, 4),
            "decoder.layers.1.self_attention.linear_qkv.weight",
            (49, 4),
        ),
        (LLAMA, "model.layers.0.mlp.up_proj.weight", (5, 7), "decoder.layers.0.mlp.linear_fc1.weight", (53, 7)),
        # transposed
        (
            "gpt_adam_tp2pp2",
            "transformer.h.0.mlp.c_proj.weight",
            (50, 3),
            "decoder.layers.0.mlp.linear_fc2.weight",
            (3, 50),
        ),
        # experts stacked in one tensor
        (
            "moe_shared_weights_ep2pp2",
            "model.layers.1.block_sparse_moe.output_linear.weight",
            (2, 6, 1),
            "decoder.layers.1.mlp.experts.2.linear_fc2.weight",
            (6, 1),
        ),
        # stored as gamma - 1
        ("llama_ln1p_weights_tp2pp2", "model.norm.weight", (11,), "decoder.final_layernorm.weight", (11,)),
    ],
)
@pytest.mark.parametrize("turned", [False, True])
def test_a_changed_element_is_found_where_the_table_puts_it(
    name, tensor, index, source, source_index, turned, exported, tmp_path
):
    changed = tmp_path / "changed"
    run_conversion(plan_export(open_checkpoint(golden(name)), changed, ExportOptions()))
    set_element(changed, tensor, index, lambda bits: bits ^ 2)
    report = diff(changed, golden(name)) if turned else diff(golden(name), changed)
    ((found_name, found),) = differing(report).items()
    megatron, hf = (Side.both(r, r)[0] for r in map(open_checkpoint, (golden(name), changed)))
    stored = values(megatron, source)[source_index] + (1 if "ln1p" in name else 0)
    ours = values(hf, tensor)[index]
    assert found_name == tensor
    (pair,) = (t.pair for t in report.tensors if t.name == tensor)
    assert source in (pair.b if turned else pair.a)
    first, a, b = found.first
    assert first == index
    mine, theirs = (a, b) if turned else (b, a)
    assert mine == ours
    assert theirs == pytest.approx(stored, rel=2**-8)  # gamma is rounded to bf16
    assert ours != theirs


def test_a_cast_is_within_tolerance_and_said_to_be_rounded(exported):
    folder = exported(LLAMA, dtype=from_option("fp16"))
    report = diff(golden(LLAMA), folder)
    assert not report.identical
    assert all(not t.same_type and t.values.rounds_a for t in report.tensors)
    assert {t.status for t in report.tensors} <= {"type", "different"}
    furthest = max(t.values.max_rel for t in report.tensors)
    assert diff(golden(LLAMA), folder, rtol=max(furthest, 1e-9)).identical
    wider = exported(LLAMA, dtype=from_option("fp32"))
    report = diff(golden(LLAMA), wider)
    assert {t.status for t in report.tensors} == {"type"}
    assert not report.identical
    assert diff(golden(LLAMA), wider, rtol=0).identical


def test_shifted_norms_are_compared_in_the_type_of_the_export(exported):
    report = diff(golden("llama_ln1p_weights_tp2pp2"), exported("llama_ln1p_weights_tp2pp2", dtype=from_option("fp32")))
    assert {t.values.unequal for t in report.tensors} == {0}


def test_padding_rows_of_an_export_do_not_count(exported):
    whole = exported(LLAMA, vocab_size=128)
    report = diff(golden(LLAMA), whole)
    assert report.plan.matching.config == []
    assert report.identical
    embedding = next(t for t in report.tensors if t.name == "model.embed_tokens.weight")
    assert (embedding.values.elements, embedding.padding.elements) == (120 * 32, 8 * 32)
    fewer = exported(LLAMA, vocab_size=100)
    report = diff(golden(LLAMA), fewer)
    assert set(report.plan.matching.shapes) == {"model.embed_tokens.weight", "lm_head.weight"}
    assert not report.identical


def test_prediction_layers_that_one_side_lacks_count(exported):
    name = "deepseek_mtp_adam_ep2pp2"
    for number, pair in enumerate(
        ((golden(name), exported(name, mtp="drop")), (exported(name, mtp="drop"), golden(name)))
    ):
        report = diff(*pair)
        assert not report.identical
        only = report.plan.matching.only
        assert only[number]
        assert all(n.startswith("mtp.") for n in only[number])
        assert not only[1 - number]
        assert diff(*pair, ignore=["mtp.*"]).identical
    assert not any(n.startswith("mtp.") for t in diff(golden(name), exported(name)).tensors for n in t.pair.b)


def test_a_wrong_configuration_counts(exported, tmp_path):
    folder = tmp_path / "changed"
    run_conversion(plan_export(open_checkpoint(golden(LLAMA)), folder, ExportOptions()))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"rope_theta": 5e5, "rope_parameters": {"rope_theta": 5e5}})
    )
    report = diff(golden(LLAMA), folder)
    assert report.plan.matching.config == ["config.json says rope_theta 500000.0, but the checkpoint gives 10000.0"]
    assert differing(report) == {}
    assert not report.identical
    report = diff(exported(LLAMA), folder)
    assert {f.name for f in report.plan.arguments} == {"config.rope_theta", "config.rope_parameters"}
    assert not report.identical


def test_folders_are_compared_with_each_other(exported, tmp_path):
    assert diff(exported(LLAMA), exported("llama_dpzero_tp2pp2dp2")).identical
    shards = exported(LLAMA, max_shard_bytes=20_000)
    assert len(open_checkpoint(shards).files) > 2
    assert diff(exported(LLAMA), shards).identical
    folder = tmp_path / "changed"
    run_conversion(plan_export(open_checkpoint(golden(LLAMA)), folder, ExportOptions()))
    set_element(folder, "lm_head.weight", (7, 8), lambda bits: bits ^ 1)
    assert {n: v.first[0] for n, v in differing(diff(folder, shards)).items()} == {"lm_head.weight": (7, 8)}


def test_another_architecture_is_a_difference(exported):
    report = diff(golden(LLAMA), exported("qwen2_weights_tp2pp2"))
    assert any("model_type qwen2" in text for text in report.plan.matching.config)
    assert not report.identical
    assert any(name.endswith("q_proj.bias") for name in report.plan.matching.only[1])


def test_a_table_that_is_wrong_is_noticed(exported, monkeypatch):
    # gate and up swapped in the table: the folder, made with the right one, must not be identical any more
    folder = exported(LLAMA)
    wrong = tuple(GateUp("mlp.up_proj", "mlp.gate_proj") if isinstance(r, GateUp) else r for r in llama.MODEL.dense)
    swapped = replace(llama.MODEL, dense=wrong)
    monkeypatch.setattr(
        "converters.models.ARCHITECTURES", tuple(swapped if m is llama.MODEL else m for m in ARCHITECTURES)
    )
    report = diff(golden(LLAMA), folder)
    assert {n.split(".", 3)[3] for n in differing(report)} == {"mlp.gate_proj.weight", "mlp.up_proj.weight"}
    assert all(abs(v.cosine) < 0.2 for v in differing(report).values())


def test_rows_of_padding_are_no_contradiction_with_another_models_configuration():
    """Its embedding has another name, so nothing lies beside ours: the true rows are what counts."""
    report = diff(golden("llama_dpreshardable_tp2pp2dp2"), GOLDEN / "hf_gpt2_bin", quick=True)
    said = report.plan.matching.config
    assert any("model_type" in text for text in said)
    assert not any("vocab_size" in text for text in said)
