"""Mistral: Llama with a sliding window and without biases."""

from __future__ import annotations

from converters.models import config
from converters.models.llama import LlamaModel
from converters.models.model import SET, UNSET

MODEL = LlamaModel(
    name="mistral",
    architecture="MistralForCausalLM",
    needs={**config.LLAMA, **config.DENSE, **config.NO_BIAS, "window_size": (SET, UNSET)},
    settings=lambda args: {**config.rms_llama(args), "sliding_window": args.window_size},
)
