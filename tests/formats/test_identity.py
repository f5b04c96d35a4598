"""What a checkpoint is, told from real ones and from made-up catalogs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from converters.catalog import Catalog, FileInfo, ObjectInfo, Part, TensorInfo
from converters.chunks import StoredArray
from converters.dtypes import dtype
from converters.formats import open_checkpoint
from converters.megatron.identity import SavedLayout, identify, writer_of
from harness.support import GOLDEN

# name -> (tp, pp, ep, dp, ranks), optimizer layout, states
KNOWN = {
    "llama_adam_tp2pp2": ((2, 2, 1, 1, 4), "Adam, not distributed", "exp_avg exp_avg_sq fp32_param"),
    "llama_dpreshardable_tp2pp2dp2": ((2, 2, 1, 2, 8), "dp_reshardable", "exp_avg exp_avg_sq param"),
    "llama_dpreshardable_buckets_tp2dp2": ((2, 1, 1, 2, 4), "dp_reshardable", "exp_avg exp_avg_sq param"),
    "llama_dpzero_tp2pp2dp2": ((2, 2, 1, 2, 8), "dp_zero_gather_scatter", ""),
    "llama_fullyreshardable_tp2pp2dp2": ((2, 2, 1, 2, 8), "fully_reshardable", "exp_avg exp_avg_sq param"),
    "llama_singleton_weights_tp2pp2": ((2, 2, 1, 1, 4), "none", ""),
    "llama4_dpreshardable_pp4dp2": ((1, 4, 1, 2, 8), "dp_reshardable", "exp_avg exp_avg_sq param"),
    "mixtral_adam_ep2tp2": ((2, 1, 2, 2, 4), "Adam, not distributed", "exp_avg exp_avg_sq fp32_param"),
    "mixtral_dpreshardable_ep2pp2": ((1, 2, 2, 2, 4), "dp_reshardable", "exp_avg exp_avg_sq param"),
    "deepseek_mtp_adam_ep2pp2": ((1, 2, 2, 2, 4), "Adam, not distributed", "exp_avg exp_avg_sq fp32_param"),
    "v009_llama_bucketspace_tp2pp2dp2": ((2, 2, 1, 2, 8), "fully_sharded_bucket_space", "exp_avg exp_avg_sq param"),
    "v009_llama_modelspace_tp2pp2dp2": ((2, 2, 1, 2, 8), "fully_sharded_model_space", "exp_avg exp_avg_sq fp32_param"),
    "v012_mixtral_modelspace_ep2tp2": ((2, 1, 2, 2, 4), "fully_sharded_model_space", "exp_avg exp_avg_sq fp32_param"),
    "v014_llama_modelspace_tp2pp2dp2": ((2, 2, 1, 2, 8), "fully_sharded_model_space", "exp_avg exp_avg_sq fp32_param"),
    "v019_llama_fullyreshardable_tp2dp2": ((2, 1, 1, 2, 4), "fully_reshardable", "exp_avg exp_avg_sq param"),
}


def golden(name: str) -> Catalog:
    return open_checkpoint(GOLDEN / name).catalog


def tensor(name: str, shape: tuple[int, ...], *, cuts: int = 1, axis: int = 0, kind: str = "weight") -> TensorInfo:
    """A tensor stored in `cuts` equal chunks along an axis."""
    sizes = np.tile(np.array(shape, np.int64), (cuts, 1))
    starts = np.zeros_like(sizes)
    if shape:
        sizes[:, axis] //= cuts
        starts[:, axis] = np.arange(cuts) * sizes[:, axis]
    array = StoredArray(name, shape, starts, sizes, np.arange(cuts, dtype=np.int64))
    return TensorInfo(name, dtype("bfloat16"), shape, kind, (Part(array),))


def made(*tensors: TensorInfo, **more) -> Catalog:
    return Catalog(Path("ckpt"), "torch_dist", "Megatron-Core", {t.name: t for t in tensors}, **more)


@pytest.mark.parametrize("name", KNOWN)
def test_layout_and_optimizer_of_real_checkpoints(name):
    identity = identify(golden(name))
    layout = identity.layout
    expected, optimizer, states = KNOWN[name]
    assert (layout.tp, layout.pp, layout.ep, layout.dp, layout.ranks) == expected
    assert layout.source == "training arguments"
    assert identity.optimizer.name == optimizer
    assert identity.optimizer.states == tuple(states.split())
    assert identity.contradictions == ()
    assert identity.model.consumed_train_samples == 80


@pytest.mark.parametrize("name", [n for n, (_, optimizer, _) in KNOWN.items() if optimizer != "none"])
def test_optimizer_layout_without_any_statement(name):
    catalog = golden(name)
    found = identify(replace(catalog, content={}, common=None)).optimizer
    expected = KNOWN[name][1]
    # the two bucket layouts have the same keys; only a statement or the writing version tells them apart
    if expected == "fully_sharded_bucket_space":
        expected = "dp_reshardable"
    assert found.name == expected


@pytest.mark.parametrize("name", ["llama_adam_tp2pp2", "mixtral_adam_ep2tp2", "v009_llama_modelspace_tp2pp2dp2"])
def test_every_byte_belongs_to_a_component(name):
    catalog = golden(name)
    identity = identify(catalog)
    stored = catalog.nbytes() + sum(o.length for o in catalog.objects.values())
    assert sum(c.nbytes for c in identity.components) == identity.nbytes == stored
    count = sum(c.tensors for c in identity.components)
    assert count == len(catalog.tensors) + len(catalog.objects)


def test_components_of_a_mixture_of_experts():
    names = [c.name for c in identify(golden("deepseek_mtp_adam_ep2pp2")).components]
    assert names == [
        "embedding",
        "attention",
        "mlp",
        "router",
        "experts",
        "shared experts",
        "norms",
        "multi-token prediction",
        "output layer",
        "optimizer",
        "other state",
    ]


def test_parameters_leave_out_vocabulary_padding():
    identity = identify(golden("llama_adam_tp2pp2"))
    # (128 - 120) rows of 32, in the embedding and in the output layer; the 0.9 save of the same model has no padding
    assert identity.padding == 2 * 8 * 32
    assert identity.parameters == identify(golden("v009_llama_modelspace_tp2pp2dp2")).parameters == 23200


def test_layout_from_random_states_when_arguments_are_gone():
    catalog = replace(golden("llama_dpreshardable_tp2pp2dp2"), args={}, common=None)
    layout = identify(catalog).layout
    assert (layout.tp, layout.pp, layout.dp) == (2, 2, None)
    assert layout.source == "grid of the random states"


def test_layout_from_three_axes_of_random_states():
    catalog = replace(golden("mixtral_dpreshardable_ep2pp2"), args={}, common=None)
    layout = identify(catalog).layout
    assert (layout.tp, layout.pp, layout.dp) == (1, 2, 2)


def test_tensor_parallel_size_from_chunks_alone():
    name = "decoder.layers.0.self_attention.linear_proj.weight"
    layout = identify(made(tensor(name, (8, 12), cuts=4, axis=1))).layout
    assert layout.tp == 4
    assert layout.source == "chunks of the attention projections"


def test_nothing_known():
    identity = identify(made(tensor("a", ())))
    assert identity.layout == SavedLayout()
    assert identity.optimizer.name == "none"
    assert identity.sharing.parallel is None
    assert identity.padding is None
    assert identity.parameters == 1


@pytest.mark.parametrize(
    ("layout", "places"),
    [
        (SavedLayout(tp=2, pp=2, dp=2), {0: (0, 0, 0, 0), 1: (1, 0, 0, 0), 2: (0, 0, 1, 0), 5: (1, 0, 0, 1), 8: None}),
        (SavedLayout(tp=2, pp=1, cp=2, dp=2), {1: (1, 0, 0, 0), 2: (0, 1, 0, 0), 4: (0, 0, 1, 0), 7: (1, 1, 1, 0)}),
        (SavedLayout(tp=1, pp=2, dp=2, pp_before_dp=True), {1: (0, 0, 0, 1), 2: (0, 0, 1, 0)}),
        (SavedLayout(tp=2, pp=2), {0: None}),
    ],
)
def test_where_a_rank_stands(layout, places):
    coordinates = {rank: layout.coordinates(rank) for rank in places}
    assert {rank: at and (at.tp, at.cp, at.dp, at.pp) for rank, at in coordinates.items()} == places


def test_coordinates_agree_with_what_the_ranks_wrote():
    # without optimizer and replicas, the records of rank r are the layers of its pipeline stage
    reader = open_checkpoint(GOLDEN / "llama_singleton_weights_tp2pp2")
    layout = identify(reader.catalog).layout
    for layer in (0, 1):
        info = reader.catalog.tensors[f"decoder.layers.{layer}.self_attention.linear_qkv.weight"]
        for chunk in info.chunks():
            rank, _ = writer_of(reader.files[reader.file_of(chunk.record)].name)
            assert layout.coordinates(rank).pp == layer
            assert layout.coordinates(rank).tp == chunk.box.start[0] // chunk.box.shape[0]


def _written_by(ranks, **args) -> Catalog:
    files = tuple(FileInfo(f"__{rank}_0.distcp", 10, 1, 10, 10) for rank in ranks)
    sizes = {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 1,
        "data_parallel_size": 2,
        "world_size": 4,
    }
    return made(tensor("decoder.final_layernorm.weight", (4,)), args=sizes | args, files=files)


@pytest.mark.parametrize(
    ("ranks", "args", "expected"),
    [
        ((0, 1), {}, False),
        ((0, 1, 2, 3), {}, True),
        ((0, 1, 2, 3), {"expert_model_parallel_size": 2, "num_experts": 2}, None),
        ((0, 1, 2, 3), {"ckpt_fully_parallel_save": False}, False),
        ((0, 1), {"ckpt_fully_parallel_save": True}, True),
        ((0, 1), {"data_parallel_size": 1, "world_size": 2, "ckpt_fully_parallel_save": True}, None),
    ],
)
def test_fully_parallel_save(ranks, args, expected):
    sharing = identify(_written_by(ranks, **args)).sharing
    assert sharing.parallel is expected, sharing.reason


def test_contradiction_between_arguments_and_shapes_is_reported():
    catalog = golden("llama_adam_tp2pp2")
    wrong = replace(catalog, args={**catalog.args, "hidden_size": 64})
    assert any("hidden_size" in text for text in identify(wrong).contradictions)


def test_caution_about_shifted_buckets():
    catalog = golden("llama_fullyreshardable_tp2pp2dp2")
    safe = replace(catalog, args={**catalog.args, "overlap_grad_reduce": False})
    risky = replace(catalog, args={**catalog.args, "overlap_grad_reduce": True})
    assert identify(safe).optimizer.caution is None
    assert "shifted" in (identify(risky).optimizer.caution or "")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("__0_1.distcp", (0, 1)),
        ("__127_3.distcp", (127, 3)),
        ("model__3_0.distcp", (3, 0)),
        ("sub/__3_0.distcp", (3, 0)),
        ("__0_1.distcp.tmp", None),
        ("common.pt", None),
    ],
)
def test_file_names(name, expected):
    assert writer_of(name) == expected


def test_hostile_optimizer_entries_do_not_break_it():
    catalog = made(
        tensor("optimizer.state.exp_avg.x", (2,), kind="optimizer"),
        common={"optimizer": {"a": [1], 0: {"param_state_sharding_type": 7}}},
        content={"distrib_optim_sharding_type": ["x"]},
        objects={"o/shard_0_1": ObjectInfo("o", "o/shard_0_1", (0,), (1,), "__0_0.distcp", 0, 5)},
    )
    assert identify(catalog).optimizer.name == "Lion, not distributed"
