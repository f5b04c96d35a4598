"""The layout mathematics by its own laws: grids, stages, shards, and what is refused with which words."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from converters.box import find_overlap, uncovered
from converters.errors import RequestError
from converters.megatron.layout import Layout
from converters.megatron.layout_check import check_layout
from converters.megatron.model_args import ModelArgs
from converters.megatron.outline import Outline
from converters.megatron.pipeline import parse_pp_layout
from converters.megatron.split import holders, padded_vocab, shards, split_rule
from converters.megatron.vocabulary import is_vocabulary
from harness.support import local_shape

SMALL = st.sampled_from([1, 2, 3, 4])


@st.composite
def layouts(draw, pp=SMALL):
    tp, cp, etp, ep = draw(SMALL), draw(st.sampled_from([1, 2])), draw(st.none() | SMALL), draw(SMALL)
    dp = Layout.least_dp(tp, cp, ep, etp) * draw(SMALL)
    return Layout(tp=tp, pp=draw(pp), cp=cp, ep=ep, etp=etp, dp=dp)


@given(layouts())
def test_rank_and_coordinates_are_inverse(layout):
    seen = set()
    for rank in range(layout.world_size):
        c = layout.coordinates(rank)
        assert layout.rank(c.tp, c.cp, c.dp, c.pp) == rank == layout.expert_rank(c.etp, c.ep, c.edp, c.pp)
        assert 0 <= c.dp_cp < layout.dp_cp
        seen.add((c.tp, c.dp_cp, c.pp))
    assert len(seen) == layout.world_size


@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 3), st.booleans(), st.booleans(), st.integers(0, 2))
def test_stages_partition_the_layers(each, pp, vpp, embedding, loss, mtp):
    layers = each * pp * vpp - embedding - loss
    if layers < 1 or (pp == 1 and vpp > 1) or (each == 1 and pp * vpp == 1 and embedding + loss > 0):
        return
    layout = Layout(pp=pp, vpp=vpp, account_for_embedding=embedding, account_for_loss=loss)
    pipeline = layout.pipeline(layers, mtp)
    assert [i for stage in pipeline.stages for i in stage.layers] == list(range(layers))
    assert [i for stage in pipeline.stages for i in stage.mtp] == list(range(mtp))
    assert sum(stage.has_final_norm for stage in pipeline.stages) == 1
    for layer in range(layers):
        (stage,) = pipeline.homes(f"decoder.layers.{layer}.mlp.linear_fc1.weight")
        assert layer in stage.layers
    with pytest.raises(RequestError, match="there is no number"):
        pipeline.homes(f"decoder.layers.{layers}.mlp.linear_fc1.weight")


# every rule once: name, shape, which model size must be divided; hidden 48, 12 heads of 4 in 12 groups, ffn 96
SHAPES = {
    "embedding.word_embeddings.weight": (144, 48),
    "embedding.position_embeddings.weight": (64, 48),
    "decoder.layers.0.input_layernorm.weight": (48,),
    "decoder.layers.0.self_attention.linear_qkv.weight": (144, 48),
    "decoder.layers.0.self_attention.linear_qkv.bias": (144,),
    "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight": (48,),
    "decoder.layers.0.self_attention.q_layernorm.weight": (4,),
    "decoder.layers.0.self_attention.linear_proj.weight": (48, 48),
    "decoder.layers.0.self_attention.linear_proj.bias": (48,),
    "decoder.layers.0.self_attention.core_attention.softmax_offset": (12,),
    "decoder.layers.0.mlp.linear_fc1.weight": (192, 48),
    "decoder.layers.0.mlp.linear_fc1.bias": (192,),
    "decoder.layers.0.mlp.linear_fc2.weight": (48, 96),
    "decoder.layers.0.mlp.linear_fc2.bias": (48,),
    "decoder.layers.1.self_attention.linear_q_down_proj.weight": (24, 48),
    "decoder.layers.1.self_attention.linear_q_up_proj.weight": (96, 24),
    "decoder.layers.1.self_attention.linear_q_up_proj.layer_norm_weight": (24,),
    "decoder.layers.1.self_attention.linear_kv_down_proj.weight": (24, 48),
    "decoder.layers.1.self_attention.linear_kv_up_proj.weight": (96, 20),
    "decoder.layers.1.mlp.router.weight": (12, 48),
    "decoder.layers.1.mlp.router.expert_bias": (12,),
    "decoder.layers.1.mlp.shared_experts.linear_fc1.weight": (96, 48),
    "decoder.layers.1.mlp.shared_experts.linear_fc2.weight": (48, 48),
    "decoder.layers.1.mlp.shared_experts.gate_weight": (1, 48),
    **{f"decoder.layers.1.mlp.experts.{e}.linear_fc1.weight": (48, 48) for e in range(12)},
    **{f"decoder.layers.1.mlp.experts.{e}.linear_fc2.weight": (48, 24) for e in range(12)},
    "decoder.layers.2.mixer.in_proj.weight.z": (96, 48),
    "decoder.layers.2.mixer.in_proj.weight.dt": (24, 48),
    "decoder.layers.2.mixer.in_proj.layer_norm_weight": (48,),
    "decoder.layers.2.mixer.conv1d.weight.B": (48, 1, 4),
    "decoder.layers.2.mixer.conv1d.bias.x": (96,),
    "decoder.layers.2.mixer.A_log": (24,),
    "decoder.layers.2.mixer.D": (24,),
    "decoder.layers.2.mixer.dt_bias": (24,),
    "decoder.layers.2.mixer.norm.weight": (96,),
    "decoder.layers.2.mixer.out_proj.weight": (48, 96),
    "decoder.layers.3.self_attention.in_proj.weight.query": (48, 48),
    "decoder.layers.3.self_attention.conv1d.weight.value": (96, 1, 4),
    "decoder.layers.3.self_attention.out_norm.weight": (8,),
    "decoder.layers.3.self_attention.out_proj.weight": (48, 96),
    "decoder.final_layernorm.weight": (48,),
    "output_layer.weight": (144, 48),
    "mtp.layers.0.enorm.weight": (48,),
    "mtp.layers.0.eh_proj.weight": (48, 96),
    "mtp.layers.0.transformer_layer.mlp.linear_fc1.weight": (192, 48),
    "mtp.layers.0.transformer_layer.mlp.experts.7.linear_fc2.weight": (48, 24),
    "mtp.layers.0.final_layernorm.weight": (48,),
}
OUTLINE = Outline(num_layers=12, mtp_layers=1, num_experts=12, gated=True)
ROWS = {name for name in SHAPES if name.endswith(("linear_proj.weight", "fc2.weight", "out_proj.weight"))}
REPLICATED = {
    name
    for name in SHAPES
    if name.endswith(("norm.weight", "norm_weight", "down_proj.weight", "gate_weight", "expert_bias", "router.weight"))
    or (name.endswith(".bias") and "linear_proj" in name)
    or "linear_fc2.bias" in name
    or "position" in name
} - {"decoder.layers.2.mixer.norm.weight"}


@pytest.mark.parametrize("name", SHAPES)
def test_each_kind_is_divided_along_its_axis(name):
    rule = split_rule(name)
    assert rule.axis == (None if name in REPLICATED else 1 if name in ROWS else 0)
    assert rule.gated == ("linear_fc1" in name and "norm" not in name)
    assert is_vocabulary(name) == name.startswith(("embedding.word", "output_layer"))
    assert (rule.expert is not None) == (".mlp.experts." in name)


@given(layouts(), st.sampled_from(sorted(SHAPES)), st.booleans())
def test_shards_tile_the_tensor_and_the_local_ones(layout, name, gated):
    outline = Outline(12, 1, 12, gated)
    shape, parts = SHAPES[name], shards(name, SHAPES[name], layout, outline)
    assert uncovered(shape, [part.box for part in parts]) is None
    assert find_overlap([part.box for part in parts]) is None
    local = local_shape(name, shape, layout, outline)
    for tp in {part.tp for part in parts}:
        own = [part.local for part in parts if part.tp == tp]
        assert uncovered(local, own) is None
        assert find_overlap(own) is None
    tps = {part.tp for part in parts}
    assert math.prod(local) * len(tps) == math.prod(shape)
    assert all(part.box.shape == part.local.shape for part in parts)


@given(layouts(pp=st.sampled_from([1, 2, 4])), st.sampled_from(sorted(SHAPES)))
def test_every_rank_of_the_right_stage_holds_its_part_once(layout, name):
    pipeline = layout.pipeline(OUTLINE.num_layers, OUTLINE.mtp_layers)
    held = {}
    for part in shards(name, SHAPES[name], layout, OUTLINE):
        for rank in holders(name, part, layout, OUTLINE):
            held.setdefault(rank, []).append(part)
    stages = {stage.pp for stage in pipeline.homes(name)}
    ranks = [r for r in range(layout.world_size) if layout.coordinates(r).pp in stages]
    expert = split_rule(name).expert
    if expert is not None:
        ranks = [r for r in ranks if layout.coordinates(r).ep == expert // (12 // layout.ep)]
    assert sorted(held) == ranks
    for rank, own in held.items():
        c = layout.coordinates(rank)
        assert {part.tp for part in own} in ({None}, {c.tp if expert is None else c.etp})
        assert sum(part.local.volume for part in own) == math.prod(local_shape(name, SHAPES[name], layout, OUTLINE))


@given(layouts(), layouts(), st.sampled_from(sorted(SHAPES)))
def test_there_and_back_is_the_identity(one, other, name):
    """Region copies from one layout's shards to another's and back bring every element to its place."""
    shape = SHAPES[name]
    first, second = (shards(name, shape, layout, OUTLINE) for layout in (one, other))
    for a in first:
        back = 0
        for b in second:
            common = a.box.intersect(b.box)
            if common is None:
                continue
            there = common.relative_to(b.box.start).shifted(b.local.start)
            again = there.relative_to(b.local.start).shifted(b.box.start)
            assert again == common
            back += common.volume
        assert back == a.box.volume


def test_gate_and_up_of_a_rank_lie_apart():
    parts = shards("decoder.layers.0.mlp.linear_fc1.weight", (16, 4), Layout(tp=2), Outline(1, gated=True))
    assert [(part.tp, part.box.start[0], part.local.start[0]) for part in parts] == [
        (0, 0, 0),
        (0, 8, 4),
        (1, 4, 0),
        (1, 12, 4),
    ]
    assert {part.box.shape for part in parts} == {(4, 4)}


def test_down_projections_of_mla_depend_on_the_layers_used():
    name = "decoder.layers.1.self_attention.linear_kv_down_proj.weight"
    assert len(shards(name, (24, 48), Layout(tp=4), Outline(2))) == 1
    assert len(shards(name, (24, 48), Layout(tp=4), Outline(2, mla_down_split=True))) == 4


def test_copies_of_the_embedding():
    name = "embedding.word_embeddings.weight"
    pipeline = Layout(pp=4).pipeline(8, 1)
    assert [s.pp for s in Layout(pp=4).pipeline(8).homes(name)] == [0]
    assert [s.pp for s in Layout(pp=4).pipeline(8).homes(name, tied=True)] == [0, 3]
    assert [s.pp for s in pipeline.homes(name)] == [0, 3]
    assert [s.pp for s in Layout(pp=4, pp_layout="Et*4|t*4|m|L").pipeline(8, 1).homes(name, tied=True)] == [0, 2, 3]
    assert [
        s.pp for s in Layout(pp=4, pp_layout="Et*4|t*4|m|L").pipeline(8, 1).homes("decoder.final_layernorm.weight")
    ] == [1]
    assert [s.pp for s in Layout(pp=1).pipeline(8, 1).homes(name, tied=True)] == [0]


def test_virtual_stages():
    stages = Layout(pp=2, vpp=2).pipeline(8).stages
    assert [(s.pp, s.vp, list(s.layers)) for s in stages] == [
        (0, 0, [0, 1]),
        (1, 0, [2, 3]),
        (0, 1, [4, 5]),
        (1, 1, [6, 7]),
    ]
    assert Layout(pp=2, pp_layout="Et|t|t|tL").chunks == 2


def test_unknown_parameters_are_refused_by_name_unless_nothing_is_divided():
    with pytest.raises(RequestError, match=r"decoder\.layers\.0\.novelty"):
        shards("decoder.layers.0.novelty", (4, 4), Layout(tp=2), OUTLINE)
    assert len(shards("decoder.layers.0.novelty", (4, 4), Layout(), OUTLINE)) == 1
    with pytest.raises(RequestError, match="no pipeline stage"):
        Layout(pp=2).pipeline(2).homes("novelty.weight")
    with pytest.raises(RequestError):  # Mamba's projection without its sections would be mixed up
        split_rule("decoder.layers.0.mixer.in_proj.weight")


def test_padded_vocab():
    assert padded_vocab(120, 8, 2) == 128
    assert padded_vocab(128, 8, 2) == 128
    assert padded_vocab(50257, 128, 4) == 50688


def test_from_args_reads_both_spellings():
    args = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 4, "world_size": 32}
    args |= {"context_parallel_size": 2, "decoder_first_pipeline_num_layers": 3, "use_tp_pp_dp_mapping": True}
    layout = Layout.from_args(args)
    assert (layout.tp, layout.pp, layout.cp, layout.dp, layout.first_layers) == (2, 4, 2, 2, 3)
    assert layout.order == "tp-cp-ep-pp-dp"
    config = {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 8, "num_layers_in_last_pipeline_stage": 1}
    layout = Layout.from_args(config)
    assert (layout.dp, layout.edp, layout.last_layers) == (8, 1, 1)
    assert Layout.from_args(ModelArgs(tp=2, ep=2, dp=4), tp=4, etp=1).edp == 8


def test_a_change_takes_along_what_hangs_on_it():
    saved = Layout(tp=2, etp=2, pp=2, ep=2, dp=2, vpp=2, first_layers=4)
    assert saved.changed(tp=4, pp=None) == Layout(tp=4, pp=2, ep=2, dp=2, vpp=2, first_layers=4)
    assert saved.changed(pp=4) == Layout(tp=2, pp=4, ep=2, dp=2)
    assert saved.changed(vpp=4) == Layout(tp=2, pp=2, ep=2, dp=2, vpp=4)
    assert saved.changed(ep=8).dp == 8
    assert Layout(tp=2, etp=1, ep=2).changed(tp=4).expert_tp == 1


def refused(make):
    with pytest.raises(RequestError) as caught:
        make()
    assert caught.value.exit_code == 4
    return caught.value


LLAMA = ModelArgs(num_attention_heads=32, num_query_groups=8, gated=True, num_layers=4)
MODEL = {
    "embedding.word_embeddings.weight": (128256, 4096),
    "output_layer.weight": (128256, 4096),
    **{f"decoder.layers.{n}.self_attention.linear_qkv.weight": (6144, 4096) for n in range(4)},
    **{f"decoder.layers.{n}.mlp.linear_fc1.weight": (28672, 4096) for n in range(4)},
    **{f"decoder.layers.{n}.mlp.linear_fc2.weight": (4096, 14336) for n in range(4)},
}
EXPERTS = {
    "decoder.layers.0.mlp.router.weight": (8, 64),
    **{f"decoder.layers.0.mlp.experts.{e}.linear_fc1.weight": (96, 64) for e in range(8)},
    **{f"decoder.layers.0.mlp.experts.{e}.linear_fc2.weight": (64, 48) for e in range(8)},
}


def test_heads():
    error = refused(lambda: check_layout(LLAMA, Layout(tp=6), MODEL))
    assert error.message == "32 attention heads cannot be split over --tp 6"
    assert error.details == ["decoder.layers.0.self_attention.linear_qkv.weight  (6144, 4096)"]
    assert error.hint == "--tp must divide 32: try 1, 2, 4, 8, 16 or 32"
    assert error.tensor == "decoder.layers.0.self_attention.linear_qkv.weight"


def test_groups():
    odd = {"embedding.word_embeddings.weight": (50257, 4096), "output_layer.weight": (50257, 4096)}
    assert check_layout(LLAMA, Layout(tp=8), {**MODEL, **odd}) == []  # the target job pads it
    assert check_layout(LLAMA, Layout(tp=8), MODEL) == []
    assert check_layout(LLAMA, Layout(tp=16), MODEL) == [
        "--tp 16 with 8 query groups needs Megatron-Core 0.16 or later"
    ]
    args = ModelArgs(num_attention_heads=12, num_query_groups=4, gated=True)
    shapes = {"decoder.layers.0.self_attention.linear_qkv.weight": (240, 12)}
    error = refused(lambda: check_layout(args, Layout(tp=6), shapes))
    assert error.message == "4 query groups cannot be split over --tp 6"
    assert error.hint == "--tp must divide 4 or be a multiple of it: try 1, 2 or 4"


@pytest.mark.parametrize(
    ("args", "layout", "shapes", "message", "hint"),
    [
        (LLAMA, {"tp": 32}, {"decoder.layers.0.mlp.linear_fc1.weight": (96, 8)},
         "48 of the MLP's inner size cannot be", "divide 48"),
        (LLAMA, {"ep": 2, "dp": 2}, MODEL, "this model has none", "leave --ep out"),
        (ModelArgs(gated=True), {"ep": 3, "dp": 3}, EXPERTS, "8 experts cannot be divided among --ep 3", "try 1, 2, 4 or 8"),
        (ModelArgs(gated=True), {"tp": 5}, EXPERTS, "48 of the experts' inner size cannot be split over --tp 5", "--etp"),
        (ModelArgs(gated=True), {"etp": 5, "dp": 5}, EXPERTS, "over --etp 5", "try 1, 2, 3, 4, 6, 8, 12 or 16"),
        (LLAMA, {"pp": 3}, MODEL, "4 layers cannot be spread evenly over --pp 3", "--pp must divide 4: try 1, 2 or 4"),
        (LLAMA, {"pp": 2, "vpp": 3}, MODEL,
         "2 layers a pipeline rank (4 layers, --pp 2) cannot be cut into --vpp 3", "try 1 or 2"),
        (LLAMA, {"vpp": 2}, MODEL, "--vpp 2 needs more than one pipeline stage", "leave --vpp out"),
        (LLAMA, {"pp": 2, "first_layers": 5}, MODEL, "--first-layers 5: 5 layers, but the model has 4", "leave 1 or more"),
        (LLAMA, {"pp": 3, "first_layers": 1}, MODEL, "--first-layers 1 of 4 layers leave 3 for 2 middle stages", "try 2"),
        (LLAMA, {"pp": 2, "first_layers": 2, "last_layers": 2, "vpp": 2}, MODEL,
         "Megatron cannot start with", "leave --last-layers out"),
        (LLAMA, {"pp": 2, "pp_layout": "Ettt|ttL"}, MODEL, "has 5 't', the model has 4 decoder layers", None),
        (LLAMA, {"pp": 2, "pp_layout": "Ett|tt"}, MODEL, "must have one L", None),
        (LLAMA, {"pp": 2, "pp_layout": "Ett|xttL"}, MODEL, "has 'x' at position 4", "E (embedding)"),
        (LLAMA, {"pp": 4, "pp_layout": "Ett|ttL"}, MODEL, "has 2 stages, not a multiple of --pp 4", "try 1 or 2"),
        (LLAMA, {"pp": 2, "pp_layout": "Ett|ttmL"}, MODEL, "has 1 'm', the model has 0 MTP layers", None),
        (LLAMA, {"pp": 2, "pp_layout": "Ett|ttL", "first_layers": 2}, MODEL, "--pp-layout sets every pipeline stage", None),
        (ModelArgs(), {"pp": 2}, {"encoder.layers.0.x": (1,), "decoder.layers.0.x": (1,)}, "encoder and decoder", "--pp 1"),
    ],
)  # fmt: skip
def test_what_is_refused(args, layout, shapes, message, hint):
    error = refused(lambda: check_layout(args, Layout(**layout), shapes))
    assert message in error.message
    assert hint is None or (error.hint is not None and hint in error.hint)


def test_grids_that_cannot_be():
    assert "--tp is 0" in refused(lambda: Layout(tp=0)).message
    error = refused(lambda: Layout(tp=2, ep=4, dp=3))
    assert error.message.startswith(
        "6 ranks a pipeline stage (tp 2 x cp 1 x dp 3) cannot be divided among --ep 4 x --etp 2"
    )
    assert error.hint == "--dp must be a multiple of 4"
    refused(lambda: Layout(order="tp-dp"))
    mapped = Layout(pp=2, cp=2, order="tp-cp-ep-pp-dp")
    assert "Megatron refuses ranks in the order" in refused(lambda: check_layout(LLAMA, mapped, MODEL)).message
    refused(lambda: Layout().coordinates(1))


@pytest.mark.parametrize("text", ["Et*1000000|L", "E(t*900)*900*900L", "E" + "(t*999)*999" * 3 + "L"])
def test_layout_strings_cannot_grow_without_bound(text):
    assert "more than" in refused(lambda: parse_pp_layout(text)).message
