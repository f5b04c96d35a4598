"""How many rows the embedding has at another layout: the vocabulary is padded for the tensor-parallel ranks. No I/O."""

from __future__ import annotations

from typing import TYPE_CHECKING

from converters.box import Box
from converters.errors import RequestError
from converters.megatron.split import padded_vocab
from converters.model_parts import LANGUAGE, language_name
from converters.names import parameter_of
from converters.planning.plan import Drop

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Mapping

    from converters.catalog import Catalog, TensorInfo

__all__ = ["embedding_name", "is_embedding", "is_vocabulary", "padding_rows", "vocabulary_rows"]

_EMBEDDING = "embedding.word_embeddings.weight"
_VOCABULARY = frozenset(
    {
        *(_EMBEDDING, "output_layer.weight", "output_layer.bias"),
        *("lm_head.output_layer.weight", "lm_head.output_layer.bias"),
    }
)


def is_vocabulary(name: str) -> bool:
    """Whether the rows of a tensor are the padded vocabulary, by its canonical name."""
    return language_name(name) in _VOCABULARY


def is_embedding(name: str) -> bool:
    """Whether a canonical name is that of the word embedding."""
    return language_name(name) == _EMBEDDING


def embedding_name(names: Container[str]) -> str | None:
    """Which of some canonical names is that of the word embedding."""
    return next((name for name in (_EMBEDDING, LANGUAGE + _EMBEDDING) if name in names), None)


def padding_rows(sources: Mapping[str, TensorInfo], rows: Callable[[str, TensorInfo], int]) -> Iterator[Drop]:
    """What of the vocabulary the source has and the target does not: padding.

    Args:
        sources: Stored tensors and states of an optimizer.
        rows: Rows in the target of a parameter, by its name and the source.
    """
    for source, info in sources.items():
        name = parameter_of(source)
        if info.shape and is_vocabulary(name) and (kept := rows(name, info)) < info.shape[0]:
            yield Drop(source, Box.rows(info.shape, kept), "padding rows of the vocabulary")


def vocabulary_rows(
    name: str, stored: int, tp: int, catalog: Catalog, stated: int | None, requested: int | None = None
) -> int:
    """Rows in a job of a tensor that `is_vocabulary`.

    Args:
        stored: Its rows in the checkpoint.
        catalog: The source; its arguments, or the model's configuration, say how the job pads.
        stated: True vocabulary size, as far as the arguments tell.
        requested: What a person says it is.

    Raises:
        RequestError: What is asked or known cannot be the size of this vocabulary.
    """
    if requested is not None and not 0 < requested <= stored:
        raise RequestError(f"--vocab-size {requested} is not possible: {name} has {stored} rows", tensor=name)
    if requested is not None and stated is not None and requested < stated:
        raise RequestError(
            f"--vocab-size {requested} would cut trained rows: the vocabulary of {name} has {stated}", tensor=name
        )
    true = stated if requested is None else requested
    divisible = catalog.options.get("make_vocab_size_divisible_by", 128)
    if not isinstance(divisible, int) or divisible < 1:
        raise RequestError(f"the argument make_vocab_size_divisible_by is {divisible!r}, not a positive number")
    # it is not known how many rows are padding, or Megatron-Bridge pads nothing (GPTModelProvider): keep them all, and pad
    # further if tp asks for it
    if true is None or (true == stored and catalog.options.get("should_pad_vocab") is False):
        return -(-stored // tp) * tp
    if not 0 < true <= stored:
        raise RequestError(f"the arguments give a vocabulary of {true}, but {name} has {stored} rows", tensor=name)
    return padded_vocab(true, divisible, tp)
