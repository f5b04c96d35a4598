"""How many rows the embedding has at another layout: the vocabulary is padded for the tensor-parallel ranks. No I/O."""

from __future__ import annotations

from typing import TYPE_CHECKING

from converters.errors import RequestError
from converters.parallel.split import padded_vocab

if TYPE_CHECKING:
    from converters.catalog import Catalog

__all__ = ["VOCABULARY", "vocabulary_rows"]

VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight", "output_layer.bias")
"""Canonical names of the tensors whose rows are the padded vocabulary."""


def vocabulary_rows(
    name: str, stored: int, tp: int, catalog: Catalog, known: int | None, asked: int | None = None
) -> int:
    """Rows of one of `VOCABULARY` in a job.

    Args:
        stored: Its rows in the checkpoint.
        catalog: The source; its arguments, or the model's configuration, say how the job pads.
        known: True vocabulary size, as far as the arguments tell.
        asked: What a person says it is.

    Raises:
        RequestError: What is asked or known cannot be the size of this vocabulary.
    """
    if asked is not None and not 0 < asked <= stored:
        raise RequestError(f"--vocab-size {asked} is not possible: {name} has {stored} rows", tensor=name)
    if asked is not None and known is not None and asked < known:
        raise RequestError(
            f"--vocab-size {asked} would cut trained rows: the vocabulary of {name} has {known}", tensor=name
        )
    true = known if asked is None else asked
    divisible = catalog.options.get("make_vocab_size_divisible_by", 128)
    if not isinstance(divisible, int) or divisible < 1:
        raise RequestError(f"the argument make_vocab_size_divisible_by is {divisible!r}, not a positive number")
    # nobody knows how many rows are padding, or Megatron-Bridge pads nothing (GPTModelProvider): keep them all, and pad
    # further if tp asks for it
    if true is None or (true == stored and catalog.options.get("should_pad_vocab") is False):
        return -(-stored // tp) * tp
    if not 0 < true <= stored:
        raise RequestError(f"the arguments give a vocabulary of {true}, but {name} has {stored} rows", tensor=name)
    return padded_vocab(true, divisible, tp)
