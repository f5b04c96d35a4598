"""Checkpoints of very many things, each of them harmless."""

# ruff: noqa: E501

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from converters.formats.common_state import Archive
from converters.pickles.nodes import Global, Obj, fields, set_field
from harness import hostile_headers as containers
from harness.checkpoints import edit_metadata
from hostile.corpus import GOOD, ITERATION, Case, copied, first_key, renamed_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

__all__ = ["crowds"]


def crowds() -> Iterator[Case]:
    """Very many of what is harmless alone, in a file of some megabytes: what takes time for each pair of them shows."""
    wide = "decoder.layers.mlp.linear_fc1.weight"

    def boxes(shape: tuple[int, ...], found: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> Callable[[Any], None]:
        """Gives a tensor these chunks, `(start, shape)`, all in the record of the one it had."""

        def change(state: dict[str, Any]) -> None:
            tensor, entries = state["state_dict_metadata"][wide], state["storage_data"]
            chunks, (index, info) = (
                fields(tensor)["chunks"],
                next((i, x) for i, x in entries.items() if fields(i)["fqn"] == wide),
            )
            size = Global("torch", "Size")

            def like(node: Obj, **values: Any) -> Obj:
                return Obj(node.func, node.args, kind=node.kind, state={**fields(node), **values})

            set_field(tensor, "size", Obj(size, (shape,)))
            chunks[:] = [like(chunks[0], offsets=Obj(size, (a,)), sizes=Obj(size, (n,))) for a, n in found]
            for old in [i for i in entries if fields(i)["fqn"] == wide]:
                del entries[old]
            entries |= {like(index, offset=Obj(size, (a,))): info for a, _ in found}

        return change

    n = 12_000
    steps = [((i, i), (n, 1)) for i in range(n)]
    comb = [((0, i), (n, 1)) for i in range(n // 2)] + [((i, n // 2), (1, n)) for i in range(n)]
    cells = [((i, j), (1, 1)) for i in range(150) for j in range(150)]

    def more(change: Callable[[dict[str, Any], str, Obj], None]) -> Callable[[dict[str, Any]], None]:
        def add(state: dict[str, Any]) -> None:
            for number in range(8_000):
                change(state, f"decoder.layers.{number}.a.weight", state["state_dict_metadata"][wide])

        return add

    metadata: dict[str, Callable[[dict[str, Any]], None]] = {
        "chunks in steps": boxes((2 * n, n), steps),
        "chunks like a comb": boxes((n, n // 2 + n), comb),
        "chunks of one element": boxes((150, 150), cells),
        "tensors without records": more(lambda state, key, tensor: state["state_dict_metadata"].update({key: tensor})),
        "objects of one grid": more(lambda s, k, _: s["state_dict_metadata"].update({f"x/shard_{k.split('.')[2]}_8000": s["state_dict_metadata"][first_key(s, "BytesStorageMetadata")]})),
        "objects of many grids": more(lambda s, k, _: s["state_dict_metadata"].update({f"x/shard_{k.split('.')[2]}_{k.split('.')[2]}1": s["state_dict_metadata"][first_key(s, "BytesStorageMetadata")]})),
        "layers in a name": renamed_key("decoder.layers.0." * 20_000 + "weight"),
        "wrappers around a name": renamed_key("module." * 50_000 + "decoder.layers.0.x.weight"),
        "digits and dots in a name": renamed_key("1.2." * 50_000),
        "braces in a name": renamed_key("{0..1}{" * 20_000),
    }  # fmt: skip
    for name, edit in metadata.items():

        def make(folder: Path, _: Path, edit: Any = edit) -> Path:
            copy = copied(GOOD, folder / "ckpt" / ITERATION, ITERATION)
            edit_metadata(copy, edit)
            return copy

        yield Case("crowd", name, make, refused=" name" not in name)

    def header(folder: Path, _: Path) -> Path:
        (folder / "ckpt").mkdir()
        entries = {f"model.layers.{k}.mlp.up_proj.weight": containers.entry(2 * k, 2 * k + 2) for k in range(50_000)}
        containers.write_safetensors(folder / "ckpt" / "model.safetensors", entries, bytes(100_000))
        return folder / "ckpt"

    def arguments(folder: Path, _: Path) -> Path:
        copy = copied(GOOD, folder / "ckpt")
        archive = Archive.read(copy / ITERATION / "common.pt")
        for number in range(30_000):
            set_field(archive.tree["args"], f"argument_{number}", "x" * 50)
        (copy / ITERATION / "common.pt").write_bytes(archive.dump(archive.tree, "archive"))
        return copy

    def keys(folder: Path, _: Path) -> Path:
        copy = copied("torch_mixtral_megatron", folder / "ckpt")
        archive = Archive.read(copy / "model.pt")
        weights = archive.tree["model"].pairs
        weights += [(f"decoder.layers.{k}.mlp.x.weight", weights[0][1]) for k in range(4_000)]
        (copy / "model.pt").write_bytes(archive.dump(archive.tree, "archive"))
        return copy / "model.pt"

    def text(golden: str, where: str, content: str) -> Callable[[Path, Path], Path]:
        def make(folder: Path, _: Path) -> Path:
            copy = copied(golden, folder / "ckpt")
            next(copy.glob(where)).write_text(content)
            return copy

        return make

    def folders(golden: str, name: str, count: int) -> Callable[[Path, Path], Path]:
        def make(folder: Path, _: Path) -> Path:
            copy = copied(golden, folder / "ckpt")
            for number in range(count):
                (copy / name.format(number)).mkdir(exist_ok=True)
            return copy

        return make

    config = json.dumps({"model_type": "llama", "num_hidden_layers": 2, "layer_types": ["full_attention"] * 300_000})
    index = json.dumps({"weight_map": {f"model.layers.{k}.x": f"model-{k}.safetensors" for k in range(40_000)}})
    bridge, nemo1 = "bridge_llama4_weights_tp2pp2", "nemo1_zarr_llama4_weights_tp2pp2"
    yield Case("crowd", "tensors in a safetensors header", header, refused=False)
    yield Case("crowd", "arguments", arguments, refused=False)
    yield Case("crowd", "keys of a torch file", keys, refused=False)
    yield Case(
        "crowd",
        "layers in config.json",
        text("hf_llama_safetensors", "config.json", config),
        refused=False,
        config=True,
    )
    yield Case("crowd", "files in an index", text("hf_llama_safetensors", "*.index.json", index))
    yield Case(
        "crowd",
        "keys in model_config.yaml",
        text(nemo1, "model_config.yaml", "".join(f"a{k}: {k}\n" for k in range(100_000))),
        refused=False,
    )
    yield Case(
        "crowd",
        "lists in run_config.yaml",
        text(bridge, f"{ITERATION}/run_config.yaml", "a: [" + "[]," * 300_000 + "]"),
        refused=False,
    )
    yield Case(
        "crowd", "digits in the tracker", text(GOOD, "latest_checkpointed_iteration.txt", "9" * 4096), refused=False
    )
    yield Case("crowd", "iterations", folders(GOOD, "iter_{:07}1", 3000), refused=False)
    yield Case(
        "crowd", "ranks", folders("legacy_llama_adam_tp2pp2", ITERATION + "/mp_rank_{:02}_000", 3000), refused=False
    )
    yield Case(
        "crowd",
        "arrays without content",
        folders(nemo1, "model_weights/model.decoder.layers.{}.x", 3000),
        refused=False,
    )
