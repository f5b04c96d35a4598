"""Error texts of Megatron, NeMo, Megatron-Bridge, torch and the common converters: what each means, and what to run.

A symptom is recognised by the fixed part of its text, as the program raises it or as people paste it. In a remedy, CKPT
stands for the checkpoint.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_LONGEST_LINE = 4000
_SHOWN = 160


@dataclass(frozen=True, slots=True)
class Symptom:
    """A known error.

    Attributes:
        name: One word or two, stable, for programs.
        pattern: Recognises a line of a log.
        meaning: What it says of the checkpoint or the job.
        harmless: The job may go on.
        remedies: Commands or steps, the best first.
    """

    name: str
    pattern: re.Pattern[str]
    meaning: str
    remedies: tuple[str, ...] = ()
    harmless: bool = False


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A symptom in a text.

    Attributes:
        symptom: The symptom that the text shows.
        line: Number of the first line that shows it, from 1.
        text: That line, shortened.
        count: Lines that show it.
    """

    symptom: Symptom
    line: int
    text: str
    count: int


def _symptom(name: str, pattern: str, meaning: str, *remedies: str, harmless: bool = False) -> Symptom:
    return Symptom(name, re.compile(pattern), meaning, remedies, harmless)


_RESHARD = "distckpt reshard CKPT DST --tp T --pp P"
_VERIFY = "distckpt verify CKPT"
_EXPORT = "distckpt export-hf CKPT DST"

SYMPTOMS: tuple[Symptom, ...] = (
    _symptom(
        "weights-only",
        r"Weights only load failed|WeightsUnpickler error: Unsupported global",
        "torch 2.6 and later refuses classes in this pickle. Turning weights_only off would let the file run code.",
        "distckpt inspect CKPT --args reads the same file and runs nothing in it",
        "distckpt convert CKPT DST --to torch_dist (or legacy) writes it without such classes",
    ),
    _symptom(
        "extra-state-missing",
        r"Missing key in checkpoint state_dict: .*_extra_state|Missing key\(s\) in state_dict:.*_extra_state",
        "TransformerEngine asks for its _extra_state, which another version did not store. Without FP8 it holds nothing.",
        f"{_RESHARD} --extra-state fill",
        "--dist-ckpt-strictness log_all in the job",
        harmless=True,
    ),
    _symptom(
        "extra-state-count",
        r"Invalid access pattern: \d+ ShardedObject are missing",
        "The job has another number of layers or stages than stored _extra_state objects. The tensors are not affected.",
        "distckpt inspect CKPT --objects shows what is stored",
        f"{_RESHARD} --extra-state fill",
    ),
    _symptom(
        "rerun-state",
        r"Missing key in checkpoint state_dict: rerun_state_machine_state|Missing keys.*rerun_state_machine_state",
        "The job asks for the state of the rerun machine, which is stored only after a fault. The weights are not affected.",
        "use another --dist-ckpt-strictness than raise_all",
        "distckpt reshard CKPT DST --tp T --pp P writes a checkpoint without it",
        harmless=True,
    ),
    _symptom(
        "global-shape",
        r"Global shape mismatch for loaded|Size mismatch between saved .* and current",
        "The job's model has another shape than the checkpoint: another argument, or another padding of the vocabulary.",
        "distckpt inspect CKPT --args shows the arguments that it was trained with",
        f"{_RESHARD} pads the vocabulary as that job does",
    ),
    _symptom(
        "key-not-stored",
        r"KeyError: .* from model not in state dict",
        "The job names its tensors in another way than the version that saved: layers or experts are stacked, or are not.",
        "distckpt inspect CKPT --tensors",
        f"{_RESHARD} --layers stacked (or per-layer)",
    ),
    _symptom(
        "rng-ignored",
        r"mismatch after resume .*RNG state will be ignored",
        "The grid of ranks has changed, so that random states do not fit. Megatron starts fresh ones.",
        harmless=True,
    ),
    _symptom(
        "optimizer-not-reshardable",
        r"mismatch after resume .*not supported for DistributedOptimizer|sharding_type_.*not supported",
        "The optimizer state is stored for one parallel layout, and the job has another.",
        _RESHARD,
        "--no-load-optim in the job: the moments are lost",
    ),
    _symptom(
        "flattened-range",
        r"flattened_range is not supported",
        "The optimizer state was saved by Megatron-Core 0.14 or earlier; later ones cannot read that form.",
        _RESHARD,
    ),
    _symptom(
        "merge-lists",
        r"Cannot merge two lists with different lengths",
        "The optimizer's param groups or lists differ between ranks: the layout, or the number of experts, has changed.",
        _RESHARD,
    ),
    _symptom(
        "not-distributed",
        r"is not a distributed checkpoint|Checkpoint directory .* does not exist",
        "The path is not the folder that holds metadata.json, or that file was not written on this machine.",
        "distckpt ls CKPT",
        _VERIFY,
    ),
    _symptom(
        "common-missing",
        r"Common file .*common\.pt does not exist|no file common\.pt",
        "Megatron-Core 0.19 and later keep the common state inside the data files; or the save has not ended.",
        _VERIFY,
        "distckpt convert CKPT DST --to torch_dist writes common.pt, which all versions read",
    ),
    _symptom(
        "format-flags",
        r"neither --use-dist-ckpt nor --auto-detect-ckpt-format|unknown checkpoint format in",
        "The job was not told the format of the checkpoint.",
        "distckpt inspect CKPT shows the format",
        "--auto-detect-ckpt-format or --ckpt-format in the job",
    ),
    _symptom(
        "run-config",
        r"Could not find run_config\.yaml",
        "Megatron-Bridge needs its run_config.yaml, which Megatron-LM does not write.",
        _EXPORT,
    ),
    _symptom(
        "bridge-incomplete",
        r"tensors were yielded but not saved because|tensors from the original checkpoint were not written",
        "Megatron-Bridge's export lacks tensors: its reference model is not this one. The result is not usable.",
        _EXPORT,
    ),
    _symptom(
        "no-mapping",
        r"No mapping found for megatron_param|Unknown parameter name:|Unsupported parameter name:"
        r"|Failed to convert layer name \[",
        "That converter does not know a tensor of this model.",
        f"{_EXPORT} accounts for every tensor, or names the one that it cannot express",
        "distckpt models",
    ),
    _symptom(
        "no-architecture",
        r"Model architecture not supported by AutoBridge",
        "Megatron-Bridge has no bridge for this architecture.",
        "distckpt models lists those of distckpt",
    ),
    _symptom(
        "dtype-mismatch",
        r"dtype mismatch between source and target state dicts",
        "The two models compute with different element types.",
        f"{_EXPORT} --dtype bf16",
    ),
    _symptom(
        "converter-shape",
        r"shape '\[\d+, -1, .*\]' is invalid for input of size",
        "A converter took a bias or an extra tensor for a fused projection.",
        _EXPORT,
    ),
    _symptom(
        "fp8-view",
        r"Float8BlockwiseQTensor does not support view",
        "The weights are kept in FP8 by TransformerEngine; a converter needs them in bf16.",
        "distckpt inspect CKPT shows the stored element types",
    ),
    _symptom(
        "meta-tensor",
        r"Cannot copy out of meta tensor; no data",
        "The converter ran out of memory and left tensors without data.",
        f"{_EXPORT} streams in bounded memory",
    ),
    _symptom(
        "needs-gpu",
        r"0 active drivers|Found no NVIDIA driver on your system|CUDA error: operation not supported",
        "The program needs a GPU for what is only a movement of bytes.",
        f"{_EXPORT}, or {_RESHARD}: neither needs one",
    ),
    _symptom(
        "version-skew",
        r"unexpected keyword argument 'no_dist'|missing 1 required positional argument: 'serialization_format'",
        "The versions of torch and Megatron-Core do not fit each other.",
        "distckpt needs neither: distckpt inspect CKPT",
    ),
    _symptom(
        "save-failed",
        r"Failed to validate global plan|Worker failure:|Checkpoint already exists and self\.overwrite",
        "The save failed on some rank; the first message of all ranks says why.",
        "distckpt ls CKPT shows which iterations are complete",
    ),
    _symptom(
        "truncated",
        r"global metadata read failed|CheckpointException.*EOFError|EOFError: Ran out of input",
        "A file of the checkpoint is missing or cut short: the save has not ended, or a copy failed.",
        _VERIFY,
    ),
    _symptom(
        "access-pattern",
        r"Invalid sharding pattern validation|Invalid access pattern for ShardedTensor",
        "The job's ranks do not agree on who holds what; the files are not at fault.",
        "distckpt inspect CKPT compares the saved layout with what you asked for",
    ),
    _symptom(
        "zarr-path",
        r"Error opening \"zarr\" driver.*Invalid key|Zarr-based strategies will not be registered",
        "A relative path with .. or missing packages; later versions of Megatron-Core do not read zarr at all.",
        "distckpt convert CKPT DST --to torch_dist reads zarr",
    ),
    _symptom(
        "no-checkpoint",
        r"'--exit-on-missing-checkpoint' set|could not find arguments in the checkpoint",
        "The job did not see a checkpoint where it looked: no tracker file, or another folder.",
        "distckpt ls CKPT",
    ),
    _symptom(
        "old-tool",
        r"cannot unpack non-iterable Namespace object|IsADirectoryError: .*\.distcp|KeyError: 'model'$",
        "The tool was made for another format of checkpoints.",
        _EXPORT,
        "distckpt convert CKPT DST --to torch",
    ),
    _symptom(
        "factory-merges",
        r"Different dict keys encountered in apply_factory_merges",
        "An older zarr checkpoint keeps gate and up projections in another way than this version asks for.",
        "distckpt convert CKPT DST --to torch_dist",
    ),
    _symptom(
        "no-manifest",
        r"Integrity manifest not found at",
        "The job verifies checksums, and the checkpoint was saved without integrity.json.",
        "distckpt verify CKPT --write-manifest",
    ),
    _symptom(
        "manifest-differs",
        r"Checkpoint integrity verification failed for \d+ file",
        "Files differ from integrity.json: they are damaged, or belong to another save.",
        _VERIFY,
    ),
    _symptom(
        "forensic",
        r"rerun_state_machine.*'NoneType' object is not subscriptable|'NoneType' object is not subscriptable.*rerun",
        "This checkpoint was saved to examine a fault (exit code 17); a job does not resume from it.",
        "distckpt ls CKPT shows earlier iterations",
        "distckpt reshard CKPT DST --tp T --pp P writes a checkpoint without that state",
    ),
    _symptom(
        "optimizer-absent",
        r"Unable to load optimizer from checkpoint|KeyError: 'opt_param_scheduler'",
        "The checkpoint has no optimizer or scheduler state of the kind that the job asks for.",
        "distckpt inspect CKPT shows what it has",
        "--no-load-optim or --finetune in the job",
        "distckpt convert CKPT DST --to torch_dist writes them for Megatron-LM",
    ),
    _symptom(
        "rng-absent",
        r"Unable to load rng state",
        "The checkpoint has no random states for this grid of ranks.",
        "--no-load-rng in the job",
        harmless=True,
    ),
    _symptom(
        "argument-differs",
        r"value from checkpoint \(.*\) is not equal to the input argument value",
        "An argument of the job is not the one that the checkpoint was trained with.",
        "distckpt inspect CKPT --args",
        "--use-checkpoint-args in the job",
    ),
    _symptom(
        "torch-shape",
        r"size mismatch for .*: copying a param with shape",
        "The job's model has another shape: another tensor-parallel size, another padded vocabulary, or another model.",
        "distckpt inspect CKPT shows the layout and the sizes that it was saved with",
        f"{_RESHARD}, or distckpt convert CKPT DST --to legacy --tp T --pp P",
    ),
    _symptom(
        "torch-keys",
        r"(?:Missing|Unexpected) key\(s\) in state_dict",
        "The model of the job names its tensors in another way, or has others.",
        "distckpt inspect CKPT --tensors",
        "distckpt diff CKPT OTHER compares with a checkpoint that the job did load",
    ),
    _symptom(
        "torch-archive",
        r"PytorchStreamReader failed|failed finding central directory",
        "A file of torch.save is cut short or damaged: the save has not ended, or a copy failed.",
        _VERIFY,
    ),
    _symptom(
        "remainders",
        r"AttributeError: 'bool' object has no attribute 'dtype'|set_scaled_state",
        "Megatron-Core 0.16 cannot load its own checkpoints of the precision-aware optimizer.",
        f"{_RESHARD} writes fp32 master weights for a job without --use-precision-aware-optimizer",
    ),
)
"""Every known error, in the order in which they are tried; a line shows the first that matches."""


def diagnose(lines: Iterable[str]) -> list[Diagnosis]:
    """The known errors in a text, in the order of their first lines. Memory does not grow with the text."""
    first: dict[str, Diagnosis] = {}
    for number, line in enumerate(lines, 1):
        text = line[:_LONGEST_LINE].rstrip()
        symptom = next((s for s in SYMPTOMS if s.pattern.search(text)), None)
        if symptom is not None:
            before = first.get(symptom.name)
            shown = before or Diagnosis(symptom, number, " ".join(text.split())[:_SHOWN], 0)
            first[symptom.name] = Diagnosis(symptom, shown.line, shown.text, shown.count + 1)
    return list(first.values())
