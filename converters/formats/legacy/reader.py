"""Megatron-LM's legacy checkpoints (`--ckpt-format torch`, the only format before 2024): one file for each rank.

Layers and experts are counted within the rank that holds them, tensors are the rank's own parts; here they get the names
and the places that they have in the whole model.

    mp_rank_00_001/model_optim_rng.pt                    catalog
      model                                        ->
        decoder.layers.0.mlp.linear_fc1.weight            decoder.layers.1.mlp.linear_fc1.weight
          [gate of rank 0; up of rank 0]                    box (0, 0), (24, 32) and box (48, 0), (24, 32)

A replicated tensor is taken from tensor-parallel rank 0, a dense one from expert-parallel rank 0, an embedding that two
stages share from the first.

Sources: megatron/training/checkpointing.py (`save_checkpoint`, `get_checkpoint_name`), Megatron-LM v2.0 to core_v0.16.1.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from converters.box import Box
from converters.catalog import Catalog, FileInfo, ObjectInfo, Problem, TensorInfo
from converters.chunks import FlatPart
from converters.errors import DamagedFileError, FormatError, RequestError, UnsupportedError
from converters.formats.canonical import object_info
from converters.formats.common_state import Archive
from converters.formats.containers.archive import PtFile, StorageReader, Storages
from converters.formats.containers.unread import storages, unread_tensors
from converters.formats.folder import exists, walk
from converters.formats.legacy.grid import MODEL, OPTIMIZER, find_grid, rank_folders
from converters.formats.legacy.groups import common_optimizer
from converters.formats.legacy.model import Rank, WholeModel
from converters.formats.legacy.optimizer import (
    dealt_members,
    locate_flat,
    locate_plain,
    optimizer_entries,
    plain_members,
)
from converters.formats.legacy.rank_model import CHUNK, RankModel
from converters.formats.megatron import common_facts, find_framework
from converters.megatron.buffers import Misfit, Rules
from converters.megatron.flat_index import FlatIndex
from converters.megatron.optimizer_chain import is_expert
from converters.megatron.optimizer_parts import torch_state
from converters.names import MASTER, StateName, listed, natural_key, printable, state_names
from converters.torchzip.tensor_refs import tensors_in
from converters.words import counted

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from converters.formats.legacy.grid import Grid
    from converters.megatron.layout import Layout
    from converters.pickles.nodes import Node

_AXES = ("tensor", "pipeline", "expert")  # of `Rank`


class LegacyReader(StorageReader):
    """An open legacy checkpoint."""

    name: ClassVar[str] = "legacy"

    def __init__(
        self,
        folder: Path,
        grid: Grid,
        files: Mapping[Rank, PtFile],
        flat: Mapping[Rank, PtFile],
        layers: Mapping[Rank, Sequence[PtFile]],
    ) -> None:
        self._folder, self._grid, self._model_files, self._flat_files = folder, grid, files, flat
        self._layer_files = layers
        self._storages = Storages(folder)
        self._archives = [*files.values(), *flat.values(), *(file for mine in layers.values() for file in mine)]
        for file in self._archives:
            self._storages.add(file)
        self.files = [folder / file.name for file in self._archives]
        self._problems: list[Problem] = []
        self._objects: dict[str, tuple[ObjectInfo, PtFile, Node]] = {}
        self._common_file = max(files.values(), key=lambda f: len(optimizer_entries(f.tree.get("optimizer"))))
        self.catalog = self._catalog()

    @classmethod
    def open(cls, folder: Path) -> LegacyReader:
        """Reads directory and pickle of every file."""
        names = rank_folders(folder)
        if not names:
            raise FormatError(f"{printable(str(folder))} has no mp_rank_* folders")
        _refuse_old_files(folder, names)
        first = _read_model(folder, names[0])
        args = common_facts(first.tree).args
        keys = [key for chunk in RankModel.of_file(first).chunks for key in chunk]
        ends = any(key.startswith(("output_layer.", "decoder.final")) for key in keys)
        grid = find_grid(names, args, first_has_end=ends, experts=any(map(is_expert, keys)))
        files, flat, layers = {}, {}, {}
        for rank, name in grid.folders.items():
            files[rank] = first if name == names[0] else _read_model(folder, name)
            if exists(folder / name / OPTIMIZER):
                flat[rank] = PtFile.read(folder, f"{name}/{OPTIMIZER}")
            if mine := list(_layer_files(folder / name)):
                layers[rank] = [PtFile.read(folder, f"{name}/{file}") for file in mine]
        _refuse_mixture(folder, files)
        try:
            return cls(folder, grid, files, flat, layers)
        except RequestError as error:  # what a layout cannot be is a request elsewhere; here a file says it
            raise FormatError(error.message, details=error.details, hint=error.hint, tensor=error.tensor) from error

    def stored_object(self, key: str) -> Archive:
        """See `Reader`: a part of a rank's file."""
        _, file, node = self._objects[key]
        return Archive.of_object(node, self._storages_of(file, node), key)

    def common_state(self) -> Archive:
        """See `Reader`: what a rank's file holds beside the model and the optimizer's state."""
        file = PtFile.read(self._folder, self._common_file.name)
        tree = _common_tree(file, self._folder)
        small = {name: file.contents(self._folder, name) for name in file.members if not name.startswith("data")}
        return Archive(tree, {**small, **self._storages_of(file, tree)}, file.name)

    def _storages_of(self, file: PtFile, node: Node) -> dict[str, bytes]:
        return {key: file.contents(self._folder, key) for key in sorted(storages(node))}

    def _catalog(self) -> Catalog:
        facts = common_facts(self._common_file.tree)
        self._args = facts.args
        ranks = {rank: RankModel.of_file(file) for rank, file in self._model_files.items()}
        model = WholeModel(self._grid, ranks, facts.args, self._storages)
        self.modules = model.modules
        tensors = model.tensors()
        for key, rank, node in model.extra_states:
            self._add_object(f"{key}/shard_0_1", self._model_files[rank], node)
        self._add_rng(model)
        tensors |= self._optimizer(model)
        tensors = {name: tensors[name] for name in sorted(tensors, key=natural_key)}
        problems = [Problem("warning", text) for text in (*self._grid.notes, *model.warnings)]
        common = _common_tree(self._common_file, self._folder)
        carried = {self._common_file.position: common}
        problems += self._misplaced(tuple(tensors), model.layout)
        problems += unread_tensors(self._archives, self._storages.arrays, carried)
        framework, config = find_framework(self._folder, facts, [])
        return Catalog(
            path=self._folder,
            format=self.name,
            framework="Megatron-LM" if framework.startswith(("Megatron-Core", "torch")) else framework,
            tensors=tensors,
            objects={key: info for key, (info, _, _) in self._objects.items()},
            args=facts.args,
            config=config,
            common=common,
            iteration=_iteration(self._common_file.tree),
            files=self._file_infos(),
            problems=(*problems, *self._problems),
            details=model.details,
            copies=model.copies(),
        )

    def _misplaced(self, affected: tuple[str, ...], layout: Layout) -> list[Problem]:
        """Files that another rank wrote: each holds the arguments of its own, its number in the job among them."""
        stated = {at: common_facts(file.tree).args.get("rank") for at, file in self._model_files.items()}
        if len(set(stated.values())) < 2:
            return []  # a converter's work, perhaps
        out = []
        for at, file in self._model_files.items():
            number = stated[at]
            if type(number) is not int or not 0 <= number < layout.world_size:
                continue
            coordinates = layout.coordinates(number)
            written = (coordinates.tp, coordinates.pp, coordinates.ep)
            for axis, expected, stated_rank in zip(_AXES, at, written, strict=True):
                if expected != stated_rank:
                    text = f"{file.name} is of {axis}-parallel rank {stated_rank}, not {expected}: files were swapped"
                    out.append(Problem("error", text, file.name, affected))
        return out

    def _add_object(self, key: str, file: PtFile, node: Node) -> None:
        size = sum(file.members[f"data/{ref.storage}"].size for _, ref in tensors_in(node, file.name))
        self._objects[key] = (object_info(key, file.name, 0, size, wrapped=False), file, node)

    def _file_infos(self) -> tuple[FileInfo, ...]:
        out = self._stored_files()
        listed = {file.name for file in self._storages.files}
        for name, state in walk(self._folder):
            if name not in listed:
                out.append(FileInfo(name, state.size, role="other"))
        return tuple(out)

    def _add_rng(self, model: WholeModel) -> None:
        """Random states, in the grid that torch_dist has: (pp, tp), and dp as well with expert parallelism."""
        grid, layout = self._grid, model.layout
        if any(_rng_states(file.tree) is None for file in self._model_files.values()):
            return
        if grid.ep > 1 and layout.edp > 1:
            text = f"only {grid.ep} of {layout.dp} random states of each stage were saved; they are left out"
            self._problems.append(Problem("warning", text))
            return
        sizes = (grid.pp, grid.tp) if grid.ep == 1 else (grid.pp, grid.tp, grid.ep)
        for (tp, pp, ep), file in sorted(
            self._model_files.items(), key=lambda item: (item[0][1], item[0][0], item[0][2])
        ):
            offset, node = (pp, tp, ep)[: len(sizes)], _rng_states(file.tree)
            key = f"rng_state/shard_{'.'.join(map(str, offset))}_{'.'.join(map(str, sizes))}"
            self._add_object(key, file, node)

    def _optimizer(self, model: WholeModel) -> dict[str, TensorInfo]:
        """The optimizer's tensors; if they cannot be told apart, as they are, with the reason among the problems."""
        try:
            return self._named_optimizer(model)
        except Misfit as error:
            raw = dict(self._raw_optimizer())
            text = " ".join([f"the optimizer state is not understood: {error.message}", *error.details])
            severity = "error" if self._lost_files() else "unknown"
            self._problems.append(Problem(severity, text, tensors=tuple(raw)))
            return raw

    def _lost_files(self) -> list[str]:
        lacking = [name for rank, name in self._grid.folders.items() if rank not in self._flat_files]
        return [f"{name}/{OPTIMIZER}" for name in lacking] if self._flat_files else []

    def _named_optimizer(self, model: WholeModel) -> dict[str, TensorInfo]:
        index = FlatIndex()
        if lacking := self._lost_files():
            raise Misfit(f"{counted(len(lacking), 'file', verb='is/are')} missing: {listed(lacking, 8)}")
        for rank, file in self._model_files.items():
            if self._flat_files:
                rules = functools.partial(self._rules, model, rank[1])
                locate_flat(self._flat_files[rank], model.owned[rank], self._storages, rules, index)
            elif self._layer_files:
                self._locate_layers(model, rank, index)
            elif any(_has_state(entry) for entry in optimizer_entries(file.tree.get("optimizer"))):
                entries = optimizer_entries(file.tree["optimizer"])
                members = plain_members(entries, model.owned[rank], self._args, file.name)
                locate_plain(entries, members, file, self._storages, index)
        if not index.pieces:
            if file.tree.get("optimizer"):
                self._problems.append(Problem("warning", f"there are param groups, but no state and no {OPTIMIZER}"))
            return {}
        out = {}
        trained = {
            name: model.shapes[name] for owned in model.owned.values() for p in owned for name, _ in p.local.segments
        }
        states = dict.fromkeys(parts.state for _, parts in state_names(index.pieces))
        for state in states:
            for name, shape in trained.items():
                key = str(StateName(state, name))
                missing = index.missing(key, shape)
                # another algorithm may train it, with other states: those that all lack are for `optimizer_parts` to tell
                has_state = state == MASTER or any(str(StateName(s, name)) in index.pieces for s in states)
                if missing and not (has_state and missing == Box.whole(shape).volume):
                    raise Misfit(f"{missing:,} elements of {key} are in no file", tensor=name)
                if not missing:
                    out[key] = index.tensor(key, shape, "optimizer")
        return out

    def _rules(self, model: WholeModel, pp: int, chunk: int, expert: bool) -> list[Rules]:
        """The rules by which buffers may have been cut, the likeliest first: the version of the writer is not known."""
        first_numel = sum(p.local.numel for p in model.owned[0, 0, 0])  # of a rank of the first pipeline stage
        job = (self._args, model.layout, lambda _: first_numel, pp, chunk)
        return [
            Rules.of(*job, experts=expert, align=align, early=early) for align in (64, 1) for early in (False, True)
        ]

    def _locate_layers(self, model: WholeModel, rank: Rank, index: FlatIndex) -> None:
        """The state of a layer-wise optimizer: each data-parallel rank has some of the parameters, and names none."""
        files, ranks = self._layer_files.get(rank, ()), model.layout.dp_cp
        if len(files) != ranks or model.layout.ep > 1 or "use_layer_wise_distributed_optimizer" in self._args:
            files_and_ranks = f"{len(files)} files layer_wise_optimizer_N.pt of {ranks} ranks"
            raise Misfit(
                f"{self._grid.folders[rank]}: {files_and_ranks}; which parameters each of them has is known for those "
                "of Megatron-Core 0.16 without expert or context parallelism"
            )
        all_members = plain_members(optimizer_entries(files[0].tree), model.owned[rank], self._args, files[0].name)
        dealt = dealt_members(all_members, ranks)
        for file, members in zip(files, dealt, strict=True):
            locate_plain(optimizer_entries(file.tree), members, file, self._storages, index)
        model_file = self._model_files[rank]  # holds those of data-parallel rank 0 once more
        copies = optimizer_entries(model_file.tree.get("optimizer"))
        locate_plain(copies, dealt[0], model_file, self._storages, FlatIndex())

    def _raw_optimizer(self) -> Iterator[tuple[str, TensorInfo]]:
        """The tensors of the optimizer as the files have them."""
        for file in self._archives:
            tree = file.tree.get("optimizer") if file.name.endswith(MODEL) else file.tree
            for number, (_, ref) in enumerate(tensors_in(tree, file.name)):
                name = f"optimizer.{file.name.partition('/')[0]}.{number}"
                array = self._storages.array(file, ref, name)
                part = FlatPart(array, ((Box.whole(ref.shape), ref.offset),))
                yield (
                    name,
                    TensorInfo(name, ref.dtype, ref.shape, "optimizer", (part,), "state of an unknown parameter"),
                )


def _layer_files(folder: Path) -> Iterator[str]:
    """What the data-parallel ranks of a layer-wise optimizer wrote, in their order."""
    for number in itertools.count():
        if not exists(folder / f"layer_wise_optimizer_{number}.pt"):
            return
        yield f"layer_wise_optimizer_{number}.pt"


def _read_model(folder: Path, name: str) -> PtFile:
    file = PtFile.read(folder, f"{name}/{MODEL}")
    if not isinstance(file.tree, dict):
        raise FormatError(f"{file.name} does not hold a dictionary, so it is not what Megatron-LM saves")
    return file


def _refuse_old_files(folder: Path, names: list[str]) -> None:
    for name in names:
        if not exists(folder / name / MODEL) and exists(folder / name / "model_rng.pt"):
            raise UnsupportedError(
                f"{name} has model_rng.pt and optim.pt, as Megatron-LM wrote them from 2022-03 to 2023-05 with the "
                "distributed optimizer; that form is not read",
                hint="load and save it once with the Megatron-LM of that time without --use-distributed-optimizer",
            )


def _refuse_mixture(folder: Path, files: Mapping[Rank, PtFile]) -> None:
    """All files must be of one iteration and one job."""
    facts = {file.name: (_iteration(file.tree), _sizes(file.tree)) for file in files.values()}
    first, (first_iteration, first_sizes) = next(iter(facts.items()))
    for name, (iteration, sizes) in facts.items():
        if iteration != first_iteration:
            text = f"two iterations are mixed: {first} is of iteration {first_iteration}, {name} of {iteration}"
            hint = "one of two saves was interrupted, or copied in part; use an earlier iteration"
            raise DamagedFileError(str(folder), {name: text}, hint=hint)
        if sizes != first_sizes:
            text = f"two jobs are mixed: {first} is of one with tp, pp, ep {first_sizes}, {name} of one with {sizes}"
            raise DamagedFileError(str(folder), {name: text}, hint="copy the folders of one save only")


def _sizes(tree: Mapping[Any, Node]) -> tuple[Node, ...]:
    args = common_facts(tree).args
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")
    return tuple(args.get(name) for name in names)


def _iteration(tree: Mapping[Any, Node]) -> int | None:
    number = next((tree[key] for key in ("iteration", "total_iters") if type(tree.get(key)) is int), None)
    return number if number is None or number >= 0 else None


def _has_state(entry: Node) -> bool:
    return isinstance(entry, Mapping) and bool(torch_state(entry).get("state"))


_RNG = ("random_rng_state", "np_rng_state", "torch_rng_state", "cuda_rng_state", "rng_tracker_states")
_NOT_COMMON = ("rng_state", "optimizer", *_RNG)


def _rng_states(tree: Mapping[Any, Node]) -> list[Node] | None:
    """A rank's random states, one for each data-parallel rank that has its own; before 2022 they lay beside the model."""
    if isinstance(tree.get("rng_state"), list):
        return list(tree["rng_state"])
    return [{key: tree[key] for key in _RNG}] if all(key in tree for key in _RNG) else None


def _common_tree(file: PtFile, folder: Path) -> dict[Any, Node]:
    """The rest of a file: what is neither model, nor tensors of the optimizer, nor random state."""
    tree = {
        key: value
        for key, value in file.tree.items()
        if not (isinstance(key, str) and (CHUNK.fullmatch(key) or key in _NOT_COMMON))
    }
    tree["checkpoint_version"] = 3.0  # rows of query, key and value lie as they do since then
    iteration = _iteration(file.tree)
    if iteration is not None:
        tree["iteration"] = iteration
    entries = [entry for entry in optimizer_entries(file.tree.get("optimizer")) if isinstance(entry, Mapping)]
    if entries:
        tree["optimizer"] = [common_optimizer(entry, file, folder) for entry in entries]
    return tree
