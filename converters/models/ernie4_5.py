"""ERNIE 4.5, the dense ones: Llama with a rotary embedding of neighbouring elements."""

from __future__ import annotations

from converters.models import config
from converters.models.llama import LlamaModel
from converters.models.model import UNSET

MODEL = LlamaModel(
    name="ernie4_5",
    architecture="Ernie4_5ForCausalLM",
    needs={**config.LLAMA, **config.DENSE, **config.NO_BIAS, "rotary_interleaved": (True,), "rope_scaling": (UNSET,)},
    settings=lambda args: {**config.rms_llama(args), "use_bias": False},
)
