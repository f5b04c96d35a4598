"""What `converters.load` gives, taken by the real megatron-core: `python -m oracle.loader < jobs > answers`.

Jobs are as `oracle.ranks` takes them, with `path`, a checkpoint, and `truth`, a safetensors file of whole tensors by their
names on disk. Each rank's chunks take their part with `load_state_dict(strict=True)`; the answer of a job is a list of what
is wrong, and how many tensors were compared.
"""

import contextlib
import json
import sys
from types import SimpleNamespace

import torch
from megatron.core.transformer.moe import experts

from converters.loading.loader import load
from converters.megatron.layout import Layout
from converters.param_order import Order
from oracle import models, ranks  # redirects devices before megatron is imported
from oracle.run import read_expected

experts.gg = SimpleNamespace(assert_grouped_gemm_is_available=lambda: None)  # GroupedMLP computes nothing here


def wrong_in(job, rank, state, expected):
    """What differs on one rank, and the number of tensors compared."""
    count, wrong = 0, []
    with ranks.standing_as(job, rank):
        for number, (model, sharded) in enumerate(ranks.chunks(job)):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(float("nan"))
            model.load_state_dict(state.chunk(number), strict=True)
            for shard in models.shards(sharded):
                # the local spec saves this norm as if it were fused, also before experts
                apart = shard.key.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")
                full = expected[shard.key if shard.key in expected else apart]
                count += 1
                if not torch.equal(shard.data, models.local_part(shard, full.float())):
                    wrong.append(f"rank {rank} chunk {number}: {shard.key}")
    return wrong, count


def main():
    answers = []
    with contextlib.redirect_stdout(sys.stderr):
        for job in json.load(sys.stdin):
            layout = Layout(**job["layout"])
            expected = read_expected(job["truth"])
            wrong, count = [], 0
            for rank in range(job["world"]):
                state = load(job["path"], layout, rank, modules=Order(False, job["experts"]))
                more, compared = wrong_in(job, rank, state, expected)
                wrong, count = wrong + more, count + compared
            answers.append({"wrong": wrong, "count": count})
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
