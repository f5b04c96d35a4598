"""Legacy checkpoints as other Megatrons wrote them: experts, norms, old models, optimizers of every generation."""

import itertools
import re

import numpy as np
import pytest
import torch

from converters.errors import FormatError, IntegrityError, UnsupportedError
from converters.formats import open_checkpoint
from converters.formats.common_state import Archive
from converters.formats.legacy.grid import find_grid
from converters.optimizer.proof import prove_masters
from converters.optimizer.read_groups import read_param_groups
from converters.optimizer.state import optimizer_state
from converters.pickles.nodes import pairs
from converters.torchzip.records_out import archive as pack
from converters.torchzip.tensor_refs import tensor_ref
from converters.write.export import plan_export
from converters.write.write_plan import run_conversion
from harness.checkpoints import truth
from harness.legacy_cases import (
    FLAT,
    MODEL,
    arguments,
    bf16,
    copy_legacy,
    edit,
    fp32,
    held,
    in_order,
    refused,
    save,
    shard,
    weights,
    write_experts,
)
from harness.reshard_cases import compare, expected, reshard
from harness.support import GOLDEN


@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("style", ["sequential", "grouped", "one tensor", "stacked"])
def test_experts_in_every_form(style, tp, ep, tmp_path):
    write_experts(tmp_path, style, tp, ep)
    compare(held(tmp_path), expected("mixtral", optimizer=False))


def test_stacked_experts_without_their_number(tmp_path):
    write_experts(tmp_path, "stacked", num_experts=None)
    assert "GroupedMLP" in refused(tmp_path).message


def test_multi_token_prediction_and_a_dense_first_layer(tmp_path):
    """Latent attention, a first layer without experts; the stage with MTP has the embedding again."""
    known = weights("deepseek_mtp")
    stages = [{}, {"embedding.word_embeddings.weight": bf16(known["embedding.word_embeddings.weight"])}]
    for name in in_order(list(known)):
        found = re.search(r"(.*mlp\.experts)\.(\d+)\.(.*)", name)
        key = f"{found[1]}.{found[3]}{found[2]}" if found else name
        home = 0 if name.startswith(("embedding.", "decoder.layers.0.")) else 1
        stages[home][key.replace("decoder.layers.1.", "decoder.layers.0.")] = bf16(known[name])
    for number, model in enumerate(stages):
        args = arguments("mixtral", pipeline_model_parallel_size=2, world_size=2, mtp_num_layers=1)
        save(tmp_path, f"mp_rank_00_{number:03d}", args, model)
    wanted = {k: v for k, v in expected("deepseek_mtp", optimizer=False).items() if not k.endswith("expert_bias")}
    compare(held(tmp_path), wanted)


def test_layers_that_are_missing(tmp_path):
    folder = copy_legacy("legacy_llama_adam_tp2pp2", tmp_path)

    def drop(tree):
        tree["model"].pairs[:] = [(k.replace("layers.0.", "layers.1."), v) for k, v in tree["model"].pairs]

    edit(folder / "mp_rank_01_001" / MODEL, drop)
    assert "lacks layers" in refused(folder).message


def old_rows(value, version, heads, dim):
    """Rows of a fused projection as checkpoint_version 0 or 1 keeps them, from `[heads, 3, dim]`."""
    rest = value.shape[1:]
    cube = value.reshape(heads, 3, dim, *rest)
    moved = np.moveaxis(cube, 1, 0) if version == 0 else np.moveaxis(cube, 1, 2)
    return np.ascontiguousarray(moved).reshape(value.shape)


BEFORE_CORE = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "self_attention.linear_qkv.": "attention.query_key_value.",
    "self_attention.linear_proj.": "attention.dense.",
    "mlp.linear_fc1.layer_norm_": "post_attention_layernorm.",
    "mlp.linear_fc1.": "mlp.dense_h_to_4h.",
    "mlp.linear_fc2.": "mlp.dense_4h_to_h.",
}


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("version", [0, 1.0, 2.0, 3.0])
def test_models_before_megatron_core(version, tp, tmp_path):
    known = weights("gpt")
    for rank in range(tp):
        layers, embedding = {}, {}
        for name, value in known.items():
            part = (
                np.split(value, tp)[rank]
                if ".linear_fc1." in name and "layer_norm" not in name
                else shard(name, value, tp, rank)
            )
            if ".linear_qkv." in name and "layer_norm" not in name and version < 2:
                part = old_rows(part, int(version), 4 // tp, 8)
            if name.startswith("embedding."):
                embedding[name.split(".")[1]] = {"weight": bf16(part)}
                continue
            for new, old in BEFORE_CORE.items():
                if f".{new}" in name:
                    name = name.replace(new, old)
                    break
            layers[name.removeprefix("decoder.")] = bf16(part)
        model = {"language_model": {"embedding": embedding, "transformer": layers}}
        args = arguments("gpt", tensor_model_parallel_size=tp, world_size=tp)
        save(tmp_path, f"mp_rank_{rank:02d}", args, model, checkpoint_version=version or None)
    compare(held(tmp_path), expected("gpt", optimizer=False))


def test_old_rows_without_the_size_of_a_head(tmp_path):
    args = arguments("gpt", kv_channels=None, hidden_size=None)
    layers = {"layers.0.attention.query_key_value.weight": bf16(np.zeros((96, 32), np.uint16))}
    save(tmp_path, "mp_rank_00", args, {"language_model": {"encoder": layers}}, checkpoint_version=None)
    assert "size of a head" in refused(tmp_path).message


def test_norms_of_megatrons_own_layers(tmp_path):
    names = {
        "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
        "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
    }
    model = {}
    for name in in_order(list(weights("llama"))):
        key = name
        for new, old in names.items():
            key = key.replace(new, old)
        model[f"module.{key}"] = bf16(weights("llama")[name])
    save(tmp_path, "mp_rank_00", arguments("llama"), model)
    compare(held(tmp_path), expected("llama", optimizer=False))


def adam_state(config, names):
    """The state dictionary of torch's own Adam: two groups, a step for each parameter."""
    known = truth(config)
    apart = [[n for n in names if known[f"model/{n}"].ndim > 1], [n for n in names if known[f"model/{n}"].ndim == 1]]
    ids = itertools.count()
    state, groups = {}, []
    for number, group in enumerate(apart):
        mine = []
        for name in group:
            index = next(ids)
            mine.append(index)
            moments = {key: fp32(known[f"{key}/{name}"]) for key in ("exp_avg", "exp_avg_sq")}
            state[index] = {"step": torch.tensor(7.0), **moments}
        groups.append({"lr": 0.1, "wd_mult": 1.0 - number, "lr_mult": 1.0, "is_expert_parallel": False, "params": mine})
    masters = [[fp32(known[f"master/{name}"]) for name in group] for group in apart]
    scaler = {"scale": torch.tensor([1024.0]), "growth_tracker": 0, "hysteresis_tracker": 2}
    return {
        "optimizer": {"state": state, "param_groups": groups},
        "fp32_from_fp16_params": masters,
        "grad_scaler": scaler,
    }


def test_the_optimizer_of_torch(tmp_path):
    names = in_order(list(weights("llama")))
    model = {name: bf16(weights("llama")[name]) for name in names}
    save(tmp_path / "iter_0000010", "mp_rank_00", arguments("llama"), model, optimizer=adam_state("llama", names))
    compare(held(tmp_path), expected("llama", optimizer=True))
    reshard(tmp_path, tmp_path.parent / f"{tmp_path.name}-out", {"tp": 2})
    groups = read_param_groups(open_checkpoint(tmp_path.parent / f"{tmp_path.name}-out"))
    assert {group["step"] for group in groups.merged()} == {7}
    assert groups.scaler["growth_tracker"] == 0
    assert groups.storages["data/distckpt_0"] == np.float32(1024).tobytes()


def flat_buffers(names, known, align, limit):
    """Each state's buckets, gaps filled with NaN, and their sizes without padding."""
    flat, sizes = {"param": [[]], "exp_avg": [[]], "exp_avg_sq": [[]]}, [0]
    for name in reversed(names):
        if sizes[-1] >= limit:
            sizes.append(0)
            for pieces in flat.values():
                pieces.append([])
        gap = -sizes[-1] % align
        for state, pieces in flat.items():
            value = known[f"{'master' if state == 'param' else state}/{name}"]
            pieces[-1] += [np.full(gap, 0x7FC00000, np.uint32), value.reshape(-1)]
        sizes[-1] += gap + known[f"master/{name}"].size
    return {state: [np.concatenate(piece) for piece in pieces] for state, pieces in flat.items()}, sizes


# version: whether parameters begin at multiples of 64; elements that close a bucket
@pytest.mark.parametrize("version", ["0.4", "0.5", "0.6", "0.7", "0.8"])
def test_flat_buffers_of_other_versions(version, tmp_path):
    """What `get_parameter_state` returned at these tags: bucket by bucket and padded, then coalesced; aligned since 0.8.

    0.4 did not store the sizes without padding, and like 0.5 it named a buffer by one element type.
    """
    known, names = truth("llama"), in_order(list(weights("llama")))
    model = {name: bf16(weights("llama")[name]) for name in names}
    by_bucket = version in ("0.4", "0.5", "0.6")
    joined, sizes = flat_buffers(names, known, 64 if version == "0.8" else 1, 4096 if by_bucket else 1 << 40)
    args = arguments("llama", overlap_grad_reduce=by_bucket, ddp_bucket_size=4096)
    types = (torch.bfloat16, torch.float32) if version > "0.5" else torch.float32
    if by_bucket:
        step = 2 if version == "0.4" else 128
        padded = {state: [fp32(np.pad(p, (0, -p.size % step))) for p in pieces] for state, pieces in joined.items()}
        tree = {"per_bucket_numel": [{types: [-(-n // step) * step for n in sizes]}], 0: {types: padded}}
        if version != "0.4":
            tree["per_bucket_numel_unpadded"] = [{types: sizes}]
    else:
        one = {state: fp32(pieces[0]) for state, pieces in joined.items()}
        tree = {0: {types: {**one, "numel_unpadded": sizes[0]}}, "buckets_coalesced": True}
    groups = [{"lr": 0.1, "wd_mult": wd, "lr_mult": 1.0, "is_expert_parallel": False, "step": 2} for wd in (1.0, 0.0)]
    save(tmp_path, "mp_rank_00", args, model, optimizer={"optimizer": {"param_groups": groups}})
    torch.save(tree, tmp_path / "mp_rank_00" / FLAT)
    compare(held(tmp_path), expected("llama", optimizer=True))
    reader = open_checkpoint(tmp_path)
    prove_masters(reader, optimizer_state(reader).tensors)


def test_buckets_that_the_parameters_do_not_fill(tmp_path):
    """As 0.4 wrote them, but with arguments that make a single bucket."""
    known, names = truth("llama"), in_order(list(weights("llama")))
    joined, sizes = flat_buffers(names, known, 1, 4096)
    args = arguments("llama", overlap_grad_reduce=False)
    model = {name: bf16(weights("llama")[name]) for name in names}
    save(tmp_path, "mp_rank_00", args, model, optimizer={"optimizer": {"param_groups": [{"lr": 0.1, "step": 2}]}})
    tree = {0: {torch.float32: {state: [fp32(p) for p in pieces] for state, pieces in joined.items()}}}
    torch.save({"per_bucket_numel": [{torch.float32: sizes}], **tree}, tmp_path / "mp_rank_00" / FLAT)
    (problem,) = [p for p in open_checkpoint(tmp_path).catalog.problems if p.severity == "unknown"]
    assert "which its parameters do not fill" in problem.message


def test_storages_on_a_gpu(tmp_path):
    """torch writes the device of every storage into the pickle; nothing is ever placed there."""
    folder = copy_legacy("legacy_llama_distopt_tp2pp2dp2", tmp_path)
    before = held(folder)
    for path in sorted(folder.glob(f"*/{MODEL}")):
        archive = Archive.read(path)
        raw = archive.members["data.pkl"]
        tagged = raw.replace(b"X\x03\x00\x00\x00cpu", b"X\x06\x00\x00\x00cuda:3")
        assert tagged != raw
        path.write_bytes(pack("model_optim_rng", {**archive.members, "data.pkl": tagged}))
    compare(held(folder), before)


def test_random_states_from_before_2022(tmp_path):
    import random

    states = {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.zeros(16, dtype=torch.uint8),
        "rng_tracker_states": {"model-parallel-rng": torch.zeros(16, dtype=torch.uint8)},
    }
    model = {name: bf16(value) for name, value in weights("llama").items()}
    save(tmp_path, "mp_rank_00", arguments("llama"), model, **states)
    reader = open_checkpoint(tmp_path)
    (key,) = [key for key in reader.catalog.objects if key.startswith("rng_state")]
    value = reader.stored_object(key).tree
    assert list(value[0]) == list(states)
    assert not states.keys() & reader.catalog.common.keys()


@pytest.mark.parametrize("style", ["sequential", "grouped"])
def test_extra_states_of_experts(style, tmp_path):
    """Sequential experts have one each, which are carried; one for a group of them only with a warning."""
    write_experts(tmp_path, style, ep=2, fp8="hybrid")
    for e in range(2):
        path = tmp_path / f"mp_rank_00_{e:03d}" / MODEL
        state = torch.load(path, weights_only=False)
        for i in range(2):
            key = f"local_experts.{i}.linear_fc1" if style == "sequential" else "linear_fc1"
            content = torch.full((3,), 10 * e + i, dtype=torch.uint8)
            state["model"][f"decoder.layers.1.mlp.experts.{key}._extra_state"] = content
        torch.save(state, path)
    reader = open_checkpoint(tmp_path)
    found = {}
    for key, info in reader.catalog.objects.items():
        archive = reader.stored_object(key)
        found[info.name] = archive.elements(tensor_ref(archive.tree, key))[0]
    warned = [problem.message for problem in reader.catalog.problems if "FP8 state" in problem.message]
    if style == "sequential":
        name = "decoder.layers.1.mlp.experts.{}.linear_fc1._extra_state"
        assert found == {name.format(n): v for n, v in enumerate((0, 1, 10, 11))}
        assert not warned
    else:
        assert not found
        assert len(warned) == 2


@pytest.mark.filterwarnings("ignore")  # megatron-core, whose classes the file holds, says that it has no GPU
def test_a_tied_copy_that_differs(tmp_path):
    """The embedding on the last stage must be the first one's: every command that writes checks it."""
    folder = copy_legacy("legacy_gpt_adam_tp2pp2", tmp_path)
    reshard(folder, tmp_path / "same", {"tp": 1}, optimizer="none")
    path = folder / "mp_rank_01_001" / MODEL
    state = torch.load(path, weights_only=False)
    state["model"]["output_layer.weight"][5, 3] += 1
    torch.save(state, path)
    for number, optimizer in enumerate(("none", "fully_reshardable")):
        with pytest.raises(IntegrityError, match="differs from the one on the first stage") as error:
            reshard(folder, tmp_path / f"out{number}", {"tp": 1}, optimizer=optimizer)
        assert error.value.tensor == "embedding.word_embeddings.weight"
        assert not (tmp_path / f"out{number}").exists()
    with pytest.raises(IntegrityError, match="differs from the one on the first stage"):
        run_conversion(plan_export(open_checkpoint(folder), tmp_path / "hf"))


def test_learning_rates_of_their_own(tmp_path):
    """Since 0.16 a group with `--decoupled-lr` is known by its maximum alone."""
    names = in_order(list(weights("llama")))
    known = truth("llama")
    outer = ("embedding.word_embeddings.weight", "output_layer.weight")
    parts = [
        [n for n in names if known[f"model/{n}"].ndim > 1 and n not in outer],
        [n for n in names if n in outer],
        [n for n in names if known[f"model/{n}"].ndim == 1],
    ]
    options = [{"wd_mult": 1.0, "max_lr": 0.1}, {"wd_mult": 1.0, "max_lr": 0.02}, {"wd_mult": 0.0, "max_lr": 0.1}]
    state, groups = {}, []
    for part, option in zip(parts, options, strict=True):
        first = len(state)
        for name in part:
            state[len(state)] = {key: fp32(known[f"{key}/{name}"]) for key in ("exp_avg", "exp_avg_sq")}
        groups.append({**option, "is_decoupled_lr": False, "params": list(range(first, len(state)))})
    masters = [[fp32(known[f"master/{name}"]) for name in part] for part in parts]
    optimizer = {"optimizer": {"state": state, "param_groups": groups}, "fp32_from_fp16_params": masters}
    model = {name: bf16(weights("llama")[name]) for name in names}
    save(tmp_path, "mp_rank_00", arguments("llama", decoupled_lr=0.02), model, optimizer=optimizer)
    compare(held(tmp_path), expected("llama", optimizer=True))


def test_golden_models_keep_their_order():
    """The tests above write parameters in the order of `in_order`: that is the order of real files."""
    for name in ("legacy_llama_adam_tp2pp2", "legacy_mixtral_distopt_ep2pp2"):
        path = next((GOLDEN / name / "iter_0000010").glob(f"*/{MODEL}"))
        keys = [
            key
            for key, _ in pairs(Archive.read(path).tree["model"])
            if "extra_state" not in key and ".experts." not in key
        ]
        assert keys == in_order(keys)


def test_experts_divided_otherwise_than_the_rest_are_not_called_incomplete():
    """Core 0.16.1 at tp 2, ep 2, expert tensor-parallel size 1: ranks (0, 0) and (1, 1) alone, and all of them are there."""
    args = {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
    folders = ["mp_rank_00_000", "mp_rank_01_001"]
    with pytest.raises(UnsupportedError, match="divided over expert_tensor_parallel_size 1, everything else over tp 2"):
        find_grid(folders, args, first_has_end=True, experts=True)
    with pytest.raises(FormatError, match="lacks 2 of the 4 folders"):
        find_grid(folders, args | {"expert_tensor_parallel_size": 2}, first_has_end=True, experts=True)
