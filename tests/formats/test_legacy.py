"""Megatron-LM's legacy checkpoints: real ones hold their truth, bit for bit; what is damaged or mixed up is refused."""

import shutil

import numpy as np
import pytest

from converters.errors import IntegrityError, RequestError
from converters.execute.run import Stats
from converters.formats import open_checkpoint
from converters.formats.common_state import Archive
from converters.megatron.layout import Layout
from converters.megatron.optimizer_layout import optimizer_layout
from converters.optimizer.proof import prove_masters
from converters.optimizer.read_groups import read_param_groups
from converters.optimizer.state import optimizer_state
from converters.pickles.nodes import fields, set_field
from converters.write.export import ExportOptions, plan_export
from converters.write.legacy import LegacyOptions, plan_legacy
from converters.write.write_plan import run_conversion
from harness import hf_reference
from harness.checkpoints import flip, payloads, run_cli, truth
from harness.conformance import Conformance, megatron_case
from harness.exports import exported, logit_difference
from harness.legacy_cases import (
    FLAT,
    LEGACY,
    MODEL,
    copy_legacy,
    edit,
    held,
    refused,
    write_experts,
)
from harness.reshard_cases import by_parameter, compare, expected, read_with_torch, reshard
from harness.support import GOLDEN

RANKS = ("mp_rank_00_000", "mp_rank_00_001", "mp_rank_01_000", "mp_rank_01_001")


class TestLegacy(Conformance):
    FORMAT = "legacy"
    CASES = tuple(megatron_case(name) for name in LEGACY)


@pytest.mark.parametrize("name", LEGACY)
def test_the_order_of_parameters_is_proved(name):
    reader = open_checkpoint(GOLDEN / name)
    assert reader.catalog.iteration == 10
    found = optimizer_state(reader)
    prove_masters(reader, found.tensors)


@pytest.mark.parametrize("name", LEGACY)
def test_optimizer_layout_and_groups(name):
    reader = open_checkpoint(GOLDEN / name)
    flat = "distopt" in name
    assert optimizer_layout(reader.catalog).name == ("distrib_optim.pt" if flat else "Adam, not distributed")
    (groups,) = read_param_groups(reader).parts
    assert [group["wd_mult"] for group in groups.dense] == [1.0, 0.0]
    assert len(groups.experts) == ("mixtral" in name)
    assert {group["step"] for group in (*groups.dense, *groups.experts)} == {2}


def test_a_tied_copy_is_noted_and_not_stored_twice():
    catalog = open_checkpoint(GOLDEN / "legacy_gpt_adam_tp2pp2").catalog
    assert "output_layer.weight" not in catalog.tensors
    assert "tied" in catalog.details


@pytest.mark.parametrize("name", LEGACY)
def test_export_gives_the_bits_of_a_torch_dist_export(name, tmp_path):
    config, family, other = LEGACY[name]
    for source, into in ((name, "legacy"), (other, "torch_dist")):
        run_conversion(plan_export(open_checkpoint(GOLDEN / source), tmp_path / into, ExportOptions()))
    got, want = exported(tmp_path / "legacy"), hf_reference.expected(config, family, truth(config))
    compare(got, want)
    compare(got, exported(tmp_path / "torch_dist"))
    if name in ("legacy_llama4_vpp2_tp2pp2", "legacy_gpt_adam_tp2pp2"):
        assert logit_difference(tmp_path / "legacy", config) <= 1e-5


LAYOUTS = [
    ("legacy_llama_adam_tp2pp2", {"tp": 4}, {}),
    ("legacy_llama_distopt_tp2pp2dp2", {"tp": 1, "pp": 2, "dp": 2}, {}),
    ("legacy_llama_distopt_tp2pp2dp2", {"tp": 2, "pp": 1, "dp": 2}, {"optimizer": "dp_reshardable"}),
    ("v012_legacy_llama_distopt_tp2pp2dp2", {"tp": 2}, {}),
    ("legacy_llama4_vpp2_tp2pp2", {"pp": 4, "tp": 2}, {}),
    ("legacy_mixtral_distopt_ep2pp2", {"ep": 4, "dp": 4}, {}),
    ("legacy_mixtral_distopt_ep2pp2", {"tp": 2}, {}),
    ("legacy_gpt_adam_tp2pp2", {"tp": 1, "pp": 2}, {}),
]


@pytest.mark.parametrize(("name", "layout", "options"), LAYOUTS)
def test_a_reshard_holds_the_truth(name, layout, options, tmp_path):
    plan, stats = reshard(GOLDEN / name, tmp_path / "out", layout, **options)
    assert isinstance(stats, Stats)
    folder = tmp_path / "out" / "iter_0000010"
    wanted = expected(LEGACY[name][0], optimizer=not options)
    got = by_parameter({k: v for k, v in read_with_torch(folder).items() if "gbuf_idx" not in k})
    compare(got, wanted)
    if options:
        compare(held(tmp_path / "out"), expected(LEGACY[name][0], optimizer=True))
    # as the model's own loader asks for them: shared keys, and an extra state for each layer
    keys = set(read_with_torch(folder))
    assert "decoder.layers.self_attention.linear_qkv.weight" in keys
    objects = set(open_checkpoint(folder).catalog.objects)
    assert (
        "decoder.layers.self_attention.linear_qkv._extra_state/shard_1_2" in objects
        or plan.reader.catalog.args["num_layers"] != 2
    )


def test_the_common_state_of_a_reshard(tmp_path):
    reshard(GOLDEN / "legacy_mixtral_distopt_ep2pp2", tmp_path / "out", {"ep": 2, "dp": 2})
    tree = Archive.read(tmp_path / "out" / "iter_0000010" / "common.pt").tree
    args = fields(tree["args"])
    assert args["ckpt_format"] == "torch_dist"
    assert args["pipeline_model_parallel_size"] == 1
    assert args["no_save_rng"] is True
    assert tree["checkpoint_version"] == 3.0
    assert tree["iteration"] == 10
    assert tree["opt_param_scheduler"]["lr_decay_style"] == "cosine"
    assert not {"model", "rng_state"} & tree.keys()
    assert tree["content_metadata"]["distrib_optim_sharding_type"] == "fully_reshardable"
    assert [len(tree["optimizer"][i]["optimizer"]["param_groups"]) for i in (0, 1)] == [2, 1]


def test_random_states_are_kept_at_the_same_grid(tmp_path):
    import torch

    name = "legacy_llama_adam_tp2pp2"
    plan, _ = reshard(GOLDEN / name, tmp_path / "out", {"tp": 2, "pp": 2})
    assert [name for name, _ in plan.dropped] == ["facts.json"]  # what lies beside the iterations
    reader = open_checkpoint(tmp_path / "out")
    (value,) = reader.object_value("rng_state/shard_1.0_2.2")
    source = Archive.read(GOLDEN / name / "iter_0000010" / "mp_rank_00_001" / MODEL).tree["rng_state"][0]
    assert value["random_rng_state"] == source["random_rng_state"]
    item = next(o for o in reader.catalog.objects.values() if o.key == "rng_state/shard_1.0_2.2")
    raw = (reader.catalog.path / item.file).read_bytes()[item.start : item.start + item.length]
    (tmp_path / "rng.pt").write_bytes(raw)
    allowed = [np._core.multiarray._reconstruct, np.ndarray, np.dtype, type(np.dtype("uint32"))]
    with torch.serialization.safe_globals(allowed):
        ((state,),) = torch.load(tmp_path / "rng.pt", weights_only=True)
    assert state["torch_rng_state"].shape == (5056,)


@pytest.mark.parametrize(
    "inner", ["", "iter_0000010", f"iter_0000010/mp_rank_00_001/{MODEL}", "iter_0000010/mp_rank_00_001"]
)
def test_what_one_may_name(inner):
    root = GOLDEN / "legacy_llama_adam_tp2pp2"
    assert open_checkpoint(root / inner).catalog.path == root / "iter_0000010"


def test_inspect(tmp_path):
    done = run_cli("inspect", GOLDEN / "legacy_mixtral_distopt_ep2pp2", "--files")
    assert done.returncode == 0
    assert "mp_rank_00_001_001/distrib_optim.pt" in done.stdout


# ---------------------------------------------------------------------- the grid


def test_an_incomplete_grid_names_the_folders(tmp_path):
    folder = copy_legacy("legacy_llama_adam_tp2pp2", tmp_path)
    for name in ("mp_rank_00_000", "mp_rank_01_001"):
        shutil.rmtree(folder / name)
    error = refused(folder)
    assert "2 of the 4 folders" in error.message
    assert error.details == ["mp_rank_00_000, mp_rank_01_001"]


def test_a_missing_file(tmp_path):
    folder = copy_legacy("legacy_llama_adam_tp2pp2", tmp_path)
    (folder / "mp_rank_01_000" / MODEL).unlink()
    assert MODEL in refused(folder).message


def test_folders_of_another_save(tmp_path):
    folder = copy_legacy("legacy_llama_adam_tp2pp2", tmp_path)
    shutil.copytree(folder / "mp_rank_01_001", folder / "mp_rank_02_001")
    assert "belongs to no rank" in refused(folder).message


def test_mixed_iterations(tmp_path):
    folder = copy_legacy("legacy_llama_adam_tp2pp2", tmp_path)
    edit(folder / "mp_rank_01_000" / MODEL, lambda tree: tree.update(iteration=20))
    message = refused(folder).message
    assert "two iterations are mixed" in message
    assert "mp_rank_01_000" in message


def test_mixed_jobs(tmp_path):
    folder = copy_legacy("legacy_llama_adam_tp2pp2", tmp_path)
    edit(folder / "mp_rank_01_001" / MODEL, lambda t: set_field(t["args"], "pipeline_model_parallel_size", 4))
    assert "two jobs are mixed" in refused(folder).message


@pytest.mark.parametrize("axis", ["pp", "ep"])
def test_ambiguous_names_are_resolved(axis, tmp_path):
    """`mp_rank_00_001` is a pipeline stage or an expert-parallel rank: arguments tell, without them the model does."""
    if axis == "pp":
        folder = copy_legacy("legacy_llama_adam_tp2pp2", tmp_path)
        config = "llama"
    else:
        folder, config = tmp_path / "iter_0000010", "mixtral"
        write_experts(folder, "sequential", ep=2)
    compare(held(folder), expected(config, optimizer=False) if axis == "ep" else expected(config, optimizer=True))
    names = ("pipeline_model_parallel_size", "expert_model_parallel_size")
    for path in folder.glob(f"*/{MODEL}"):
        edit(path, lambda tree: [set_field(tree["args"], name, None) for name in names])
    compare(held(folder), expected(config, optimizer=axis == "pp"))
    (problem,) = open_checkpoint(folder).catalog.problems
    assert "no argument says" in problem.message


def test_names_that_nothing_resolves(tmp_path):
    """A whole model without experts in two folders, and no arguments: the error says what would decide."""
    folder = copy_legacy("legacy_llama_adam_tp2pp2", tmp_path / "two")
    convert = plan_legacy(open_checkpoint(folder), tmp_path / "one", Layout(), LegacyOptions(weights_only=True))
    run_conversion(convert)
    whole = tmp_path / "one" / "iter_0000010"
    (whole / "mp_rank_00").rename(whole / "mp_rank_00_000")
    edit(whole / "mp_rank_00_000" / MODEL, lambda tree: tree.pop("args"))
    shutil.copytree(whole / "mp_rank_00_000", whole / "mp_rank_00_001")
    error = refused(whole)
    assert "may count pipeline stages or expert-parallel ranks" in error.message
    assert "pipeline_model_parallel_size and expert_model_parallel_size of the saved arguments decide" in error.hint


def test_arguments_that_do_not_fit_the_names(tmp_path):
    folder = copy_legacy("legacy_llama_adam_tp2pp2", tmp_path)
    for path in folder.glob(f"*/{MODEL}"):
        edit(path, lambda tree: set_field(tree["args"], "expert_model_parallel_size", 2))
    error = refused(folder)
    assert "pp 2, ep 2" in error.message
    assert "decide" in error.hint


def test_experts_divided_otherwise_than_the_rest(tmp_path):
    write_experts(tmp_path, "sequential", ep=2, expert_tensor_parallel_size=2)
    assert "expert_tensor_parallel_size 2" in refused(tmp_path).message


# ---------------------------------------------------------------------- damage


@pytest.mark.parametrize("cut", [0, 3, 100, 5000, -1, -30, -2000])
def test_a_truncated_file(cut, tmp_path):
    folder = copy_legacy("legacy_llama_adam_tp2pp2", tmp_path)
    path = folder / "mp_rank_01_000" / MODEL
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(cut if cut >= 0 else size + cut)
    assert "mp_rank_01_000" in refused(folder).message


def test_a_file_of_an_old_torch(tmp_path):
    import torch

    folder = copy_legacy("legacy_llama_adam_tp2pp2", tmp_path)
    path = folder / "mp_rank_01_000" / MODEL
    torch.save({"model": {"a": torch.ones(3)}}, path, _use_new_zipfile_serialization=False)
    error = refused(folder)
    assert "torch before 1.6" in error.message
    assert "torch.save(torch.load" in error.hint


@pytest.mark.parametrize("content", [b"garbage" * 50, b"PK\x03\x04" + bytes(300), b"\x80\x02}."])
def test_a_file_that_is_something_else(content, tmp_path):
    folder = copy_legacy("legacy_llama_adam_tp2pp2", tmp_path)
    (folder / "mp_rank_00_001" / MODEL).write_bytes(content)
    assert "mp_rank_00_001" in refused(folder).message


@pytest.mark.parametrize("where", ["model", "optimizer", "rng_state"])
def test_a_tree_that_holds_itself(where, tmp_path):
    folder = copy_legacy("legacy_llama_adam_tp2pp2", tmp_path)
    path = folder / "mp_rank_01_001" / MODEL

    def knot(tree):
        if where == "rng_state":
            tree[where].append(tree[where])
        else:
            loop = {"optimizer": {"state": {}, "param_groups": []}}
            loop["language_model"] = loop
            loop["optimizer"]["state"][0] = loop
            tree[where] = loop

    edit(path, knot)
    assert refused(folder).message


@pytest.mark.parametrize("name", ["legacy_llama_adam_tp2pp2", "legacy_llama_distopt_tp2pp2dp2"])
def test_a_flipped_byte_is_found_by_its_checksum(name, tmp_path):
    folder = copy_legacy(name, tmp_path)
    tensor, path, offset, size = next(p for p in payloads(folder, "optimizer") if p[0].endswith("linear_fc2.weight"))
    flip(path, offset + size // 2, 1)  # a low bit of a moment: nothing else could notice
    assert "exp_avg" in tensor
    with pytest.raises(IntegrityError) as error:
        reshard(folder, tmp_path / "out", {"tp": 1})
    assert "CRC-32" in str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_wrong_order_of_parameters_is_refused(tmp_path):
    """Two parameters of one shape exchanged: sizes agree, but master weights do not round to the weights."""
    folder = copy_legacy("legacy_llama_adam_tp2pp2", tmp_path)

    def change(tree):
        masters = tree["optimizer"]["fp32_from_fp16_params"][1]
        masters[0], masters[1] = masters[1], masters[0]

    edit(folder / "mp_rank_00_001" / MODEL, change)
    with pytest.raises(IntegrityError) as error:
        reshard(folder, tmp_path / "out", {"tp": 1})
    assert "layer_norm_weight" in str(error.value)


@pytest.mark.parametrize("damage", ["no file", "another size", "frozen"])
def test_an_optimizer_that_is_not_understood_does_not_hide_the_weights(damage, tmp_path):
    name = "legacy_llama_adam_tp2pp2" if damage == "frozen" else "legacy_llama_distopt_tp2pp2dp2"
    folder = copy_legacy(name, tmp_path)
    if damage == "no file":
        (folder / "mp_rank_01_000" / FLAT).unlink()
    elif damage == "another size":

        def drop_one(tree):
            kept = [item for item in tree["model"].pairs if not item[0].endswith("linear_proj.weight")]
            tree["model"].pairs[:] = [*kept, *(i for i in tree["model"].pairs if i not in kept)]
            node = tree["model"].pairs[0][1]
            tree["model"].pairs.append(("decoder.final_layernorm.bias", node))

        edit(folder / "mp_rank_00_001" / MODEL, drop_one)
        edit(folder / "mp_rank_01_001" / MODEL, drop_one)
    else:
        edit(
            folder / "mp_rank_00_000" / MODEL, lambda t: t["optimizer"]["optimizer"]["param_groups"][0]["params"].pop()
        )
    catalog = open_checkpoint(folder).catalog
    (problem,) = [p for p in catalog.problems if p.severity == ("error" if damage == "no file" else "unknown")]
    assert "optimizer state is not understood" in problem.message
    if damage == "another size":  # with the parameter that was put in, the arguments do not fit the tensors any more
        with pytest.raises(RequestError, match="contradicts itself"):
            reshard(folder, tmp_path / "out", {"tp": 1}, optimizer="none")
        return
    run_conversion(plan_export(open_checkpoint(folder), tmp_path / "hf", ExportOptions()))
    with pytest.raises(IntegrityError if damage == "no file" else RequestError):
        reshard(folder, tmp_path / "out", {"tp": 1})
    reshard(folder, tmp_path / "out", {"tp": 1}, optimizer="none")
