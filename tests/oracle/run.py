"""Writes or loads a checkpoint with the real megatron-core. Run from `tests/`:

    python -m oracle.run write DIR --config llama --tp 2 --pp 2 [--logits FILE] [--expected FILE]
    python -m oracle.run load  DIR --config llama --tp 4 --expected FILE

`write` makes DIR/iter_0000010 and the tracker file as Megatron-LM would (weights only). `load` accepts the
checkpoint folder or one iteration of it, loads it with `dist_checkpointing.load` at the given layout and compares
every shard bit for bit; it prints one JSON object and exits 1 when something differs. With --optimizer it builds the
distributed optimizer and compares master weights and moments too.
"""

import argparse
import ast
import faulthandler
import json
import multiprocessing
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from oracle import cpu

TRACKER = "latest_checkpointed_iteration.txt"


def start_parallel(options, rank, rendezvous, tp, pp, ep):
    from megatron.core import mpu

    faulthandler.dump_traceback_later(options.timeout, exit=True)
    world = tp * pp * (options.dp or ep)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world, timeout=timedelta(seconds=300)
    )
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
        create_gloo_process_groups=True,
    )


def write_rank(options, rank, rendezvous):
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    from oracle import models

    # Megatron's own is made by a new interpreter, which imports torch and Megatron once more for each rank.
    filesystem_async._results_queue = multiprocessing.get_context("fork").Manager().Queue()
    start_parallel(options, rank, rendezvous, options.tp, options.pp, options.ep)
    args = model_args(options)
    model = models.build_model(args)
    shapes_here = models.fill(model, args, models.DTYPES[options.dtype], options.per_layer)
    folder = options.folder / f"iter_{options.iteration:07d}"
    if rank == 0:
        folder.mkdir(parents=True)
    dist.barrier()
    state = {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": options.iteration,
        "num_floating_point_operations_so_far": 0,
        "model": models.sharded_state(model, options.per_layer),
    }
    content = {"singleton_local_shards": False}
    dist_checkpointing.save(state, str(folder), ("torch_dist", 1), content_metadata=content)
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, shapes_here)
    if rank == 0:
        (options.folder / TRACKER).write_text(str(options.iteration))
        if options.expected:
            shapes = {name: shape for part in gathered for name, shape in part.items()}
            dtype = models.DTYPES[options.dtype]
            save_file({name: models.made_value(name, shapes[name], dtype) for name in shapes}, options.expected)


def logits_rank(options, rank, rendezvous):
    from oracle import models

    start_parallel(options, rank, rendezvous, 1, 1, 1)
    args = model_args(options, dtype="fp32", tp=1, pp=1, ep=1)
    model = models.build_model(args)
    models.fill(model, args, models.DTYPES[options.dtype], options.per_layer)
    save_logits(model, args, options.logits)


def save_logits(model, args, path):
    from oracle import models

    tokens = torch.randint(0, args.vocab_size, (2, 24), generator=torch.Generator().manual_seed(5))
    found = models.logits(model, tokens)[..., : args.vocab_size]
    save_file({"tokens": tokens, "logits": found.contiguous()}, path)


def load_rank(options, rank, rendezvous):
    from megatron.core import dist_checkpointing

    from oracle import models

    start_parallel(options, rank, rendezvous, options.tp, options.pp, options.ep)
    folder = options.folder
    if (folder / TRACKER).exists():
        folder = folder / f"iter_{int((folder / TRACKER).read_text()):07d}"
    legacy = any(folder.glob("mp_rank_*"))
    keys = () if legacy else torch.distributed.checkpoint.FileSystemReader(folder).read_metadata().state_dict_metadata
    per_layer = any(key.startswith(f"{models.LAYERS}0.") for key in keys)
    args = model_args(options)
    model = models.build_model(args)
    # What is not loaded must not look as if it were.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    answer = {}
    if options.optimizer:
        from oracle import optim

        cpu.redirect_devices()
        whole = any(key.startswith("optimizer.state.fp32_param.") for key in keys)
        flat = any(folder.glob("*/distrib_optim.pt")) if legacy else not whole
        optimizer = optim.build_optimizer(model, distributed=flat)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float("nan"))
        rest = (folder, model, optimizer)
        loaded = optim.load_legacy(*rest) if legacy else optim.load(*rest, per_layer)
        truth = {kind: read_expected(options.expected, kind) for kind in optim.STATES}
        answer["optimizer"] = optim.compare(args, model, optimizer, truth, per_layer)
    elif legacy:
        from oracle import optim

        loaded = optim.load_legacy(folder, model, None)
    else:
        loaded = dist_checkpointing.load({"model": models.sharded_state(model, per_layer)}, str(folder))
        model.load_state_dict(loaded["model"], strict=True)
    if options.logits:
        cpu.redirect_devices()  # the mask of a sliding window is made on the GPU
        exact = model_args(options, dtype="fp32", tp=1, pp=1, ep=1)
        twin = models.build_model(exact)
        twin.load_state_dict({name: value.float() for name, value in model.state_dict().items() if value is not None})
        save_logits(twin, exact, options.logits)

    expected = read_expected(options.expected)
    seen, wrong = set(), {}
    for shard in models.shards(models.sharded_state(model, per_layer)):
        stacked = models.names(shard)
        seen |= set(stacked)
        absent = [name for name in stacked if name not in expected]
        if absent:
            wrong[shard.key] = f"not among the expected: {absent[0]}"
            continue
        values = [expected[name] for name in stacked]
        full = values[0] if stacked == [shard.key] else torch.stack(values)
        wanted = models.local_part(shard, full)
        if shard.data.dtype != wanted.dtype:
            wrong[shard.key] = f"{shard.data.dtype} instead of {wanted.dtype}"
        elif not torch.equal(shard.data, wanted):
            worst = (shard.data.float() - wanted.float()).abs().max().item()
            wrong[shard.key] = f"rank {rank}: values differ by up to {worst:.3g}"
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (seen, wrong, answer))
    if rank == 0:
        ranks = [part[2]["optimizer"] for part in gathered if "optimizer" in part[2]]
        seen = set().union(*(part[0] for part in gathered))
        wrong = {key: why for part in gathered for key, why in part[1].items()}
        never = sorted(set(expected) - seen)
        args = loaded.get("args")
        answer = {
            "ok": not wrong and not never and not any(part["wrong"][kind] for part in ranks for kind in part["wrong"]),
            "optimizer": ranks,
            "tensors": len(seen),
            "wrong": wrong,
            "never_loaded": never,
            "iteration": loaded.get("iteration"),
            "args": {k: repr(v) for k, v in sorted(vars(args).items())} if args is not None else None,
        }
        options.answer.write_text(json.dumps(answer))


def read_expected(path, kind="model"):
    """{name as on disk, one per layer: value}, from our own file or from a golden truth (`model/0/NAME`)."""
    found = load_file(path)
    if any(key.startswith(f"{kind}/0/") for key in found):
        found = {key.removeprefix(f"{kind}/0/"): t for key, t in found.items() if key.startswith(f"{kind}/0/")}
    experts = {}
    for name in [name for name in found if ".mlp.experts.linear_fc" in name]:
        stem, number = name.rsplit("weight", 1)
        on_disk = stem.replace("mlp.experts.", "mlp.experts.experts.") + "weight"
        experts.setdefault(on_disk, {})[int(number)] = found.pop(name)
    return found | {name: torch.stack([parts[i] for i in sorted(parts)]) for name, parts in experts.items()}


def model_args(options, **changes):
    from oracle import models

    values = {"dtype": options.dtype, "tp": options.tp, "pp": options.pp, "ep": options.ep} | changes
    overrides = {key: ast.literal_eval(value) for key, value in (item.split("=", 1) for item in options.set)}
    return models.megatron_args(options.config, **values, iteration=options.iteration, overrides=overrides)


def run_rank(function, options, rank, rendezvous):
    function(options, rank, rendezvous)
    dist.barrier()
    dist.destroy_process_group()


def run_ranks(function, options, world):
    """Forks one process per rank (megatron is imported once); the first that fails ends the others."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        rest = (function, options)
        ranks = [context.Process(target=run_rank, args=(*rest, rank, f"{folder}/store")) for rank in range(world)]
        for process in ranks:
            process.start()
        try:
            while any(process.exitcode is None for process in ranks):
                if any(process.exitcode for process in ranks):
                    sys.exit(f"a rank failed: exit codes {[process.exitcode for process in ranks]}")
                time.sleep(0.02)
        finally:
            for process in ranks:
                process.kill()
                process.join()
        if any(process.exitcode for process in ranks):
            sys.exit(f"a rank failed: exit codes {[process.exitcode for process in ranks]}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["write", "load"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--config", default="llama")
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "fp16", "fp32"])
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument("--dp", type=int, help="data-parallel size; by default that of --ep")
    parser.add_argument("--optimizer", action="store_true", help="load: also the distributed optimizer")
    parser.add_argument("--iteration", type=int, default=10)
    parser.add_argument("--per-layer", action="store_true", help="one key per layer instead of stacked layers")
    parser.add_argument(
        "--set", action="append", default=[], metavar="ARGUMENT=VALUE", help="any of the model's arguments"
    )
    parser.add_argument("--expected", type=Path, help="safetensors of every tensor, whole, by its per-layer name")
    parser.add_argument("--logits", type=Path, help="also the fp32 logits of the model at TP1 PP1")
    parser.add_argument("--timeout", type=int, default=600, help="seconds")
    options = parser.parse_args()
    options.folder = options.folder.absolute()

    cpu.install()
    import megatron.core  # noqa: F401

    from oracle import models  # noqa: F401

    cpu.after_import()
    world = options.tp * options.pp * (options.dp or options.ep)
    if options.action == "write":
        run_ranks(write_rank, options, world)
        if options.logits:
            run_ranks(logits_rank, options, 1)
        return
    with tempfile.TemporaryDirectory() as folder:
        options.answer = Path(folder) / "answer.json"
        run_ranks(load_rank, options, world)
        answer = options.answer.read_text()
    print(answer)
    sys.exit(0 if json.loads(answer)["ok"] else 1)


if __name__ == "__main__":
    main()
