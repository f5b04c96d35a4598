"""The language model of a model of text and images: its configuration, and its tensors under the names of a model of text.

    config.json   text_config {...}, vision_config {...}           ->  the config.json of a llama, a qwen2, ...
    language_model.model.layers.0.*, language_model.lm_head.*      ->  model.layers.0.*, lm_head.*       LLaVA, Mistral 3
    model.language_model.layers.0.*, lm_head.*                     ->  the same                          Qwen3-VL
    model.layers.0.*, lm_head.*                                    ->  the same                          Qwen2-VL, Qwen2.5-VL
    vision_tower.*, multi_modal_projector.*, visual.*              ->  left out

Of text alone it computes what that model computes: the three positions of multimodal rotary embeddings are then the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from converters.errors import RequestError
from converters.models.quantized import KEY as QUANTIZATION
from converters.names import fold, printable
from converters.transformers_config import completed

if TYPE_CHECKING:
    from converters.catalog import TensorInfo

_SAME = {"qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}
"""`model_type` of a language model that has a class of its own for its positions alone -> the family that it is."""
_STARTS = (
    ("language_model.model.", "language_model.lm_head."),
    ("model.language_model.", "lm_head."),
    ("model.text_model.", "lm_head."),
    ("model.", "lm_head."),
)
_OTHERS = ("vision_tower", "vision_model", "visual", "multi_modal_projector", "connector", "image_newline")


@dataclass(frozen=True)
class TextPart:
    """A language model within another.

    Attributes:
        kind: `model_type` of the whole.
        config: The language model's configuration.
        tensors: Its tensors, under the names that they have in a model of text.
        other_parts: Names of the tensors of the other parts.
    """

    kind: str
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    other_parts: list[str]


def has_text_part(config: Mapping[str, Any]) -> bool:
    """Whether a config.json describes a model of text and something else."""
    return isinstance(config.get("vision_config"), Mapping) or isinstance(config.get("text_config"), Mapping)


def text_part(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> TextPart:
    """Takes the language model out of a model.

    Args:
        config: Content of config.json.
        tensors: Those of the folder.

    Raises:
        FormatError: transformers does not take the configuration.
        RequestError: The parts cannot be told apart.
    """
    kind = str(config.get("model_type"))
    completed_config = completed(kind, config)
    text = completed_config.get("text_config")
    if not isinstance(text, Mapping) or not isinstance(text.get("model_type"), str):
        raise RequestError(f"a {printable(kind)} has no text_config that describes its language model")
    text_tensors, other_parts = _split_tensors(kind, tensors)
    family = _SAME.get(text["model_type"], text["model_type"])
    out = {key: _plain(value) if key in ("rope_parameters", "rope_scaling") else value for key, value in text.items()}
    # the class of the whole decides about tying; where lm_head is stored beside another embedding, it does not tie
    tied = completed_config.get("tie_word_embeddings") is True and "lm_head.weight" not in text_tensors
    out |= {"model_type": family, "tie_word_embeddings": tied}
    out |= {key: config[key] for key in (QUANTIZATION, "dtype", "torch_dtype") if config.get(key) is not None}
    return TextPart(kind, out, text_tensors, other_parts)


def _plain(rope: Any) -> Any:
    """Parameters of rotary embeddings of which all three positions are the same."""
    if not isinstance(rope, Mapping):
        return rope
    out = {key: value for key, value in rope.items() if key not in ("mrope_section", "mrope_interleaved")}
    return out | {key: "default" for key in ("type", "rope_type") if out.get(key) == "mrope"}


def _split_tensors(kind: str, tensors: Mapping[str, TensorInfo]) -> tuple[dict[str, TensorInfo], list[str]]:
    other_parts = [name for name in tensors if name.removeprefix("model.").startswith(_OTHERS)]
    left = [name for name in tensors if not name.removeprefix("model.").startswith(_OTHERS)]
    body, head = next((starts for starts in _STARTS if any(n.startswith(starts[0]) for n in left)), _STARTS[-1])
    text_tensors: dict[str, TensorInfo] = {}
    unknown: list[str] = []
    for name in left:
        if name.startswith((body, head)):
            plain = (
                f"model.{name.removeprefix(body)}" if name.startswith(body) else f"lm_head.{name.removeprefix(head)}"
            )
            text_tensors[plain] = replace(tensors[name], name=plain)
        else:
            unknown.append(name)
    if unknown:
        raise RequestError(
            f"{len(unknown)} tensors of this {printable(kind)} are neither of its language model nor of a known part",
            details=[printable(text) for text, _ in fold(unknown)][:8],
            tensor=unknown[0],
        )
    return text_tensors, other_parts
