"""How many rows of an embedding are real, and how many it has at another layout: it is padded for the ranks. No I/O."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from converters.box import Box
from converters.errors import RequestError
from converters.megatron.split import padded_vocab
from converters.megatron.tensor_axes import VOCABULARY
from converters.model_parts import LANGUAGE, language_name
from converters.names import parameter_of
from converters.planning.plan import Drop

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Mapping

    from converters.catalog import Catalog, TensorInfo

EMBEDDING = "embedding.word_embeddings.weight"
"""The word embedding, by its name within the language model."""


def is_vocabulary(name: str) -> bool:
    """Whether the rows of a tensor are the padded vocabulary, by its canonical name."""
    return language_name(name) in VOCABULARY


def is_embedding(name: str) -> bool:
    """Whether a canonical name is that of the word embedding."""
    return language_name(name) == EMBEDDING


def embedding_name(names: Container[str]) -> str | None:
    """Which of some canonical names is that of the word embedding."""
    return next((name for name in (EMBEDDING, LANGUAGE + EMBEDDING) if name in names), None)


def padding_rows(sources: Mapping[str, TensorInfo], rows: Callable[[str, TensorInfo], int]) -> Iterator[Drop]:
    """What of the vocabulary the source has and the target does not: padding.

    Args:
        sources: Stored tensors and states of an optimizer.
        rows: Rows in the target of a parameter, by its name and the source.
    """
    for source, info in sources.items():
        name = parameter_of(source)
        if info.shape and is_vocabulary(name) and (target_rows := rows(name, info)) < info.shape[0]:
            yield Drop(source, Box.rows(info.shape, target_rows), "padding rows of the vocabulary")


def real_rows(stated: int, stored: int, tp: int, args: Mapping[str, Any]) -> tuple[int | None, str]:
    """Rows of the vocabulary that are not padding, and what a person should know of that; None if nothing says.

    Megatron-LM pads the tokenizer's size, which is not always --vocab-size. Of a NullTokenizer that is the size without
    the token that ends a document, until core 0.18 took it for the whole size; TikToken cuts its vocabulary to it; all
    other tokenizers have a size of their own and do not look at it (training/tokenizer/tokenizer.py, core_v0.6.0 to
    core_v0.16.1; core/tokenizers/utils/build_tokenizer.py, core_v0.17.0 and later).

    Args:
        stated: --vocab-size.
        stored: Rows of the embedding.
        tp: Tensor-parallel size of the job that saved.
        args: Its arguments.
    """
    tokenizer, divisible = args.get("tokenizer_type"), args.get("make_vocab_size_divisible_by")
    if not isinstance(tokenizer, str) or not isinstance(divisible, int) or divisible < 1 or tp < 1:
        return stated, ""
    fits = padded_vocab(stated, divisible, tp) == stored
    if _adds_one(args):
        # where both would fit, nobody knows whether the job had the tokenizer or a --padded-vocab-size: `end_of_documents`
        if padded_vocab(stated + 1, divisible, tp) == stored and not fits:
            return stated + 1, f"row {stated} of the vocabulary ends documents: {tokenizer} adds it to --vocab-size"
        return stated, ""
    if tokenizer in ("NullTokenizer", "TikTokenizer") or fits or stated >= stored:
        return stated, ""
    return None, (
        f"the argument vocab_size {stated} is not what the embedding's {stored} rows were padded from, and a {tokenizer} "
        "ignores it"
    )


def _adds_one(args: Mapping[str, Any]) -> bool:
    """Whether the tokenizer's size is --vocab-size and one token more, which ends documents."""
    tokenizer = args.get("tokenizer_type")
    old = tokenizer == "NullTokenizer" and "null_tokenizer_eod_id" not in args  # an argument of 0.18 and later
    return old or tokenizer == "NullMultimodalTokenizer"


def end_of_documents(drops: Iterable[Drop], args: Mapping[str, Any]) -> tuple[str, ...]:
    """A note, if what is left out as padding may be a token that a job was trained with.

    Args:
        drops: What is left out of a checkpoint.
        args: The arguments of the job that saved it.
    """
    row = args.get("vocab_size")
    if not isinstance(row, int) or not _adds_one(args):
        return ()
    boxes = (drop.box for drop in drops if is_vocabulary(drop.source) and drop.box is not None)
    if not any(box.start[0] <= row < box.stop[0] for box in boxes):
        return ()
    return (
        f"row {row} of the embedding is left out as padding; if {args['tokenizer_type']} "
        f"used it to end documents, keep it with --vocab-size {row + 1}",
    )


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
