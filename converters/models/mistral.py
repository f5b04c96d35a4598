"""Mistral: Llama with a sliding window and without biases."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from converters.models import config
from converters.models.llama import LlamaModel
from converters.models.model import SET, UNSET

if TYPE_CHECKING:
    from converters.megatron.model_args import ModelArgs


def _settings(args: ModelArgs) -> dict[str, Any]:
    return {
        **config.rms_llama(args),
        "sliding_window": args.window_size,
    }


MODEL = LlamaModel(
    name="mistral",
    architecture="MistralForCausalLM",
    needs={
        **config.LLAMA,
        **config.DENSE,
        **config.NO_BIAS,
        "window_size": (SET, UNSET),
    },
    settings=_settings,
)
