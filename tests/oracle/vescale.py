"""Writes a checkpoint as veScale's source says: veScale itself needs torch 2.2 with patches of its own, and GPUs.

    python tests/oracle/vescale.py OUT        # OUT/vescale_llama_tp2pp2dp2, OUT/truth/vescale_llama_tp2pp2dp2.safetensors

What is followed: veScale 0.1.18, legacy/vescale/checkpoint: api/vescale_checkpointer.py (folders), storage/filesystem.py
(`_write_item`, `_StorageInfo`, file names), planner (which rank writes what); legacy/vescale/optim/distributed_optimizer.py
(`state_dict`: keys, boxes of a parameter cut over data-parallel ranks); torch 2.2: fields of Metadata. Flattened keys are
made by torch's own `flatten_state_dict`.
"""

from __future__ import annotations

import io
import pickle
import sys
import types
from collections import Counter
from dataclasses import make_dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

NAME = "vescale_llama_tp2pp2dp2"
HIDDEN, FFN, VOCABULARY = 16, 24, 40
# name -> (stage, shape, axis that tensor-parallel ranks divide)
PARAMETERS: dict[str, tuple[int, tuple[int, ...], int | None]] = {
    "model.embed_tokens.weight": (0, (VOCABULARY, HIDDEN), 1)
}
for layer in (0, 1):
    _prefix = f"model.layers.{layer}."
    for _name, _shape, _axis in (
        ("self_attn.q_proj.weight", (HIDDEN, HIDDEN), 0),
        ("self_attn.k_proj.weight", (HIDDEN // 2, HIDDEN), 0),
        ("self_attn.v_proj.weight", (HIDDEN // 2, HIDDEN), 0),
        ("self_attn.o_proj.weight", (HIDDEN, HIDDEN), 1),
        ("mlp.gate_proj.weight", (FFN, HIDDEN), 0),
        ("mlp.up_proj.weight", (FFN, HIDDEN), 0),
        ("mlp.down_proj.weight", (HIDDEN, FFN), 1),
        ("input_layernorm.weight", (HIDDEN,), None),
        ("post_attention_layernorm.weight", (HIDDEN,), None),
    ):
        PARAMETERS[_prefix + _name] = (layer, _shape, _axis)
PARAMETERS |= {"model.norm.weight": (1, (HIDDEN,), None), "lm_head.weight": (1, (VOCABULARY, HIDDEN), 0)}
TP = DP = 2
Box = tuple[tuple[int, ...], tuple[int, ...]]


def boxes(shape: tuple[int, ...], axis: int | None) -> list[Box]:
    """What each tensor-parallel rank has of a parameter; one box for all where it is replicated."""
    if axis is None:
        return [((0,) * len(shape), shape)]
    out = []
    for rank in range(TP):
        start, size = [0] * len(shape), list(shape)
        size[axis] //= TP
        start[axis] = rank * size[axis]
        out.append((tuple(start), tuple(size)))
    return out


def halves(box: Box) -> list[Box]:
    """A tensor-parallel rank's part, cut over two data-parallel ranks along its rows."""
    (first, *start), (rows, *size) = box
    return [((first + rank * rows // DP, *start), (rows // DP, *size)) for rank in range(DP)]


class Folder:
    """One call of veScale's save: a folder with metadata and a file for each rank that wrote."""

    def __init__(self, path: Path) -> None:
        path.mkdir(parents=True)
        self.path, self.entries, self.storage = path, {}, {}
        self.load: Counter[int] = Counter()

    def tensor(self, key: str, whole: torch.Tensor, box: Box, ranks: tuple[int, ...]) -> None:
        """A piece, written by the rank that has the fewest items so far (`custom_dedup_tensors`)."""
        start, size = (torch.Size(numbers) for numbers in box)
        part = whole[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))].contiguous().clone()
        if key not in self.entries:
            properties = TensorProperties(dtype=whole.dtype)
            self.entries[key] = dcp.TensorStorageMetadata(properties, whole.shape, [])
        chunks = self.entries[key].chunks
        chunks.append(dcp.ChunkStorageMetadata(start, size))
        buffer = io.BytesIO()
        torch.save(part, buffer)
        rank = min(ranks, key=lambda r: self.load[r])
        self._write(dcp.MetadataIndex(key, start, len(chunks) - 1), rank, buffer.getvalue())

    def object(self, key: str, value: Any) -> None:
        self.entries[key] = dcp.BytesStorageMetadata()
        buffer = io.BytesIO()
        torch.save(value, buffer)
        self._write(dcp.MetadataIndex(key), 0, buffer.getvalue())

    def _write(self, index: dcp.MetadataIndex, rank: int, raw: bytes) -> None:
        self.load[rank] += 1
        name = f"__{rank}_0.distcp"
        with (self.path / name).open("ab") as file:
            self.storage[index] = storage_info()(name, file.tell(), len(raw))
            file.write(raw)

    def finish(self, paths: dict[str, Any]) -> None:
        document = dcp.Metadata(self.entries, paths, self.storage)
        for name in document.__dict__.keys() - {"state_dict_metadata", "planner_data", "storage_data"}:
            del document.__dict__[name]  # torch 2.2 has no more
        (self.path / ".metadata").write_bytes(pickle.dumps(document))


def storage_info() -> Any:
    """veScale's own class of that name, so that a pickle names it."""
    module = "vescale.checkpoint.storage.filesystem"
    if module not in sys.modules:
        made = make_dataclass("_StorageInfo", [("relative_path", str), ("offset", int), ("length", int)])
        made.__module__ = module
        sys.modules[module] = types.ModuleType(module)
        sys.modules[module]._StorageInfo = made
    return sys.modules[module]._StorageInfo


def write(out: Path) -> dict[str, torch.Tensor]:
    """The checkpoint; returns every tensor by its name in the catalog."""
    made = torch.Generator().manual_seed(11)
    masters = {name: torch.randn(shape, generator=made) for name, (_, shape, _) in PARAMETERS.items()}
    weights = {name: value.bfloat16() for name, value in masters.items()}
    moments = {
        state: {name: torch.randn(value.shape, generator=made).abs() for name, value in masters.items()}
        for state in ("exp_avg", "exp_avg_sq")
    }
    step = torch.tensor(2.0)
    model = Folder(out / "model")
    for name, (stage, shape, axis) in PARAMETERS.items():
        for tp, box in enumerate(boxes(shape, axis)):
            holders = [
                4 * stage + TP * dp + rank for dp in range(DP) for rank in ([tp] if axis is not None else range(TP))
            ]
            model.tensor(name, weights[name], box, tuple(holders))
    model.finish({name: (name,) for name in PARAMETERS})
    truth = dict(weights)
    for stage in (0, 1):
        folder = Folder(out / "optimizer" / f"pp_{stage}")
        mine = [name for name, (home, _, _) in PARAMETERS.items() if home == stage]
        states = {
            name: {"step": step, **{s: moments[s][name] for s in moments}, "shard_casted_float16_groups": masters[name]}
            for name in mine
        }
        groups = [
            {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "params": list(range(len(mine)))}
        ]
        flat, paths = flatten_state_dict({"param_group_meta": groups, torch.float32: states})
        for key, value in flat.items():
            path = paths[key]
            if not isinstance(value, torch.Tensor):
                folder.object(key, value)
                continue
            truth[f"optimizer.state.{'param' if 'float16_groups' in path[2] else path[2]}.{path[1]}"] = value
            if not value.dim():
                folder.tensor(key, value, ((), ()), (0, 1, 2, 3))
                continue
            for tp, box in enumerate(boxes(*PARAMETERS[path[1]][1:])):
                for dp, part in enumerate(halves(box)):
                    folder.tensor(key, value, part, (TP * dp + tp,))
        folder.finish(paths)
    return truth


if __name__ == "__main__":
    root = Path(sys.argv[1])
    (root / "truth").mkdir(parents=True, exist_ok=True)
    save_file({n: t.clone() for n, t in write(root / NAME).items()}, root / "truth" / f"{NAME}.safetensors")
