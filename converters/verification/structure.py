"""Checks of a checkpoint without tensor data: everything required exists exactly once."""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from typing import TYPE_CHECKING

from converters.catalog import model_section
from converters.chunks import Part
from converters.errors import DistckptError, IntegrityError, RequestError
from converters.formats.links import escape
from converters.megatron.damage import stored_chunks
from converters.megatron.heterogeneous import ENCODED
from converters.megatron.model_args import ModelArgs
from converters.megatron.optimizer_parts import optimizer_parts
from converters.names import StateName, fold, folded, listed, printable, state_names
from converters.verification.hugging_face import check_hugging_face
from converters.verification.provenance import check_provenance
from converters.verification.unknown import report_unknown
from converters.words import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from converters.catalog import Catalog, ObjectInfo, TensorInfo
    from converters.verification.report import Check

_INDEXED = re.compile(r"(.*?\.?(?:layers|layer|blocks|h))\.(\d+)\.(.*)", re.DOTALL)
_FATAL = ("metadata.json is missing", "common.pt is missing")  # Megatron opens no checkpoint without them
_NO_ARGUMENTS = "restore common.pt from a copy; distckpt convert CKPT OUT --to safetensors keeps the weights without it"
_NUMBER = re.compile(r"\.(\d+)\.")
_DIGITS = 5
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.*)", re.DOTALL)


def check_structure(check: Check, catalog: Catalog) -> None:
    """Reports missing, extra and contradictory files, shards, layers and arguments.

    Args:
        check: Where it is noted.
        catalog: What the checkpoint holds.
    """
    for problem in catalog.problems:
        fatal = problem.severity == "error" or problem.message.startswith(_FATAL)
        note = check.error if fatal else check.leave if problem.severity == "unknown" else check.warn
        hint = _NO_ARGUMENTS if problem.message.startswith("common.pt is missing") else None
        note(problem.message, file=problem.file, tensors=problem.tensors, hint=hint)
    for info in catalog.files:
        if info.name.endswith((".metadata.tmp", ".partial", ".tmp")):
            check.warn(f"{printable(info.name)} is a temporary file: a save was interrupted here", file=info.name)
        if info.records and info.size is not None and info.size > info.needed:
            text = f"{printable(info.name)} goes on for {info.size - info.needed:,} bytes behind its last record"
            check.warn(f"{text}: the rest of a longer file?", file=info.name)
    _check_links(check, catalog)
    check_provenance(check, catalog)
    reported = {name for problem in catalog.problems for name in problem.tensors}
    for name, tensor in catalog.tensors.items():
        if name not in reported and not _is_plain(tensor):
            _check_tiling(check, tensor)
    for key, stored in catalog.objects.items():
        if not stored.file:
            check.error(f"the object {printable(key)} has no record", needed="a record", found="none")
    _check_grids(check, catalog.objects.values())
    _check_census(check, catalog)
    _check_optimizer_names(check, catalog)
    report_unknown(check, catalog)
    _check_args(check, catalog)
    records = sum(info.records for info in catalog.files)
    check.summary = (
        f"{counted(len(catalog.tensors), 'tensor')} stored once, {counted(len(catalog.objects), 'object')}, "
        f"{counted(records, 'record')} in {counted(sum(1 for info in catalog.files if info.records), 'file')}"
    )
    described = check_hugging_face(check, catalog)
    check.summary += f"; {described}" if described else ""


def _check_links(check: Check, catalog: Catalog) -> None:
    """A file that is a link to something elsewhere is not part of what was saved, and is not read."""
    folder = catalog.path if catalog.path.is_dir() else catalog.path.parent
    files = () if catalog.format == "zarr" else catalog.files  # whose reader follows no link
    for info in (info for info in files if info.role != "other" or not catalog.megatron):  # others are not read
        target = escape(folder / info.name)
        if target is not None:
            text = f"{printable(info.name)} is a link to {printable(target)}, outside of the checkpoint"
            hint = "distckpt verify CKPT --follow-links reads it, if you trust where it leads"
            check.error(text, file=info.name, needed="a file", found="a link", hint=hint)


def _is_plain(tensor: TensorInfo) -> bool:
    """Whether its pieces are those of one stored array, which the reader has checked as a whole."""
    return len(tensor.parts) == 1 and isinstance(tensor.parts[0], Part) and tensor.parts[0].shift is None


def _check_tiling(check: Check, tensor: TensorInfo) -> None:
    try:
        stored_chunks(tensor)
    except IntegrityError as error:
        check.error(printable(error.message), tensors=(tensor.name,))


def _check_grids(check: Check, objects: Iterable[ObjectInfo]) -> None:
    """Every shard of an object's grid is there, once: one `_extra_state` for each layer, one random state for each rank."""
    shards: dict[str, list[ObjectInfo]] = defaultdict(list)
    for stored in objects:
        shards[stored.name].append(stored)
    for name, members in shards.items():
        grids, name_shown = {item.grid for item in members}, printable(name)
        if len(grids) > 1:
            listed = " and ".join(str(list(grid)) for grid in sorted(grids)[:4])
            check.error(f"the shards of {name_shown} are of different grids: {listed}", needed="one grid", found=listed)
            continue
        (grid,) = grids
        outside = [o.offset for o in members if len(o.offset) != len(grid) or any(map(int.__ge__, o.offset, grid))]
        if outside:
            check.error(f"shard {list(outside[0])} of {name_shown} lies outside its grid {list(grid)}")
        elif len(members) != math.prod(grid):
            lost = _missing(grid, {o.offset for o in members})
            text = f"{name_shown} has {len(members):,} of its {math.prod(grid):,} shards; {list(lost)} is missing"
            check.error(text, needed=counted(math.prod(grid), "shard"), found=counted(len(members), "shard"))


def _missing(grid: tuple[int, ...], present: set[tuple[int, ...]]) -> tuple[int, ...]:
    return next(at for at in itertools.product(*map(range, grid)) if at not in present)


def _check_census(check: Check, catalog: Catalog) -> None:
    """Layers and experts are counted 0 to N - 1, and no layer lacks a tensor that all layers of its kind have."""
    layers: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    experts: dict[str, set[int]] = defaultdict(set)
    for name in catalog.weights:
        expert = _EXPERT.fullmatch(name)
        if any(len(number) > _DIGITS for number in _NUMBER.findall(name)):
            check.error(f"{printable(name)[:200]}: no model has so many layers or experts", tensors=(name,))
            continue
        if expert:
            experts[f"{expert[1]}.*.{expert[3]}"].add(int(expert[2]))
            name = f"{expert[1]}.*.{expert[3]}"
        layer = _INDEXED.fullmatch(name)
        if layer:
            layers[layer[1]][int(layer[2])].add(layer[3])
    for prefix, by_layer in layers.items():
        missing_numbers = sorted(set(range(max(by_layer) + 1)) - set(by_layer))
        if missing_numbers:
            text = f"{printable(prefix)}: {_numbered(missing_numbers)} of {max(by_layer) + 1} are missing"
            check.error(text, needed=counted(max(by_layer) + 1, "layer"), found=counted(len(by_layer), "layer"))
        for number, less, lacking in () if _states_layers(catalog) else _incomplete(by_layer):
            names = tuple(f"{prefix}.{number}.{suffix}" for suffix in sorted(lacking))
            check.error(f"{listed(names, 1)} is missing; layer {less} has it", tensors=names)
    count = {max(numbers) + 1 for numbers in experts.values()}
    for name, numbers in experts.items():
        most = max(count)
        missing_numbers = sorted(set(range(most)) - numbers)
        if missing_numbers:
            text = f"{printable(name)}: {_numbered(missing_numbers)} of {most} are missing"
            check.error(text, needed=counted(most, "expert"), found=counted(len(numbers), "expert"))


def _states_layers(catalog: Catalog) -> bool:
    """Whether arguments or config.json say of each layer what it lacks, with which its tensors are compared."""
    options = {**model_section(catalog.config), **catalog.args}
    return any(options.get(name) for name in (ENCODED, "block_configs"))


def _numbered(numbers: list[int]) -> str:
    return fold([f"x.{n}" for n in numbers])[0][0].removeprefix("x.") if len(numbers) > 1 else str(numbers[0])


def _incomplete(layers: dict[int, set[str]]) -> Iterator[tuple[int, int, set[str]]]:
    """Layers with a set of tensors that no other has and that is part of another's: `(layer, other, what it lacks)`.

    Dense layers before experts, or attention between state-space layers, have other tensors, not fewer.
    """
    kinds: dict[frozenset[str], list[int]] = defaultdict(list)
    for number, suffixes in layers.items():
        kinds[frozenset(suffixes)].append(number)
    if len(layers) < 3:  # of two, who is to say which one is right
        return
    for kind, members in kinds.items():
        larger = [other for other in kinds if kind < other and len(kinds[other]) > 1]
        if len(members) == 1 and larger:
            best = max(larger, key=lambda other: len(kinds[other]))
            yield members[0], kinds[best][0], set(best - kind)


def _check_optimizer_names(check: Check, catalog: Catalog) -> None:
    """Every parameter has the states that its optimizer has for each."""
    recognised = optimizer_parts(catalog)
    for missing in recognised.lost if catalog.megatron else ():
        if missing.why:  # the files are as Megatron wrote them
            check.warn(str(missing))
        else:
            check.error(str(missing), tensors=missing.keys)
    if recognised.doubt:
        check.warn(recognised.doubt, tensors=recognised.stateless)
    if catalog.megatron:
        return
    states: dict[str, set[str]] = defaultdict(set)
    for _, (state, parameter) in state_names(catalog.tensors):
        states[state].add(parameter)
    first, second = states.get("exp_avg", set()), states.get("exp_avg_sq", set())
    complete = frozenset[str]().union(*(part.names for part in recognised.parts))
    for state, lost in (("exp_avg_sq", first - second - complete), ("exp_avg", second - first - complete)):
        if lost and first and second:  # Lion has no second moment
            names = tuple(str(StateName(state, name)) for name in sorted(lost))
            alike = {_NUMBER.sub(".*.", name) for name in first & second}
            if catalog.args.get("optimizer") != "adam" and alike.isdisjoint(_NUMBER.sub(".*.", name) for name in lost):
                text = f"{printable(fold(names)[0][0])} is not stored: whether the optimizer has one is not known"
                check.leave(text, tensors=names)
                continue
            text = f"{listed(folded(names), 1)} is missing, the other moment is there"
            check.error(text, tensors=names)


def _check_args(check: Check, catalog: Catalog) -> None:
    try:
        args = ModelArgs.from_catalog(catalog)
        contradictions = args.contradictions(catalog)
    except RequestError as error:  # arguments of a model that is none of ours: nothing to compare
        check.warn(f"the arguments were not compared with the tensors: {printable(error.message)}")
        return
    except DistckptError as error:
        check.error(f"the arguments are invalid: {printable(error.message)}")
        return
    for text in args.unknown:
        check.warn(f"not understood, so not compared with the tensors: {printable(text)}")
    for text in contradictions:
        check.error(f"the arguments do not fit the tensors: {printable(text)}")


def is_tied(catalog: Catalog) -> bool:
    """Whether the output layer is the embedding, by what the arguments say."""
    stated = catalog.args.get("untie_embeddings_and_output_weights")
    if stated is None:
        stated = catalog.config.get("untie_embeddings_and_output_weights")
    shared = catalog.config.get("share_embeddings_and_output_weights", catalog.config.get("tie_word_embeddings"))
    return stated is False or (stated is None and shared is True)
