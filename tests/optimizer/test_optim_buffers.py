"""Flat buffers: order of parameters, cuts of buckets, and the round trip through them for random models and jobs."""

import math
import types
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from converters.box import Box
from converters.catalog import Catalog, Part, TensorInfo
from converters.chunks import StoredArray
from converters.dtypes import dtype
from converters.errors import FormatError, RequestError
from converters.formats.base import Reader
from converters.formats.common_state import Archive
from converters.io.arithmetic import rounded
from converters.megatron.buffers import Local, Misfit, Rules, arrange, dp_chunks, fit
from converters.megatron.layout import DataParallelGroup, Layout
from converters.megatron.optimizer_chain import ChainMember
from converters.megatron.optimizer_parts import OptimizerPart
from converters.megatron.outline import Outline
from converters.megatron.rank_state_dict import LocalModel
from converters.optimizer.buckets import flatten
from converters.optimizer.groups import ParamGroups, PartGroups
from converters.optimizer.proof import prove_masters
from converters.optimizer.state import candidates, optimizer_state
from converters.param_order import EXPERTS, Order, trainable
from converters.planning.plan import Op, Target
from converters.torchzip.records import Payload
from harness.support import read_tensor

BF16, FP32 = dtype("bfloat16"), dtype("float32")


def local(name, numel, *, shared=False):
    return Local(name, BF16, ((name, Box((0,), (numel,))),), numel, shared=shared)


# ---------------------------------------------------------------------- order


def ordered(names, order=None):
    order = order or Order()
    return sorted(names, key=order.position)


ATTENTION = ["linear_proj.weight", "linear_qkv.layer_norm_weight", "linear_qkv.weight", "linear_qkv.bias"]


def test_order_of_a_dense_model():
    layer = "decoder.layers.0."
    fused = [
        "embedding.word_embeddings.weight",
        "embedding.position_embeddings.weight",
        *(f"{layer}self_attention.{name}" for name in ATTENTION),
        f"{layer}self_attention.q_layernorm.weight",
        f"{layer}self_attention.k_layernorm.weight",
        f"{layer}mlp.linear_fc1.layer_norm_weight",
        f"{layer}mlp.linear_fc1.weight",
        f"{layer}mlp.linear_fc2.weight",
        "decoder.layers.2.self_attention.linear_proj.weight",
        "decoder.layers.10.self_attention.linear_proj.weight",
        "decoder.final_layernorm.weight",
        "output_layer.weight",
    ]
    assert ordered(reversed(fused)) == fused
    apart = ordered(fused, Order(fused_norms=False))
    assert apart.index(f"{layer}self_attention.linear_qkv.layer_norm_weight") == 2
    assert [n for n in apart if "linear_qkv.layer" not in n] == [n for n in fused if "linear_qkv.layer" not in n]


def test_order_of_experts_and_prediction_layers():
    layer = "mtp.layers.0.transformer_layer.mlp."
    head = ["mtp.layers.0.enorm.weight", "mtp.layers.0.eh_proj.weight", f"{layer}router.weight"]
    tail = [f"{layer}shared_experts.{n}" for n in ("gate_weight", "linear_fc1.weight", "linear_fc2.weight")]
    tail.append("mtp.layers.0.final_layernorm.weight")
    kinds = {
        "grouped": ["0.linear_fc1.weight", "0.linear_fc1.bias", "1.linear_fc1.weight", "0.linear_fc2.weight"],
        "sequential": ["0.linear_fc1.weight", "0.linear_fc1.bias", "0.linear_fc2.weight", "1.linear_fc1.weight"],
        "weights first": ["0.linear_fc1.weight", "1.linear_fc1.weight", "0.linear_fc1.bias", "0.linear_fc2.weight"],
    }
    for kind, names in kinds.items():
        wanted = [*head, *(f"{layer}experts.{n}" for n in names), *tail]
        assert ordered(sorted(wanted), Order(experts=kind)) == wanted
    stacked = Order(experts="stacked")
    assert stacked.parameter(f"{layer}experts.3.linear_fc2.weight") == f"{layer}experts.weight2"


def test_sections_of_a_mamba_mixer_are_one_parameter():
    layer = "decoder.layers.0.mixer."
    names = [f"{layer}dt_bias", f"{layer}A_log", *(f"{layer}in_proj.weight.{s}" for s in ("z", "x", "B", "C", "dt"))]
    names += [f"{layer}conv1d.weight.{s}" for s in "xBC"]
    assert ordered(reversed(names)) == names
    assert {Order().parameter(name) for name in names[2:7]} == {f"{layer}in_proj.weight"}
    assert ordered(names, Order(conv_direct=True))[0] == f"{layer}conv1d.weight.x"


@pytest.mark.parametrize(
    "name", ["decoder.layers.0.mlp.new_thing.weight", "vision.blocks.0.weight", "decoder.x.weight"]
)
def test_an_unknown_parameter_has_no_place(name):
    with pytest.raises(RequestError, match="does not know the position") as caught:
        Order().position(name)
    assert caught.value.tensor == name


def test_buffers_are_not_trained():
    assert not trainable("decoder.layers.1.mlp.router.expert_bias")
    assert trainable("decoder.layers.1.mlp.router.bias")


# ---------------------------------------------------------------------- cuts


def test_parameters_begin_at_multiples_of_64():
    (bucket,) = arrange([local("a", 100), local("b", 8), local("c", 64)], Rules(dp=2))
    assert [(p.name, at) for p, at in bucket.members] == [("c", 0), ("b", 64), ("a", 128)]
    assert (bucket.numel_unpadded, bucket.numel) == (228, 256)
    (bucket,) = arrange([local("a", 100), local("b", 8)], Rules(dp=3, align=1))
    assert (bucket.numel_unpadded, bucket.numel) == (108, 384)
    assert arrange([local("a", 8)], Rules(dp=1, busbw=True))[0].numel == 65536


def test_buckets_close_at_their_size_and_around_a_shared_embedding():
    parameters = [local("embedding", 256, shared=True), *(local(str(n), 100) for n in range(4))]
    buckets = arrange(parameters, Rules(dp=2, bucket_size=200))
    assert [[p.name for p, _ in b.members] for b in buckets] == [["3", "2"], ["1", "0"], ["embedding"]]
    assert [b.numel_unpadded for b in buckets] == [228, 228, 256]
    buckets = arrange(parameters, Rules(dp=2))
    # the gap before a shared embedding counts to the bucket before it
    assert [b.numel_unpadded for b in buckets] == [512, 256]
    early = arrange(parameters, Rules(dp=3, early=True))
    assert [b.numel_unpadded for b in early] == [768, 256]
    assert [b.members for b in fit(parameters, [768, 256], 64, "buffer")] == [b.members for b in early]


def test_bucket_size_of_arguments():
    def size(args, layout=None, pp=0, chunk=0):
        return Rules.of(args, layout or Layout(), lambda pp: 1000, pp, chunk).bucket_size

    overlap = {"overlap_grad_reduce": True}
    assert size({}) is None
    assert size(overlap) == 40_000_000
    assert size(overlap, Layout(dp=64)) == 64_000_000
    assert size(overlap | {"ddp_bucket_size": 5}) == 5
    assert size(overlap | {"ddp_num_buckets": 3}) == 333
    assert size(overlap | {"overlap_param_gather_with_optimizer_step": True}) is None
    assert size(overlap, pp=1) is size(overlap, chunk=1) is None


@given(
    sizes=st.lists(st.integers(1, 300), min_size=1, max_size=12),
    shared=st.sets(st.integers(0, 11), max_size=2),
    dp=st.integers(1, 6),
    align=st.sampled_from([1, 64]),
    size=st.none() | st.integers(1, 600),
    early=st.booleans(),
)
def test_known_sizes_give_the_same_places(sizes, shared, dp, align, size, early):
    parameters = [local(str(n), numel, shared=n in shared) for n, numel in enumerate(sizes)]
    made = arrange(parameters, Rules(dp, align, size, early=early))
    found = fit(parameters, [b.numel_unpadded for b in made], align, "buffer")
    assert [b.members for b in found] == [b.members for b in made]
    assert sum(p.numel for b in made for p, _ in b.members) == sum(sizes)
    for bucket in made:
        try:
            chunks = [chunk for rank in dp_chunks(bucket, dp) for chunk in rank]
        except RequestError:
            continue
        ends = [start + length for start, length, _ in chunks]
        assert [start for start, _, _ in chunks] == [0, *ends[:-1]]
        assert ends[-1] == bucket.numel_unpadded
        held = [sum(n for _, n, position in chunks if position == p) for p in range(len(bucket.members))]
        assert held == [p.numel for p, _ in bucket.members]


@pytest.mark.parametrize("wrong", [[299], [301], [100, 200], [300, 1], []])
def test_other_sizes_do_not_fit(wrong):
    with pytest.raises(Misfit):
        fit([local("a", 100), local("b", 200)], wrong, 1, "buffer")


# ---------------------------------------------------------------------- rounding


@given(st.lists(st.floats(width=32, allow_nan=True, allow_infinity=True), min_size=1, max_size=50))
def test_rounding_is_that_of_torch(values):
    source = torch.tensor(values, dtype=torch.float32)
    bits = source.numpy().view("<u4")
    for name in ("bfloat16", "float16", "float32"):
        wanted = source.to(getattr(torch, name))
        got = rounded(bits, FP32, dtype(name))
        width = torch.int32 if name == "float32" else torch.int16
        same = torch.from_numpy(got.astype(f"<u{got.itemsize}").view(f"<i{got.itemsize}")) == wanted.view(width)
        assert bool((same | wanted.isnan()).all())


def test_ties_round_to_even():
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0xFF800000], "<u4")
    assert rounded(bits, FP32, BF16).tolist() == [0x3F80, 0x3F82, 0x3F81, 0x7F80, 0xFF80]
    with pytest.raises(FormatError, match="cannot be compared"):
        rounded(bits, FP32, dtype("float8_e4m3fn"))


# ---------------------------------------------------------------------- round trip


def gpt(layers, *, experts, gated, tied, bias, mtp):
    """Names and shapes of a small GPT model."""
    hidden, ffn, vocab = 8, 12, 16
    out = {"embedding.word_embeddings.weight": (vocab, hidden)}
    bodies = [f"decoder.layers.{n}." for n in range(layers)]
    bodies += [f"mtp.layers.{n}.transformer_layer." for n in range(mtp)]
    rows = ffn * (2 if gated else 1)
    for number, body in enumerate(bodies):
        out |= {
            f"{body}self_attention.linear_proj.weight": (hidden, hidden),
            f"{body}self_attention.linear_qkv.layer_norm_weight": (hidden,),
            f"{body}self_attention.linear_qkv.weight": (3 * hidden, hidden),
        }
        if bias:
            out |= {f"{body}self_attention.linear_proj.bias": (hidden,)}
        if experts and number:  # the first layer is dense
            out |= {f"{body}pre_mlp_layernorm.weight": (hidden,), f"{body}mlp.router.weight": (experts, hidden)}
            parts = [f"{body}mlp.experts.{e}." for e in range(experts)]
        else:
            out |= {f"{body}mlp.linear_fc1.layer_norm_weight": (hidden,)}
            parts = [f"{body}mlp."]
        for part in parts:
            out |= {f"{part}linear_fc1.weight": (rows, hidden), f"{part}linear_fc2.weight": (hidden, ffn)}
            if bias:
                out |= {f"{part}linear_fc1.bias": (rows,), f"{part}linear_fc2.bias": (hidden,)}
    for n in range(mtp):
        norms = {f"mtp.layers.{n}.{norm}.weight": (hidden,) for norm in ("enorm", "hnorm", "final_layernorm")}
        out |= {f"mtp.layers.{n}.eh_proj.weight": (hidden, 2 * hidden)} | norms
    out["decoder.final_layernorm.weight"] = (hidden,)
    return out if tied else out | {"output_layer.weight": (vocab, hidden)}


class MadeReader(Reader):
    """A checkpoint whose records lie behind each other in one file."""

    name = "made"

    def __init__(self, path, args):
        self.files, self.args, self.objects, self.tensors = [path], args, {}, {}
        self.places, self._file = [], path.open("wb")

    def add(self, name, kind, shape, pieces, opaque=None, state="optimizer"):
        """A stored array of `(start, values)` pieces."""
        numbers = []
        for _, values in pieces:
            self.places.append((self._file.tell(), values.nbytes))
            numbers.append(len(self.places) - 1)
            self._file.write(values.tobytes())
        starts = np.array([start for start, _ in pieces], np.int64).reshape(len(pieces), len(shape))
        sizes = np.array([values.shape for _, values in pieces], np.int64).reshape(len(pieces), len(shape))
        array = StoredArray(name, shape, starts, sizes, np.array(numbers, np.int64))
        self.tensors[name] = TensorInfo(name, kind, shape, state, (Part(array),), opaque)

    def close(self):
        self._file.close()
        objects = {
            key: types.SimpleNamespace(
                name=(name := key.rpartition("/")[0]), of_optimizer=".distributed.dp_group_idx_" in name
            )
            for key in self.objects
        }
        self.catalog = Catalog(self.files[0].parent, "made", "Megatron-LM", self.tensors, objects, self.args)
        return self

    def fingerprint(self):
        return ""

    def file_of(self, record):
        return 0

    def locate(self, record, read):
        offset, nbytes = self.places[record]
        return Payload(offset, nbytes, None, offset, nbytes)

    def object_value(self, key):
        tree = self.objects.get(key)
        return tree[0] if tree is not None else None


@st.composite
def jobs(draw):
    """A model, a layout that fits it, an order and arguments that cut buckets."""
    experts = draw(st.sampled_from([0, 0, 4]))
    tp, pp = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2]))
    vpp = draw(st.sampled_from([None, 2])) if pp == 2 else None
    ep = draw(st.sampled_from([1, 2])) if experts else 1
    etp = draw(st.sampled_from([None, 1])) if ep > 1 else None
    dp = Layout.least_dp(tp, 1, ep, etp) * draw(st.integers(1, 2))
    options = {name: draw(st.booleans()) for name in ("gated", "tied", "bias")}
    shapes = gpt(4, experts=experts, mtp=draw(st.sampled_from([0, 0, 1])), **options)
    order = Order(draw(st.booleans()), draw(st.sampled_from(EXPERTS)) if experts else "grouped")
    args = {"transformer_impl": draw(st.sampled_from(["local", "transformer_engine", None]))}
    if draw(st.booleans()):
        args |= {"overlap_grad_reduce": True, "ddp_bucket_size": draw(st.integers(50, 2000))}
    return shapes, Layout(tp=tp, pp=pp, vpp=vpp, ep=ep, etp=etp, dp=dp), order, args


def make(path, shapes, layout, order, args, flat, values):
    reader = MadeReader(path, args)
    for name, shape in shapes.items():
        weight = rounded(values["param", name].view("<u4"), FP32, BF16)
        reader.add(name, BF16, shape, [((0,) * len(shape), weight)], state="weight")
    pieces, objects = flat
    for key in dict.fromkeys(piece.key for piece in pieces):
        mine, stored = [piece for piece in pieces if piece.key == key], []
        for piece in mine:
            data = np.full(piece.length, np.nan, "<f4")  # gaps hold anything
            end = 0
            for inner in piece.pieces:
                begin, end = end, end + math.prod(inner.shape)
                filled = data[begin:end].reshape(inner.laid)
                for copy in inner.copies:
                    _, _, state, name = copy.source.split(".", 3)
                    value = values[state, name][copy.source_box.slices]
                    filled[copy.target_box.slices] = value.T if copy.op is Op.TRANSPOSE else value
            assert end == piece.length
            stored.append(((piece.start,), data))
        reader.add(key, FP32, (mine[0].numel,), stored, "flat optimizer bucket")
    reader.objects = {thing.key: Archive.parse(thing.content, thing.key).tree for thing in objects}
    return reader.close()


def chain_of(names, ep):
    part = OptimizerPart("Adam", True, frozenset(), frozenset(names))
    groups = ({"wd_mult": 1.0, "lr_mult": 1.0, "is_decoupled_lr": False, "step": 3},)
    return ParamGroups((PartGroups(part, groups),)).chain(ep)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(job=jobs(), seed=st.integers(0, 99))
def test_what_is_flattened_is_found_again(tmp_path, job, seed):
    shapes, layout, order, args = job
    targets = {name: Target(name, BF16, shape) for name, shape in shapes.items()}
    outline = Outline(
        num_layers=4,
        mtp_layers=int(any(n.startswith("mtp.") for n in shapes)),
        num_experts=4 if any(".experts." in n for n in shapes) else None,
        gated=shapes["decoder.layers.0.mlp.linear_fc1.weight"][0] == 24,
        tied="output_layer.weight" not in shapes,
    )
    chain = chain_of(shapes, layout.ep)
    try:
        states = dict.fromkeys(("param", "exp_avg"), FP32)
        flat = flatten(LocalModel(targets, layout, outline, order), states, chain, args)
    except RequestError:
        assume(False)  # a data-parallel rank without parameters
    random = np.random.default_rng(seed)
    values = {
        (state, name): random.standard_normal(shape, np.float32)
        for state in ("param", "exp_avg")
        for name, shape in shapes.items()
    }
    reader = make(tmp_path / "data", shapes, layout, order, args, flat, values)
    found = optimizer_state(reader, layout)
    prove_masters(reader, found.tensors)
    assert found.tensors.keys() == {f"optimizer.state.{state}.{name}" for state, name in values}
    for (state, name), value in values.items():
        info = found.tensors[f"optimizer.state.{state}.{name}"]
        assert np.array_equal(read_tensor(reader, info), value.view("<u4")), (state, name)


def test_rows_that_the_source_lacks_are_filled():
    name = "embedding.word_embeddings.weight"
    shapes = {name: (24, 8), "decoder.final_layernorm.weight": (8,), "decoder.layers.0.mlp.linear_fc2.weight": (8, 4)}
    targets = {n: Target(n, BF16, shape) for n, shape in shapes.items()}
    model = LocalModel(targets, Layout(tp=2), Outline(1), Order(), {name: (17, 8)})
    pieces, _ = flatten(model, {"param": FP32}, chain_of(shapes, 1), {})
    rows = Counter()
    for piece in pieces:
        assert sum(math.prod(inner.shape) for inner in piece.pieces) == piece.length
        boxes = [c.source_box for inner in piece.pieces for c in inner.copies if c.source.endswith(name)]
        assert all(box.stop[0] <= 17 for box in boxes)
        rows[piece.key.partition(".gbuf_idx")[0]] += sum(box.shape[0] for box in boxes)
    assert list(rows.values()) == [12, 5]


def test_candidates_begin_with_what_the_arguments_say():
    def first(args, producer=None, names=()):
        catalog = types.SimpleNamespace(
            args=args, producer=(producer, "") if producer else None, weights=dict.fromkeys(names)
        )
        return next(candidates(catalog, Layout(ep=2, dp=2)))

    assert first({}).order == Order()
    assert first({"transformer_impl": "local"}).order == Order(fused_norms=False)
    moe = ["decoder.layers.0.mlp.experts.0.linear_fc1.weight"]
    assert first({"moe_grouped_gemm": False}, names=moe).order.experts == "sequential"
    assert first({"moe_use_legacy_grouped_gemm": True}, names=moe).order.experts == "stacked"
    assert first({}, "Megatron-Core 0.6 or 0.7").align == 1
    assert first({}, "Megatron-Core 0.8 to 0.10").expert_groups == "ep-pp-tp"
    assert first({}, "Megatron-Core 0.16 to 0.18").expert_groups == "pp-ep-tp"


def test_a_copy_of_the_embedding_is_not_read():
    shapes = gpt(2, experts=0, gated=True, tied=True, bias=False, mtp=0)
    targets = {n: Target(n, BF16, shape) for n, shape in shapes.items()}
    model = LocalModel(targets, Layout(pp=2), Outline(2, gated=True, tied=True), Order())
    (first,) = model.buffers(DataParallelGroup(0, 0), ChainMember(), {})
    (last,) = model.buffers(DataParallelGroup(1, 0), ChainMember(), {})
    assert first.parameters[0].parts == last.parameters[-1].parts == ("embedding.word_embeddings.weight",)
    assert (first.parameters[0].first, last.parameters[-1].first) == (True, False)
    assert first.parameters[0].shared
    assert last.parameters[-1].shared
