"""From any readable checkpoint to a torch_dist checkpoint as a job at another layout would have written it.

plan = plan_reshard(open_checkpoint("ckpt"), Path("out"), Layout(tp=2, pp=2))
run_reshard(plan)
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from converters.engine import run
from converters.errors import DestinationError, RequestError
from converters.events import Listener, Note, Phase, PlanReady, StopFlag
from converters.formats.torch_dist_out import Cut, TensorOut, TorchDistOutput, check_tiling
from converters.job import Job, check_stored
from converters.model_args import ModelArgs
from converters.names import stored_key
from converters.publish import Staging, check_destination, free_bytes
from converters.reshard_state import ReshardOptions, State, target_state
from converters.split import Outline, holders, padded_vocab, shards, split_rule

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from converters.catalog import Catalog, TensorInfo
    from converters.engine import Stats
    from converters.formats.base import Reader
    from converters.job import OutputFile
    from converters.layout import Layout
    from converters.split import Shard

__all__ = ["ReshardOptions", "ReshardPlan", "plan_reshard", "run_reshard"]

_STATE = re.compile(r"optimizer\.state\.(\w+?)\.(.*)", re.DOTALL)
_DIGITS = re.compile(r"(?<=\.)\d+(?=\.)")
_VOCAB = ("embedding.word_embeddings.weight", "output_layer.weight", "output_layer.bias")


@dataclass(frozen=True)
class ReshardPlan:
    """A reshard, decided and proved, with nothing moved yet.

    Attributes:
        reader: The source.
        destination: Where the training root will appear; the iteration's folder lies in it.
        folder: Name of that folder: `iter_0050000`.
        layout: The target layout.
        options: What was asked.
        output: The data files.
        state: Everything that is not a tensor, at the target layout.
        job: The work.
        dropped: What is not carried over, with the reason.
        notes: Sentences a person should read.
    """

    reader: Reader
    destination: Path
    folder: str
    layout: Layout
    options: ReshardOptions
    output: TorchDistOutput
    state: State
    job: Job
    dropped: tuple[tuple[str, str], ...]
    notes: tuple[str, ...] = field(default=())


def plan_reshard(
    reader: Reader, destination: Path, layout: Layout, options: ReshardOptions | None = None
) -> ReshardPlan:
    """Decides everything about a reshard and proves it complete; writes nothing.

    Args:
        reader: The source.
        destination: Where the result shall appear: a training root with one iteration and its tracker file.
        layout: The layout of the job that will load it.
        options: Optimizer layout, random state, key style and so on.

    Raises:
        RequestError: The model cannot be laid out so; the numbers and the nearest possible ones are named.
        IntegrityError: Needed data is missing in the source.
        DestinationError: The destination cannot be written.
    """
    options = options or ReshardOptions()
    catalog = reader.catalog
    check_destination(catalog.path, destination, overwrite=options.overwrite)
    args = ModelArgs.from_catalog(catalog)
    outline = Outline.of(args, {name: t.shape for name, t in catalog.weights.items()})
    sources, dropped = _sources(catalog, options)
    targets = _Targets(catalog, layout, outline, options, args)
    tensors = targets.make(sources)
    check_tiling(sources, tensors)
    for name in dict.fromkeys(tensor.source for tensor in tensors):
        check_stored(sources[name])
    state = target_state(reader, layout, outline, options, stacked=targets.stacked, padded_vocab=_padded(tensors))
    output = TorchDistOutput(tensors, state.objects)
    job = Job.build(
        sources,
        output,
        _in_folder(output, _folder(catalog)),
        source_fingerprint=reader.fingerprint(),
        max_memory=options.max_memory,
        threads=options.threads,
        seals=output,
    )
    return ReshardPlan(
        reader,
        destination,
        _folder(catalog),
        layout,
        options,
        output,
        state,
        job,
        (*dropped, *state.dropped),
        state.notes,
    )


def run_reshard(plan: ReshardPlan, *, listener: Listener | None = None, stop: StopFlag | None = None) -> Stats:
    """Carries out a plan; the destination appears complete, or not at all.

    Raises:
        DistckptError: See `converters.engine.run`; also when the disk has not enough room, before anything is written.
    """
    tell = listener or (lambda event: None)
    job = plan.job
    free = free_bytes(plan.destination.parent)
    if job.bytes_written > free:
        raise DestinationError(
            f"not enough room for {plan.destination}",
            details=[f"{job.bytes_written:,} bytes are needed, {free:,} are free"],
            hint="free some space, or choose a directory on another disk",
        )
    tell(PlanReady("reshard", len(job.files), job.bytes_read, job.bytes_written, job.peak_memory))
    for text in plan.notes:
        tell(Note(text))
    staging = Staging(plan.destination, job.fingerprint, job.files, overwrite=plan.options.overwrite)
    try:
        stats = run(job, plan.reader, staging, listener=listener, stop=stop)
        tell(Phase("publishing"))
        folder = plan.folder
        staging.add(f"{folder}/.metadata", plan.output.metadata(folder))
        staging.add(f"{folder}/common.pt", plan.state.common)
        # the four-field form is the one that every Megatron-Core from 0.4 on reads; Megatron, too, writes it last
        staging.add(f"{folder}/metadata.json", _METADATA_JSON)
        staging.add("latest_checkpointed_iteration.txt", folder.removeprefix("iter_").lstrip("0").encode() or b"0")
        staging.publish()
    finally:
        staging.close()
    return stats


_METADATA_JSON = b'{"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}'


def _folder(catalog: Catalog) -> str:
    return "release" if catalog.path.name == "release" else f"iter_{catalog.iteration or 0:07d}"


def _in_folder(output: TorchDistOutput, folder: str) -> list[OutputFile]:
    return [replace(file, name=f"{folder}/{file.name}") for file in output.files]


def _sources(catalog: Catalog, options: ReshardOptions) -> tuple[dict[str, TensorInfo], list[tuple[str, str]]]:
    """The tensors to carry over by canonical name, and what is left out."""
    sources: dict[str, TensorInfo] = {}
    dropped = []
    for name, tensor in catalog.tensors.items():
        if tensor.kind != "optimizer":
            sources[name] = tensor
        elif options.optimizer == "none":
            dropped.append((name, "optimizer state is not wanted"))
        elif tensor.opaque is None:
            sources[name] = tensor
    return sources, dropped


@dataclass
class _Targets:
    """Makes the list of target tensors; remembers how tensors of one kind are cut, and who holds the pieces."""

    catalog: Catalog
    layout: Layout
    outline: Outline
    options: ReshardOptions
    args: ModelArgs

    def make(self, sources: Mapping[str, TensorInfo]) -> list[TensorOut]:
        """One entry for each source tensor, in the order that fills the files one after the other."""
        self._wrapper, self.stacked = _key_style(self.catalog, self.options.layers)
        self._experts = _expert_counts(sources)
        self._cuts: dict[tuple[Any, ...], tuple[Cut, list[Shard]]] = {}
        self._owners: dict[tuple[Any, ...], tuple[int, ...]] = {}
        self._load: Counter[int] = Counter()
        self._pipeline = self.layout.pipeline(self.outline.num_layers, self.outline.mtp_layers)
        return [self._one(name, tensor) for name, tensor in sources.items()]

    def _one(self, source: str, tensor: TensorInfo) -> TensorOut:
        found = _STATE.fullmatch(source)
        name = found[2] if found else source
        state = {"fp32_param": "param"}.get(found[1], found[1]) if found else ""
        stored = stored_key(name, stacked=self.stacked)
        key = self._wrapper + stored.key
        if found:
            key = f"optimizer.state.{state}.{key}"
        counts = {"layer": self.outline.num_layers, "expert": self._experts.get(_DIGITS.sub("*", name), 0)}
        cut, pieces = self._cut(name, tensor, len(stored.axes))
        ranks = self._ranks(name, cut, pieces)
        return TensorOut(source, key, stored.prefix, tuple(counts[axis] for axis in stored.axes), cut, ranks)

    def _cut(self, name: str, tensor: TensorInfo, leading: int) -> tuple[Cut, list[Shard]]:
        kind = (_DIGITS.sub("*", name), tensor.dtype, tensor.shape)
        if kind not in self._cuts:
            shape = tensor.shape
            if name in _VOCAB:
                shape = (self._vocab_rows(name, shape[0]), *shape[1:])
            pieces = shards(name, shape, self.layout, self.outline)
            boxes = tuple(dict.fromkeys(piece.box for piece in pieces))
            pieces = [next(piece for piece in pieces if piece.box == box) for box in boxes]
            self._cuts[kind] = Cut(tensor.dtype, shape, boxes, tensor.shape, leading), pieces
        return self._cuts[kind]

    def _vocab_rows(self, name: str, stored: int) -> int:
        true = self.options.vocab_size or self.args.vocab_size
        divisible = self.catalog.args.get("make_vocab_size_divisible_by", 128)
        if true is None:  # nobody knows how many rows are padding: keep them all, and pad further if tp asks for it
            return -(-stored // self.layout.tp) * self.layout.tp
        rows = padded_vocab(true, divisible, self.layout.tp)
        if true > stored:
            raise RequestError(f"--vocab-size {true} is more than the {stored} rows of {name}", tensor=name)
        return rows

    def _ranks(self, name: str, cut: Cut, pieces: list[Shard]) -> tuple[int, ...]:
        expert = split_rule(name).expert
        layer = re.search(r"layers\.(\d+)\.", name)
        where = (id(cut), name if layer is None else f"{name[: layer.start()]}{layer[1]}", expert)
        if where not in self._owners:
            self._owners[where] = tuple(self._owner(name, piece) for piece in pieces)
        return self._owners[where]

    def _owner(self, name: str, piece: Shard) -> int:
        holding = holders(name, piece, self.layout, self.outline, self._pipeline)
        if not self.options.fully_parallel:
            return holding[0]
        rank = min(holding, key=lambda r: (self._load[r], r))
        self._load[rank] += piece.box.volume
        return rank


def _key_style(catalog: Catalog, asked: str) -> tuple[str, bool]:
    """The wrapper's prefix of the source's keys, and whether the target's layers share keys."""
    wrapper, stacked, halves = "", False, False
    for name, tensor in catalog.weights.items():
        key = tensor.keys[0]
        for style in (True, False):
            plain = stored_key(name, stacked=style).key
            if key.endswith(plain):
                wrapper = key[: -len(plain)]
                stacked = stacked or (style and plain != stored_key(name, stacked=False).key)
                break
        halves = halves or key.endswith(("_w", "_v"))
    if asked == "keep" and not stacked and halves:
        # singleton keys are a saver's choice, not the model's: go back to what every loader's default asks for
        suffixes = defaultdict(set)
        for name in catalog.weights:
            if (found := re.match(r"decoder\.layers\.(\d+)\.(.*)", name)) is not None:
                suffixes[int(found[1])].add(found[2])
        stacked = len({frozenset(v) for v in suffixes.values()}) == 1
    return wrapper, {"stacked": True, "per-layer": False}.get(asked, stacked)


def _expert_counts(sources: Mapping[str, TensorInfo]) -> Counter[str]:
    """How many experts share a key: by name with numbers replaced, over one layer."""
    seen: dict[str, set[str]] = defaultdict(set)
    for name in sources:
        bare = found[2] if (found := _STATE.fullmatch(name)) else name
        if (expert := re.search(r"\.experts\.(\d+)\.", bare)) is not None:
            seen[_DIGITS.sub("*", bare)].add(expert[1])
    return Counter({pattern: len(numbers) for pattern, numbers in seen.items()})


def _padded(tensors: list[TensorOut]) -> int | None:
    """Rows of the target's embedding."""
    return next((t.cut.shape[0] for t in tensors if t.source == _VOCAB[0]), None)
