"""Optimizers other than the distributed Adam: recognised, resharded in their own form, or refused by name."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from converters.catalog import TensorInfo
from converters.dtypes import dtype
from converters.errors import DistckptError, FormatError, IntegrityError, RequestError
from converters.formats import open_checkpoint
from converters.megatron.layout import Layout
from converters.megatron.optimizer_layout import optimizer_layout
from converters.megatron.optimizer_parts import optimizer_parts
from converters.optimizer.read_groups import read_param_groups
from converters.optimizer.state import optimizer_state
from converters.verification.report import Check
from converters.verification.structure import check_structure
from converters.write.container import plan_torch
from converters.write.legacy import plan_legacy
from converters.write.reshard import ReshardOptions, plan_reshard
from converters.write.scheduler import build_scheduler
from converters.write.target_state import as_megatron_lm
from converters.write.write_plan import run_conversion
from harness.checkpoints import edit_metadata, golden
from harness.reshard_cases import reshard
from harness.support import GOLDEN, read_tensor

MATRIX = "decoder.layers.0.self_attention.linear_proj.weight"
NORM = "decoder.final_layernorm.weight"
KINDS = {
    "muon16p_tp2": ("Muon + Adam, not distributed", "plain"),
    "muon16_tp2dp2": ("Muon + Adam, layer-wise", "plain"),
    "muonleg16_tp2dp2": ("Muon + Adam, layer-wise", "plain"),
    "muonM_tp2dp2": ("Muon + Adam, layer-wise, dp_reshardable", "fully_reshardable"),
    "muonM_full_tp2dp2": ("Muon + Adam, layer-wise, fully_reshardable", "fully_reshardable"),
    "muonmoeM_tp2ep2": ("Muon + Adam, layer-wise, dp_reshardable", "fully_reshardable"),
    "lionM_dpr_tp2dp2": ("Lion + Adam, layer-wise, dp_reshardable", "fully_reshardable"),
    "sgd16_tp2": ("SGD with momentum, not distributed", "plain"),
    "llama_adam_tp2pp2": ("Adam, not distributed", "plain"),
}
STATE = {"Muon": "momentum_buffer", "Lion": "exp_avg", "SGD with momentum": "momentum_buffer", "Adam": "exp_avg"}


def values_of(reader):
    return {name: read_tensor(reader, info) for name, info in optimizer_state(reader).tensors.items()}


def differing(wanted, have):
    """Names of what differs in the rows that both have: the vocabulary's padding depends on the layout."""
    rows = {key: min(len(value), len(have[key])) for key, value in wanted.items()}
    assert all(n >= 120 for key, n in rows.items() if n != len(wanted[key]))
    return [key for key, n in rows.items() if not np.array_equal(wanted[key][:n], have[key][:n])]


@pytest.mark.parametrize("name", KINDS)
def test_it_is_named_and_kept_in_its_form(name, tmp_path):
    reader = open_checkpoint(GOLDEN / name)
    assert optimizer_layout(reader.catalog).name == KINDS[name][0]
    plan, _ = reshard(GOLDEN / name, tmp_path / "out", {"pp": 2})
    assert plan.options.optimizer == KINDS[name][1]
    result = open_checkpoint(tmp_path / "out")
    wanted, have = values_of(reader), values_of(result)
    assert wanted.keys() == have.keys()
    assert not differing(wanted, have)
    parts = {part.algorithm: part for part in optimizer_parts(reader.catalog).parts}
    for part in optimizer_parts(result.catalog).parts:
        assert part.names == parts[part.algorithm].names
        spelled = "param" if part.distributed else "fp32_param"
        for parameter in part.names:
            keys = result.catalog.tensors
            assert f"optimizer.state.{spelled}.{parameter}" in keys
            assert f"optimizer.state.{STATE[part.algorithm]}.{parameter}" in keys
    before, after = (read_param_groups(r) for r in (reader, result))
    assert [p.merged() for p in before.parts] == [p.merged() for p in after.parts]


@pytest.mark.parametrize("name", KINDS)
def test_a_torch_file_and_back(name, tmp_path):
    """One file keeps which optimizer of a chain has which groups, and which of them are in a DistributedOptimizer."""
    reader = open_checkpoint(GOLDEN / name)
    run_conversion(plan_torch(reader, tmp_path / "model.pt"))
    file = open_checkpoint(tmp_path / "model.pt")
    ep = 2 if "moe" in name else 1
    run_conversion(plan_reshard(file, tmp_path / "out", Layout(tp=2, ep=ep, dp=2)))
    result = open_checkpoint(tmp_path / "out")
    wanted = values_of(reader)
    for other in (file, result):
        have = values_of(other)
        assert wanted.keys() == have.keys()
        assert not differing(wanted, have)
        assert read_param_groups(other).parts == read_param_groups(reader).parts
    named = optimizer_layout(result.catalog).name.replace("fully_reshardable", "dp_reshardable")
    assert named == KINDS[name][0].replace("fully_reshardable", "dp_reshardable")


def test_param_groups_of_layer_wise_legacy_are_those_of_torch_dist():
    """Rank 0 of a legacy job lacks the step of a group whose parameters others have; torch_dist has one list."""
    legacy, dist = (read_param_groups(open_checkpoint(GOLDEN / f"{name}_tp2dp2")) for name in ("muonleg16", "muon16"))
    assert [(p.dense, p.experts) for p in legacy.parts] == [(p.dense, p.experts) for p in dist.parts]


def test_a_torch_file_whose_chain_does_not_fit(tmp_path):
    run_conversion(plan_torch(open_checkpoint(golden("muon16p_tp2")), tmp_path / "model.pt"))
    document = torch.load(tmp_path / "model.pt", weights_only=True)
    for chain in ([{"groups": 1, "distributed": False}], [{"groups": 9}], [{"groups": -1}, {"groups": 4}], "two"):
        document["optimizer"]["chain"] = chain
        torch.save(document, tmp_path / "other.pt")
        with pytest.raises(FormatError, match="does not divide its 3 param groups"):
            open_checkpoint(tmp_path / "other.pt")


@pytest.mark.parametrize("name", ["muonM_full_tp2dp2", "lionM_dpr_tp2dp2", "muonmoeM_tp2ep2"])
def test_buckets_hold_the_parameters_of_their_own_optimizer(name, tmp_path):
    reader = open_checkpoint(golden(name))
    ep = {"ep": 2, "dp": 2} if "moe" in name else {}
    reshard(name, tmp_path / "out", {"pp": 2, **ep}, optimizer="dp_reshardable")
    result = open_checkpoint(tmp_path / "out")
    stored = [tensor.keys[0] for tensor in result.catalog.tensors.values() if tensor.kind == "optimizer"]
    assert {key.partition(".")[0] for key in stored} == {"chained_0", "chained_1"}
    wanted, have = values_of(reader), values_of(result)
    assert wanted.keys() == have.keys()
    assert not differing(wanted, have)


@pytest.mark.parametrize("name", ["muon16p_tp2", "muonM_tp2dp2"])
def test_chains_with_expert_parallelism(name):
    """A layer-wise optimizer has the experts' groups within it, another has an optimizer for them."""
    groups = read_param_groups(open_checkpoint(golden(name)))
    expert = "decoder.layers.0.mlp.experts.0.linear_fc1.weight"
    first = groups.parts[0]
    part = replace(first.part, names=first.part.names | {expert})
    chain = replace(groups, parts=(replace(first, part=part), *groups.parts[1:])).chain(4)
    kinds = [(c.part.algorithm, c.member.experts, [g["is_expert_parallel"] for g in c.groups]) for c in chain]
    if name == "muon16p_tp2":
        assert kinds[:2] == [("Muon", False, [False]), ("Muon", True, [True])]
    else:
        assert kinds[0] == ("Muon", None, [False, True])
    assert kinds[-1] == ("Adam", None, [False, False])


@pytest.mark.parametrize(
    ("name", "form", "text"),
    [
        ("sgd16_tp2", "fully_reshardable", "takes Adam only"),
        ("muon16p_tp2", "dp_reshardable", "this is Muon"),
    ],
)
def test_forms_that_megatron_does_not_have(name, form, text, tmp_path):
    with pytest.raises(RequestError, match=text):
        plan_reshard(open_checkpoint(golden(name)), tmp_path / "out", Layout(), ReshardOptions(optimizer=form))


def test_a_layer_wise_optimizer_is_not_written_as_legacy(tmp_path):
    with pytest.raises(RequestError, match=r"layer_wise_optimizer_N\.pt are not written"):
        plan_legacy(open_checkpoint(golden("muon16_tp2dp2")), tmp_path / "out", Layout())


# ---------------------------------------------------------------------- bad input


def changed(name, tensors=None, common=None, args=None):
    """A reader whose catalog says something else."""
    reader = open_checkpoint(golden(name))
    catalog = reader.catalog
    known = {k: v for k, v in catalog.tensors.items() if (tensors or {}).get(k, True)}
    known |= {k: v for k, v in (tensors or {}).items() if v is not None}
    reader.catalog = replace(
        catalog,
        tensors=known,
        common=catalog.common if common is None else common(catalog.common),
        args={**catalog.args, **(args or {})},
    )
    return reader


@pytest.mark.parametrize(
    "name", ["muon16p_tp2", "muonM_full_tp2dp2", "lionM_dpr_tp2dp2", "sgd16_tp2", "llama_adam_tp2pp2"]
)
def test_a_lost_state_is_named(name, tmp_path):
    part = optimizer_parts(open_checkpoint(golden(name)).catalog).parts[0]
    state, spelled = STATE[part.algorithm], "param" if part.distributed else "fp32_param"
    cases = [(state, MATRIX), (spelled, MATRIX)]
    if "Lion" not in part.algorithm and "SGD" not in part.algorithm:
        cases.append(("exp_avg_sq", NORM))  # which without it would be Lion's
    for state, parameter in cases:
        reader = changed(name, {f"optimizer.state.{state}.{parameter}": None})
        for plan in (plan_reshard, plan_legacy, lambda reader, path, _: plan_torch(reader, path)):
            with pytest.raises(DistckptError, match=re.escape(parameter)) as caught:
                plan(reader, tmp_path / "out", Layout())
            assert caught.value.exit_code in (1, 4)
        check = Check("structure")
        check_structure(check, reader.catalog)
        assert any(f.severity == "error" and f"{parameter} is missing" in f.message for f in check.findings)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["muon16p_tp2", "llama_adam_tp2pp2", "lionM_dpr_tp2dp2"])
def test_a_weight_without_any_state_is_never_passed_over(name, tmp_path):
    """It may have been frozen, so it is no damage; whoever reads the report decides."""
    parameter = "decoder.layers.0.self_attention.linear_proj.weight"
    spelled = {n: None for n in open_checkpoint(golden(name)).catalog.tensors if n.endswith(f".{parameter}")}
    reader = changed(name, spelled)
    text = f"{parameter} has no optimizer state: frozen in training, or lost"
    check = Check("structure")
    check_structure(check, reader.catalog)
    if optimizer_parts(reader.catalog).stateless:
        assert [f.message for f in check.findings if f.severity == "warning"] == [text]
        assert text in plan_torch(reader, tmp_path / "out.pt").notes
        with pytest.raises(RequestError, match=r"linear_proj\.weight is for 2 tensors, the model has 1"):
            plan_reshard(reader, tmp_path / "out", Layout())  # layers share a key, so a hole would be left
    else:  # where there are flat buckets, the parameter would have to be in them, and is not
        for plan in (plan_reshard, lambda reader, path, _: plan_torch(reader, path)):
            with pytest.raises(DistckptError):
                plan(reader, tmp_path / "out", Layout())


def test_lion_saved_whole_without_the_moments_of_its_adam(tmp_path):
    """Megatron-LM main saves `exp_avg` alone in this form, of Adam, too; here it is taken out of what has both."""
    plan, _ = reshard(GOLDEN / "lionM_dpr_tp2dp2", tmp_path / "out", {})
    assert plan.options.optimizer == "fully_reshardable"
    assert any("does not load exp_avg_sq of the parameters that Adam trains" in note for note in plan.notes)

    def without(state):
        state["state_dict_metadata"] = {k: v for k, v in state["state_dict_metadata"].items() if "exp_avg_sq" not in k}

    edit_metadata(next((tmp_path / "out").glob("**/.metadata")).parent, without)
    reader = open_checkpoint(tmp_path / "out")
    with pytest.raises(IntegrityError, match=r"exp_avg_sq of Adam is missing.*does not save it with --optimizer lion"):
        optimizer_state(reader)
    assert "--optimizer lion" in (optimizer_layout(reader.catalog).caution or "")


def test_an_unknown_state_is_named(tmp_path):
    reader = open_checkpoint(golden("muon16p_tp2"))
    info = reader.catalog.tensors[f"optimizer.state.momentum_buffer.{MATRIX}"]
    more = f"optimizer.state.row_moment.{MATRIX}"
    reader = changed("muon16p_tp2", {more: TensorInfo(more, info.dtype, info.shape, "optimizer", info.parts)})
    with pytest.raises(RequestError, match="momentum_buffer, row_moment: no known optimizer"):
        plan_reshard(reader, tmp_path / "out", Layout())


def test_an_unknown_optimizer_is_named(tmp_path):
    with pytest.raises(RequestError, match="'shampoo' is not known"):
        plan_reshard(changed("muon16p_tp2", args={"optimizer": "shampoo"}), tmp_path / "out", Layout())


def test_masters_of_an_unexpected_type_are_refused(tmp_path):
    name = f"optimizer.state.fp32_param.{MATRIX}"
    info = open_checkpoint(golden("muon16p_tp2")).catalog.tensors[name]
    wrong = TensorInfo(name, dtype("int32"), info.shape, "optimizer", info.parts)
    with pytest.raises(DistckptError) as caught:
        plan_reshard(changed("muon16p_tp2", {name: wrong}), tmp_path / "out", Layout())
    assert caught.value.exit_code in (1, 4)


@pytest.mark.parametrize("number", [0, 1])
def test_a_lost_param_group_is_named(number, tmp_path):
    def without(common):
        inner = {**common["optimizer"][1]["optimizer"]}
        inner["param_groups"] = [g for n, g in enumerate(inner["param_groups"]) if n != number]
        return {**common, "optimizer": {**common["optimizer"], 1: {**common["optimizer"][1], "optimizer": inner}}}

    with pytest.raises(IntegrityError, match="the param group of Adam for"):
        plan_reshard(changed("muon16p_tp2", common=without), tmp_path / "out", Layout())


def test_a_lost_optimizer_of_the_chain_is_named(tmp_path):
    with pytest.raises(IntegrityError, match="state of Adam but none of its param groups"):
        plan_reshard(
            changed("muon16p_tp2", common=lambda c: {**c, "optimizer": {0: c["optimizer"][0]}}),
            tmp_path / "out",
            Layout(),
        )


# ---------------------------------------------------------------------- scheduler


def test_a_scheduler_is_made_of_the_frameworks():
    group = {"wd_mult": 1.0, "weight_decay": 0.1, "lr": 0.004, "min_lr": 0.001, "max_lr": 0.01}
    tree = {
        "optimizer": [{"optimizer": {"param_groups": [{**group, "wd_mult": 0.0}, group]}}],
        "lr_schedulers": [{"max_steps": 100, "warmup_steps": 5, "base_lrs": [0.01, 0.01], "min_lr": 0.002}],
    }
    made = build_scheduler(tree, {}, 80, 10)
    assert made == {
        "max_lr": 0.01,
        "lr_warmup_steps": 40,
        "num_steps": 80,
        "lr_decay_style": "cosine",
        "lr_decay_steps": 800,
        "min_lr": 0.002,
        "start_wd": 0.1,
        "end_wd": 0.1,
        "wd_incr_style": "constant",
        "wd_incr_steps": 800,
    }
    bare = build_scheduler({"optimizer": tree["optimizer"]}, {}, None, None)
    assert bare["lr_decay_steps"] > 0
    assert bare["min_lr"] == 0.001


@pytest.mark.parametrize("optimizer", [True, False])
def test_a_scheduler_is_made_only_beside_an_optimizer(optimizer):
    catalog = open_checkpoint(golden("nemo2_llama4_weights_tp2pp2")).catalog
    tree = {"optimizer": {"optimizer": {"param_groups": [{"wd_mult": 1.0, "lr": 0.01, "weight_decay": 0.1}]}}}
    made, _, notes = as_megatron_lm(catalog, tree, optimizer=optimizer)
    assert ("opt_param_scheduler" in made) == optimizer
    assert any("Assumed: decay style cosine" in note for note in notes) == optimizer
