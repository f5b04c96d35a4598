"""From any readable checkpoint to a torch_dist checkpoint as a job at another layout would have written it.

plan = plan_reshard(open_checkpoint("ckpt"), Path("out"), Layout(tp=2, pp=2))
run_reshard(plan)
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from converters.dtypes import dtype
from converters.engine import run
from converters.errors import DestinationError, RequestError
from converters.events import Listener, Note, Phase, PlanReady, StopFlag
from converters.formats.torch_dist_out import Cut, FlatOut, ObjectOut, TensorOut, TorchDistOutput, check_tiling
from converters.job import Job, check_stored
from converters.layout_check import check as check_layout
from converters.model_args import ModelArgs
from converters.names import stored_key
from converters.optim import OptimizerState, candidates, optimizer_state, prove_masters
from converters.optim_groups import read_param_groups
from converters.optim_write import flatten
from converters.plan import Target
from converters.publish import Staging, check_destination, free_bytes
from converters.records_out import object_record
from converters.registration import trainable
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
    shapes = {name: t.shape for name, t in catalog.weights.items()}
    notes = list(check_layout(args, layout, shapes))
    outline = Outline.of(args, shapes)
    sources = dict(catalog.weights) | {n: t for n, t in catalog.tensors.items() if t.kind == "other"}
    found, options = _optimizer(reader, options)
    notes += found.notes
    targets = _Targets(catalog, layout, outline, options, args)
    tensors: list[TensorOut | FlatOut] = list(targets.make(sources))
    objects: list[ObjectOut] = []
    sources |= found.tensors
    if options.optimizer == "dp_reshardable":
        flat, objects = targets.flatten(found, reader)
        tensors += flat
    else:
        tensors += targets.make(found.tensors)
    check_tiling(sources, tensors)
    dropped = _unused(catalog, options)
    state = target_state(reader, layout, outline, options, stacked=targets.stacked, padded_vocab=_padded(tensors))
    output = TorchDistOutput(tensors, [*objects, *state.objects])
    for name in output.sources():
        check_stored(sources[name])
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
        (*notes, *state.notes),
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


_METADATA_JSON = json.dumps(
    {
        "sharded_backend": "torch_dist",
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }
).encode()


def _folder(catalog: Catalog) -> str:
    return "release" if catalog.path.name == "release" else f"iter_{catalog.iteration or 0:07d}"


def _in_folder(output: TorchDistOutput, folder: str) -> list[OutputFile]:
    return [replace(file, name=f"{folder}/{file.name}") for file in output.files]


def _optimizer(reader: Reader, options: ReshardOptions) -> tuple[OptimizerState, ReshardOptions]:
    """The optimizer's tensors, and the options with "keep" and "there is none" resolved."""
    catalog = reader.catalog
    if (
        options.optimizer == "none"
        or (not any(t.kind == "optimizer" for t in (*catalog.tensors.values(),))
        and not any(".dp_group_idx_" in o.name for o in catalog.objects.values()))
    ):
        return OptimizerState({}), replace(options, optimizer="none")
    found = optimizer_state(reader)
    if found.candidate is not None:
        prove_masters(
            reader, found.tensors
        )  # the order of parameters was inferred: show that it is right, element by element
    if options.optimizer == "keep":
        options = replace(options, optimizer="fully_reshardable" if found.candidate is None else "dp_reshardable")
    return found, options


def _unused(catalog: Catalog, options: ReshardOptions) -> list[tuple[str, str]]:
    if options.optimizer != "none":
        return []
    return [(name, "optimizer state is not wanted") for name, t in catalog.tensors.items() if t.kind == "optimizer"]


@dataclass
class _Targets:
    """Makes the list of target tensors; remembers how tensors of one kind are cut, and who holds the pieces."""

    catalog: Catalog
    layout: Layout
    outline: Outline
    options: ReshardOptions
    args: ModelArgs

    def __post_init__(self) -> None:
        self._wrapper, self.stacked = _key_style(self.catalog, self.options.layers)
        self._experts: Counter[str] = Counter()
        self._cuts: dict[tuple[Any, ...], tuple[Cut, list[Shard]]] = {}
        self._owners: dict[tuple[Any, ...], tuple[int, ...]] = {}
        self._load: Counter[int] = Counter()
        self._pipeline = self.layout.pipeline(self.outline.num_layers, self.outline.mtp_layers)

    def make(self, sources: Mapping[str, TensorInfo]) -> list[TensorOut]:
        """One entry for each source tensor, in the order that fills the files one after the other."""
        self._experts = self._experts | _expert_counts(sources)
        return [self._one(name, tensor) for name, tensor in sources.items()]

    def flatten(self, found: OptimizerState, reader: Reader) -> tuple[list[FlatOut], list[ObjectOut]]:
        """The buckets of the target job, and what it stores beside them for each data-parallel group."""
        kind = dtype("float32")
        parameters = {
            name: Target(name, weight.dtype, self._target_shape(name, weight.shape))
            for name, weight in self.catalog.weights.items()
            if trainable(name)
        }
        order = found.candidate.order if found.candidate else next(candidates(self.catalog, self.layout)).order
        flat = flatten(
            parameters,
            self.layout,
            self.outline,
            order,
            groups=read_param_groups(reader),
            args=self.catalog.args,
            available={name: self.catalog.weights[name].shape for name in parameters},
        )
        states = dict.fromkeys(_STATE.fullmatch(name)[1] for name in found.tensors)  # type: ignore[index]
        out = []
        for bucket in flat.buckets:
            for state in states:
                for chunk in bucket.chunks:
                    copies = tuple((f"optimizer.state.{state}.{c.tensor}", c.box, c.at) for c in chunk.copies)
                    key = f"{bucket.key}.{state}"
                    out.append(
                        FlatOut(key, bucket.numel, chunk.start, chunk.length, kind, chunk.rank, copies, chunk.fills)
                    )
        return out, [ObjectOut(o.key, o.rank, object_record(o.tree)) for o in flat.objects]

    def _target_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (self._vocab_rows(name, shape[0]), *shape[1:]) if name in _VOCAB else shape

    def _one(self, source: str, tensor: TensorInfo) -> TensorOut:
        found = _STATE.fullmatch(source)
        name = found[2] if found else source
        stored = stored_key(name, stacked=self.stacked)
        key = self._wrapper + stored.key
        if found:
            key = f"optimizer.state.{found[1]}.{key}"
        counts = {"layer": self.outline.num_layers, "expert": self._experts.get(_DIGITS.sub("*", name), 0)}
        cut, pieces = self._cut(name, tensor, len(stored.axes))
        ranks = self._ranks(name, cut, pieces)
        return TensorOut(source, key, stored.prefix, tuple(counts[axis] for axis in stored.axes), cut, ranks)

    def _cut(self, name: str, tensor: TensorInfo, leading: int) -> tuple[Cut, list[Shard]]:
        kind = (_DIGITS.sub("*", name), tensor.dtype, tensor.shape)
        if kind not in self._cuts:
            shape = self._target_shape(name, tensor.shape)
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


def _padded(tensors: list[TensorOut | FlatOut]) -> int | None:
    """Rows of the target's embedding."""
    return next((t.cut.shape[0] for t in tensors if isinstance(t, TensorOut) and t.source == _VOCAB[0]), None)
