"""The contents of a container of whole tensors: model, optimizer, facts of the job.

Names are those that a model without tensor and pipeline parallelism has, Megatron's own or Hugging Face's; a source with
other names keeps them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from converters.box import Box
from converters.errors import RequestError
from converters.megatron.damage import refuse_contradictions
from converters.megatron.identity import is_buffer
from converters.megatron.layout import Layout
from converters.megatron.model_args import ModelArgs
from converters.megatron.pipeline import Pipeline
from converters.megatron.rank_state_dict import LocalModel
from converters.megatron.vocabulary import end_of_documents, is_embedding, is_vocabulary
from converters.names import StateName, printable, state_names
from converters.optimizer.state import OptimizerState, has_optimizer, optimizer_state
from converters.pickles.nodes import Global
from converters.planning.plan import Drop, Piece
from converters.words import counted
from converters.write.export import ExportOptions, choose_mapping
from converters.write.job_arguments import layout_arguments, plain_master_arguments

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from converters.catalog import Catalog, TensorInfo
    from converters.formats.base import Reader


@dataclass(frozen=True)
class Content:
    """What goes into a container.

    Attributes:
        names: Whose names they are: "megatron", "hf", or "own" for a source that has others.
        tensors: The model's.
        sources: The tensors of the source that they come from.
        drops: What of those is left out, and why.
        notes: Sentences a person should read.
    """

    names: str
    tensors: Sequence[Piece]
    sources: Mapping[str, TensorInfo]
    drops: Sequence[Drop] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def whose(self) -> str:
        """The names' owner, in words."""
        return {"hf": "Hugging Face's", "own": "the source's own", "megatron": "Megatron's"}[self.names]

    @property
    def facts(self) -> dict[str, Any]:
        """What it is, for a program."""
        weights = [t for t in self.tensors if not is_buffer(t.name) and not t.name.startswith("optimizer.")]
        numel = sum(Box.whole(tensor.shape).volume for tensor in weights)
        return {"names": self.names, "target_tensors": len(self.tensors), "parameters": numel}

    @property
    def summary(self) -> tuple[tuple[str, str], ...]:
        """The same as a line for a person."""
        facts = self.facts
        text = (
            f"{facts['parameters']:,} parameters, {counted(facts['target_tensors'], 'tensor')} under {self.whose} names"
        )
        return (("model", text),)


def choose_content(catalog: Catalog, names: str | None, vocab_size: int | None) -> Content:
    """The model's tensors under the names that were asked for.

    Args:
        names: "megatron" or "hf"; None is Megatron's, and for a source with other names those.
        vocab_size: True rows of the vocabulary; None takes the checkpoint's word.

    Raises:
        RequestError: The names cannot be made, or do not cover a tensor.
    """
    if not catalog.megatron:
        content = _own_names(catalog, names, vocab_size)
    elif names == "hf":
        _, mapping, sources = choose_mapping(catalog, ExportOptions(vocab_size=vocab_size))
        content = Content("hf", list(mapping.pieces.values()), sources, mapping.drops, tuple(mapping.notes))
    else:
        content = _megatron_names(catalog, vocab_size)
    used = {source for tensor in content.tensors for source in tensor.sources}
    return replace(content, sources={name: t for name, t in content.sources.items() if name in used})


def _own_names(catalog: Catalog, names: str | None, vocab_size: int | None) -> Content:
    hugging = catalog.framework == "Hugging Face"
    if names == "megatron" or (names == "hf" and not hugging) or vocab_size is not None:
        whose = "Hugging Face's names" if hugging else "names that are neither Megatron's nor Hugging Face's"
        label = (
            "--vocab-size needs a Megatron model" if vocab_size is not None else f"there is no way to --names {names}"
        )
        raise RequestError(
            f"the checkpoint has {whose}: {label}",
            details=[f"for example {printable(name)}" for name in list(catalog.tensors)[:2]],
            hint="leave the option out to keep the names",
        )
    sources = dict(catalog.weights) or {name: t for name, t in catalog.tensors.items() if t.kind != "optimizer"}
    tensors = [Piece.stored(name, t.dtype, t.shape) for name, t in sources.items()]
    return Content("hf" if hugging else "own", tensors, sources)


def _megatron_names(catalog: Catalog, vocab_size: int | None) -> Content:
    refuse_contradictions(ModelArgs.from_catalog(catalog), catalog)
    recognised = {name: t for name, t in catalog.tensors.items() if t.kind != "weight" or Pipeline.recognises(name)}
    model = LocalModel.of(replace(catalog, tensors=recognised), Layout(), vocab_size=vocab_size).chunk()
    # as they are stored: Megatron-FSDP keeps a bf16 model's weights in fp32, and nothing is rounded without a request
    tensors: list[Piece] = [replace(t, dtype=catalog.weights[t.sources[0]].dtype) for t in model]
    # what no rule knows has no place on a rank of a job, but it is a whole tensor with a name
    unknown = {name: t for name, t in catalog.weights.items() if name not in recognised}
    tensors += [Piece.stored(name, t.dtype, t.shape) for name, t in unknown.items()]
    drops = []
    for copy in (copy for tensor in tensors for copy in tensor.copies):
        shape = catalog.weights[copy.source].shape
        rows = copy.source_box.stop[0] if shape else 0
        if is_vocabulary(copy.source) and rows < shape[0]:
            drops.append(Drop(copy.source, Box.rows(shape, rows), "padding rows of the vocabulary"))
    return Content("megatron", tensors, catalog.weights, drops, end_of_documents(drops, catalog.args))


# ---------------------------------------------------------------------- the state of training


def named_optimizer(reader: Reader) -> OptimizerState:
    """The optimizer's tensors by the parameters' names; none if there is no optimizer."""
    return optimizer_state(reader) if has_optimizer(reader.catalog) else OptimizerState({})


def state_tensors(content: Content, state: Mapping[str, TensorInfo]) -> dict[str, list[Piece]]:
    """The optimizer's tensors by kind of state, cut and put together as their parameters are."""
    out: dict[str, list[Piece]] = {}
    for kind in dict.fromkeys(parts.state for _, parts in state_names(state)):
        for tensor in content.tensors:
            of_sources = [state.get(str(StateName(kind, copy.source))) for copy in tensor.copies]
            stored = [info for info in of_sources if info is not None]
            if not stored:
                continue
            if len(stored) < len(of_sources):
                raise RequestError(f"only a part of {tensor.name} has optimizer state {kind}", tensor=tensor.name)
            copies = tuple(replace(copy, source=str(StateName(kind, copy.source))) for copy in tensor.copies)
            out.setdefault(kind, []).append(replace(tensor, dtype=stored[0].dtype, copies=copies))
    return out


def state_drops(content: Content, state: Mapping[str, TensorInfo]) -> list[Drop]:
    """What is left out of the optimizer's tensors, as it is of their parameters."""
    kinds = dict.fromkeys(parts.state for _, parts in state_names(state))
    return [replace(drop, source=str(StateName(kind, drop.source))) for kind in kinds for drop in content.drops]


_NOT_COMMON = ("args", "optimizer", "content_metadata", "rerun_state_machine", "rng_state", "iteration")


def state_of_job(
    catalog: Catalog, content: Content, *, completed: bool = False
) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """What is known of the job that saved, as plain data, with the sizes of a job without parallelism; and what is none.

    Args:
        completed: Master weights go along in fp32 that were remainders.
    """
    rows = next((tensor.shape[0] for tensor in content.tensors if is_embedding(tensor.name)), None)
    out: dict[str, Any] = {"checkpoint_version": 3.0}
    strange = []
    if catalog.iteration is not None:
        out["iteration"] = catalog.iteration
    if catalog.args:
        args = plain(dict(catalog.args))
        changed = layout_arguments(args, Layout(), rows) | (plain_master_arguments(args) if completed else {})
        out["args"] = args | {name: plain(value) for name, value in changed.items()}
        strange += [f"args.{name}" for name in catalog.args if name not in args]
    common = catalog.common if isinstance(catalog.common, Mapping) else {}
    for name, value in common.items():
        if not isinstance(name, str) or name in _NOT_COMMON:
            continue
        item = plain(value)
        if item is _OBJECT:
            strange.append(name)
        else:
            out.setdefault(name, item)
    return out, [(name, "no plain data") for name in strange]


_OBJECT = object()
_DEEPEST, _MOST_PLAIN = 64, 1 << 20


def plain(value: Any, depth: int = 0, room: Iterator[int] | None = None) -> Any:
    """The value as plain data, element types by their names; `_OBJECT` for one that is none, left out of dictionaries.

    So is what lies too deep, or has too much in it: a list may hold itself, or stand for 10^40 others.
    """
    room = iter(range(_MOST_PLAIN)) if room is None else room
    if depth > _DEEPEST or next(room, None) is None:
        return _OBJECT
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Global) and value.module == "torch":
        return value.path
    if isinstance(value, Mapping):
        plain_items = {key: plain(item, depth + 1, room) for key, item in value.items() if isinstance(key, str | int)}
        return {key: item for key, item in plain_items.items() if item is not _OBJECT}
    if isinstance(value, list | tuple):
        items = [plain(item, depth + 1, room) for item in value]
        same = tuple(items) if type(value) is tuple else items
        return _OBJECT if any(item is _OBJECT for item in items) else same
    return _OBJECT


def left_out(catalog: Catalog, content: Content, optimizer: str = "") -> list[tuple[str, str]]:
    """`(what, reason)` of all that does not go along.

    Args:
        optimizer: Why the optimizer's state does not; empty if it does.
    """
    dropped = [(drop.source, drop.reason) for drop in content.drops]
    others = (name for name, t in catalog.tensors.items() if t.kind == "other")
    dropped += [
        (name, "stored beside the model, and no optimizer state") for name in others if name not in content.sources
    ]
    kinds: Iterable[str] = sorted({o.name.rpartition(".")[2] for o in catalog.objects.values()})
    dropped += [(kind, counted(len(catalog.objects), "stored object")) for kind in kinds]
    return dropped + [(name, optimizer) for name, t in catalog.tensors.items() if t.kind == "optimizer" and optimizer]
