"""Models that are more than one stack of layers: the parts that their names begin with, what of them is not trained.

    language_model.decoder.layers.0.mlp.linear_fc1.weight      names of a GPT behind the part's own
    vision_model.decoder.layers.0.mlp.linear_fc1.weight        a tower of Megatron's layers
    vision_projection.encoder.linear_fc1.weight                an MLP
    visual.blocks.0.attn.qkv.weight                            a module of Hugging Face's, whole on every rank

Facts: Megatron-Core 0.16.1, models/multimodal/llava_model.py, models/vision/clip_vit_model.py,
models/vision/multimodal_projector.py, models/T5/t5_model.py; Megatron-Bridge 067f987d, the mappings of
models/*_vl/*_bridge.py (`ReplicatedMapping`).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

LANGUAGE = "language_model."
"""The part that is divided into pipeline stages and that the training arguments describe."""

REPLICATED = frozenset(
    {
        *("visual.", "vision_tower.", "multi_modal_projector.", "mm_projector."),
        *("audio_tower.", "embed_vision.", "embed_audio."),
    }
)
"""Parts that Megatron-Bridge takes from Hugging Face as they are: every rank of the first stage has all of them."""

_PART = re.compile(
    rf"(?:language_model|vision_model|vision_projection|{'|'.join(p[:-1] for p in sorted(REPLICATED))})\."
)
_ADAPTER = ".adapter."  # of AdapterWrapper, Megatron-Bridge, peft/adapter_wrapper.py
# a module that T5Model registers twice has two names in a state dict; the optimizer's state has the latter
_SECOND = {
    "embedding.position_embeddings.weight": "position_embeddings.weight",
    "lm_head.output_layer.weight": "output_layer.weight",
    "lm_head.output_layer.bias": "output_layer.bias",
}


def split_part(name: str) -> tuple[str, str]:
    """`("vision_model.", "decoder.layers.0...")`: the part that a canonical name begins with, "" for none, and the rest."""
    match = _PART.match(name)
    return ("", name) if match is None else (match[0], name[match.end() :])


def language_name(name: str) -> str | None:
    """The name of a parameter of the language model within it; None for one of another part."""
    part, inner = split_part(name)
    return inner if part in ("", LANGUAGE) else None


def model_parts(names: Iterable[str]) -> tuple[str, ...]:
    """The parts of a model, in the order in which they come first; empty for a model of one."""
    return tuple(dict.fromkeys(part for name in names if (part := split_part(name)[0])))


def untrained(names: Collection[str]) -> frozenset[str]:
    """Weights that the optimizer has no state for: second names, and what is frozen where adapters are trained."""
    adapters = any(_ADAPTER in name for name in names)
    return frozenset(second_names(names)).union(name for name in names if adapters and _ADAPTER not in name)


def second_names(names: Collection[str]) -> dict[str, str]:
    """Names whose parameter has another name, too, under which the optimizer's state is kept: second name -> that one."""
    return {name: state_name for name, state_name in _SECOND.items() if name in names and state_name in names}
