"""A Hugging Face folder as Megatron's tensors: the tables read backwards.

The table is asked with Megatron's tensors that would be there, if config.json is right, as TransformerEngine's layers name
them; every copy that it emits, reversed, says which elements of Hugging Face's tensors they consist of.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from converters.errors import IntegrityError, RequestError
from converters.megatron.vocabulary import EMBEDDING
from converters.models.described import COMPUTED, HEADS, Described, own_names
from converters.models.export import emit_all
from converters.models.predictions import keeps_predictions, prediction_tensors, without_predictions
from converters.names import fold, printable
from converters.planning.plan import Drop, Op, Target, pieces_of, prove, reversed_copy
from converters.words import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from converters.catalog import TensorInfo
    from converters.megatron.model_args import ModelArgs
    from converters.models.model import Model
    from converters.planning.plan import Copy

# DeepSeek's own files hold the embedding and the output layer once more for every prediction layer
_SHARED = re.compile(r".*\.(?:embed_tokens|shared_head\.head)\.weight")


@dataclass(frozen=True)
class MegatronMapping:
    """What an import makes.

    Attributes:
        targets: Megatron's tensors by canonical name, without padding, in the order of the model.
        copies: Which elements of Hugging Face's tensors each consists of; proved to be everything.
        drops: What is left out of them, and why.
        args: Facts of the model, without the prediction layers if those are left out.
        notes: What a person should know, as sentences.
        matrices: Shapes of Hugging Face's tensors that the copies refer to, where these are not their own.
    """

    targets: dict[str, Target]
    copies: list[Copy]
    drops: list[Drop]
    args: ModelArgs
    notes: list[str]
    matrices: dict[str, tuple[int, ...]]


def map_from_hf(
    model: Model, args: ModelArgs, tensors: Mapping[str, TensorInfo], *, mtp: str = "auto"
) -> MegatronMapping:
    """Maps the tensors of a folder.

    Args:
        model: The table of its architecture.
        args: What its config.json states.
        tensors: What it holds.
        mtp: Multi-token prediction layers: "keep", "drop", or "auto": keep where the folder holds them.

    Raises:
        RequestError: The model of config.json lacks a tensor, or gives it another shape.
        IntegrityError: A tensor that config.json needs is missing.
    """
    names = own_names(model, tensors)
    present = {expected: tensors[name] for expected, name in names.items()}
    behind = prediction_tensors(model, args, present)
    keep = keeps_predictions(args, model, mtp) and (mtp == "keep" or bool(behind))
    notes = []
    if args.mtp_num_layers and not keep:
        why = "are left out" if behind else "are not in the folder; transformers leaves them out when it saves"
        notes.append(f"{args.mtp_num_layers} multi-token prediction layers {why}; the logits do not depend on them")
    imported = args if keep else without_predictions(args)
    out = Described(imported, {}, imported.vocab_size or 0)
    emit_all(out, model, imported.mtp_num_layers or 0)
    _check(out, present, tied=bool(imported.tied_embeddings))
    kinds = _types(out.copies, present)
    targets = {name: Target(name, kinds[name].dtype, shape) for name, shape in out.canonical.items()}
    copies = [reversed_copy(replace(copy, target=names[copy.target])) for copy in out.copies]
    drops = list(_dropped(model, imported, present, names, set(out.targets), behind if not keep else ()))
    shifted = sum(copy.op is Op.SUBTRACT_ONE for copy in copies)
    if shifted:
        notes.append(
            f"{shifted} norm weights are gamma in the folder and gamma - 1 in Megatron: what a type cannot hold of that is "
            "rounded (nothing, for a gamma from 0.5 to 2)"
        )
    matrices = {names[name]: t.matrix for name, t in out.targets.items() if t.matrix is not None}
    stored = {info.name: matrices.get(info.name, info.shape) for info in present.values()}
    prove(pieces_of(targets, copies).values(), stored, drops)
    return MegatronMapping(targets, copies, drops, imported, notes, matrices)


def _check(out: Described, present: Mapping[str, TensorInfo], *, tied: bool) -> None:
    missing = [name for name in out.targets if name not in present]
    head = next((name for name in HEADS if name in present), None)
    embedding = next(copy.target for copy in out.copies if copy.source == EMBEDDING)
    if tied and head and embedding in missing:
        raise RequestError(
            f"config.json ties {head} to {embedding}, but the folder stores only the former",
            hint=f"store it as {embedding}, as transformers does: load the model and save it once more",
            tensor=embedding,
        )
    if missing:
        raise IntegrityError(
            f"the folder lacks {counted(len(missing), 'tensor')} that config.json needs",
            details=[printable(text) for text, _ in fold(missing)][:8],
            hint="was a file left out when it was copied, or is config.json of another model? distckpt verify says more",
            tensor=missing[0],
        )
    wrong = [
        f"{printable(name)} is {list(present[name].shape)}, by config.json {list(target.shape)}"
        for name, target in out.targets.items()
        if present[name].shape != target.shape
    ]
    if wrong:
        raise RequestError(
            f"config.json does not fit the tensors: {wrong[0]}",
            details=wrong[1:8],
            hint="distckpt verify says which of its numbers would",
        )


def _types(copies: Iterable[Copy], present: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """A Hugging Face tensor of the type of each of Megatron's, which consists of tensors of one type."""
    kinds: dict[str, TensorInfo] = {}
    for copy in copies:
        first, tensor = kinds.setdefault(copy.source, present[copy.target]), present[copy.target]
        if first.dtype != tensor.dtype:
            raise RequestError(
                f"{printable(first.name)} is {first.dtype} and {printable(tensor.name)} is {tensor.dtype}, but "
                f"Megatron keeps both in {copy.source}",
                hint="save the model once more in one type",
                tensor=first.name,
            )
        if not first.dtype.floating or first.dtype.itemsize < 2:
            raise RequestError(
                f"{printable(first.name)} is {first.dtype}: quantized weights are not imported",
                hint="save the model once more in bf16",
                tensor=first.name,
            )
    return kinds


def _dropped(
    model: Model,
    args: ModelArgs,
    present: Mapping[str, TensorInfo],
    names: Mapping[str, str],
    used: set[str],
    behind: Iterable[str],
) -> Iterable[Drop]:
    predictions = set(behind)
    unknown = []
    for name in present:
        if name in used:
            continue
        if name in predictions:
            yield Drop(names[name], None, "multi-token prediction layers are not imported")
        elif name.endswith(COMPUTED):
            yield Drop(names[name], None, "computed when the model is built")
        elif name in HEADS and args.tied_embeddings:
            yield Drop(names[name], None, "config.json ties it to the embedding")
        elif _SHARED.fullmatch(name) and args.mtp_num_layers:
            yield Drop(names[name], None, "prediction layers share the model's own")
        else:
            unknown.append(name)
    if unknown:
        counts = Counter(name.rpartition(".")[2] for name in unknown)
        hint = "quantized weights have scales beside them; they are not imported" if _scaled(counts) else None
        raise RequestError(
            f"{counted(len(unknown), 'tensor', verb='has/have')} no place in what config.json describes",
            details=[printable(text) for text, _ in fold(unknown)][:8],
            hint=hint or "is config.json of another model? distckpt verify compares them",
            tensor=unknown[0],
        )


def _scaled(leaves: Mapping[str, int]) -> bool:
    return any(mark in leaf for leaf in leaves for mark in ("scale", "zeros", "zero_point", "absmax"))
