"""Legacy checkpoints for tests: real ones changed in one place, and small ones written as older Megatrons wrote them."""

from __future__ import annotations

import argparse
import re
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
from checkpoints import truth
from support import GOLDEN

from converters.formats.common_state import Archive

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
    archive = Archive(path)
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
    from converters.registration import Order

    return sorted(names, key=Order().position)
