"""Writes the golden checkpoints of torch's own DCP: FSDP2 and DTensor models on a few gloo ranks, each with its truth.

python tests/oracle/torch_dcp.py OUT        # OUT/NAME, OUT/truth/NAME.safetensors
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

STATES = ("exp_avg", "exp_avg_sq", "step")


def llama(*, tied: bool = False) -> torch.nn.Module:
    """A small transformers Llama with random weights; query groups, so that no two shapes are alike."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config)


def trained(model: torch.nn.Module, mesh: Any) -> torch.optim.Optimizer:
    """The model under FSDP2, every layer a unit, after two real steps of AdamW."""
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    groups = [[p for p in model.parameters() if p.ndim > 1], [p for p in model.parameters() if p.ndim == 1]]
    optimizer = torch.optim.AdamW(
        [{"params": groups[0], "weight_decay": 0.1}, {"params": groups[1], "weight_decay": 0.0}], lr=1e-2
    )
    for step in range(2):
        tokens = torch.randint(0, 40, (2, 12), generator=torch.Generator().manual_seed(step + 10 * dist.get_rank()))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def whole(value: torch.Tensor) -> torch.Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone().contiguous()


def states(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Every tensor of a training state by its name in the catalog."""
    out = {name: whole(value) for name, value in get_model_state_dict(model).items()}
    for name, held in get_optimizer_state_dict(model, optimizer)["state"].items():
        out |= {f"optimizer.state.{state}.{name}": whole(held[state]) for state in STATES}
    return out


def fsdp2(folder: Path) -> dict[str, torch.Tensor]:
    """FSDP2 over two ranks, as the tutorials of torch save it: model and optimizer under a key each."""
    model = llama()
    optimizer = trained(model, init_device_mesh("cpu", (2,)))
    state = {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, optimizer),
        "train": {"step": 2, "loss": [1.5, 1.25], "rng": torch.arange(5, dtype=torch.uint8)},
    }
    dcp.save(state, checkpoint_id=folder)
    return states(model, optimizer) | {"train.rng": torch.arange(5, dtype=torch.uint8)}


def hsdp(folder: Path) -> dict[str, torch.Tensor]:
    """HSDP on a mesh of 2 x 2, bfloat16, tied embeddings, the optimizer flattened, as torchtitan saves it."""
    model = llama(tied=True).bfloat16()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    optimizer = trained(model, mesh)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state = {**get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer, options=options)}
    dcp.save({**state, "train_state": {"step": torch.tensor(2)}}, checkpoint_id=folder)
    return states(model, optimizer) | {"train_state.step": torch.tensor(2)}


def dtensors(folder: Path) -> dict[str, torch.Tensor]:
    """DTensors on one and two mesh axes, divided unevenly, replicated, and twice along one axis."""
    flat, grid = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    made = torch.Generator().manual_seed(3)

    def value(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=made).to(dtype)

    full = {
        "encoder.rows": (value(10, 3), flat, [Shard(0)]),
        "encoder.columns": (value(3, 5, dtype=torch.bfloat16), flat, [Shard(1)]),
        "encoder.fewer": (value(3, 2), flat, [Shard(0)]),
        "encoder.both": (value(7, 6, dtype=torch.float16), grid, [Shard(0), Shard(1)]),
        "encoder.twice": (value(8, 2), grid, [Shard(0), Shard(0)]),
        "encoder.copied": (value(4, 4), grid, [Replicate(), Shard(0)]),
        "encoder.scalar": (value(), flat, [Replicate()]),
    }
    dcp.save({name: distribute_tensor(*how) for name, how in full.items()}, checkpoint_id=folder)
    return {name: tensor for name, (tensor, _, _) in full.items()}


def plain(folder: Path) -> dict[str, torch.Tensor]:
    """No model at all: nested dictionaries and lists, every element type, views, objects; one rank."""
    numbers = torch.arange(24).reshape(4, 6)
    kinds = ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"]
    kinds += ["float8_e4m3fn", "float8_e5m2", "complex64", "uint16", "uint32", "uint64"]
    state = {
        "kinds": {kind: numbers.to(getattr(torch, kind)) for kind in kinds},
        "views": [numbers.float()[1:3], numbers[:, 2].float(), numbers.float()[None]],
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.5),
        "notes": {"text": "done", "when": (2024, 5), "nothing": None},
    }
    dcp.save(state, checkpoint_id=folder)
    out = {f"kinds.{name}": tensor for name, tensor in state["kinds"].items()}
    out |= {f"views.{number}": tensor.contiguous() for number, tensor in enumerate(state["views"])}
    return out | {"empty": state["empty"], "scalar": state["scalar"]}


CASES = {
    "fsdp2_llama_dp2": (fsdp2, 2),
    "hsdp_llama_2x2": (hsdp, 4),
    "dtensor_2d": (dtensors, 4),
    "dcp_plain": (plain, 1),
}


def work(rank: int, name: str, ranks: int, rendezvous: str, out: str) -> None:
    """What one rank does."""
    torch.set_num_threads(1)
    os.chdir(out)  # DCP notes the path that it was given
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    tensors = CASES[name][0](Path(name))
    if not rank:
        Path("truth").mkdir(exist_ok=True)
        save_file(tensors, f"truth/{name}.safetensors")
    dist.destroy_process_group()


def main(out: str) -> None:
    """Writes all of them."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    for name, (_, ranks) in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(work, (name, ranks, f"{folder}/rendezvous", out), nprocs=ranks)


if __name__ == "__main__":
    main(sys.argv[1])
