#!/usr/bin/env python3
"""How long it takes to plan a reshard: CPU seconds, for three sizes.

    python scripts/bench_plan.py [--repeat N] [RECORDS ...]

A mixture-of-experts model with its optimizer, as the metadata of a checkpoint without data. Opening the checkpoint is not
part of it, everything else is.
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

from converters.formats.dcp.stored import DcpMetadata, StoredTensor
from converters.formats.torch_dist.reader import TorchDistReader
from converters.megatron.layout import Layout
from converters.pickles.nodes import Global, Obj
from converters.torchzip.records_out import object_record
from converters.write.reshard import ReshardOptions, plan_reshard

if TYPE_CHECKING:
    from collections.abc import Mapping

    from converters.write.write_plan import Conversion

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
    options = {
        "lr": 1e-4,
        "betas": (0.9, 0.95),
        "eps": 1e-8,
        "lr_mult": 1.0,
        "is_decoupled_lr": False,
        "step": iteration,
    }
    groups = [{**options, "wd_mult": 1.0, "is_expert_parallel": expert} for expert in (False, True)]
    groups.append({**options, "wd_mult": 0.0, "is_expert_parallel": False})
    tree["optimizer"] = {"optimizer": {"param_groups": groups}, "param_state_sharding_type": "fully_reshardable"}
    (folder / "common.pt").write_bytes(object_record({**tree, "content_metadata": content}))
    tensors: dict[str, StoredTensor] = {}
    lead, experts = (layers, EXPERTS), "decoder.layers.mlp.experts.experts"
    for state in ("", *(f"optimizer.state.{name}." for name in ("param", "exp_avg", "exp_avg_sq"))):
        kind = "float32" if state else "bfloat16"
        for t in (
            stored(f"{state}{experts}.linear_fc1.weight", kind, lead, (2 * INNER, HIDDEN), (4, 1)),
            stored(f"{state}{experts}.linear_fc2.weight", kind, lead, (HIDDEN, INNER), (1, 4)),
            stored(f"{state}decoder.layers.mlp.router.weight", kind, (layers,), (EXPERTS, HIDDEN), (1, 1)),
            stored(f"{state}decoder.layers.pre_mlp_layernorm.weight", kind, (layers,), (HIDDEN,), (1,)),
            stored(f"{state}decoder.final_layernorm.weight", kind, (), (HIDDEN,), (1,)),
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


def planned(reader: TorchDistReader, **options: object) -> tuple[Conversion, float]:
    """A plan with its tasks, and the CPU seconds it took."""
    stages = 4 if reader.catalog.args["num_layers"] % 4 == 0 else 1
    layout, wanted = Layout(tp=8, pp=stages), ReshardOptions(threads=2, **options)  # type: ignore[arg-type]
    begin = time.process_time()
    plan = plan_reshard(reader, reader.catalog.path.parent.parent / "out", layout, wanted)
    assert len(plan.job.tasks)
    return plan, time.process_time() - begin


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="*", type=int, default=[20_000, 200_000, 1_000_000])
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    print("   RECORDS   CPU TIME")
    for records in options.records:
        layers = math.ceil(records / 24_600)
        layers = layers if layers < 4 else -(-layers // 4) * 4
        seconds = []
        for number in range(options.repeat):
            with tempfile.TemporaryDirectory() as name:
                plan, duration = planned(synthetic(Path(name) / "ckpt", layers, number))
                seconds.append(duration)
        print(f"{plan.job.seals.columns.records:>10,} {statistics.median(seconds):>9.3f}s", flush=True)


if __name__ == "__main__":
    main()
