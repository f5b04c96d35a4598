"""The layers of `converters`, as numbers."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
# a module may import modules of its own number or a smaller one; a package stands for all that is in it
LEVELS = {
    "errors": 0,
    "keywords": 0,
    "lazy": 0,
    "words": 0,
    "box": 1,
    "chunks": 2,
    "crc": 1,
    "dtypes": 1,
    "events": 1,
    "model_parts": 1,
    "pickles": 1,
    "param_order": 1,
    "names": 2,
    "torchzip": 3,
    "transformers_config": 3,
    "catalog": 3,
    "remote": 3,
    "planning": 4,
    "models": 5,
    "megatron": 5,
    "formats": 6,
    "optimizer": 6,
    "io": 6,
    "execute": 7,
    "write": 8,
    "verification": 8,
    "overview": 8,
    "comparison": 9,
    "loading": 9,
    "commands": 9,
}
