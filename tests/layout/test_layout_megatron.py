"""The layout mathematics against Megatron-Core itself: its rank groups, its stages, its layout strings."""

import itertools
import warnings
from types import SimpleNamespace

import pytest

from converters.errors import RequestError
from converters.megatron.layout import Layout
from converters.megatron.pipeline import parse_pp_layout

pytestmark = [pytest.mark.megatron, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def megatron():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("megatron.core")
        from megatron.core import parallel_state
        from megatron.core.transformer import pipeline_parallel_layer_layout, transformer_block, transformer_layer
        from megatron.core.transformer.enums import LayerType
        from megatron.core.transformer.transformer_config import TransformerConfig
    return SimpleNamespace(
        ranks=parallel_state.RankGenerator,
        state=parallel_state,
        string=pipeline_parallel_layer_layout.PipelineParallelLayerLayout,
        count=transformer_block.get_num_layers_to_build,
        offset=transformer_layer.get_transformer_layer_offset,
        config=TransformerConfig,
        kinds=LayerType,
    )


GRIDS = [
    (tp, cp, dp, pp, ep, etp, order)
    for order in ("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp", "tp-dp-cp-ep-pp", "pp-dp-tp-cp-ep")
    for tp, cp, dp, pp, ep, etp in itertools.product((1, 2, 3), (1, 2), (1, 2, 4), (1, 2, 3), (1, 2, 4), (None, 1, 2))
    if (tp * cp * dp) % ((etp or tp) * ep) == 0
    and (order.endswith("pp") or pp == 1 or tp * cp * dp // ((etp or tp) * ep) == dp)
]


def test_ranks_are_where_megatron_puts_them(megatron):
    assert len(GRIDS) > 500
    for tp, cp, dp, pp, ep, etp, order in GRIDS:
        layout = Layout(tp=tp, cp=cp, dp=dp, pp=pp, ep=ep, etp=etp, order=order)
        dense = megatron.ranks(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order=order)
        expert = megatron.ranks(tp=layout.expert_tp, ep=ep, dp=layout.edp, pp=pp, cp=1, order=order)
        at = [layout.coordinates(rank) for rank in range(layout.world_size)]
        for grid, token, mine in (
            (dense, "tp", "tp"),
            (dense, "cp", "cp"),
            (dense, "dp", "dp"),
            (dense, "pp", "pp"),
            (dense, "dp-cp", "dp_cp"),
            (expert, "tp", "etp"),
            (expert, "ep", "ep"),
            (expert, "dp", "edp"),
            (expert, "pp", "pp"),
        ):
            theirs = {rank: i for group in grid.get_ranks(token) for i, rank in enumerate(group)}
            assert [getattr(c, mine) for c in at] == [theirs[rank] for rank in range(layout.world_size)], layout
        for rank, c in enumerate(at):
            assert layout.rank(c.tp, c.cp, c.dp, c.pp) == rank == layout.expert_rank(c.etp, c.ep, c.edp, c.pp)


def stages_of(megatron, monkeypatch, config, pp, vpp):
    """Megatron's (pp, vp, layers) of every stage."""
    monkeypatch.setattr(megatron.state, "get_virtual_pipeline_model_parallel_world_size", lambda: vpp)
    out = []
    for vp, rank in itertools.product(range(vpp or 1), range(pp)):
        monkeypatch.setattr(megatron.state, "get_pipeline_model_parallel_rank", lambda rank=rank: rank)
        stage = vp if vpp else None
        first = megatron.offset(config, stage, rank)
        out.append((rank, vp, range(first, first + megatron.count(config, stage, rank))))
    return out


def test_stages_are_megatrons(megatron, monkeypatch):
    from torch import float32

    accepted = refused = 0
    for layers, pp, vpp, first, last, embedding, loss in itertools.product(
        (1, 2, 4, 6, 7, 12, 15, 16),
        (1, 2, 3, 4),
        (None, 2, 3),
        (None, 1, 2, 4),
        (None, 1, 2, 3),
        (False, True),
        (False, True),
    ):
        if pp == 1 and first and last:
            continue  # Megatron takes two ends of a single stage for -1 stages between them
        try:
            config = megatron.config(
                num_layers=layers,
                hidden_size=8,
                num_attention_heads=1,
                pipeline_model_parallel_size=pp,
                virtual_pipeline_model_parallel_size=vpp,
                num_layers_in_first_pipeline_stage=first,
                num_layers_in_last_pipeline_stage=last,
                account_for_embedding_in_pipeline_split=embedding,
                account_for_loss_in_pipeline_split=loss,
                pipeline_dtype=None if pp == 1 else float32,
            )
            if vpp is not None and pp == 1:
                raise ValueError("refused by initialize_model_parallel")
            theirs = stages_of(megatron, monkeypatch, config, pp, vpp)
        except (ValueError, AssertionError, ZeroDivisionError):
            theirs = None
        if theirs is not None and sorted(i for _, _, held in theirs for i in held) != list(range(layers)):
            assert (first or 0) + (last or 0) > layers  # it takes a negative number of layers between
            theirs = None
        try:
            layout = Layout(
                pp=pp,
                vpp=vpp,
                first_layers=first,
                last_layers=last,
                account_for_embedding=embedding,
                account_for_loss=loss,
            )
            mine = [(s.pp, s.vp, s.layers) for s in layout.pipeline(layers).stages]
        except RequestError:
            mine = None
        assert mine == theirs, (layers, pp, vpp, first, last, embedding, loss)
        accepted, refused = accepted + (mine is not None), refused + (mine is None)
    assert accepted > 150
    assert refused > 150


STRINGS = [
    ("Et|t|t|tL", 4, 4, 0),
    ("Ettt|(tt|)*3,m|L", 6, 9, 1),
    ("Ett|tt|tt|ttmL", 2, 8, 1),
    ("E|t*3|t|t,t|tL|", 3, 7, 0),
    ("E,t*3|(t|)*4,tt|t*2,mL", 7, 11, 1),
    ("Et*2|t*2|t*2|tmmL", 4, 7, 2),
    ("|Ett|tt|L", 4, 4, 0),
    ("E|(tt|)*6,mm|L", 3, 12, 2),
    ("Et*4L", 1, 4, 0),
    ("(Et|)*1t|(tt|)*2tL", 5, 7, 0),
    ("Et(|t)*3L", 2, 4, 0),
]


def test_layout_strings_are_read_as_megatron_reads_them(megatron, monkeypatch):
    letters = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
    for text, pp, layers, mtp in STRINGS:
        rows = megatron.string.parse_str_to_list(text)
        assert parse_pp_layout(text) == tuple("".join(letters[kind.name] for kind in row) for row in rows)
        theirs = megatron.string(text, pp)
        vpp = theirs.virtual_pipeline_model_parallel_size
        try:
            theirs.validate_layer_layout(layers, mtp or None)
        except AssertionError:
            with pytest.raises(RequestError):
                Layout(pp=pp, pp_layout=text).pipeline(layers, mtp)
            continue
        if vpp > 1 and pp == 1:
            continue
        layout = Layout(pp=pp, pp_layout=text)
        assert layout.chunks == vpp
        stages = layout.pipeline(layers, mtp).stages
        monkeypatch.setattr(
            megatron.state, "get_virtual_pipeline_model_parallel_world_size", lambda vpp=vpp: vpp if vpp > 1 else None
        )
        for stage in stages:
            for kind, mine in ((megatron.kinds.decoder, stage.layers), (megatron.kinds.mtp, stage.mtp)):
                assert theirs.get_layer_id_list(kind, stage.vp, stage.pp) == list(mine), (text, stage)


@pytest.mark.parametrize(
    "text",
    [
        "Et|x|tL",
        "Et| tL",
        "E(tt|tL",
        "Et*|tL",
        "Et3|tL",
        "E((t)*2|)*2tL",
        "E(tt)|tL",
        "Et|t)*2L",
        "e|tL",
        "Et*,L",
        "*3EtL",
    ],
)
def test_what_megatron_cannot_read_is_refused(megatron, text):
    with pytest.raises(AssertionError):
        megatron.string.parse_str_to_list(text)
    with pytest.raises(RequestError, match="at position"):
        parse_pp_layout(text)


def test_numbers_of_heads_and_groups_are_megatrons(megatron):
    from converters.megatron.layout_check import check_layout
    from converters.megatron.model_args import ModelArgs

    for heads, groups, tp in itertools.product((4, 6, 12, 16), (1, 2, 3, 4, 6), (1, 2, 3, 4, 6, 8, 12, 16)):
        if heads % groups:
            continue
        try:
            megatron.config(
                num_layers=1,
                hidden_size=heads * 16,
                num_attention_heads=heads,
                num_query_groups=groups,
                tensor_model_parallel_size=tp,
            )
            theirs = (heads + 2 * groups) * 16 % tp == 0  # ColumnParallelLinear divides the rows
        except ValueError:
            theirs = False
        args = ModelArgs(num_layers=1, num_attention_heads=heads, num_query_groups=groups, gated=False)
        shapes = {"decoder.layers.0.self_attention.linear_qkv.weight": ((heads + 2 * groups) * 16, heads * 16)}
        try:
            check_layout(args, Layout(tp=tp), shapes)
            mine = True
        except RequestError:
            mine = False
        assert mine == theirs, (heads, groups, tp)
