"""Reshards: everything beside the tensors; what is refused; what damage, kills and wrong orders lead to."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from converters.errors import DestinationError, FormatError, IntegrityError, Interrupted, RequestError
from converters.events import Resumed, StopFlag
from converters.formats import open_checkpoint
from converters.megatron.layout import Layout
from converters.optimizer.proof import prove_masters
from converters.optimizer.state import optimizer_state
from converters.write.reshard import ReshardOptions, plan_reshard
from converters.write.target_state import open_common
from converters.write.write_plan import run_conversion
from harness.checkpoints import REPOSITORY, copy_golden, flip, golden, payloads, run_cli, tree, write_llama
from harness.reshard_cases import args_of, common_of, folder_of, reshard
from harness.support import GOLDEN

MIB = 1 << 20
RNG = {"no_save_rng": True}


def source_args(name):
    from converters.pickles.nodes import fields

    return fields(open_common(open_checkpoint(golden(name)))[1]["args"])


def different(before, after):
    """`name -> value` of every field that differs, by value or by what it shows."""
    assert not before.keys() - after.keys()
    return {name: value for name, value in after.items() if name not in before or repr(before[name]) != repr(value)}


# ---------------------------------------------------------------------- arguments

FIRST_ARGS = [
    (
        "llama_adam_tp2pp2",
        {"tp": 4},
        {},
        {
            "tensor_model_parallel_size": 4,
            "pipeline_model_parallel_size": 1,
            "transformer_pipeline_model_parallel_size": 1,
            "expert_tensor_parallel_size": 4,
        }
        | RNG,
    ),
    (
        "llama_adam_tp2pp2",
        {"tp": 2, "pp": 2},
        {"optimizer": "fully_reshardable"},
        {"use_distributed_optimizer": True, "dist_ckpt_optim_fully_reshardable": True},
    ),
    (
        "llama_adam_tp2pp2",
        {"tp": 2, "pp": 2},
        {"optimizer": "none"},
        {"no_save_optim": True},
    ),
    (
        "llama_dpreshardable_tp2pp2dp2",
        {"tp": 1, "pp": 2, "dp": 4},
        {"optimizer": "dp_reshardable"},
        {
            "tensor_model_parallel_size": 1,
            "expert_tensor_parallel_size": 1,
            "data_parallel_size": 4,
            "padded_vocab_size": 120,
        }
        | RNG,
    ),
    (
        "llama4_dpreshardable_pp4dp2",
        {"pp": 2, "vpp": 2, "dp": 1},
        {},
        {
            "pipeline_model_parallel_size": 2,
            "transformer_pipeline_model_parallel_size": 2,
            "virtual_pipeline_model_parallel_size": 2,
            "num_virtual_stages_per_pipeline_rank": 2,
            "data_parallel_size": 1,
            "world_size": 2,
            "dist_ckpt_optim_fully_reshardable": True,
        }
        | RNG,
    ),
    (
        "llama4_dpreshardable_pp4dp2",
        {"pp": 2, "last_layers": 1, "dp": 4},
        {"optimizer": "keep"},
        {
            "pipeline_model_parallel_size": 2,
            "transformer_pipeline_model_parallel_size": 2,
            "decoder_last_pipeline_num_layers": 1,
            "data_parallel_size": 4,
        }
        | RNG,
    ),
    (
        "mixtral_adam_ep2tp2",
        {"tp": 2, "ep": 4, "etp": 1, "dp": 2},
        {"optimizer": "fully_reshardable"},
        {
            "expert_model_parallel_size": 4,
            "expert_tensor_parallel_size": 1,
            "use_distributed_optimizer": True,
            "dist_ckpt_optim_fully_reshardable": True,
        },
    ),
    (
        "v019_llama_fullyreshardable_tp2dp2",
        {"tp": 2, "dp": 2},
        {},
        {"inference_cuda_graph_scope": None},
    ),
    ("v009_llama_modelspace_tp2pp2dp2", {"tp": 2, "pp": 2, "dp": 2}, {}, {}),
]


@pytest.mark.parametrize(("name", "layout", "options", "changes"), FIRST_ARGS)
def test_arguments_change_as_stated_and_nothing_else(name, layout, options, changes, tmp_path):
    plan, _ = reshard(name, tmp_path / "out", layout, **options)
    folder = folder_of(tmp_path / "out")
    before = source_args(name)
    found = different(before, args_of(folder))
    assert found == {k: v for k, v in changes.items() if k in found or before.get(k) != v}
    assert {name: change["to"] for name, change in plan.facts["changed_args"].items()} == found


def test_the_rest_of_the_common_state_is_carried(tmp_path):
    reshard("llama_dpreshardable_tp2pp2dp2", tmp_path / "out", {"tp": 4})
    before, after = (common_of(f) for f in (golden("llama_dpreshardable_tp2pp2dp2"), folder_of(tmp_path / "out")))
    for key in ("checkpoint_version", "iteration", "num_floating_point_operations_so_far", "opt_param_scheduler"):
        assert after[key] == before[key]
    assert after.keys() - {"optimizer"} == before.keys() - {"optimizer"}
    assert [group["step"] for group in after["optimizer"]["optimizer"]["param_groups"]] == [2, 2]


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (
            {},
            {
                "distrib_optim_sharding_type": "fully_reshardable",
                "singleton_local_shards": False,
                "chained_optim_avoid_prefix": True,
                "distrib_optim_fully_reshardable_mem_efficient": False,
            },
        ),
        (
            {"optimizer": "dp_reshardable"},
            {
                "distrib_optim_sharding_type": "dp_reshardable",
                "singleton_local_shards": False,
                "chained_optim_avoid_prefix": True,
            },
        ),
    ],
)
@pytest.mark.parametrize("name", ["llama_fullyreshardable_tp2pp2dp2", "v009_llama_bucketspace_tp2pp2dp2"])
def test_content_metadata_says_what_the_loader_asks_for(name, options, wanted, tmp_path):
    reshard(name, tmp_path / "out", {"tp": 2}, **options)
    assert common_of(folder_of(tmp_path / "out"))["content_metadata"] == wanted


def test_small_files(tmp_path):
    reshard("llama_adam_tp2pp2", tmp_path / "out", {"tp": 4})
    assert (tmp_path / "out" / "latest_checkpointed_iteration.txt").read_text() == "10"
    folder = tmp_path / "out" / "iter_0000010"
    assert json.loads((folder / "metadata.json").read_text()) == {
        "sharded_backend": "torch_dist",
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }
    assert {path.name for path in folder.iterdir()} == {
        *(f"__{rank}_0.distcp" for rank in range(4)),
        ".metadata",
        "common.pt",
        "metadata.json",
    }
    release = copy_golden("llama_adam_tp2pp2", tmp_path / "src" / "release")
    reshard(release, tmp_path / "again", {"tp": 2})
    assert (tmp_path / "again" / "latest_checkpointed_iteration.txt").read_text() == "release"
    assert (tmp_path / "again" / "release" / ".metadata").exists()


# ---------------------------------------------------------------------- objects


def objects(folder, word):
    """Key -> record of the stored objects whose name holds a word."""
    out = {}
    for key, info in open_checkpoint(folder).catalog.objects.items():
        if word in info.name:
            with (folder / info.file).open("rb") as file:
                file.seek(info.start)
                out[key] = file.read(info.length)
    return out


@pytest.mark.parametrize(
    ("layout", "rng", "kept"),
    [
        ({"tp": 2, "pp": 2}, "auto", True),
        ({"tp": 2, "pp": 2, "dp": 4}, "keep", True),
        ({"tp": 2, "pp": 2}, "drop", False),
        ({"tp": 4}, "auto", False),
    ],
)
def test_random_state_is_kept_where_the_grid_is_the_same(layout, rng, kept, tmp_path):
    plan, _ = reshard("llama_adam_tp2pp2", tmp_path / "out", layout, rng=rng)
    found = objects(folder_of(tmp_path / "out"), "rng_state")
    before = objects(golden("llama_adam_tp2pp2"), "rng_state")
    assert found == (before if kept else {})
    assert args_of(folder_of(tmp_path / "out")).get("no_save_rng") is (None if kept else True)
    assert bool([what for what, reason in plan.dropped if "rng_state" in what]) is not kept


def test_random_state_of_another_grid_cannot_be_kept(tmp_path):
    with pytest.raises(RequestError, match="grid of 2 x 2 ranks") as caught:
        reshard("llama_adam_tp2pp2", tmp_path / "out", {"tp": 4}, rng="keep")
    assert "--rng drop" in caught.value.hint
    assert not (tmp_path / "out").exists()


def test_extra_states(tmp_path):
    """Kept under the same keys; filled for modules of other releases; dropped when not wanted."""
    before = objects(golden("llama_adam_tp2pp2"), "_extra_state")
    for option in ("keep", "fill", "drop"):
        reshard("llama_adam_tp2pp2", tmp_path / option, {"tp": 4}, extra_state=option)
    kept, filled, dropped = (objects(folder_of(tmp_path / o), "_extra_state") for o in ("keep", "fill", "drop"))
    assert kept == before
    assert dropped == {}
    assert before.items() <= filled.items()
    assert {key for key in filled if "core_attention._extra_state" in key} == {
        f"decoder.layers.self_attention.core_attention._extra_state/shard_{layer}_2" for layer in (0, 1)
    }
    reshard("llama_adam_tp2pp2", tmp_path / "each", {"tp": 4}, extra_state="keep", layers="per-layer")
    assert {key for key in objects(folder_of(tmp_path / "each"), "_extra_state") if "linear_fc2" in key} == {
        f"decoder.layers.{layer}.mlp.linear_fc2._extra_state/shard_0_1" for layer in (0, 1)
    }


def test_state_of_the_saving_ranks_is_dropped_and_listed(tmp_path):
    plan, _ = reshard("v019_llama_fullyreshardable_tp2dp2", tmp_path / "out", {"tp": 2, "dp": 2})
    stored = objects(golden("v019_llama_fullyreshardable_tp2dp2"), "rerun_state_machine_state")
    assert {what for what, reason in plan.dropped if "rank of the job" in reason} == set(stored)
    assert not objects(folder_of(tmp_path / "out"), "rerun_state_machine_state")


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("name", "options", "message", "hint"),
    [
        ("llama_adam_tp2pp2", ["--tp", "3"], "4 attention heads cannot be split over --tp 3", "try 1, 2 or 4"),
        ("llama_adam_tp2pp2", ["--tp", "6"], "4 attention heads cannot be split over --tp 6", "try 1, 2 or 4"),
        ("llama4_dpreshardable_pp4dp2", ["--pp", "3"], "--pp 3", "1, 2 or 4"),
        ("mixtral_adam_ep2tp2", ["--ep", "3"], "4 experts cannot be divided among --ep 3", "try 1, 2 or 4"),
        ("llama_adam_tp2pp2", ["--ep", "2"], "--ep 2 is for a mixture of experts", "leave --ep out"),
        ("llama_adam_tp2pp2", ["--vocab-size", "500"], "--vocab-size 500 is not possible", None),
        ("llama_adam_tp2pp2", ["--vocab-size", "100"], "--vocab-size 100 would cut trained rows", None),
        ("llama_adam_tp2pp2", ["--vocab-size", "-4"], "--vocab-size -4 is not possible", None),
        ("llama_adam_tp2pp2", ["--tp", "4", "--rng", "keep"], "random state", "--rng drop"),
    ],
)
def test_impossible_requests(name, options, message, hint, tmp_path):
    done = run_cli("reshard", golden(name), tmp_path / "out", *options)
    assert done.returncode == 4, done.stderr
    assert message in done.stderr
    assert hint is None or hint in done.stderr
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_choice_is_a_usage_error(tmp_path):
    done = run_cli("reshard", golden("llama_adam_tp2pp2"), tmp_path / "out", "--optimizer", "zero")
    assert done.returncode == 2
    assert "choose auto, plain, fully_reshardable, dp_reshardable, keep or none" in done.stderr


def test_a_filled_destination_is_refused(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(DestinationError):
        reshard("llama_adam_tp2pp2", tmp_path / "out", {"tp": 4})
    assert (tmp_path / "out" / "mine.txt").read_text() == "mine"


def test_a_dry_run_shows_the_plan_and_writes_nothing(tmp_path):
    done = run_cli("reshard", golden("llama_adam_tp2pp2"), tmp_path / "out", "--tp", "4", "--pp", "1", "-n", "--json")
    shown = json.loads(done.stdout)
    assert (done.returncode, shown["schema"]) == (0, "distckpt.reshard/1")
    assert shown["dry_run"] is True
    assert shown["layout"]["world_size"] == 4
    assert list(tmp_path.iterdir()) == []
    real, _ = reshard("llama_adam_tp2pp2", tmp_path / "out", {"tp": 4})
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "out").rglob("*.distcp")}
    assert {Path(file["name"]).name: file["bytes"] for file in shown["files"]} == sizes
    assert real.job.bytes_written == shown["bytes_written"] == sum(sizes.values())


# ---------------------------------------------------------------------- damage


@pytest.mark.parametrize("kind", ["weight", "optimizer"])
def test_a_flipped_byte_ends_it(kind, tmp_path):
    folder = copy_golden("llama_fullyreshardable_tp2pp2dp2", tmp_path / "src" / "iter_0000010")
    name, path, offset, size = payloads(folder, kind)[7]
    flip(path, offset + size // 2)
    with pytest.raises(IntegrityError) as caught:
        reshard(folder, tmp_path / "out", {"tp": 4})
    assert name.rpartition(".")[0].split(".")[-1] in str(caught.value)
    assert not (tmp_path / "out").exists()
    done = run_cli("reshard", folder, tmp_path / "out", "--tp", "4")
    assert done.returncode == 1
    assert not (tmp_path / "out").exists()


def test_a_missing_file_ends_it_before_anything_is_written(tmp_path):
    folder = copy_golden("llama_fullyreshardable_tp2pp2dp2", tmp_path / "src" / "iter_0000010")
    (folder / "__3_0.distcp").unlink()
    done = run_cli("reshard", folder, tmp_path / "out", "--tp", "4")
    assert done.returncode in (1, 3)
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


@pytest.mark.parametrize("optimizer", ["fully_reshardable", "dp_reshardable"])
def test_parameters_in_another_order_are_refused(optimizer, tmp_path):
    """Two master weights of one size change places in their bucket, checksums and all: only the values tell."""
    folder = tmp_path / "src" / "iter_0000010"
    swap_in_bucket(copy_golden("llama4_dpreshardable_pp4dp2", folder))
    with pytest.raises(IntegrityError, match="do not match") as caught:
        reshard(folder, tmp_path / "out", {"tp": 2}, optimizer=optimizer)
    assert "decoder.layers.0.mlp.linear_fc1.weight" in caught.value.details
    assert not (tmp_path / "out").exists()


def swap_in_bucket(folder):
    """Exchanges fc2 (64 x 96) and the gate half of fc1, which follow each other in the first bucket of layer 0."""
    key = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0.param"
    reader = open_checkpoint(folder)
    chunks = reader.catalog.tensors[key].chunks()
    places = []
    for chunk in chunks:
        path = reader.files[reader.file_of(chunk.record)]
        raw = path.read_bytes()
        where = reader.locate(chunk.record, lambda at, n, raw=raw: raw[at : at + n])
        places.append((path, where.offset + chunk.base * 4, chunk.box.shape[0]))
    whole = np.concatenate([np.frombuffer(p.read_bytes(), "<u4", n, at) for p, at, n in places])
    whole[:6144], whole[6144:12288] = whole[6144:12288].copy(), whole[:6144].copy()
    done = 0
    for path, at, n in places:
        raw = bytearray(path.read_bytes())
        raw[at : at + 4 * n] = whole[done : done + n].tobytes()
        done += n
        path.write_bytes(raw)


def test_the_swap_of_these_tests_is_the_only_reason(tmp_path):
    folder = copy_golden("llama4_dpreshardable_pp4dp2", tmp_path / "iter_0000010")
    reader = open_checkpoint(folder)
    prove_masters(reader, optimizer_state(reader).tensors)
    swap_in_bucket(folder)
    reader = open_checkpoint(folder)
    with pytest.raises(IntegrityError, match="do not match"):
        prove_masters(reader, optimizer_state(reader).tensors)


# ---------------------------------------------------------------------- interruptions

KILLED = """
import json, os, signal, sys, time
from pathlib import Path
from converters.execute import run as engine
from converters.events import Moved
from converters.formats import open_checkpoint
from converters.megatron.layout import Layout
from converters.write.reshard import ReshardOptions, plan_reshard
from converters.write.write_plan import run_conversion
engine._SAFE_POINT_SECONDS = 0.0
source, target, after = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
moved = tasks = 0
def in_the_journal():
    lines = (target.with_name(f".{target.name}.distckpt-partial") / ".journal").read_bytes().split(b"\\n")[:-1]
    return sum(len(json.loads(line).get("tasks", ())) for line in lines)
def watch(event):
    global moved, tasks
    if isinstance(event, Moved):
        moved, tasks = moved + event.nbytes, tasks + 1
    if moved >= after:
        while in_the_journal() < tasks:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
plan = plan_reshard(open_checkpoint(source), target, Layout(tp=4), ReshardOptions(max_memory=1 << 20))
run_conversion(plan, listener=watch)
"""


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A Llama of 32 MB and what an uninterrupted reshard makes of it."""
    root = tmp_path_factory.mktemp("llama")
    write_llama(root / "src")
    reshard(root / "src", root / "out", {"tp": 4}, max_memory=MIB)
    return root / "src", tree(root / "out")


@pytest.mark.parametrize("after", [4 * MIB, 20 * MIB])
def test_killed_and_run_again(after, llama, tmp_path):
    """SIGKILL in the middle: nothing published; the next run keeps what is there, and the bytes are the same."""
    source, whole = llama
    command = [sys.executable, "-c", KILLED, str(source), str(tmp_path / "out"), str(after)]
    child = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(REPOSITORY)}, check=False)
    assert child.returncode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    events = []
    plan = plan_reshard(
        open_checkpoint(source), tmp_path / "out", Layout(tp=4), ReshardOptions(max_memory=MIB, threads=8)
    )
    stats = run_conversion(plan, listener=events.append)
    assert stats.bytes_kept > after // 4
    assert any(isinstance(event, Resumed) for event in events)
    assert tree(tmp_path / "out") == whole
    assert [path.name for path in tmp_path.iterdir() if "partial" in path.name] == []


def test_stopped_and_run_again(llama, tmp_path):
    source, whole = llama
    stop, moved = StopFlag(), 0

    def watch(event):
        nonlocal moved
        moved += getattr(event, "nbytes", 0)
        if moved > 8 * MIB:
            stop.set(signal.SIGTERM)

    options = ReshardOptions(max_memory=MIB)
    plan = plan_reshard(open_checkpoint(source), tmp_path / "out", Layout(tp=4), options)
    with pytest.raises(Interrupted) as caught:
        run_conversion(plan, listener=watch, stop=stop)
    assert caught.value.signum == signal.SIGTERM
    assert not (tmp_path / "out").exists()
    plan = plan_reshard(open_checkpoint(source), tmp_path / "out", Layout(tp=4), options)
    assert run_conversion(plan).bytes_kept > 0
    assert tree(tmp_path / "out") == whole


def test_another_request_does_not_continue_it(llama, tmp_path):
    """What an interrupted run left for TP 4 is not taken for TP 2."""
    source, _ = llama
    command = [sys.executable, "-c", KILLED, str(source), str(tmp_path / "out"), str(8 * MIB)]
    subprocess.run(command, env=os.environ | {"PYTHONPATH": str(REPOSITORY)}, check=False)
    _, stats = reshard(source, tmp_path / "out", {"tp": 2}, max_memory=MIB)
    assert stats.bytes_kept == 0
    reshard(source, tmp_path / "fresh", {"tp": 2}, max_memory=MIB)
    assert tree(tmp_path / "out") == tree(tmp_path / "fresh")


def test_an_object_that_is_carried_is_compared_with_its_checksum(tmp_path):
    source = tmp_path / "src"
    shutil.copytree(GOLDEN / "llama_adam_tp2pp2", source)
    info = open_checkpoint(source).catalog.objects["rng_state/shard_0.0_2.2"]
    path = source / "iter_0000010" / info.file
    raw = bytearray(path.read_bytes())
    raw[info.start + info.length // 2] ^= 4
    path.write_bytes(raw)
    plan = plan_reshard(open_checkpoint(source), tmp_path / "dst", Layout(tp=2, pp=2), ReshardOptions(rng="keep"))
    with pytest.raises((IntegrityError, FormatError)):
        run_conversion(plan)
    assert not (tmp_path / "dst").exists()
