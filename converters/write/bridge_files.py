"""What Megatron-Bridge keeps beside the tensors of a model that is to be trained: its configuration, progress of none.

    DST/latest_checkpointed_iteration.txt  latest_train_state.pt
        iter_0000000/  run_config.yaml  train_state.pt  tokenizer/

Source: Megatron-Bridge 067f987d (2026-08), training/checkpointing.py (_load_checkpoint_from_path), training/state.py
(`TrainState`), training/model_load_save.py (load_model_config, load_tokenizer).
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from converters.dtypes import dtype
from converters.torchzip.records_out import object_record, storage_node, tensor_node
from converters.write.job_arguments import provider_values

if TYPE_CHECKING:
    from collections.abc import Mapping

    from converters.megatron.layout import Layout

_TRAINING = "megatron.bridge.training."
# name -> (type, how struct packs it); all are tensors without axes
_PROGRESS = {
    "step": ("int64", "<q"),
    "consumed_train_samples": ("int64", "<q"),
    "skipped_train_samples": ("int64", "<q"),
    "consumed_valid_samples": ("int64", "<q"),
    "floating_point_operations_so_far": ("float64", "<d"),
    "do_train": ("bool", "<?"),
    "do_valid": ("bool", "<?"),
    "do_test": ("bool", "<?"),
}


def bridge_files(
    section: Mapping[str, Any], layout: Layout, folder: str, iteration: int, *, tokenizer: str | None
) -> dict[str, bytes]:
    """The files by name within the result.

    Args:
        section: What describes the model: `provider_section`.
        layout: Of the job that loads it.
        folder: Where the tensors are: "iter_0000000".
        tokenizer: Folder of the tokenizer; None if there is none.
    """
    import yaml

    document: dict[str, Any] = {
        "_target_": f"{_TRAINING}config.ConfigContainer",
        "model": {**section, **provider_values(layout)},
        "checkpoint": {
            "_target_": f"{_TRAINING}config.CheckpointConfig",
            "ckpt_format": "torch_dist",
            "fully_parallel_save": True,
            "save_optim": False,
            "save_rng": False,
        },
    }
    if tokenizer is not None:
        document["tokenizer"] = {
            "_target_": f"{_TRAINING}tokenizers.config.TokenizerConfig",
            "tokenizer_type": "HuggingFaceTokenizer",
            "tokenizer_model": tokenizer,
        }
    progress = _train_state(iteration)
    return {
        f"{folder}/run_config.yaml": yaml.safe_dump(document, sort_keys=True).encode(),
        f"{folder}/train_state.pt": progress,
        "latest_train_state.pt": progress,
    }


def _train_state(iteration: int) -> bytes:
    """The file of a job that has done so many steps and nothing else."""
    tree, storages = {}, {}
    for number, (name, (kind, packed)) in enumerate(_PROGRESS.items()):
        node = storage_node(dtype(kind), str(number), 1)
        tree[name] = tensor_node(node, dtype(kind), ())
        storages[f"data/{number}"] = struct.pack(packed, iteration if name == "step" else 0)
    return object_record(tree, storages)
