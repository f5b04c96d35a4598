"""Hugging Face folders as they are compared: the language model of several parts, quantized weights as numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from converters.models.text_part import has_text_part
from converters.words import counted
from converters.write.imported import dequantized_folder, text_folder

if TYPE_CHECKING:
    from converters.formats.base import Reader


def comparable(a: Reader, b: Reader) -> tuple[Reader, Reader, list[str]]:
    """Two checkpoints as they are compared, with a note of each that is seen as something else than is stored.

    Raises:
        RequestError: The weights of one are quantized by an unknown method.
        IntegrityError: Quantized weights have no scales, or not those of their shapes.
    """
    a, b, parts = _language_models(a, b)
    a, b, quantized = _dequantized(a, b)
    return a, b, parts + quantized


def _language_models(a: Reader, b: Reader) -> tuple[Reader, Reader, list[str]]:
    """A model of text and images beside one of Megatron's is compared as its language model; says so."""
    readers, notes = [a, b], list[str]()
    if {a.catalog.framework, b.catalog.framework} == {"Hugging Face"}:
        return a, b, notes
    for number, reader in enumerate(readers):
        if reader.catalog.framework == "Hugging Face" and has_text_part(reader.catalog.config):
            readers[number], part = text_folder(reader)
            count = counted(len(part.other_parts), "tensor")
            notes.append(
                f"{'AB'[number]} is a {part.kind}: its language model is compared, {count} of other parts are not"
            )
    return readers[0], readers[1], notes


def _dequantized(a: Reader, b: Reader) -> tuple[Reader, Reader, list[str]]:
    """Quantized weights beside weights that are not are compared as the numbers they stand for; says which are."""
    if all(reader.catalog.config.get("quantization_config") for reader in (a, b)):
        return a, b, []
    (seen_a, in_a), (seen_b, in_b) = dequantized_folder(a), dequantized_folder(b)
    sides = (("A", in_a), ("B", in_b))
    notes = [f"{label} is quantized ({side.method}): its weights are multiplied out" for label, side in sides if side]
    return seen_a, seen_b, notes
