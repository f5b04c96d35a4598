"""Optimizer state of every golden checkpoint under its parameters' names, proved; and written back as Megatron wrote it."""

import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest

from converters.catalog import TensorInfo
from converters.dtypes import dtype
from converters.errors import FormatError, IntegrityError, RequestError
from converters.formats import open_checkpoint
from converters.formats.common_state import Archive
from converters.megatron.layout import Layout
from converters.megatron.model_args import ModelArgs
from converters.megatron.optimizer_parts import OptimizerPart
from converters.megatron.outline import Outline
from converters.megatron.rank_state_dict import LocalModel
from converters.optimizer.buckets import flatten
from converters.optimizer.groups import PartGroups, common_optimizer
from converters.optimizer.proof import prove_masters
from converters.optimizer.read_groups import read_param_groups
from converters.optimizer.state import may_be_shifted, optimizer_state
from converters.param_order import trainable
from converters.planning.plan import Op, Target
from converters.torchzip.records_out import object_record
from harness.checkpoints import GOLDENS, copy_golden, golden, truth
from harness.on_disk import swap_on_disk
from harness.support import GOLDEN, read_tensor

WITH_STATE = [name for name in GOLDENS if "weights" not in name]
FLAT = [name for name in WITH_STATE if re.search("dpreshardable|_dpr_|dpzero|bucketspace", name)]
RESHARDABLE = [name for name in FLAT if "dpreshardable" in name]
FULL_TRUTH = {"llama", "llama4", "mixtral"}
STATES = {"param": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
FP32 = dict.fromkeys(STATES, dtype("float32"))


@pytest.mark.parametrize("name", WITH_STATE)
def test_every_state_is_the_truth(name):
    reader = open_checkpoint(golden(name))
    found = optimizer_state(reader)
    config = GOLDENS[name][0]
    trained = [n for n, t in reader.catalog.weights.items() if trainable(n) and t.dtype.floating]
    lion = {n for part in found.recognised.parts if part.algorithm == "Lion" for n in part.names}
    assert set(found.tensors) == {
        f"optimizer.state.{state}.{n}" for state in STATES for n in trained if state != "exp_avg_sq" or n not in lion
    }
    assert (found.candidate is not None) == (name in FLAT)
    expected = truth(config)
    for info in found.tensors.values():
        assert info.opaque is None
        assert info.dtype.name == "float32"
        state, parameter = info.name.removeprefix("optimizer.state.").split(".", 1)
        value = read_tensor(reader, info)  # every element is stored once
        if config in FULL_TRUTH | {"pao", "drop", "lion"}:
            wanted = expected[f"{STATES[state]}/{parameter}"]
            assert np.array_equal(value[: wanted.shape[0]], wanted), info.name
    prove_masters(reader, found.tensors)


@pytest.mark.parametrize("name", FLAT)
def test_what_the_names_replace_is_listed(name):
    reader = open_checkpoint(golden(name))
    found = optimizer_state(reader)
    raw = {t.name for t in reader.catalog.tensors.values() if t.opaque}
    objects = {key for key in reader.catalog.objects if ".dp_group_idx_" in key}
    assert found.replaced.keys() == raw | objects


# ---------------------------------------------------------------------- proof


@pytest.mark.parametrize("name", ["llama_dpreshardable_tp2pp2dp2", "llama_dpzero_tp2pp2dp2", "llama_adam_tp2pp2"])
def test_swapped_tensors_are_refused_by_name(name):
    reader = open_checkpoint(golden(name))
    tensors = dict(optimizer_state(reader).tensors)
    first, second = (f"optimizer.state.param.decoder.layers.{n}.mlp.linear_fc2.weight" for n in (0, 1))
    for a, b in ((first, second), (second, first)):
        other = optimizer_state(reader).tensors[b]
        tensors[a] = TensorInfo(a, other.dtype, other.shape, "optimizer", other.parts)
    with pytest.raises(IntegrityError, match="2 do not match") as caught:
        prove_masters(reader, tensors)
    assert "decoder.layers.{0..1}.mlp.linear_fc2.weight" in caught.value.details


def test_one_wrong_element_is_found():
    reader = open_checkpoint(golden("llama_fullyreshardable_tp2pp2dp2"))
    tensors = optimizer_state(reader).tensors
    wanted = "decoder.layers.1.mlp.linear_fc2.weight"
    info = tensors[f"optimizer.state.param.{wanted}"]
    chunk = info.chunks()[-1]
    real = reader.locate

    def moved(record, read):
        where = real(record, read)
        return where if record != chunk.record else type(where)(where.offset - 4, where.nbytes, None, 0, 0)

    reader.locate = moved
    with pytest.raises(IntegrityError) as caught:
        prove_masters(reader, tensors)
    assert caught.value.tensor == wanted
    assert "Megatron-Core 0.15.0 to 0.19.0" in caught.value.details[-1]


@pytest.mark.parametrize(
    ("changes", "doubtful"),
    [
        ({}, False),
        ({"overlap_grad_reduce": True}, True),
        ({"untie_embeddings_and_output_weights": False}, True),
        ({"mtp_num_layers": 1}, True),
        ({"untie_embeddings_and_output_weights": False, "pipeline_model_parallel_size": 1}, False),
    ],
)
def test_state_that_megatron_may_have_shifted_is_doubted(changes, doubtful):
    reader = open_checkpoint(golden("llama_fullyreshardable_tp2pp2dp2"))
    reader.catalog = replace(reader.catalog, args={**reader.catalog.args, **changes})
    assert may_be_shifted(reader.catalog) == doubtful


@pytest.mark.parametrize("group", [0, 1])
def test_parameters_swapped_in_the_buckets_are_refused(tmp_path, group):
    folder = copy_golden("llama4_dpreshardable_pp4dp2", tmp_path / "iter_0000010")
    # a layer begins with fc2 (64 x 96), then fc1 (192 x 64), whose gate half has the size of fc2
    prefix = f"optimizer.distributed.dp_group_idx_{group}.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32)"
    swap_on_disk(folder, f"{prefix}.bucket_idx_0.param", 0, 6144, 6144)
    reader = open_checkpoint(folder)
    with pytest.raises(IntegrityError, match="do not match") as caught:
        prove_masters(reader, optimizer_state(reader).tensors)
    assert f"decoder.layers.{group}.mlp.linear_fc1.weight" in caught.value.details
    assert f"decoder.layers.{group}.mlp.linear_fc2.weight" in caught.value.details
    assert caught.value.message.startswith("no known order")  # a sample of the elements shows it, before any plan
    assert caught.value.hint


def test_wrong_layout_does_not_fill_the_buckets():
    reader = open_checkpoint(golden("llama_dpreshardable_tp2pp2dp2"))
    with pytest.raises(RequestError, match=r"dp_group_idx|data-parallel group"):
        optimizer_state(reader, Layout(tp=4, dp=2))
    with pytest.raises(RequestError, match=r"buckets|does not fit|elements"):
        optimizer_state(reader, Layout(tp=1, pp=2, dp=4))


# ---------------------------------------------------------------------- param groups


def stated_groups(config):
    values = json.loads((GOLDEN / "truth" / f"{config}-bf16.groups.json").read_text())
    out = {}
    for key, value in values.items():
        _, chain, number, name = key.split("/")
        out.setdefault((int(chain), int(number)), {})[name] = value
    return out


def common_entry(reader, ep, form):
    groups = read_param_groups(reader).stored_as(form)
    return common_optimizer(groups, groups.chain(ep), form)


@pytest.mark.parametrize("name", [name for name in WITH_STATE if GOLDENS[name][0] != "lion"])  # two optimizers
def test_param_groups_of_every_layout(name):
    reader = open_checkpoint(golden(name))
    entry = common_entry(reader, 1, "fully_reshardable")
    assert list(entry) == ["optimizer", "param_state_sharding_type"]
    groups = entry["optimizer"]["param_groups"]
    assert [(g["wd_mult"], g["is_expert_parallel"], g["step"]) for g in groups] == [(1.0, False, 2), (0.0, False, 2)]
    if GOLDENS[name][0] in FULL_TRUTH:
        # the truth was made at EP 1 too; `default_config` came with 0.16
        for group, stated in zip(groups, stated_groups(GOLDENS[name][0]).values(), strict=True):
            assert (
                stated.items() - {("default_config", True)} <= {k: v for k, v in group.items() if k != "betas"}.items()
            )
            assert group["betas"] == (0.9, 0.95)


@pytest.mark.parametrize("name", [name for name in WITH_STATE if GOLDENS[name][0] in ("mixtral", "deepseek_mtp")])
def test_experts_have_an_optimizer_of_their_own_with_expert_parallelism(name):
    reader = open_checkpoint(golden(name))
    entry = common_entry(reader, 4, "fully_reshardable")
    assert list(entry) == [0, 1]
    kinds = [[(g["wd_mult"], g["is_expert_parallel"]) for g in entry[n]["optimizer"]["param_groups"]] for n in (0, 1)]
    assert kinds == [[(1.0, False), (0.0, False)], [(1.0, True)]]
    assert common_entry(reader, 4, "dp_reshardable") == {
        n: {"param_state_sharding_type": "dp_reshardable"} for n in (0, 1)
    }


def test_groups_for_experts_are_made_and_merged():
    def group(wd, **more):
        return {"wd_mult": wd, "lr_mult": 1.0, "is_decoupled_lr": False, "is_expert_parallel": False, "step": 7} | more

    dense = (group(1.0), group(0.0), group(1.0, is_decoupled_lr=True))
    weight = "decoder.layers.0.mlp.experts.0.linear_fc1.weight"
    plain = OptimizerPart("Adam", False, frozenset(), frozenset([weight]))
    biased = replace(plain, names=plain.names | {weight.replace(".weight", ".bias")})
    assert PartGroups(plain, dense).for_experts() == (group(1.0, is_expert_parallel=True),)
    assert [g["wd_mult"] for g in PartGroups(biased, dense).for_experts()] == [1.0, 0.0]
    experts = (group(1.0, is_expert_parallel=True), group(0.5, is_expert_parallel=True))
    assert PartGroups(plain, dense, experts).merged() == (*dense, group(0.5))
    nemo = ({"pre_wd_mult": 1.0, "pre_lr_mult": 1.0, "is_decoupled_lr": False},)
    assert len(PartGroups(plain, nemo, ({**nemo[0], "is_expert_parallel": True},)).merged()) == 1


def test_step_of_torch_adam_and_missing_groups(tmp_path):
    import torch

    folder = copy_golden("llama_adam_tp2pp2", tmp_path / "iter_0000010")
    groups = [{"wd_mult": 1.0, "lr_mult": 1.0, "params": [0]}, {"wd_mult": 0.0, "lr_mult": 1.0, "params": [1]}]
    state = {"common_step": torch.tensor(12.0)}
    scaler = {"scale": torch.tensor([4096.0]), "growth_tracker": 3}
    optimizer = {"optimizer": {"param_groups": groups, "state": state}, "grad_scaler": scaler}
    torch.save({"optimizer": optimizer, "iteration": 10}, folder / "common.pt")
    found = read_param_groups(open_checkpoint(folder))
    assert found.common_step == 12
    assert [g["step"] for g in found.merged()] == [12, 12]
    assert all("params" not in g for g in found.merged())
    assert found.scaler["growth_tracker"] == 3
    entry = common_entry(open_checkpoint(folder), 1, "fully_reshardable")
    written = tmp_path / "written.pt"
    written.write_bytes(object_record(entry, found.storages))
    assert torch.load(written)["grad_scaler"] == {"scale": torch.tensor([4096.0]), "growth_tracker": 3}
    torch.save({"iteration": 10}, folder / "common.pt")
    with pytest.raises(FormatError, match="no param groups"):
        read_param_groups(open_checkpoint(folder))


# ---------------------------------------------------------------------- writing


def target_of(catalog):
    """What `flatten` wants to know of the job that saved a checkpoint."""
    kept = {n: t for n, t in catalog.weights.items() if trainable(n) and t.dtype.floating}
    outline = Outline.of(ModelArgs.from_catalog(catalog), {n: t.shape for n, t in kept.items()})
    return {n: Target(n, t.dtype, t.shape) for n, t in kept.items()}, Layout.saved(catalog), outline


@pytest.mark.parametrize("name", RESHARDABLE)
def test_flatten_is_what_megatron_wrote(name):
    reader = open_checkpoint(golden(name))
    catalog, found = reader.catalog, optimizer_state(reader)
    parameters, layout, outline = target_of(catalog)
    chain = read_param_groups(reader).chain(layout.ep)
    model = LocalModel(parameters, layout, outline, found.candidate.order)
    pieces, objects = flatten(model, FP32, chain, catalog.args)
    stored = {t.name: t for t in catalog.tensors.values() if t.opaque}
    buckets = {key: [piece for piece in pieces if piece.key == key] for key in dict.fromkeys(p.key for p in pieces)}
    assert stored.keys() == buckets.keys()
    values = {n: read_tensor(reader, info) for n, info in found.tensors.items()}
    for key, mine in buckets.items():
        info = stored[key]
        chunks = info.chunks()
        assert {(piece.numel,) for piece in mine} == {info.shape}
        assert [(p.start, p.length) for p in mine] == [(c.box.start[0], c.box.shape[0]) for c in chunks]
        files = [reader.files[reader.file_of(chunk.record)].name for chunk in chunks]
        assert [f"__{piece.rank}_" for piece in mine] == [re.match(r"__\d+_", file)[0] for file in files]
        wanted = read_tensor(reader, info)
        known = np.zeros(info.shape, bool)
        for part in mine:
            first = part.start
            for piece in part.pieces:
                end = first + math.prod(piece.shape)
                assert not known[first:end].any()
                known[first:end] = True
                stored_piece = wanted[first:end].reshape(piece.laid)
                for copy in piece.copies:  # a gap holds whatever was in memory
                    value = values[copy.source][copy.source_box.slices]
                    value = value.T if copy.op is Op.TRANSPOSE else value
                    assert np.array_equal(stored_piece[copy.target_box.slices], value), copy.source
                first = end
            assert first == part.start + part.length
        assert known.all()
    have = {key for key in catalog.objects if ".dp_group_idx_" in key}
    assert {thing.key for thing in objects} == have
    for thing in objects:
        assert repr(Archive.parse(thing.content, thing.key).tree) == repr([reader.object_value(thing.key)])
        assert catalog.objects[thing.key].file.startswith(f"__{thing.rank}_")


def test_a_rank_without_parameters_is_refused():
    reader = open_checkpoint(golden("llama4_dpreshardable_pp4dp2"))
    parameters, _, outline = target_of(reader.catalog)
    order = optimizer_state(reader).candidate.order
    chain = read_param_groups(reader).chain(1)
    with pytest.raises(RequestError, match="leaves data-parallel rank"):
        flatten(LocalModel(parameters, Layout(pp=4, dp=2048), outline, order), FP32, chain, {})
