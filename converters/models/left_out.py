"""Families that neither Megatron-LM nor Megatron-Bridge builds, or whose config.json nothing reads, each with the reason.

Sources: Megatron-LM core_v0.19.0 and d98e8a64dd of 2026-08-22, megatron/training/arguments.py and
core/transformer/transformer_config.py; Megatron-Bridge 067f987d, models/.
"""

from __future__ import annotations

_AFTER = "Megatron-LM has no argument for norms behind attention and MLP"
_WIDE = "norms over all heads of queries and keys"
_BESIDE = "Megatron-LM has no argument for attention beside the MLP and for scaled logits"
_NO_BRIDGE = "Megatron-Bridge does not build it"
_CODE = "transformers has no class for its config.json, and code beside a model is never run"

LEFT_OUT: dict[str, str] = {
    "glm4": f"{_AFTER}; {_NO_BRIDGE}",
    "olmo": f"Megatron-LM has no norm without weights; {_NO_BRIDGE}",
    "olmo2": f"{_AFTER} and for {_WIDE}; {_NO_BRIDGE}",
    "olmo3": f"{_AFTER} and for {_WIDE}; {_NO_BRIDGE}",
    "apertus": f"Megatron-LM has no argument for its activation, xIELU; {_NO_BRIDGE}",
    "cohere": f"{_BESIDE}; {_NO_BRIDGE}",
    "cohere2": f"{_BESIDE}; {_NO_BRIDGE}",
    "llama4_text": f"Megatron-LM has no argument for attention in chunks and for its temperature; {_NO_BRIDGE}",
    "phimoe": (
        f"Megatron-LM has no argument for its routing (sparsemixer) and for a bias of the output layer; {_NO_BRIDGE}"
    ),
    "ernie4_5_moe": (
        "Megatron-LM adds a router bias to sigmoid (and sqrtsoftplus) scores only, this model to softmax probabilities; "
        "Megatron-Bridge (ernie_45_bridge.py) trains it with sigmoid scores, which gives other logits"
    ),
    "mimo_v2_flash": (
        "Megatron-LM has no argument for values of another size than keys outside of latent attention; "
        "Megatron-Bridge builds it with layers of its own (modeling_mimo_v2_flash.py), which are not mapped here"
    ),
    "bailing_moe": f"{_CODE}; its second generation is imported (bailing_moe_v2)",
}
"""`model_type` -> why it is not imported, as the end of a sentence."""
