"""Legacy checkpoints for tests: real ones changed in one place, and small ones written as older Megatrons wrote them."""

from __future__ import annotations

import argparse
import itertools
import re
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from converters.errors import FormatError
from converters.formats import open_checkpoint
from converters.formats.common_state import Archive
from converters.optimizer.state import optimizer_state
from harness.checkpoints import truth
from harness.support import GOLDEN, read_tensor

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MODEL, FLAT = "model_optim_rng.pt", "distrib_optim.pt"

# golden -> (name of its truth, Hugging Face architecture, a torch_dist golden of the same config)
LEGACY = {
    "legacy_llama_adam_tp2pp2": ("llama", "llama", "llama_adam_tp2pp2"),
    "legacy_llama_distopt_tp2pp2dp2": ("llama", "llama", "llama_adam_tp2pp2"),
    "v012_legacy_llama_distopt_tp2pp2dp2": ("llama", "llama", "llama_adam_tp2pp2"),
    "legacy_llama4_vpp2_tp2pp2": ("llama4", "llama", "llama4_dpreshardable_pp4dp2"),
    "legacy_mixtral_distopt_ep2pp2": ("mixtral", "mixtral", "mixtral_adam_ep2tp2"),
    "legacy_gpt_adam_tp2pp2": ("gpt", "gpt2", "gpt_adam_tp2pp2"),
}


def copy_legacy(name: str, into: Path) -> Path:
    """A writable copy of a golden's iteration folder."""
    shutil.copytree(GOLDEN / name / "iter_0000010", into / "iter_0000010")
    return into / "iter_0000010"


def edit(path: Path, change: Callable[[dict[Any, Any]], None]) -> None:
    """Rewrites a file after `change(tree)`; its other members stay."""
    archive = Archive.read(path)
    change(archive.tree)
    path.write_bytes(archive.dump(archive.tree, "archive"))


def bf16(bits: np.ndarray) -> Any:
    """A torch tensor of bfloat16 from its bits."""
    import torch

    return torch.from_numpy(bits.astype(np.uint16).view(np.int16).copy()).view(torch.bfloat16)


def fp32(bits: np.ndarray) -> Any:
    """A torch tensor of float32 from its bits."""
    import torch

    return torch.from_numpy(bits.astype(np.uint32).view(np.float32).copy())


def arguments(config: str, **changes: Any) -> argparse.Namespace:
    """The training arguments of a small model, as far as a reader needs them."""
    values = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_query_groups": 2 if config != "gpt" else 4,
        "group_query_attention": config != "gpt",
        "kv_channels": 8,
        "ffn_hidden_size": 48 if config != "gpt" else 64,
        "swiglu": config != "gpt",
        "untie_embeddings_and_output_weights": config != "gpt",
        "normalization": "RMSNorm" if config != "gpt" else "LayerNorm",
        "num_experts": 4 if config == "mixtral" else None,
        "moe_ffn_hidden_size": 24 if config == "mixtral" else None,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "world_size": 1,
        "bf16": True,
    }
    return argparse.Namespace(**(values | changes))


def shard(name: str, value: np.ndarray, tp: int, rank: int) -> np.ndarray:
    """The part of a gated model's tensor that a tensor-parallel rank has."""
    if re.search(r"linear_fc1\.(weight|bias)$", name):
        gate, up = np.split(value, 2)
        return np.concatenate([np.split(gate, tp)[rank], np.split(up, tp)[rank]])
    if re.search(r"(linear_qkv|output_layer|word_embeddings)\.(weight|bias)$", name):
        return np.split(value, tp)[rank]
    if re.search(r"(linear_proj|linear_fc2)\.weight$", name):
        return np.split(value, tp, axis=1)[rank]
    return value


def save(folder: Path, rank: str, args: argparse.Namespace, model: dict[str, Any], **rest: Any) -> None:
    """Writes the file of one rank."""
    import torch

    (folder / rank).mkdir(parents=True, exist_ok=True)
    state = {"args": args, "checkpoint_version": 3.0, "iteration": 10, "model": model, **rest}
    torch.save({key: value for key, value in state.items() if value is not None}, folder / rank / MODEL)


def weights(config: str) -> dict[str, np.ndarray]:
    """Bits of every weight by name, rotary caches left out."""
    found = {k.removeprefix("model/"): v for k, v in truth(config).items() if k.startswith("model/")}
    return {name: value for name, value in found.items() if "rotary" not in name}


def in_order(names: list[str]) -> list[str]:
    """Names as Megatron-Core registers them, with the local layer spec or TransformerEngine's."""
    from converters.param_order import Order

    return sorted(names, key=Order().position)


def held(folder):
    """Every tensor of a checkpoint as `model/NAME` or `STATE/NAME`."""
    reader = open_checkpoint(folder)
    tensors = dict(reader.catalog.weights) | optimizer_state(reader).tensors
    out = {}
    for info in tensors.values():
        state, name = "model", info.name
        if name.startswith("optimizer.state."):
            state, _, name = name.removeprefix("optimizer.state.").partition(".")
        out[f"{state}/{name}"] = read_tensor(reader, info)
    return out


def refused(folder, kind=FormatError):
    with pytest.raises(kind) as error:
        open_checkpoint(folder)
    return error.value


def local_experts(style, layer, mine, first):
    """Parameters of a rank's experts of one layer, in one of the ways in which Megatron has kept them."""
    each = len(mine)
    out = {}
    prefix = f"decoder.layers.{layer}.mlp.experts."
    if style == "sequential":
        for i, projection in itertools.product(range(each), (1, 2)):
            out[f"{prefix}local_experts.{i}.linear_fc{projection}.weight"] = mine[i][projection - 1]
    elif style == "grouped":
        for projection, i in itertools.product((1, 2), range(each)):
            out[f"{prefix}linear_fc{projection}.weight{i}"] = mine[i][projection - 1]
    elif style == "one tensor":
        for projection in (1, 2):
            out[f"{prefix}linear_fc{projection}.weight"] = np.stack([pair[projection - 1] for pair in mine])
    else:  # GroupedMLP: x @ weight1, the experts' matrices transposed, `view(experts, hidden, -1)`
        hidden = mine[0][0].shape[1]
        out[f"{prefix}weight1"] = np.stack([pair[0].T for pair in mine]).reshape(hidden, -1)
        out[f"{prefix}weight2"] = np.stack([pair[1].T for pair in mine]).reshape(-1, hidden)
    return out


def write_experts(folder, style, tp=1, ep=1, **changes):
    """A mixture of experts at tp, ep; one pipeline stage."""
    known = weights("mixtral")
    args = arguments(
        "mixtral", tensor_model_parallel_size=tp, expert_model_parallel_size=ep, world_size=tp * ep, **changes
    )
    dense = in_order([name for name in known if ".experts." not in name])
    for t, e in itertools.product(range(tp), range(ep)):
        model = {}
        for name in dense:
            model[name] = bf16(shard(name, known[name], tp, t))
            if name.endswith("mlp.router.weight"):
                layer = name.split(".")[2]
                numbers = range(e * 4 // ep, (e + 1) * 4 // ep)
                mine = [
                    [
                        shard(n, known[n], tp, t)
                        for p in (1, 2)
                        for n in [f"decoder.layers.{layer}.mlp.experts.{i}.linear_fc{p}.weight"]
                    ]
                    for i in numbers
                ]
                made = local_experts(style, layer, mine, numbers[0])
                model |= {key: bf16(value) for key, value in made.items()}
        save(folder, f"mp_rank_{t:02d}" + (f"_{e:03d}" if ep > 1 else ""), args, model)
