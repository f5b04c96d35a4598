"""The commands: one file each. This table is all that `distckpt --help` needs to know of them."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["COMMANDS", "EXAMPLES", "OPTIONAL_GLOBS", "WRITERS", "Entry"]


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
    "ls": Entry("ls:ls", "Inspect", "List the runs and checkpoints below a folder, and which are incomplete"),
    "inspect": Entry("inspect:inspect", "Inspect", "Show what a checkpoint is: model, layout, components, tensors"),
    "show": Entry("show:show", "Inspect", "Show the values of a tensor and their statistics"),
    "verify": Entry(
        "verify:verify", "Inspect", "Check structure, records, checksums, optimizer, values; exit 1 if damaged"
    ),
    "diff": Entry("diff:diff", "Inspect", "Compare two checkpoints of any format and layout; exit 1 if they differ"),
    "reshard": Entry("reshard:reshard", "Write", "Rewrite for another parallel layout, optimizer state included"),
    "convert": Entry(
        "convert:convert", "Write", "Write as torch_dist, legacy, torch or safetensors, from any format read"
    ),
    "strip": Entry("strip:strip", "Write", "Copy a checkpoint without optimizer and random states"),
    "edit-args": Entry("edit_args:edit_args", "Write", "Copy a checkpoint with other training arguments"),
    "watch": Entry("watch:watch", "Write", "Convert every new iteration of a training run"),
    "export-hf": Entry("export_hf:export_hf", "Hugging Face", "Write a folder of safetensors that transformers loads"),
    "import-hf": Entry(
        "import_hf:import_hf", "Hugging Face", "Write a checkpoint that a Megatron-LM job starts from, with its flags"
    ),
    "doctor": Entry("doctor:doctor", "About", "Explain errors of training jobs; say whether a job loads a checkpoint"),
    "cache": Entry("cache:cache", "About", "List and remove the unfinished work of interrupted runs"),
    "formats": Entry("about:formats", "About", "List the storage formats that are read and written"),
    "models": Entry("about:models", "About", "List the Hugging Face architectures that are exported and imported"),
}

WRITERS = frozenset(name for name, entry in COMMANDS.items() if entry.panel in ("Write", "Hugging Face"))
"""The commands that write, and go on where they were stopped."""

EXAMPLES: dict[str, tuple[str, ...]] = {
    "": (
        "distckpt inspect ckpt/iter_0050000",
        "distckpt inspect ckpt/iter_0050000 --tensors 'decoder.layers.0.*'",
        "distckpt inspect ckpt/iter_0050000 --json | jq .model",
        "distckpt export-hf ckpt/iter_0050000 llama-hf",
    ),
    "ls": (
        "distckpt ls runs",
        "distckpt ls runs --incomplete",
        "distckpt ls --sort size",
        "distckpt ls runs --json | jq -r '.checkpoints[].path'",
    ),
    "inspect": (
        "distckpt inspect ckpt/iter_0050000",
        "distckpt inspect ckpt --tensors '*.linear_qkv.weight' --flat",
        "distckpt inspect ckpt --files",
        "distckpt inspect ckpt --args '*lr*'",
        "distckpt inspect ckpt --tree --sort size",
        "distckpt inspect ckpt --tensors --flat --sort size | head",
        "distckpt inspect ckpt --names | grep router",
    ),
    "show": (
        "distckpt show ckpt decoder.final_layernorm.weight",
        "distckpt show ckpt output_layer.weight --slice 0:4,:8",
        "distckpt show ckpt '*.layers.0.*.weight'",
        "distckpt show ckpt optimizer.state.exp_avg.output_layer.weight --histogram",
        "distckpt show ckpt output_layer.weight --slice 17 --json | jq .values",
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
    "strip": ("distckpt strip ckpt/iter_0050000 small", "distckpt strip ckpt small --dry-run"),
    "edit-args": (
        "distckpt edit-args ckpt/iter_0050000 out --set lr=1e-5 --set 'tokenizer_model=\"tok.model\"'",
        "distckpt edit-args ckpt out --set params_dtype=bfloat16 --unset wandb_project --dry-run",
    ),
    "watch": (
        "distckpt watch runs/llama hf -- export-hf",
        "distckpt watch runs/llama tp2 --once -- reshard --tp 2 --optimizer none",
        "distckpt watch runs/llama hf --exec 'rclone copy $1 remote:hf' -- export-hf --dtype bf16",
    ),
    "export-hf": (
        "distckpt export-hf ckpt/iter_0050000 llama-hf",
        "distckpt export-hf ckpt llama-hf --hf-config /models/Llama-3.1-8B",
        "distckpt export-hf ckpt llama-hf --dtype fp16 --max-shard-size 2GB",
        "distckpt export-hf ckpt llama-hf --dry-run --json | jq .dropped",
    ),
    "doctor": (
        "distckpt doctor train.log ckpt/iter_0050000",
        "distckpt doctor 'ShardedTensor.flattened_range is not supported.'",
        "kubectl logs trainer | distckpt doctor -",
        "distckpt doctor ckpt --for '--tp 4 --pp 2 --mcore 0.16 --use-distributed-optimizer'",
    ),
    "import-hf": (
        "distckpt import-hf Qwen3-8B start --tp 2 --pp 2",
        "distckpt import-hf Mixtral-8x7B start --ep 8 --mcore 0.19",
        "distckpt import-hf llama-hf start --to legacy --dtype bf16",
        "distckpt import-hf Qwen3-8B start --dry-run --json | jq -r .arguments",
    ),
    "cache": ("distckpt cache", "distckpt cache runs --json", "distckpt cache runs /scratch --clear"),
    "formats": ("distckpt formats",),
    "models": ("distckpt models --json",),
}

# options whose value may be left out, by command; then it is `*`
OPTIONAL_GLOBS: dict[str, tuple[str, ...]] = {"inspect": ("--tensors", "--args", "--objects"), "diff": ("--args",)}
