"""Makes a benchmark-sized torch_dist checkpoint of a Llama, written by the real megatron-core.

    python scripts/make_big.py OUT                                                     # 2.6 GB, TP 4
    python scripts/make_big.py OUT --optimizer                                         # 18 GB
    python scripts/make_big.py OUT --layers 32 --hidden 4096 --ffn 14336 --heads 32    # 16 GB

One process per rank (TP x PP), over gloo, on a CPU; needs the `test` extra. Every tensor is a window of one pool
of random values that the ranks share, so memory stays near the pool's size whatever the size of the checkpoint,
and the bytes are as incompressible as real weights.
"""

import argparse
import faulthandler
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from oracle import cpu  # the few CUDA calls of megatron-core, redirected
from oracle.run import run_ranks

ITERATION = 100
ALIGNMENT = 64
MOMENTS = ("fp32_param", "exp_avg", "exp_avg_sq")


class Pool:
    """Random values, and the same ones rounded to bfloat16: a window's elements are those of the other type's window."""

    def __init__(self, numel, master):
        values = torch.randn(numel, generator=torch.Generator().manual_seed(0)).mul_(0.02)
        self.numel, self.bytes = numel, {torch.bfloat16: values.to(torch.bfloat16).view(torch.uint8).numpy()}
        if master:
            self.bytes[torch.float32] = values.view(torch.uint8).numpy()

    def window(self, shape, dtype, seed):
        """A tensor over part of the pool. Its storage is exactly its size: a larger one is copied on saving."""
        numel, size = int(np.prod(shape)), dtype.itemsize
        start = seed * 7919 * ALIGNMENT % (self.numel - numel + 1) // ALIGNMENT * ALIGNMENT
        return torch.from_numpy(self.bytes[dtype][start * size : (start + numel) * size]).view(dtype).view(shape)


class Model:
    """The shards of one rank."""

    def __init__(self, options, pool, rank):
        self.options, self.pool = options, pool
        self.tp_rank, self.pp_rank = rank % options.tp, rank // options.tp
        self.shards = {}

    def add(self, key, shape, axis=None, layer=None, half=None):
        """Adds this rank's shard of a tensor of one layer, and of its optimizer state.

        Args:
            key: the name on disk.
            shape: of the whole tensor of one layer.
            axis: the axis split over TP; None for a replica on every TP rank.
            layer: position on the leading axis of stacked layers.
            half: 0 or 1 for the gate and the up rows of SwiGLU, which are split over TP each on their own.
        """
        from megatron.core.dist_checkpointing.mapping import ShardedTensor

        options, stacked = self.options, layer is not None
        local, offsets = list(shape), []
        if stacked:
            offsets.append((0, layer, options.layers))
        if axis is not None:
            pieces = options.tp * (1 if half is None else 2)
            local[axis] //= pieces
            offsets.append((axis + stacked, self.tp_rank + (half or 0) * options.tp, pieces))
        kinds = {key: torch.bfloat16}
        if options.optimizer:
            kinds |= {f"optimizer.state.{moment}.{key}": torch.float32 for moment in MOMENTS}
        seed = len(self.shards) + 1000003 * (self.tp_rank + options.tp * self.pp_rank)
        for number, (name, dtype) in enumerate(kinds.items()):
            self.shards[name, layer, half] = ShardedTensor.from_rank_offsets(
                name,
                self.pool.window(local, dtype, seed + max(0, number - 1)),  # the first of fp32 is the master weight
                *offsets,
                replica_id=(0, 0 if axis is not None else self.tp_rank, 0),
                prepend_axis_num=int(stacked),
            )

    def add_extra_state(self, module, layer=None):
        """What TransformerEngine stores for a module without FP8: nothing, but the loader misses it if absent."""
        from megatron.core.dist_checkpointing.mapping import ShardedObject

        where = ((1,), (0,)) if layer is None else ((self.options.layers,), (layer,))
        key, empty = f"{module}._extra_state", torch.empty(0, dtype=torch.uint8)
        self.shards[key, layer] = ShardedObject(key, empty, *where, replica_id=(0, self.tp_rank, 0))

    def fill(self):
        """All tensors of this rank's pipeline stage, in the order of Megatron's state dict."""
        options, head = self.options, self.options.hidden // self.options.heads
        vocab = (options.padded_vocab, options.hidden)
        if self.pp_rank == 0:
            self.add("embedding.word_embeddings.weight", vocab, axis=0)
        stage = options.layers // options.pp
        for layer in range(self.pp_rank * stage, (self.pp_rank + 1) * stage):
            attention, mlp = "decoder.layers.self_attention.", "decoder.layers.mlp."
            qkv = (options.heads + 2 * options.groups) * head
            self.add(attention + "linear_proj.weight", (options.hidden, options.heads * head), axis=1, layer=layer)
            self.add(attention + "linear_qkv.layer_norm_weight", (options.hidden,), layer=layer)
            self.add(attention + "linear_qkv.weight", (qkv, options.hidden), axis=0, layer=layer)
            self.add(mlp + "linear_fc1.layer_norm_weight", (options.hidden,), layer=layer)
            for half in (0, 1):
                shape = (2 * options.ffn, options.hidden)
                self.add(mlp + "linear_fc1.weight", shape, axis=0, layer=layer, half=half)
            self.add(mlp + "linear_fc2.weight", (options.hidden, options.ffn), axis=1, layer=layer)
            for module in (attention + "linear_proj", attention + "linear_qkv", mlp + "linear_fc1", mlp + "linear_fc2"):
                self.add_extra_state(module, layer)
        if self.pp_rank == options.pp - 1:
            self.add("decoder.final_layernorm.weight", (options.hidden,))
            self.add_extra_state("decoder.final_layernorm")
            self.add("output_layer.weight", vocab, axis=0)
        return self.shards


def common_state(options):
    """What Megatron-LM stores beside the tensors: its arguments, the iteration, the optimizer's scalars."""
    from oracle.models import megatron_args

    sizes = {
        "num_layers": options.layers,
        "hidden_size": options.hidden,
        "ffn_hidden_size": options.ffn,
        "num_attention_heads": options.heads,
        "group_query_attention": options.groups != options.heads,
        "num_query_groups": options.groups,
        "kv_channels": options.hidden // options.heads,
        "seq_length": 4096,
        "max_position_embeddings": 4096,
        "vocab_size": options.vocab,
        "make_vocab_size_divisible_by": 128,
        "transformer_impl": "transformer_engine",
    }
    args = megatron_args("llama", "bf16", options.tp, options.pp, iteration=ITERATION, overrides=sizes)
    state = {"args": args, "checkpoint_version": 3.0, "iteration": ITERATION}
    state["num_floating_point_operations_so_far"] = 0
    if options.optimizer:
        group = {"lr": 1e-4, "max_lr": 1e-4, "min_lr": 1e-5, "betas": (0.9, 0.95), "eps": 1e-8}
        group |= {"weight_decay": 0.1, "wd_mult": 1.0, "lr_mult": 1.0, "is_decoupled_lr": False}
        group |= {"is_expert_parallel": False, "bias_correction": True, "default_config": True, "step": ITERATION}
        state["optimizer"] = {"optimizer": {"param_groups": [group, group | {"weight_decay": 0.0, "wd_mult": 0.0}]}}
    return state


def save_rank(options, rank, rendezvous):
    from megatron.core import dist_checkpointing

    faulthandler.dump_traceback_later(options.timeout, exit=True)
    world = options.tp * options.pp
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    state = common_state(options) | Model(options, options.pool, rank).fill()
    folder = options.folder / f"iter_{ITERATION:07d}"
    content = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    dist_checkpointing.save(state, str(folder), ("torch_dist", 1), content_metadata=content)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="must not exist")
    sizes = {"layers": 16, "hidden": 2048, "ffn": 5632, "heads": 16, "groups": 8, "vocab": 128256, "tp": 4, "pp": 1}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--optimizer", action="store_true", help="also the fp32 parameters and both Adam moments")
    parser.add_argument("--timeout", type=int, default=600, help="seconds")
    options = parser.parse_args()
    for name in ("heads", "groups", "ffn", "hidden"):
        if getattr(options, name) % options.tp:
            parser.error(f"--tp {options.tp} does not divide --{name}")
    if options.layers % options.pp:
        parser.error(f"--pp {options.pp} does not divide --layers")
    multiple = 128 * options.tp
    options.padded_vocab = -(-options.vocab // multiple) * multiple
    folder = options.folder = options.folder.absolute()
    (folder / f"iter_{ITERATION:07d}").mkdir(parents=True)

    started = time.monotonic()
    largest = options.hidden * max(options.padded_vocab, 2 * options.ffn) // options.tp
    options.pool = Pool((64 << 20) + largest, options.optimizer)
    cpu.install()
    import megatron.core.dist_checkpointing  # noqa: F401  once, before the ranks are forked

    cpu.after_import()
    run_ranks(save_rank, options, options.tp * options.pp)
    (folder / "latest_checkpointed_iteration.txt").write_text(str(ITERATION))
    files = [file for file in folder.rglob("*") if file.is_file()]
    total = sum(file.stat().st_size for file in files)
    print(f"{folder}: {total / 1e9:.2f} GB in {len(files)} files, {time.monotonic() - started:.1f} s")


if __name__ == "__main__":
    main()
