"""Pairs of tensors to compare: which elements of one checkpoint correspond to which of the other.

Megatron's checkpoints, of any layout and format, meet under canonical names; the optimizer's flat buckets are taken apart
first. Megatron and Hugging Face meet through the model's table, whose rules are region copies: a copy says which box of a
Megatron tensor stands in which box of a Hugging Face tensor, so both are compared where they lie.

    A  linear_qkv  | q0 q1 | k0 | v0 | q2 q3 | k1 | v1 |        B  q_proj | q0 q1 | q2 q3 |   k_proj | k0 | k1 |
                     '--------------- compared with ----------------'
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

from converters.box import Box
from converters.errors import FormatError, IntegrityError, RequestError
from converters.megatron.model_args import ModelArgs
from converters.megatron.vocabulary import EMBEDDING, is_embedding, is_vocabulary
from converters.models import by_name, infer, of_config
from converters.models.config_check import find_contradictions
from converters.models.described import COMPUTED
from converters.models.export import map_to_hf
from converters.names import StateName, natural_key, parameter_of
from converters.optimizer.state import has_optimizer, optimizer_state
from converters.planning.plan import Copy, prove

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from converters.catalog import Catalog, TensorInfo
    from converters.formats.base import Reader
    from converters.models.export import HfMapping

_T = TypeVar("_T")


@dataclass(frozen=True)
class Side:
    """One of the two checkpoints, made ready to be compared.

    Attributes:
        label: "A" or "B".
        reader: The checkpoint.
        tensors: Its tensors by canonical name, the optimizer's under the names of its parameters.
        notes: Sentences a person should read.
    """

    label: str
    reader: Reader
    tensors: Mapping[str, TensorInfo]
    notes: tuple[str, ...] = ()

    @property
    def catalog(self) -> Catalog:
        """The catalog of the checkpoint."""
        return self.reader.catalog

    @property
    def is_hf(self) -> bool:
        """Whether its tensors have Hugging Face's names."""
        return self.catalog.framework == "Hugging Face"

    @cached_property
    def args(self) -> ModelArgs:
        """The arguments of its model."""
        return ModelArgs.from_catalog(self.catalog)

    @classmethod
    def both(cls, a: Reader, b: Reader) -> tuple[Side, Side]:
        """Both sides; where one optimizer's flat buckets cannot be taken apart, both are left as they are stored."""
        try:
            return cls._named("A", a), cls._named("B", b)
        except (FormatError, IntegrityError, RequestError) as error:
            text = f"the optimizers are compared as they are stored, without names: {error.message}"
            return Side("A", a, a.catalog.tensors, (text,)), Side("B", b, b.catalog.tensors)

    @classmethod
    def _named(cls, label: str, reader: Reader) -> Side:
        catalog = reader.catalog
        model_tensors = {name: t for name, t in catalog.tensors.items() if t.kind != "optimizer"}
        if not has_optimizer(catalog):
            return cls(label, reader, model_tensors)
        state = optimizer_state(
            reader, refuse_doubtful=False
        )  # whether masters fit their weights is for `verify` to say
        unnamed_state = {
            name: t
            for name, t in catalog.tensors.items()
            if t.kind == "optimizer" and name not in state.replaced and StateName.parse(name) is None
        }
        tensors = model_tensors | unnamed_state | state.tensors
        return cls(label, reader, tensors, tuple(f"{label}: {text}" for text in state.notes))


@dataclass(frozen=True)
class Pair:
    """A tensor that is compared.

    Attributes:
        name: As it is shown; the name in B, and in Hugging Face's folder if only one side is one.
        a: Tensors of A that its elements are in.
        b: Tensors of B.
        shape: Its shape, that of the side whose name it has.
        copies: Boxes that belong together; the source is the tensor of the side that is not `Matching.target_side`.
        padding: The same for rows beyond the vocabulary, whose contents mean nothing.
        rows: Rows of the padded vocabulary in A and in B, if there are such rows and their numbers differ.
    """

    name: str
    a: tuple[str, ...]
    b: tuple[str, ...]
    shape: tuple[int, ...]
    copies: tuple[Copy, ...]
    padding: tuple[Copy, ...] = ()
    rows: tuple[int, int] | None = None


@dataclass
class Matching:
    """Which tensors are compared with which, and which are not.

    Attributes:
        target_side: Side whose names and indices are shown, A (0) or B (1); the copies' targets are its tensors.
        pairs: What is compared.
        only: Tensors that only A has, and those that only B has.
        shapes: Tensors of both whose shapes do not fit: name -> (shape in A, shape in B).
        skipped: Tensors that are not compared and do not count, with the reason.
        config: Where B's and A's configurations contradict each other, as sentences (Hugging Face against Megatron).
        notes: Sentences a person should read.
        reshaped: Tensors of Hugging Face whose copies refer to another shape, under that shape.
    """

    target_side: int = 1
    pairs: list[Pair] = field(default_factory=list)
    only: tuple[list[str], list[str]] = field(default_factory=lambda: ([], []))
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    config: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    reshaped: dict[str, TensorInfo] = field(default_factory=dict)

    def tensors_of(self, side: Side) -> Mapping[str, TensorInfo]:
        """The tensors of a side in the shapes that the copies refer to."""
        return {**side.tensors, **self.reshaped} if side.is_hf else side.tensors

    def in_order(self, target: _T, source: _T) -> tuple[_T, _T]:
        """Orders a value of the target side and one of the source side as (A's, B's)."""
        return (source, target) if self.target_side else (target, source)


def match(
    a: Side, b: Side, keep: Callable[[str], bool], *, vocab_size: int | None = None, arch: str | None = None
) -> Matching:
    """Pairs the tensors of two checkpoints.

    Args:
        a: The first.
        b: The second.
        keep: Whether a tensor of this name is wanted.
        vocab_size: True rows of the vocabulary; None takes the checkpoints' word.
        arch: Architecture of a Hugging Face folder, if the inferred one is wrong.

    Raises:
        RequestError: One is a Hugging Face folder, and no known architecture computes what the other one's model does.
    """
    trained = max((n for s in (a, b) if not s.is_hf and (n := s.args.vocab_size) is not None), default=0)
    if vocab_size is not None and vocab_size < trained:  # what is padding is compared, and does not count
        raise RequestError(f"--vocab-size {vocab_size} would leave out trained rows: the vocabulary has {trained}")
    if a.is_hf != b.is_hf:
        return _match_hf(a, b, keep, vocab_size, arch)
    out = Matching()
    names = sorted({*a.tensors, *b.tensors}, key=natural_key) if a.is_hf else _in_order(a.tensors, b.tensors)
    vocab_sizes = [n for n in (a.args.vocab_size, b.args.vocab_size) if n is not None] if not a.is_hf else []
    rows = vocab_size if vocab_size is not None else max(vocab_sizes, default=None)
    stored = [t.shape[0] for side in (a, b) for n, t in side.tensors.items() if is_embedding(n) and t.shape]
    if vocab_size is not None and vocab_size > min(stored, default=vocab_size):
        raise RequestError(f"--vocab-size {vocab_size} is not possible: an embedding has {min(stored)} rows")
    for name in names:
        if not keep(name):
            continue
        if name in a.tensors and name in b.tensors:
            _match_name(out, name, a.tensors[name].shape, b.tensors[name].shape, None if a.is_hf else rows)
        else:
            out.only[name in b.tensors].append(name)
    return out


def _in_order(a: Iterable[str], b: Iterable[str]) -> list[str]:
    """The names of both, weights as the model has them and optimizer state last."""
    names = list(dict.fromkeys((*a, *b)))
    return [*(n for n in names if not n.startswith("optimizer.")), *(n for n in names if n.startswith("optimizer."))]


def _match_name(out: Matching, name: str, a: tuple[int, ...], b: tuple[int, ...], vocab: int | None) -> None:
    rows = min(a[0], b[0]) if a and b else 0
    trained = vocab if vocab is not None and is_vocabulary(parameter_of(name)) else None
    if a != b and (trained is None or len(a) != len(b) or a[1:] != b[1:] or trained > rows):
        out.shapes[name] = a, b
        return
    box = Box.whole((rows, *b[1:]) if b else b)
    copies, padding = [Copy(name, box, name, box)], list[Copy]()
    if trained is not None and b:
        copies, padding = _split_rows(copies, trained)
    differ = (a[0], b[0]) if a != b else None
    out.pairs.append(Pair(name, (name,), (name,), b, tuple(copies), tuple(padding), differ))


# ---------------------------------------------------------------------- Megatron and Hugging Face


def _match_hf(a: Side, b: Side, keep: Callable[[str], bool], vocab_size: int | None, arch: str | None) -> Matching:
    megatron, hf = (b, a) if a.is_hf else (a, b)
    mapping, rows = _map_model(megatron, hf, arch, vocab_size)
    prove(mapping.pieces.values(), {name: info.shape for name, info in megatron.tensors.items()}, None)
    out = Matching(target_side=int(hf is b), config=find_contradictions(hf.catalog.config, mapping))
    copies: dict[str, list[Copy]] = defaultdict(list)
    for copy in mapping.copies:
        copies[copy.target].append(copy)
    targets = {name: target.shape for name, target in mapping.targets.items()}
    for name, target in mapping.targets.items():
        if target.matrix is not None and name in hf.tensors and hf.tensors[name].shape == target.shape:
            out.reshaped[name] = hf.tensors[name].reshaped(target.matrix)
    if "lm_head.weight" in hf.tensors and "lm_head.weight" not in targets:  # tied, and stored all the same
        copies["lm_head.weight"] = [
            replace(c, target="lm_head.weight") for c in mapping.copies if c.source == EMBEDDING
        ]
        targets["lm_head.weight"] = targets[_embedding_target(mapping)]
    for name in (*targets, *(n for n in hf.tensors if n not in targets)):
        if not keep(name):
            continue
        if name not in hf.tensors:
            out.only[megatron is b].append(name)
        elif hf.tensors[name].kind == "optimizer":
            out.skipped[name] = "optimizer state of another framework"
        elif name in targets:
            stored = megatron.tensors[copies[name][0].source].shape
            _match_hf_tensor(out, name, targets[name], hf.tensors[name].shape, copies[name], rows, stored[:1])
        elif name.endswith(COMPUTED):
            out.skipped[name] = "computed when the model is built"
        else:
            out.only[hf is b].append(name)
    used, dropped = {c.source for c in mapping.copies}, {d.source: d.reason for d in mapping.drops}
    for name, tensor in megatron.tensors.items():
        if tensor.kind == "optimizer":
            out.skipped[name] = "optimizer state, which a Hugging Face folder cannot hold"
        elif name not in used and name in dropped and not name.startswith("mtp."):
            out.skipped[name] = dropped[name]
        elif name not in used and keep(name):
            out.only[megatron is b].append(name)
    return out


def _embedding_target(mapping: HfMapping) -> str:
    return next(copy.target for copy in mapping.copies if copy.source == EMBEDDING)


def _map_model(megatron: Side, hf: Side, arch: str | None, vocab_size: int | None) -> tuple[HfMapping, int]:
    """The model's table for a Hugging Face folder, and how many rows of the vocabulary mean something."""
    catalog, args = megatron.catalog, megatron.args
    model = by_name(arch) if arch else of_config(hf.catalog.config)
    if model is None or (not arch and model.unexpressible(args)):
        model = infer(args, catalog)  # that the folder's is another one is found when the configurations are compared
    mtp = "auto"
    mapping = map_to_hf(catalog, args, model)
    if args.mtp_num_layers and model.mtp:
        without = map_to_hf(catalog, args, model, mtp="drop")
        if hf.tensors.keys().isdisjoint(mapping.targets.keys() - without.targets.keys()):
            mtp, mapping = "drop", without
    embedding = _embedding_target(mapping)
    stored = megatron.tensors[EMBEDDING].shape[0]
    hf_rows = hf.tensors[embedding].shape[:1] if embedding in hf.tensors else ()  # none if it is of another model
    most = min(*hf_rows, stored) if hf_rows else vocab_size or args.vocab_size or stored
    true = vocab_size or args.vocab_size or most
    rows = true if hf_rows and hf_rows[0] < true else most
    return map_to_hf(catalog, args, model, vocab_size=rows, mtp=mtp), true


def _match_hf_tensor(
    out: Matching,
    name: str,
    want: tuple[int, ...],
    have: tuple[int, ...],
    copies: list[Copy],
    vocab: int,
    stored: tuple[int, ...],
) -> None:
    vocabulary = is_vocabulary(copies[0].source)
    sources = tuple(dict.fromkeys(copy.source for copy in copies))
    in_a, in_b = out.in_order((name,), sources)
    if want != have and not (vocabulary and want[1:] == have[1:] and vocab <= have[0]):
        out.shapes[name] = out.in_order(have, want)
        return
    true, padding = _split_rows(copies, vocab) if vocabulary else (copies, [])
    rows = out.in_order(have[0], stored[0]) if vocabulary and have[:1] != stored else None
    out.pairs.append(Pair(name, in_a, in_b, have, tuple(true), tuple(padding), rows))


def _split_rows(copies: Iterable[Copy], rows: int) -> tuple[list[Copy], list[Copy]]:
    """Copies of the first rows of a target, and of those behind them."""
    parts: tuple[list[Copy], list[Copy]] = ([], [])
    for copy in copies:
        low, n = copy.target_box.start[0], copy.target_box.shape[0]
        for part, first, end in ((0, low, min(low + n, rows)), (1, max(low, rows), low + n)):
            if first < end:
                shape = (end - first, *copy.target_box.shape[1:])
                source, target = (
                    Box((box.start[0] + first - low, *box.start[1:]), shape)
                    for box in (copy.source_box, copy.target_box)
                )
                parts[part].append(replace(copy, source_box=source, target_box=target))
    return parts
