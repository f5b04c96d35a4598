"""Which pipeline stage holds which part of a model. No I/O.

A job with `pp` pipeline ranks and `vpp` model chunks on each has pp * vpp stages, run through in the order chunk-major:
all ranks' chunk 0, then all ranks' chunk 1, ... Layers are dealt out in that order. 8 layers, pp 2, vpp 2:

    stage         0        1        2        3
    pp rank 0   [0 1]             [4 5]                 embedding on stage 0
    pp rank 1            [2 3]             [6 7]        final norm, output layer and MTP on stage 3
    vp chunk      0        0        1        1

Facts: Megatron-Core 0.16.1, transformer/transformer_block.py, transformer/transformer_layer.py,
transformer/transformer_config.py (__post_init__), transformer/pipeline_parallel_layer_layout.py,
models/gpt/gpt_model.py, transformer/multi_token_prediction.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

from converters.errors import RequestError

if TYPE_CHECKING:
    from converters.layout import Layout

__all__ = ["Pipeline", "Stage", "parse_pp_layout"]


@dataclass(frozen=True, slots=True)
class Stage:
    """One model chunk of one pipeline rank.

    Attributes:
        pp: Pipeline rank.
        vp: Which of its chunks.
        layers: Numbers of its decoder layers in the whole model, consecutive, maybe none.
        has_embedding: It holds the model's embedding (not a copy).
        has_final_norm: It holds the norm behind the last decoder layer.
        has_output: It holds the output layer: its own weight, or a copy of the embedding's if they are tied.
        mtp: Numbers of its multi-token-prediction layers. With any, it has a copy of the embedding if it lacks the own.
    """

    pp: int
    vp: int
    layers: range
    has_embedding: bool
    has_final_norm: bool
    has_output: bool
    mtp: range


@dataclass(frozen=True)
class Pipeline:
    """All stages of a job, in the order in which a batch passes them."""

    stages: tuple[Stage, ...]

    @classmethod
    def of(cls, layout: Layout, num_layers: int, mtp_layers: int = 0) -> Pipeline:
        """Deals the layers out as Megatron-Core does; `Layout.pipeline` is the way to call this."""
        raise NotImplementedError

    def layer_home(self, layer: int) -> tuple[int, int, int]:
        """`(pp, vp, number within that chunk)` of a decoder layer."""
        raise NotImplementedError

    def homes(self, name: str, *, tied: bool = False) -> tuple[Stage, ...]:
        """The stages that hold a parameter, the one that saves it first.

        Args:
            name: Canonical name, without `optimizer.state.*`.
            tied: The output layer uses the embedding's weight.
        """
        raise NotImplementedError


def parse_pp_layout(text: str) -> tuple[str, ...]:
    """The stages of a `--pipeline-model-parallel-layout`, each as letters E (embedding), t (decoder), m (MTP), L (loss)."""
    raise NotImplementedError
