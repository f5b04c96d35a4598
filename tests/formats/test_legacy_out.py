"""Legacy checkpoints that we write: what Megatron itself wrote of the same training, and what it loads."""

import argparse
import io
import json
import re
import shutil
from collections import OrderedDict
from dataclasses import replace

import numpy as np
import pytest
import torch

import converters
from converters.errors import RequestError
from converters.formats import open_checkpoint
from converters.megatron.layout import Layout
from converters.optimizer.state import optimizer_state
from converters.param_order import Order
from converters.pickles.nodes import set_field
from converters.write.legacy import LegacyOptions, plan_legacy
from converters.write.write_plan import run_conversion
from harness.checkpoints import GOLDENS, golden
from harness.legacy_cases import LEGACY, edit, held
from harness.reshard_cases import compare, expected
from harness.support import GOLDEN, read_tensor

ITERATION = "iter_0000010"
pytestmark = pytest.mark.filterwarnings("ignore")


def convert(source, into, layout, **options):
    """Converts a golden checkpoint (by name) or a folder."""
    reader = open_checkpoint(golden(source) if isinstance(source, str) else source)
    plan = plan_legacy(reader, into, Layout(**layout), LegacyOptions(**options))
    run_conversion(plan)
    return plan


def load(path):
    return torch.load(path, map_location="cpu", weights_only=False)


def differences(mine, theirs, at=""):
    """Where two trees of dictionaries, lists, tensors and scalars differ: in keys, their order, types, shapes or values."""
    if isinstance(theirs, argparse.Namespace):
        mine, theirs = vars(mine), vars(theirs)
    if torch.is_tensor(theirs):
        same = torch.is_tensor(mine) and mine.dtype == theirs.dtype and torch.equal(mine, theirs)
        return [] if same else [at]
    if isinstance(theirs, io.BytesIO):
        return [] if mine.getvalue() == theirs.getvalue() else [at]
    if isinstance(theirs, np.ndarray):
        return [] if np.array_equal(mine, theirs) else [at]
    if isinstance(theirs, dict):
        if type(mine) is not type(theirs) or (list(mine) != list(theirs) and at != "/args"):
            return [f"{at}: {list(mine)} instead of {list(theirs)}"]
        return [d for key, value in theirs.items() for d in differences(mine.get(key), value, f"{at}/{key}")]
    if isinstance(theirs, list | tuple):
        if len(mine) != len(theirs):
            return [at]
        return [d for n, pair in enumerate(zip(mine, theirs, strict=True)) for d in differences(*pair, f"{at}/{n}")]
    return [] if mine == theirs else [at]


# what the source's arguments cannot know: where the other checkpoint was saved, and which GPU of its machine a rank had
UNKNOWN = {"/args/save", "/args/local_rank"}
TWINS = [
    ("legacy_llama_adam_tp2pp2", "llama_adam_tp2pp2", {"tp": 2, "pp": 2}, {}, set()),
    (
        "legacy_llama_distopt_tp2pp2dp2",
        "llama_fullyreshardable_tp2pp2dp2",
        {"tp": 2, "pp": 2, "dp": 2},
        {},
        {"/args/dist_ckpt_optim_fully_reshardable"},  # said of torch_dist alone
    ),
    ("legacy_llama_distopt_tp2pp2dp2", "llama_dpreshardable_tp2pp2dp2", {"tp": 2, "pp": 2, "dp": 2}, {}, set()),
    ("legacy_mixtral_distopt_ep2pp2", "mixtral_dpreshardable_ep2pp2", {"pp": 2, "ep": 2, "dp": 2}, {}, set()),
    ("legacy_gpt_adam_tp2pp2", "gpt_adam_tp2pp2", {"tp": 2, "pp": 2}, {}, set()),
]


@pytest.mark.parametrize(("theirs", "source", "layout", "options", "more"), TWINS)
def test_it_is_what_megatron_wrote_of_the_same_training(theirs, source, layout, options, more, tmp_path):
    plan = convert(source, tmp_path / "out", layout, **options)
    assert plan.dropped == ()
    files = sorted(path.relative_to(GOLDEN / theirs) for path in (GOLDEN / theirs).glob("iter*/*/*"))
    assert sorted(path.relative_to(tmp_path / "out") for path in (tmp_path / "out").glob("iter*/*/*")) == files
    for file in files:
        found = differences(load(tmp_path / "out" / file), load(GOLDEN / theirs / file))
        assert set(found) <= UNKNOWN | more, file
    assert (tmp_path / "out/latest_checkpointed_iteration.txt").read_text() == "10"


@pytest.mark.parametrize("name", LEGACY)
def test_to_its_own_layout_it_is_what_it_was(name, tmp_path):
    """Also of Megatron-Core 0.12 with TransformerEngine 1, whose norms have no extra state."""
    source = GOLDEN / name / ITERATION
    at = Layout.saved(open_checkpoint(source).catalog)
    plan = convert(source, tmp_path / "out", {n: getattr(at, n) for n in ("tp", "pp", "vpp", "ep", "dp")})
    assert {what for what, _ in plan.dropped} <= {"rerun_state_machine"}
    for path in source.glob("*/*.pt"):
        mine, theirs = load(tmp_path / "out" / ITERATION / path.relative_to(source)), load(path)
        theirs.pop("rerun_state_machine", None) if isinstance(theirs, dict) else None
        stages = {"/args/num_layers_per_virtual_pipeline_stage", "/args/num_virtual_stages_per_pipeline_rank"}
        assert set(differences(mine, theirs)) <= {"/args/local_rank", *(stages if at.vpp else ())}, path


def test_a_rank_with_rows_of_padding_alone(tmp_path):
    """Its embedding has state as on every rank, in the optimizer of the dense parameters, not in that of the experts."""
    edited = converters.edit_args(
        golden("mixtral_adam_ep2tp2"), tmp_path / "edited", values={"make_vocab_size_divisible_by": 128}
    )
    layout = {"tp": 4, "ep": 2, "dp": 2}
    convert(edited.path, tmp_path / "out", layout, optimizer="plain")
    files = [load(path) for path in (tmp_path / "out").glob("iter*/*/*.pt")]
    sizes = [
        [[len(group["params"]) for group in o["optimizer"]["param_groups"]] for o in f["optimizer"]] for f in files
    ]
    assert all(size == sizes[0] for size in sizes)
    states = [
        converters.load(edited.path, Layout(**layout), rank=rank, device="cpu", optimizer=True).optimizer()
        for rank in (0, 1)
    ]
    assert states[0].keys() == states[1].keys()
    assert not any(state.any() for state in states[1]["embedding.word_embeddings.weight"].values())


def test_virtual_stages_are_what_megatron_wrote(tmp_path):
    """From another number of stages and a distributed optimizer: the random states do not fit, some arguments neither."""
    theirs = GOLDEN / "legacy_llama4_vpp2_tp2pp2"
    plan = convert("llama4_dpreshardable_pp4dp2", tmp_path / "out", {"tp": 2, "pp": 2, "vpp": 2}, optimizer="plain")
    assert {what.partition("/")[0] for what, _ in plan.dropped} == {"rng_state"}
    for path in theirs.glob("iter*/*/*.pt"):
        mine, wanted = load(tmp_path / "out" / path.relative_to(theirs)), load(path)
        del wanted["rng_state"]
        assert list(mine["model0"]) == list(wanted["model0"])
        assert differences({**mine, "args": None}, {**wanted, "args": None}) == []
        assert vars(mine["args"])["no_save_rng"] is True
        assert vars(mine["args"])["virtual_pipeline_model_parallel_size"] == 2


def test_a_difference_is_seen(tmp_path):
    name = "legacy_gpt_adam_tp2pp2"
    first, other = (load(GOLDEN / name / ITERATION / "mp_rank_00_001/model_optim_rng.pt") for _ in range(2))
    other["model"]["output_layer.weight"][3, 5] += 1
    other["optimizer"]["optimizer"]["param_groups"][1]["lr"] *= 2
    other["model"] = OrderedDict(reversed(other["model"].items()))
    assert len(differences(first, other)) == 2
    other["model"] = OrderedDict(reversed(other["model"].items()))
    assert differences(first, other) == ["/model/output_layer.weight", "/optimizer/optimizer/param_groups/1/lr"]


def truth_of(config):
    return GOLDEN / "truth" / f"{config}-bf16.safetensors"


LOCAL = {"spec": "local", "experts": "sequential"}  # Megatron's own layers, as the oracle's models have them
LOADS = [
    ("mixtral_adam_ep2tp2", "mixtral", {"ep": 2, "dp": 2}, {"optimizer": "distributed"}),
]
MORE = [
    ("llama_adam_tp2pp2", "llama", {"tp": 4}, {}),
    ("llama_dpreshardable_tp2pp2dp2", "llama", {"pp": 2, "dp": 2}, {}),
    ("mixtral_dpreshardable_ep2pp2", "mixtral", {"tp": 2, "pp": 2}, {"optimizer": "plain"}),
    ("llama_dpreshardable_buckets_tp2dp2", "llama", {"tp": 2, "pp": 2}, {"optimizer": "plain"}),
    ("legacy_llama_distopt_tp2pp2dp2", "llama", {"tp": 2, "dp": 2}, {}),
    ("v014_llama_modelspace_tp2pp2dp2", "llama", {"dp": 2}, {"optimizer": "distributed"}),
    ("v009_zarr_llama_adam_tp2pp2", "llama", {"pp": 2}, {}),
    ("mixtral_adam_ep2tp2", "mixtral", {"ep": 4, "dp": 4}, {}),
]


@pytest.mark.megatron
@pytest.mark.parametrize(
    ("source", "config", "layout", "options"), [*LOADS, *(pytest.param(*c, marks=pytest.mark.slow) for c in MORE)]
)
def test_megatron_loads_it_at_another_layout(source, config, layout, options, megatron_load, tmp_path):
    """Strictly: every key of the model and no other; masters and moments bit for bit, in either optimizer."""
    source = GOLDEN / source / ITERATION if source.startswith("legacy") else source
    convert(source, tmp_path / "out", layout, **LOCAL, **options)
    answer = megatron_load(tmp_path / "out", truth_of(config), config, optimizer=True, **layout)
    assert answer["ok"], answer
    groups = [group for rank in answer["optimizer"] for group in rank["groups"]]
    assert {group["step"] for group in groups} == {2}
    assert {group["weight_decay"] for group in groups} == {0.0, 0.1}
    for state in ("master", "exp_avg", "exp_avg_sq"):
        assert all(rank["compared"][state] for rank in answer["optimizer"])


@pytest.mark.megatron
@pytest.mark.slow
def test_tied_embeddings_are_loaded_on_both_stages(megatron_load, tmp_path):
    convert("gpt_adam_tp2pp2", tmp_path / "out", {"pp": 2}, spec="local")
    answer = megatron_load(tmp_path / "out", truth_of("gpt"), "gpt2", pp=2)
    assert answer["ok"], answer


@pytest.mark.parametrize(
    "source", ["legacy_llama_adam_tp2pp2", "legacy_llama4_vpp2_tp2pp2", "legacy_mixtral_distopt_ep2pp2"]
)
def test_there_and_back(source, tmp_path):
    """Another layout, then the first one again: the same values under the same names."""
    before = open_checkpoint(GOLDEN / source / ITERATION)
    layout = Layout.saved(before.catalog)
    kept = {"tp": layout.tp, "pp": layout.pp, "vpp": layout.vpp, "ep": layout.ep, "dp": layout.dp}
    convert(GOLDEN / source / ITERATION, tmp_path / "one", {"tp": 1, "pp": 2}, optimizer="plain")
    convert(tmp_path / "one", tmp_path / "two", kept)
    after = open_checkpoint(tmp_path / "two")
    assert list(before.catalog.tensors) == list(after.catalog.tensors)
    for name, info in before.catalog.tensors.items():
        wanted, found = read_tensor(before, info), read_tensor(after, after.catalog.tensors[name])
        rows = 120 if "llama_adam" in source and ("word_embeddings" in name or "output_layer" in name) else None
        assert np.array_equal(wanted[:rows], found[:rows]), name  # the rest is padding, cut and filled again


@pytest.mark.parametrize("optimizer", ["plain", "distributed"])
@pytest.mark.parametrize("experts", ["grouped", "sequential", "stacked"])
def test_experts_in_every_form(experts, optimizer, tmp_path):
    """Read back: GroupedMLP's matrices, too, in which every expert lies transposed."""
    options = {"spec": "local", "experts": experts, "optimizer": optimizer}
    convert("mixtral_adam_ep2tp2", tmp_path / "out", {"tp": 2, "ep": 2, "dp": 2}, **options)
    compare(held(tmp_path / "out"), expected("mixtral", optimizer=True))
    keys = load(tmp_path / "out" / ITERATION / "mp_rank_01_001/model_optim_rng.pt")["model"]
    name = {"grouped": "linear_fc1.weight1", "sequential": "local_experts.1.linear_fc1.weight", "stacked": "weight1"}
    assert f"decoder.layers.1.mlp.experts.{name[experts]}" in keys


def test_names_of_a_legacy_source_are_kept(tmp_path):
    """Without an argument that tells whose layers they are."""
    convert("mixtral_adam_ep2tp2", tmp_path / "one", {"ep": 2, "dp": 2}, spec="local", experts="stacked")
    for path in (tmp_path / "one" / ITERATION).glob("*/*.pt"):
        names = ("transformer_impl", "moe_grouped_gemm", "moe_use_legacy_grouped_gemm")
        edit(path, lambda tree: [set_field(tree["args"], name, None) for name in names])  # noqa: B023
    convert(tmp_path / "one", tmp_path / "two", {"tp": 2})
    keys = load(tmp_path / "two" / ITERATION / "mp_rank_01/model_optim_rng.pt")["model"]
    layer = "decoder.layers.0."
    assert {f"{layer}input_layernorm.weight", f"{layer}mlp.experts.weight1"} <= keys.keys()


READ_BACK = ("llama_adam_tp2pp2", "qwen3_adam_tp2", "deepseek_mtp_adam_ep2pp2", "gptneox_weights_tp2")


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(name, marks=() if name in READ_BACK else pytest.mark.slow)
        for name, (config, _) in GOLDENS.items()
        if config != "lion"  # a layer-wise optimizer is refused
    ],
)
def test_every_model_is_read_back(source, tmp_path):
    """Every element of every golden checkpoint, weights and optimizer, whatever it was stored as."""
    before = open_checkpoint(golden(source))
    experts = any(".experts." in name for name in before.catalog.weights)
    convert(source, tmp_path / "out", {"pp": 2, "ep": 2, "dp": 2} if experts else {"tp": 2, "pp": 2})
    after = open_checkpoint(tmp_path / "out")
    assert not [problem for problem in after.catalog.problems if problem.severity == "error"]
    trained = "weights" not in source
    wanted = dict(before.catalog.weights) | (optimizer_state(before).tensors if trained else {})
    found = dict(after.catalog.weights) | (optimizer_state(after).tensors if trained else {})
    assert wanted.keys() == found.keys()
    for name, info in wanted.items():
        ours, theirs = read_tensor(after, found[name]), read_tensor(before, info)
        rows = min(len(ours), len(theirs)) if "embeddings" in name or "output_layer" in name else None  # padding
        assert np.array_equal(ours[:rows], theirs[:rows]), name


@pytest.mark.parametrize("source", ["gpt_adam_tp2pp2", "deepseek_mtp_adam_ep2pp2"])
def test_an_embedding_that_two_stages_train(source, tmp_path):
    """Tied, or with multi-token prediction: each stage has its own state of it."""
    before = open_checkpoint(golden(source))
    convert(source, tmp_path / "out", {"pp": 2, "dp": 2}, optimizer="distributed")
    after = open_checkpoint(tmp_path / "out")
    found, wanted = optimizer_state(after).tensors, optimizer_state(before).tensors
    assert found.keys() == wanted.keys()
    for name, info in wanted.items():
        rows = 120 if "word_embeddings" in name or "output_layer" in name else None
        ours = read_tensor(after, found[name])
        assert np.array_equal(ours[:rows], read_tensor(before, info)[:rows]), name


def test_experts_over_another_tensor_parallel_size_are_refused(tmp_path):
    with pytest.raises(RequestError, match="--etp 1 beside --tp 2"):
        convert("mixtral_adam_ep2tp2", tmp_path / "out", {"tp": 2, "ep": 2, "etp": 1, "dp": 1})


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"optimizer": "dp_reshardable"}, "not a choice"),
        ({"spec": "apex"}, "spec=.apex. is not a choice"),
        ({"rng": "keep"}, "random state was saved for a grid of 2 x 2"),
        ({"vocab_size": 4}, "would cut trained rows"),
    ],
)
def test_what_cannot_be_is_refused(options, match, tmp_path):
    with pytest.raises(RequestError, match=match):
        convert("llama_adam_tp2pp2", tmp_path / "out", {"tp": 4}, **options)
    assert not (tmp_path / "out").exists()


def test_weights_alone(tmp_path):
    plan = convert("llama_adam_tp2pp2", tmp_path / "out", {"tp": 2}, weights_only=True)
    found = load(tmp_path / "out" / ITERATION / "mp_rank_01/model_optim_rng.pt")
    assert not {"optimizer", "rng_state"} & found.keys()
    assert found["args"].no_save_optim is found["args"].no_save_rng is True
    assert "--no-load-optim --no-load-rng" in plan.advice[0]
    assert {reason for _, reason in plan.dropped} == {
        "optimizer state is left out by option",
        "random state: not wanted",
    }


def test_steps_counted_by_parameter_stay_so(tmp_path):
    """torch's own Adam, without TransformerEngine and Apex, keeps a step beside the moments of every parameter."""
    folder = tmp_path / "source"
    shutil.copytree(golden("llama_adam_tp2pp2"), folder / ITERATION)
    common = torch.load(folder / ITERATION / "common.pt", weights_only=False)
    inner = common["optimizer"]["optimizer"]
    for group in inner["param_groups"]:
        del group["step"]
    inner["state"] = {"common_step": torch.tensor(2.0)}
    torch.save(common, folder / ITERATION / "common.pt")
    convert(folder, tmp_path / "out", {"pp": 2})
    state = load(tmp_path / "out" / ITERATION / "mp_rank_00_001/model_optim_rng.pt")["optimizer"]["optimizer"]["state"]
    assert {tuple(entry) for entry in state.values()} == {("exp_avg", "exp_avg_sq", "step")}
    assert all(entry["step"] == 2.0 and entry["step"].dtype == torch.float32 for entry in state.values())
    convert(tmp_path / "out", tmp_path / "again", {"tp": 2})
    state = load(tmp_path / "again" / ITERATION / "mp_rank_01/model_optim_rng.pt")["optimizer"]["optimizer"]["state"]
    assert all(entry["step"] == 2.0 for entry in state.values())


def test_facts_for_a_program(tmp_path):
    plan = convert("llama_adam_tp2pp2", tmp_path / "out", {"tp": 2})
    facts = json.loads(json.dumps(plan.facts))
    assert facts["optimizer"] == "plain"
    assert facts["changed_args"]["ckpt_format"] == {"from": "torch_dist", "to": "torch"}


def test_fp8_state_of_grouped_experts_is_the_first_ones(tmp_path):
    def said(**args):
        reader = open_checkpoint(golden("mixtral_adam_ep2tp2"))
        reader.catalog = replace(reader.catalog, args={**reader.catalog.args, **args})
        return any("first expert speaks for all" in note for note in plan_legacy(reader, tmp_path / "o", layout).notes)

    layout = Layout(ep=2, dp=2)
    assert said(fp8="e4m3", moe_grouped_gemm=True)
    assert not said(fp8=None)


def test_parts_of_one_parameter_whose_order_is_unknown_are_refused(monkeypatch, tmp_path):
    """In the order of their names they would be another projection."""
    real = Order.position
    unknown = re.compile(r".*\.mixer\.in_proj.*")

    def position(self, name):
        if unknown.fullmatch(name):
            raise RequestError(name)
        return real(self, name)

    monkeypatch.setattr(Order, "position", position)
    with pytest.raises(RequestError, match=r"does not know the order of the parts of .*mixer\.in_proj\.weight"):
        plan_legacy(
            open_checkpoint(golden("hy16_dpr_tp2dp2")), tmp_path / "out", Layout(), LegacyOptions(weights_only=True)
        )
