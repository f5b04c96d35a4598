"""Checkpoints for tests: golden ones by name, damaged copies of them, and large ones written record by record."""

from __future__ import annotations

import argparse
import hashlib
import io
import itertools
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from converters.formats import open_checkpoint
from converters.pickles.emit import dumps
from converters.pickles.machine import parse
from converters.pickles.nodes import fields, set_field
from harness.cli_support import here
from harness.support import GOLDEN, load_safetensors

if TYPE_CHECKING:
    import numpy as np

REPOSITORY = Path(__file__).parents[2]
SCALE = int(os.environ.get("DISTCKPT_TEST_SCALE", "1"))
"""How many times as wide the large checkpoints of some tests are; 8 makes hundreds of MB, for scripts/gpu_check."""

# golden checkpoint of distributed checkpointing -> (name of its truth, Hugging Face architecture)
GOLDENS = {
    "llama_adam_tp2pp2": ("llama", "llama"),
    "llama_dpreshardable_tp2pp2dp2": ("llama", "llama"),
    "llama_dpreshardable_buckets_tp2dp2": ("llama", "llama"),
    "llama_dpzero_tp2pp2dp2": ("llama", "llama"),
    "llama_fullyreshardable_tp2pp2dp2": ("llama", "llama"),
    "llama_localspec_weights_tp2pp2": ("llama", "llama"),
    "llama_singleton_weights_tp2pp2": ("llama", "llama"),
    "v009_llama_bucketspace_tp2pp2dp2": ("llama", "llama"),
    "v009_llama_modelspace_tp2pp2dp2": ("llama", "llama"),
    "v014_llama_modelspace_tp2pp2dp2": ("llama", "llama"),
    "v019_llama_fullyreshardable_tp2dp2": ("llama", "llama"),
    "llama4_dpreshardable_pp4dp2": ("llama4", "llama"),
    "bridge_llama4_weights_tp2pp2": ("llama4", "llama"),
    "nemo2_llama4_weights_tp2pp2": ("llama4", "llama"),
    "llama31_weights_tp2pp2": ("llama31", "llama"),
    "llama_ln1p_weights_tp2pp2": ("llama_ln1p", "llama"),
    "mistral_weights_tp2pp2": ("mistral", "mistral"),
    "qwen2_weights_tp2pp2": ("qwen2", "qwen2"),
    "qwen3_adam_tp2": ("qwen3", "qwen3"),
    "v014_qwen3_modelspace_tp2dp2": ("qwen3", "qwen3"),
    "qwen3_hd16_weights_tp2pp2": ("qwen3_hd16", "qwen3"),
    "mixtral_adam_ep2tp2": ("mixtral", "mixtral"),
    "mixtral_dpreshardable_ep2pp2": ("mixtral", "mixtral"),
    "v012_mixtral_modelspace_ep2tp2": ("mixtral", "mixtral"),
    "qwen2_moe_weights_pp2ep2": ("qwen2_moe", "qwen2_moe"),
    "qwen3_moe_weights_tp2ep2": ("qwen3_moe", "qwen3_moe"),
    "deepseek_mtp_adam_ep2pp2": ("deepseek_mtp", "deepseek_v3"),
    "deepseek_v2_weights_pp2ep2": ("deepseek_v2", "deepseek_v2"),
    "deepseek_v3_weights_pp2ep2": ("deepseek_v3", "deepseek_v3"),
    "gpt_adam_tp2pp2": ("gpt", "gpt2"),
    "gpt_untied_weights_tp2pp2": ("gpt_untied", "gpt2"),
    "gpt_tanh_weights_tp2": ("gpt_tanh", "gpt2"),
    "moe_shared_weights_ep2pp2": ("moe_shared", "granitemoeshared"),
    "gptneox_weights_tp2": ("gptneox", "gpt_neox"),
    "starcoder2_weights_tp2pp2": ("starcoder2", "starcoder2"),
    "nemotron_weights_tp2": ("nemotron", "nemotron"),
    "v009_zarr_llama_adam_tp2pp2": ("llama", "llama"),
    "v009_zarr_llama_distopt_tp2pp2dp2": ("llama", "llama"),
    "nemo1_zarr_llama4_weights_tp2pp2": ("llama4", "llama"),
    "pao14_fsm_dp2": ("pao", "llama"),
    "pao16_dpr_tp2dp2": ("pao", "llama"),
    "pao16_full_tp2dp2": ("pao", "llama"),
    "paoM_dpr_dp2": ("pao", "llama"),
    "dropM_dpr_tp2dp2": ("drop", "llama"),
    "lionM_dpr_tp2dp2": ("lion", "llama"),
}


def golden(name: str) -> Path:
    """The data folder of a golden checkpoint."""
    return next((GOLDEN / name).glob("**/metadata.json")).parent


def truth(config: str) -> dict[str, np.ndarray]:
    """Ground truth by `kind/NAME`, experts spelt as the catalog spells them; elements as unsigned integers."""
    out = {}
    for key, value in load_safetensors(GOLDEN / "truth" / f"{config}-bf16.safetensors").items():
        kind, _, name = key.split("/", 2)
        out[f"{kind}/" + re.sub(r"experts\.(linear_fc\d)\.weight(\d+)$", r"experts.\2.\1.weight", name)] = value
    return out


def copy_golden(name: str, into: Path) -> Path:
    """A writable copy of a golden checkpoint's data folder."""
    shutil.copytree(golden(name), into)
    return into


def edit_metadata(folder: Path, change) -> None:
    """Rewrites `.metadata` after `change(state)`, where `state` holds the attributes of the Metadata object."""
    raw = (folder / ".metadata").read_bytes()
    root = parse(raw)
    state = fields(root)
    change(state)
    for name, value in state.items():
        set_field(root, name, value)
    (folder / ".metadata").write_bytes(dumps(root, raw[1]))


def payloads(folder: Path, kind: str | None = None) -> list[tuple[str, Path, int, int]]:
    """`(tensor, file, first byte, bytes)` of every stored chunk."""
    reader = open_checkpoint(folder)
    out = []
    for info in reader.catalog.tensors.values():
        if kind is not None and info.kind != kind:
            continue
        for chunk in info.chunks():
            path = reader.files[reader.file_of(chunk.record)]
            raw = path.read_bytes()
            where = reader.locate(chunk.record, lambda at, n, raw=raw: raw[at : at + n])
            size = chunk.box.volume * info.dtype.itemsize
            out.append((info.name, path, where.offset + chunk.base * info.dtype.itemsize, size))
    return out


def flip(path: Path, offset: int, mask: int = 0x10) -> None:
    """Damages one byte and leaves the file's times as they were, as failing media do."""
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ mask]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def tree(folder: Path) -> dict[str, str]:
    """Digest of every file under a folder, by relative name."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def run_cli(*args: str | Path, **options) -> subprocess.CompletedProcess[str]:
    """Runs `distckpt`: in this process, unless options say what another one is to have."""
    if not options:
        done = here(*args)
        return subprocess.CompletedProcess(args, done.code, done.out, done.err)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), **options.pop("env", {})}
    command = [sys.executable, "-m", "distckpt_cli", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False, **options)


# ---------------------------------------------------------------------- large ones


LLAMA = {
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "group_query_attention": True,
    "max_position_embeddings": 512,
    "normalization": "RMSNorm",
    "norm_epsilon": 1e-5,
    "untie_embeddings_and_output_weights": True,
    "swiglu": True,
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "position_embedding_type": "rope",
    "rotary_base": 10000,
    "rotary_percent": 1.0,
    "params_dtype": "bfloat16",
}


def write_llama(
    folder: Path, *, layers=4, hidden=512, ffn=1408, vocab=4096, tp=2, pp=2, dtype="bfloat16", chunk=None
) -> int:
    """Writes a Llama in torch_dist's layout, a record at a time, and returns the bytes of its weights.

    Names, splits and containers are those of Megatron-Core 0.16 (stacked layers); values are random.
    """
    import torch

    args = argparse.Namespace(
        **LLAMA,
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        kv_channels=hidden // LLAMA["num_attention_heads"],
        vocab_size=vocab - 7,
        padded_vocab_size=vocab,
        iteration=7,
    )
    dim, groups = args.kv_channels, args.num_query_groups
    qkv = (args.num_attention_heads + 2 * groups) * dim
    stacked = {  # key without its layer axis: shape, axis split over tensor parallel ranks, pieces that axis falls in
        "self_attention.linear_qkv.layer_norm_weight": ((hidden,), None, 1),
        "self_attention.linear_qkv.weight": ((qkv, hidden), 0, 1),
        "self_attention.linear_proj.weight": ((hidden, hidden), 1, 1),
        "mlp.linear_fc1.layer_norm_weight": ((hidden,), None, 1),
        "mlp.linear_fc1.weight": ((2 * ffn, hidden), 0, 2),
        "mlp.linear_fc2.weight": ((hidden, ffn), 1, 1),
    }
    plan = []  # key, global shape, [(file, start, size)]
    for key, (shape, axis, halves) in stacked.items():
        chunks = []
        for layer in range(layers):
            stage = layer * pp // layers
            for start, size, rank in _split(shape, axis, tp, halves):
                chunks.append((f"__{stage * tp + rank}_0.distcp", (layer, *start), (1, *size)))
        plan.append((f"decoder.layers.{key}", (layers, *shape), chunks))
    for key, rank0 in (("embedding.word_embeddings.weight", 0), ("output_layer.weight", (pp - 1) * tp)):
        chunks = [
            (f"__{rank0 + rank}_0.distcp", start, size) for start, size, rank in _split((vocab, hidden), 0, tp, 1)
        ]
        plan.append((key, (vocab, hidden), chunks))
    plan.append(("decoder.final_layernorm.weight", (hidden,), [(f"__{(pp - 1) * tp}_0.distcp", (0,), (hidden,))]))
    folder.mkdir(parents=True)
    total = write_torch_dist(folder, plan, getattr(torch, dtype))
    torch.save({"args": args, "iteration": 7, "checkpoint_version": 3.0}, folder / "common.pt")
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    return total


def _split(shape, axis, tp, halves):
    if axis is None:
        yield (0,) * len(shape), shape, 0
        return
    piece = shape[axis] // (tp * halves)
    for half, rank in itertools.product(range(halves), range(tp)):
        start, size = [0] * len(shape), list(shape)
        start[axis], size[axis] = (half * tp + rank) * piece, piece
        yield tuple(start), tuple(size), rank


def write_torch_dist(folder: Path, plan, dtype, seed: int = 0) -> int:
    """Writes keys, given as `(key, shape, [(file, start, size), ...])`, with random elements; returns their bytes."""
    import torch
    from torch.distributed.checkpoint import metadata as dcp
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    generator = torch.Generator().manual_seed(seed)
    ends: dict[str, int] = {}
    tensors, records, total = {}, {}, 0
    for key, shape, chunks in plan:
        parts = []
        for name, start, size in chunks:
            value = torch.randn(size, generator=generator).mul_(0.05).to(dtype)
            buffer = io.BytesIO()
            torch.save(value, buffer)
            raw = buffer.getbuffer()
            with (folder / name).open("ab") as file:
                file.write(raw)
            at = ends.get(name, 0)
            ends[name] = at + len(raw)
            total += value.numel() * value.element_size()
            parts.append(dcp.ChunkStorageMetadata(torch.Size(start), torch.Size(size)))
            index = dcp.MetadataIndex(key, torch.Size(start), len(parts) - 1)
            records[index] = _StorageInfo(name, at, len(raw))
        properties = dcp.TensorProperties(dtype=dtype)
        tensors[key] = dcp.TensorStorageMetadata(properties, torch.Size(shape), parts)
    document = dcp.Metadata(tensors, planner_data=None, storage_data=records)
    (folder / ".metadata").write_bytes(pickle.dumps(document, protocol=4))
    return total


def report_of(folder: Path) -> dict:
    """The accounting that an export leaves in its result."""
    return json.loads((folder / "distckpt-report.json").read_text())
