"""Megatron-LM's own save and load on a CPU: a server that imports Megatron once and forks the ranks of every job.

It runs in the environment of a Megatron-LM source tree, beside a harness that lets Megatron run without a GPU. The
harness is a module `labcommon` on the import path with these functions:

- `build_argv(cfg, tp, pp, vpp, ep, etp, dtype, impl, dist_opt, extra)`: Megatron's command line for a configuration;
- `setup(argv)`: parses it, starts gloo and the parallel state, and returns `(args, version)`;
- `build(args)`: `(model chunks, optimizer, scheduler)` by `setup_model_and_optimizer`;
- `provider()`: the model provider of the configuration; `randomize`, `save_seed`, `seed_of`, `N_STEPS`: see `seed`;
- `reference_state(model, optimizer, seed, scheduler=)`: the same weights and steps of the optimizer at every layout;
- `snapshot(model, optimizer)`: `kind/name` -> tensor or scalar of everything that a checkpoint must restore.

One JSON object a line goes in, one comes out: `{"error": null or a message, "seconds": s}`.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path

ITERATION = 10
# of a job that has no GPU, and of one that has no data
WITHOUT_GPU = (
    "--micro-batch-size 1 --global-batch-size 8 --train-iters 1 --lr 1e-3 --seq-length 48 --tokenizer-type NullTokenizer "
    "--distributed-backend gloo --use-cpu-initialization --no-gradient-accumulation-fusion --no-rope-fusion "
    "--no-persist-layer-norm --no-masked-softmax-fusion --attention-dropout 0 --hidden-dropout 0 --eval-iters 0 "
    "--no-one-logger --num-workers 0 --ckpt-format torch_dist --dist-ckpt-strictness raise_all"
)


def seed(job: dict) -> None:
    """Random weights and gradients, saved at TP1 PP1; jobs of any layout load their shards of them."""
    import labcommon as lab
    from megatron.core.enums import ModelType
    from megatron.training.training import get_model

    args, _ = lab.setup(command_line(job, "fp32"))
    model = get_model(lab.provider(), ModelType.encoder_or_decoder, wrap_with_ddp=False)
    first = lab.seed_of(job["cfg"])
    parts = [("w", first, "weights"), *(("g", first + 93 + step, f"grad{step}") for step in range(lab.N_STEPS))]
    for kind, number, name in parts:
        lab.randomize(model, number, kind, args.vocab_size)
        shutil.rmtree(Path(job["seed"], name), ignore_errors=True)
        lab.save_seed(model, str(Path(job["seed"], name)))


def save(job: dict) -> None:
    """Trains two steps and saves the state once for each of `job["saves"]`: a folder, a form of the state, a format."""
    import labcommon as lab
    import torch
    from megatron.training import checkpointing

    args, version = lab.setup(command_line(job, "bf16", "--save", "unset", "--ckpt-format", "torch_dist"))
    model, optimizer, scheduler = lab.build(args)
    lab.reference_state(model, optimizer, job["seed"], scheduler=scheduler)
    args.iteration, args.consumed_train_samples = ITERATION, ITERATION * args.global_batch_size
    for target in job["saves"]:
        if torch.distributed.get_rank() == 0:
            shutil.rmtree(target["folder"], ignore_errors=True)
        torch.distributed.barrier()
        args.save, args.ckpt_format = target["folder"], target.get("format", "torch_dist")
        args.use_dist_ckpt = args.ckpt_format != "torch"
        args.dist_ckpt_optim_fully_reshardable = target.get("sharding") == "fully_reshardable"
        with sharding_type(checkpointing, target.get("sharding")):
            keywords = {}
            if "preprocess_common_state_dict_fn" in inspect.signature(checkpointing.save_checkpoint).parameters:
                from megatron.training.training import preprocess_common_state_dict

                keywords["preprocess_common_state_dict_fn"] = preprocess_common_state_dict
            checkpointing.save_checkpoint(
                ITERATION, model, optimizer, scheduler, 123456789, checkpointing_context={}, **keywords
            )
        if "facts" in target and torch.distributed.get_rank() == 0:
            write_facts(job, target, version)


def write_facts(job: dict, target: dict, version: str) -> None:
    """The versions, the layout and every argument, beside the checkpoint."""
    import torch

    layout = {"tp": 1, "pp": 1, "vpp": None, "ep": 1} | job.get("layout", {})
    facts = {"megatron_core": version, "torch": torch.__version__, "config": job["cfg"]}
    facts |= {"format": target.get("format", "torch_dist"), **layout, "world_size": job["ranks"]}
    facts |= target["facts"] | {"iteration": ITERATION, "megatron_args": command_line(job, "bf16")}
    Path(target["folder"], "facts.json").write_text(json.dumps(facts, indent=1) + "\n")


def load(job: dict) -> None:
    """Loads `job["folder"]` into a model initialised from another seed, and writes each rank's state."""
    import labcommon as lab
    from megatron.training import checkpointing

    options = ["--load", job["folder"], "--ckpt-format", job.get("format", "torch_dist"), "--no-load-rng"]
    options += ["--dist-ckpt-strictness", "assume_ok_unexpected", "--seed", str(random.SystemRandom().randrange(9999))]
    args, _ = lab.setup(command_line(job, "bf16", *options))
    model, optimizer, scheduler = lab.build(args)
    args.iteration = args.consumed_train_samples = 0
    args.load = job["folder"]
    iteration = checkpointing.load_checkpoint(model, optimizer, scheduler, checkpointing_context={})[0]
    if iteration != ITERATION:
        raise RuntimeError(f"the loader says iteration {iteration}")
    write_state(job, model, optimizer, scheduler)


def forward(job: dict) -> None:
    """Writes the logits of the model that Megatron builds of `job["flags"]`, with the weights of `job["folder"]`.

    `job["tokens"]` is a file of safetensors with `tokens`; in `job["logits"]` are `logits`, and `prediction_N` of each layer
    of multi-token prediction. In `job["extra_states"]` are the keys of those that the model asks for, a line each.
    """
    import kernels
    import labcommon as lab
    import torch
    from megatron.core.dist_checkpointing import serialization
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.training import arguments, checkpointing
    from safetensors.torch import load_file, save_file

    kernels.install()
    words = [*job["flags"], *WITHOUT_GPU.split(), "--load", job["folder"]]
    words += ["--deterministic-mode"] if "--experimental-attention-variant" in words else []  # Megatron's own, in torch
    os.environ |= {"NCCL_ALGO": "Ring", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
    sys.argv = ["pretrain.py", *words]
    arguments.parse_args()  # every word is one of Megatron's own: the harness lets others pass
    args, _ = lab.setup(words)
    model = built_from(args)
    check = serialization.validate_integrity_and_strict_load

    def noted(state: dict, *rest: object, **more: object) -> object:
        asked = {item.unique_key for item in nested_values(state) if item.key.endswith("._extra_state")}
        Path(job["extra_states"]).write_text("\n".join(sorted(asked)))
        return check(state, *rest, **more)

    serialization.validate_integrity_and_strict_load = noted
    args.iteration = args.consumed_train_samples = 0
    checkpointing.load_checkpoint(model, None, None, checkpointing_context={})
    gpt, heads = lab.unwrap(model[0]).eval(), []
    tokens = load_file(job["tokens"])["tokens"]
    out = {}
    if getattr(gpt, "mtp_process", False):
        gpt.mtp.register_forward_hook(lambda _module, _inputs, output: heads.append(output))
        length = tokens.shape[1]
        positions = torch.arange(length)[None].expand(tokens.shape)
        with torch.no_grad():
            gpt(tokens, positions, torch.ones(1, 1, length, length).triu(1).bool(), labels=tokens)
            weight = gpt.shared_embedding_or_output_weight() if gpt.share_embeddings_and_output_weights else None
            for number, hidden in enumerate(heads[0].chunk(1 + args.mtp_num_layers)[1:]):
                out[f"prediction_{number}"] = gpt.output_layer(hidden, weight=weight)[0].transpose(0, 1).contiguous()
    out["logits"] = (
        logits_of_ranks(gpt, tokens) if job["ranks"] > 1 else lab.forward_logits(model, tokens)
    ).contiguous()
    if torch.distributed.get_rank() == job["ranks"] - 1:
        save_file(out, job["logits"])


def logits_of_ranks(gpt: object, tokens: object) -> object:
    """All logits on the ranks of the last pipeline stage; hidden states elsewhere."""
    import torch
    from megatron.core import parallel_state, tensor_parallel

    rank, length = torch.distributed.get_rank(), tokens.shape[1]
    hidden = torch.empty(length, tokens.shape[0], gpt.config.hidden_size)
    step = parallel_state.get_tensor_model_parallel_world_size()
    if not parallel_state.is_pipeline_first_stage():
        torch.distributed.recv(hidden, rank - step)
        gpt.set_input_tensor(hidden)
    positions = torch.arange(length)[None].expand(tokens.shape)
    with torch.no_grad():
        out = gpt(tokens, positions, torch.ones(1, 1, length, length).triu(1).bool()).float()
    if not parallel_state.is_pipeline_last_stage():
        torch.distributed.send(out.contiguous(), rank + step)
        return out
    return tensor_parallel.gather_from_tensor_model_parallel_region(out)


def built_from(args: object) -> list:
    """The model as `pretrain_gpt.py`, or `pretrain_mamba.py` and `pretrain_hybrid.py`, of this version build it."""
    from functools import partial

    from megatron.core.enums import ModelType
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training import argument_utils, training
    from model_provider import model_provider

    hybrid = bool(getattr(args, "hybrid_layer_pattern", None) or getattr(args, "hybrid_override_pattern", None))
    if hasattr(argument_utils, "gpt_config_from_args"):  # since 0.18
        config = getattr(argument_utils, f"{'hybrid' if hybrid else 'gpt'}_config_from_args")(args)
        groups = ProcessGroupCollection.use_mpu_process_groups()
        return config.get_builder_cls()(config).build_distributed_models(groups, wrap_with_ddp=False)
    if hybrid:
        from mamba_builders import mamba_builder as builder
    else:
        from gpt_builders import gpt_builder as builder
    return training.get_model(partial(model_provider, builder), ModelType.encoder_or_decoder, wrap_with_ddp=False)


def recompute(job: dict) -> None:
    """Makes the state at this layout by training, and writes each rank's part."""
    import labcommon as lab

    args, _ = lab.setup(command_line(job, "bf16"))
    model, optimizer, scheduler = lab.build(args)
    lab.reference_state(model, optimizer, job["seed"], scheduler=scheduler)
    write_state(job, model, optimizer, scheduler)


def write_state(job: dict, model: object, optimizer: object, scheduler: object) -> None:
    import labcommon as lab
    import torch

    state = lab.snapshot(model, optimizer)
    for key, value in scheduler.state_dict().items():
        state[f"scheduler/{key}"] = value
    Path(job["state"]).mkdir(parents=True, exist_ok=True)
    torch.save(state, Path(job["state"], f"{torch.distributed.get_rank()}.pt"))


def command_line(job: dict, dtype: str, *options: str) -> list[str]:
    import labcommon as lab

    at = job.get("layout", {})
    layout = (at.get("tp", 1), at.get("pp", 1), None, at.get("ep", 1), None)
    extra = [*job["flags"], *options]
    return lab.build_argv(job["cfg"], *layout, dtype, "transformer_engine", job.get("dist_opt", False), extra)


@contextlib.contextmanager
def sharding_type(checkpointing: object, name: str | None):
    """The form of a distributed optimizer's state, which no flag of some versions can ask for."""
    build = getattr(checkpointing, "_build_sharded_state_dict_metadata", None)
    if name is None or build is None:
        yield
        return

    def named(*args: object, **keywords: object) -> dict:
        return {**build(*args, **keywords), "distrib_optim_sharding_type": name}

    checkpointing._build_sharded_state_dict_metadata = named
    try:
        yield
    finally:
        checkpointing._build_sharded_state_dict_metadata = build


JOBS = {job.__name__: job for job in (seed, save, load, recompute, forward)}


def fork_rank(job: dict, rank: int, port: int) -> int:
    """The process id of a rank at work; it leaves an `error.RANK` file beside the log if it fails."""
    child = os.fork()
    if child:
        return child
    os.setpgrp()
    folder = Path(job["log"])
    log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(job["ranks"])}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": str(job["ranks"])}
    code = 0
    try:
        JOBS[job["job"]](job)
        import torch

        torch.distributed.barrier()
    except BaseException as error:
        traceback.print_exc()
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
        (folder / f"error.{rank}").write_text(f"{type(error).__name__}: {lines[0] if len(lines) < 4 else lines[-1]}")
        code = 1
    sys.stdout.flush()
    os._exit(code)


def run(job: dict) -> dict:
    """Forks the ranks and waits; when one has failed, the others have five seconds."""
    folder = Path(job["log"])
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    begin, port = time.monotonic(), random.SystemRandom().randrange(20000, 30000)
    alive = {fork_rank(job, rank, port) for rank in range(job["ranks"])}
    deadline = begin + job.get("timeout", 300)
    timed_out = False
    while alive:
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended:
            alive.discard(ended)
            with contextlib.suppress(ProcessLookupError):  # writers that Megatron started and left
                os.killpg(ended, signal.SIGKILL)
            if status:
                deadline = min(deadline, time.monotonic() + 5)
        elif time.monotonic() > deadline:
            timed_out = not list(folder.glob("error.*"))
            for child in alive:
                os.killpg(child, signal.SIGKILL)
            deadline = float("inf")
        else:
            time.sleep(0.05)
    errors = [path.read_text() for path in sorted(folder.glob("error.*"))]
    own = [e for e in errors if "Connection closed by peer" not in e and "gloo" not in e.lower()] or errors
    error = own[0] if own else "no answer in time" if timed_out else None
    return {"error": error, "seconds": round(time.monotonic() - begin, 1)}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import labcommon  # noqa: F401  first: it makes Megatron importable without a GPU
    import megatron.training.checkpointing
    import megatron.training.training  # noqa: F401

    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
