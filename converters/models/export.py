"""A checkpoint as a Hugging Face folder: which tensors, from where, and its config.json."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from converters.errors import RequestError
from converters.megatron.model_kind import refuse_kind
from converters.megatron.vocabulary import end_of_documents
from converters.models.predictions import keeps_predictions, without_predictions
from converters.models.rules import Emit
from converters.planning.plan import Drop, pieces_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from converters.catalog import Catalog
    from converters.dtypes import DType
    from converters.megatron.model_args import ModelArgs
    from converters.models.model import Model
    from converters.models.rules import Rule
    from converters.planning.plan import Copy, Piece, Target


@dataclass(frozen=True)
class HfMapping:
    """What an export writes.

    Attributes:
        targets: The tensors, in the order of the files.
        copies: What moves; `converters.planning.plan.prove` shows that it is everything.
        drops: What is left out of the model's own tensors, and why.
        config: config.json.
        generation_config: generation_config.json.
        notes: What a person should know, as sentences.
    """

    targets: dict[str, Target]
    copies: list[Copy]
    drops: list[Drop]
    config: dict[str, Any]
    generation_config: dict[str, Any]
    notes: list[str]

    @cached_property
    def pieces(self) -> dict[str, Piece]:
        """The tensors with what fills them."""
        return pieces_of(self.targets, self.copies)


def map_to_hf(
    catalog: Catalog,
    args: ModelArgs,
    model: Model,
    *,
    dtype: DType | None = None,
    vocab_size: int | None = None,
    mtp: str = "auto",
) -> HfMapping:
    """Maps the model's own tensors; optimizer state is the caller's to drop.

    Args:
        catalog: The checkpoint.
        args: Facts of its model.
        model: The architecture to write.
        dtype: Type for the floating weights; None leaves each as stored, or master weights as the job computes with them.
            Router biases stay as they are.
        vocab_size: Rows to export; None takes what the arguments say, else all stored rows.
        mtp: Multi-token prediction layers: "keep", "drop", or "auto": keep where the architecture has a place.

    Raises:
        RequestError: The arguments contradict the tensors, the architecture cannot express the model, or a tensor that
            it needs is missing.
    """
    refuse_kind(catalog)
    wrong = args.contradictions(catalog)
    if wrong:
        raise RequestError("the checkpoint's arguments do not fit its tensors", details=wrong)
    model.requires(args)
    keep = keeps_predictions(args, model, mtp)
    vocab, notes = _vocabulary(args, vocab_size)
    add_one = bool(args.zero_centered_norm) and not model.zero_centered
    if dtype is None and (dtype := catalog.computing_type) is not None:
        notes.append(
            f"the checkpoint stores fp32 master weights; they are rounded to {dtype}, the job's compute type "
            "(export-hf --dtype fp32 keeps them)"
        )
    out = Emit(args, catalog.weights, vocab, dtype, add_one)
    emit_all(out, model, args.mtp_num_layers or 0 if keep else 0)
    if args.mtp_num_layers and not keep:
        names = [name for name in catalog.weights if name.startswith("mtp.")]
        out.drops += [Drop(name, None, "multi-token prediction layers are not exported") for name in names]
        notes.append(
            f"{args.mtp_num_layers} multi-token prediction layers are left out; the logits do not depend on them"
        )
    written = dtype.name if dtype else args.dtype or "float32"
    if add_one and written != "float32":
        notes.append(
            f"norm weights are stored as gamma - 1; gamma is rounded to {written} (--dtype fp32 rounds nothing)"
        )
    exported = args if keep else without_predictions(args)
    return HfMapping(
        targets=out.targets,
        copies=out.copies,
        drops=out.drops,
        config=model.config(exported, vocab_size=vocab, dtype=written),
        generation_config={"_from_model_config": True},  # Megatron stores nothing about sampling or special tokens
        notes=[*notes, *end_of_documents(out.drops, catalog.args), *_doubts(args), *model.remarks(args)],
    )


def emit_all(out: Emit, model: Model, mtp_layers: int) -> None:
    """Applies all rules of a model's table, with so many multi-token prediction layers behind the others."""
    for rule, source, target in applied_rules(out.args, model, mtp_layers):
        rule.emit(out, source, target)


def applied_rules(args: ModelArgs, model: Model, mtp_layers: int = 0) -> Iterator[tuple[Rule, str, str]]:
    """The rules of a model's table, once for each place: with the prefix of Megatron's names and of Hugging Face's."""
    experts = args.moe_layers or (False,) * (args.num_layers or 0)
    uneven = model.uneven(args) if model.uneven is not None else None
    for rule in model.before:
        yield rule, "", ""
    for layer, has_experts in enumerate(experts):
        source, target = f"decoder.layers.{layer}.", model.layers.format(layer // model.blocks)
        if model.hybrid:
            for rule in model.hybrid[(args.layer_pattern or "")[layer]]:
                yield rule, source, target
            continue
        mixing = model.linear if args.linear_layers and args.linear_layers[layer] else model.layer
        even = (*mixing, *(model.moe if has_experts else model.dense))
        for rule in even if uneven is None else uneven[layer]:
            yield rule, source, target
    for rule in model.after:
        yield rule, "", ""
    if model.hybrid and model.predictions and mtp_layers:
        yield from _predictions_of_hybrid(args, model, model.predictions[1], mtp_layers)
        return
    for depth in range(mtp_layers):
        source, target = f"mtp.layers.{depth}.", model.layers.format(len(experts) + depth)
        around, target = (prefix.format(depth) for prefix in model.predictions) if model.predictions else (target,) * 2
        for rule in model.mtp:
            yield rule, source, around
        inner = f"{source}transformer_layer."
        # built from the spec of the last decoder layer: multi_token_prediction.py, get_mtp_layer_spec
        for rule in (*model.layer, *(model.moe if experts[-1] else model.dense)):
            yield rule, inner, target


def _predictions_of_hybrid(args: ModelArgs, model: Model, name: str, depths: int) -> Iterator[tuple[Rule, str, str]]:
    """Each depth is a stack of layers of its own (multi_token_prediction.py, HybridStack, core_v0.19.0)."""
    symbols = args.prediction_pattern or ""
    for depth in range(depths):
        source, first = f"mtp.layers.{depth}.", depth * len(symbols)
        for rule in model.mtp:
            yield rule, source, name.format(first)
        for number, symbol in enumerate(symbols):
            for rule in model.hybrid[symbol]:
                yield rule, f"{source}mtp_model_layer.layers.{number}.", name.format(first + number)
        for rule in model.mtp_last:
            yield rule, source, name.format(first + len(symbols) - 1)


def _vocabulary(args: ModelArgs, vocab_size: int | None) -> tuple[int, list[str]]:
    padded = args.padded_vocab_size
    if padded is None:
        raise RequestError("the checkpoint has no embedding.word_embeddings.weight")
    if vocab_size is not None:
        if not 0 < vocab_size <= padded:
            raise RequestError(f"--vocab-size {vocab_size} is not possible: the embedding has {padded} rows")
        return vocab_size, []
    if args.vocab_size is not None:
        return args.vocab_size, []
    return padded, [
        f"nothing says how many of the embedding's {padded} rows are padding, so all are exported "
        f"(--vocab-size N keeps the first N)"
    ]


def _doubts(args: ModelArgs) -> list[str]:
    out = list(args.notes)
    source = args.source.get("max_position_embeddings", "")
    if source.endswith("seq_length"):
        out.append(f"max_position_embeddings {args.max_position_embeddings} is the training length: nothing says more")
    return out
