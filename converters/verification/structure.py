"""What can be said of a checkpoint without reading its payload: whether all that should be there is, once."""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from typing import TYPE_CHECKING

from converters.catalog import Part
from converters.errors import DistckptError, IntegrityError, RequestError
from converters.facts.damage import check_stored
from converters.facts.model_args import ModelArgs
from converters.formats.folder import escape
from converters.names import fold, printable
from converters.verification.hugging_face import check_hugging_face
from converters.verification.origin import check_origin

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from converters.catalog import Catalog, ObjectInfo, TensorInfo
    from converters.verification.report import Check

__all__ = ["check_structure", "is_tied"]

_INDEXED = re.compile(r"(.*?\.?(?:layers|layer|blocks|h))\.(\d+)\.(.*)", re.DOTALL)
_FATAL = ("metadata.json is missing", "common.pt is missing")  # Megatron opens no checkpoint without them
_NO_ARGUMENTS = "restore common.pt from a copy; distckpt convert CKPT OUT --to safetensors keeps the weights without it"
_NUMBER = re.compile(r"\.(\d+)\.")
_DIGITS = 5
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.*)", re.DOTALL)


def check_structure(check: Check, catalog: Catalog) -> None:
    """Notes what is missing, too much, or contradicts itself.

    Args:
        check: Where it is noted.
        catalog: What the checkpoint holds.
    """
    for problem in catalog.problems:
        fatal = problem.severity == "error" or problem.message.startswith(_FATAL)
        tell = check.error if fatal else check.warn
        hint = _NO_ARGUMENTS if problem.message.startswith("common.pt is missing") else None
        tell(problem.message, file=problem.file, tensors=problem.tensors, hint=hint)
    for info in catalog.files:
        if info.name.endswith((".metadata.tmp", ".partial", ".tmp")):
            check.warn(f"{printable(info.name)} is a temporary file: a save was interrupted here", file=info.name)
        if info.records and info.size is not None and info.size > info.needed:
            text = f"{printable(info.name)} goes on for {info.size - info.needed:,} bytes behind its last record"
            check.warn(f"{text}: the rest of a longer file?", file=info.name)
    _check_links(check, catalog)
    check_origin(check, catalog)
    known = {name for problem in catalog.problems for name in problem.tensors}
    for name, tensor in catalog.tensors.items():
        if name not in known and not _is_plain(tensor):
            _check_tiling(check, tensor)
    for key, stored in catalog.objects.items():
        if not stored.file:
            check.error(f"the object {printable(key)} has no record", needed="a record", found="none")
    _check_grids(check, catalog.objects.values())
    _check_census(check, catalog)
    _check_optimizer_names(check, catalog)
    _check_args(check, catalog)
    records = sum(info.records for info in catalog.files)
    check.summary = (
        f"{len(catalog.tensors):,} tensors stored once, {len(catalog.objects):,} objects, {records:,} records in "
        f"{sum(1 for info in catalog.files if info.records):,} files"
    )
    described = check_hugging_face(check, catalog)
    check.summary += f"; {described}" if described else ""


def _check_links(check: Check, catalog: Catalog) -> None:
    """A file that is a link to something elsewhere is not part of what was saved, and is not read."""
    folder = catalog.path if catalog.path.is_dir() else catalog.path.parent
    for info in catalog.files if catalog.format != "zarr" else ():  # whose reader follows no link
        target = escape(folder / info.name)
        if target is not None:
            text = f"{printable(info.name)} is a link to {printable(target)}, outside of the checkpoint"
            check.error(text, file=info.name, needed="a file", found="a link")


def _is_plain(tensor: TensorInfo) -> bool:
    """Whether its pieces are those of one stored array, which the reader has checked as a whole."""
    return len(tensor.parts) == 1 and isinstance(tensor.parts[0], Part) and tensor.parts[0].shift is None


def _check_tiling(check: Check, tensor: TensorInfo) -> None:
    try:
        check_stored(tensor)
    except IntegrityError as error:
        check.error(printable(error.message), tensors=(tensor.name,))


def _check_grids(check: Check, objects: Iterable[ObjectInfo]) -> None:
    """Every shard of an object's grid is there, once: one `_extra_state` for each layer, one random state for each rank."""
    shards: dict[str, list[ObjectInfo]] = defaultdict(list)
    for stored in objects:
        shards[stored.name].append(stored)
    for name, found in shards.items():
        grids, shown = {item.grid for item in found}, printable(name)
        if len(grids) > 1:
            listed = " and ".join(str(list(grid)) for grid in sorted(grids)[:4])
            check.error(f"the shards of {shown} are of different grids: {listed}", needed="one grid", found=listed)
            continue
        (grid,) = grids
        outside = [o.offset for o in found if len(o.offset) != len(grid) or any(map(int.__ge__, o.offset, grid))]
        if outside:
            check.error(f"shard {list(outside[0])} of {shown} lies outside its grid {list(grid)}")
        elif len(found) != math.prod(grid):
            lost = _missing(grid, {o.offset for o in found})
            text = f"{shown} has {len(found):,} of its {math.prod(grid):,} shards; {list(lost)} is missing"
            check.error(text, needed=f"{math.prod(grid)} shards", found=f"{len(found)} shards")


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
    for prefix, found in layers.items():
        lost = sorted(set(range(max(found) + 1)) - set(found))
        if lost:
            text = f"{printable(prefix)}: {_numbered(lost)} of {max(found) + 1} are missing"
            check.error(text, needed=f"{max(found) + 1} layers", found=f"{len(found)} layers")
        for number, less, lacking in _incomplete(found):
            names = tuple(f"{prefix}.{number}.{suffix}" for suffix in sorted(lacking))
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            check.error(f"{printable(names[0])}{more} is missing; layer {less} has it", tensors=names)
    count = {max(numbers) + 1 for numbers in experts.values()}
    for name, numbers in experts.items():
        most = max(count)
        lost = sorted(set(range(most)) - numbers)
        if lost:
            text = f"{printable(name)}: {_numbered(lost)} of {most} are missing"
            check.error(text, needed=f"{most} experts", found=f"{len(numbers)} experts")


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
    """Both moments are there for the same parameters."""
    states: dict[str, set[str]] = defaultdict(set)
    for name in catalog.tensors:
        if name.startswith("optimizer.state."):
            state, _, parameter = name.removeprefix("optimizer.state.").partition(".")
            states[state].add(parameter)
    first, second = states.get("exp_avg", set()), states.get("exp_avg_sq", set())
    for state, lost in (("exp_avg_sq", first - second), ("exp_avg", second - first)):
        if lost and first and second:  # Lion has no second moment, for any parameter
            names = tuple(f"optimizer.state.{state}.{name}" for name in sorted(lost))
            folded = fold(names)
            more = f" and {len(folded) - 1} more" if len(folded) > 1 else ""
            text = f"{printable(folded[0][0])}{more} is missing, the other moment is there"
            check.error(text, tensors=names)


def _check_args(check: Check, catalog: Catalog) -> None:
    try:
        found = ModelArgs.from_catalog(catalog).contradictions(catalog)
    except RequestError as error:  # arguments of a model that is none of ours: nothing to compare
        check.warn(f"the arguments were not compared with the tensors: {printable(error.message)}")
        return
    except DistckptError as error:
        check.error(f"the arguments make no sense: {printable(error.message)}")
        return
    for text in found:
        check.error(f"the arguments do not fit the tensors: {printable(text)}")


def is_tied(catalog: Catalog) -> bool:
    """Whether the output layer is the embedding, by what the arguments say."""
    stated = catalog.args.get("untie_embeddings_and_output_weights")
    if stated is None:
        stated = catalog.config.get("untie_embeddings_and_output_weights")
    shared = catalog.config.get("share_embeddings_and_output_weights", catalog.config.get("tie_word_embeddings"))
    return stated is False or (stated is None and shared is True)
