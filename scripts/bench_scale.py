"""What planning costs at the size of the largest models: DeepSeek-V3, 671 B parameters, with the optimizer's state.

    python scripts/bench_scale.py [--dir TMP] [--layers 61] [--experts 256] [--expert-parallel 64]

Makes a torch_dist checkpoint with the keys, shapes and chunks that Megatron-Core 0.16 saves for such a job (names and common
state are those of checkpoints in tests/golden; sizes are the published ones) whose data files are holes: 9.4 TB that need no
disk. No command below reads elements. Each is a process of its own: seconds, seconds of the processor, peak memory.

    inspect     verify --quick     ls     reshard -n (to tp 2, ep 32)     export-hf -n
"""

from __future__ import annotations

import argparse
import json
import pickle
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench_export import REPOSITORY, environment

GOLDEN = REPOSITORY / "tests" / "golden"
sys.path.insert(0, str(REPOSITORY))

HIDDEN, FFN, EXPERT_FFN, HEADS, VOCAB = 7168, 18432, 2048, 128, 129280
Q_RANK, KV_RANK, QK, ROPE, V = 1536, 512, 128, 64, 128
DENSE_LAYERS = 3
STATES = ("param", "exp_avg", "exp_avg_sq")
HEADER = 1600  # bytes that torch.save puts around the elements of a record, about


def shapes(layers, experts):
    """(name, shape, number of pieces along the first axis) of every weight; experts are cut along two axes."""
    yield "embedding.word_embeddings.weight", (VOCAB, HIDDEN), 1
    yield "output_layer.weight", (VOCAB, HIDDEN), 1
    yield "decoder.final_layernorm.weight", (HIDDEN,), 1
    for layer in range(layers):
        prefix = f"decoder.layers.{layer}"
        attention, mlp = f"{prefix}.self_attention", f"{prefix}.mlp"
        yield f"{prefix}.input_layernorm.weight", (HIDDEN,), 1
        yield f"{attention}.linear_q_down_proj.weight", (Q_RANK, HIDDEN), 1
        yield f"{attention}.linear_q_up_proj.layer_norm_weight", (Q_RANK,), 1
        yield f"{attention}.linear_q_up_proj.weight", (HEADS * (QK + ROPE), Q_RANK), 1
        yield f"{attention}.linear_kv_down_proj.weight", (KV_RANK + ROPE, HIDDEN), 1
        yield f"{attention}.linear_kv_up_proj.layer_norm_weight", (KV_RANK,), 1
        yield f"{attention}.linear_kv_up_proj.weight", (HEADS * (QK + V), KV_RANK), 1
        yield f"{attention}.linear_proj.weight", (HIDDEN, HEADS * V), 1
        if layer < DENSE_LAYERS:
            yield f"{mlp}.linear_fc1.layer_norm_weight", (HIDDEN,), 1
            yield f"{mlp}.linear_fc1.weight", (2 * FFN, HIDDEN), 2
            yield f"{mlp}.linear_fc2.weight", (HIDDEN, FFN), 1
            continue
        yield f"{prefix}.pre_mlp_layernorm.weight", (HIDDEN,), 1
        yield f"{mlp}.router.weight", (experts, HIDDEN), 1
        yield f"{mlp}.router.expert_bias", (experts,), 1
        yield f"{mlp}.shared_experts.linear_fc1.weight", (2 * EXPERT_FFN, HIDDEN), 2
        yield f"{mlp}.shared_experts.linear_fc2.weight", (HIDDEN, EXPERT_FFN), 1
        yield f"{mlp}.experts.experts.linear_fc1.weight", (experts, 2 * EXPERT_FFN, HIDDEN), 2
        yield f"{mlp}.experts.experts.linear_fc2.weight", (experts, HIDDEN, EXPERT_FFN), 1


def pieces(shape, count):
    """(offsets, sizes) of the chunks of a weight."""
    if len(shape) == 3:
        rows = shape[1] // count
        return [((e, half * rows, 0), (1, rows, shape[2])) for e in range(shape[0]) for half in range(count)]
    rows = shape[0] // count
    return [((part * rows, *(0 for _ in shape[1:])), (rows, *shape[1:])) for part in range(count)]


def write(folder, layers, experts, expert_parallel):
    """Writes `.metadata`, `common.pt`, `metadata.json` and the holes; returns bytes and chunks."""
    import torch
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
        TensorProperties,
        TensorStorageMetadata,
    )

    state, storage, ends = {}, {}, {}

    def store(name, offsets, nbytes, rank):
        file = f"__{rank}_{len(storage) % 2}.distcp"
        start = ends.get(file, 0)
        length = nbytes + HEADER
        storage[MetadataIndex("".join([name[:1], name[1:]]), offsets)] = _StorageInfo(file, start, length)
        ends[file] = start + length

    for name, shape, count in shapes(layers, experts):
        cut = pieces(shape, count)
        for kind in (None, *STATES):
            if kind and name.endswith("expert_bias"):
                continue
            dtype = torch.float32 if kind or name.endswith("expert_bias") else torch.bfloat16
            key = f"optimizer.state.{kind}.{name}" if kind else name
            chunks = []
            for number, (offsets, sizes) in enumerate(cut):
                chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
                rank = offsets[0] * expert_parallel // experts if len(shape) == 3 else number % expert_parallel
                store(key, torch.Size(offsets), torch.Size(sizes).numel() * dtype.itemsize, rank)
            state[key] = TensorStorageMetadata(TensorProperties(dtype), torch.Size(shape), chunks)
    for rank in range(expert_parallel):
        key = f"rng_state/shard_0.0.{rank}_1.1.{expert_parallel}"
        state[key] = BytesStorageMetadata()
        store(key, None, 1000, rank)
    folder.mkdir(parents=True)
    with (folder / ".metadata").open("wb") as out:
        pickle.dump(Metadata(state, None, storage, StorageMeta("checkpoint"), "1.0.0"), out, 4)
    for file, size in ends.items():
        with (folder / file).open("wb") as out:
            out.truncate(size)
    (folder / "metadata.json").write_text(
        json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch"})
    )
    (folder / "common.pt").write_bytes(common_state(layers, experts, expert_parallel))
    (folder.parent / "latest_checkpointed_iteration.txt").write_text("10")
    return sum(ends.values()), len(storage)


def common_state(layers, experts, expert_parallel):
    """That of a small DeepSeek-V3 with the sizes of the large one, and the groups of a distributed optimizer."""
    from converters.formats.common_state import Archive
    from converters.pickles.nodes import set_field

    small = next((GOLDEN / "deepseek_v3_weights_pp2ep2").rglob("common.pt"))
    grouped = next((GOLDEN / "hymoe16_full_tp2ep2").rglob("common.pt"))
    archive, other = Archive.read(small), Archive.read(grouped)
    sizes = {
        "num_layers": layers, "encoder_num_layers": layers, "hidden_size": HIDDEN, "num_attention_heads": HEADS,
        "num_query_groups": HEADS, "kv_channels": QK, "ffn_hidden_size": FFN, "moe_ffn_hidden_size": EXPERT_FFN,
        "moe_shared_expert_intermediate_size": EXPERT_FFN, "num_experts": experts, "moe_router_topk": 8,
        "moe_router_num_groups": 8, "moe_router_group_topk": 4, "q_lora_rank": Q_RANK, "kv_lora_rank": KV_RANK,
        "qk_head_dim": QK, "qk_pos_emb_head_dim": ROPE, "v_head_dim": V, "vocab_size": VOCAB, "padded_vocab_size": VOCAB,
        "moe_layer_freq": [int(layer >= DENSE_LAYERS) for layer in range(layers)], "use_distributed_optimizer": True,
        "dist_ckpt_optim_fully_reshardable": True, "pipeline_model_parallel_size": 1, "tensor_model_parallel_size": 1,
        "transformer_pipeline_model_parallel_size": 1, "expert_model_parallel_size": expert_parallel,
        "data_parallel_size": expert_parallel, "world_size": expert_parallel, "no_save_optim": None,
    }  # fmt: skip
    for name, value in sizes.items():
        set_field(archive.tree["args"], name, value)
    for key in ("optimizer", "opt_param_scheduler", "content_metadata"):
        archive.tree[key] = other.tree[key]
    return archive.dump(archive.tree, "common")


def measure(words):
    """Seconds, CPU seconds, peak MiB and exit code of a command."""
    begin = time.monotonic()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryFile("w+") as said:
        child = subprocess.Popen(
            [sys.executable, "-m", "distckpt_cli", *words],
            stdout=said,
            stderr=subprocess.STDOUT,
            env=environment(),
        )
        peak = 0
        while child.poll() is None:
            try:
                lines = Path(f"/proc/{child.pid}/status").read_text().splitlines()
                peak = max(peak, int(next(x for x in lines if x.startswith("VmHWM")).split()[1]) >> 10)
            except (OSError, StopIteration):
                pass
            time.sleep(0.01)
        said.seek(0)
        text = said.read()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.monotonic() - begin, cpu, peak, child.returncode, text


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--expert-parallel", type=int, default=64)
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="scale-", dir=options.dir))
    try:
        nbytes, chunks = write(root / "run" / "iter_0000010", options.layers, options.experts, options.expert_parallel)
        size = (root / "run" / "iter_0000010" / ".metadata").stat().st_size
        print(
            f"{nbytes / 1e12:.1f} TB in {2 * options.expert_parallel} files, {chunks:,} chunks, .metadata {size >> 20} MiB"
        )
        run, out = str(root / "run"), str(root / "out")
        commands = {
            "inspect": ["inspect", run],
            "ls": ["ls", run],
            "verify --quick": ["verify", run, "--quick"],
            "reshard -n": ["reshard", run, out, "--tp", "2", "--ep", str(options.expert_parallel // 2), "-n"],
            "export-hf -n": ["export-hf", run, out, "-n"],
        }
        for title, words in commands.items():
            seconds, cpu, peak, code, text = measure(words)
            print(f"{title:16} exit {code}  {seconds:6.2f} s  {cpu:6.2f} CPU s  {peak:5,} MiB", flush=True)
            if code:
                print(text[-2000:])
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
