"""What the layout mathematics gives every rank of a job against what the real megatron-core builds on it."""

import json
from dataclasses import asdict

import pytest

from converters.box import Box
from converters.megatron.layout import Layout
from converters.megatron.outline import Outline
from converters.megatron.split import holders, shards
from converters.names import parse_key
from harness.layout_cases import JOBS, MTP
from harness.support import local_shape
from oracle.fixtures import run_module

pytestmark = pytest.mark.megatron


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
