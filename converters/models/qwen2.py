"""Qwen2 and Qwen2.5: Llama with a bias on q, k and v."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from converters.models import config
from converters.models.llama import LlamaModel

if TYPE_CHECKING:
    from converters.megatron.model_args import ModelArgs


def qwen_settings(args: ModelArgs) -> dict[str, Any]:
    """The keys that all Qwen architectures share."""
    return {
        **config.rms_llama(args),
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": args.num_layers,
    }


def _remarks(args: ModelArgs) -> list[str]:
    return ["--arch mimo has a place for its prediction layers"] if args.mtp_num_layers else []


MODEL = LlamaModel(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    needs={**config.LLAMA, **config.DENSE, "add_bias_linear": (False,), "add_qkv_bias": (True,)},
    settings=qwen_settings,
    remarks=_remarks,
)
