#!/usr/bin/env python3
"""How long it takes to plan a reshard, and how long when the plan is kept: CPU seconds, for three sizes.

    python scripts/bench_plan.py [--repeat N] [RECORDS ...]

A mixture-of-experts model with its optimizer, as the metadata of a checkpoint without data; the second run plans for the
next iteration. Opening the checkpoint is not part of it, everything else is: tasks, looking for the plan, keeping it.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from converters.archive.records_out import object_record
from converters.formats.dcp.stored import DcpMetadata, StoredTensor
from converters.formats.torch_dist.reader import TorchDistReader
from converters.parallel.layout import Layout
from converters.pickles import Global, Obj
from converters.targets.plan_cache import PlanCache, code_digest
from converters.targets.reshard import ReshardOptions, ReshardPlan, plan_reshard

if TYPE_CHECKING:
    from collections.abc import Mapping

EXPERTS, HIDDEN, INNER, VOCAB = 256, 64, 32, 1024
ARGS = {
    "num_attention_heads": 8,
    "hidden_size": HIDDEN,
    "ffn_hidden_size": INNER,
    "moe_ffn_hidden_size": INNER,
    "num_experts": EXPERTS,
    "swiglu": True,
    "padded_vocab_size": VOCAB,
    "vocab_size": 1000,
    "overlap_grad_reduce": False,
    "pipeline_model_parallel_size": 1,
}


def stored(key: str, kind: str, lead: tuple[int, ...], shape: tuple[int, ...], cuts: tuple[int, ...]) -> StoredTensor:
    """An array whose leading axes are cut into single elements and the others into so many parts."""
    every = (*lead, *shape)
    parts = (*lead, *cuts)
    size = np.array(every) // np.array(parts)
    starts = (np.indices(parts).reshape(len(parts), -1).T * size).astype(np.int64)
    count = len(starts)
    length = np.full(count, 2000 + int(np.prod(size)), np.int64)
    sizes = np.tile(size.astype(np.int64), (count, 1))
    return StoredTensor(
        key, kind, every, starts, sizes, np.zeros(count, np.int32), np.cumsum(length) - length, length, None
    )


def synthetic(folder: Path, layers: int, iteration: int, args: Mapping[str, object] = ARGS) -> TorchDistReader:
    """The reader of a checkpoint of about 24,600 records a layer.

    Args:
        folder: Where to make it; it gets a common state and no data.
        layers: Number of layers.
        iteration: Training iteration.
        args: Training arguments.
    """
    folder = folder / f"iter_{iteration:07d}"
    folder.mkdir(parents=True, exist_ok=True)
    known = {**args, "num_layers": layers, "iteration": iteration, "consumed_train_samples": 32 * iteration}
    content = {"distrib_optim_sharding_type": "fully_reshardable"}
    tree = {"args": Obj(Global("argparse", "Namespace"), (), state=dict(known)), "iteration": iteration}
    (folder / "common.pt").write_bytes(object_record({**tree, "content_metadata": content}))
    tensors: dict[str, StoredTensor] = {}
    lead, experts = (layers, EXPERTS), "decoder.layers.mlp.experts.experts"
    for state in ("", *(f"optimizer.state.{name}." for name in ("param", "exp_avg", "exp_avg_sq"))):
        kind = "float32" if state else "bfloat16"
        for t in (
            stored(f"{state}{experts}.linear_fc1.weight", kind, lead, (2 * INNER, HIDDEN), (4, 1)),
            stored(f"{state}{experts}.linear_fc2.weight", kind, lead, (HIDDEN, INNER), (1, 4)),
            stored(f"{state}embedding.word_embeddings.weight", kind, (), (VOCAB, HIDDEN), (4, 1)),
        ):
            tensors[t.key] = t
    end = 0
    for t in tensors.values():
        t.offset[:] += end
        end += int(t.length.sum())
    with (folder / "__0_0.distcp").open("wb") as file:
        file.truncate(end)
    metadata = DcpMetadata(["__0_0.distcp"], tensors, {}, [], "Metadata", {}, None, None, False)
    return TorchDistReader(folder, metadata, f"{iteration}")


def planned(reader: TorchDistReader, cache: PlanCache | None, **options: object) -> tuple[ReshardPlan, float]:
    """A plan with its tasks, and the CPU seconds it took."""
    stages = 4 if reader.catalog.args["num_layers"] % 4 == 0 else 1
    layout, wanted = Layout(tp=8, pp=stages), ReshardOptions(threads=2, **options)  # type: ignore[arg-type]
    code_digest.cache_clear()  # a new process reads the library once
    begin = time.process_time()
    plan = plan_reshard(reader, reader.catalog.path.parent.parent / "out", layout, wanted, cache=cache)
    assert len(plan.job.tasks)
    return plan, time.process_time() - begin


def measure(layers: int, repeat: int) -> tuple[int, float, float, float, int]:
    """Records written; CPU seconds without a cache, with an empty one, with a kept plan; bytes of the kept plan."""
    plain, first, second = [], [], []
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for number in range(repeat):
            cache = PlanCache.default(root / f"plans{number}")
            assert cache is not None
            base = root / f"job{number}" / "ckpt"
            plain.append(planned(synthetic(base, layers, 1), None)[1])
            first.append(planned(synthetic(base, layers, 2), cache)[1])
            plan, seconds = planned(synthetic(base, layers, 3), cache)
            second.append(seconds)
            assert plan.job.known_tasks is not None, cache.said
        size = sum(path.stat().st_size for path in cache.folder.iterdir())
    return plan.output.columns.records, *(statistics.median(s) for s in (plain, first, second)), size


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="*", type=int, default=[20_000, 200_000, 1_000_000])
    parser.add_argument("--repeat", type=int, default=5)
    asked = parser.parse_args()
    print("   RECORDS  NO CACHE     FIRST    SECOND  SECOND/NO CACHE   KEPT")
    for records in asked.records:
        layers = math.ceil(records / 24_600)
        written, plain, first, second, size = measure(layers if layers < 4 else -(-layers // 4) * 4, asked.repeat)
        row = f"{written:>10,} {plain:>8.3f}s {first:>8.3f}s {second:>8.4f}s {second / plain:>15.1%}"
        print(f"{row}  {size / 2**20:>5.1f} MiB", flush=True)


if __name__ == "__main__":
    main()
