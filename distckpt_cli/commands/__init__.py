"""The commands: one file each, with a function of the same name. `distckpt --help` needs no more than this table."""

from __future__ import annotations

from typing import NamedTuple


class Entry(NamedTuple):
    """A command.

    Attributes:
        panel: Heading it stands under in the help text.
        summary: One line.
    """

    panel: str
    summary: str


COMMANDS = {
    "ls": Entry("Inspect", "List the runs and checkpoints below a folder, and which are incomplete"),
    "inspect": Entry("Inspect", "Show what a checkpoint is: model, layout, components, tensors"),
    "show": Entry("Inspect", "Show the values of a tensor and their statistics"),
    "verify": Entry("Inspect", "Check structure, records, checksums, optimizer, values; exit 1 if damaged"),
    "diff": Entry("Inspect", "Compare two checkpoints of any format and layout; exit 1 if they differ"),
    "reshard": Entry("Write", "Rewrite for another parallel layout, optimizer state included"),
    "convert": Entry("Write", "Write as torch_dist, legacy, torch or safetensors, from any format read"),
    "strip": Entry("Write", "Copy a checkpoint without optimizer and random states"),
    "edit-args": Entry("Write", "Copy a checkpoint with other training arguments"),
    "watch": Entry("Write", "Convert every new iteration of a training run"),
    "export-hf": Entry("Hugging Face", "Write a folder of safetensors that transformers loads"),
    "import-hf": Entry("Hugging Face", "Write a checkpoint that a Megatron-LM job starts from, with its flags"),
    "doctor": Entry("About", "Explain errors of training jobs; say whether a job loads a checkpoint"),
    "cache": Entry("About", "List and remove the unfinished work of interrupted runs"),
    "formats": Entry("About", "List the storage formats that are read and written"),
    "models": Entry("About", "List the Hugging Face architectures that are exported and imported"),
}

WRITERS = frozenset(name for name, entry in COMMANDS.items() if entry.panel in ("Write", "Hugging Face"))
"""The commands that write, and go on where they were stopped."""
