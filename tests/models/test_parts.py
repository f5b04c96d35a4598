"""Models that are no single stack of decoder layers: LLaVA, T5, BERT, adapters; written by Megatron's and Bridge's own code.

Where a rank's part of a tensor lies is compared with the chunks that those programs stored.
"""

import shutil
from dataclasses import replace

import numpy as np
import pytest

from converters.comparison.compare import DiffOptions, plan_diff, run_diff
from converters.errors import RequestError
from converters.formats import open_checkpoint
from converters.loading.plan import LoadOptions
from converters.loading.rank_plan import plan_load
from converters.megatron.identity import identify
from converters.megatron.layout import Layout
from converters.megatron.model_args import ModelArgs
from converters.megatron.outline import Outline
from converters.megatron.pipeline import Pipeline
from converters.megatron.split import Split, shards, split_rule
from converters.model_parts import model_parts, second_names, split_part
from converters.names import parse_key, stored_key
from converters.optimizer.state import optimizer_state
from converters.param_order import Order
from converters.pickles.nodes import fields, set_field
from converters.write.framework_files import companions
from harness.checkpoints import copy_golden, edit_metadata, golden, tree
from harness.cli_support import here
from harness.container_cases import convert
from harness.reshard_cases import folder_of, reshard
from harness.support import GOLDEN, read_tensor

LLAVA, LORA = "llava16_full_tp2dp2", "mb_lora_tp2"
T5 = ("t5_adam_tp2",)
BERT = ("bert_adam_tp2", "bert_dpreshardable_tp2dp2")
PEFT = ("mb_peft_full_tp2dp2", "mb_peft_dpr_tp2dp2")  # adapters alone, with their optimizer
OF_PARTS = (LLAVA, LORA, *PEFT, *T5, *BERT)


def outline_of(catalog):
    return Outline.of(ModelArgs.from_catalog(catalog), {name: t.shape for name, t in catalog.weights.items()})


def same(a, b, **options):
    """The report of a comparison that must find nothing."""
    report = run_diff(plan_diff(open_checkpoint(a), open_checkpoint(b), DiffOptions(**options)))
    assert not [t.name for t in report.tensors if t.differs]
    assert not any(report.plan.matching.only), report.plan.matching.only
    return report


# ---------------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("key", "template", "axes"),
    [
        (
            "language_model.decoder.layers.mlp.linear_fc2.weight",
            "language_model.decoder.layers.{}.mlp.linear_fc2.weight",
            ("layer",),
        ),
        (
            "module.vision_model.decoder.layers.1.mlp.linear_fc2.weight",
            "vision_model.decoder.layers.1.mlp.linear_fc2.weight",
            (),
        ),
        ("vision_model.class_token", "vision_model.class_token", ()),
        ("vision_projection.encoder.linear_fc1.weight", "vision_projection.encoder.linear_fc1.weight", ()),
        ("visual.blocks.0.attn.qkv.weight", "visual.blocks.0.attn.qkv.weight", ()),
        ("position_embeddings.weight", "position_embeddings.weight", ()),
        ("optimizer.state.exp_avg.vision_model.conv1.weight", "optimizer.state.exp_avg.vision_model.conv1.weight", ()),
    ],
)
def test_every_part_of_a_model_is_a_weight_under_its_own_name(key, template, axes):
    parsed = parse_key(key)
    assert (parsed.template, parsed.axes) == (template, axes)
    assert parsed.kind == ("optimizer" if key.startswith("optimizer") else "weight")
    if parsed.kind == "weight":
        plain = stored_key(template.format(*(0 for _ in axes)), stacked=bool(axes))
        assert key == ("module." if key.startswith("module.") else "") + plain.key


def test_a_key_of_no_known_part_is_a_weight_of_no_part():
    assert parse_key("something.weight").kind == "weight"  # what it is for, nobody knows: it is carried or refused
    assert split_part("decoder.layers.0.mlp.linear_fc1.weight")[0] == ""


# ---------------------------------------------------------------------- rules, against what Megatron and Bridge stored


@pytest.mark.parametrize("name", OF_PARTS)
def test_tensors_are_divided_as_the_stored_chunks_are(name):
    catalog = open_checkpoint(GOLDEN / name).catalog
    outline, layout = outline_of(catalog), Layout.saved(catalog) if catalog.args else Layout(tp=2)
    for tensor in catalog.weights.values():
        expected = {shard.box for shard in shards(tensor.name, tensor.shape, layout, outline)}
        assert {chunk.box for chunk in tensor.chunks()} == expected, tensor.name


@pytest.mark.parametrize(
    ("name", "axis", "gated"),
    [
        ("vision_model.conv1.weight", None, False),
        ("vision_model.class_token", None, False),
        ("vision_model.decoder.layers.0.self_attention.linear_qkv.weight", 0, False),
        ("vision_model.decoder.layers.0.mlp.linear_fc2.weight", 1, False),
        ("vision_projection.encoder.linear_fc1.weight", 0, True),
        ("multi_modal_projector.mm_input_projection_weight", None, False),
        ("decoder.layers.0.self_attention.linear_qkv.adapter.linear_in.weight", 0, False),
        ("decoder.layers.0.self_attention.linear_proj.adapter.linear_in.weight", 1, False),
        ("decoder.layers.0.self_attention.linear_proj.adapter.linear_out.weight", 0, False),
        ("decoder.layers.0.mlp.linear_fc1.adapter.linear_in.weight", 0, False),
        ("decoder.layers.0.mlp.linear_fc1.adapter.linear_out.weight", 0, True),
    ],
)
def test_rules_of_parts_and_adapters(name, axis, gated):
    assert split_rule(name) == Split(axis, gated)


@pytest.mark.parametrize(
    "name",
    [
        "vision_model.embedder.weight",  # RADIO's
        "vision_tower.decoder.layers.0.self_attention.linear_qkv.weight",  # not Hugging Face's after all
        "vision_projection.resampler.weight",
        "lm_head.something.weight",
        "decoder.layers.0.mlp.experts.linear_fc1.adapter.linear_in.weight",  # an axis for experts (peft/utils.py)
        "decoder.layers.0.mixer.in_proj.adapter.linear_out.weight",
        "decoder.layers.0.self_attention.linear_qkv.adapter.adapter_q.linear_in.weight",  # canonical LoRA
        "decoder.layers.0.self_attention.linear_qkv.adapter.weight_magnitude",  # DoRA
    ],
)
def test_what_no_rule_knows_is_refused_by_name_unless_it_need_not_be_divided(name):
    with pytest.raises(RequestError, match="distckpt does not know how") as error:
        shards(name, (8, 8), Layout(tp=2), Outline(1))
    assert error.value.tensor == name
    assert len(shards(name, (8, 8), Layout(), Outline(1))) == 1


def test_each_part_has_layers_and_gates_of_its_own():
    shapes = {
        "language_model.decoder.layers.3.mlp.linear_fc1.weight": (16, 4),
        "language_model.decoder.layers.3.mlp.linear_fc2.weight": (4, 8),
        "vision_model.decoder.layers.1.mlp.linear_fc1.weight": (8, 4),
        "vision_model.decoder.layers.1.mlp.linear_fc2.weight": (4, 8),
    }
    outline = Outline.of(ModelArgs(gated=True), shapes)
    tower, language = "vision_model.decoder.layers.0.mlp.linear_fc1.weight", next(iter(shapes))
    assert (outline.num_layers, outline.layers(language), outline.layers(tower)) == (4, 4, 2)
    assert (outline.gates(language), outline.gates(tower)) == (True, False)
    assert outline.tied
    pipeline = Pipeline.of(Layout(pp=2), 4)
    assert [stage.pp for stage in pipeline.homes(language)] == [1]
    assert [stage.pp for stage in pipeline.homes("vision_model.decoder.layers.1.mlp.linear_fc1.weight")] == [0]


def test_parameters_of_two_names_are_trained_once():
    t5 = open_checkpoint(GOLDEN / T5[0]).catalog
    assert second_names(t5.weights) == {
        "embedding.position_embeddings.weight": "position_embeddings.weight",
        "lm_head.output_layer.bias": "output_layer.bias",
    }
    gpt = open_checkpoint(golden("gpt_adam_tp2pp2")).catalog
    assert not second_names(gpt.weights)


def test_the_order_of_a_vision_tower():
    names = [
        "class_token",
        "ln_pre.weight",
        "conv1.weight",
        "position_embeddings.weight",
        "decoder.final_layernorm.weight",
    ]
    tower = [f"vision_model.{name}" for name in names]
    around = ["language_model.output_layer.weight", *tower, "vision_projection.encoder.linear_fc1.weight"]
    assert sorted(around, key=Order().position) == around


# ---------------------------------------------------------------------- what a checkpoint is called


@pytest.mark.parametrize(
    ("name", "kind"),
    [(LLAVA, "LLaVA"), (T5[0], "T5"), (BERT[0], "BERT"), ("llama_adam_tp2pp2", ""), ("gpt_adam_tp2pp2", "")],
)
def test_a_model_is_called_what_it_is_and_never_exported_as_another(name, kind, tmp_path):
    catalog = open_checkpoint(GOLDEN / name).catalog
    found = identify(catalog)
    assert found.kind.name == kind
    if kind:
        result = here("export-hf", GOLDEN / name, tmp_path / "hf", "--arch", "gpt2")
        assert result.code == 4
        assert kind in result.err
        assert not (tmp_path / "hf").exists()
        assert kind in here("inspect", GOLDEN / name).out


def test_adapters_are_named_and_never_left_out_of_an_export(tmp_path):
    assert "LoRA of rank 8 on linear_fc1, linear_fc2, linear_proj, linear_qkv" in here("inspect", GOLDEN / LORA).out
    result = here("export-hf", GOLDEN / LORA, tmp_path / "hf")
    assert result.code == 4
    assert "adapters" in result.err


# ---------------------------------------------------------------------- moving them


@pytest.mark.parametrize("name", OF_PARTS)
@pytest.mark.parametrize("layout", [{"tp": 1}, {"tp": 2, "dp": 2}])
def test_reshard_carries_every_element(name, layout, tmp_path):
    kind = "dp_reshardable" if "dpr" in name else "keep"
    reshard(GOLDEN / name, tmp_path / "out", layout, optimizer=kind)
    same(GOLDEN / name, tmp_path / "out")
    result = open_checkpoint(tmp_path / "out").catalog
    assert model_parts(result.weights) == model_parts(open_checkpoint(GOLDEN / name).catalog.weights)


@pytest.mark.parametrize("name", [LLAVA, BERT[1]])
def test_a_model_of_parts_over_pipeline_stages(name, tmp_path):
    reshard(GOLDEN / name, tmp_path / "out", {"tp": 2, "pp": 2} if name == LLAVA else {"tp": 2, "pp": 1, "dp": 1})
    same(GOLDEN / name, tmp_path / "out")


def test_encoder_and_decoder_have_no_stages(tmp_path):
    with pytest.raises(RequestError, match="encoder and decoder cannot be divided over --pp"):
        reshard(GOLDEN / T5[0], tmp_path / "out", {"pp": 2})


@pytest.mark.parametrize("name", [*T5, *BERT])
def test_biases_of_the_vocabulary_follow_its_padding(name, tmp_path):
    """The real loader stops at a bias of another padded size ("Global shape mismatch"), which it pads for weights."""
    source = open_checkpoint(GOLDEN / name).catalog
    assert source.weights["output_layer.bias"].shape == (128,)
    reshard(GOLDEN / name, tmp_path / "out", {"tp": 1})
    result = open_checkpoint(tmp_path / "out").catalog
    for tensor in ("output_layer.bias", "lm_head.output_layer.bias", "embedding.word_embeddings.weight"):
        assert tensor not in source.weights or result.weights[tensor].shape[0] == 120
    assert result.tensors["optimizer.state.exp_avg.output_layer.bias"].shape == (120,)


@pytest.mark.parametrize("name", [LLAVA, T5[0], BERT[0], LORA])
@pytest.mark.parametrize("to", ["torch", "safetensors"])
def test_containers_hold_every_weight(name, to, tmp_path):
    target = tmp_path / ("model.pt" if to == "torch" else "model")
    convert(GOLDEN / name, target, to)
    have, want = open_checkpoint(target).catalog.weights, open_checkpoint(GOLDEN / name).catalog.weights
    assert have.keys() == want.keys()


@pytest.mark.parametrize("name", [LLAVA, T5[0], BERT[0]])
def test_legacy_holds_every_tensor(name, tmp_path):
    result = here("convert", GOLDEN / name, tmp_path / "out", "--to", "legacy", "--tp", "2")
    assert result.code == 0, result.err
    same(GOLDEN / name, tmp_path / "out")


@pytest.mark.parametrize("name", [LLAVA, T5[0], BERT[0], LORA])
def test_load_gives_every_weight_its_name(name):
    reader = open_checkpoint(GOLDEN / name)
    plan = plan_load(reader, Layout(tp=2), 1, LoadOptions(optimizer=name != LORA))
    assert reader.catalog.weights.keys() <= plan.pieces.keys()
    if name == T5[0]:
        assert "optimizer.state.exp_avg.position_embeddings.weight" in plan.pieces
        assert "optimizer.state.exp_avg.embedding.position_embeddings.weight" not in plan.pieces
    with pytest.raises(RequestError):
        plan_load(reader, Layout(), 0, LoadOptions(names="hf"))


@pytest.mark.parametrize("name", OF_PARTS)
def test_verify_has_nothing_to_say(name):
    result = here("verify", GOLDEN / name, "--values")
    assert result.code == 0, result.out
    assert "good" in result.out


def test_a_rank_of_adapters_that_cannot_be_divided(tmp_path):
    name = "decoder.layers.0.mlp.linear_fc1.adapter.linear_in.weight"
    with pytest.raises(RequestError, match="6 rows cannot be split over --tp 4"):
        shards(name, (6, 64), Layout(tp=4), Outline(1))


def test_flat_buckets_of_adapters_alone():
    """The two runs began with other weights and made the same step: their moments are equal."""
    whole, flat = (open_checkpoint(GOLDEN / name) for name in PEFT)
    found = optimizer_state(flat)
    names = [name for name in found.tensors if ".exp_avg" in name]
    assert len(names) == 16
    for name in names:
        assert np.array_equal(
            read_tensor(flat, found.tensors[name]), read_tensor(whole, whole.catalog.tensors[name])
        ), name


# ---------------------------------------------------------------------- one tensor that is not understood


def renamed(name, into, old, new):
    """A copy of a golden checkpoint in which a stored tensor has another key."""
    shutil.copytree(GOLDEN / name, into)
    folder = next(into.glob("**/.metadata")).parent

    def change(state):
        for field in ("state_dict_metadata", "storage_data"):
            entries = state[field]
            for key in list(entries):
                text = key if isinstance(key, str) else fields(key)["fqn"]
                if text == old:
                    value = entries.pop(key)
                    if not isinstance(key, str):
                        set_field(key, "fqn", new)
                    entries[new if isinstance(key, str) else key] = value

    edit_metadata(folder, change)
    return into


STRANGE = [
    (LLAVA, "vision_model.conv1.weight", "vision_model.conv9.weight"),
    (LLAVA, "vision_projection.encoder.linear_fc2.weight", "vision_projection.encoder.linear_fc9.weight"),
    (T5[0], "decoder.layers.cross_attention.linear_q.weight", "decoder.layers.cross_attention.linear_z.weight"),
    (BERT[0], "pooler.dense.weight", "pooler.dance.weight"),
    (
        LORA,
        "decoder.layers.mlp.linear_fc1.adapter.linear_in.weight",
        "decoder.layers.mlp.linear_fc1.adapter.linear_mid.weight",
    ),
]


@pytest.mark.parametrize(("name", "old", "new"), STRANGE)
def test_a_weight_under_another_name_is_named(name, old, new, tmp_path):
    """The model lacks a tensor that its kind of layer has, and has one that no rule knows: neither is passed over."""
    source = renamed(name, tmp_path / "source", old, new)
    before, missing, unknown = tree(source), old.split(".")[-2], new.split(".")[-2]
    for command in (("reshard", "--tp", "2"), ("reshard", "--tp", "1"), ("convert", "--to", "legacy", "--tp", "2")):
        result = here(command[0], source, tmp_path / "out", *command[1:], "--optimizer", "none")
        assert result.code == 4, result.err
        assert missing in result.err or unknown in result.err
        assert not (tmp_path / "out").exists()
    assert tree(source) == before


# ---------------------------------------------------------------------- parts of a part, and jobs of Megatron-Bridge


@pytest.mark.parametrize(("name", "wrapper"), [(LLAVA, "llava_model."), ("llama_adam_tp2pp2", "thinker.")])
def test_a_model_within_another_is_refused_by_name_or_kept_whole(name, wrapper, tmp_path):
    """Nemotron-Omni's and Qwen-Omni's wrappers: no layout of them is known, and no tensor is lost."""
    copy = copy_golden(name, tmp_path / "source" / "iter_0000010")
    own = open_checkpoint(copy).catalog

    def change(state):
        described = state["state_dict_metadata"]
        keys = {t.keys[0] for t in own.weights.values()}
        for key in keys:
            described[wrapper + key] = described.pop(key)
        for index in state["storage_data"]:
            if fields(index)["fqn"] in keys:
                set_field(index, "fqn", wrapper + fields(index)["fqn"])

    edit_metadata(copy, change)
    for command in ("reshard", "convert"):
        options = ("--to", "torch", "--names", "hf") if command == "convert" else ("--tp", "1")
        result = here(command, copy, tmp_path / "out", *options)
        assert result.code == 4, result.err
        assert wrapper in result.err or command == "convert"
        assert not (tmp_path / "out").exists()
    assert here("convert", copy, tmp_path / "out", "--to", "safetensors").code == 0
    kept = open_checkpoint(tmp_path / "out").catalog.tensors
    assert set(kept) >= {wrapper + t.keys[0] for t in own.weights.values()}


def test_buckets_of_a_bridge_job_follow_its_configuration(tmp_path):
    """`ddp:` of run_config.yaml cuts the buckets, and `optimizer:` says whether masters are remainders."""
    for overlap, count in (("false", 1), ("true", 2)):
        source = tmp_path / overlap / "iter_0000010"
        shutil.copytree(folder_of(GOLDEN / PEFT[0]), source)
        config = source / "run_config.yaml"
        text = config.read_text().replace("overlap_grad_reduce: false", f"overlap_grad_reduce: {overlap}")
        config.write_text(text.replace("bucket_size: null", "bucket_size: 500"))
        reshard(source, tmp_path / f"out_{overlap}", {"tp": 2}, optimizer="dp_reshardable")
        flat = open_checkpoint(tmp_path / f"out_{overlap}").catalog.tensors
        buckets = {name.rpartition(".bucket_idx_")[2].partition(".")[0] for name in flat if ".bucket_idx_" in name}
        assert (len(buckets) > 1) == (count > 1), buckets
        same(source, tmp_path / f"out_{overlap}")


def test_remainders_of_a_bridge_job_are_recognised_by_its_configuration():
    reader = open_checkpoint(golden("pao16_full_tp2dp2"))
    wanted = optimizer_state(reader).tensors
    options = {"use_precision_aware_optimizer": True}
    reader = open_checkpoint(golden("pao16_full_tp2dp2"))
    reader.catalog = replace(reader.catalog, args={}, training=options)
    found = optimizer_state(reader).tensors
    name = "optimizer.state.param.decoder.layers.0.mlp.linear_fc1.weight"
    assert found[name].remainders is not None
    assert np.array_equal(
        read_tensor(reader, found[name]), read_tensor(open_checkpoint(golden("pao16_full_tp2dp2")), wanted[name])
    )


def test_a_result_with_whole_masters_says_so_to_bridge():
    catalog = open_checkpoint(GOLDEN / PEFT[0]).catalog
    made = companions(catalog, Layout(), framework="keep", rng=False, optimizer=True, completed=True)
    text = next(data for name, data in made.files.items() if name.endswith("run_config.yaml")).decode()
    assert made.notes == ()
    assert "use_precision_aware_optimizer: false" in text


@pytest.mark.parametrize("name", PEFT)
def test_adapters_without_a_configuration_show_whether_there_is_a_gate(name, tmp_path):
    source = open_checkpoint(GOLDEN / name).catalog
    bare = replace(source, config={}, training={})
    shapes = {name: t.shape for name, t in bare.weights.items()}
    assert Outline.of(ModelArgs.from_catalog(bare), shapes).gated is True
    first = {name: shape for name, shape in shapes.items() if ".linear_fc2." not in name}
    outline = Outline.of(ModelArgs.from_catalog(bare), first)
    tensor = "decoder.layers.0.mlp.linear_fc1.adapter.linear_out.weight"
    assert len(shards(tensor, first[tensor], Layout(tp=1), outline)) == 1
    with pytest.raises(RequestError, match="gate and up is not known"):
        shards(tensor, first[tensor], Layout(tp=2), outline)
