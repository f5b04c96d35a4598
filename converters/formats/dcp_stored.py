"""What a `.metadata` of torch DCP says, as arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from converters.pickles import Node

__all__ = ["DcpMetadata", "StoredObject", "StoredTensor"]


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    """One tensor key of `state_dict_metadata` with its chunks, n of them, sorted by offset.

    Args:
        key: As stored.
        dtype: The name after `torch.`: "bfloat16".
        shape: Global shape as stored (of the flattened form, see `original_shape`).
        starts: (n, ndim) offsets of the chunks in the tensor.
        sizes: (n, ndim) shapes of the chunks.
        file: (n,) index into `DcpMetadata.files`; -1 if `storage_data` has no record for the chunk.
        offset: (n,) first byte of the record in its file.
        length: (n,) bytes of the record, its zip container included.
        original_shape: Shape before Megatron-Core 0.8-0.15 flattened the blocks
            (`nd_reformulated_orig_global_shape`); None for an ordinary tensor.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    file: NDArray[np.int32]
    offset: NDArray[np.int64]
    length: NDArray[np.int64]
    original_shape: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One non-tensor key.

    Args:
        key: As stored: `rng_state/shard_0.0_2.2`.
        file: Index into `DcpMetadata.files`; -1 if `storage_data` has no record for it.
        offset: First byte of the record in its file.
        length: Bytes of the record.
    """

    key: str
    file: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True, eq=False)
class DcpMetadata:
    """What `.metadata` says, with nothing checked against the files it names.

    Args:
        files: Every `relative_path`, sorted; each is a bare file name.
        tensors: By key, in the order of `state_dict_metadata`.
        objects: By key, likewise.
        stray: `storage_data` entries that belong to no known key or chunk, in words.
        top_class: Full name of the outermost class.
        attributes: The other attributes (`version`, `storage_meta`), inert.
        planner_data: As stored, inert; None if absent or None.
        plans: Number of `all_local_plans`; None if there are none, -1 if they are there but were not read.
        has_mcore_data: Whether Megatron-Core 0.8-0.15 wrote it.
    """

    files: list[str]
    tensors: dict[str, StoredTensor]
    objects: dict[str, StoredObject]
    stray: list[str]
    top_class: str
    attributes: dict[str, Node]
    planner_data: Node
    plans: int | None
    has_mcore_data: bool
