"""The commands: one file each. This table is all that `distckpt --help` needs to know of them."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["COMMANDS", "EXAMPLES", "OPTIONAL_GLOBS", "Entry"]


class Entry(NamedTuple):
    """A command.

    Attributes:
        target: `module:function` below this package.
        panel: Heading it stands under in the help text.
        summary: One line.
    """

    target: str
    panel: str
    summary: str


COMMANDS = {
    "inspect": Entry("inspect:inspect", "Look", "Show what a checkpoint is: model, layout, components, tensors"),
    "verify": Entry("verify:verify", "Look", "Check structure, records, checksums, optimizer, values; exit 1 if bad"),
    "diff": Entry("diff:diff", "Look", "Compare two checkpoints of any format and layout; exit 1 if they differ"),
    "reshard": Entry("reshard:reshard", "Change", "Rewrite for another parallel layout, optimizer state included"),
    "convert": Entry(
        "convert:convert", "Change", "Write as torch_dist, legacy, torch or safetensors, from any format read"
    ),
    "export-hf": Entry("export_hf:export_hf", "Hugging Face", "Write a folder of safetensors that transformers loads"),
    "formats": Entry("about:formats", "About", "List the storage formats that are read and written"),
    "models": Entry("about:models", "About", "List the Hugging Face architectures that can be exported"),
}

EXAMPLES: dict[str, tuple[str, ...]] = {
    "": (
        "distckpt inspect ckpt/iter_0050000",
        "distckpt inspect ckpt/iter_0050000 --tensors 'decoder.layers.0.*'",
        "distckpt inspect ckpt/iter_0050000 --json | jq .model",
        "distckpt export-hf ckpt/iter_0050000 llama-hf",
    ),
    "inspect": (
        "distckpt inspect ckpt/iter_0050000",
        "distckpt inspect ckpt --tensors '*.linear_qkv.weight' --flat",
        "distckpt inspect ckpt --files",
        "distckpt inspect ckpt --args '*lr*'",
        "distckpt inspect ckpt -q | grep router",
    ),
    "verify": (
        "distckpt verify ckpt/iter_0050000",
        "distckpt verify ckpt --quick",
        "distckpt verify ckpt --values --json | jq '.checks[] | select(.status == \"bad\")'",
        "distckpt verify ckpt --write-manifest",
    ),
    "diff": (
        "distckpt diff ckpt/iter_0050000 out/iter_0050000",
        "distckpt diff ckpt llama-hf --rtol 1e-2",
        "distckpt diff a b --tensors 'decoder.layers.{0..3}.*' --ignore '*.bias'",
        "distckpt diff a b --args",
        "distckpt diff a b --json | jq '.tensors[] | [.name, .max_abs]'",
    ),
    "reshard": (
        "distckpt reshard ckpt/iter_0050000 out --tp 2 --pp 2",
        "distckpt reshard ckpt out --tp 4 --pp 4 --vpp 2 --dp 8 --fully-parallel",
        "distckpt reshard ckpt out --tp 2 --ep 8 --optimizer none --dry-run",
    ),
    "convert": (
        "distckpt convert legacy/iter_0050000 out --to torch_dist --tp 2 --pp 2",
        "distckpt convert ckpt out --to torch_dist --mcore 0.19 --weights-only",
        "distckpt convert ckpt model.pt --to torch",
        "distckpt convert ckpt out --to safetensors --names hf",
    ),
    "export-hf": (
        "distckpt export-hf ckpt/iter_0050000 llama-hf",
        "distckpt export-hf ckpt llama-hf --hf-config /models/Llama-3.1-8B",
        "distckpt export-hf ckpt llama-hf --dtype fp16 --max-shard-size 2GB",
        "distckpt export-hf ckpt llama-hf --dry-run --json | jq .dropped",
    ),
    "formats": ("distckpt formats",),
    "models": ("distckpt models --json",),
}

# options whose value may be left out, by command; then it is `*`
OPTIONAL_GLOBS: dict[str, tuple[str, ...]] = {"inspect": ("--tensors", "--args", "--objects"), "diff": ("--args",)}
