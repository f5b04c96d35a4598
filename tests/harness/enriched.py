"""Real checkpoints with something more in them: a tensor that no rule knows, a stored object that nobody asked for.

torch's own classes write what is added into a torch_dist golden: a record of `torch.save`, and entries of `.metadata`.
"""

from __future__ import annotations

import io
import pickle
import shutil
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["enrich"]


def enrich(
    source: Path,
    folder: Path,
    tensors: Mapping[str, torch.Tensor] | None = None,
    objects: Mapping[str, Any] | None = None,
    *,
    without: tuple[str, ...] = (),
) -> Path:
    """Copies a torch_dist folder and adds tensors, each as one chunk, and objects; returns the iteration's folder.

    Args:
        source: A golden with `.metadata` in it.
        folder: Where the copy goes.
        without: Keys that are left out of `.metadata`; their records stay.
    """
    shutil.copytree(source, folder)
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    data, name = io.BytesIO(), "__0_7.distcp"
    for key in without:
        del metadata.state_dict_metadata[key]
        metadata.storage_data = {index: info for index, info in metadata.storage_data.items() if index.fqn != key}
    for key, tensor in (tensors or {}).items():
        begin, zero = data.tell(), torch.Size([0] * tensor.dim())
        torch.save(tensor, data)
        chunk = ChunkStorageMetadata(zero, tensor.shape)
        metadata.state_dict_metadata[key] = TensorStorageMetadata(
            TensorProperties(dtype=tensor.dtype), tensor.shape, [chunk]
        )
        index = MetadataIndex(key, zero, 0)
        metadata.storage_data[index] = _StorageInfo(name, begin, data.tell() - begin)
    for key, value in (objects or {}).items():
        begin = data.tell()
        torch.save([value], data)
        metadata.state_dict_metadata[key] = BytesStorageMetadata()
        metadata.storage_data[MetadataIndex(key)] = _StorageInfo(name, begin, data.tell() - begin)
    if data.tell():
        (folder / name).write_bytes(data.getvalue())
    path.write_bytes(pickle.dumps(metadata))
    return folder
