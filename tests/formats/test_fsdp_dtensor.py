"""fsdp_dtensor: real checkpoints of Megatron-FSDP hold the truth of every other format, and become what other jobs load."""

import re
import shutil
from dataclasses import replace

import numpy as np
import pytest

from converters.dtypes import dtype
from converters.errors import IntegrityError, RequestError
from converters.formats import open_checkpoint
from converters.formats.dcp.fsdp_dtensor import _experts, _nested
from converters.megatron.layout import Layout
from converters.megatron.optimizer_layout import optimizer_layout
from converters.optimizer.read_groups import read_param_groups
from converters.optimizer.state import optimizer_state
from converters.pickles.nodes import fields, set_field
from converters.write.export import ExportOptions, plan_export
from converters.write.reshard import plan_reshard
from converters.write.write_plan import run_conversion
from harness import hf_reference
from harness.checkpoints import edit_metadata, golden, truth
from harness.conformance import Conformance, megatron_case
from harness.exports import exported
from harness.reshard_cases import (
    args_of,
    by_parameter,
    common_of,
    compare,
    expected,
    folder_of,
    param_groups,
    read_with_torch,
    reshard,
    truth_of,
)
from harness.support import GOLDEN, read_tensor

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
FSDP2 = "mlm_fsdp2_llama_dp2"
CONFIGS = {"fsdp_llama_dp2": "llama", "fsdp_llama_tp2dp2": "llama", "fsdp_mixtral_ep2dp4": "mixtral"}


def master_case(name):
    """The truth, with the weights as Megatron-FSDP stores them: the master weights."""
    case = megatron_case(name, CONFIGS[name])
    wanted = case.wanted

    def masters():
        values = wanted()
        prefix = "optimizer.state.param."
        return values | {n.removeprefix(prefix): value for n, value in values.items() if n.startswith(prefix)}

    return type(case)(name, masters)


class TestFsdpDtensor(Conformance):
    FORMAT = "fsdp_dtensor"
    CASES = tuple(master_case(name) for name in CONFIGS)
    DEEP = 3


class TestMegatronDcp(Conformance):
    """`--use-torch-fsdp2`: the optimizer's tensors have numbers, whose parameters are inferred and proved."""

    FORMAT = "megatron_dcp"
    CASES = (megatron_case(FSDP2, "llama"),)


@pytest.mark.parametrize("name", CONFIGS)
def test_what_it_is(name):
    reader = open_checkpoint(GOLDEN / name)
    catalog = reader.catalog
    assert catalog.framework == "Megatron-LM"
    assert catalog.iteration == 10
    assert catalog.args["num_layers"] == 2
    assert optimizer_layout(catalog).name == "fsdp_dtensor"
    assert all(tensor.dtype.name == "float32" for tensor in catalog.weights.values())
    assert {catalog.trained_type(tensor).name for tensor in catalog.weights.values()} == {"bfloat16"}
    assert not any("module." in tensor for tensor in catalog.tensors)
    assert not any("rng_state" in tensor for tensor in catalog.tensors)
    assert catalog.common["opt_param_scheduler"]["lr_decay_style"] == "cosine"
    assert catalog.common["iteration"] == 10


@pytest.mark.parametrize("name", CONFIGS)
def test_param_groups_are_found_again(name):
    """Megatron-FSDP stores a group's values once more for each parameter; there are as many groups as there were."""
    (groups,) = read_param_groups(open_checkpoint(GOLDEN / name)).parts
    wanted = [values for _, values in param_groups(CONFIGS[name])]
    assert [group["wd_mult"] for group in groups.dense] == [1.0, 0.0]
    assert not groups.experts  # its parameters have lost the mark of experts: one optimizer has them all
    for group in (*groups.dense, *groups.experts):
        assert group["step"] == 2
        known = group.keys() & wanted[0].keys() - {"is_expert_parallel"}
        assert {"lr", "weight_decay", "eps"} <= known
        assert any(all(group[key] == other[key] for key in known) for other in wanted), group


LAYOUTS = [
    ("fsdp_llama_dp2", {"tp": 4}, {}),
    ("fsdp_llama_dp2", {"tp": 2, "pp": 2, "dp": 2}, {"optimizer": "dp_reshardable"}),
    ("fsdp_llama_tp2dp2", {"pp": 2}, {}),
    ("fsdp_mixtral_ep2dp4", {"tp": 2}, {}),
    ("fsdp_mixtral_ep2dp4", {"ep": 4, "dp": 4}, {}),
    ("fsdp_llama_tp2dp2", {"tp": 2}, {"optimizer": "none"}),
    (FSDP2, {"tp": 2, "pp": 2}, {}),
]


@pytest.mark.parametrize(("name", "layout", "options"), LAYOUTS)
def test_a_reshard_holds_the_truth(name, layout, options, tmp_path):
    reshard(GOLDEN / name / "iter_0000010", tmp_path / "out", layout, **options)
    folder = folder_of(tmp_path / "out")
    flat = options.get("optimizer") == "dp_reshardable"
    got = by_parameter({k: v for k, v in read_with_torch(folder).items() if "gbuf_idx" not in k})
    compare(got, expected(CONFIGS.get(name, "llama"), optimizer=not options))
    if flat:
        reader = open_checkpoint(tmp_path / "out")
        assert any("dtype_(torch.bfloat16, torch.float32)" in key for key in reader.catalog.tensors)
        for full, info in optimizer_state(reader).tensors.items():
            _, _, state, key = full.split(".", 3)
            want = expected(CONFIGS[name], optimizer=True)[f"{state}/{key}"]
            assert np.array_equal(read_tensor(reader, info)[: want.shape[0]], want), full


def test_the_common_state_of_a_reshard(tmp_path):
    reshard(GOLDEN / "fsdp_mixtral_ep2dp4" / "iter_0000010", tmp_path / "out", {"ep": 2, "dp": 2})
    tree, args = common_of(folder_of(tmp_path / "out")), args_of(folder_of(tmp_path / "out"))
    assert args["ckpt_format"] == "torch_dist"
    assert args["use_megatron_fsdp"] is False
    assert tree["checkpoint_version"] == 3.0
    assert tree["opt_param_scheduler"]["lr_decay_style"] == "cosine"
    assert tree["content_metadata"]["distrib_optim_sharding_type"] == "fully_reshardable"
    assert [len(tree["optimizer"][i]["optimizer"]["param_groups"]) for i in (0, 1)] == [2, 1]
    assert not {"rng_state", "model"} & tree.keys()
    objects = open_checkpoint(tmp_path / "out").catalog.objects
    assert "decoder.layers.self_attention.linear_qkv._extra_state/shard_1_2" in objects


def test_random_states_are_kept_at_the_same_grid(tmp_path):
    import torch

    plan, _ = reshard(GOLDEN / "fsdp_llama_tp2dp2" / "iter_0000010", tmp_path / "out", {"tp": 2})
    assert not plan.dropped
    reader = open_checkpoint(tmp_path / "out")
    item = reader.catalog.objects["rng_state/shard_0.1_1.2"]
    raw = (reader.catalog.path / item.file).read_bytes()[item.start : item.start + item.length]
    (tmp_path / "rng.pt").write_bytes(raw)
    ((state,),) = torch.load(tmp_path / "rng.pt", weights_only=False)
    assert state["torch_rng_state"].shape == (5056,)
    assert set(state["rng_tracker_states"]) == {"data-parallel-rng", "model-parallel-rng", "expert-parallel-rng"}
    torch.set_rng_state(state["torch_rng_state"])
    np.random.set_state(state["np_rng_state"])


@pytest.mark.parametrize("name", CONFIGS)
def test_an_export_is_that_of_the_other_formats(name, tmp_path):
    """In the type that the job computes with; asked for fp32, the masters."""
    config = CONFIGS[name]
    run_conversion(plan_export(open_checkpoint(GOLDEN / name), tmp_path / "hf", ExportOptions()))
    compare(exported(tmp_path / "hf"), hf_reference.expected(config, config, truth(config)))
    run_conversion(
        plan_export(open_checkpoint(GOLDEN / name), tmp_path / "fp32", ExportOptions(dtype=dtype("float32")))
    )
    masters = {f"model/{k.removeprefix('master/')}": v for k, v in truth(config).items() if k.startswith("master/")}
    compare(exported(tmp_path / "fp32"), hf_reference.expected(config, config, masters))


def test_what_is_no_parameter_keeps_its_type():
    """Megatron keeps the router's expert bias in fp32, and it is a buffer: there is no master of it."""
    catalog = open_checkpoint(GOLDEN / "fsdp_mixtral_ep2dp4").catalog
    weight = next(iter(catalog.weights.values()))
    buffer = replace(weight, name="decoder.layers.0.mlp.router.expert_bias")
    assert catalog.trained_type(weight).name == "bfloat16"
    assert catalog.trained_type(buffer).name == "float32"
    other = open_checkpoint(GOLDEN / "llama_adam_tp2pp2").catalog
    assert other.computing_type is None


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("fsdp_llama_dp2", {"tp": 2, "dp": 2}),
        (FSDP2, {"tp": 4}),
        pytest.param("fsdp_llama_tp2dp2", {"pp": 2}, marks=pytest.mark.slow),
        pytest.param("fsdp_mixtral_ep2dp4", {"tp": 2}, marks=pytest.mark.slow),
    ],
)
def test_megatron_resumes_from_a_reshard(name, layout, megatron_load, tmp_path):
    """With its distributed optimizer and without Megatron-FSDP: weights, masters, moments, param groups."""
    config = CONFIGS.get(name, "llama")
    reshard(GOLDEN / name / "iter_0000010", tmp_path / "out", layout)
    answer = megatron_load(tmp_path / "out", truth_of(config), config, optimizer=True, **layout)
    assert answer["ok"], answer
    for state in ("master", "exp_avg", "exp_avg_sq"):
        assert all(rank["compared"][state] for rank in answer["optimizer"])


def test_names_of_experts():
    assert _experts("decoder.layers.1.mlp.experts.linear_fc1.weight13_w").endswith("mlp.experts.13.linear_fc1.weight_w")
    assert _experts("decoder.layers.1.mlp.experts.linear_fc2.bias0").endswith("mlp.experts.0.linear_fc2.bias")
    local = "decoder.layers.0.mlp.experts.local_experts.7.linear_fc1.weight_v"
    assert _experts(local) == "decoder.layers.0.mlp.experts.7.linear_fc1.weight_v"
    assert _experts("decoder.layers.0.mlp.shared_experts.linear_fc1.weight_w").endswith(
        "shared_experts.linear_fc1.weight_w"
    )


def test_flattened_values_are_nested_again():
    flat = {("a", "0", "x"): 1, ("a", "0", "y"): 2, ("a", "1"): 3, ("b", "2"): 4, ("c",): 5}
    assert _nested(flat) == {"a": [{"x": 1, "y": 2}, 3], "b": {"2": 4}, "c": 5}
    assert _nested({(): 7}) == 7


# ---------------------------------------------------------------------- damage


@pytest.fixture
def copy(tmp_path):
    shutil.copytree(GOLDEN / "fsdp_llama_tp2dp2", tmp_path / "run")
    return tmp_path / "run" / "iter_0000010"


def test_half_of_a_gated_projection_is_missing(copy):
    key = "model.module.decoder.layers.1.mlp.linear_fc1.weight_v"

    def change(state):
        del state["state_dict_metadata"][key]

    edit_metadata(copy, change)
    found = [p for p in open_checkpoint(copy).catalog.problems if p.severity == "error"]
    assert "gate and up do not form a pair" in found[0].message
    assert found[0].tensors == ("decoder.layers.1.mlp.linear_fc1.weight",)


def test_layers_of_another_stage_are_missed(copy):
    """Stages of a pipeline number their layers alike, and Megatron-FSDP's keys do not tell them apart: one of them stays."""

    def change(state):
        tensors = state["state_dict_metadata"]
        for key in [key for key in tensors if "layers.1." in key]:
            del tensors[key]

    edit_metadata(copy, change)

    with pytest.raises(RequestError, match="contradicts itself"):
        plan_reshard(open_checkpoint(copy), copy.parent.parent / "out", Layout())


def test_detection_needs_the_wrappers(copy):
    """A torch_dist folder that lost its metadata.json is still one, and a model of somebody else's is none of Megatron's."""
    assert open_checkpoint(copy).name == "fsdp_dtensor"
    other = golden("llama_adam_tp2pp2")
    shutil.copytree(other, copy.parent / "iter_0000011")
    (copy.parent / "iter_0000011" / "metadata.json").unlink()
    assert open_checkpoint(copy.parent / "iter_0000011").name == "torch_dist"
    (copy.parent / "iter_0000011" / "common.pt").unlink()
    assert open_checkpoint(copy.parent / "iter_0000011").name == "torch_dist"
    assert open_checkpoint(GOLDEN / "fsdp2_llama_dp2").name == "torch_dcp"
    assert re.search("Megatron-FSDP", optimizer_layout(open_checkpoint(copy).catalog).permits)


# ---------------------------------------------------------------------- the optimizer by numbers


@pytest.fixture
def numbered(tmp_path):
    shutil.copytree(GOLDEN / FSDP2, tmp_path / "run")
    return tmp_path / "run" / "iter_0000010"


def test_groups_of_fsdp2(numbered):
    reader = open_checkpoint(numbered)
    assert reader.catalog.framework == "Megatron-LM"
    assert [(group["wd_mult"], group["step"]) for group in read_param_groups(reader).parts[0].dense] == [
        (1.0, 2),
        (0.0, 2),
    ]
    assert optimizer_layout(reader.catalog).name == "FSDP2"
    assert "decoder.layers.1.mlp.linear_fc2._extra_state/shard_0_1" in reader.catalog.objects


def test_numbers_that_stand_for_other_parameters(numbered):
    """Two parameters of one shape exchanged: shapes agree, but master weights do not round to the weights."""

    def change(state):
        one, other = (f"optimizer.fp32_from_fp16_params.1.{n}" for n in (0, 2))
        for index in state["storage_data"]:
            name = fields(index)["fqn"]
            if name in (one, other):
                set_field(index, "fqn", other if name == one else one)

    edit_metadata(numbered, change)
    with pytest.raises(IntegrityError, match="do not round"):
        reshard(numbered, numbered.parent.parent / "out", {"tp": 1})
    assert not (numbered.parent.parent / "out").exists()


def test_a_parameter_too_many(numbered):
    """The weights are there whatever the optimizer is."""

    def change(state):
        for table in ("state_dict_metadata", "planner_data"):
            del state[table]["model.decoder.final_layernorm.weight"]

    edit_metadata(numbered, change)
    (problem,) = [p for p in open_checkpoint(numbered).catalog.problems if p.severity == "unknown"]
    assert "does not have the 4 parameters" in problem.message
    assert all(name.startswith("optimizer.") for name in problem.tensors)
    with pytest.raises(RequestError, match="does not have the 4 parameters"):
        reshard(numbered, numbered.parent.parent / "out", {"tp": 1})
    assert not (numbered.parent.parent / "out").exists()
