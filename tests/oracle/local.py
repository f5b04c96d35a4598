"""What each rank's state dict holds once the real megatron-core has loaded whole tensors into it.

`python -m oracle.local FOLDER < jobs`: jobs as `oracle.ranks` takes them. A whole tensor has the values `values` gives for
its key in a per-layer checkpoint. FOLDER/NUMBER-RANK-CHUNK.npz is the answer: name -> what is in memory;
FOLDER/NUMBER.json has the keys with their shapes.
"""

import json
import sys
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, extract_matching_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    apply_factories,
    apply_factory_merges,
)
from megatron.core.transformer.moe import experts

from oracle import ranks  # redirects devices before megatron is imported

experts.gg = SimpleNamespace(assert_grouped_gemm_is_available=lambda: None)  # GroupedMLP computes nothing here


def values(key, shape):
    """Whole numbers that fp32 holds exactly, other ones for each tensor."""
    first = zlib.crc32(key.encode()) % (1 << 23)
    return np.arange(first, first + np.prod(shape, dtype=int)).astype(np.float32).reshape(shape)


def loaded(sharded, shapes):
    """The state dict that dist_checkpointing.load makes, with tensors cut from whole ones."""
    factories, _ = extract_matching_values(
        sharded, lambda item: isinstance(item, ShardedTensorFactory), return_lists_as_dicts=True
    )
    apply_factories(sharded)

    def cut(item):
        if isinstance(item, ShardedTensor):
            depth = item.prepend_axis_num
            box = tuple(slice(a, a + 1) for a in item.global_offset[:depth])
            box += tuple(slice(a, a + n) for a, n in zip(item.global_offset[depth:], item.local_shape, strict=True))
            shapes[item.key] = item.global_shape
            return torch.from_numpy(values(item.key, item.global_shape)[box].reshape(item.local_shape).copy())
        return None if isinstance(item, ShardedObject) else item

    dict_list_map_inplace(cut, sharded)
    return apply_factory_merges(sharded, factories)


def main(folder):
    for number, job in enumerate(json.load(sys.stdin)):
        shapes = {}
        for rank in range(job["world"]):
            with ranks.standing_as(job, rank):
                for chunk, (model, sharded) in enumerate(ranks.chunks(job)):
                    for parameter in model.parameters():
                        parameter.data.fill_(float("nan"))
                    model.load_state_dict(loaded(sharded, shapes), strict=False)
                    held = {k: v.numpy() for k, v in model.state_dict().items() if torch.is_tensor(v)}
                    np.savez(folder / f"{number}-{rank}-{chunk}.npz", **held)
        (folder / f"{number}.json").write_text(json.dumps(shapes))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
