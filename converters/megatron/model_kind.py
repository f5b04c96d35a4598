"""What a model is that is no single stack of decoder layers: said by its tensors, not by its arguments.

Cross attention marks a T5, encoder layers alone a BERT; a LLaVA names its parts (`converters.model_parts`).
Adapters (LoRA) lie beside the weights that they change.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from converters.errors import RequestError
from converters.model_parts import LANGUAGE, model_parts, split_part
from converters.words import counted

if TYPE_CHECKING:
    from converters.catalog import Catalog, TensorInfo

_LAYER = re.compile(r"(decoder|encoder)\.layers\.(\d+)\.")
_ADAPTER = re.compile(r"\.layers\.\d+\.(?:.*\.)?(\w+)\.adapter\.(\w+)")
_IN = ".adapter.linear_in.weight"


@dataclass(frozen=True, slots=True)
class ModelKind:
    """What a model is beside, or instead of, a decoder.

    Attributes:
        name: "T5", "BERT", "LLaVA", "model of several parts", or "" for a decoder.
        details: What it consists of: "encoder of 12 layers, decoder of 12 layers".
        adapters: "LoRA of rank 8 on linear_proj, linear_qkv"; "" without.
    """

    name: str = ""
    details: str = ""
    adapters: str = ""


def model_kind(catalog: Catalog) -> ModelKind:
    """What a model with Megatron's names is."""
    if not catalog.megatron:
        return ModelKind()
    layers: Counter[str] = Counter()
    for name in catalog.weights:
        part, inner = split_part(name)
        if (match := _LAYER.match(inner)) is not None:
            layers[part + match[1]] = max(layers[part + match[1]], int(match[2]) + 1)
    adapters, parts = _adapters(catalog.weights), model_parts(catalog.weights)
    if set(parts) - {LANGUAGE}:
        llava = {LANGUAGE, "vision_model.", "vision_projection."} == set(parts)
        details = " + ".join(_part(part, layers, catalog) for part in parts)
        return ModelKind("LLaVA" if llava else "model of several parts", details, adapters)
    stacks = {name.removeprefix(LANGUAGE): n for name, n in layers.items()}
    text = ", ".join(f"{name} of {_layers(n)}" for name, n in sorted(stacks.items(), reverse=True))
    if any(".cross_attention." in name for name in catalog.weights):
        return ModelKind("T5", text, adapters)
    if "encoder" in stacks and "decoder" not in stacks:
        return ModelKind("BERT", "", adapters)
    return ModelKind("encoder and decoder" if len(stacks) > 1 else "", text if len(stacks) > 1 else "", adapters)


def refuse_kind(catalog: Catalog) -> None:
    """Hugging Face's tables are of single decoders: nothing of another model is left out in silence.

    Raises:
        RequestError: The model is another one, or has adapters.
    """
    kind = model_kind(catalog)
    if kind.name:
        raise RequestError(
            f"the model is a {kind.name}{f' ({kind.details})' if kind.details else ''}, "
            "for which no Hugging Face architecture is known",
            hint="convert --to safetensors or --to torch keeps all of it under Megatron's names",
        )
    if kind.adapters:
        raise RequestError(
            f"the model has adapters ({kind.adapters}), which are not merged into its weights",
            hint="export-hf --merge-adapter merges them, --peft writes them alone; "
            "convert --to safetensors keeps both under Megatron's names",
        )


def _part(part: str, layers: Counter[str], catalog: Catalog) -> str:
    if part == LANGUAGE:
        return "language model"
    if part == "vision_projection.":
        return "projection"
    if part != "vision_model.":
        return f"{part[:-1]} (Hugging Face's own)"  # the rest of the parts are `REPLICATED`
    standard_vision = "vision_model.class_token" in catalog.weights and "vision_model.conv1.weight" in catalog.weights
    return f"vision tower ({'CLIP, ' if standard_vision else ''}{_layers(layers[f'{part}decoder'])})"


def _layers(count: int) -> str:
    return counted(count, "layer")


def _adapters(weights: dict[str, TensorInfo]) -> str:
    """Adapters in words: their rank, and the linear layers that have one."""
    bases = sorted({match[1] for name in weights if (match := _ADAPTER.search(name)) is not None})
    if not bases:
        return ""
    ranks = sorted({t.shape[0] for name, t in weights.items() if name.endswith(_IN) and t.shape})
    matrices = {match[2] for name in weights if (match := _ADAPTER.search(name)) is not None}
    kind = "LoRA" if matrices <= {"linear_in", "linear_out"} else "adapters"
    return f"{kind} of rank {', '.join(map(str, ranks)) or '?'} on {', '.join(bases)}"
