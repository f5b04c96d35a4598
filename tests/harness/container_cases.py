"""What the tests of containers of whole tensors share."""

from __future__ import annotations

import numpy as np
import torch

from distckpt_cli.app import main

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
SHARDS = [f"hf_llama_safetensors/model-0000{n}-of-00002.safetensors" for n in (1, 2)]


def bits(tensor):
    """A tensor's elements as unsigned integers of their size."""
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return raw.view(_UNSIGNED[tensor.itemsize]).reshape(tuple(tensor.shape))


def loaded(path):
    """What users do."""
    return torch.load(path, weights_only=True, mmap=True)


def convert(source, target, to, *options):
    """Runs `convert`; returns what it wrote."""
    assert main(["convert", str(source), str(target), "--to", to, *options, "--progress", "off"]) == 0
    return target
