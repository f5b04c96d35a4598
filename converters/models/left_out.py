"""Families that Megatron-LM's arguments cannot express, or whose config.json nothing reads, each with the reason.

Megatron-Bridge trains some of them with layers of its own, which no script of Megatron-LM builds.
"""

from __future__ import annotations

__all__ = ["LEFT_OUT"]

_GEMMA = "Megatron-LM has no argument for its gated tanh GELU and for embeddings scaled by the root of hidden_size"
_AFTER = "Megatron-LM has no argument for norms behind attention and MLP"
_WIDE_NORMS = "Megatron-LM norms each head, this model all heads at once (q_norm, k_norm)"
_CODE = "transformers has no class for its config.json, and code beside a model is never run"

LEFT_OUT: dict[str, str] = {
    "gemma": _GEMMA,
    "gemma2": f"{_GEMMA}, nor for capped logits and norms behind attention and MLP",
    "gemma3_text": f"{_GEMMA}, nor for two rotary bases and norms behind attention and MLP",
    "gemma3": f"{_GEMMA}, nor for two rotary bases and norms behind attention and MLP",
    "glm4": _AFTER,
    "olmo": "Megatron-LM has no norm without weights",
    "olmo2": f"{_AFTER}, without any before them",
    "olmo3": f"{_AFTER}, without any before them",
    "olmoe": _WIDE_NORMS,
    "minimax_m2": _WIDE_NORMS,
    "exaone4": f"{_AFTER}, without any before them",
    "apertus": "Megatron-LM has no argument for its activation, xIELU",
    "cohere": "Megatron-LM has no argument for attention beside the MLP and for scaled logits",
    "cohere2": "Megatron-LM has no argument for attention beside the MLP and for scaled logits",
    "falcon_h1": "Megatron-LM has no layer with attention beside Mamba, and none of its multipliers",
    "llama4_text": "Megatron-LM has no argument for attention in chunks and for its temperature",
    "phimoe": "Megatron-LM has no argument for its routing (sparsemixer) and for a bias of the output layer",
    "ernie4_5_moe": "Megatron-LM adds a router bias to sigmoid scores only, this model to softmax probabilities",
    "mimo_v2_flash": "Megatron-LM has no argument for values of another size than keys outside of latent attention",
    "bailing_moe_v2": _CODE,
    "bailing_moe": _CODE,
    "nemotron-nas": f"{_CODE}; its layers differ from each other",
    "deci": f"{_CODE}; its layers differ from each other",
}
"""`model_type` -> why it is not imported, as the end of a sentence."""
