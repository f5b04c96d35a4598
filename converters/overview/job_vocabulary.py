"""Does the embedding of a job have the rows that a checkpoint stores? Megatron pads the vocabulary for its ranks.

    rows = vocabulary, rounded up to a multiple of --make-vocab-size-divisible-by x tp

Megatron's loaders of torch_dist and zarr take embedding, output layer, and optimizer state that is stored under the names of
parameters with any number of rows: what is missing is zero, what is too much is left out without a word
(`allow_shape_mismatch`, core/tensor_parallel/layers.py, core_v0.16.1). Flat buckets and legacy files must have exactly the
job's (core/optimizer/distrib_optimizer.py: `allow_shape_mismatch=False`; `load_state_dict` is strict).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from converters.errors import FormatError, RequestError
from converters.formats.folder import is_file, read_small
from converters.megatron.model_args import ModelArgs
from converters.megatron.optimizer_layout import optimizer_layout, optimizer_resharding
from converters.megatron.split import padded_vocab
from converters.megatron.vocabulary import embedding_name, vocabulary_rows
from converters.overview.job import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from converters.catalog import Catalog
    from converters.overview.job import Job

_DIVISIBLE = 128  # megatron/training/arguments.py, core_v0.16.1
_TOKENIZER_LIMIT = 1 << 28
_ANY_ROWS = ("not distributed", "fully_reshardable")


@dataclass(frozen=True)
class _Rows:
    """Rows of the job's embedding.

    Attributes:
        counts: Those it may have; more than one where versions of Megatron differ.
        reason: What says so.
    """

    counts: tuple[int, ...]
    reason: str


def vocabulary_findings(catalog: Catalog, job: Job) -> Iterator[Finding]:
    """Whether the job's embedding has rows that fit the stored one, for weights and for optimizer state."""
    name = embedding_name(catalog.weights)
    if name is None:
        return
    stored, stated = catalog.weights[name].shape[0], ModelArgs.from_catalog(catalog).vocab_size
    exact = catalog.format == "legacy"
    buckets = job.loads_optimizer and catalog.path.name != "release" and _is_in_buckets(catalog)
    tp: int = job.sizes.get("tp", 1)
    rows = _job_rows(catalog, job, tp, stored, stated)
    if rows is None:
        if exact or buckets:
            needed = "give --vocab-size and --make-vocab-size-divisible-by of the job"
            yield Finding("vocab", None, f"the stored embedding has {stored:,} rows; {needed}")
        return
    counts = " or ".join(f"{count:,}" for count in rows.counts)
    text = f"the job's embedding has {counts} rows ({rows.reason}), the stored one {stored:,}"
    if any(count % tp for count in rows.counts):
        yield Finding("vocab", False, f"{text}; tp {tp} must divide its rows", fixed=False)
        return
    if rows.counts == (stored,):
        yield Finding("vocab", True, text)
        return
    if len(rows.counts) > 1:
        either = not exact and not buckets and stated is not None and min(rows.counts) >= stated
        yield Finding("vocab", True if either else None, f"{text}: weights load with any padding" if either else text)
        return
    (wanted,) = rows.counts
    if wanted < stored and (stated is None or wanted < stated):
        words = "" if stated is None else f", {stated - wanted:,} of them of real words"
        lost = f"{text}: the last {stored - wanted:,} would be left out{words}"
        yield Finding("vocab", None if stated is None else False, lost, fixed=False)
    elif exact:
        text += ": a legacy job loads exactly its rows"
        yield Finding("vocab", False, text, fixed=_rows_after(catalog, name, stored, tp, stated) == wanted)
    else:
        effect = "the others are zero" if wanted > stored else "the padding is left out"
        yield Finding("vocab", True, f"{text}: weights load with any padding, {effect}")
    if buckets and not exact:
        layout = optimizer_layout(catalog).name
        if layout.endswith("fully_sharded_model_space"):
            yield Finding("vocab", None, f"whether {layout} loads with other rows of the vocabulary is not known")
        else:
            text = f"{layout} has the {stored:,} rows in flat buckets, which other rows do not fit"
            yield Finding("vocab", False, text)


def _is_in_buckets(catalog: Catalog) -> bool:
    """Whether optimizer state lies in flat buckets, whose sizes follow the rows of the embedding."""
    layout = optimizer_layout(catalog)
    return layout.name != "none" and optimizer_resharding(catalog) is not None and not layout.name.endswith(_ANY_ROWS)


def _rows_after(catalog: Catalog, name: str, stored: int, tp: int, stated: int | None) -> int | None:
    """Rows of the embedding that distckpt writes for another tensor-parallel size."""
    try:
        return vocabulary_rows(name, stored, tp, catalog, stated)
    except RequestError:
        return None


def _job_rows(catalog: Catalog, job: Job, tp: int, stored: int, stated: int | None) -> _Rows | None:
    flags = job.vocabulary
    if "padded" in flags:
        return _Rows((flags["padded"],), "--padded-vocab-size")
    padded = catalog.options.get("padded_vocab_size")
    if "--use-checkpoint-args" in job.switches and isinstance(padded, int):
        return _Rows((padded,), "the checkpoint's padded_vocab_size, with --use-checkpoint-args")
    divisible: object = catalog.options.get("make_vocab_size_divisible_by", _DIVISIBLE)
    kind = flags.get("tokenizer_type", catalog.options.get("tokenizer_type"))
    if "vocab_size" in flags:
        size, source = flags["vocab_size"], "--vocab-size"
    elif "tokenizer_model" in flags:
        size, source = _tokenizer_size(Path(flags["tokenizer_model"])), "tokenizer.json"
    else:
        size, source = stated or 0, "the checkpoint's vocabulary, if the job has its tokenizer,"
    if flags.keys() & {"vocab_size", "tokenizer_model"}:
        divisible = _DIVISIBLE
    divisible = flags.get("divisible", divisible)
    if not size or not isinstance(divisible, int) or divisible < 1:
        return None
    # NullTokenizer counts an end-of-document word of its own up to core 0.16 (training/tokenizer/tokenizer.py), later not
    sizes = (size, size + 1) if kind == "NullTokenizer" else (size,)
    counts = tuple(dict.fromkeys(padded_vocab(n, divisible, tp) for n in sizes))
    if len(counts) > 1 and not flags and isinstance(padded, int) and stored == padded:
        # which of both it was, the job that saved tells
        saved = catalog.options.get("tensor_model_parallel_size")
        fitting = [n for n in sizes if isinstance(saved, int) and padded_vocab(n, divisible, saved) == padded]
        counts = tuple(dict.fromkeys(padded_vocab(n, divisible, tp) for n in fitting)) or counts
    return _Rows(counts, f"{source} {size:,} padded to a multiple of {divisible} x {tp}")


def _tokenizer_size(folder: Path) -> int:
    """Words of a tokenizer of Hugging Face, those that were added included; 0 if it cannot be read here."""
    path = folder / "tokenizer.json"
    try:
        if not is_file(path):
            return 0
        document = json.loads(read_small(path, _TOKENIZER_LIMIT))
        words = document["model"]["vocab"]
        vocabulary = set(words) if isinstance(words, dict) else {word for word, _ in words}
        return len(vocabulary | {token["content"] for token in document.get("added_tokens") or ()})
    except (OSError, ValueError, KeyError, TypeError, FormatError):
        return 0
