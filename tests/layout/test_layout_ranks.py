"""What the layout mathematics gives every rank of a job against what the real megatron-core builds on it."""

import json
from dataclasses import asdict

import pytest

from converters.box import Box
from converters.megatron.layout import Layout
from converters.megatron.outline import Outline
from converters.megatron.split import holders, shards
from converters.names import parse_key
from harness.support import local_shape
from oracle.fixtures import run_module

pytestmark = pytest.mark.megatron

BASE = {
    "num_layers": 8,
    "hidden_size": 32,
    "num_attention_heads": 8,
    "num_query_groups": 2,
    "ffn_hidden_size": 48,
    "gated_linear_unit": True,
    "add_bias_linear": True,
    "tied": False,
    "vocab": 128,
}
PLAIN = BASE | {"gated_linear_unit": False, "tied": True, "softmax_type": "learnable"}
MOE = BASE | {
    "normalization": "RMSNorm",
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 24,
    "moe_layer_freq": [0, 1, 1, 1, 1, 1, 1, 1],
    "moe_shared_expert_intermediate_size": 40,
    "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid",
    "add_bias_linear": False,
}
MLA = BASE | {
    "multi_latent_attention": True,
    "q_lora_rank": 16,
    "kv_lora_rank": 20,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8,
    "num_query_groups": 8,
    "add_bias_linear": False,
}
MTP = BASE | {"mtp_num_layers": 2, "add_bias_linear": False}
JOBS = {
    "tp2 pp2 vpp2 cp2 dp2": (Layout(tp=2, pp=2, vpp=2, cp=2, dp=2), BASE),
    "more ranks than groups": (Layout(tp=8), BASE),
    "one rank": (Layout(), PLAIN),
    "tied": (Layout(tp=2, pp=4), PLAIN),
    "tied, mapped": (Layout(tp=2, pp=2, dp=2, order="tp-cp-ep-pp-dp"), PLAIN),
    "uneven": (Layout(tp=2, pp=4, first_layers=3, last_layers=1), BASE),
    "uneven vpp": (Layout(pp=3, vpp=2, first_layers=4), BASE),
    "ends counted": (Layout(pp=5, account_for_embedding=True, account_for_loss=True), BASE),
    "experts": (Layout(tp=2, ep=2, dp=2), MOE),
    "experts whole": (Layout(tp=2, ep=2, etp=1, dp=2, pp=2), MOE),
    "experts cut more": (Layout(tp=1, ep=2, etp=2, dp=4), MOE),
    "experts vpp cp": (Layout(pp=2, vpp=2, cp=2, ep=4, dp=2), MOE),
    "mla": (Layout(tp=4, pp=2), MLA),
    "mtp": (Layout(tp=2, pp=2, dp=2), MTP),
    "mtp one stage": (Layout(tp=2), MTP),
    "mtp apart": (Layout(pp=4, vpp=None, pp_layout="Et*5|t*3|mm|L"), MTP),
    "letters": (Layout(pp=2, vpp=2, tp=2, pp_layout="Et*3|tt|tt|tL"), BASE),
}


@pytest.fixture(scope="module")
def built():
    jobs = [{"layout": asdict(at), "world": at.world_size, "model": model} for at, model in JOBS.values()]
    code, answer, errors = run_module("oracle.ranks", text=json.dumps(jobs))
    assert code == 0, errors[-3000:]
    return dict(zip(JOBS, json.loads(answer), strict=True))


@pytest.mark.parametrize("job", JOBS)
def test_every_rank_holds_what_megatron_builds(built, job):
    layout, model = JOBS[job]
    answer = built[job]
    assert answer["stopped"] is None
    theirs, shapes, first = set(), {}, {}
    for rank, key, offset, size, whole, replica in answer["rows"]:
        parsed = parse_key(key)
        depth = len(parsed.axes)
        name, box = parsed.template.format(*offset[:depth]), Box(tuple(offset[depth:]), tuple(size))
        assert (rank, name, box) not in theirs
        theirs.add((rank, name, box))
        shapes[name] = tuple(whole[depth:])
        if not any(replica):
            assert (name, box) not in first
            first[name, box] = rank
    outline = Outline(
        num_layers=model["num_layers"],
        mtp_layers=model.get("mtp_num_layers", 0),
        num_experts=model.get("num_moe_experts"),
        gated=model["gated_linear_unit"],
        tied=model["tied"],
        mla_down_split=True,  # Megatron's own layers
    )
    mine = set()
    for name, shape in shapes.items():
        local = local_shape(name, shape, layout, outline)
        for shard in shards(name, shape, layout, outline):
            ranks = holders(name, shard, layout, outline)
            mine |= {(rank, name, shard.box) for rank in ranks}
            assert first[name, shard.box] == ranks[0], name
            assert all(a <= b for a, b in zip(shard.local.stop, local, strict=True))
    assert not sorted(mine - theirs, key=repr)[:5]
    assert not sorted(theirs - mine, key=repr)[:5]


def test_tied_embeddings_with_mtp_stop_megatron(built):
    """Why `check` warns of it: the last stage makes an output weight that its own `sharded_state_dict` forbids."""
    job = {"layout": asdict(Layout(pp=2)), "world": 2, "model": MTP | {"tied": True}}
    _, answer, _ = run_module("oracle.ranks", text=json.dumps([job]))
    assert json.loads(answer)[0]["stopped"].startswith("AssertionError")
