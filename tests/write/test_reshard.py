"""Reshards of every golden checkpoint, read back with torch's own reader and compared bit for bit with the truth."""

import math

import numpy as np
import pytest

from converters.formats import open_checkpoint
from converters.optimizer.state import optimizer_state
from harness.checkpoints import GOLDENS, golden, tree, write_llama
from harness.reshard_cases import TRAINED, by_parameter, compare, expected, folder_of, read_with_torch, reshard
from harness.support import read_tensor

MIB = 1 << 20

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

# two layers, four heads, two query groups; four layers and eight heads; four experts
SMALL = [
    ({"tp": 4}, {}),
    ({"pp": 2, "dp": 2}, {"fully_parallel": True, "layers": "per-layer"}),
    ({"tp": 2, "pp": 2, "dp": 4}, {"fully_parallel": True, "rng": "drop"}),
]
FOUR = [
    ({"tp": 8}, {}),
    ({"tp": 2, "pp": 2, "vpp": 2, "dp": 2}, {"fully_parallel": True, "layers": "stacked"}),
    ({"pp": 2, "first_layers": 1}, {"layers": "per-layer"}),
    ({"pp": 2, "pp_layout": "Et|tt|t|L"}, {}),
]
EXPERTS = [
    ({"ep": 4, "dp": 4}, {"fully_parallel": True}),
    ({"tp": 2, "ep": 2, "etp": 1}, {}),
    ({"tp": 2, "pp": 2}, {"layers": "per-layer"}),
]


def cases():
    for name, (config, _) in GOLDENS.items():
        experts = any(word in config for word in ("mix", "moe", "deepseek"))
        for layout, options in FOUR if config == "llama4" else EXPERTS if experts else SMALL:
            label = "-".join(f"{key}{value}" for key, value in layout.items() if key != "pp_layout")
            yield pytest.param(name, layout, options, id=f"{name}-{label}")


def reader_keys(root):
    return {key for tensor in open_checkpoint(root).catalog.tensors.values() for key in tensor.keys}


def state_of(root, tensors):
    """Optimizer state of flat buckets, through our own reader."""
    reader = open_checkpoint(root)
    found = {}
    for info in optimizer_state(reader).tensors.values():
        state, name = info.name.removeprefix("optimizer.state.").split(".", 1)
        found[f"{state}/{name}"] = read_tensor(reader, info)
    return {key: value for key, value in tensors.items() if key.startswith("model/")} | found


@pytest.mark.parametrize(("name", "layout", "options"), cases())
def test_weights_and_optimizer_are_the_truth(name, layout, options, tmp_path):
    plan, stats = reshard(name, tmp_path / "out", layout, **options)
    found = by_parameter(read_with_torch(folder_of(tmp_path / "out")))
    compare(found, expected(GOLDENS[name][0], optimizer=name in TRAINED))
    reader = open_checkpoint(tmp_path / "out")
    assert not reader.catalog.problems
    assert {path.name for path in folder_of(tmp_path / "out").glob("*.distcp")} == {
        file.name.rpartition("/")[2] for file in plan.job.files
    }
    if not name.startswith("v009"):  # whose records hold more than their tensor, all of it under one checksum
        assert stats.bytes_read <= plan.job.bytes_read * 1.02 + 4096 * len(plan.job.sources)
    if options.get("layers") == "per-layer":
        keys = [key for key in reader_keys(tmp_path / "out") if "decoder.layers." in key]
        assert all(key.partition("decoder.layers.")[2][0].isdigit() for key in keys)


@pytest.mark.parametrize("name", TRAINED)
def test_dp_reshardable_holds_the_truth(name, tmp_path):
    config = GOLDENS[name][0]
    layout = {"pp": 2, "dp": 2} | ({"ep": 2} if config in ("mixtral", "deepseek_mtp") else {})
    reshard(name, tmp_path / "out", layout, optimizer="dp_reshardable")
    arrays = {
        key: value for key, value in read_with_torch(folder_of(tmp_path / "out")).items() if "dp_group_idx" not in key
    }
    compare(state_of(tmp_path / "out", by_parameter(arrays)), expected(config, optimizer=True))


@pytest.mark.parametrize(
    ("name", "model", "layout"),
    [
        ("llama_adam_tp2pp2", "llama_dpreshardable_tp2pp2dp2", {"tp": 2, "pp": 2, "dp": 2}),
        ("llama_fullyreshardable_tp2pp2dp2", "llama_dpreshardable_tp2pp2dp2", {"tp": 2, "pp": 2, "dp": 2}),
        ("v014_llama_modelspace_tp2pp2dp2", "llama_dpreshardable_tp2pp2dp2", {"tp": 2, "pp": 2, "dp": 2}),
        ("llama_dpreshardable_buckets_tp2dp2", "llama_dpreshardable_buckets_tp2dp2", {"tp": 2, "dp": 2}),
        ("llama4_dpreshardable_pp4dp2", "llama4_dpreshardable_pp4dp2", {"pp": 4, "dp": 2}),
        ("mixtral_adam_ep2tp2", "mixtral_dpreshardable_ep2pp2", {"pp": 2, "ep": 2, "dp": 2}),
        ("v012_mixtral_modelspace_ep2tp2", "mixtral_dpreshardable_ep2pp2", {"pp": 2, "ep": 2, "dp": 2}),
    ],
)
def test_buckets_are_those_that_megatron_saved(name, model, layout, tmp_path):
    """Read by torch: the same keys, the same 1-D arrays, the same weights, the same pieces. Gaps are what memory held."""
    plan, _ = reshard(name, tmp_path / "out", layout, optimizer="dp_reshardable")
    mine, theirs = read_with_torch(folder_of(tmp_path / "out")), read_with_torch(golden(model))
    assert mine.keys() == theirs.keys()
    for part in plan.job.seals.buckets:
        first = part.start
        for piece in part.pieces:
            numel = math.prod(piece.shape)
            if piece.fills:
                assert not mine[part.key][first : first + numel].any()
                theirs[part.key][first : first + numel] = 0
            first += numel
    for key, value in theirs.items():
        assert np.array_equal(mine[key], value), key
    ours, other = open_checkpoint(tmp_path / "out").catalog, open_checkpoint(golden(model)).catalog
    for key in (key for key in theirs if "dp_group_idx" in key):
        assert [c.box for c in ours.tensors[key].chunks()] == [c.box for c in other.tensors[key].chunks()], key
    group_objects = {key for key in other.objects if ".dp_group_idx_" in key}
    assert {key for key in ours.objects if ".dp_group_idx_" in key} == group_objects


def test_optimizer_can_be_left_out(tmp_path):
    plan, _ = reshard("llama_dpreshardable_tp2pp2dp2", tmp_path / "out", {"tp": 4}, optimizer="none")
    found = by_parameter(read_with_torch(folder_of(tmp_path / "out")))
    compare(found, expected("llama", optimizer=False))
    assert not any("optimizer" in key for key in open_checkpoint(tmp_path / "out").catalog.objects)
    assert {reason for what, reason in plan.dropped if "optimizer" in what} == {"optimizer state is left out by option"}


def test_keep_means_the_kind_that_the_source_has(tmp_path):
    for name, kind in (
        ("llama_dpreshardable_tp2pp2dp2", "dp_reshardable"),
        ("llama_adam_tp2pp2", "plain"),
        ("llama_fullyreshardable_tp2pp2dp2", "fully_reshardable"),
    ):
        plan, _ = reshard(name, tmp_path / name, {"tp": 2, "dp": 2}, optimizer="keep")
        assert plan.options.optimizer == kind
        flat = [key for key in read_with_torch(folder_of(tmp_path / name)) if "dp_group_idx" in key]
        assert bool(flat) == (kind == "dp_reshardable")


# ---------------------------------------------------------------------- there and back, workers


@pytest.mark.parametrize(
    ("name", "first", "second", "options"),
    [
        ("llama_adam_tp2pp2", {"tp": 2, "pp": 2}, {"tp": 4}, {}),
        ("v009_llama_bucketspace_tp2pp2dp2", {"pp": 2}, {"tp": 4, "pp": 2}, {}),
        ("llama_dpreshardable_tp2pp2dp2", {"tp": 2, "dp": 2}, {"pp": 2}, {"optimizer": "dp_reshardable"}),
        ("llama4_dpreshardable_pp4dp2", {"pp": 2, "vpp": 2, "dp": 2}, {"tp": 8}, {"optimizer": "dp_reshardable"}),
        ("mixtral_dpreshardable_ep2pp2", {"ep": 2, "dp": 2}, {"tp": 2, "ep": 4, "etp": 1, "dp": 2}, {}),
        ("mixtral_adam_ep2tp2", {"ep": 2, "dp": 2}, {"tp": 2}, {"optimizer": "dp_reshardable"}),
        ("deepseek_mtp_adam_ep2pp2", {"pp": 2, "ep": 2, "dp": 2}, {"tp": 2}, {}),
        ("gpt_adam_tp2pp2", {"tp": 4, "pp": 2}, {}, {}),
        ("nemo2_llama4_weights_tp2pp2", {"tp": 4}, {"pp": 4}, {}),
        ("qwen3_moe_weights_tp2ep2", {"tp": 2, "ep": 4, "etp": 1, "dp": 2}, {"pp": 2}, {}),
    ],
)
def test_there_and_back_gives_the_same_files(name, first, second, options, tmp_path):
    """Byte for byte, `.metadata` and `common.pt` included; the order within files is the source's, so A is ours too."""
    reshard(name, tmp_path / "0", second, rng="drop")
    reshard(tmp_path / "0", tmp_path / "a", first, rng="drop", **options)
    reshard(tmp_path / "a", tmp_path / "b", second, rng="drop")
    reshard(tmp_path / "b", tmp_path / "c", first, rng="drop", **options)
    assert tree(tmp_path / "a") == tree(tmp_path / "c")
    assert tree(tmp_path / "a") != tree(tmp_path / "b")


@pytest.mark.parametrize("optimizer", ["fully_reshardable", "dp_reshardable"])
def test_bytes_do_not_depend_on_workers_or_memory(optimizer, tmp_path):
    digests = []
    for threads, memory in ((1, 64 * MIB), (2, 64 * MIB), (8, 64 * MIB), (1, MIB // 4), (2, MIB)):
        into = tmp_path / f"{threads}-{memory}"
        plan, _ = reshard(
            "llama4_dpreshardable_pp4dp2",
            into,
            {"tp": 2, "pp": 2, "dp": 2},
            optimizer=optimizer,
            threads=threads,
            max_memory=memory,
        )
        assert plan.job.peak_memory <= memory
        digests.append(tree(into))
    assert all(found == digests[0] for found in digests)


def test_large_tensors_are_cut_into_tiles(tmp_path):
    """32 MB through buffers of 1 MiB, split along rows and columns: the same bytes, each source byte read once."""
    write_llama(tmp_path / "src")
    before = by_parameter(read_with_torch(tmp_path / "src"))
    digests = []
    for threads in (1, 8):
        into = tmp_path / str(threads)
        plan, stats = reshard(tmp_path / "src", into, {"tp": 4, "pp": 1}, threads=threads, max_memory=MIB)
        compare(by_parameter(read_with_torch(folder_of(into))), before)
        assert len(plan.job.tasks) > 50
        assert stats.bytes_read <= 1.02 * plan.job.bytes_read
        digests.append(tree(into))
    assert digests[0] == digests[1]


# ---------------------------------------------------------------------- the vocabulary


@pytest.mark.parametrize("optimizer", ["fully_reshardable", "dp_reshardable"])
def test_padded_vocabulary_shrinks_and_grows(optimizer, tmp_path):
    """120 rows: 128 at TP 2 (padded to a multiple of 8 x TP), 120 at TP 1, 128 at TP 4; new rows are zero."""
    wanted = expected("llama", optimizer=True)
    reshard("llama_adam_tp2pp2", tmp_path / "1", {"tp": 1}, optimizer=optimizer)
    reshard(tmp_path / "1", tmp_path / "4", {"tp": 4}, optimizer=optimizer)
    for root, rows in ((tmp_path / "1", 120), (tmp_path / "4", 128)):
        arrays = read_with_torch(folder_of(root))
        assert arrays["embedding.word_embeddings.weight"].shape[0] == arrays["output_layer.weight"].shape[0] == rows
        if optimizer == "fully_reshardable":
            assert arrays["optimizer.state.exp_avg.output_layer.weight"].shape[0] == rows
        found = by_parameter({key: value for key, value in arrays.items() if "dp_group_idx" not in key})
        compare(state_of(root, found) if optimizer == "dp_reshardable" else found, wanted)
