"""From any readable checkpoint to Megatron-LM's legacy format (`--ckpt-format torch`): one file for each rank of a job.

plan = plan_legacy(open_checkpoint("ckpt"), Path("out"), Layout(tp=2, pp=2))
run_conversion(plan)

`megatron.rank_state_dict` says what a rank has in memory, `formats.legacy.output` how its files look; here: what goes along.

| what | rule |
|---|---|
| training arguments | the fields that describe layout and format change |
| optimizer | distributed in `distrib_optim.pt`, or Adam's state in `model_optim_rng.pt`, as asked or by the arguments |
| `rng_state` | carried if the grid of ranks is the same; otherwise the job starts with `--no-load-rng` |
| `_extra_state` | carried under the names of the rank's modules, missing ones are empty |
| `rerun_state_machine`, `content_metadata` | dropped: they belong to the job, and to the format, that saved |

Sources: megatron/training/checkpointing.py (`save_checkpoint`, `load_checkpoint`), core_v0.16.1.
"""

from __future__ import annotations

import copy
import functools
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from converters.dtypes import dtype
from converters.errors import RequestError
from converters.formats.containers.archive_out import ArchiveFile, ArchiveOutput
from converters.formats.legacy.grid import MODEL, OPTIMIZER, rank_folder
from converters.formats.legacy.output import RankOptimizers, model_state
from converters.formats.resolve import TRACKER
from converters.megatron.damage import refuse_damaged_object
from converters.megatron.extra_states import with_extra_states
from converters.megatron.optimizer_chain import is_expert
from converters.megatron.rank_state_dict import LocalModel, likely_order
from converters.megatron.vocabulary import embedding_name, end_of_documents, padding_rows
from converters.names import folded, listed_lines, parse_key, quoted
from converters.optimizer.proof import Masters
from converters.optimizer.storage import keeps_remainders
from converters.pickles.nodes import Obj, fields, set_field
from converters.words import counted
from converters.write.job_arguments import (
    change_arguments,
    job_flags,
    layout_arguments,
    optimizer_flags,
    plain_master_arguments,
)
from converters.write.side_files import files_beside
from converters.write.target_state import (
    JobOptions,
    as_megatron_lm,
    check_request,
    chosen_optimizer,
    describe,
    iteration_folder,
    open_common,
    rng_fits,
    tracker,
    unwanted_state,
)
from converters.write.write_plan import Conversion

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from converters.catalog import Catalog, ObjectInfo, TensorInfo
    from converters.formats.base import Reader
    from converters.megatron.layout import Layout
    from converters.megatron.rank_state_dict import LocalTensor
    from converters.optimizer.state import OptimizerState
    from converters.param_order import Order
    from converters.pickles.nodes import Node
    from converters.planning.plan import Drop

# what of a common state belongs into every rank's file, in the order in which Megatron puts it there
_SCHEDULE = ("opt_param_scheduler", "lr_scheduler")
_COMMON = (*_SCHEDULE, "num_floating_point_operations_so_far")
_REPLACED = ("args", "checkpoint_version", "iteration", "optimizer", "content_metadata", "rerun_state_machine")
_NORM = re.compile(r"norm\._extra_state$")


@dataclass(frozen=True, slots=True)
class LegacyOptions(JobOptions):
    """What a person may ask of a legacy checkpoint.

    Attributes:
        optimizer: "distributed" (`distrib_optim.pt`), "plain" (within `model_optim_rng.pt`), "keep" (what the training
            arguments say), or "none".
        spec: The job's layers: "te" (TransformerEngine), "local" (Megatron's own); None as the arguments say.
        experts: How it keeps experts: "grouped", "sequential", "stacked" (GroupedMLP); None as the arguments say.
    """

    CHOICES: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **JobOptions.CHOICES,
        "optimizer": ("distributed", "plain", "keep", "none"),
        "spec": ("te", "local"),
        "experts": ("grouped", "sequential", "stacked"),
    }

    spec: str | None = None
    experts: str | None = None


def plan_legacy(reader: Reader, destination: Path, layout: Layout, options: LegacyOptions | None = None) -> Conversion:
    """Decides everything about a legacy checkpoint and proves it complete; writes nothing.

    Args:
        destination: Where the result shall appear: a training root with one iteration and its tracker file.
        layout: The layout of the job that will load it.

    Raises:
        RequestError: The model cannot be laid out so; the numbers and the nearest possible ones are named.
        IntegrityError: Needed data is missing in the source.
        DestinationError: The destination cannot be written.
    """
    options = (options or LegacyOptions()).resolved()
    catalog = reader.catalog
    _, notes = check_request(catalog, destination, layout, options)
    _refuse_layout(catalog, layout)
    state, options = chosen_optimizer(reader, options, functools.partial(_default_form, catalog))
    writer = _Writer(reader, layout, options, state)
    sources = dict(catalog.weights) | state.tensors
    output = ArchiveOutput(list(writer.files()))
    drops = writer.drops(sources)
    beside = files_beside(catalog, "legacy", writer.folder, layout, written={file.name for file in output.files})
    summary, facts = describe(catalog, layout, options.optimizer, writer.changed)
    return Conversion(
        command="convert",
        reader=reader,
        destination=destination,
        job=options.job(reader, sources, output.routes, [*output.files, *beside.files], seals=output, drops=drops),
        folder=writer.folder,
        extra_files={TRACKER: tracker(writer.folder)},
        dropped=(*writer.dropped, *beside.dropped),
        notes=(*notes, *end_of_documents(drops, catalog.args), *state.notes, *writer.notes()),
        summary=(*summary, *beside.summary),
        facts=facts,
        advice=(f"start the job with {writer.flags(destination)}",),
        next_step=f"distckpt inspect {quoted(destination)}",
        options=options,
        proof=Masters.needed(reader, state.tensors),
    )


def _default_form(catalog: Catalog, state: OptimizerState, _: str) -> str:
    """The form that the job would have written: as its arguments say."""
    if state.recognised.layer_wise:
        raise RequestError(
            f"the optimizer is {state.recognised}: files layer_wise_optimizer_N.pt are not written",
            hint="--optimizer plain: for a job of the same optimizer that is not layer-wise; none leaves it out",
        )
    return "distributed" if catalog.args.get("use_distributed_optimizer") is True else "plain"


def _refuse_layout(catalog: Catalog, layout: Layout) -> None:
    if layout.expert_tp != layout.tp and any(map(is_expert, catalog.weights)):
        raise RequestError(
            f"the legacy format cannot hold experts divided over --etp {layout.expert_tp} beside --tp {layout.tp}",
            details=["its folders are numbered by tp: ranks with other parts of the experts would share a file"],
            hint="leave --etp out, or --to torch_dist",
        )


class _Writer:
    """Makes the files of all ranks."""

    def __init__(self, reader: Reader, layout: Layout, options: LegacyOptions, state: OptimizerState) -> None:
        self._reader, self._layout, self._options = reader, layout, options
        catalog = self._catalog = reader.catalog
        self.folder = iteration_folder(catalog)
        self.dropped: list[tuple[str, str]] = []
        self._args = catalog.args
        self._layer_wise = state.recognised.layer_wise
        self._named = str(catalog.args.get("optimizer")).removeprefix("dist_")
        self.changed: dict[str, tuple[Any, Any]] = {}
        self._module_order = _module_order(reader, options, state)
        self._model = LocalModel.of(catalog, layout, order=self._module_order, vocab_size=options.vocab_size)
        self._keep_rng = rng_fits(catalog, layout, options.rng, self.dropped)
        self._archive, tree = open_common(reader)
        self._tree, lost, self._notes = as_megatron_lm(catalog, tree, optimizer=bool(state.tensors))
        self.dropped += lost
        self._objects = self._stored_objects()
        # TransformerEngine's norms have an extra state since version 2; a job with version 1 refuses a file that has it
        states = [name for name in self._objects if name.endswith("._extra_state")]
        self._norm_states = not states or any(_NORM.search(name) for name in states)
        self._completed = keeps_remainders(state.tensors)
        self._common = self._prepare_common()
        distributed = options.optimizer == "distributed"
        self._optimizers = (
            RankOptimizers(reader, state, self._model, self._args, distributed=distributed) if state.tensors else None
        )

    # ------------------------------------------------------------------ what all ranks share

    def _prepare_common(self) -> dict[str, Node]:
        """Changes the training arguments, and gives what else goes into every rank's file."""
        args = self._tree.get("args")
        if isinstance(args, Obj):
            values = layout_arguments(fields(args), self._layout, self._padded_vocab())
            self.changed = change_arguments(args, values | dict(self._format_arguments(fields(args))))
            self._args = fields(args)
        carried = [key for key in self._tree if key in _COMMON]
        if isinstance(args, Obj):  # Megatron-LM's own
            carried += [key for key in self._tree if key not in (*_COMMON, *_REPLACED)]
        left = [key for key in self._tree if key not in (*carried, *_REPLACED)]
        self.dropped += [(str(key), "Megatron-LM cannot hold it") for key in left]
        if "rerun_state_machine" in self._tree:
            self.dropped.append(("rerun_state_machine", "belongs to the ranks of the job that saved"))
        return {key: self._tree[key] for key in carried}

    def _format_arguments(self, args: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        distributed, order = self._options.optimizer == "distributed", self._module_order
        values = {"ckpt_format": "torch", "use_dist_ckpt": False}
        if distributed or self._options.optimizer == "plain":
            values["use_distributed_optimizer"] = distributed
        if self._options.optimizer == "plain" and self._layer_wise:
            values |= {"use_layer_wise_distributed_optimizer": False, "optimizer": self._named}
        if self._options.spec:
            values["transformer_impl"] = "transformer_engine" if order.fused_norms else "local"
        if self._options.experts:
            values["moe_grouped_gemm"] = order.experts != "sequential"
            values["moe_use_legacy_grouped_gemm"] = order.experts == "stacked"
        yield from ((name, value) for name, value in values.items() if name in args)
        yield from plain_master_arguments(args).items() if self._completed else ()
        if not self._keep_rng:
            yield "no_save_rng", True
        if self._options.optimizer == "none":
            yield "no_save_optim", True

    def _padded_vocab(self) -> int | None:
        words = embedding_name(self._model.tensors)
        return self._model.tensors[words].shape[0] if words else None

    def _stored_objects(self) -> dict[str, ObjectInfo]:
        """Extra states by canonical name, random states by their key; what else there is has no place."""
        out = {}
        for info in self._catalog.objects.values():
            base = info.name.rpartition("/")[2]
            if base.endswith("._extra_state"):
                parsed = parse_key(info.name)
                out[parsed.template.format(*info.offset[: len(parsed.axes)])] = info
            elif base == "rng_state":
                out[f"rng_state {info.offset}"] = info
            elif base == "rerun_state_machine_state":
                self.dropped.append((info.key, "belongs to one rank of the job that saved"))
            elif info.name != "common_state" and not info.of_optimizer:
                self.dropped.append((info.key, "Megatron-LM's legacy format cannot hold it"))
        return out

    # ------------------------------------------------------------------ files

    def files(self) -> Iterator[ArchiveFile]:
        """The files of all ranks, in order."""
        at = self._layout
        for pp in range(at.pp):
            for ep in range(at.ep):
                for tp in range(at.tp):
                    yield from self._rank_files(tp, pp, ep)

    def _rank_files(self, tp: int, pp: int, ep: int) -> Iterator[ArchiveFile]:
        folder = f"{self.folder}/{rank_folder(tp, pp, ep, self._layout.pp, self._layout.ep)}"
        chunks = [self._model.chunk(pp=pp, chunk=c, tp=tp, ep=ep) for c in range(self._layout.chunks)]
        file = ArchiveFile(f"{folder}/{MODEL}")
        file.tree = self._rank_tree(file, tp, pp, ep, chunks)
        yield file
        if self._optimizers and self._options.optimizer == "distributed":
            yield self._optimizers.flat_file(f"{folder}/{OPTIMIZER}", pp, tp, ep)

    def _rank_tree(
        self, file: ArchiveFile, tp: int, pp: int, ep: int, chunks: list[list[LocalTensor]]
    ) -> dict[str, Node]:
        rank = self._layout.expert_rank(tp, ep, 0, pp)
        tree: dict[str, Node] = {}
        if isinstance(self._tree.get("args"), Obj):
            tree["args"] = copy.deepcopy(self._tree["args"])
            if "rank" in self._args:
                set_field(tree["args"], "rank", rank)
        tree["checkpoint_version"] = 3.0
        tree["iteration"] = self._catalog.iteration or 0
        for number, chunk in enumerate(chunks):
            entries = self._model_entries(file, chunk, pp, number)
            tree["model" if len(chunks) == 1 else f"model{number}"] = model_state(file, entries)
        if self._optimizers:
            tree["optimizer"] = self._optimizers.model_file_entry(file, chunks)
        common = file.adopt(copy.deepcopy(self._common), self._archive.members)
        tree |= {key: common[key] for key in _SCHEDULE if key in common}
        if self._keep_rng:
            tree["rng_state"] = self._rng_state(file, rank)
        tree |= common
        return tree

    def _model_entries(
        self, file: ArchiveFile, chunk: list[LocalTensor], pp: int, number: int
    ) -> Iterator[tuple[str, LocalTensor | Node]]:
        for name, value in with_extra_states(chunk, self._module_order, output=self._model.has_output(pp, number)):
            if not isinstance(value, str):
                yield name, value
            elif self._options.extra_state != "drop" and value in self._objects:
                yield name, self._adopt_object(file, self._objects[value])
            elif self._options.extra_state == "fill" and (self._norm_states or not _NORM.search(value)):
                yield name, file.literal(dtype("uint8"), (0,), b"")

    def _adopt_object(self, file: ArchiveFile, info: ObjectInfo) -> Node:
        """The value of a stored object, with its tensors in the file."""
        refuse_damaged_object(self._catalog, info.key)
        stored = self._reader.stored_object(info.key)
        return file.adopt(stored.tree, stored.members)

    def _rng_state(self, file: ArchiveFile, rank: int) -> Node:
        at = self._layout.coordinates(rank)
        grid = next(info.grid for name, info in self._objects.items() if name.startswith("rng_state"))
        value = self._adopt_object(file, self._objects[f"rng_state {(at.pp, at.tp, at.dp_cp)[: len(grid)]}"])
        return value if isinstance(value, list) else [value]

    # ------------------------------------------------------------------ what is left out, and what is reported

    def drops(self, sources: Mapping[str, TensorInfo]) -> list[Drop]:
        """Rows of the vocabulary that the source has and the target does not; notes what is left out.

        Raises:
            RequestError: A parameter lacks its optimizer state.
        """
        trained = self._optimizers.trained if self._optimizers else set()
        lost = sorted(n for n in self._catalog.weights if self._model.trains(n) and n not in trained)
        if lost and self._optimizers and self._options.optimizer == "distributed":
            raise RequestError(
                f"a distributed optimizer needs state that {counted(len(lost), 'parameter', verb='lacks/lack')}",
                details=listed_lines(folded(lost), 8),
                hint="--optimizer none",
            )
        drops = list(padding_rows(sources, lambda name, _: self._model.tensors[name].shape[0]))
        self.dropped += [(drop.source, drop.reason) for drop in drops if drop.source in self._catalog.weights]
        if not self._optimizers:
            self.dropped += unwanted_state(self._catalog)
        return drops

    def notes(self) -> list[str]:
        """Sentences a person should read before it begins."""
        out = list(self._notes)
        if not self._keep_rng:
            out.append("random states are not carried over: the job must be started with --no-load-rng")
        if self._optimizers and self._options.optimizer == "distributed" and self._optimizers.buckets_matter():
            overlap = f"with --overlap-grad-reduce, the same --ddp-bucket-size and --dp {self._layout.dp}"
            cut = overlap if self._args.get("overlap_grad_reduce") is True else "without --overlap-grad-reduce"
            out.append(f"distrib_optim.pt fits only a job that cuts the same buckets: {cut}")
        if (
            self._options.extra_state != "drop"
            and self._module_order.experts != "sequential"
            and self._catalog.args.get("fp8")
            and any(".experts." in name for name in self._objects)
        ):
            out.append("FP8 state of grouped experts: each rank's first expert speaks for all of them")
        return out

    def flags(self, root: Path) -> str:
        """What Megatron-LM has to be told to load the result."""
        groups = self._optimizers.groups if self._optimizers else None
        optimizer = optimizer_flags(self._args, groups, self._options.optimizer)
        rng = [] if self._keep_rng else ["--no-load-rng"]
        return job_flags(root, self._layout, "--ckpt-format torch", *optimizer, *rng)


def _module_order(reader: Reader, options: LegacyOptions, state: OptimizerState) -> Order:
    """How the job's modules are made: as asked, as flat buckets or names of modules show, or as the arguments say."""
    order = state.candidate.order if state.candidate else reader.modules or likely_order(reader.catalog)
    if order.fused_down:
        raise RequestError(
            "legacy checkpoints of jobs with --mla-down-proj-fusion are not written",
            hint="--to torch_dist: such a job loads it",
        )
    if options.spec:
        order = replace(order, fused_norms=options.spec == "te")
    return replace(order, experts=options.experts or order.experts)
