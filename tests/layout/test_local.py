"""What `megatron.rank_state_dict` gives each rank against the real megatron-core, in memory and in legacy checkpoints."""

import json
import zlib
from dataclasses import asdict, replace

import numpy as np
import pytest

from converters.dtypes import dtype
from converters.formats import open_checkpoint
from converters.formats.containers.archive import PtFile
from converters.formats.legacy.rank_model import RankModel
from converters.megatron.layout import Layout
from converters.megatron.outline import Outline
from converters.megatron.rank_state_dict import LocalModel, module_name
from converters.names import parse_key
from converters.param_order import Order
from converters.planning.plan import Op, Target
from harness.checkpoints import golden
from harness.layout_cases import BASE, JOBS, MLA, MOE
from harness.legacy_cases import LEGACY
from harness.support import GOLDEN, read_tensor
from oracle.fixtures import run_module


def values(key, shape):
    """What `oracle.local` fills a whole tensor with."""
    first = zlib.crc32(key.encode()) % (1 << 23)
    return np.arange(first, first + np.prod(shape, dtype=int)).astype(np.float32).reshape(shape)


STACKED = MOE | {"moe_layer_freq": 1, "moe_grouped_gemm": True}
MORE = {
    "tied vpp": (Layout(tp=2, pp=2, vpp=2), BASE | {"tied": True}),
    "experts stacked": (Layout(tp=2, ep=2, dp=2, pp=2), STACKED),
    "experts stacked, no gate": (Layout(ep=4, dp=4), STACKED | {"gated_linear_unit": False}),
    "norms of queries": (Layout(tp=2, pp=2), BASE | {"qk_layernorm": True}),
    "mla with norms": (Layout(tp=2), MLA | {"qk_layernorm": True}),
}
NOT_HERE = {"letters", "mtp apart"}  # layers of a layout string have no vpp in the oracle's loop over chunks


def outline_of(model):
    return Outline(
        num_layers=model["num_layers"],
        mtp_layers=model.get("mtp_num_layers", 0),
        num_experts=model.get("num_moe_experts"),
        gated=model["gated_linear_unit"],
        tied=model["tied"],
        mla_down_split=True,
    )


def filled(tensor, whole):
    """A local tensor's elements, each written once."""
    out, count = np.empty(tensor.matrix, next(iter(whole.values())).dtype), 0
    for copy in tensor.copies:
        part = whole[copy.source][copy.source_box.slices]
        out[copy.target_box.slices] = part.T if copy.op is Op.TRANSPOSE else part
        count += copy.target_box.volume
    for box in tensor.fills:
        out[box.slices] = 0
        count += box.volume
    assert count == out.size
    return out.reshape(tensor.shape)


@pytest.fixture(scope="module")
def memory(tmp_path_factory):
    """Every rank's memory in the jobs, as the real models have it."""
    folder = tmp_path_factory.mktemp("local")
    named = {name: job for name, job in (JOBS | MORE).items() if name not in NOT_HERE}
    jobs = [{"layout": asdict(at), "world": at.world_size, "model": model} for at, model in named.values()]
    code, _, errors = run_module("oracle.local", folder, text=json.dumps(jobs))
    assert code == 0, errors[-3000:]
    return folder, list(named)


def whole_tensors(folder, number):
    """Whole tensors by canonical name."""
    out = {}
    for key, shape in json.loads((folder / f"{number}.json").read_text()).items():
        parsed, array = parse_key(key), values(key, shape)
        depth = len(parsed.axes)
        for index in np.ndindex(*shape[:depth]):
            out[parsed.template.format(*index)] = array[index]
    return out


@pytest.mark.megatron
@pytest.mark.parametrize("job", [name for name in JOBS | MORE if name not in NOT_HERE])
def test_every_rank_has_what_megatron_has_in_memory(memory, job):
    folder, jobs = memory
    layout, model = (JOBS | MORE)[job]
    number = jobs.index(job)
    whole = whole_tensors(folder, number)
    order = Order(False, "stacked" if model.get("moe_grouped_gemm") else "sequential")
    tensors = {name: Target(name, dtype("float32"), value.shape) for name, value in whole.items()}
    mine = LocalModel(tensors, layout, outline_of(model), order)
    for rank in range(layout.world_size):
        for chunk, held in enumerate(mine.rank(rank)):
            theirs = dict(np.load(folder / f"{number}-{rank}-{chunk}.npz"))
            assert [tensor.name for tensor in held] == list(theirs)
            for tensor in held:
                assert tensor.shape == theirs[tensor.name].shape, tensor.name
                assert np.array_equal(filled(tensor, whole), theirs[tensor.name]), (rank, tensor.name)


@pytest.mark.parametrize("name", ["llama_adam", "llama4_vpp2", "mixtral_distopt", "gpt_adam"])
def test_names_order_and_values_are_those_of_legacy_files(name):
    """With TransformerEngine's layers, its grouped experts, tied embeddings and virtual stages."""
    name = next(golden_name for golden_name in LEGACY if golden_name.startswith(f"legacy_{name}"))
    reader = open_checkpoint(golden(LEGACY[name][2]))
    folder = GOLDEN / name / "iter_0000010"
    args = open_checkpoint(folder).catalog.args
    model = LocalModel.of(reader.catalog, Layout.from_args(args))
    whole = {source: read_tensor(reader, reader.catalog.tensors[source]) for source in model.tensors}
    for rank in range(model.layout.world_size):
        at = model.layout.coordinates(rank)
        numbers = [f"{at.tp:02d}", f"{at.pp:03d}", *([f"{at.ep:03d}"] if model.layout.ep > 1 else [])]
        file = PtFile.read(folder, f"mp_rank_{'_'.join(numbers)}/model_optim_rng.pt")
        for held, theirs in zip(model.rank(rank), RankModel.of_file(file).chunks, strict=True):
            refs = {key: tensor.ref for key, tensor in theirs.items() if not key.endswith("._extra_state")}
            assert [tensor.name for tensor in held] == list(refs)
            for tensor in held:
                ref = refs[tensor.name]
                kind = f"u{ref.dtype.itemsize}"
                raw = np.frombuffer(file.contents(folder, f"data/{ref.storage}"), kind)[ref.offset :]
                assert np.array_equal(filled(tensor, whole).reshape(-1), raw[: np.prod(ref.shape)]), tensor.name


def test_rows_of_the_padded_vocabulary_are_filled_or_cut():
    catalog = open_checkpoint(golden("llama_adam_tp2pp2")).catalog  # 120 rows, padded to 128
    catalog = replace(catalog, args=dict(catalog.args) | {"make_vocab_size_divisible_by": 24})
    model = LocalModel.of(catalog, Layout(tp=8))
    words = [model.chunk(tp=tp)[0] for tp in range(8)]
    assert {word.shape for word in words} == {(24, 32)}
    kept = [sum(copy.target_box.shape[0] for copy in word.copies) for word in words]
    assert kept == [24, 24, 24, 24, 24, 8, 0, 0]
    assert [sum(box.shape[0] for box in word.fills) for word in words] == [24 - n for n in kept]
    assert LocalModel.of(catalog, Layout(tp=1)).chunk()[0].shape == (120, 32)


def test_a_model_with_an_unknown_tensor_keeps_it():
    """Its place in the order is not known: it comes last."""
    shape = {"embedding.word_embeddings.weight": (8, 4), "decoder.layers.0.self_attention.strange.weight": (4, 4)}
    tensors = {name: Target(name, dtype("float32"), size) for name, size in shape.items()}
    model = LocalModel(tensors, Layout(), Outline(1), Order())
    assert [tensor.name for tensor in model.chunk()] == list(shape)


@pytest.mark.parametrize(
    ("name", "order", "dense", "expected"),
    [
        ("mlp.linear_fc1.layer_norm_weight", Order(), True, "mlp.linear_fc1.layer_norm_weight"),
        ("mlp.linear_fc1.layer_norm_weight", Order(), False, "pre_mlp_layernorm.weight"),
        ("mlp.linear_fc1.layer_norm_bias", Order(False), True, "pre_mlp_layernorm.bias"),
        ("mlp.experts.5.linear_fc2.bias", Order(), False, "mlp.experts.linear_fc2.bias1"),
        (
            "mlp.experts.5.linear_fc1.weight",
            Order(True, "sequential"),
            False,
            "mlp.experts.local_experts.1.linear_fc1.weight",
        ),
    ],
)
def test_names_of_modules(name, order, dense, expected):
    for layer in ("decoder.layers.0.", "mtp.layers.0.transformer_layer."):
        assert module_name(layer + name, order, dense=dense, expert=1) == layer + expected
